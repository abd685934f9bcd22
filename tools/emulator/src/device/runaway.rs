//! A queue that does not stop: what the faults `rxq-stuck` and `txq-stuck` do. The engine goes on
//! with the descriptors that it had fetched, whatever the registers say, until a function level
//! reset; only a bus master bit that is off holds it up.

use std::time::Duration;

use failstop::igb::descriptors::{RxDone, RxErrors, RxStatus, TxDone};

use super::registers::File;
use super::ring::Ring;
use crate::host::{Abort, Host};

/// Time between two accesses.
const PERIOD: Duration = Duration::from_millis(1);
/// Descriptors that an engine keeps on the chip.
const FETCHED: u32 = 32;
/// What is written into buffers: recognisable, and no plausible frame.
const LATE: [u8; 60] = [0xD5; 60];

/// A stuck queue.
#[derive(Debug)]
pub(super) struct Runaway {
    /// Which queue.
    pub(super) queue: usize,
    /// Whether it transmits.
    pub(super) transmit: bool,
    /// Descriptor and buffer addresses.
    fetched: Vec<(u64, u64)>,
    next: usize,
    due: Duration,
}

impl Runaway {
    /// Takes over a queue with the descriptors that it has on the chip.
    pub(super) fn start(queue: usize, transmit: bool, file: &File, host: &mut dyn Host) -> Self {
        let ring = if transmit {
            // Behind the head: write-backs leave the buffer's address in the first word.
            let ring = Ring::transmit(file, queue);
            let back = FETCHED.min(ring.len);
            Ring {
                head: ring.index(ring.len.saturating_sub(back)),
                ..ring
            }
        } else {
            Ring::receive(file, queue)
        };
        let count = if transmit { ring.len } else { ring.ready() }.min(FETCHED);
        let fetched = (0..count)
            .map(|n| ring.slot(n))
            .filter_map(|slot| Some((slot, host.dma_load(slot).ok()?)))
            .filter(|(_, buffer)| *buffer != 0)
            .collect();
        Self {
            queue,
            transmit,
            fetched,
            next: 0,
            due: host.now(),
        }
    }

    /// When it acts next.
    #[must_use]
    pub(super) const fn due(&self) -> Duration {
        self.due
    }

    /// Acts if it is time; true when it did.
    pub(super) fn act(&mut self, host: &mut dyn Host) -> bool {
        let now = host.now();
        let Some(&(slot, buffer)) = self.fetched.get(self.next) else {
            self.due = now + PERIOD;
            return false;
        };
        if now < self.due {
            return false;
        }
        self.due = now + PERIOD;
        self.next = (self.next + 1) % self.fetched.len();
        if self.transmit {
            let mut bytes = LATE;
            // An abort changes nothing for an engine that has lost its mind.
            let _: Result<(), Abort> = host.dma_read(buffer, &mut bytes);
            host.dma_store(slot.wrapping_add(8), TxDone::DONE.0);
        } else {
            let status = RxStatus::DD | RxStatus::EOP;
            let done = RxDone::new(status, RxErrors::empty(), LATE.len() as u16, 0);
            host.dma_write(buffer, &LATE);
            host.dma_store(slot, 0);
            host.dma_store(slot.wrapping_add(8), done.0);
        }
        true
    }
}
