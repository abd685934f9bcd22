//! Advanced descriptors: 16 bytes, two little-endian 64-bit words, as values.
//!
//! What a driver posts and what the device writes back are different types. A word crosses memory
//! in one access; these types never touch memory themselves.
//!
//! ```text
//!            63           48 47           32 31                             0
//! RX read  0 |                      packet buffer address                     |   §7.1.5.1
//!          1 |                      header buffer address                     |
//! RX done  0 | hash, or IP id and checksum   | header len | packet type | RSS |   §7.1.5.2
//!          1 | VLAN tag      | length        | errors      | status           |
//! TX data  0 |                        buffer address                          |   §7.2.2.3
//!          1 | PAYLEN | POPTS | IDX   | STA  | DCMD | DTYP 3 | MAC | DTALEN   |
//! TX ctxt  0 | sequence seed                 | VLAN tag    | MACLEN | IPLEN   |   §7.2.2.2
//!          1 | MSS    | L4LEN | IDX          | DCMD | DTYP 2 | TUCMD          |
//! TX done  1 |                        STA.DD |                                |   §7.2.2.3.3
//! ```

use bitflags::bitflags;

/// Bytes of a descriptor.
pub const BYTES: usize = 16;

/// A receive descriptor as the driver posts it. §7.1.5.1
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxRead {
    /// IOVA of the packet buffer. Bit 0 is not an address bit.
    pub packet: u64,
    /// IOVA of the header buffer, with header splitting; 0 otherwise. Its bit 0 is where the
    /// write-back's DD will be, so it is posted as 0.
    pub header: u64,
}

impl RxRead {
    /// A descriptor for one buffer.
    #[must_use]
    #[inline(always)]
    pub const fn one_buffer(packet: u64) -> Self {
        Self { packet, header: 0 }
    }

    /// Its two words, in memory order.
    #[must_use]
    #[inline(always)]
    pub const fn words(self) -> [u64; 2] {
        [self.packet, self.header]
    }

    /// The descriptor that two words hold.
    #[must_use]
    #[inline(always)]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self {
            packet: words[0],
            header: words[1],
        }
    }
}

bitflags! {
    /// Status of a receive write-back: bits 19:0 of its second word. §7.1.5.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct RxStatus: u32 {
        /// Descriptor done: the device is finished with the buffer.
        const DD = 1 << 0;
        /// End of packet.
        const EOP = 1 << 1;
        /// A VLAN tag was stripped into the descriptor.
        const VP = 1 << 3;
        /// The UDP checksum was looked at.
        const UDPCS = 1 << 4;
        /// The TCP or UDP checksum was looked at.
        const L4I = 1 << 5;
        /// The IP header checksum was looked at.
        const IPCS = 1 << 6;
        /// Passed an inexact filter.
        const PIF = 1 << 7;
        /// The packet came by loopback between pools.
        const LB = 1 << 18;
        const _ = 0xF_FFFF;
    }

    /// Errors of a receive write-back: bits 31:20 of its second word, in place. §7.1.5.2
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct RxErrors: u32 {
        /// TCP or UDP checksum error.
        const L4E = 1 << 29;
        /// IP header checksum error.
        const IPE = 1 << 30;
        /// Receive error: CRC, symbol, alignment.
        const RXE = 1 << 31;
        const _ = 0xFFF0_0000;
    }
}

/// The first word of a receive write-back: what kind of packet it is. §7.1.5.2
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RxKind(pub u64);

impl RxKind {
    /// A word of these parts: `rss_type` 4 bits (0: no hash), `packet_type` 13 bits, and the hash.
    #[must_use]
    pub const fn new(rss_type: u8, packet_type: u16, hash: u32) -> Self {
        Self((rss_type & 0xF) as u64 | (packet_type as u64 & 0x1FFF) << 4 | (hash as u64) << 32)
    }

    /// Which fields were hashed; 0 when none.
    #[must_use]
    #[inline(always)]
    pub const fn rss_type(self) -> u8 {
        (self.0 & 0xF) as u8
    }

    /// Packet type: IPV4 bit 0, IPV6 bit 2, TCP bit 4, UDP bit 5, SCTP bit 6.
    #[must_use]
    #[inline(always)]
    pub const fn packet_type(self) -> u16 {
        (self.0 >> 4 & 0x1FFF) as u16
    }

    /// The RSS hash.
    #[must_use]
    #[inline(always)]
    pub const fn hash(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The second word of a receive write-back: whether it is done, and what arrived. The device writes
/// it last, in one store. §7.1.5.2
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

    /// Whether the packet ends in this buffer.
    #[must_use]
    #[inline(always)]
    pub const fn is_whole(self) -> bool {
        self.0 & 2 != 0
    }

    /// Status bits.
    #[must_use]
    #[inline(always)]
    pub const fn status(self) -> RxStatus {
        RxStatus::from_bits_truncate(self.0 as u32)
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
    /// Commands of a transmit descriptor: bits 31:24 of its third double word, in place. §7.2.2.3.5
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TxCommand: u32 {
        /// End of packet.
        const EOP = 1 << 24;
        /// Insert the frame check sequence.
        const IFCS = 1 << 25;
        /// Report status: write DD back.
        const RS = 1 << 27;
        /// Advanced descriptor.
        const DEXT = 1 << 29;
        /// Insert the context's VLAN tag.
        const VLE = 1 << 30;
        /// Segment: PAYLEN bytes of TCP payload, by the context's MSS.
        const TSE = 1 << 31;
        const _ = 0xFF00_0000;
    }

    /// Offloads of a transmit data descriptor: bits 13:8 of its last double word, in place. §7.2.2.3.8
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TxOptions: u32 {
        /// Insert the IP header checksum.
        const IXSM = 1 << 8;
        /// Insert the TCP, UDP or SCTP checksum.
        const TXSM = 1 << 9;
        const _ = 0x3F00;
    }
}

const TYPE_CONTEXT: u32 = 2 << 20;
const TYPE_DATA: u32 = 3 << 20;
const TYPE_MASK: u32 = 0xF << 20;

/// What the four bytes of commands say a transmit descriptor is. §7.2.2
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxDescriptor {
    /// Data to send.
    Data(TxData),
    /// Offload context for data that follows.
    Context(TxContext),
    /// Not an advanced descriptor, or of a type that the datasheet does not define.
    Unknown,
}

impl TxDescriptor {
    /// Reads a descriptor from its two words.
    #[must_use]
    pub const fn from_words(words: [u64; 2]) -> Self {
        let command = words[1] as u32;
        if command & TxCommand::DEXT.bits() == 0 {
            return Self::Unknown;
        }
        match command & TYPE_MASK {
            TYPE_DATA => Self::Data(TxData::from_words(words)),
            TYPE_CONTEXT => Self::Context(TxContext::from_words(words)),
            _ => Self::Unknown,
        }
    }
}

/// A transmit data descriptor. §7.2.2.3
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TxData {
    /// IOVA of the buffer.
    pub address: u64,
    /// Bytes in the buffer (DTALEN).
    pub length: u16,
    /// Commands; [`TxCommand::DEXT`] is implied.
    pub command: TxCommand,
    /// Bytes of the whole packet (PAYLEN, 18 bits); with [`TxCommand::TSE`], of the payload that
    /// follows the headers.
    pub payload: u32,
    /// Which context applies (3 bits).
    pub context: u8,
    /// Offloads.
    pub options: TxOptions,
}

impl TxData {
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
            payload: length as u32,
            context: 0,
            options: TxOptions::empty(),
        }
    }

    /// The two words of such a descriptor, in memory order, for a `length` of at most 65535: what is
    /// beyond spills into other fields.
    #[must_use]
    #[inline(always)]
    pub const fn whole_words(address: u64, length: u32, report: bool) -> [u64; 2] {
        let [address, fixed] = Self::whole(address, 0, report).words();
        // DTALEN and PAYLEN, both at once.
        let lengths = length as u64 | (length as u64) << 46;
        [address, fixed.wrapping_add(lengths)]
    }

    /// Its two words, in memory order.
    #[must_use]
    #[inline(always)]
    pub const fn words(self) -> [u64; 2] {
        let low = self.length as u32 | TYPE_DATA | self.command.bits() | TxCommand::DEXT.bits();
        let high =
            (self.payload & 0x3_FFFF) << 14 | (self.context as u32 & 7) << 4 | self.options.bits();
        [self.address, low as u64 | (high as u64) << 32]
    }

    /// The descriptor that two words hold; their type is not looked at
    /// ([`TxDescriptor::from_words`] does).
    #[must_use]
    pub const fn from_words(words: [u64; 2]) -> Self {
        let (low, high) = (words[1] as u32, (words[1] >> 32) as u32);
        Self {
            address: words[0],
            length: low as u16,
            command: TxCommand::from_bits_truncate(low),
            payload: high >> 14,
            context: (high >> 4 & 7) as u8,
            options: TxOptions::from_bits_truncate(high),
        }
    }
}

/// Which transport protocol a context speaks of (L4T). §7.2.2.2.8
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum L4 {
    /// UDP, 00.
    #[default]
    Udp,
    /// TCP, 01.
    Tcp,
    /// SCTP, 10.
    Sctp,
    /// 11, reserved.
    Reserved,
}

/// A transmit context descriptor. §7.2.2.2
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TxContext {
    /// Bytes of the IP header (IPLEN, 9 bits).
    pub ip_length: u16,
    /// Bytes of the MAC header (MACLEN, 7 bits).
    pub mac_length: u8,
    /// The VLAN tag that [`TxCommand::VLE`] inserts.
    pub vlan: u16,
    /// Whether the IP header is IPv4 (TUCMD bit 10); IPv6 otherwise.
    pub ipv4: bool,
    /// The transport protocol.
    pub l4: L4,
    /// Bytes of the transport header (L4LEN).
    pub l4_length: u8,
    /// Bytes of payload per segment (MSS).
    pub segment: u16,
    /// Which context this sets (3 bits).
    pub index: u8,
}

impl TxContext {
    const IPV4: u32 = 1 << 10;

    /// Its two words, in memory order.
    #[must_use]
    pub const fn words(self) -> [u64; 2] {
        let lengths = self.ip_length as u32 & 0x1FF
            | (self.mac_length as u32 & 0x7F) << 9
            | (self.vlan as u32) << 16;
        let l4 = match self.l4 {
            L4::Udp => 0,
            L4::Tcp => 1,
            L4::Sctp => 2,
            L4::Reserved => 3,
        };
        let kind = TYPE_CONTEXT
            | TxCommand::DEXT.bits()
            | l4 << 11
            | if self.ipv4 { Self::IPV4 } else { 0 };
        let sizes = (self.index as u32 & 7) << 4
            | (self.l4_length as u32) << 8
            | (self.segment as u32) << 16;
        [lengths as u64, kind as u64 | (sizes as u64) << 32]
    }

    /// The context that two words hold; their type is not looked at.
    #[must_use]
    pub const fn from_words(words: [u64; 2]) -> Self {
        let lengths = words[0] as u32;
        let (kind, sizes) = (words[1] as u32, (words[1] >> 32) as u32);
        Self {
            ip_length: (lengths & 0x1FF) as u16,
            mac_length: (lengths >> 9 & 0x7F) as u8,
            vlan: (lengths >> 16) as u16,
            ipv4: kind & Self::IPV4 != 0,
            l4: match kind >> 11 & 3 {
                0 => L4::Udp,
                1 => L4::Tcp,
                2 => L4::Sctp,
                _ => L4::Reserved,
            },
            l4_length: (sizes >> 8) as u8,
            segment: (sizes >> 16) as u16,
            index: (sizes >> 4 & 7) as u8,
        }
    }
}

/// The second word of a transmit write-back. The first is reserved. §7.2.2.3.3
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TxDone(pub u64);

impl TxDone {
    /// The word that the device writes back.
    pub const DONE: Self = Self(1 << 32);

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

    // §7.2.2.3: a 60-byte frame at 0x1234_5678_9ABC, EOP | IFCS | RS | DEXT, data descriptor.
    const DATA: [u8; 16] = [
        0xBC, 0x9A, 0x78, 0x56, 0x34, 0x12, 0, 0, // buffer address
        0x3C, 0x00, 0x30, 0x2B, // DTALEN 60, DTYP 3, DCMD 0x2B
        0x00, 0x00, 0x0F, 0x00, // PAYLEN 60 << 14
    ];

    // §7.2.2.2: Ethernet 14, IPv4 20, TCP 20, MSS 1460, index 1, VLAN 0x0123.
    const CONTEXT: [u8; 16] = [
        0x14, 0x1C, 0x23, 0x01, // IPLEN 20 | MACLEN 14 << 9, VLAN tag
        0, 0, 0, 0, // sequence seed
        0x00, 0x0C, 0x20, 0x20, // IPV4, L4T TCP, DTYP 2, DEXT
        0x10, 0x14, 0xB4, 0x05, // IDX 1, L4LEN 20, MSS 1460
    ];

    // §7.1.5.2: 60 bytes, DD | EOP | VP | L4I | IPCS, tag 0x0123, TCP over IPv4, hash type 1.
    const WRITE_BACK: [u8; 16] = [
        0x11, 0x01, 0, 0, // RSS type 1, packet type IPV4 | TCP
        0x78, 0x56, 0x34, 0x12, // hash
        0x6B, 0, 0, 0, // status
        0x3C, 0x00, 0x23, 0x01, // length, VLAN tag
    ];

    #[test]
    fn a_data_descriptor_is_the_datasheet_s_bytes() {
        assert_eq!(
            bytes(TxData::whole(0x1234_5678_9ABC, 60, true).words()),
            DATA
        );
    }

    #[test]
    fn a_whole_frame_s_words_are_those_of_its_descriptor() {
        for (length, report) in [(17, false), (60, true), (9724, false), (0xFFFF, true)] {
            assert_eq!(
                TxData::whole_words(0x1234_5678_9ABC, length.into(), report),
                TxData::whole(0x1234_5678_9ABC, length, report).words()
            );
        }
    }

    #[test]
    fn a_context_descriptor_is_the_datasheet_s_bytes() {
        let context = TxContext {
            ip_length: 20,
            mac_length: 14,
            vlan: 0x0123,
            ipv4: true,
            l4: L4::Tcp,
            l4_length: 20,
            segment: 1460,
            index: 1,
        };
        assert_eq!(bytes(context.words()), CONTEXT);
        assert_eq!(
            TxDescriptor::from_words(context.words()),
            TxDescriptor::Context(context)
        );
    }

    #[test]
    fn a_data_descriptor_survives_the_way_through_words() {
        let data = TxData {
            address: 0xDEAD_BEEF,
            length: 0xFFFF,
            command: TxCommand::EOP | TxCommand::DEXT | TxCommand::TSE,
            payload: 0x3_FFFF,
            context: 7,
            options: TxOptions::IXSM | TxOptions::TXSM,
        };
        assert_eq!(
            TxDescriptor::from_words(data.words()),
            TxDescriptor::Data(data)
        );
    }

    #[test]
    fn a_descriptor_without_dext_is_unknown() {
        assert_eq!(
            TxDescriptor::from_words([0, 0x0030_0000]),
            TxDescriptor::Unknown
        );
    }

    #[test]
    fn a_receive_write_back_is_the_datasheet_s_bytes() {
        let kind = RxKind::new(1, 0x11, 0x1234_5678);
        let status = RxStatus::DD | RxStatus::EOP | RxStatus::VP | RxStatus::L4I | RxStatus::IPCS;
        let done = RxDone::new(status, RxErrors::empty(), 60, 0x0123);
        assert_eq!(bytes([kind.0, done.0]), WRITE_BACK);
    }

    #[test]
    fn a_receive_write_back_is_read_field_by_field() {
        let done = RxDone(0x0123_003C_4000_006B);
        assert!(done.is_done() && done.is_whole());
        assert_eq!((done.length(), done.vlan()), (60, 0x0123));
        assert_eq!(done.errors(), RxErrors::IPE);
    }

    #[test]
    fn a_posted_receive_descriptor_does_not_look_done() {
        assert!(!RxDone(RxRead::one_buffer(0xFFFF_F000).words()[1]).is_done());
    }

    #[test]
    fn a_transmit_write_back_is_done_and_a_posted_descriptor_is_not() {
        assert!(TxDone::DONE.is_done());
        assert!(!TxDone(TxData::whole(0, 60, true).words()[1]).is_done());
    }
}
