//! Kernel VFIO through a group and a type1 v2 container (`linux/vfio.h`).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::errno::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_GROUP_FLAGS_CONTAINER_SET, VFIO_GROUP_FLAGS_VIABLE, VFIO_TYPE1v2_IOMMU,
    vfio_iommu_type1_dma_map,
};

use super::vfio::reset::Place;
use super::vfio::{
    AddressSpace, OpenError, Opened, Users, chain, ioctl, kept, open_file, page_size,
};
use super::{DmaLimits, DmaMemory, Iova, Kind, Transport};
use crate::address::Address;
use crate::descriptor::Descriptor;
use crate::sysfs::Sysfs;

/// The kernel's number of the only IOMMU type that we use.
const TYPE1_V2: i32 = VFIO_TYPE1v2_IOMMU as i32;

/// The file that every container is an opening of.
pub(crate) const CONTAINER_MODULE: &str = "vfio (and vfio_iommu_type1)";

/// A container: one address space, which every function opened through it shares.
///
/// The kernel lets a group file be opened once, so functions of one group must be opened through
/// one container. They share one domain, and so one ledger of IOVAs (R1).
#[derive(Debug)]
pub struct Container {
    // Closed before the container: the kernel detaches the last group from it.
    groups: Mutex<Groups>,
    file: Descriptor,
    functions: Users,
}

/// The groups of a container that are open now, by their numbers.
#[derive(Default, Debug)]
struct Groups(Vec<(u32, Weak<Group>)>);

impl Groups {
    fn find(&self, number: u32) -> Option<Arc<Group>> {
        self.0
            .iter()
            .filter(|(known, _)| *known == number)
            .filter_map(|(_, group)| group.upgrade())
            .find(|group| !group.file.is_hung_up())
    }

    fn add(&mut self, number: u32, group: &Arc<Group>) {
        self.0.retain(|(_, group)| group.strong_count() > 0);
        self.0.push((number, Arc::downgrade(group)));
    }
}

/// An open group file, attached to a container.
#[derive(Debug)]
struct Group {
    file: Descriptor,
    functions: Users,
}

/// A function's place in a container, counted until it leaves. The fields close in this order.
#[derive(Debug)]
struct Membership {
    group: Arc<Group>,
    container: Arc<Container>,
    left: AtomicBool,
}

impl Membership {
    fn new(group: Arc<Group>, container: Arc<Container>) -> Self {
        group.functions.enter();
        container.functions.enter();
        Self {
            group,
            container,
            left: AtomicBool::new(false),
        }
    }

    /// Counts the function out, once: how many are left in its group, and in the container.
    fn leave(&self) -> Option<(usize, usize)> {
        let first = !self.left.swap(true, Ordering::AcqRel);
        first.then(|| {
            (
                self.group.functions.leave(),
                self.container.functions.leave(),
            )
        })
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // Files close with their last owner; a container may be opened through again.
        self.leave();
    }
}

impl Container {
    /// Opens `/dev/vfio/vfio`.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when the file is missing, may not be opened, or offers no type1 v2 IOMMU.
    pub fn new(sysfs: &Sysfs) -> Result<Arc<Self>, OpenError> {
        let path = sysfs.container_path();
        let file = open_file("container", &path, CONTAINER_MODULE)?;
        Self::check(file, path)
    }

    /// Takes over a descriptor of `/dev/vfio/vfio`, so that privileges can be dropped before.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when it is not one, or offers no type1 v2 IOMMU.
    pub fn from_fd(file: OwnedFd) -> Result<Arc<Self>, OpenError> {
        Self::check(file, PathBuf::from("the passed container"))
    }

    fn check(file: OwnedFd, path: PathBuf) -> Result<Arc<Self>, OpenError> {
        let name = path.display().to_string();
        let version = ioctl::get_api_version(file.as_fd())
            .map_err(|errno| OpenError::kernel(&name, "VFIO_GET_API_VERSION", errno))?;
        if u32::try_from(version) != Ok(VFIO_API_VERSION) {
            return Err(OpenError::kernel(
                &name,
                "VFIO_GET_API_VERSION",
                Errno::EPROTO,
            ));
        }
        if !ioctl::check_extension(file.as_fd(), TYPE1_V2).unwrap_or(false) {
            return Err(OpenError::NoType1 { path });
        }
        Ok(Arc::new(Self {
            groups: Mutex::default(),
            file: kept(&name, file)?,
            functions: Users::default(),
        }))
    }

    /// Opens the function at `address`, which is bound to vfio-pci, and its group.
    ///
    /// `ours` names the other functions of its group that this process drives.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing stays open, except that a container keeps its IOMMU type.
    pub fn open(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        ours: &[Address],
    ) -> Result<Arc<dyn Transport>, OpenError> {
        let ready = sysfs.preflight(address, ours)?;
        let device = address.to_string();
        // Held over the opening, so that two functions of one group do not race for its file.
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let group = match groups.find(ready.group) {
            Some(group) => group,
            None => {
                let path = sysfs.group_path(ready.group);
                let group = self.attach(&device, open_file(&device, &path, "vfio-pci")?)?;
                groups.add(ready.group, &group);
                group
            }
        };
        drop(groups);
        self.function(sysfs, address, group)
    }

    /// Opens the function at `address` through `group`, a descriptor of its group file that a
    /// privileged process passed. The file may be attached to this container already.
    ///
    /// # Errors
    ///
    /// As [`Container::open`].
    pub fn open_passed(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        ours: &[Address],
        group: OwnedFd,
    ) -> Result<Arc<dyn Transport>, OpenError> {
        let ready = sysfs.preflight(address, ours)?;
        let group = self.attach(&address.to_string(), group)?;
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.add(ready.group, &group);
        drop(groups);
        self.function(sysfs, address, group)
    }

    fn attach(&self, device: &str, file: OwnedFd) -> Result<Arc<Group>, OpenError> {
        let kernel = |step, errno| OpenError::kernel(device, step, errno);
        let flags = ioctl::group_status(file.as_fd())
            .map_err(|errno| kernel("VFIO_GROUP_GET_STATUS", errno))?;
        // The preflight looked at the members' drivers; the kernel has the last word.
        if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(kernel(
                "VFIO_GROUP_GET_STATUS (group not viable)",
                Errno::EPERM,
            ));
        }
        let refused = |step, errno| match errno {
            Errno::EPERM => OpenError::Isolation {
                device: device.to_owned(),
                parameter: "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
            },
            errno => kernel(step, errno),
        };
        if flags & VFIO_GROUP_FLAGS_CONTAINER_SET == 0 {
            ioctl::group_set_container(file.as_fd(), self.file.as_fd())
                .map_err(|errno| refused("VFIO_GROUP_SET_CONTAINER", errno))?;
        }
        match ioctl::set_iommu(self.file.as_fd(), TYPE1_V2) {
            // The container has its type from its first group on.
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(errno) => return Err(refused("VFIO_SET_IOMMU", errno)),
        }
        // Says so if a passed group is attached to some other container.
        ioctl::iommu_info(self.file.as_fd()).map_err(|errno| {
            kernel(
                "VFIO_IOMMU_GET_INFO (is the group in this container?)",
                errno,
            )
        })?;
        Ok(Arc::new(Group {
            file: kept(device, file)?,
            functions: Users::default(),
        }))
    }

    fn function(
        self: &Arc<Self>,
        sysfs: &Sysfs,
        address: Address,
        group: Arc<Group>,
    ) -> Result<Arc<dyn Transport>, OpenError> {
        let name = address.to_string();
        let c_name = CString::new(name.clone()).map_err(|_| {
            // Cannot happen: an address has no NUL in it.
            OpenError::kernel(&name, "VFIO_GROUP_GET_DEVICE_FD", Errno::EINVAL)
        })?;
        let device = ioctl::group_device(group.file.as_fd(), &c_name)
            .map_err(|errno| OpenError::kernel(&name, "VFIO_GROUP_GET_DEVICE_FD", errno))?;
        let space = Membership::new(group, Arc::clone(self));
        let place = Place::new(sysfs, address);
        Ok(Arc::new(Opened::new(place, device, space)?))
    }
}

impl AddressSpace for Membership {
    const KIND: Kind = Kind::Container;

    fn limits(&self) -> io::Result<DmaLimits> {
        let bytes = ioctl::iommu_info(self.container.file.as_fd())?;
        chain::type1_limits(&bytes, page_size()).map_err(io::Error::other)
    }

    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), Errno> {
        let mut map = vfio_iommu_type1_dma_map {
            flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
            vaddr: memory.addr().as_ptr() as u64,
            iova: iova.0,
            size: memory.len(),
            ..Default::default()
        };
        ioctl::map_dma(self.container.file.as_fd(), &mut map)
    }

    fn unmap(&self, iova: Iova, len: u64) -> Result<u64, Errno> {
        ioctl::unmap_dma(self.container.file.as_fd(), iova.0, len)
    }

    fn is_shared(&self) -> bool {
        self.container.functions.are_several()
    }

    fn group(&self) -> Option<BorrowedFd<'_>> {
        Some(self.group.file.as_fd())
    }

    fn detach(&self, _device: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn hang_up(&self) -> bool {
        let Some((in_group, in_container)) = self.leave() else {
            return false;
        };
        // EBUSY where something still holds the function: another process, or a call inside the kernel.
        let unset = in_group == 0 && ioctl::group_unset_container(self.group.file.as_fd()).is_ok();
        if in_group == 0 {
            self.group.file.hang_up();
        }
        if in_container == 0 {
            self.container.file.hang_up();
        }
        unset && in_container == 0
    }
}
