//! A group that two functions share.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use failstop_pci::address::Address;
use failstop_pci::sysfs::{NotUsable, Sysfs};
use failstop_pci::transport::container::Container;
use failstop_pci::transport::iommufd::Iommufd;
use failstop_pci::transport::vfio::{self, Iommu, OpenError};
use failstop_pci::transport::{Iova, Transport, Unmapped};

use libtest_mimic::Failed;

use super::{Pages, bound, open_address, role, says};
use crate::fixture::{Outcome, ensure, ensure_eq};

pub(super) fn c23_the_sibling_and_its_driver_are_named(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let sibling = bound("sibling")?;
    Sysfs::system().unbind(sibling, false)?;
    match open_address(address, iommu) {
        Err(OpenError::NotUsable(error @ NotUsable::GroupNotViable { .. })) => says(
            &error,
            &["not viable", &format!("{sibling} (e1000e)"), "vfio-pci"],
        ),
        other => Err(format!("{other:?}").into()),
    }
}

/// The domain is the unit of protection (R1).
pub(super) fn c37_a_foreign_bus_master_is_refused_by_name(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let sibling = bound("sibling")?;
    set_command(sibling, 0x0406)?;
    let refused = open_address(address, iommu);
    let ours = vfio::open(&Sysfs::system(), address, iommu, &[sibling]);
    set_command(sibling, 0x0402)?;
    ours?;
    match refused {
        Err(OpenError::NotUsable(error @ NotUsable::ForeignBusMaster { .. })) => {
            says(
                &error,
                &["bus mastering is on", &format!("{sibling} (vfio-pci)")],
            )?;
        }
        other => return Err(format!("{other:?}").into()),
    }
    open_address(address, iommu)?;
    Ok(())
}

/// Writes a function's command register behind everybody's back.
fn set_command(address: Address, word: u16) -> Outcome {
    let path = format!("/sys/bus/pci/devices/{address}/config");
    let file = File::options().write(true).open(path)?;
    Ok(file.write_all_at(&word.to_le_bytes(), 4)?)
}

/// The functions of one group, opened through one address space.
fn both(iommu: Iommu) -> Result<[Arc<dyn Transport>; 2], Failed> {
    let sysfs = Sysfs::system();
    let pair = [bound("igb")?, bound("sibling")?];
    Ok(if iommu == Iommu::Iommufd {
        let iommufd = Iommufd::new(&sysfs)?;
        let first = iommufd.open(&sysfs, pair[0], &pair)?;
        [first, iommufd.open(&sysfs, pair[1], &pair)?]
    } else {
        let container = Container::new(&sysfs)?;
        let first = container.open(&sysfs, pair[0], &pair)?;
        [first, container.open(&sysfs, pair[1], &pair)?]
    })
}

pub(super) fn functions_of_one_group_share_an_address_space(iommu: Iommu) -> Outcome {
    let [first, second] = both(iommu)?;
    first.dma_map(Iova(0x10_0000), Pages::new(1)?.first(1)?)?;
    // What one mapped, the other sees; and it outlives the first.
    drop(first);
    ensure_eq(
        second.dma_unmap(Iova(0x10_0000), Pages::SIZE),
        Unmapped::Exact,
        "unmap through the sibling",
    )
}

pub(super) fn a_second_container_for_one_group_is_named_busy() -> Outcome {
    let pair = [bound("igb")?, bound("sibling")?];
    let _first = open_address(pair[0], Iommu::Container)?;
    match open_address(role("sibling")?, Iommu::Container) {
        Err(error @ OpenError::Busy { .. }) => says(&error, &["one Container", "/dev/vfio/"]),
        other => Err(format!("{other:?}").into()),
    }
}

/// KiB that the kernel accounts to this process as locked (type1) or pinned (iommufd).
fn pinned_kib() -> Result<u64, Failed> {
    let status = fs::read_to_string("/proc/self/status")?;
    let lines = status.lines().filter_map(|line| line.split_once(':'));
    let of_ours = lines.filter(|(name, _)| ["VmLck", "VmPin"].contains(name));
    let kib = of_ours.map(|(_, value)| value.trim().trim_end_matches(" kB").parse::<u64>());
    Ok(kib.sum::<Result<u64, _>>()?)
}

/// The kernel's word that a function left its address space is a ground for release (R3): it is given
/// only when nothing of the function is open and nobody else is there.
pub(super) fn r3_a_function_that_is_hung_up_has_left_its_address_space(iommu: Iommu) -> Outcome {
    let [first, second] = both(iommu)?;
    first.dma_map(Iova(0x10_0000), Pages::new(1)?.first(1)?)?;
    ensure(first.hang_up().is_none(), || {
        "it left a space that its sibling is in".into()
    })?;
    let pinned = pinned_kib()?;
    let left = second.hang_up().ok_or("the last one did not leave")?;
    ensure_eq(left.device(), second.id(), "who left")?;
    ensure(second.hang_up().is_none(), || "it left twice".into())?;
    // What was still mapped is not pinned any more.
    ensure(pinned_kib()? < pinned, || {
        format!("{pinned} KiB were pinned, and are")
    })
}
