//! What the registers hold: one `bitflags` type per register, every bit that the driver or the
//! emulated twin uses. Unknown bits are kept. Fields wider than a bit have a constructor or an
//! accessor next to the flags. What the 82574 has too stands in [`crate::intel::bits`].

use bitflags::bitflags;

use crate::rss::HashTypes;

pub use crate::intel::bits::{
    AddressHigh, Control, ControlExtended, EepromControl, EepromRead, Mdi, ReceiveChecksum,
    ReceiveControl, Status, TransmitControl,
};

bitflags! {
    /// [`GCR`](super::registers::GCR). §8.6.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PcieControl: u32 {
        /// A request whose completion timed out is sent again, for ever: clear it.
        const COMPLETION_TIMEOUT_RESEND = 1 << 16;
        /// The function has capability version 2.
        const CAP_VERSION_2 = 1 << 18;
        const _ = !0;
    }

    /// [`SWSM`](super::registers::SWSM). §8.7
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SoftwareSemaphore: u32 {
        /// Software's own semaphore: a read returns it and sets it.
        const SMBI = 1 << 0;
        /// Software holds the semaphore that it shares with firmware; latches only when it does.
        const SWESMBI = 1 << 1;
        const _ = !0;
    }

    /// [`SW_FW_SYNC`](super::registers::SW_FW_SYNC): who owns what; bits 15:0 software, 31:16 firmware. §8.7
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SoftwareFirmwareSync: u32 {
        /// Software owns the NVM.
        const SW_NVM = 1 << 0;
        /// Software owns the PHY of function 0.
        const SW_PHY_0 = 1 << 1;
        /// Software owns the PHY of function 1.
        const SW_PHY_1 = 1 << 2;
        /// Software owns the PHY of function 2 (I350).
        const SW_PHY_2 = 1 << 5;
        /// Software owns the PHY of function 3 (I350).
        const SW_PHY_3 = 1 << 6;
        /// Firmware owns the NVM.
        const FW_NVM = 1 << 16;
        /// Firmware owns the PHY of function 0.
        const FW_PHY_0 = 1 << 17;
        const _ = !0;
    }

    /// [`ICR`](super::registers::ICR), [`ICS`](super::registers::ICS), [`IMS`](super::registers::IMS) and [`IMC`](super::registers::IMC). §8.8.7
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct InterruptCause: u32 {
        /// Transmit descriptors were written back.
        const TXDW = 1 << 0;
        /// The link status changed.
        const LSC = 1 << 2;
        /// Receive descriptors run low.
        const RXDMT0 = 1 << 4;
        /// Receive overrun.
        const RXO = 1 << 6;
        /// Receive descriptors were written back.
        const RXDW = 1 << 7;
        /// A mailbox event of a virtual function.
        const VMMB = 1 << 8;
        /// The PHY interrupts.
        const GPHY = 1 << 10;
        /// Host memory or a PCIe transaction failed.
        const FER = 1 << 22;
        /// The device was reset.
        const DRSTA = 1 << 30;
        /// An interrupt is asserted.
        const INTA = 1 << 31;
        const _ = !0;
    }

    /// [`GPIE`](super::registers::GPIE). §8.8.15
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct GeneralInterrupt: u32 {
        /// Non-selective interrupt clear on read of ICR.
        const NSICR = 1 << 0;
        /// Multiple MSI-X vectors: causes go through IVAR.
        const MULTIPLE_MSIX = 1 << 4;
        /// EIAM applies when an MSI-X vector fires.
        const EIAME = 1 << 30;
        /// Pending bits of the MSI-X table are supported.
        const PBA = 1 << 31;
        const _ = !0;
    }

    /// [`MRQC`](super::registers::MRQC). §8.10
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct MultipleReceive: u32 {
        /// Bits 2:0 = 010: RSS over several queues.
        const RSS = 0b010;
        /// Hash IPv4 with TCP ports.
        const TCP_IPV4 = 1 << 16;
        /// Hash IPv4 addresses.
        const IPV4 = 1 << 17;
        /// Hash IPv6 with TCP ports, extension headers skipped.
        const TCP_IPV6_EX = 1 << 18;
        /// Hash IPv6 addresses.
        const IPV6 = 1 << 20;
        /// Hash IPv6 with TCP ports.
        const TCP_IPV6 = 1 << 21;
        /// Hash IPv4 with UDP ports.
        const UDP_IPV4 = 1 << 22;
        /// Hash IPv6 with UDP ports.
        const UDP_IPV6 = 1 << 23;
        const _ = !0;
    }

    /// [`VMOLR`](super::registers::VMOLR): bits 13:0 the longest packet, in bytes. §8.14
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PoolOffload: u32 {
        /// Long packets, up to bits 13:0.
        const LPE = 1 << 16;
        /// RSS in this pool.
        const RSSE = 1 << 17;
        /// Accept untagged packets.
        const AUPE = 1 << 24;
        /// Accept packets that match the multicast table.
        const ROMPE = 1 << 25;
        /// Accept packets that match the unicast table.
        const ROPE = 1 << 26;
        /// Accept broadcasts.
        const BAM = 1 << 27;
        /// Multicast promiscuous.
        const MPME = 1 << 28;
        /// Strip VLAN tags.
        const STRVLAN = 1 << 30;
        /// Strip the CRC.
        const STRCRC = 1 << 31;
        const _ = !0;
    }

    /// [`SRRCTL`](super::registers::SRRCTL): bits 6:0 the packet buffer's size in KiB (0: RCTL.BSIZE rules), 13:8 the header buffer's in units of 64 bytes. §8.10.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SplitReceive: u32 {
        /// Descriptor type 001: advanced, one buffer. 000, legacy, writes no advanced descriptor back (§7.1.5.2).
        const ADVANCED_ONE_BUFFER = 1 << 25;
        /// Descriptor type 101 is header splitting, always; this is its second bit.
        const HEADER_SPLIT = 1 << 27;
        /// Drop when no descriptor is free, rather than hold up other queues.
        const DROP_EN = 1 << 31;
        const _ = !0;
    }

    /// [`RXDCTL`](super::registers::RXDCTL): thresholds in descriptors, PTHRESH 4:0, HTHRESH 12:8, WTHRESH 20:16. §8.10.10
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveQueueControl: u32 {
        /// The queue is enabled. Reads 0 until RCTL.RXEN is set.
        const ENABLE = 1 << 25;
        /// Write all pending descriptors back now; clears itself.
        const SWFLSH = 1 << 26;
        const _ = !0;
    }

    /// [`TXDCTL`](super::registers::TXDCTL): thresholds in descriptors, PTHRESH 4:0, HTHRESH 12:8, WTHRESH 20:16. §8.12.13
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TransmitQueueControl: u32 {
        /// The queue is enabled. Reads 0 until TCTL.TXEN is set.
        const ENABLE = 1 << 25;
        /// Write all pending descriptors back now; clears itself.
        const SWFLSH = 1 << 26;
        /// High priority.
        const PRIORITY = 1 << 27;
        const _ = !0;
    }
}

impl MultipleReceive {
    /// RSS over what `types` name. Of TCP over IPv6 both bits: one of them alone is looked at by
    /// some parts and models.
    #[must_use]
    pub fn rss(types: HashTypes) -> Self {
        let fields = [
            (HashTypes::IPV4, Self::IPV4),
            (HashTypes::TCP_IPV4, Self::TCP_IPV4),
            (HashTypes::UDP_IPV4, Self::UDP_IPV4),
            (HashTypes::IPV6, Self::IPV6),
            (HashTypes::TCP_IPV6, Self::TCP_IPV6 | Self::TCP_IPV6_EX),
            (HashTypes::UDP_IPV6, Self::UDP_IPV6),
        ];
        let set = fields.into_iter().filter(|(of, _)| types.contains(*of));
        set.fold(Self::RSS, |all, (_, field)| all | field)
    }
}

failstop_pci::register_value!(
    GeneralInterrupt,
    InterruptCause,
    MultipleReceive,
    PcieControl,
    PoolOffload,
    ReceiveQueueControl,
    SoftwareFirmwareSync,
    SoftwareSemaphore,
    SplitReceive,
    TransmitQueueControl,
);

/// Prefetch, host and write-back thresholds, in descriptors (5 bits each), as
/// [`RXDCTL`](super::registers::RXDCTL) and [`TXDCTL`](super::registers::TXDCTL) place them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Thresholds {
    /// Fetch descriptors when fewer than this many are on the chip (PTHRESH).
    pub prefetch: u8,
    /// ... and at least this many are ready in host memory (HTHRESH).
    pub host: u8,
    /// Write descriptors back when this many are done (WTHRESH).
    pub write_back: u8,
}

impl Thresholds {
    /// The bits of both registers that hold thresholds.
    pub const MASK: u32 = 0x001F_1F1F;

    /// Places the thresholds; bits above the fifth are cut off.
    #[must_use]
    pub const fn bits(self) -> u32 {
        (self.prefetch as u32 & 0x1F)
            | (self.host as u32 & 0x1F) << 8
            | (self.write_back as u32 & 0x1F) << 16
    }
}

impl SplitReceive {
    /// Advanced one-buffer descriptors with packet buffers of `bytes`, rounded down to KiB; below
    /// 1024 the field is 0 and RCTL.BSIZE rules (§7.1.3.1).
    #[must_use]
    pub const fn one_buffer(bytes: u32) -> Self {
        Self::from_bits_retain(Self::ADVANCED_ONE_BUFFER.bits() | (bytes >> 10 & 0x7F))
    }

    /// The packet buffer's size in bytes; 0 when RCTL.BSIZE rules.
    #[must_use]
    pub const fn packet_bytes(self) -> u32 {
        (self.bits() & 0x7F) << 10
    }

    /// Descriptor type, bits 27:25.
    #[must_use]
    pub const fn descriptor_type(self) -> u32 {
        self.bits() >> 25 & 7
    }
}

/// A byte of [`IVAR`](super::registers::IVAR) or [`IVAR_MISC`](super::registers::IVAR_MISC): the
/// vector, and that the entry is valid. §8.8.13
#[must_use]
pub const fn ivar(vector: u8) -> u8 {
    0x80 | vector & 0x1F
}

/// How far a queue's byte is shifted in `IVAR[queue & 7]`: queues from 8 on two bytes up, transmit
/// one byte up. §8.8.13
#[must_use]
pub const fn ivar_shift(queue: u32, transmit: bool) -> u32 {
    (if queue >= 8 { 16 } else { 0 }) + (if transmit { 8 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_stand_in_their_bytes() {
        let thresholds = Thresholds {
            prefetch: 8,
            host: 8,
            write_back: 4,
        };
        assert_eq!(thresholds.bits(), 0x0004_0808);
    }

    #[test]
    fn a_2_kib_buffer_is_2_in_srrctl() {
        assert_eq!(SplitReceive::one_buffer(2048).bits(), 0x0200_0002);
    }

    // The value that Linux writes for the same fields, but for UDP's.
    #[test]
    fn the_default_hash_types_are_linux_s() {
        assert_eq!(
            MultipleReceive::rss(HashTypes::default()).bits(),
            0x0037_0002
        );
    }

    #[test]
    fn queue_9_s_transmit_vector_is_the_top_byte() {
        assert_eq!(ivar_shift(9, true), 24);
    }
}
