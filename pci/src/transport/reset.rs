//! The ways to reset a function, and how they fail.

use std::fmt;
use std::io;
use std::str::FromStr;

use nix::errno::Errno;
use thiserror::Error;

use crate::sysfs::SysfsError;

/// A way to reset a function. The first seven are the kernel's, in its order of preference and by
/// the words of sysfs `reset_method` (`drivers/pci/pci.c`, `pci_reset_fn_methods`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ResetMethod {
    /// What the kernel knows of this one device.
    DeviceSpecific,
    /// What the firmware's `_RST` method does.
    Acpi,
    /// Function-level reset of a PCIe function (PCIe base specification 6.0, §6.6.2).
    Flr,
    /// Function-level reset by the advanced-features capability (conventional PCI).
    AfFlr,
    /// From D3hot back to D0. Resets nothing on a function whose power management says *no soft
    /// reset*, and on some that do not say so.
    Pm,
    /// Secondary bus reset of a bridge with this one function behind it.
    Bus,
    /// The same on a CXL bridge.
    CxlBus,
    /// `VFIO_DEVICE_PCI_HOT_RESET`: slot or bus reset of everything behind a bridge.
    Hot,
    /// The vfio-user message `VFIO_USER_DEVICE_RESET`.
    Server,
    /// The provider's own, by the function's registers. Enough to start again; alone no ground to
    /// release memory where no IOMMU enforces (R4.5).
    Software,
}

impl ResetMethod {
    /// The methods that sysfs `reset_method` can name.
    pub const KERNEL: [Self; 7] = [
        Self::DeviceSpecific,
        Self::Acpi,
        Self::Flr,
        Self::AfFlr,
        Self::Pm,
        Self::Bus,
        Self::CxlBus,
    ];

    /// The name that reports use; for the kernel's own the word of sysfs `reset_method`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DeviceSpecific => "device_specific",
            Self::Acpi => "acpi",
            Self::Flr => "flr",
            Self::AfFlr => "af_flr",
            Self::Pm => "pm",
            Self::Bus => "bus",
            Self::CxlBus => "cxl_bus",
            Self::Hot => "hot",
            Self::Server => "server",
            Self::Software => "software",
        }
    }

    /// Whether sysfs `reset_method` can name it.
    #[must_use]
    pub fn is_kernels(self) -> bool {
        Self::KERNEL.contains(&self)
    }

    /// The methods in a text of sysfs `reset_method`, in its order. A word that a later kernel
    /// added is left out.
    #[must_use]
    pub fn parse_list(text: &str) -> Vec<Self> {
        text.split_whitespace()
            .filter_map(|word| word.parse().ok())
            .filter(|method: &Self| method.is_kernels())
            .collect()
    }
}

impl fmt::Display for ResetMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no reset method.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "'{word}' is no reset method: device_specific, acpi, flr, af_flr, pm, bus, cxl_bus, hot, server or software"
)]
pub struct UnknownMethod {
    /// The word.
    pub word: String,
}

impl FromStr for ResetMethod {
    type Err = UnknownMethod;

    fn from_str(word: &str) -> Result<Self, UnknownMethod> {
        Self::KERNEL
            .into_iter()
            .chain([Self::Hot, Self::Server, Self::Software])
            .find(|method| method.name() == word)
            .ok_or_else(|| UnknownMethod {
                word: word.to_owned(),
            })
    }
}

/// A reset that was refused or failed; what it left behind is unknown.
#[derive(Debug, Error)]
pub enum ResetFailed {
    /// The kernel or the server refused or failed.
    #[error("{device}: the reset failed")]
    Failed {
        /// The function's name.
        device: String,
        /// Why: ENOTTY or EINVAL where the function has no reset.
        #[source]
        source: io::Error,
    },
    /// Not now (EAGAIN, EBUSY): another reset is under way, or the function is being removed;
    /// nothing changed.
    #[error(
        "{device}: the reset was refused for now; try again, unless the function is being removed"
    )]
    Busy {
        /// The function's name.
        device: String,
    },
    /// The server did not answer in time: the reset may happen yet, and no other is asked for until
    /// it is answered ([`Transport::is_reset_outstanding`](super::Transport::is_reset_outstanding)).
    #[error("{device}: the reset was not answered, and may happen yet")]
    Unanswered {
        /// The function's name.
        device: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The function has no such reset, or not through this transport.
    #[error("{device}: there is no {method} reset; sysfs reset_method says which there are")]
    NotOffered {
        /// The function's name.
        device: String,
        /// Which.
        method: ResetMethod,
    },
    /// The method could not be chosen in sysfs `reset_method`, and nothing was reset.
    #[error(
        "{device}: the {method} reset could not be chosen; it takes root, and Linux 5.15 or newer"
    )]
    Choice {
        /// The function's name.
        device: String,
        /// Which.
        method: ResetMethod,
        /// Why.
        #[source]
        source: SysfsError,
    },
    /// A hot reset would also reset functions that are not this one; nothing was reset (C36).
    #[error(
        "{device}: a hot reset would also reset {}; break and close those first",
        others.join(", ")
    )]
    Touches {
        /// The function's name.
        device: String,
        /// The other functions' names.
        others: Vec<String>,
    },
    /// Bus mastering was shown to be off on another function than this one; nothing was reset.
    #[error("{device}: bus mastering was turned off on another function, not on this one")]
    NotOff {
        /// The function's name.
        device: String,
    },
}

impl ResetFailed {
    /// A failure that the kernel or the server reported as `source`.
    #[must_use]
    pub fn new(device: &str, source: io::Error) -> Self {
        let device = device.to_owned();
        match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EAGAIN | Errno::EBUSY) => Self::Busy { device },
            _ => Self::Failed { device, source },
        }
    }

    /// Whether trying again may help.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back() {
        for name in [
            "device_specific",
            "acpi",
            "flr",
            "af_flr",
            "pm",
            "bus",
            "cxl_bus",
            "hot",
            "server",
            "software",
        ] {
            assert_eq!(name.parse::<ResetMethod>().unwrap().name(), name);
        }
        let error = "flrs".parse::<ResetMethod>().unwrap_err();
        assert!(error.to_string().contains("'flrs'"), "{error}");
    }

    #[test]
    fn the_kernels_order_is_kept_and_what_it_cannot_name_left_out() {
        let methods = ResetMethod::parse_list("pm hot bus  new_one flr\n");
        assert_eq!(
            methods,
            [ResetMethod::Pm, ResetMethod::Bus, ResetMethod::Flr]
        );
        assert_eq!(ResetMethod::parse_list("\n"), []);
    }

    #[test]
    fn a_reset_lock_that_is_held_is_told_apart_from_a_failure() {
        let failed = |errno: Errno| ResetFailed::new("0000:01:00.0", errno.into());
        assert!(failed(Errno::EAGAIN).is_busy());
        assert!(failed(Errno::EBUSY).is_busy());
        assert!(!failed(Errno::ENOTTY).is_busy());
    }
}
