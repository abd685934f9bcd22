//! A host that fails: calls of the kernel's that return what they should not, in front of a
//! transport that is as it should be.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use failstop::pci::testing::Delegate;
use failstop::pci::transport::{DmaMemory, Iova, MapError, Transport, Unmapped};
use nix::errno::Errno;

/// What a host does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum HostFault {
    /// No memory can be locked (ENOMEM).
    MapFails = 1,
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
    const ALL: [(&'static str, Self); 5] = [
        ("host-map-fails", Self::MapFails),
        ("host-unmap-fails", Self::UnmapFails),
        ("host-unmap-busy", Self::UnmapBusy),
        ("host-unmap-partial", Self::UnmapPartial),
        ("host-unmap-absent", Self::UnmapAbsent),
    ];

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
    fault: AtomicU8,
}

impl Host {
    /// A host that does not fail yet.
    #[must_use]
    pub fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            fault: AtomicU8::new(0),
        })
    }

    /// What it does wrong from now on.
    pub fn set(&self, fault: Option<HostFault>) {
        let number = fault.map_or(0, |fault| fault as u8);
        self.fault.store(number, Ordering::SeqCst);
    }

    fn does(&self, fault: HostFault) -> bool {
        self.fault.load(Ordering::SeqCst) == fault as u8
    }
}

impl Delegate for Host {
    fn inner(&self) -> &dyn Transport {
        &*self.inner
    }

    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        if self.does(HostFault::MapFails) {
            return Err(MapError::Locked {
                device: self.inner.name().to_owned(),
                len: memory.len(),
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
