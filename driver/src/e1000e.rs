//! Intel's e1000e family: 82574.
//!
//! Section numbers are the public 82574 datasheet's (317694, revision 3.4); where only the chapter
//! could be confirmed from public sources, the chapter is named.

pub mod bits;
pub mod descriptors;
pub mod format;
pub mod phy;
pub(crate) mod provider;
pub mod registers;

use crate::families::Driver;
use crate::intel::VENDOR;

/// Which part a function is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Part {
    /// 82574: two queues each way, of which the driver uses one; no function-level reset.
    I82574,
}

impl Part {
    /// The name that people use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I82574 => "82574",
        }
    }

    /// The part that a PCI id belongs to, if this provider drives it.
    #[must_use]
    pub fn of(vendor: u16, device: u16) -> Option<Self> {
        if vendor != VENDOR {
            return None;
        }
        DEVICES
            .iter()
            .find(|(id, _, _)| *id == device)
            .map(|(_, part, _)| *part)
    }
}

/// PCI device ids of vendor [`VENDOR`], the part that each is, and its flavour.
pub const DEVICES: &[(u16, Part, &str)] = &[
    (0x10d3, Part::I82574, "82574L"),
    (0x10f6, Part::I82574, "82574LA"),
];

/// What drives the function of that PCI id, if it is one of the family.
pub(crate) fn driver(vendor: u16, device: u16) -> Option<Driver> {
    let part = Part::of(vendor, device)?;
    let make = move |window, clock| provider::E1000e::new(part, window, clock);
    Some(Driver::new(registers::BAR_SIZE, make))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_82574_is_recognised_by_its_id() {
        assert_eq!(Part::of(0x8086, 0x10d3), Some(Part::I82574));
    }

    #[test]
    fn an_82576_is_none() {
        assert_eq!(Part::of(0x8086, 0x10c9), None);
    }
}
