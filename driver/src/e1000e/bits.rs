//! What the registers hold that only this family has; the others stand in
//! [`crate::intel::bits`]. Unknown bits are kept.

use bitflags::bitflags;

use crate::intel::bits::ReceiveControl;

bitflags! {
    /// [`ICR`](super::registers::ICR), [`ICS`](super::registers::ICS),
    /// [`IMS`](super::registers::IMS), [`IMC`](super::registers::IMC),
    /// [`EIAC`](super::registers::EIAC) and [`IAM`](super::registers::IAM). §10.2.4
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct InterruptCause: u32 {
        /// The link status changed.
        const LSC = 1 << 2;
        /// Receive queue 0, with MSI-X: descriptors were written back.
        const RXQ0 = 1 << 20;
        /// Transmit queue 0, with MSI-X.
        const TXQ0 = 1 << 22;
        /// Any other cause, with MSI-X.
        const OTHER = 1 << 24;
        const _ = !0;
    }

    /// [`EXTCNF_CTRL`](super::registers::EXTCNF_CTRL). §10.2.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ExtendedConfiguration: u32 {
        /// Software owns the MDI bus, which it shares with firmware; latches only when it does.
        const MDIO_SW_OWNERSHIP = 1 << 5;
        const _ = !0;
    }

    /// [`RXDCTL`](super::registers::RXDCTL) and [`TXDCTL`](super::registers::TXDCTL): thresholds
    /// in descriptors, PTHRESH 5:0, HTHRESH 13:8, WTHRESH 21:16. Neither has a bit that enables or
    /// stops the queue. §10.2.5.11, §10.2.6.10
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct QueueControl: u32 {
        /// TXDCTL: reserved, 'must be set to 1b for proper operation'.
        const MUST_BE_ONE = 1 << 22;
        /// Thresholds count descriptors, not cache lines.
        const GRAN = 1 << 24;
        const _ = !0;
    }

    /// [`RFCTL`](super::registers::RFCTL). §10.2.5
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveFilter: u32 {
        /// Extended receive descriptors.
        const EXSTEN = 1 << 15;
        /// No parsing of IPv6 extension headers: Linux turns it off on this part, since malformed
        /// ones can hang the receiver.
        const IPV6_EX_DIS = 1 << 16;
        /// The same for the newer extension headers.
        const NEW_IPV6_EXT_DIS = 1 << 17;
        const _ = !0;
    }

    /// [`GCR`](super::registers::GCR). §10.2.3
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PcieControl: u32 {
        /// Set against an erratum by which PCIe completions get lost under ASPM and transmission
        /// stalls, with [`PcieControl2::LOST_COMPLETIONS`], as Linux and FreeBSD do.
        const LOST_COMPLETIONS = 1 << 22;
        const _ = !0;
    }

    /// [`GCR2`](super::registers::GCR2). §10.2.3
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PcieControl2: u32 {
        /// The other half of [`PcieControl::LOST_COMPLETIONS`].
        const LOST_COMPLETIONS = 1 << 0;
        const _ = !0;
    }
}

failstop_pci::register_value!(
    ExtendedConfiguration,
    InterruptCause,
    PcieControl,
    PcieControl2,
    QueueControl,
    ReceiveFilter,
);

impl QueueControl {
    /// Thresholds in descriptors: how few prefetched ones make the device fetch more, of how many
    /// that are ready, and how many it writes back together.
    #[must_use]
    pub const fn thresholds(prefetch: u8, host: u8, write_back: u8) -> Self {
        Self::from_bits_retain(
            Self::GRAN.bits()
                | prefetch as u32 & 0x3F
                | (host as u32 & 0x3F) << 8
                | (write_back as u32 & 0x3F) << 16,
        )
    }
}

/// The largest receive buffer, in bytes, and more than the device ever receives in one packet.
/// §10.2.5.1
pub const LARGEST_BUFFER: u32 = 16 * 1024;

/// RCTL's fields that say how large receive buffers are: `bytes`, rounded down to KiB, at least 1
/// KiB and at most [`LARGEST_BUFFER`]. FLXBUF (30:27) counts in KiB; the largest is BSEX with BSIZE
/// 01. §10.2.5.1
#[must_use]
pub const fn buffer_size(bytes: u32) -> ReceiveControl {
    match bytes >> 10 {
        0 => ReceiveControl::from_bits_retain(1 << 27),
        kib @ 1..=15 => ReceiveControl::from_bits_retain(kib << 27),
        _ => ReceiveControl::BSEX.union(ReceiveControl::BSIZE_0),
    }
}

/// What [`buffer_size`] sets.
pub const BUFFER_SIZE: ReceiveControl = ReceiveControl::from_bits_retain(0xF << 27)
    .union(ReceiveControl::BSEX)
    .union(ReceiveControl::BSIZE_0)
    .union(ReceiveControl::BSIZE_1);

/// [`IVAR`](super::registers::IVAR) with receive queue 0 on `vector`: the vector in bits 2:0, bit 3
/// says that the entry is valid. No other cause has a vector. §10.2.4.9
#[must_use]
pub const fn ivar(vector: u8) -> u32 {
    0x8 | vector as u32 & 0x7
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_2_kib_buffer_is_2_in_flxbuf() {
        assert_eq!(buffer_size(2048).bits(), 0x1000_0000);
    }

    #[test]
    fn buffers_over_15_kib_are_the_largest() {
        assert_eq!(buffer_size(16 * 1024).bits(), 0x0201_0000);
        assert_eq!(buffer_size(64 * 1024), buffer_size(LARGEST_BUFFER));
    }

    #[test]
    fn thresholds_stand_in_their_bytes() {
        assert_eq!(QueueControl::thresholds(32, 4, 1).bits(), 0x0101_0420);
    }

    #[test]
    fn receive_queue_0_on_vector_0_is_valid() {
        assert_eq!(ivar(0), 0x0000_0008);
    }
}
