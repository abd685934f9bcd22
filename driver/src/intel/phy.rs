//! Registers that the integrated PHYs of both families have, reached through MDIC, and the bits of
//! them that a driver uses: IEEE 802.3 clause 22's. §8.24 of the 82576 datasheet lists them.

use bitflags::bitflags;

/// The integrated PHY's address on the MDI bus. 82576 §8.2.4, 82574 §10.2.2.7
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
        /// Loopback: what the MAC sends, it receives. 82576 §3.5.6.3.1
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
