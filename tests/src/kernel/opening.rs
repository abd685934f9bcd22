//! Opening a function: what the transport then says of it.

use std::os::fd::AsFd;
use std::path::Path;

use failstop_pci::capabilities::Capabilities;
use failstop_pci::config::{Command, CommandRegister, ConfigSpace, Identity};
use failstop_pci::id::Generation;
use failstop_pci::sysfs::{NotUsable, Sysfs};
use failstop_pci::transport::vfio::{Iommu, OpenError};
use failstop_pci::transport::{AccessError, IrqIndex, Kind, RegionIndex, Strength};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{bound, open, open_address, role, says};
use crate::fixture::{Outcome, ensure, ensure_eq};

pub(super) fn regions_and_interrupts_are_described(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let registers = transport.region(RegionIndex::Bar(0));
    ensure_eq(registers.size, 0x2_0000, "size of BAR 0")?;
    ensure_eq(
        registers.mappable,
        vec![(0, 0x2_0000)],
        "mappable parts of BAR 0",
    )?;
    ensure_eq(
        transport.region(RegionIndex::Config).size,
        4096,
        "size of config space",
    )?;
    ensure_eq(
        transport.region(RegionIndex::Bar(5)).size,
        0,
        "size of BAR 5",
    )?;
    ensure_eq(transport.irq_count(IrqIndex::Msix), 10, "MSI-X vectors")?;
    ensure_eq(transport.irq_count(IrqIndex::Error), 1, "error vectors")?;
    ensure_eq(transport.irq_count(IrqIndex::Request), 1, "request vectors")
}

pub(super) fn configuration_space_is_that_of_an_82576(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let bytes = ConfigSpace::new(&*transport).read_all()?;
    let identity = Identity::parse(&bytes).ok_or("too few bytes")?;
    ensure_eq((identity.vendor, identity.device), (0x8086, 0x10c9), "IDs")?;
    let capabilities = Capabilities::parse(&bytes)?;
    ensure(capabilities.has_flr(), || "no FLR".into())?;
    let pcie = capabilities.pcie.ok_or("no PCIe capability")?;
    let msix = capabilities.msix.ok_or("no MSI-X capability")?;
    ensure_eq(pcie.offset, 0xa0, "offset of PCIe")?;
    ensure_eq((msix.vectors, msix.table.bar), (10, 3), "MSI-X")
}

pub(super) fn strength_is_enforcing_behind_an_iommu(iommu: Iommu) -> Outcome {
    ensure_eq(open(iommu)?.strength(), Strength::Enforcing, "strength")
}

pub(super) fn reset_returns_success_and_clears_the_command_register(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let config = ConfigSpace::new(&*transport);
    let command = CommandRegister::open(&config)?;
    command.bus_master_on(&config)?;
    let off = command.bus_master_off(&config)?;
    ensure_eq(off.device(), transport.id(), "witness's device")?;
    transport.reset()?;
    ensure(!config.command()?.contains(Command::BUS_MASTER), || {
        "the reset turned bus mastering on".into()
    })
}

pub(super) fn interrupts_are_routed_and_disabled_again(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let events: Vec<EventFd> = (0..3)
        .map(|_| EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK))
        .collect::<Result<_, _>>()?;
    let descriptors: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    transport.set_irqs(IrqIndex::Msix, 0, &descriptors)?;
    transport.set_irqs(IrqIndex::Error, 0, &descriptors[..1])?;
    transport.set_irqs(IrqIndex::Request, 0, &descriptors[..1])?;
    for index in [IrqIndex::Msix, IrqIndex::Error, IrqIndex::Request] {
        transport.set_irqs(index, 0, &[])?;
        // Once more: what is disabled stays disabled.
        transport.set_irqs(index, 0, &[])?;
    }
    let fired = events.iter().any(|event| event.read().is_ok());
    ensure(!fired, || "disabling fired a vector".into())?;
    let beyond = transport.set_irqs(IrqIndex::Msix, 9, &descriptors[..2]);
    ensure(beyond.is_err(), || {
        "a vector beyond the last was routed".into()
    })
}

pub(super) fn an_ended_generation_reaches_no_register(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let config = ConfigSpace::new(&*transport);
    CommandRegister::open(&config)?.memory_space_on(&config)?;
    let bar = RegionIndex::Bar(0);
    let mut word = [0; 4];
    transport.read(Generation::FIRST, bar, 8, &mut word)?;
    transport.expire(Generation::FIRST);
    let dead = transport.read(Generation::FIRST, bar, 8, &mut word);
    ensure(matches!(dead, Err(AccessError::Expired { .. })), || {
        format!("{dead:?}")
    })?;
    transport.read(Generation::FIRST.next(), bar, 8, &mut word)?;
    // The ladder must still reach the command register.
    config.command()?;
    Ok(())
}

pub(super) fn a_function_that_is_open_is_named_busy(iommu: Iommu) -> Outcome {
    let first = open(iommu)?;
    let second = open_address(bound("igb")?, iommu);
    match second {
        Err(error @ OpenError::Busy { .. }) => says(&error, &[first.name(), "in use"]),
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn bus_mastering_is_off_after_the_last_close(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let transport = open_address(address, iommu)?;
    let config = ConfigSpace::new(&*transport);
    CommandRegister::open(&config)?.bus_master_on(&config)?;
    ensure_eq(bus_master(address)?, Some(true), "bus mastering while open")?;
    drop(transport);
    ensure_eq(
        bus_master(address)?,
        Some(false),
        "bus mastering after close",
    )
}

/// A function's bus-master bit as another process sees it.
pub(super) fn bus_master(
    address: failstop_pci::address::Address,
) -> Result<Option<bool>, libtest_mimic::Failed> {
    let function = Sysfs::system().function(address)?;
    let group = function.group.ok_or("no group")?;
    let mut members = group.members.iter();
    let member = members.find(|member| member.address == address);
    Ok(member.and_then(|member| member.bus_master))
}

pub(super) fn a_kernel_driver_in_the_way_is_named(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    Sysfs::system().unbind(address, false)?;
    match open_address(address, iommu) {
        Err(OpenError::NotUsable(error @ NotUsable::NotBound { .. })) => {
            says(&error, &["bound to igb", "failstop bind"])
        }
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn auto_takes_iommufd_where_there_is_one() -> Outcome {
    let expected = if Path::new("/dev/iommu").exists() {
        Kind::Iommufd
    } else {
        Kind::Container
    };
    ensure_eq(open(Iommu::Auto)?.kind(), expected, "transport")
}

pub(super) fn a_kernel_without_iommufd_says_so() -> Outcome {
    bound("igb")?;
    match open_address(role("igb")?, Iommu::Iommufd) {
        Err(error @ OpenError::Missing { .. }) => says(&error, &["/dev/iommu does not exist"]),
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn without_interrupt_remapping_the_switch_is_named(iommu: Iommu) -> Outcome {
    match open_address(bound("igb")?, iommu) {
        Err(error @ OpenError::Isolation { .. }) => says(
            &error,
            &["interrupt remapping", "parameters/allow_unsafe_interrupts"],
        ),
        other => Err(format!("{other:?}").into()),
    }
}
