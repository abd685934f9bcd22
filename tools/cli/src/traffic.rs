//! Frames that check themselves: a sequence number, a pattern and a checksum.

use failstop::dma::frame::Frame;
use failstop::provider::MacAddress;

/// The shortest frame that holds a header, a sequence number and a checksum, in bytes; also the
/// shortest that Ethernet carries, without its frame check sequence.
pub(crate) const SHORTEST: u32 = 60;

/// EtherType of local experiments (IEEE 802, 88B5).
const ETHERTYPE: [u8; 2] = [0x88, 0xB5];
const HEADER: usize = 14;
const SEQUENCE: usize = HEADER + 8;
const CHECKSUM: usize = 4;

/// Writes and checks frames of one size, for one port that talks to itself.
pub(crate) struct Generator {
    template: Vec<u8>,
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
    /// Frames of `size` bytes (at least [`SHORTEST`]) from and to `mac`.
    pub(crate) fn new(mac: MacAddress, size: u32) -> Self {
        let size = size.max(SHORTEST) as usize;
        let mut template = Vec::with_capacity(size);
        template.extend_from_slice(&mac.0);
        template.extend_from_slice(&mac.0);
        template.extend_from_slice(&ETHERTYPE);
        template.resize(size, 0);
        Self {
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
        self.template[HEADER..SEQUENCE].copy_from_slice(&sequence.to_le_bytes());
        let end = self.template.len() - CHECKSUM;
        for (at, byte) in self.template[SEQUENCE..end].iter_mut().enumerate() {
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
        let sequence = body[HEADER..SEQUENCE]
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
