//! Registers of the integrated PHY (BM), reached through [`MDIC`](super::registers::MDIC): those
//! of clause 22, and its own.

pub use crate::intel::phy::*;

/// Page select: the page that the registers from 16 on, without this one, belong to.
pub const PAGE_SELECT: u32 = 22;
/// The page of [`MAC_CONTROL`].
pub const MAC_PAGE: u16 = 2;
/// MAC specific control, on page [`MAC_PAGE`].
pub const MAC_CONTROL: u32 = 21;
/// Bits of [`MAC_CONTROL`] with the default speed of the interface to the MAC.
pub const MAC_SPEED: u16 = 0x7;
/// 1000 Mb/s in them.
pub const MAC_SPEED_1000: u16 = 0x6;
