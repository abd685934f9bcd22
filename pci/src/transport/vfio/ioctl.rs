//! The ioctls of `linux/vfio.h` and `linux/iommufd.h` that the kernel transports use, behind safe
//! functions: each takes a borrowed descriptor and exclusive access to a whole argument.
//!
//! vfio-ioctls wraps the same calls, but loses errno where we must report it (reset, SET_IRQS), and
//! its `VfioDevice` panics when it is dropped after a removal.
#![expect(unsafe_code, reason = "system calls with pointers to their arguments")]

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use iommufd_bindings::{
    iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_unmap,
};
use nix::errno::Errno;
use vfio_bindings::bindings::vfio::{
    vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_device_detach_iommufd_pt,
    vfio_device_info, vfio_group_status, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
    vfio_irq_info,
};

type Result<T> = std::result::Result<T, Errno>;

mod raw {
    use nix::{ioctl_none_bad, ioctl_readwrite_bad, ioctl_write_int_bad, request_code_none};

    use super::*;

    /// Both interfaces use this ioctl type; vfio numbers from 100, iommufd from 0x80.
    const TYPE: u8 = b';';

    ioctl_none_bad!(get_api_version, request_code_none!(TYPE, 100));
    ioctl_write_int_bad!(check_extension, request_code_none!(TYPE, 101));
    ioctl_write_int_bad!(set_iommu, request_code_none!(TYPE, 102));
    ioctl_readwrite_bad!(
        group_get_status,
        request_code_none!(TYPE, 103),
        vfio_group_status
    );
    ioctl_readwrite_bad!(group_set_container, request_code_none!(TYPE, 104), i32);
    ioctl_none_bad!(group_unset_container, request_code_none!(TYPE, 105));
    ioctl_readwrite_bad!(
        group_get_device_fd,
        request_code_none!(TYPE, 106),
        std::ffi::c_char
    );
    ioctl_readwrite_bad!(
        device_get_info,
        request_code_none!(TYPE, 107),
        vfio_device_info
    );
    ioctl_readwrite_bad!(device_get_region_info, request_code_none!(TYPE, 108), u64);
    ioctl_readwrite_bad!(
        device_get_irq_info,
        request_code_none!(TYPE, 109),
        vfio_irq_info
    );
    ioctl_readwrite_bad!(device_set_irqs, request_code_none!(TYPE, 110), u32);
    ioctl_none_bad!(device_reset, request_code_none!(TYPE, 111));
    // Shares its number with VFIO_IOMMU_GET_INFO: what it means depends on the descriptor.
    ioctl_readwrite_bad!(
        device_get_pci_hot_reset_info,
        request_code_none!(TYPE, 112),
        u32
    );
    ioctl_readwrite_bad!(device_pci_hot_reset, request_code_none!(TYPE, 113), u32);
    ioctl_readwrite_bad!(iommu_get_info, request_code_none!(TYPE, 112), u64);
    ioctl_readwrite_bad!(
        iommu_map_dma,
        request_code_none!(TYPE, 113),
        vfio_iommu_type1_dma_map
    );
    ioctl_readwrite_bad!(
        iommu_unmap_dma,
        request_code_none!(TYPE, 114),
        vfio_iommu_type1_dma_unmap
    );
    ioctl_readwrite_bad!(
        device_bind_iommufd,
        request_code_none!(TYPE, 118),
        vfio_device_bind_iommufd
    );
    ioctl_readwrite_bad!(
        device_attach_iommufd_pt,
        request_code_none!(TYPE, 119),
        vfio_device_attach_iommufd_pt
    );
    ioctl_readwrite_bad!(
        device_detach_iommufd_pt,
        request_code_none!(TYPE, 120),
        vfio_device_detach_iommufd_pt
    );
    ioctl_readwrite_bad!(ioas_alloc, request_code_none!(TYPE, 0x81), iommu_ioas_alloc);
    ioctl_readwrite_bad!(
        ioas_iova_ranges,
        request_code_none!(TYPE, 0x84),
        iommu_ioas_iova_ranges
    );
    ioctl_readwrite_bad!(ioas_map, request_code_none!(TYPE, 0x85), iommu_ioas_map);
    ioctl_readwrite_bad!(ioas_unmap, request_code_none!(TYPE, 0x86), iommu_ioas_unmap);
}

/// `size_of::<T>()` for an `argsz` or `size` field.
pub(crate) const fn size_of_arg<T>() -> u32 {
    assert!(size_of::<T>() <= u32::MAX as usize);
    size_of::<T>() as u32
}

/// `VFIO_GET_API_VERSION`.
pub(crate) fn get_api_version(container: BorrowedFd<'_>) -> Result<i32> {
    // SAFETY: takes no argument.
    unsafe { raw::get_api_version(container.as_raw_fd()) }
}

/// `VFIO_CHECK_EXTENSION`: whether the container knows an IOMMU type.
pub(crate) fn check_extension(container: BorrowedFd<'_>, extension: i32) -> Result<bool> {
    // SAFETY: the argument is a number.
    unsafe { raw::check_extension(container.as_raw_fd(), extension) }.map(|answer| answer > 0)
}

/// `VFIO_SET_IOMMU`.
pub(crate) fn set_iommu(container: BorrowedFd<'_>, kind: i32) -> Result<()> {
    // SAFETY: the argument is a number.
    unsafe { raw::set_iommu(container.as_raw_fd(), kind) }.map(drop)
}

/// `VFIO_GROUP_GET_STATUS`: the flags.
pub(crate) fn group_status(group: BorrowedFd<'_>) -> Result<u32> {
    let mut status = vfio_group_status {
        argsz: size_of_arg::<vfio_group_status>(),
        flags: 0,
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::group_get_status(group.as_raw_fd(), &raw mut status) }?;
    Ok(status.flags)
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub(crate) fn group_set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<()> {
    let mut container = container.as_raw_fd();
    // SAFETY: the argument is a whole, exclusively borrowed integer.
    unsafe { raw::group_set_container(group.as_raw_fd(), &raw mut container) }.map(drop)
}

/// `VFIO_GROUP_UNSET_CONTAINER`: EBUSY while a device of the group is open, in any process.
pub(crate) fn group_unset_container(group: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: there is no argument.
    unsafe { raw::group_unset_container(group.as_raw_fd()) }.map(drop)
}

/// `VFIO_GROUP_GET_DEVICE_FD`, close-on-exec.
pub(crate) fn group_device(group: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
    // SAFETY: the kernel reads the NUL-terminated name and writes nothing.
    let fd = unsafe { raw::group_get_device_fd(group.as_raw_fd(), name.as_ptr().cast_mut()) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `VFIO_DEVICE_GET_INFO`.
pub(crate) fn device_info(device: BorrowedFd<'_>) -> Result<vfio_device_info> {
    let mut info = vfio_device_info {
        argsz: size_of_arg::<vfio_device_info>(),
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::device_get_info(device.as_raw_fd(), &raw mut info) }?;
    Ok(info)
}

/// `VFIO_DEVICE_GET_REGION_INFO`, as bytes: the structure and its capability chain.
pub(crate) fn region_info(device: BorrowedFd<'_>, index: u32) -> Result<Vec<u8>> {
    // struct vfio_region_info: argsz, flags, index, cap_offset, size, offset.
    info_with_chain(32, index, |argument| {
        // SAFETY: the argument is an exclusively borrowed buffer of the size that it states.
        unsafe { raw::device_get_region_info(device.as_raw_fd(), argument.as_mut_ptr()) }
    })
}

/// `VFIO_IOMMU_GET_INFO`, as bytes: the structure and its capability chain.
pub(crate) fn iommu_info(container: BorrowedFd<'_>) -> Result<Vec<u8>> {
    // struct vfio_iommu_type1_info: argsz, flags, iova_pgsizes, cap_offset, pad.
    info_with_chain(24, 0, |argument| {
        // SAFETY: the argument is an exclusively borrowed buffer of the size that it states.
        unsafe { raw::iommu_get_info(container.as_raw_fd(), argument.as_mut_ptr()) }
    })
}

/// Calls an information ioctl, again with the size that it asks for. `index` is the third 32-bit
/// word of the argument.
fn info_with_chain(
    minimum: u32,
    index: u32,
    mut call: impl FnMut(&mut [u64]) -> Result<i32>,
) -> Result<Vec<u8>> {
    /// More than any kernel says; a bound against a wild answer.
    const MAXIMUM: u32 = 1 << 20;
    let mut size = minimum;
    loop {
        // Eight-byte units, so that the kernel's 64-bit fields are aligned.
        let mut argument = vec![0u64; size.div_ceil(8) as usize];
        argument[0] = u64::from_ne_bytes(join(size.to_ne_bytes(), [0; 4]));
        argument[1] = u64::from_ne_bytes(join(index.to_ne_bytes(), [0; 4]));
        call(&mut argument)?;
        let [a, b, c, d, ..] = argument[0].to_ne_bytes();
        let wanted = u32::from_ne_bytes([a, b, c, d]);
        if wanted <= size {
            let mut bytes: Vec<u8> = argument
                .iter()
                .flat_map(|unit| unit.to_ne_bytes())
                .collect();
            bytes.truncate(size as usize);
            return Ok(bytes);
        }
        if wanted > MAXIMUM {
            return Err(Errno::E2BIG);
        }
        size = wanted;
    }
}

const fn join(low: [u8; 4], high: [u8; 4]) -> [u8; 8] {
    let [a, b, c, d] = low;
    let [e, f, g, h] = high;
    [a, b, c, d, e, f, g, h]
}

/// `VFIO_DEVICE_GET_IRQ_INFO`: how many vectors.
pub(crate) fn irq_count(device: BorrowedFd<'_>, index: u32) -> Result<u32> {
    let mut info = vfio_irq_info {
        argsz: size_of_arg::<vfio_irq_info>(),
        index,
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::device_get_irq_info(device.as_raw_fd(), &raw mut info) }?;
    Ok(info.count)
}

/// `VFIO_DEVICE_SET_IRQS`: `argument` is a `vfio_irq_set` in 32-bit words, whose first word, its
/// size in bytes, this function fills in.
pub(crate) fn set_irqs(device: BorrowedFd<'_>, argument: &mut [u32]) -> Result<()> {
    let size = u32::try_from(size_of_val(argument)).map_err(|_| Errno::E2BIG)?;
    *argument.first_mut().ok_or(Errno::EINVAL)? = size;
    // SAFETY: the argument is an exclusively borrowed buffer of the size that it states.
    unsafe { raw::device_set_irqs(device.as_raw_fd(), argument.as_mut_ptr()) }.map(drop)
}

/// `VFIO_DEVICE_RESET`.
pub(crate) fn device_reset(device: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: takes no argument.
    unsafe { raw::device_reset(device.as_raw_fd()) }.map(drop)
}

/// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO`: the functions that a hot reset touches, each as two words,
/// of which the second is segment (16 bits), bus and devfn (`struct vfio_pci_dependent_device`).
pub(crate) fn hot_reset_info(device: BorrowedFd<'_>) -> Result<Vec<[u32; 2]>> {
    /// A bus has no more functions; a slot's buses have fewer than this.
    const MAXIMUM: u32 = 1 << 12;
    // struct vfio_pci_hot_reset_info: argsz, flags, count, devices.
    const HEAD: usize = 3;
    let mut room = 8u32;
    loop {
        let mut argument = vec![0u32; HEAD + 2 * room as usize];
        argument[0] = u32::try_from(size_of_val(&*argument)).map_err(|_| Errno::E2BIG)?;
        // SAFETY: the argument is an exclusively borrowed buffer of the size that it states.
        let called = unsafe {
            raw::device_get_pci_hot_reset_info(device.as_raw_fd(), argument.as_mut_ptr())
        };
        let count = argument[2];
        match called {
            Ok(_) if count <= room => {
                let (devices, _) = argument[HEAD..].as_chunks();
                return Ok(devices[..count as usize].to_vec());
            }
            Err(Errno::ENOSPC) if count > room && count <= MAXIMUM => room = count,
            Ok(_) => return Err(Errno::E2BIG),
            Err(errno) => return Err(errno),
        }
    }
}

/// `VFIO_DEVICE_PCI_HOT_RESET`, with the descriptors of all the affected groups; with none for a
/// device opened by its character device.
pub(crate) fn hot_reset(device: BorrowedFd<'_>, groups: &[BorrowedFd<'_>]) -> Result<()> {
    // struct vfio_pci_hot_reset: argsz, flags, count, group_fds.
    let count = u32::try_from(groups.len()).map_err(|_| Errno::E2BIG)?;
    let mut argument = vec![0, 0, count];
    argument.extend(groups.iter().map(|fd| fd.as_raw_fd().cast_unsigned()));
    argument[0] = u32::try_from(size_of_val(&*argument)).map_err(|_| Errno::E2BIG)?;
    // SAFETY: the argument is an exclusively borrowed buffer of the size that it states.
    unsafe { raw::device_pci_hot_reset(device.as_raw_fd(), argument.as_mut_ptr()) }.map(drop)
}

/// `VFIO_IOMMU_MAP_DMA`. The memory's life is vouched for by the maker of `DmaMemory`.
pub(crate) fn map_dma(container: BorrowedFd<'_>, map: &mut vfio_iommu_type1_dma_map) -> Result<()> {
    map.argsz = size_of_arg::<vfio_iommu_type1_dma_map>();
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::iommu_map_dma(container.as_raw_fd(), map) }.map(drop)
}

/// `VFIO_IOMMU_UNMAP_DMA`: how many bytes were unmapped.
pub(crate) fn unmap_dma(container: BorrowedFd<'_>, iova: u64, size: u64) -> Result<u64> {
    let mut unmap = vfio_iommu_type1_dma_unmap {
        argsz: size_of_arg::<vfio_iommu_type1_dma_unmap>(),
        iova,
        size,
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states;
    // without flags the kernel looks at nothing behind it.
    unsafe { raw::iommu_unmap_dma(container.as_raw_fd(), &raw mut unmap) }?;
    Ok(unmap.size)
}

/// `VFIO_DEVICE_BIND_IOMMUFD`.
pub(crate) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> Result<()> {
    let mut bind = vfio_device_bind_iommufd {
        argsz: size_of_arg::<vfio_device_bind_iommufd>(),
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::device_bind_iommufd(device.as_raw_fd(), &raw mut bind) }.map(drop)
}

/// `VFIO_DEVICE_ATTACH_IOMMUFD_PT`.
pub(crate) fn attach_iommufd(device: BorrowedFd<'_>, ioas: u32) -> Result<()> {
    let mut attach = vfio_device_attach_iommufd_pt {
        argsz: size_of_arg::<vfio_device_attach_iommufd_pt>(),
        pt_id: ioas,
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::device_attach_iommufd_pt(device.as_raw_fd(), &raw mut attach) }.map(drop)
}

/// `VFIO_DEVICE_DETACH_IOMMUFD_PT`.
pub(crate) fn detach_iommufd(device: BorrowedFd<'_>) -> Result<()> {
    let mut detach = vfio_device_detach_iommufd_pt {
        argsz: size_of_arg::<vfio_device_detach_iommufd_pt>(),
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::device_detach_iommufd_pt(device.as_raw_fd(), &raw mut detach) }.map(drop)
}

/// `IOMMU_IOAS_ALLOC`: the new address space's number.
pub(crate) fn ioas_alloc(iommufd: BorrowedFd<'_>) -> Result<u32> {
    let mut alloc = iommu_ioas_alloc {
        size: size_of_arg::<iommu_ioas_alloc>(),
        ..Default::default()
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::ioas_alloc(iommufd.as_raw_fd(), &raw mut alloc) }?;
    Ok(alloc.out_ioas_id)
}

/// `IOMMU_IOAS_IOVA_RANGES`: the usable ranges, first and last IOVA, and the alignment in bytes.
pub(crate) fn ioas_iova_ranges(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
) -> Result<(Vec<(u64, u64)>, u64)> {
    /// More than any machine has reserved windows; a bound against a wild answer.
    const MAXIMUM: u32 = 1 << 16;
    let mut room = 16;
    loop {
        let mut ranges = vec![[0u64; 2]; room as usize];
        let mut query = iommu_ioas_iova_ranges {
            size: size_of_arg::<iommu_ioas_iova_ranges>(),
            ioas_id: ioas,
            num_iovas: room,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it
        // states, and `allowed_iovas` points to `num_iovas` pairs of 64-bit numbers of our own.
        match unsafe { raw::ioas_iova_ranges(iommufd.as_raw_fd(), &raw mut query) } {
            Ok(_) => {
                ranges.truncate(query.num_iovas as usize);
                let ranges = ranges
                    .into_iter()
                    .map(|[start, last]| (start, last))
                    .collect();
                return Ok((ranges, query.out_iova_alignment));
            }
            Err(Errno::EMSGSIZE) if query.num_iovas > room && query.num_iovas <= MAXIMUM => {
                room = query.num_iovas;
            }
            Err(errno) => return Err(errno),
        }
    }
}

/// `IOMMU_IOAS_MAP`. The memory's life is vouched for by the maker of `DmaMemory`.
pub(crate) fn ioas_map(iommufd: BorrowedFd<'_>, map: &mut iommu_ioas_map) -> Result<()> {
    map.size = size_of_arg::<iommu_ioas_map>();
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::ioas_map(iommufd.as_raw_fd(), map) }.map(drop)
}

/// `IOMMU_IOAS_UNMAP`: how many bytes were unmapped.
pub(crate) fn ioas_unmap(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    iova: u64,
    length: u64,
) -> Result<u64> {
    let mut unmap = iommu_ioas_unmap {
        size: size_of_arg::<iommu_ioas_unmap>(),
        ioas_id: ioas,
        iova,
        length,
    };
    // SAFETY: the argument is a whole, exclusively borrowed structure of the size that it states.
    unsafe { raw::ioas_unmap(iommufd.as_raw_fd(), &raw mut unmap) }?;
    Ok(unmap.length)
}
