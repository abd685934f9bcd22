//! What Intel's igb and e1000e families have in common: register values, PHY registers, counters,
//! and what is done with them in the same way.

pub mod bits;
pub(crate) mod mac;
pub mod phy;
pub mod statistics;

/// Intel's PCI vendor id.
pub const VENDOR: u16 = 0x8086;
