//! A host that fails: calls of the kernel's that return what they should not, in front of a
//! transport that is as it should be.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use failstop::pci::testing::Delegate;
use failstop::pci::transport::{DmaMemory, Iova, MapError, Transport, Unmapped};
use nix::errno::Errno;

/// What a host does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostFault {
    /// A map is refused.
    MapFails {
        /// With this.
        errno: Errno,
        /// The only one that is, counted from 1; none for all.
        only: Option<u32>,
    },
    /// An unmap is refused (EIO), and not done.
    UnmapFails,
    /// An unmap cannot be done now, ever (EBUSY).
    UnmapBusy,
    /// An unmap leaves half.
    UnmapPartial,
    /// An unmap is done, and its answer is that nothing was there.
    UnmapAbsent,
}

impl HostFault {
    const ALL: [(&'static str, Self); 10] = [
        ("host-map-fails", Self::all_maps(Errno::ENOMEM)),
        ("host-map-fails:ENOSPC", Self::all_maps(Errno::ENOSPC)),
        ("host-map-fails:EINVAL", Self::all_maps(Errno::EINVAL)),
        ("host-map-fails:1", Self::one_map(1, Errno::ENOMEM)),
        ("host-map-fails:2", Self::one_map(2, Errno::ENOSPC)),
        ("host-map-fails:3", Self::one_map(3, Errno::EINVAL)),
        ("host-unmap-fails", Self::UnmapFails),
        ("host-unmap-busy", Self::UnmapBusy),
        ("host-unmap-partial", Self::UnmapPartial),
        ("host-unmap-absent", Self::UnmapAbsent),
    ];

    const fn all_maps(errno: Errno) -> Self {
        Self::MapFails { errno, only: None }
    }

    const fn one_map(number: u32, errno: Errno) -> Self {
        Self::MapFails {
            errno,
            only: Some(number),
        }
    }

    /// The fault that a row of the table of verdicts means.
    #[must_use]
    pub fn named(row: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(name, _)| *name == row);
        found.map(|(_, fault)| *fault)
    }
}

/// A transport whose host can be made to fail.
#[derive(Debug)]
pub struct Host {
    inner: Arc<dyn Transport>,
    /// The fault, and the maps that were asked for since it began.
    fault: Mutex<(Option<HostFault>, u32)>,
}

impl Host {
    /// A host that does not fail yet.
    #[must_use]
    pub fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            fault: Mutex::default(),
        })
    }

    /// What it does wrong from now on.
    pub fn set(&self, fault: Option<HostFault>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = (fault, 0);
    }

    fn does(&self, fault: HostFault) -> bool {
        let now = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        now.0 == Some(fault)
    }

    /// With what this map is refused, if it is.
    fn refuses_map(&self) -> Option<Errno> {
        let mut now = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        now.1 += 1;
        match now.0 {
            Some(HostFault::MapFails { errno, only }) => {
                only.is_none_or(|only| only == now.1).then_some(errno)
            }
            _ => None,
        }
    }
}

impl Delegate for Host {
    fn inner(&self) -> &dyn Transport {
        &*self.inner
    }

    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        if let Some(errno) = self.refuses_map() {
            // As a transport says it (the kernel's VFIO_IOMMU_MAP_DMA).
            let (device, len) = (self.inner.name().to_owned(), memory.len());
            return Err(match errno {
                Errno::ENOMEM => MapError::Locked { device, len },
                Errno::ENOSPC => MapError::TooMany { device },
                _ => MapError::Failed {
                    device,
                    iova,
                    len,
                    source: io::Error::from(errno),
                },
            });
        }
        self.inner.dma_map(iova, memory)
    }

    fn unmap(&self, iova: Iova, len: u64) -> Unmapped {
        if self.does(HostFault::UnmapFails) {
            return Unmapped::Failed(Errno::EIO);
        }
        if self.does(HostFault::UnmapBusy) {
            return Unmapped::Busy;
        }
        if self.does(HostFault::UnmapPartial) {
            return Unmapped::Partial { bytes: len / 2 };
        }
        let unmapped = self.inner.dma_unmap(iova, len);
        if self.does(HostFault::UnmapAbsent) {
            return Unmapped::Absent;
        }
        unmapped
    }
}
