//! Intel's igb family: 82576, I350, I210.
//!
//! What the driver and the emulated twin share stands here once: registers, their values,
//! statistics, PHY registers and descriptors. Section numbers are the public 82576 datasheet's;
//! where only the chapter could be confirmed from public sources, the chapter is named.

pub mod bits;
pub mod descriptors;
pub mod format;
pub mod phy;
pub(crate) mod provider;
pub mod registers;

use crate::families::Driver;
pub use crate::intel::{VENDOR, statistics};

/// Which part a function is: they differ in small things (queues, receive addresses, NVM).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Part {
    /// 82576: 16 queues each way, 24 receive addresses.
    I82576,
    /// I350: 8 queues each way, 32 receive addresses.
    I350,
    /// I210: 4 queues each way, 16 receive addresses.
    I210,
}

impl Part {
    /// The name that people use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I82576 => "82576",
            Self::I350 => "I350",
            Self::I210 => "I210",
        }
    }

    /// Receive queues, and as many transmit queues.
    #[must_use]
    pub const fn queues(self) -> u32 {
        match self {
            Self::I82576 => 16,
            Self::I350 => 8,
            Self::I210 => 4,
        }
    }

    /// Pairs of [`registers::RAL`] and [`registers::RAH`].
    #[must_use]
    pub const fn receive_addresses(self) -> u32 {
        match self {
            Self::I82576 => 24,
            Self::I350 => 32,
            Self::I210 => 16,
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

/// PCI device ids of vendor [`VENDOR`], the part that each is, and its flavour. Physical functions
/// only.
pub const DEVICES: &[(u16, Part, &str)] = &[
    (0x10c9, Part::I82576, "copper"),
    (0x10e6, Part::I82576, "fiber"),
    (0x10e7, Part::I82576, "SerDes"),
    (0x10e8, Part::I82576, "quad copper"),
    (0x150a, Part::I82576, "NS copper"),
    (0x150d, Part::I82576, "quad SerDes"),
    (0x1518, Part::I82576, "NS SerDes"),
    (0x1526, Part::I82576, "quad copper ET2"),
    (0x1521, Part::I350, "copper"),
    (0x1522, Part::I350, "fiber"),
    (0x1523, Part::I350, "SerDes"),
    (0x1524, Part::I350, "SGMII"),
    (0x1533, Part::I210, "copper"),
    (0x1536, Part::I210, "fiber"),
    (0x1537, Part::I210, "SerDes"),
    (0x1538, Part::I210, "SGMII"),
    (0x157b, Part::I210, "copper, flashless"),
    (0x157c, Part::I210, "SerDes, flashless"),
];

/// What drives the function of that PCI id, if it is one of the family.
pub(crate) fn driver(vendor: u16, device: u16) -> Option<Driver> {
    let part = Part::of(vendor, device)?;
    let make = move |window, clock| provider::Igb::new(part, window, clock);
    Some(Driver::new(registers::BAR_SIZE, make))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_82576_is_recognised_by_its_id() {
        assert_eq!(Part::of(0x8086, 0x10c9), Some(Part::I82576));
    }

    #[test]
    fn another_vendor_s_10c9_is_not_ours() {
        assert_eq!(Part::of(0x1af4, 0x10c9), None);
    }

    #[test]
    fn a_virtual_function_is_not_taken_for_a_physical_one() {
        assert_eq!(Part::of(0x8086, 0x10ca), None);
    }
}
