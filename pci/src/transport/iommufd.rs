//! Kernel VFIO through a device's character device and iommufd (`linux/iommufd.h`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use iommufd_bindings::{
    iommu_ioas_map, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
};
use nix::errno::Errno;

use super::vfio::reset::Place;
use super::vfio::{
    AddressSpace, OpenError, Opened, Users, chain, ioctl, kept, open_file, page_size,
};
use super::{DmaLimits, DmaMemory, Iova, Kind, Transport};
use crate::address::Address;
use crate::descriptor::Descriptor;
use crate::sysfs::{NotUsable, Sysfs};

/// An opening of `/dev/iommu` with one I/O address space, which every function opened through it
/// shares, and so one ledger of IOVAs (R1).
#[derive(Debug)]
pub struct Iommufd {
    file: Descriptor,
    functions: Users,
    /// The address space's number.
    ioas: u32,
}

impl Iommufd {
    /// Opens `/dev/iommu`.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when the file is missing or may not be opened.
    pub fn new(sysfs: &Sysfs) -> Result<Arc<Self>, OpenError> {
        let path = sysfs.iommufd_path();
        Self::allocate(open_file("iommufd", &path, "iommufd")?, &path)
    }

    /// Takes over a descriptor of `/dev/iommu`, so that privileges can be dropped before.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when it is not one.
    pub fn from_fd(file: OwnedFd) -> Result<Arc<Self>, OpenError> {
        Self::allocate(file, &PathBuf::from("the passed iommufd"))
    }

    fn allocate(file: OwnedFd, path: &std::path::Path) -> Result<Arc<Self>, OpenError> {
        let name = path.display().to_string();
        let ioas = ioctl::ioas_alloc(file.as_fd())
            .map_err(|errno| OpenError::kernel(&name, "IOMMU_IOAS_ALLOC", errno))?;
        Ok(Arc::new(Self {
            file: kept(&name, file)?,
            functions: Users::default(),
            ioas,
        }))
    }

    /// Opens the function at `address`, which is bound to vfio-pci, by its character device.
    ///
    /// `ours` names the other functions of its group that this process drives.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing stays open.
    pub fn open(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        ours: &[Address],
    ) -> Result<Arc<dyn Transport>, OpenError> {
        let ready = sysfs.preflight(address, ours)?;
        let path = ready.cdev.ok_or(NotUsable::NoCharacterDevice { address })?;
        let device = open_file(&address.to_string(), &path, "vfio-pci")?;
        self.attach(sysfs, address, device, path)
    }

    /// Opens the function at `address` through `device`, a descriptor of its character device that
    /// a privileged process passed.
    ///
    /// # Errors
    ///
    /// As [`Iommufd::open`].
    pub fn open_passed(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        ours: &[Address],
        device: OwnedFd,
    ) -> Result<Arc<dyn Transport>, OpenError> {
        sysfs.preflight(address, ours)?;
        self.attach(sysfs, address, device, PathBuf::from("the passed device"))
    }

    fn attach(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        device: OwnedFd,
        path: PathBuf,
    ) -> Result<Arc<dyn Transport>, OpenError> {
        let name = address.to_string();
        let refused = |step, errno| match errno {
            Errno::EPERM => OpenError::Isolation {
                device: name.clone(),
                parameter: "/sys/module/iommufd/parameters/allow_unsafe_interrupts",
            },
            // Another opening of the device, or another owner of its group.
            Errno::EBUSY | Errno::EINVAL if step == "VFIO_DEVICE_BIND_IOMMUFD" => OpenError::Busy {
                device: name.clone(),
                path: path.clone(),
            },
            errno => OpenError::kernel(&name, step, errno),
        };
        ioctl::bind_iommufd(device.as_fd(), self.file.as_fd())
            .map_err(|errno| refused("VFIO_DEVICE_BIND_IOMMUFD", errno))?;
        ioctl::attach_iommufd(device.as_fd(), self.ioas)
            .map_err(|errno| refused("VFIO_DEVICE_ATTACH_IOMMUFD_PT", errno))?;
        let space = Attachment::new(Arc::clone(self));
        let place = Place::new(sysfs, address);
        Ok(Arc::new(Opened::new(place, device, space)?))
    }
}

/// A function's place in an address space, counted until it leaves.
#[derive(Debug)]
struct Attachment {
    iommufd: Arc<Iommufd>,
    left: AtomicBool,
}

impl Attachment {
    fn new(iommufd: Arc<Iommufd>) -> Self {
        iommufd.functions.enter();
        Self {
            iommufd,
            left: AtomicBool::new(false),
        }
    }

    /// Counts the function out, once: how many are left.
    fn leave(&self) -> Option<usize> {
        let first = !self.left.swap(true, Ordering::AcqRel);
        first.then(|| self.iommufd.functions.leave())
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // The file closes with its last owner, who may open through it again.
        self.leave();
    }
}

impl AddressSpace for Attachment {
    const KIND: Kind = Kind::Iommufd;

    fn limits(&self) -> io::Result<DmaLimits> {
        let iommufd = &self.iommufd;
        let (ranges, alignment) = ioctl::ioas_iova_ranges(iommufd.file.as_fd(), iommufd.ioas)?;
        Ok(DmaLimits {
            ranges: chain::ranges(ranges),
            page_size: alignment.max(page_size()),
            // iommufd has no limit but the memory lock.
            entries_left: None,
        })
    }

    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), Errno> {
        let mut map = iommu_ioas_map {
            flags: FIXED_IOVA | READABLE | WRITEABLE,
            ioas_id: self.iommufd.ioas,
            user_va: memory.addr().as_ptr() as u64,
            length: memory.len(),
            iova: iova.0,
            ..Default::default()
        };
        ioctl::ioas_map(self.iommufd.file.as_fd(), &mut map)
    }

    fn unmap(&self, iova: Iova, len: u64) -> Result<u64, Errno> {
        ioctl::ioas_unmap(self.iommufd.file.as_fd(), self.iommufd.ioas, iova.0, len)
    }

    fn is_shared(&self) -> bool {
        self.iommufd.functions.are_several()
    }

    fn group(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn detach(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        Ok(ioctl::detach_iommufd(device)?)
    }

    // What counts is that it was detached before: closing says nothing.
    fn hang_up(&self) -> bool {
        if self.leave() == Some(0) {
            self.iommufd.file.hang_up();
        }
        false
    }
}
