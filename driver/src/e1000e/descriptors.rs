//! Descriptors: 16 bytes, two little-endian 64-bit words, as values.
//!
//! What a driver posts and what the device writes back are different types. A word crosses memory
//! in one access; these types never touch memory themselves.
//!
//! ```text
//!            63       48 47     40 39 36 35 32 31     24 23     16 15         0
//! RX read  0 |                        buffer address                          |   §7.1.5
//!          1 |                           reserved                             |
//! RX done  0 | hash, or IP id and checksum    | multiple receive queues       |   §7.1.5
//!          1 | VLAN tag  | length              | errors   | status             |
//! TX       0 |                        buffer address                          |   §7.2.10.1
//!          1 | VLAN tag  | CSS      | rsv | STA | CMD     | CSO     | length   |
//! ```
//!
//! The extended receive format (RFCTL.EXSTEN) is used because its write-back leaves both words to
//! the device and keeps status, errors and length in one of them. Frames are sent by legacy
//! descriptors: they say all that a frame without offloads needs, in one descriptor, and depend on
//! no context that was posted before.

use bitflags::bitflags;

/// Bytes of a descriptor.
pub const BYTES: usize = 16;

/// A receive descriptor as the driver posts it. §7.1.5
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxRead {
    /// IOVA of the buffer; 0 makes a null descriptor, which stores nothing (§7.1.7.2).
    pub buffer: u64,
}

impl RxRead {
    /// Its two words, in memory order. The second is where the write-back's DD will be.
    #[must_use]
    #[inline(always)]
    pub const fn words(self) -> [u64; 2] {
        [self.buffer, 0]
    }
}

bitflags! {
    /// Status of a receive write-back: bits 19:0 of its second word. §7.1.5
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct RxStatus: u32 {
        /// Descriptor done: the device is finished with the buffer.
        const DD = 1 << 0;
        /// End of packet.
        const EOP = 1 << 1;
        /// Checksums were not looked at.
        const IXSM = 1 << 2;
        /// The packet is a VLAN packet; its tag was stripped into the descriptor (with CTRL.VME).
        const VP = 1 << 3;
        /// The TCP or UDP checksum was looked at.
        const TCPCS = 1 << 5;
        /// The IP header checksum was looked at.
        const IPCS = 1 << 6;
        /// Passed an inexact filter.
        const PIF = 1 << 7;
        const _ = 0xF_FFFF;
    }

    /// Errors of a receive write-back: bits 31:20 of its second word, in place. §7.1.5
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct RxErrors: u32 {
        /// CRC or alignment error.
        const CE = 1 << 24;
        /// Symbol error.
        const SE = 1 << 25;
        /// Sequence error.
        const SEQ = 1 << 26;
        /// Carrier extension error.
        const CXE = 1 << 28;
        /// TCP or UDP checksum error.
        const TCPE = 1 << 29;
        /// IP header checksum error.
        const IPE = 1 << 30;
        /// Receive data error.
        const RXE = 1 << 31;
        const _ = 0xFFF0_0000;
    }
}

impl RxErrors {
    /// The errors of the frame itself; the others are of what it carries.
    pub const FRAME: Self = Self::CE
        .union(Self::SE)
        .union(Self::SEQ)
        .union(Self::CXE)
        .union(Self::RXE);
}

/// The second word of a receive write-back: whether it is done, and what arrived. §7.1.5
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxDone(pub u64);

impl RxDone {
    /// A word of these parts; `length` in bytes.
    #[must_use]
    pub const fn new(status: RxStatus, errors: RxErrors, length: u16, vlan: u16) -> Self {
        Self((status.bits() | errors.bits()) as u64 | (length as u64) << 32 | (vlan as u64) << 48)
    }

    /// Whether the device is finished with the descriptor.
    #[must_use]
    #[inline(always)]
    pub const fn is_done(self) -> bool {
        self.0 & 1 != 0
    }

    /// Error bits, in place.
    #[must_use]
    #[inline(always)]
    pub const fn errors(self) -> RxErrors {
        RxErrors::from_bits_truncate(self.0 as u32)
    }

    /// Bytes in this buffer.
    #[must_use]
    #[inline(always)]
    pub const fn length(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// The stripped VLAN tag, with [`RxStatus::VP`].
    #[must_use]
    #[inline(always)]
    pub const fn vlan(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

bitflags! {
    /// Commands of a legacy transmit descriptor: bits 31:24 of its third double word, in place.
    /// §7.2.10.1
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TxCommand: u32 {
        /// End of packet.
        const EOP = 1 << 24;
        /// Insert the frame check sequence.
        const IFCS = 1 << 25;
        /// Insert a checksum at CSO, counted from CSS on.
        const IC = 1 << 26;
        /// Report status: write DD back.
        const RS = 1 << 27;
        /// Not a legacy descriptor: clear here.
        const DEXT = 1 << 29;
        /// Insert the VLAN tag (with CTRL.VME).
        const VLE = 1 << 30;
        /// Delay the interrupt.
        const IDE = 1 << 31;
        const _ = 0xFF00_0000;
    }
}

/// A legacy transmit descriptor. §7.2.10.1
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TxLegacy {
    /// IOVA of the buffer.
    pub address: u64,
    /// Bytes in the buffer.
    pub length: u16,
    /// Commands.
    pub command: TxCommand,
}

impl TxLegacy {
    /// A whole frame in one buffer, with the frame check sequence inserted.
    #[must_use]
    #[inline(always)]
    pub const fn whole(address: u64, length: u16, report: bool) -> Self {
        let mut command = TxCommand::EOP.bits() | TxCommand::IFCS.bits();
        if report {
            command |= TxCommand::RS.bits();
        }
        Self {
            address,
            length,
            command: TxCommand::from_bits_retain(command),
        }
    }

    /// The two words of such a descriptor, in memory order, for a `length` of at most 65535: what is
    /// beyond spills into other fields.
    #[must_use]
    #[inline(always)]
    pub const fn whole_words(address: u64, length: u32, report: bool) -> [u64; 2] {
        let [address, fixed] = Self::whole(address, 0, report).words();
        [address, fixed.wrapping_add(length as u64)]
    }

    /// Its two words, in memory order.
    #[must_use]
    #[inline(always)]
    pub const fn words(self) -> [u64; 2] {
        [
            self.address,
            (self.length as u32 | self.command.bits()) as u64,
        ]
    }
}

/// The second word of a transmit write-back. §7.2.10.1
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TxDone(pub u64);

impl TxDone {
    /// Whether the device is finished with the descriptor, and with every one before it.
    #[must_use]
    #[inline(always)]
    pub const fn is_done(self) -> bool {
        self.0 >> 32 & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: [u64; 2]) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&words[0].to_le_bytes());
        bytes[8..].copy_from_slice(&words[1].to_le_bytes());
        bytes
    }

    // §7.2.10.1: a 60-byte frame at 0x1234_5678_9ABC, EOP | IFCS | RS.
    const LEGACY: [u8; 16] = [
        0xBC, 0x9A, 0x78, 0x56, 0x34, 0x12, 0, 0, // buffer address
        0x3C, 0x00, // length
        0x00, 0x0B, // CSO, CMD
        0x00, 0x00, // STA, CSS
        0x00, 0x00, // VLAN tag
    ];

    // §7.1.5: 60 bytes, DD | EOP | VP | TCPCS | IPCS, CE, tag 0x0123.
    const WRITE_BACK: [u8; 8] = [
        0x6B, 0x00, 0x00, 0x01, // status, errors
        0x3C, 0x00, 0x23, 0x01, // length, VLAN tag
    ];

    // §7.1.5: a buffer at 0x1234_5678_9ABC.
    const READ: [u8; 16] = [
        0xBC, 0x9A, 0x78, 0x56, 0x34, 0x12, 0, 0, // buffer address
        0, 0, 0, 0, 0, 0, 0, 0, // reserved
    ];

    #[test]
    fn a_legacy_transmit_descriptor_is_the_datasheet_s_bytes() {
        assert_eq!(
            bytes(TxLegacy::whole(0x1234_5678_9ABC, 60, true).words()),
            LEGACY
        );
    }

    #[test]
    fn a_whole_frame_s_words_are_those_of_its_descriptor() {
        for (length, report) in [(17, false), (60, true), (0xFFFF, true)] {
            assert_eq!(
                TxLegacy::whole_words(0x1234_5678_9ABC, length.into(), report),
                TxLegacy::whole(0x1234_5678_9ABC, length, report).words()
            );
        }
    }

    #[test]
    fn a_posted_receive_descriptor_is_the_datasheet_s_bytes() {
        let buffer = 0x1234_5678_9ABC;
        assert_eq!(bytes(RxRead { buffer }.words()), READ);
    }

    #[test]
    fn a_receive_write_back_is_the_datasheet_s_bytes() {
        let status = RxStatus::DD | RxStatus::EOP | RxStatus::VP | RxStatus::TCPCS | RxStatus::IPCS;
        let done = RxDone::new(status, RxErrors::CE, 60, 0x0123);
        assert_eq!(done.0.to_le_bytes(), WRITE_BACK);
    }

    #[test]
    fn a_receive_write_back_is_read_field_by_field() {
        let done = RxDone(u64::from_le_bytes(WRITE_BACK));
        assert!(done.is_done());
        assert_eq!((done.length(), done.vlan()), (60, 0x0123));
        assert_eq!(done.errors(), RxErrors::CE);
    }
}
