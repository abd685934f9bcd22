//! What the transmit path does to a packet on its way out: segmentation, checksums, VLAN tags; and
//! what the receive path finds out about one. Pure functions over bytes. §7.2.4, §7.1.10

use failstop::igb::descriptors::{L4, TxContext, TxOptions};

/// Bytes of destination, source and EtherType.
pub(super) const ETHERNET: usize = 14;
/// The shortest frame on the wire, without frame check sequence.
pub(super) const SHORTEST: usize = 60;
/// Bytes of both addresses, which a VLAN tag follows.
const ADDRESSES: usize = 12;
const TAG: usize = 4;

const IPV4_LENGTH: usize = 2;
const IPV4_ID: usize = 4;
const IPV4_CHECKSUM: usize = 10;
const IPV6_LENGTH: usize = 4;
const IPV6_HEADER: usize = 40;
const TCP_SEQUENCE: usize = 4;
const TCP_FLAGS: usize = 13;
const TCP_FIN: u8 = 1 << 0;
const TCP_PSH: u8 = 1 << 3;
const TCP_CWR: u8 = 1 << 7;

/// The ones' complement sum that the Internet checksum is made of (RFC 1071), continued from `sum`.
#[must_use]
pub(super) fn sum(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut pairs = bytes.chunks_exact(2);
    for pair in &mut pairs {
        sum += u64::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        sum += u64::from(*last) << 8;
    }
    sum
}

/// Folds a sum to 16 bits.
#[must_use]
pub(super) fn fold(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    sum as u16
}

fn put16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes
        .get_mut(at..at + 2)?
        .copy_from_slice(&value.to_be_bytes());
    Some(())
}

fn get16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn add32(bytes: &mut [u8], at: usize, n: u32) -> Option<()> {
    let field = bytes.get_mut(at..at + 4)?;
    let value = u32::from_be_bytes([field[0], field[1], field[2], field[3]]).wrapping_add(n);
    field.copy_from_slice(&value.to_be_bytes());
    Some(())
}

/// Where the checksum stands in a transport header; none for SCTP, whose CRC this model does not
/// insert.
const fn checksum_offset(l4: L4) -> Option<usize> {
    match l4 {
        L4::Tcp => Some(16),
        L4::Udp => Some(6),
        L4::Sctp | L4::Reserved => None,
    }
}

/// Inserts the checksums that `options` ask for, as `context` places them. The driver left the
/// pseudo-header's sum in the transport checksum field; `extra` is added to it (segmentation: the
/// length, which the driver left out). None when a header lies outside the packet.
pub(super) fn insert_checksums(
    packet: &mut [u8],
    context: &TxContext,
    options: TxOptions,
    extra: u64,
) -> Option<()> {
    let ip = usize::from(context.mac_length);
    let l4 = ip + usize::from(context.ip_length);
    if options.contains(TxOptions::IXSM) && context.ipv4 {
        put16(packet, ip + IPV4_CHECKSUM, 0)?;
        let checksum = !fold(sum(0, packet.get(ip..l4)?));
        put16(packet, ip + IPV4_CHECKSUM, checksum)?;
    }
    if options.contains(TxOptions::TXSM)
        && let Some(at) = checksum_offset(context.l4)
    {
        let mut checksum = !fold(sum(extra, packet.get(l4..)?));
        if checksum == 0 && context.l4 == L4::Udp {
            checksum = 0xFFFF;
        }
        put16(packet, l4 + at, checksum)?;
    }
    Some(())
}

/// Cuts a packet into segments of the context's MSS and hands each to `send`. `payload` is what the
/// descriptor says follows the headers. None when headers and sizes contradict each other; segments
/// sent until then stay sent.
pub(super) fn segment(
    packet: &[u8],
    payload: usize,
    context: &TxContext,
    options: TxOptions,
    scratch: &mut Vec<u8>,
    mut send: impl FnMut(&mut Vec<u8>),
) -> Option<()> {
    let ip = usize::from(context.mac_length);
    let l4 = ip + usize::from(context.ip_length);
    let headers = l4 + usize::from(context.l4_length);
    let mss = usize::from(context.segment);
    if mss == 0 || context.l4 != L4::Tcp || packet.len() != headers + payload || payload == 0 {
        return None;
    }
    let mut sent = 0;
    let mut number = 0u16;
    while sent < payload {
        let part = mss.min(payload - sent);
        scratch.clear();
        scratch.extend_from_slice(packet.get(..headers)?);
        scratch.extend_from_slice(packet.get(headers + sent..headers + sent + part)?);
        let segment_len = scratch.len() - l4;
        if context.ipv4 {
            let id = get16(scratch, ip + IPV4_ID)?.wrapping_add(number);
            put16(scratch, ip + IPV4_ID, id)?;
            let total = u16::try_from(scratch.len() - ip).ok()?;
            put16(scratch, ip + IPV4_LENGTH, total)?;
        } else {
            let after_header = scratch.len().checked_sub(ip + IPV6_HEADER)?;
            put16(scratch, ip + IPV6_LENGTH, u16::try_from(after_header).ok()?)?;
        }
        add32(scratch, l4 + TCP_SEQUENCE, u32::try_from(sent).ok()?)?;
        let flags = scratch.get_mut(l4 + TCP_FLAGS)?;
        if sent + part < payload {
            *flags &= !(TCP_FIN | TCP_PSH);
        }
        if sent > 0 {
            *flags &= !TCP_CWR;
        }
        insert_checksums(scratch, context, options, segment_len as u64)?;
        send(scratch);
        sent += part;
        number = number.wrapping_add(1);
    }
    Some(())
}

/// Inserts a VLAN tag behind the addresses.
pub(super) fn insert_tag(frame: &mut Vec<u8>, ethertype: u16, tag: u16) {
    if frame.len() >= ADDRESSES {
        let [a, b] = ethertype.to_be_bytes();
        let [c, d] = tag.to_be_bytes();
        frame.splice(ADDRESSES..ADDRESSES, [a, b, c, d]);
    }
}

/// The VLAN tag of a frame that has one.
#[must_use]
pub(super) fn tag(frame: &[u8], ethertype: u16) -> Option<u16> {
    (get16(frame, ADDRESSES)? == ethertype).then(|| get16(frame, ADDRESSES + 2))?
}

/// Takes the VLAN tag out of a frame.
pub(super) fn strip_tag(frame: &mut Vec<u8>) {
    if frame.len() >= ADDRESSES + TAG {
        frame.drain(ADDRESSES..ADDRESSES + TAG);
    }
}

/// What checksum offload found in a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Checksum {
    /// Nothing to check.
    Absent,
    /// Right.
    Good,
    /// Wrong.
    Bad,
}

impl Checksum {
    const fn of(good: bool) -> Self {
        if good { Self::Good } else { Self::Bad }
    }
}

/// The layers of a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layers<'a> {
    /// Source and destination addresses.
    pub(super) addresses: &'a [u8],
    /// Whether they are IPv4's.
    pub(super) ipv4: bool,
    /// IP protocol, where the transport header follows.
    pub(super) protocol: Option<u8>,
    /// From the transport header on.
    pub(super) transport: &'a [u8],
    /// IP header checksum.
    pub(super) ip_checksum: Checksum,
}

/// TCP's IP protocol number.
pub(super) const TCP: u8 = 6;
/// UDP's IP protocol number.
pub(super) const UDP: u8 = 17;

/// Finds the layers of an IPv4 or IPv6 frame without VLAN tag. None for anything else, and for
/// headers that contradict the frame's length.
#[must_use]
pub(super) fn layers(frame: &[u8]) -> Option<Layers<'_>> {
    match get16(frame, ADDRESSES)? {
        0x0800 => {
            let ip = frame.get(ETHERNET..)?;
            let header = usize::from(ip.first()? & 0xF) * 4;
            let total = usize::from(get16(ip, IPV4_LENGTH)?);
            if ip[0] >> 4 != 4 || header < 20 {
                return None;
            }
            let fragment = get16(ip, 6)? & 0x3FFF != 0;
            Some(Layers {
                addresses: ip.get(12..20)?,
                ipv4: true,
                protocol: (!fragment).then_some(ip[9]),
                transport: ip.get(header..total)?,
                ip_checksum: Checksum::of(fold(sum(0, ip.get(..header)?)) == 0xFFFF),
            })
        }
        0x86DD => {
            let ip = frame.get(ETHERNET..)?;
            let total = IPV6_HEADER + usize::from(get16(ip, IPV6_LENGTH)?);
            Some(Layers {
                addresses: ip.get(8..40)?,
                ipv4: false,
                protocol: Some(*ip.get(6)?),
                transport: ip.get(IPV6_HEADER..total)?,
                ip_checksum: Checksum::Absent,
            })
        }
        _ => None,
    }
}

impl Layers<'_> {
    /// Checks the TCP or UDP checksum.
    #[must_use]
    pub(super) fn transport_checksum(&self) -> Checksum {
        let Some(protocol @ (TCP | UDP)) = self.protocol else {
            return Checksum::Absent;
        };
        if protocol == UDP && get16(self.transport, 6) == Some(0) {
            return Checksum::Absent;
        }
        let pseudo = sum(
            u64::from(protocol) + self.transport.len() as u64,
            self.addresses,
        );
        Checksum::of(fold(sum(pseudo, self.transport)) == 0xFFFF)
    }
}

/// The frame check sequence (IEEE 802.3 3.2.9), least significant byte first on the wire.
#[must_use]
pub(super) fn frame_check(frame: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in frame {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0xEDB8_8320 } else { 0 };
        }
    }
    (!crc).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: TxContext = TxContext {
        ip_length: 20,
        mac_length: 14,
        vlan: 0,
        ipv4: true,
        l4: L4::Tcp,
        l4_length: 20,
        segment: 100,
        index: 0,
    };

    /// TCP over IPv4 with `payload` bytes, the pseudo-header's sum (with its length, or without)
    /// in the checksum field.
    fn packet(payload: usize, with_length: bool) -> Vec<u8> {
        let mut packet = vec![0; 12];
        packet.extend_from_slice(&[0x08, 0x00]);
        let total = (40 + payload) as u16;
        packet.extend_from_slice(&[0x45, 0, (total >> 8) as u8, total as u8]);
        packet.extend_from_slice(&[0x12, 0x34, 0x40, 0, 64, TCP, 0, 0]);
        packet.extend_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        let length = if with_length { 20 + payload as u64 } else { 0 };
        let seed = fold(sum(u64::from(TCP) + length, &packet[26..34]));
        packet.extend_from_slice(&[0x10, 0x01, 0x10, 0x02, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x99]);
        packet.extend_from_slice(&[0xFF, 0xFF, (seed >> 8) as u8, seed as u8, 0, 0]);
        packet.extend((0..payload).map(|i| i as u8));
        packet
    }

    fn segments(packet: &[u8], payload: usize) -> (Option<()>, Vec<Vec<u8>>) {
        let mut sent = Vec::new();
        let options = TxOptions::IXSM | TxOptions::TXSM;
        let result = segment(packet, payload, &CONTEXT, options, &mut Vec::new(), |s| {
            sent.push(s.clone());
        });
        (result, sent)
    }

    #[test]
    fn inserted_checksums_verify() {
        let mut packet = packet(33, true);
        insert_checksums(&mut packet, &CONTEXT, TxOptions::IXSM | TxOptions::TXSM, 0).unwrap();
        let layers = layers(&packet).unwrap();
        assert_eq!(layers.ip_checksum, Checksum::Good);
        assert_eq!(layers.transport_checksum(), Checksum::Good);
    }

    #[test]
    fn every_segment_verifies() {
        let (_, sent) = segments(&packet(250, false), 250);
        assert_eq!(sent.len(), 3);
        for segment in &sent {
            let layers = layers(segment).unwrap();
            assert_eq!(layers.ip_checksum, Checksum::Good);
            assert_eq!(layers.transport_checksum(), Checksum::Good);
        }
    }

    #[test]
    fn segments_count_ids_and_sequence_up_and_carry_all_payload() {
        let (_, sent) = segments(&packet(250, false), 250);
        assert_eq!(get16(&sent[2], 18), Some(0x1236));
        assert_eq!(sent[2][38..42], 205u32.to_be_bytes());
        let payload: Vec<u8> = sent.iter().flat_map(|s| s[54..].to_vec()).collect();
        assert_eq!(payload, packet(250, false)[54..]);
    }

    #[test]
    fn only_the_last_segment_pushes_and_only_the_first_reduces_the_window() {
        let (_, sent) = segments(&packet(250, false), 250);
        let flags: Vec<u8> = sent.iter().map(|s| s[47]).collect();
        assert_eq!(flags, [0x90, 0x10, 0x19]);
    }

    #[test]
    fn segmentation_with_a_payload_that_is_not_there_sends_nothing() {
        let (result, sent) = segments(&packet(250, false), 251);
        assert!(result.is_none() && sent.is_empty());
    }

    #[test]
    fn headers_outside_the_packet_are_refused_without_panic() {
        let mut short = vec![0; 20];
        assert_eq!(
            insert_checksums(&mut short, &CONTEXT, TxOptions::all(), 0),
            None
        );
    }

    #[test]
    fn a_wrong_checksum_is_bad() {
        let mut packet = packet(33, true);
        insert_checksums(&mut packet, &CONTEXT, TxOptions::IXSM | TxOptions::TXSM, 0).unwrap();
        packet[60] ^= 1;
        assert_eq!(layers(&packet).unwrap().transport_checksum(), Checksum::Bad);
    }

    #[test]
    fn a_tag_goes_in_and_comes_out() {
        let mut frame = packet(0, true);
        insert_tag(&mut frame, 0x8100, 0x0123);
        assert_eq!(tag(&frame, 0x8100), Some(0x0123));
        strip_tag(&mut frame);
        assert_eq!(frame, packet(0, true));
    }

    #[test]
    fn the_frame_check_sequence_is_crc_32() {
        assert_eq!(frame_check(b"123456789"), 0xCBF4_3926u32.to_le_bytes());
    }
}
