//! Registers of the integrated PHY (IGP), reached through [`MDIC`](super::registers::MDIC): those
//! of clause 22, which the 82574's has too, and its own. §8.24

pub use crate::intel::phy::*;

/// Port configuration (IGP).
pub const PORT_CONFIG: u32 = 16;
/// Port status (IGP): bits 15:14 the speed, 11 for 1000 Mb/s in both.
pub const PORT_STATUS: u32 = 17;
/// Port control (IGP).
pub const PORT_CONTROL: u32 = 18;
/// Link health (IGP).
pub const LINK_HEALTH: u32 = 19;
/// Power management (IGP).
pub const POWER_MANAGEMENT: u32 = 25;
/// Page select: the page that the registers above 15 belong to (IGP).
pub const PAGE_SELECT: u32 = 31;

/// What [`ID_1`] and [`ID_2`] read on the 82576 (IGP03), revision included.
pub const IGP03_ID: (u16, u16) = (0x02A8, 0x0391);
