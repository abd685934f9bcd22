//! Binding to vfio-pci and giving back, with a real kernel behind sysfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use failstop_pci::address::Address;
use failstop_pci::sysfs::{BindError, NotUsable, Sysfs};
use failstop_pci::transport::vfio::{Iommu, OpenError};

use super::{NOIOMMU_MODE, bound, inner, open, open_address, role, says};
use crate::fixture::{Outcome, ensure, ensure_eq};

pub(super) fn a_function_is_bound_and_given_back() -> Outcome {
    let sysfs = Sysfs::system();
    let address = bound("igb")?;
    let function = sysfs.function(address)?;
    ensure(function.is_bound_to_vfio(), || format!("{function:?}"))?;
    ensure(function.interfaces.is_empty(), || format!("{function:?}"))?;
    let back = sysfs.unbind(address, false)?;
    ensure_eq(back.driver.as_deref(), Some("igb"), "driver after unbind")?;
    let again = sysfs.bind(address, false)?;
    ensure_eq(again.former.as_deref(), Some("igb"), "former driver")?;
    let text = fs::read_to_string(device(address).join("driver_override"))?;
    ensure_eq(text.trim(), "vfio-pci", "driver_override")?;
    sysfs.unbind(address, false)?;
    let text = fs::read_to_string(device(address).join("driver_override"))?;
    ensure_eq(text.trim(), "(null)", "driver_override after unbind")
}

pub(super) fn an_interface_with_an_address_is_not_taken_away() -> Outcome {
    let sysfs = Sysfs::system();
    let address = bound("igb")?;
    sysfs.unbind(address, false)?;
    let interfaces = sysfs.function(address)?.interfaces;
    let name = &interfaces.first().ok_or("no interface")?.name;
    ip(&["addr", "add", "192.0.2.7/24", "dev", name])?;
    ip(&["link", "set", name, "up"])?;
    match sysfs.bind(address, false) {
        Err(error @ BindError::InUse { .. }) => says(&error, &[name, "192.0.2.7", "--force"])?,
        other => return Err(format!("{other:?}").into()),
    }
    ensure_eq(
        sysfs.function(address)?.driver.as_deref(),
        Some("igb"),
        "driver",
    )?;
    sysfs.bind(address, true)?;
    Ok(())
}

fn ip(arguments: &[&str]) -> Outcome {
    let status = Command::new("ip").args(arguments).status()?;
    ensure(status.success(), || format!("ip {arguments:?}: {status}"))
}

pub(super) fn an_open_function_is_not_given_back() -> Outcome {
    let transport = open(Iommu::Container)?;
    match Sysfs::system().unbind(role("igb")?, false) {
        Err(error @ BindError::Open { .. }) => {
            says(&error, &[transport.name(), &std::process::id().to_string()])
        }
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn an_ordinary_user_cannot_bind() -> Outcome {
    let address = bound("igb")?;
    Sysfs::system().unbind(address, false)?;
    inner::part("bind", Iommu::Container)
}

pub(super) fn without_an_iommu_nothing_is_bound() -> Outcome {
    let sysfs = Sysfs::system();
    let address = role("igb")?;
    match sysfs.bind(address, true) {
        Err(error @ BindError::NoIommu { .. }) => says(&error, &["intel_iommu=on"])?,
        other => return Err(format!("{other:?}").into()),
    }
    ensure_eq(
        sysfs.function(address)?.driver.as_deref(),
        Some("igb"),
        "driver",
    )?;
    match open_address(address, Iommu::Container) {
        Err(OpenError::NotUsable(error @ NotUsable::NoIommu { .. })) => {
            says(&error, &["no IOMMU group"])
        }
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn noiommu_mode_is_recognised_and_refused() -> Outcome {
    let address = role("igb")?;
    fs::write(NOIOMMU_MODE, "1")?;
    // By hand: our own bind refuses.
    fs::write(device(address).join("driver_override"), "vfio-pci")?;
    fs::write(device(address).join("driver/unbind"), address.to_string())?;
    fs::write("/sys/bus/pci/drivers_probe", address.to_string())?;
    let refused = open_address(address, Iommu::Container);
    Sysfs::system().unbind(address, false)?;
    fs::write(NOIOMMU_MODE, "0")?;
    match refused {
        Err(OpenError::NotUsable(error @ NotUsable::NoIommuMode { .. })) => {
            says(&error, &["/dev/vfio/noiommu-", "comes later"])
        }
        other => Err(format!("{other:?}").into()),
    }
}

fn device(address: Address) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(address.to_string())
}
