//! From a name to the transport that carries the device.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use failstop_pci::address::Address;
use failstop_pci::sysfs::Sysfs;
use failstop_pci::transport::Transport;
use failstop_pci::transport::vfio::{self, Iommu};
use failstop_pci::transport::vfio_user::{Client, ConnectError, Options};
use thiserror::Error;

use crate::name::DeviceName;

/// A device that could not be reached.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Its vfio-user server.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Kernel VFIO.
    #[error(transparent)]
    Vfio(#[from] vfio::OpenError),
}

/// How to reach the IOMMU of a PCI function, as an option says it: `auto`, `container`, `iommufd`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct IommuChoice(pub Iommu);

/// Text that names no such way.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("`{text}` is no way to the IOMMU; write auto, container or iommufd")]
pub struct NoSuchChoice {
    text: String,
}

impl FromStr for IommuChoice {
    type Err = NoSuchChoice;

    fn from_str(text: &str) -> Result<Self, NoSuchChoice> {
        Ok(Self(match text {
            "auto" => Iommu::Auto,
            "container" => Iommu::Container,
            "iommufd" => Iommu::Iommufd,
            _ => {
                return Err(NoSuchChoice {
                    text: text.to_owned(),
                });
            }
        }))
    }
}

impl fmt::Display for IommuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Iommu::Auto => "auto",
            Iommu::Container => "container",
            Iommu::Iommufd => "iommufd",
        })
    }
}

/// Reaches the device called `name`. `ours` are the functions of its IOMMU group that this process
/// drives too; any other that is bus master is refused (R1).
///
/// # Errors
///
/// [`OpenError`], which says what to do about it.
pub fn transport(
    name: &DeviceName,
    iommu: IommuChoice,
    ours: &[Address],
) -> Result<Arc<dyn Transport>, OpenError> {
    Ok(match name {
        DeviceName::Pci(address) => vfio::open(&Sysfs::system(), *address, iommu.0, ours)?,
        DeviceName::VfioUser(path) => Client::connect(path, Options::default())?,
    })
}
