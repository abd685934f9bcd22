//! What sysfs knows of PCI functions, and binding them to vfio-pci and back.
//!
//! ```no_run
//! use failstop_pci::sysfs::Sysfs;
//!
//! for function in Sysfs::system().network_functions()? {
//!     println!("{} {}", function.address, function.device_name().unwrap_or("unknown"));
//! }
//! # Ok::<(), failstop_pci::sysfs::SysfsError>(())
//! ```

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::address::Address;

mod bind;
mod function;
mod preflight;

#[cfg(test)]
mod fake;

pub use bind::{BindError, Bound, GivenBack, InUse};
pub use function::{Function, Group, Interface, Link, Member};
pub use preflight::{NotUsable, Ready, Sibling};

/// The driver that hands a function to user space.
pub const VFIO_PCI: &str = "vfio-pci";

/// Where sysfs and the device files are.
#[derive(Clone, Debug)]
pub struct Sysfs {
    sys: PathBuf,
    dev: PathBuf,
    proc: PathBuf,
    /// How a file of sysfs is written: a test has a kernel of its own behind it.
    write: fn(&Path, &str) -> io::Result<()>,
    /// The machine's IP addresses by interface: the one thing that sysfs does not show.
    addresses: fn() -> Vec<(String, IpAddr)>,
}

/// A file of sysfs that could not be read or written.
#[derive(Debug, Error)]
#[error("could not {action} {}", path.display())]
pub struct SysfsError {
    /// Which file.
    pub path: PathBuf,
    /// "read", "list" or "write".
    pub action: &'static str,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl Sysfs {
    /// The running system's `/sys`, `/dev` and `/proc`.
    #[must_use]
    pub fn system() -> Self {
        Self {
            sys: PathBuf::from("/sys"),
            dev: PathBuf::from("/dev"),
            proc: PathBuf::from("/proc"),
            write: write_existing,
            addresses: interface_addresses,
        }
    }

    /// Trees `sys`, `dev` and `proc` below `root`, with no IP addresses: for tests.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        Self {
            sys: root.join("sys"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            write: write_existing,
            addresses: Vec::new,
        }
    }

    /// Every network function (class 0x02) of the machine, in the order of their addresses.
    ///
    /// # Errors
    ///
    /// [`SysfsError`] when the PCI devices cannot be listed. A function that goes away meanwhile is
    /// left out.
    pub fn network_functions(&self) -> Result<Vec<Function>, SysfsError> {
        let path = self.sys.join("bus/pci/devices");
        let mut functions: Vec<Function> = list(&path)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .filter_map(|address| self.function(address).ok())
            .filter(Function::is_network)
            .collect();
        functions.sort_by_key(|function| function.address);
        Ok(functions)
    }

    /// A function's configuration space: 256 or 4096 bytes for root, the first 64 for others.
    ///
    /// # Errors
    ///
    /// [`SysfsError`] when it cannot be read.
    pub fn config(&self, address: Address) -> Result<Vec<u8>, SysfsError> {
        let path = self.device_path(address).join("config");
        fs::read(&path).map_err(|source| SysfsError {
            path,
            action: "read",
            source,
        })
    }

    /// The methods by which the kernel resets a function, in its order, as the kernel writes them
    /// (`reset_method`, from Linux 5.15 on).
    ///
    /// # Errors
    ///
    /// [`SysfsError`] when the file cannot be read.
    pub fn reset_method(&self, address: Address) -> Result<String, SysfsError> {
        read(&self.device_path(address).join("reset_method"))
    }

    /// Chooses the methods by which the kernel resets a function, for everybody and until somebody
    /// chooses otherwise. Takes root.
    ///
    /// # Errors
    ///
    /// [`SysfsError`] when the file cannot be written.
    pub fn set_reset_method(&self, address: Address, methods: &str) -> Result<(), SysfsError> {
        let path = self.device_path(address).join("reset_method");
        (self.write)(&path, methods).map_err(|source| SysfsError {
            path,
            action: "write",
            source,
        })
    }

    /// The same with another kernel behind it.
    #[cfg(test)]
    pub(crate) fn with_write(self, write: fn(&Path, &str) -> io::Result<()>) -> Self {
        Self { write, ..self }
    }

    /// The file of the type1 container.
    #[must_use]
    pub fn container_path(&self) -> PathBuf {
        self.dev.join("vfio/vfio")
    }

    /// The file of iommufd.
    #[must_use]
    pub fn iommufd_path(&self) -> PathBuf {
        self.dev.join("iommu")
    }

    /// The file of an IOMMU group.
    #[must_use]
    pub fn group_path(&self, group: u32) -> PathBuf {
        self.dev.join(format!("vfio/{group}"))
    }

    /// The file of an IOMMU group without an IOMMU.
    #[must_use]
    pub fn noiommu_path(&self, group: u32) -> PathBuf {
        self.dev.join(format!("vfio/noiommu-{group}"))
    }

    /// The character device of a function that is bound to vfio-pci, where the kernel has those.
    #[must_use]
    pub fn cdev_path(&self, address: Address) -> Option<PathBuf> {
        let names = list(&self.device_path(address).join("vfio-dev")).ok()?;
        let name = names.into_iter().find(|name| name.starts_with("vfio"))?;
        Some(self.dev.join("vfio/devices").join(name))
    }

    /// Whether a function that is bound to vfio-pci can be opened through iommufd.
    #[must_use]
    pub fn has_iommufd(&self, address: Address) -> bool {
        self.iommufd_path().exists() && self.cdev_path(address).is_some_and(|path| path.exists())
    }

    pub(crate) fn device_path(&self, address: Address) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }

    fn driver_path(&self, driver: &str) -> PathBuf {
        self.sys.join("bus/pci/drivers").join(driver)
    }
}

/// The IP addresses of this machine's interfaces.
fn interface_addresses() -> Vec<(String, IpAddr)> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else {
        return Vec::new();
    };
    all.filter_map(|interface| {
        let address = interface.address?;
        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (_, Some(v6)) => IpAddr::V6(v6.ip()),
            _ => return None,
        };
        Some((interface.interface_name, ip))
    })
    .collect()
}

/// Writes a file that exists, in one system call: sysfs takes each as one command.
fn write_existing(path: &Path, text: &str) -> io::Result<()> {
    fs::File::options()
        .write(true)
        .open(path)?
        .write_all(text.as_bytes())
}

/// A file's text without its newline.
fn read(path: &Path) -> Result<String, SysfsError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(SysfsError {
            path: path.to_owned(),
            action: "read",
            source,
        }),
    }
}

/// The names in a directory, sorted.
fn list(path: &Path) -> Result<Vec<String>, SysfsError> {
    let error = |source| SysfsError {
        path: path.to_owned(),
        action: "list",
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(error)? {
        names.push(
            entry
                .map_err(error)?
                .file_name()
                .to_string_lossy()
                .into_owned(),
        );
    }
    names.sort();
    Ok(names)
}

/// The last part of what a link points to; none when there is no link.
fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}
