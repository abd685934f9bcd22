//! Which frames the receiver accepts, and for which queue. §7.1.1, §7.1.2, §7.1.10

use failstop::igb::bits::{AddressHigh, MultipleReceive, ReceiveControl};
use failstop::igb::registers::{
    ADDRESS_STRIDE, MRQC, MTA, RAH, RAH16, RAL, RAL16, RCTL, RETA, RLPML, RSSRK, TABLE_ENTRIES,
    VET, VFTA, WORD_STRIDE,
};

use super::offload::{self, Layers, TCP, UDP};
use super::registers::{File, QUEUES};
use super::statistics::{Cast, FCS};

/// The longest frame without long packets: 1522 bytes, VLAN tag and frame check sequence included.
const STANDARD: usize = 1522;
/// Receive addresses of the 82576.
const ADDRESSES: u32 = 24;

/// What the filters say of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// It goes to a queue.
    Accept,
    /// It is for somebody else.
    NotOurs,
    /// It is longer than the receiver may take.
    TooLong,
}

/// Filters a frame (without frame check sequence).
#[must_use]
pub(super) fn judge(file: &File, frame: &[u8]) -> Verdict {
    let control = file.get(RCTL);
    let longest = if control.contains(ReceiveControl::LPE) {
        file.get(RLPML) as usize
    } else {
        STANDARD
    };
    if frame.len() + FCS > longest {
        return Verdict::TooLong;
    }
    if accepts_address(file, control, frame) && accepts_tag(file, control, frame) {
        Verdict::Accept
    } else {
        Verdict::NotOurs
    }
}

fn accepts_address(file: &File, control: ReceiveControl, frame: &[u8]) -> bool {
    let Some(destination) = frame.first_chunk::<6>() else {
        return false;
    };
    match Cast::of(frame) {
        Cast::Broad => control.intersects(ReceiveControl::BAM),
        Cast::Multi => {
            control.contains(ReceiveControl::MPE)
                || is_listed(file, destination)
                || is_hashed(file, control, destination)
        }
        Cast::Uni => control.contains(ReceiveControl::UPE) || is_listed(file, destination),
    }
}

fn is_listed(file: &File, destination: &[u8; 6]) -> bool {
    let [a, b, c, d, e, f] = *destination;
    let low = u32::from_le_bytes([a, b, c, d]);
    let high = u32::from(u16::from_le_bytes([e, f]));
    (0..ADDRESSES).any(|n| {
        let (ral, rah) = if n < 16 {
            (RAL.of(n, ADDRESS_STRIDE), RAH.of(n, ADDRESS_STRIDE))
        } else {
            (
                RAL16.of(n - 16, ADDRESS_STRIDE),
                RAH16.of(n - 16, ADDRESS_STRIDE),
            )
        };
        let upper = file.get(rah);
        upper.contains(AddressHigh::AV) && upper.bits() & 0xFFFF == high && file.get(ral) == low
    })
}

/// The multicast table: 12 bits of the address, chosen by RCTL.MO, name one of 4096 bits. §8.10.1
fn is_hashed(file: &File, control: ReceiveControl, destination: &[u8; 6]) -> bool {
    let shift = match control.bits() >> 12 & 3 {
        0 => 4,
        1 => 3,
        2 => 2,
        _ => 0,
    };
    let bits = u32::from(u16::from_le_bytes([destination[4], destination[5]])) >> shift & 0xFFF;
    file.get(MTA.of(bits >> 5 & (TABLE_ENTRIES - 1), WORD_STRIDE)) >> (bits & 31) & 1 != 0
}

fn accepts_tag(file: &File, control: ReceiveControl, frame: &[u8]) -> bool {
    if !control.contains(ReceiveControl::VFE) {
        return true;
    }
    let Some(tag) = offload::tag(frame, file.get(VET) as u16) else {
        return true;
    };
    let vlan = u32::from(tag & 0xFFF);
    file.get(VFTA.of(vlan >> 5, WORD_STRIDE)) >> (vlan & 31) & 1 != 0
}

/// The receive side scaling hash of a frame: which fields it covers (the write-back's RSS type)
/// and its value. None where RSS is off or the frame is not of a kind that is hashed. §7.1.2.8
#[must_use]
pub(super) fn rss(file: &File, layers: Option<&Layers<'_>>) -> Option<(u8, u32)> {
    let control = file.get(MRQC);
    if control.bits() & 7 != MultipleReceive::RSS.bits() {
        return None;
    }
    let layers = layers?;
    let mut input = [0; 36];
    let addresses = layers.addresses.len();
    input
        .get_mut(..addresses)?
        .copy_from_slice(layers.addresses);
    let with_ports = match (layers.ipv4, layers.protocol) {
        (true, Some(TCP)) => control.contains(MultipleReceive::TCP_IPV4).then_some(1),
        (true, Some(UDP)) => control.contains(MultipleReceive::UDP_IPV4).then_some(7),
        (false, Some(TCP)) => control
            .intersects(MultipleReceive::TCP_IPV6 | MultipleReceive::TCP_IPV6_EX)
            .then_some(3),
        (false, Some(UDP)) => control.contains(MultipleReceive::UDP_IPV6).then_some(8),
        _ => None,
    };
    if let Some(kind) = with_ports
        && let Some(ports) = layers.transport.get(..4)
    {
        input
            .get_mut(addresses..addresses + 4)?
            .copy_from_slice(ports);
        return Some((kind, toeplitz(file, &input[..addresses + 4])));
    }
    let kind = match layers.ipv4 {
        true => control.contains(MultipleReceive::IPV4).then_some(2),
        false => control.contains(MultipleReceive::IPV6).then_some(5),
    }?;
    Some((kind, toeplitz(file, &input[..addresses])))
}

fn toeplitz(file: &File, input: &[u8]) -> u32 {
    let key = |n: u32| u64::from(file.get(RSSRK.of(n, WORD_STRIDE)).swap_bytes());
    let mut window = key(0) << 32 | key(1);
    let mut hash = 0;
    for (i, byte) in input.iter().enumerate() {
        for bit in (0..8).rev() {
            if byte >> bit & 1 != 0 {
                hash ^= (window >> 32) as u32;
            }
            window <<= 1;
        }
        // Every four bytes the window has used up a word of the key.
        if i % 4 == 3 {
            window |= key((i as u32 / 4 + 2).min(9));
        }
    }
    hash
}

/// The queue that a hash leads to: the redirection table by its low 7 bits. §7.1.2.8.3
#[must_use]
pub(super) fn queue(file: &File, hash: Option<(u8, u32)>) -> usize {
    let Some((_, hash)) = hash else {
        return 0;
    };
    let entry = hash & 0x7F;
    let word = file.get(RETA.of(entry / 4, WORD_STRIDE));
    (word >> (entry % 4 * 8) & (QUEUES - 1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x10];

    fn frame(destination: [u8; 6], len: usize) -> Vec<u8> {
        let mut frame = vec![0; len];
        frame[..6].copy_from_slice(&destination);
        frame
    }

    fn file(control: ReceiveControl) -> File {
        let mut file = File::new(MAC);
        file.set(RCTL, control);
        file
    }

    #[test]
    fn our_own_address_is_accepted_and_another_is_not() {
        let file = file(ReceiveControl::empty());
        assert_eq!(judge(&file, &frame(MAC, 60)), Verdict::Accept);
        assert_eq!(
            judge(&file, &frame([2, 0, 0, 0, 0, 9], 60)),
            Verdict::NotOurs
        );
    }

    #[test]
    fn promiscuous_accepts_any_unicast() {
        let file = file(ReceiveControl::UPE);
        assert_eq!(
            judge(&file, &frame([2, 0, 0, 0, 0, 9], 60)),
            Verdict::Accept
        );
    }

    #[test]
    fn broadcast_needs_bam() {
        let broadcast = frame([0xFF; 6], 60);
        assert_eq!(
            judge(&file(ReceiveControl::empty()), &broadcast),
            Verdict::NotOurs
        );
        assert_eq!(
            judge(&file(ReceiveControl::BAM), &broadcast),
            Verdict::Accept
        );
    }

    #[test]
    fn a_group_in_the_multicast_table_is_accepted() {
        // 01:00:5e:00:00:01 hashes to (0x0100 >> 4) & 0xFFF = bit 0x010: word 0, bit 16.
        let mut file = file(ReceiveControl::empty());
        let group = frame([0x01, 0x00, 0x5E, 0, 0, 0x01], 60);
        assert_eq!(judge(&file, &group), Verdict::NotOurs);
        file.set(MTA, 1u32 << 16);
        assert_eq!(judge(&file, &group), Verdict::Accept);
    }

    #[test]
    fn a_frame_over_1522_bytes_needs_long_packets() {
        let mut file = file(ReceiveControl::empty());
        assert_eq!(judge(&file, &frame(MAC, 1518)), Verdict::Accept);
        assert_eq!(judge(&file, &frame(MAC, 1519)), Verdict::TooLong);
        file.set(RCTL, ReceiveControl::LPE);
        file.set(RLPML, 9000u32);
        assert_eq!(judge(&file, &frame(MAC, 8996)), Verdict::Accept);
        assert_eq!(judge(&file, &frame(MAC, 8997)), Verdict::TooLong);
    }

    // The verification suite of the RSS specification: 66.9.149.187:2794 to 161.142.100.80:1766.
    #[test]
    fn the_toeplitz_hash_is_the_published_one() {
        let mut file = File::new(MAC);
        file.set(MRQC, MultipleReceive::from_bits_retain(0x0037_0002));
        let key: [u8; 40] = [
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3,
            0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3,
            0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
        ];
        for (n, word) in key.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            file.set(RSSRK.of(n as u32, WORD_STRIDE), word);
        }
        let layers = Layers {
            addresses: &[66, 9, 149, 187, 161, 142, 100, 80],
            ipv4: true,
            protocol: Some(TCP),
            transport: &[0x0a, 0xea, 0x06, 0xe6],
            ip_checksum: offload::Checksum::Good,
        };
        assert_eq!(rss(&file, Some(&layers)), Some((1, 0x51cc_c178)));
    }
}
