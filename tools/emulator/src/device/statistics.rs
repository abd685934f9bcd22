//! The statistics block: counters that a read clears and that stick at all-ones. §8.18 Faults make
//! them wrap, or run backwards.

use failstop::igb::registers::RQDPC;
use failstop::igb::statistics::{
    BPRC, BPTC, GORCH, GORCL, GOTCH, GOTCL, GPRC, GPTC, IAC, MPC, MPRC, MPTC, PRC64, PRC127,
    PRC255, PRC511, PRC1023, PRC1522, PTC64, PTC127, PTC255, PTC511, PTC1023, PTC1522, RNBC, ROC,
    START, TORH, TORL, TOTH, TOTL, TPR, TPT,
};
use failstop_pci::register::ReadClear;

use super::registers::{QUEUES, receive_queue};

/// Bytes of the block, host counters included.
const BYTES: u32 = 0x140;
/// Bytes of the frame check sequence, which the counters include and our frames do not carry.
pub(super) const FCS: usize = 4;

type Counter = ReadClear<u32>;
const RECEIVED: [Counter; 6] = [PRC64, PRC127, PRC255, PRC511, PRC1023, PRC1522];
const SENT: [Counter; 6] = [PTC64, PTC127, PTC255, PTC511, PTC1023, PTC1522];

fn by_size(counters: [Counter; 6], bytes: usize) -> Counter {
    counters[match bytes {
        ..=64 => 0,
        65..=127 => 1,
        128..=255 => 2,
        256..=511 => 3,
        512..=1023 => 4,
        _ => 5,
    }]
}

/// Whom a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cast {
    /// One station.
    Uni,
    /// A group.
    Multi,
    /// Everybody.
    Broad,
}

impl Cast {
    /// What the destination address of a frame says.
    #[must_use]
    pub(super) fn of(frame: &[u8]) -> Self {
        match frame.get(..6) {
            Some([0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]) => Self::Broad,
            Some([first, ..]) if first & 1 != 0 => Self::Multi,
            _ => Self::Uni,
        }
    }
}

/// How counters count.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Conduct {
    /// As they should.
    #[default]
    Honest,
    /// From just below their end, and over it.
    Wraps,
    /// Each read returns less than the one before.
    Backwards,
}

/// Where counters that wrap stand after a read.
const BELOW_END: u32 = u32::MAX - 16;
/// Where counters that run backwards begin.
const BACKWARDS: u32 = 0x4000_0000;

/// The counters.
#[derive(Debug)]
pub(super) struct Statistics {
    conduct: Conduct,
    counts: Vec<u32>,
    /// Packets that a queue dropped for want of descriptors (RQDPC).
    queue_drops: [u32; QUEUES as usize],
}

impl Default for Statistics {
    fn default() -> Self {
        Self {
            conduct: Conduct::Honest,
            counts: vec![0; BYTES as usize / 4],
            queue_drops: [0; QUEUES as usize],
        }
    }
}

impl Statistics {
    /// Reads and clears the counter at a canonical offset, if one is there.
    pub(super) fn take(&mut self, offset: u32) -> Option<u32> {
        if let Some((queue, register)) = receive_queue(offset) {
            return (register == RQDPC.offset())
                .then(|| std::mem::take(&mut self.queue_drops[queue]));
        }
        let at = offset.checked_sub(START).filter(|at| *at < BYTES)?;
        let count = self.counts.get_mut(at as usize / 4)?;
        Some(match self.conduct {
            Conduct::Honest => std::mem::take(count),
            Conduct::Wraps => std::mem::replace(count, BELOW_END),
            Conduct::Backwards => {
                *count = count.wrapping_sub(1);
                *count
            }
        })
    }

    /// Counts like this from now on.
    pub(super) fn conduct(&mut self, conduct: Conduct) {
        if conduct != self.conduct {
            self.conduct = conduct;
            self.counts.fill(match conduct {
                Conduct::Honest => 0,
                Conduct::Wraps => BELOW_END,
                Conduct::Backwards => BACKWARDS,
            });
        }
    }

    fn add(&mut self, counter: Counter, n: u32) {
        let at = (counter.offset() - START) as usize / 4;
        let count = self.counts[at];
        self.counts[at] = match self.conduct {
            Conduct::Honest => count.saturating_add(n),
            Conduct::Wraps => count.wrapping_add(n),
            Conduct::Backwards => count,
        };
    }

    fn add_octets(&mut self, low: Counter, high: Counter, n: usize) {
        if self.conduct == Conduct::Backwards {
            return;
        }
        let at = (low.offset() - START) as usize / 4;
        let (sum, carry) = self.counts[at].overflowing_add(n as u32);
        self.counts[at] = sum;
        if carry {
            self.add(high, 1);
        }
    }

    /// A frame of `len` bytes went out.
    pub(super) fn sent(&mut self, len: usize, cast: Cast) {
        let octets = len + FCS;
        self.add(TPT, 1);
        self.add(GPTC, 1);
        self.add_octets(TOTL, TOTH, octets);
        self.add_octets(GOTCL, GOTCH, octets);
        self.add(by_size(SENT, octets), 1);
        match cast {
            Cast::Uni => {}
            Cast::Multi => self.add(MPTC, 1),
            Cast::Broad => self.add(BPTC, 1),
        }
    }

    /// A frame of `len` bytes came in, whoever it is for.
    pub(super) fn seen(&mut self, len: usize) {
        self.add(TPR, 1);
        self.add_octets(TORL, TORH, len + FCS);
    }

    /// A frame of `len` bytes passed the filters.
    pub(super) fn accepted(&mut self, len: usize, cast: Cast) {
        let octets = len + FCS;
        self.add(GPRC, 1);
        self.add_octets(GORCL, GORCH, octets);
        self.add(by_size(RECEIVED, octets), 1);
        match cast {
            Cast::Uni => {}
            Cast::Multi => self.add(MPRC, 1),
            Cast::Broad => self.add(BPRC, 1),
        }
    }

    /// A frame was longer than allowed.
    pub(super) fn oversized(&mut self) {
        self.add(ROC, 1);
    }

    /// A frame found no descriptor and waits.
    pub(super) fn no_buffer(&mut self) {
        self.add(RNBC, 1);
    }

    /// A frame found the packet buffer full.
    pub(super) fn missed(&mut self) {
        self.add(MPC, 1);
    }

    /// A queue dropped a frame.
    pub(super) fn queue_dropped(&mut self, queue: usize) {
        if let Some(drops) = self.queue_drops.get_mut(queue) {
            *drops = drops.saturating_add(1);
        }
    }

    /// An interrupt was sent.
    pub(super) fn interrupted(&mut self, n: u32) {
        self.add(IAC, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_clears() {
        let mut statistics = Statistics::default();
        statistics.sent(60, Cast::Uni);
        assert_eq!(statistics.take(GPTC.offset()), Some(1));
        assert_eq!(statistics.take(GPTC.offset()), Some(0));
    }

    #[test]
    fn a_60_byte_frame_counts_as_64_with_its_check_sequence() {
        let mut statistics = Statistics::default();
        statistics.accepted(60, Cast::Broad);
        assert_eq!(statistics.take(PRC64.offset()), Some(1));
        assert_eq!(statistics.take(GORCL.offset()), Some(64));
        assert_eq!(statistics.take(BPRC.offset()), Some(1));
    }

    #[test]
    fn octets_carry_into_the_high_half() {
        let mut statistics = Statistics::default();
        statistics.counts[(GOTCL.offset() - START) as usize / 4] = u32::MAX - 10;
        statistics.sent(60, Cast::Uni);
        assert_eq!(statistics.take(GOTCH.offset()), Some(1));
        assert_eq!(statistics.take(GOTCL.offset()), Some(53));
    }

    #[test]
    fn counters_that_wrap_do() {
        let mut statistics = Statistics::default();
        statistics.conduct(Conduct::Wraps);
        for _ in 0..20 {
            statistics.sent(60, Cast::Uni);
        }
        assert_eq!(statistics.take(GPTC.offset()), Some(3));
        assert_eq!(statistics.take(GPTC.offset()), Some(BELOW_END));
    }

    #[test]
    fn counters_that_run_backwards_return_less_each_time() {
        let mut statistics = Statistics::default();
        statistics.conduct(Conduct::Backwards);
        let first = statistics.take(GPTC.offset());
        statistics.sent(60, Cast::Uni);
        assert!(statistics.take(GPTC.offset()) < first);
    }

    #[test]
    fn counters_that_are_honest_again_begin_at_0() {
        let mut statistics = Statistics::default();
        statistics.conduct(Conduct::Wraps);
        statistics.conduct(Conduct::Honest);
        assert_eq!(statistics.take(GPTC.offset()), Some(0));
    }

    #[test]
    fn a_register_outside_the_block_is_not_a_counter() {
        assert_eq!(Statistics::default().take(0x4200), None);
    }
}
