//! What the registers hold that both families have, one `bitflags` type per register. Unknown bits
//! are kept. Fields wider than a bit have a constructor or an accessor next to the flags.

use bitflags::bitflags;

bitflags! {
    /// [`CTRL`](crate::igb::registers::CTRL). 82576 §8.2.1, 82574 §10.2.2.1
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
        /// Device reset; clears itself. Wait 1 ms before the next access (82576 §4.2.1.6.1).
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

    /// [`STATUS`](crate::igb::registers::STATUS). 82576 §8.2.2, 82574 §10.2.2.2
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

    /// [`CTRL_EXT`](crate::igb::registers::CTRL_EXT). 82576 §8.2.3, 82574 §10.2.2
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

    /// [`EECD`](crate::igb::registers::EECD). 82576 §8.4.1, 82574 §10.2.2
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

    /// [`EERD`](crate::igb::registers::EERD): address in bits 15:2, data in 31:16. 82576 §8.4.2, 82574 §10.2.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct EepromRead: u32 {
        /// Start a read.
        const START = 1 << 0;
        /// The read is done and the data valid.
        const DONE = 1 << 1;
        const _ = !0;
    }

    /// [`MDIC`](crate::igb::registers::MDIC). 82576 §8.2.4, 82574 §10.2.2.7
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

    /// [`RCTL`](crate::igb::registers::RCTL). 82576 §8.10.1, 82574 §10.2.5.1
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
        /// Long packets: up to [`RLPML`](crate::igb::registers::RLPML) bytes.
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
        /// Filter VLANs by [`VFTA`](crate::igb::registers::VFTA).
        const VFE = 1 << 18;
        /// Discard pause frames.
        const DPF = 1 << 22;
        /// Pass MAC control frames.
        const PMCF = 1 << 23;
        /// Buffer size extension (82574): the sizes of BSIZE times 16, 00 reserved.
        const BSEX = 1 << 25;
        /// Strip the CRC.
        const SECRC = 1 << 26;
        const _ = !0;
    }

    /// [`RXCSUM`](crate::igb::registers::RXCSUM). 82576 §8.10, 82574 §10.2.5
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveChecksum: u32 {
        /// Check IP header checksums.
        const IPOFLD = 1 << 8;
        /// Check TCP and UDP checksums.
        const TUOFLD = 1 << 9;
        /// Check SCTP CRCs.
        const CRCOFL = 1 << 11;
        /// Packet checksum disable: descriptors have the RSS hash instead.
        const PCSD = 1 << 13;
        const _ = !0;
    }

    /// [`RAH`](crate::igb::registers::RAH): address in bits 15:0. 82576 §8.10, 82574 §10.2.5
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

    /// [`TCTL`](crate::igb::registers::TCTL): CT in bits 11:4. 82576 §8.12.1, 82574 §10.2.6.1
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
}

failstop_pci::register_value!(
    AddressHigh,
    Control,
    ControlExtended,
    EepromControl,
    EepromRead,
    Mdi,
    ReceiveChecksum,
    ReceiveControl,
    Status,
    TransmitControl,
);

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

impl ReceiveControl {
    /// The packet buffer's size in bytes, where neither the queue (82576) nor BSEX and FLXBUF
    /// (82574) say otherwise.
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
    fn a_receive_address_is_little_endian() {
        assert_eq!(
            AddressHigh::of([0x02, 0, 0, 0, 0xAB, 0xCD]).bits(),
            0x8000_CDAB
        );
    }
}
