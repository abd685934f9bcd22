//! What a device is named by.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use failstop_pci::address::Address;
use thiserror::Error;

/// A device, by what it is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum DeviceName {
    /// A function bound to vfio-pci: `0000:01:00.0`.
    Pci(Address),
    /// A vfio-user server's socket: `vfio-user:PATH`.
    VfioUser(PathBuf),
}

/// What is left to do with a device that answers to nothing, by its name: a server is started again,
/// and a function loses its power.
pub(crate) fn last_resort(device: &str) -> &'static str {
    match device.parse() {
        Ok(DeviceName::VfioUser(_)) => "start its server again",
        _ => "power-cycle the machine",
    }
}

/// Text that names no device.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("`{text}` names no device; write a PCI address (0000:01:00.0) or vfio-user:PATH")]
pub struct NotADevice {
    text: String,
}

impl FromStr for DeviceName {
    type Err = NotADevice;

    fn from_str(text: &str) -> Result<Self, NotADevice> {
        let refused = || NotADevice {
            text: text.to_owned(),
        };
        match text.strip_prefix("vfio-user:") {
            Some("") => Err(refused()),
            Some(path) => Ok(Self::VfioUser(path.into())),
            None => text.parse().map(Self::Pci).map_err(|_| refused()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pci(address) => address.fmt(f),
            Self::VfioUser(path) => write!(f, "vfio-user:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_fits_what_carries_the_device() {
        assert!(last_resort("vfio-user:/run/nic.sock").contains("server"));
        assert!(last_resort("0000:01:00.0").contains("power-cycle"));
    }

    #[test]
    fn names_are_written_as_they_are_read() {
        for text in ["0000:01:00.0", "vfio-user:/run/nic.sock"] {
            assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_forms_that_are_taken() {
        for text in ["", "eth0", "0000:01:00", "vfio-user:", "0000:zz:00.0"] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(
                error.contains("0000:01:00.0") && error.contains(text),
                "{error}"
            );
        }
    }
}
