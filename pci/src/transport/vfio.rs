//! What both kernel transports share, and how a function is opened.
//!
//! [`open`] picks the transport. To share one container or iommufd between several functions, or
//! to start from descriptors that a privileged process passed, use
//! [`Container`] and [`Iommufd`] directly.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;

use super::container::Container;
use super::iommufd::Iommufd;
use super::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, ResetMethod, Strength, Transport, Unmapped,
};
use crate::address::Address;
use crate::descriptor::Descriptor;
use crate::id::{DeviceId, Generation};
use crate::left::SpaceLeft;
use crate::sysfs::Sysfs;
use function::Function;
use reset::Place;

pub(crate) mod chain;
mod error;
pub(crate) mod function;
mod gate;
pub(crate) mod ioctl;
pub(crate) mod reset;

pub use error::OpenError;

/// Which of the kernel's two IOMMU interfaces to use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Iommu {
    /// iommufd where `/dev/iommu` and the function's character device exist, else a container.
    #[default]
    Auto,
    /// Group and type1 v2 container.
    Container,
    /// Device character device and iommufd.
    Iommufd,
}

/// Opens a function that is bound to vfio-pci.
///
/// `ours` names the functions of its group that this process drives too; any other with bus
/// mastering on is refused (R1).
///
/// # Errors
///
/// [`OpenError`]; nothing stays open.
pub fn open(
    sysfs: &Sysfs,
    address: Address,
    iommu: Iommu,
    ours: &[Address],
) -> Result<Arc<dyn Transport>, OpenError> {
    // What is wrong with the function is said before what is wrong with the machine.
    sysfs.preflight(address, ours)?;
    let iommufd = match iommu {
        Iommu::Auto => sysfs.has_iommufd(address),
        Iommu::Container => false,
        Iommu::Iommufd => true,
    };
    if iommufd {
        Iommufd::new(sysfs)?.open(sysfs, address, ours)
    } else {
        Container::new(sysfs)?.open(sysfs, address, ours)
    }
}

/// Opens a device file for reading and writing, close-on-exec.
pub(crate) fn open_file(
    device: &str,
    path: &Path,
    module: &'static str,
) -> Result<OwnedFd, OpenError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|source| {
        let path = path.to_owned();
        match Errno::from_raw(source.raw_os_error().unwrap_or(0)) {
            Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => OpenError::Missing { path, module },
            Errno::EACCES | Errno::EPERM => OpenError::Permission {
                owner: path.metadata().map_or(0, |metadata| metadata.uid()),
                path,
            },
            Errno::EBUSY => OpenError::Busy {
                device: device.to_owned(),
                path,
            },
            _ => OpenError::Kernel {
                device: device.to_owned(),
                step: "opening its device file",
                source,
            },
        }
    })
}

/// Puts a descriptor under the care of the fork table.
pub(crate) fn kept(device: &str, file: OwnedFd) -> Result<Descriptor, OpenError> {
    Descriptor::new(file).map_err(|source| OpenError::Kernel {
        device: device.to_owned(),
        step: "keeping its descriptor",
        source,
    })
}

/// The IOMMU side of an opened function: what the two interfaces do differently.
pub(crate) trait AddressSpace: Send + Sync + fmt::Debug {
    /// Which interface this is.
    const KIND: Kind;

    /// As [`Transport::dma_limits`].
    fn limits(&self) -> io::Result<DmaLimits>;

    /// Maps for reading and writing.
    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), Errno>;

    /// Unmaps, and returns how many bytes the kernel says it unmapped.
    fn unmap(&self, iova: Iova, len: u64) -> Result<u64, Errno>;

    /// As [`Transport::shares_space`].
    fn is_shared(&self) -> bool;

    /// The file of the function's group, which a hot reset needs; none where it was not opened
    /// through a group.
    fn group(&self) -> Option<BorrowedFd<'_>>;

    /// As [`Transport::detach_space`].
    fn detach(&self, device: BorrowedFd<'_>) -> io::Result<()>;

    /// Closes what no other function uses, after the function's own descriptor was closed. Returns
    /// whether that took the function out of the address space, where it was alone.
    fn hang_up(&self) -> bool;
}

/// How many functions use something that they share.
#[derive(Default, Debug)]
pub(crate) struct Users(AtomicUsize);

impl Users {
    /// Counts one in, and returns how many there are.
    pub(crate) fn enter(&self) -> usize {
        self.0.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Counts one out, and returns how many are left.
    pub(crate) fn leave(&self) -> usize {
        self.0.fetch_sub(1, Ordering::AcqRel) - 1
    }

    /// Whether there is more than one.
    pub(crate) fn are_several(&self) -> bool {
        self.0.load(Ordering::Acquire) > 1
    }
}

/// A function opened through the kernel.
///
/// The order of the fields is the order in which they are closed: the device first, so that the
/// kernel stops it before its mappings go (C7).
#[derive(Debug)]
pub(crate) struct Opened<S> {
    function: Function,
    space: S,
    place: Place,
}

impl<S: AddressSpace> Opened<S> {
    /// Describes the function at `place`, whose descriptor is `device` and which is attached to
    /// `space`.
    pub(crate) fn new(place: Place, device: OwnedFd, space: S) -> Result<Self, OpenError> {
        Ok(Self {
            function: Function::new(place.name(), device)?,
            space,
            place,
        })
    }
}

impl<S: AddressSpace> Transport for Opened<S> {
    fn id(&self) -> DeviceId {
        self.function.id()
    }

    fn name(&self) -> &str {
        self.function.name()
    }

    fn kind(&self) -> Kind {
        S::KIND
    }

    fn strength(&self) -> Strength {
        self.function.strength()
    }

    fn region(&self, index: RegionIndex) -> Region {
        self.function.region(index)
    }

    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        self.function.read(generation, index, offset, data)
    }

    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.function.write(generation, index, offset, data)
    }

    // The kernel's write to a memory BAR is a posted write already.
    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.function.write(generation, index, offset, data)
    }

    fn expire(&self, generation: Generation) {
        self.function.expire(generation);
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        self.function.region_file(index, offset)
    }

    fn dma_limits(&self) -> io::Result<DmaLimits> {
        self.space.limits()
    }

    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        self.space
            .map(iova, memory)
            .map_err(|errno| map_error(self.name(), iova, memory.len(), errno))
    }

    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        unmapped(len, self.space.unmap(iova, len))
    }

    fn irq_count(&self, index: IrqIndex) -> u32 {
        self.function.irq_count(index)
    }

    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        self.function.set_irqs(index, first, eventfds)
    }

    fn reset(&self) -> Result<(), ResetFailed> {
        self.function.reset()
    }

    fn reset_methods(&self) -> Vec<ResetMethod> {
        self.function.reset_methods(&self.place)
    }

    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        if method == ResetMethod::Hot {
            self.function.hot_reset(&self.place, self.space.group())
        } else {
            self.function.reset_by(&self.place, method)
        }
    }

    fn shares_space(&self) -> bool {
        self.space.is_shared()
    }

    fn detach_space(&self) -> io::Result<()> {
        self.space.detach(self.function.fd())
    }

    /// The device first, as when it is dropped (C7).
    fn hang_up(&self) -> Option<SpaceLeft> {
        // Both while they can be answered; only a cdev can detach.
        let alone = !self.space.is_shared() && self.strength() == Strength::Enforcing;
        let detached = self.detach_space().is_ok();
        self.function.hang_up();
        let left = self.space.hang_up() || detached;
        (alone && left).then(|| SpaceLeft::of(self.id()))
    }
}

/// Bytes of a page of this process.
pub(crate) fn page_size() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|size| u64::try_from(size).ok())
        .unwrap_or(4096)
}

/// A failed map, in the words that both transports share.
pub(crate) fn map_error(device: &str, iova: Iova, len: u64, errno: Errno) -> MapError {
    let device = device.to_owned();
    match errno {
        Errno::EEXIST => MapError::Exists { device, iova, len },
        Errno::ENOSPC => MapError::TooMany { device },
        Errno::ENOMEM => MapError::Locked { device, len },
        errno => MapError::Failed {
            device,
            iova,
            len,
            source: errno.into(),
        },
    }
}

/// What an unmap of `len` bytes did, from the size that the kernel returned (R2, C6).
pub(crate) fn unmapped(len: u64, result: Result<u64, Errno>) -> Unmapped {
    match result {
        Ok(0) => Unmapped::Absent,
        Ok(bytes) if bytes == len => Unmapped::Exact,
        Ok(bytes) => Unmapped::Partial { bytes },
        // iommufd: no mapping is wholly inside the range.
        Err(Errno::ENOENT) => Unmapped::Absent,
        Err(Errno::EBUSY | Errno::EAGAIN) => Unmapped::Busy,
        Err(errno) => Unmapped::Failed(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c6_unmap_of_another_size_is_not_success() {
        assert_eq!(unmapped(0x2000, Ok(0x2000)), Unmapped::Exact);
        assert_eq!(
            unmapped(0x2000, Ok(0x1000)),
            Unmapped::Partial { bytes: 0x1000 }
        );
        assert_eq!(unmapped(0x2000, Ok(0)), Unmapped::Absent);
    }

    #[test]
    fn unmap_errors_keep_their_meaning() {
        assert_eq!(unmapped(0x1000, Err(Errno::ENOENT)), Unmapped::Absent);
        assert_eq!(unmapped(0x1000, Err(Errno::EBUSY)), Unmapped::Busy);
        assert_eq!(
            unmapped(0x1000, Err(Errno::EINVAL)),
            Unmapped::Failed(Errno::EINVAL)
        );
    }

    #[test]
    fn c6_map_over_an_existing_mapping_is_told_apart() {
        let error = |errno| map_error("0000:01:00.0", Iova(0x1000), 0x2000, errno);
        assert!(matches!(error(Errno::EEXIST), MapError::Exists { .. }));
        assert!(matches!(error(Errno::ENOSPC), MapError::TooMany { .. }));
        assert!(matches!(error(Errno::ENOMEM), MapError::Locked { .. }));
        assert!(matches!(error(Errno::EFAULT), MapError::Failed { .. }));
    }

    #[test]
    fn missing_device_file_names_its_module() {
        let root = tempfile::tempdir().unwrap();
        let error = Container::new(&Sysfs::under(root.path())).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("vfio/vfio does not exist: load vfio"),
            "{text}"
        );
    }

    #[test]
    fn file_that_is_no_container_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::under(root.path());
        std::fs::create_dir_all(root.path().join("dev/vfio")).unwrap();
        std::fs::write(sysfs.container_path(), "").unwrap();
        assert!(matches!(
            Container::new(&sysfs),
            Err(OpenError::Kernel {
                step: "VFIO_GET_API_VERSION",
                ..
            })
        ));
    }
}
