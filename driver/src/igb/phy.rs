//! Registers of the integrated PHY, reached through [`MDIC`](super::registers::MDIC), and the bits
//! of them that a driver uses. Numbers and bits below 16 are IEEE 802.3 clause 22's; §8.24 of the
//! 82576 datasheet lists them.

use bitflags::bitflags;

/// The integrated PHY's address on the MDI bus. §8.2.4
pub const ADDRESS: u32 = 1;

/// Control register (BMCR).
pub const CONTROL: u32 = 0;
/// Status register (BMSR).
pub const STATUS: u32 = 1;
/// Identifier, bits 3:18 of the OUI.
pub const ID_1: u32 = 2;
/// Identifier, the rest of the OUI, model and revision.
pub const ID_2: u32 = 3;
/// Autonegotiation advertisement.
pub const ADVERTISEMENT: u32 = 4;
/// Autonegotiation link partner ability.
pub const PARTNER_ABILITY: u32 = 5;
/// Autonegotiation expansion.
pub const EXPANSION: u32 = 6;
/// 1000BASE-T control.
pub const GIGABIT_CONTROL: u32 = 9;
/// 1000BASE-T status.
pub const GIGABIT_STATUS: u32 = 10;
/// Extended status.
pub const EXTENDED_STATUS: u32 = 15;
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

bitflags! {
    /// [`CONTROL`]: IEEE 802.3 22.2.4.1.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PhyControl: u16 {
        /// Speed selection, high bit: with [`Self::SPEED_100`] clear, 1000 Mb/s.
        const SPEED_1000 = 1 << 6;
        /// Full duplex.
        const FULL_DUPLEX = 1 << 8;
        /// Restart autonegotiation; clears itself.
        const RESTART_AUTONEG = 1 << 9;
        /// Isolate the PHY from the MAC.
        const ISOLATE = 1 << 10;
        /// Power down.
        const POWER_DOWN = 1 << 11;
        /// Autonegotiation enable.
        const AUTONEG = 1 << 12;
        /// Speed selection, low bit: 100 Mb/s.
        const SPEED_100 = 1 << 13;
        /// Loopback: what the MAC sends, it receives. §3.5.6.3.1
        const LOOPBACK = 1 << 14;
        /// Reset; clears itself.
        const RESET = 1 << 15;
        const _ = !0;
    }

    /// [`STATUS`]: IEEE 802.3 22.2.4.2.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PhyStatus: u16 {
        /// The extended register set exists.
        const EXTENDED = 1 << 0;
        /// Link up; latches low until read.
        const LINK = 1 << 2;
        /// Can autonegotiate.
        const AUTONEG_ABLE = 1 << 3;
        /// Autonegotiation is complete.
        const AUTONEG_COMPLETE = 1 << 5;
        const _ = !0;
    }
}
