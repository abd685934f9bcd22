//! Why a function could not be opened.

use std::io;
use std::path::PathBuf;

use nix::errno::Errno;
use thiserror::Error;

use super::chain::ChainError;
use crate::capabilities::CapabilityError;
use crate::sysfs::NotUsable;
use crate::transport::AccessError;

/// A function that could not be opened. Nothing stays open, bound or mapped by the failed call.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Something that sysfs shows already.
    #[error(transparent)]
    NotUsable(#[from] NotUsable),
    /// A device file is missing: a kernel module is not loaded, or the kernel was built without it.
    #[error("{} does not exist: load {module}, or boot a kernel that has it", path.display())]
    Missing {
        /// Which file.
        path: PathBuf,
        /// The module that makes it.
        module: &'static str,
    },
    /// The user may not open a device file.
    #[error(
        "no permission to open {path} (owner {owner}): run as its owner, `chown` it, or add a udev \
         rule such as SUBSYSTEM==\"vfio\", OWNER=\"USER\"", path = path.display()
    )]
    Permission {
        /// Which file.
        path: PathBuf,
        /// Its owner's user ID.
        owner: u32,
    },
    /// Somebody has the group or the device open.
    #[error(
        "{device}: {} is in use by another process, or by this one through another container \
         (functions of one group are opened through one Container); close that one first",
        path.display()
    )]
    Busy {
        /// The function's name.
        device: String,
        /// Which file.
        path: PathBuf,
    },
    /// The kernel will not hand the function out because its interrupts cannot be isolated.
    #[error(
        "{device}: the kernel refused the IOMMU (EPERM): without interrupt remapping a device can \
         forge interrupts. Turn interrupt remapping on in the firmware; or, if every user of this \
         machine is trusted, write 1 to {parameter}. If remapping is on, the platform reserves \
         memory for this device (RMRR, see dmesg), and it cannot be handed out"
    )]
    Isolation {
        /// The function's name.
        device: String,
        /// The module parameter that allows it.
        parameter: &'static str,
    },
    /// The kernel offers no type1 v2 IOMMU.
    #[error("{} offers no type1 v2 IOMMU: load vfio_iommu_type1", path.display())]
    NoType1 {
        /// Which file.
        path: PathBuf,
    },
    /// Configuration space could not be read.
    #[error("{device}: its configuration space could not be read")]
    Config {
        /// The function's name.
        device: String,
        /// Why.
        #[source]
        source: AccessError,
    },
    /// The function's capability lists cannot be followed.
    #[error("{device}: its configuration space is damaged; reset or replace the device")]
    Capabilities {
        /// The function's name.
        device: String,
        /// What is wrong.
        #[source]
        source: CapabilityError,
    },
    /// The kernel's answer does not hold together.
    #[error("{device}: {step} answered nonsense: {reason}")]
    Answer {
        /// The function's name.
        device: String,
        /// Which call.
        step: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Any other refusal.
    #[error("{device}: {step} failed")]
    Kernel {
        /// The function's name.
        device: String,
        /// Which call.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn kernel(device: &str, step: &'static str, errno: Errno) -> Self {
        Self::Kernel {
            device: device.to_owned(),
            step,
            source: errno.into(),
        }
    }

    pub(super) fn answer(device: &str, step: &'static str, error: ChainError) -> Self {
        Self::Answer {
            device: device.to_owned(),
            step,
            reason: error.to_string(),
        }
    }
}
