//! Frames that check themselves: a sequence number, a pattern and a checksum.

use failstop::dma::frame::Frame;
use failstop::provider::MacAddress;
use failstop::rss::{Rss, TABLE_ENTRIES, Table, toeplitz};

/// The shortest frame that holds a header, a sequence number and a checksum, in bytes; also the
/// shortest that Ethernet carries, without its frame check sequence.
pub(crate) const SHORTEST: u32 = 60;

/// EtherType of local experiments (IEEE 802, 88B5).
const ETHERTYPE: [u8; 2] = [0x88, 0xB5];
/// Bytes of a sequence number.
const NUMBER: usize = 8;
const CHECKSUM: usize = 4;

/// What comes before a frame's sequence number: an Ethernet header with nothing behind it, which
/// goes to queue 0, or an IPv4 header, too.
pub(crate) fn header(mac: MacAddress, size: u32, flow: Option<Flow>) -> Vec<u8> {
    let mut header = [mac.0, mac.0].concat();
    let Some(Flow([a, b, c, d, e, f, g, h])) = flow else {
        header.extend_from_slice(&ETHERTYPE);
        return header;
    };
    let [high, low] = (size.max(SHORTEST) as u16 - 14).to_be_bytes();
    // 20 bytes, whole, 64 hops; protocol 253 is for experiments (RFC 3692).
    let mut ip = [
        0x45, 0, high, low, 0, 0, 0x40, 0, 64, 253, 0, 0, a, b, c, d, e, f, g, h,
    ];
    let words = ip.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    [ip[10], ip[11]] = (!((sum & 0xFFFF) + (sum >> 16)) as u16).to_be_bytes();
    header.extend_from_slice(&[0x08, 0x00]);
    header.extend_from_slice(&ip);
    header
}

/// Source and destination address of packets that all go to one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flow([u8; 8]);

impl Flow {
    /// A flow that a device which spreads evenly over `queues` queues gives to `queue`. Its addresses
    /// are those of benchmarks (RFC 2544).
    pub(crate) fn to_queue(rss: &Rss, queue: u32, queues: u32) -> Option<Self> {
        let flows = (0..=u16::MAX).map(|n| {
            let [high, low] = n.to_be_bytes();
            Self([198, 18, high, low, 198, 19, 0, 1])
        });
        let table = Table::even(queues);
        let leads_to = |flow: &Self| {
            let entry = toeplitz(&rss.key, &flow.0) as usize % TABLE_ENTRIES;
            u32::from(table.0[entry]) == queue
        };
        flows.into_iter().find(leads_to)
    }
}

/// Writes and checks frames of one size, for one port that talks to itself.
pub(crate) struct Generator {
    template: Vec<u8>,
    /// Where the sequence number begins.
    number: usize,
    copy: Vec<u8>,
    next_sent: u64,
    next_received: u64,
    /// Frames that may be missing before the next that comes: the device was broken meanwhile.
    gap: bool,
    /// Frames that were missing where a gap was announced.
    pub(crate) lost: u64,
    /// Frames that were not what was sent: wrong bytes, wrong order, or lost before one that came.
    pub(crate) errors: u64,
}

impl Generator {
    /// Frames of `size` bytes (at least [`SHORTEST`]) from and to `mac`, of a flow or of none.
    pub(crate) fn new(mac: MacAddress, size: u32, flow: Option<Flow>) -> Self {
        let mut template = header(mac, size, flow);
        let number = template.len();
        let size = size.max(SHORTEST) as usize;
        template.resize(size, 0);
        Self {
            number,
            copy: vec![0; size],
            template,
            next_sent: 0,
            next_received: 0,
            gap: false,
            lost: 0,
            errors: 0,
        }
    }

    /// Makes `frame` the next to be sent.
    pub(crate) fn write(&mut self, frame: &mut Frame) {
        let sequence = self.next_sent;
        let body = self.number + NUMBER;
        self.template[self.number..body].copy_from_slice(&sequence.to_le_bytes());
        let end = self.template.len() - CHECKSUM;
        for (at, byte) in self.template[body..end].iter_mut().enumerate() {
            *byte = (sequence as u8).wrapping_mul(31).wrapping_add(at as u8);
        }
        let sum = crc32fast::hash(&self.template[..end]);
        self.template[end..].copy_from_slice(&sum.to_le_bytes());
        if frame.fill(&self.template).is_ok() {
            self.next_sent += 1;
        }
    }

    /// `count` frames, counted from the last that was written, were not sent after all: they will
    /// be written again.
    pub(crate) fn unsent(&mut self, count: usize) {
        self.next_sent -= count as u64;
    }

    /// What was on its way is lost: once, a frame may come that is not the next.
    pub(crate) fn gap(&mut self) {
        self.gap = true;
    }

    /// Checks a received frame.
    pub(crate) fn check(&mut self, frame: &Frame) {
        let len = frame.copy_to(&mut self.copy);
        if len != self.template.len() || frame.len() as usize != len {
            self.errors += 1;
            return;
        }
        let end = len - CHECKSUM;
        let (body, sum) = self.copy.split_at(end);
        let sequence = body[self.number..self.number + NUMBER]
            .iter()
            .rev()
            .fold(0, |n, &byte| n << 8 | u64::from(byte));
        let missing = sequence.checked_sub(self.next_received);
        match missing.filter(|_| crc32fast::hash(body).to_le_bytes() == sum) {
            Some(0) => {}
            Some(missing) if self.gap => {
                self.gap = false;
                self.lost += missing;
            }
            _ => self.errors += 1,
        }
        self.next_received = sequence.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_a_flow_and_an_ip_header_that_adds_up() {
        for queue in 0..16 {
            let flow = Flow::to_queue(&Rss::default(), queue, 16);
            assert!(flow.is_some());
            let header = header(MacAddress::default(), SHORTEST, flow);
            let words = header[14..].as_chunks::<2>().0.iter();
            let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
            assert_eq!((sum & 0xFFFF) + (sum >> 16), 0xFFFF);
        }
    }
}
