//! `failstop bind` and `failstop unbind`.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use failstop::pci::address::Address;
use failstop::pci::sysfs::{Sysfs, VFIO_PCI};

use crate::exit::Exit;

/// Options of `failstop bind` and `failstop unbind`.
#[derive(Args, Debug)]
pub(crate) struct BindArgs {
    /// The function, like 0000:01:00.0.
    device: Address,
    /// Takes the function away although it is in use.
    #[arg(long)]
    force: bool,
}

/// Binds a function to vfio-pci.
pub(crate) fn bind(args: &BindArgs, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    let address = args.device;
    let bound = sysfs.bind(address, args.force)?;
    match bound.former.as_deref() {
        Some(VFIO_PCI) => writeln!(out, "{address} is bound to vfio-pci already")?,
        Some(former) => writeln!(
            out,
            "{address} is bound to vfio-pci; `failstop unbind {address}` gives it back to {former}"
        )?,
        None => writeln!(
            out,
            "{address} is bound to vfio-pci; no driver had it before"
        )?,
    }
    if let Some(group) = sysfs.function(address)?.group {
        let mut files = sysfs.group_path(group.number).display().to_string();
        if let Some(cdev) = sysfs.cdev_path(address).filter(|path| path.exists()) {
            files = format!(
                "{files} {} {}",
                cdev.display(),
                sysfs.iommufd_path().display()
            );
        }
        writeln!(out, "to use it as an ordinary user: chown USER {files}")?;
    }
    Ok(Exit::Clean)
}

/// Gives a function back to the kernel's driver.
pub(crate) fn unbind(args: &BindArgs, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    let address = args.device;
    match sysfs.unbind(address, args.force)?.driver {
        Some(driver) => writeln!(out, "{address} is back with {driver}")?,
        None => writeln!(
            out,
            "{address} is free; no loaded driver knows it (load its driver, which then takes it)"
        )?,
    }
    Ok(Exit::Clean)
}
