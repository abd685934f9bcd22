//! What the registers hold: one `bitflags` type per register, every bit that the driver or the
//! emulated twin uses. Unknown bits are kept. Fields wider than a bit have a constructor or an
//! accessor next to the flags.

use bitflags::bitflags;

bitflags! {
    /// [`CTRL`](super::registers::CTRL). §8.2.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Control: u32 {
        /// Full duplex.
        const FD = 1 << 0;
        /// GIO master disable: the function finishes its requests and issues no more.
        const GIO_MASTER_DISABLE = 1 << 2;
        /// Set link up.
        const SLU = 1 << 6;
        /// Forced speed, 100 Mb/s.
        const SPEED_100 = 1 << 8;
        /// Forced speed, 1000 Mb/s.
        const SPEED_1000 = 1 << 9;
        /// Force the speed.
        const FRCSPD = 1 << 11;
        /// Force the duplex.
        const FRCDPLX = 1 << 12;
        /// Device reset; clears itself. Wait 1 ms before the next access (§4.2.1.6.1).
        const RST = 1 << 26;
        /// Receive flow control.
        const RFCE = 1 << 27;
        /// Transmit flow control.
        const TFCE = 1 << 28;
        /// VLAN mode: tags are stripped and inserted.
        const VME = 1 << 30;
        /// PHY reset.
        const PHY_RST = 1 << 31;
        const _ = !0;
    }

    /// [`STATUS`](super::registers::STATUS). §8.2.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Status: u32 {
        /// Full duplex.
        const FD = 1 << 0;
        /// Link up.
        const LU = 1 << 1;
        /// LAN id, low bit: which function of the package this is.
        const LAN_ID_0 = 1 << 2;
        /// LAN id, high bit.
        const LAN_ID_1 = 1 << 3;
        /// Transmission is paused by flow control.
        const TXOFF = 1 << 4;
        /// 100 Mb/s.
        const SPEED_100 = 1 << 6;
        /// 1000 Mb/s.
        const SPEED_1000 = 1 << 7;
        /// PHY reset asserted.
        const PHYRA = 1 << 10;
        /// GIO master enable status: reads 0 once GIO master disable has taken effect and no request is outstanding.
        const GIO_MASTER_ENABLE = 1 << 19;
        const _ = !0;
    }

    /// [`CTRL_EXT`](super::registers::CTRL_EXT). §8.2.3
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ControlExtended: u32 {
        /// EEPROM reset: reload from the NVM.
        const EE_RST = 1 << 13;
        /// Physical function reset done.
        const PFRSTD = 1 << 14;
        /// Link mode, low bit; 00 is the internal copper PHY.
        const LINK_MODE_0 = 1 << 22;
        /// Link mode, high bit.
        const LINK_MODE_1 = 1 << 23;
        /// Extended interrupt auto mask enable.
        const EIAME = 1 << 24;
        /// A driver is loaded: tells the firmware to keep off.
        const DRV_LOAD = 1 << 28;
        const _ = !0;
    }

    /// [`EECD`](super::registers::EECD). §8.4.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct EepromControl: u32 {
        /// Software asks for bit-bang access.
        const REQ = 1 << 6;
        /// Bit-bang access is granted.
        const GNT = 1 << 7;
        /// An NVM is present.
        const PRES = 1 << 8;
        /// The NVM was read after reset: the function is usable.
        const AUTO_RD = 1 << 9;
        const _ = !0;
    }

    /// [`EERD`](super::registers::EERD): address in bits 15:2, data in 31:16. §8.4.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct EepromRead: u32 {
        /// Start a read.
        const START = 1 << 0;
        /// The read is done and the data valid.
        const DONE = 1 << 1;
        const _ = !0;
    }

    /// [`MDIC`](super::registers::MDIC). §8.2.4
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Mdi: u32 {
        /// Opcode 01: write.
        const WRITE = 1 << 26;
        /// Opcode 10: read.
        const READ = 1 << 27;
        /// The command is done.
        const READY = 1 << 28;
        /// Interrupt when done.
        const INTERRUPT = 1 << 29;
        /// The command failed.
        const ERROR = 1 << 30;
        const _ = !0;
    }

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

    /// [`RCTL`](super::registers::RCTL). §8.10.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveControl: u32 {
        /// Receiver enable.
        const RXEN = 1 << 1;
        /// Store bad packets.
        const SBP = 1 << 2;
        /// Unicast promiscuous.
        const UPE = 1 << 3;
        /// Multicast promiscuous.
        const MPE = 1 << 4;
        /// Long packets: up to [`RLPML`](super::registers::RLPML) bytes.
        const LPE = 1 << 5;
        /// Loopback mode, low bit: stays 0 with the internal PHY.
        const LBM_0 = 1 << 6;
        /// Loopback mode, high bit.
        const LBM_1 = 1 << 7;
        /// Multicast offset, low bit: which 12 bits of the address index the table.
        const MO_0 = 1 << 12;
        /// Multicast offset, high bit.
        const MO_1 = 1 << 13;
        /// Accept broadcasts.
        const BAM = 1 << 15;
        /// Buffer size, low bit: 00 2048, 01 1024, 10 512, 11 256 bytes.
        const BSIZE_0 = 1 << 16;
        /// Buffer size, high bit.
        const BSIZE_1 = 1 << 17;
        /// Filter VLANs by [`VFTA`](super::registers::VFTA).
        const VFE = 1 << 18;
        /// Discard pause frames.
        const DPF = 1 << 22;
        /// Pass MAC control frames.
        const PMCF = 1 << 23;
        /// Strip the CRC.
        const SECRC = 1 << 26;
        const _ = !0;
    }

    /// [`RXCSUM`](super::registers::RXCSUM). §8.10
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveChecksum: u32 {
        /// Check IP header checksums.
        const IPOFLD = 1 << 8;
        /// Check TCP and UDP checksums.
        const TUOFLD = 1 << 9;
        /// Check SCTP CRCs.
        const CRCOFL = 1 << 11;
        /// Write the packet checksum instead of the RSS hash.
        const PCSD = 1 << 13;
        const _ = !0;
    }

    /// [`RAH`](super::registers::RAH): address in bits 15:0. §8.10
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct AddressHigh: u32 {
        /// Compare with the source address instead.
        const ASEL_SOURCE = 1 << 16;
        /// Pool 0.
        const POOL_0 = 1 << 18;
        /// The entry is valid.
        const AV = 1 << 31;
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

    /// [`TCTL`](super::registers::TCTL): CT in bits 11:4. §8.12.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TransmitControl: u32 {
        /// Transmitter enable.
        const TXEN = 1 << 1;
        /// Pad short packets to 64 bytes, CRC included.
        const PSP = 1 << 3;
        /// Retransmit on late collision.
        const RTLC = 1 << 24;
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

failstop_pci::register_value!(
    AddressHigh,
    Control,
    ControlExtended,
    EepromControl,
    EepromRead,
    GeneralInterrupt,
    InterruptCause,
    Mdi,
    MultipleReceive,
    PcieControl,
    PoolOffload,
    ReceiveChecksum,
    ReceiveControl,
    ReceiveQueueControl,
    SoftwareFirmwareSync,
    SoftwareSemaphore,
    SplitReceive,
    Status,
    TransmitControl,
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

impl EepromRead {
    /// The command that reads the 16-bit word at `address` (14 bits).
    #[must_use]
    pub const fn of(address: u16) -> Self {
        Self::from_bits_retain((address as u32 & 0x3FFF) << 2 | Self::START.bits())
    }

    /// Which word is read.
    #[must_use]
    pub const fn address(self) -> u16 {
        (self.bits() >> 2 & 0x3FFF) as u16
    }

    /// The word that was read, valid with [`Self::DONE`].
    #[must_use]
    pub const fn data(self) -> u16 {
        (self.bits() >> 16) as u16
    }
}

impl Mdi {
    /// The command that reads PHY register `register` (0 to 31).
    #[must_use]
    pub const fn read(register: u32) -> Self {
        Self::from_bits_retain(
            Self::READ.bits() | (register & 0x1F) << 16 | super::phy::ADDRESS << 21,
        )
    }

    /// The command that writes `data` to PHY register `register` (0 to 31).
    #[must_use]
    pub const fn write(register: u32, data: u16) -> Self {
        Self::from_bits_retain(
            Self::WRITE.bits() | (register & 0x1F) << 16 | super::phy::ADDRESS << 21 | data as u32,
        )
    }

    /// The 16 data bits.
    #[must_use]
    pub const fn data(self) -> u16 {
        self.bits() as u16
    }

    /// The PHY register, 0 to 31.
    #[must_use]
    pub const fn register(self) -> u32 {
        self.bits() >> 16 & 0x1F
    }

    /// The PHY's address, 0 to 31.
    #[must_use]
    pub const fn phy(self) -> u32 {
        self.bits() >> 21 & 0x1F
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

impl ReceiveControl {
    /// The packet buffer's size in bytes, where [`SplitReceive`] leaves it open.
    #[must_use]
    pub const fn buffer_bytes(self) -> u32 {
        2048 >> (self.bits() >> 16 & 3)
    }
}

impl AddressHigh {
    /// The high half of a valid receive address.
    #[must_use]
    pub const fn of(mac: [u8; 6]) -> Self {
        Self::from_bits_retain(Self::AV.bits() | u16::from_le_bytes([mac[4], mac[5]]) as u32)
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
    fn an_eeprom_read_of_word_3_is_the_datasheet_s_encoding() {
        assert_eq!(EepromRead::of(3).bits(), 0x0000_000D);
    }

    #[test]
    fn a_phy_write_names_address_1_and_opcode_01() {
        assert_eq!(Mdi::write(0, 0x4140).bits(), 0x0420_4140);
    }

    #[test]
    fn a_phy_read_of_the_second_identifier_is_opcode_10() {
        assert_eq!(Mdi::read(3).bits(), 0x0823_0000);
    }

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

    #[test]
    fn queue_9_s_transmit_vector_is_the_top_byte() {
        assert_eq!(ivar_shift(9, true), 24);
    }

    #[test]
    fn a_receive_address_is_little_endian() {
        assert_eq!(
            AddressHigh::of([0x02, 0, 0, 0, 0xAB, 0xCD]).bits(),
            0x8000_CDAB
        );
    }
}
