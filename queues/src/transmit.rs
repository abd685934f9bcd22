//! Sending: a burst exchanges frames to send for frames that were sent.

use std::marker::PhantomData;
use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::iova::Iova;
use failstop_dma::ring::ExchangeRing;
use failstop_pci::window::Doorbell;

use crate::completions::Completions;
use crate::format::TxFormat;
use crate::lifecycle::Lifecycle;

/// Every so many descriptors one asks for a report, and so does the last of each burst: a power
/// of two.
pub const REPORT: u32 = 32;

/// A transmit queue's ring and the accounts of it.
///
/// ```text
///           head                      tail             (modulo the ring's size)
///   ... idle | posted .. report .. posted | idle idle ...
///              the device's             ^ the driver posts here
/// ```
/// At most size - 1 descriptors are posted, because head = tail means an empty ring. Every slot
/// holds a frame, sent or never used where idle.
#[derive(Debug)]
pub struct Tx<F> {
    ring: ExchangeRing,
    head: u32,
    tail: u32,
    longest: u32,
    bell: Doorbell,
    lifecycle: Arc<Lifecycle>,
    posted: u64,
    bytes: u64,
    refused: u64,
    /// Flushed: no slot is looked at again.
    ended: bool,
    format: PhantomData<F>,
}

impl<F: TxFormat> Tx<F> {
    /// A queue over `ring`, whose device takes frames of at most `longest` bytes and learns of new
    /// descriptors by `bell`. `ring` has more than [`REPORT`] entries.
    #[must_use]
    pub fn new(
        ring: ExchangeRing,
        longest: u32,
        bell: Doorbell,
        lifecycle: Arc<Lifecycle>,
    ) -> Self {
        let (posted, bytes, refused) = (0, 0, 0);
        let (head, tail) = (0, 0);
        Self {
            ring,
            head,
            tail,
            longest,
            bell,
            lifecycle,
            posted,
            bytes,
            refused,
            ended: false,
            format: PhantomData,
        }
    }

    /// Exchanges frames to send for as many that were sent (or never used), from the front of
    /// `frames` and as far as there is room; returns how many. Nothing is posted on a broken device.
    ///
    /// A frame that is too short or too long for the device, or of another memory region than the
    /// ring's, ends the burst at that frame and is counted ([`Tx::refused`]).
    #[inline(never)]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        if self.lifecycle.is_broken() {
            self.reap();
            return 0;
        }
        let room = self.room(frames.len());
        let mut cursor = self.ring.cursor(self.tail);
        let span = self.longest.wrapping_sub(F::SHORTEST);
        let mut bytes = 0;
        let mut refused = false;
        let mut rest = frames.get_mut(..room).unwrap_or_default();
        while !rest.is_empty() && !refused {
            // Up to where a report is due, so that no frame has to ask.
            let due = REPORT - cursor.at() % REPORT;
            let (now, later) = rest.split_at_mut(rest.len().min(due as usize));
            rest = later;
            let first = cursor.at();
            let mut last = 0;
            for frame in now {
                if frame.len().wrapping_sub(F::SHORTEST) > span {
                    refused = true;
                    break;
                }
                let Some((iova, len)) = cursor.exchange(frame) else {
                    refused = true;
                    break;
                };
                let [low, high] = F::post(iova, len, false);
                cursor.store::<0>(low);
                cursor.store::<1>(high);
                cursor.step();
                bytes += u64::from(len);
                last = len;
            }
            if cursor.at() != first {
                // The last reports: its second word again, from what was posted, never read back.
                let [_, high] = F::post(Iova::default(), last, true);
                cursor.store_before::<1>(high);
            }
        }
        let at = cursor.at();
        let sent = at.wrapping_sub(self.tail);
        self.tail = at;
        self.posted += u64::from(sent);
        self.bytes += bytes;
        self.refused += u64::from(refused);
        if sent > 0 {
            self.bell.ring(at & self.ring.mask());
        }
        sent as usize
    }

    /// Rings for what is posted once more, after the device was reset under the queue.
    #[cold]
    pub fn ring_again(&self) {
        if !self.lifecycle.is_broken() {
            self.bell.ring(self.tail & self.ring.mask());
        }
    }

    /// Descriptors that can be posted now, at most `wanted`.
    #[inline(always)]
    fn room(&mut self, wanted: usize) -> usize {
        if self.idle() < wanted + REPORT as usize {
            self.look();
        }
        self.idle().min(wanted)
    }

    #[inline(always)]
    fn idle(&self) -> usize {
        (self.ring.mask() - self.tail.wrapping_sub(self.head)) as usize
    }

    /// Looks which frames were sent. Bursts do so themselves when they need the room. On a broken
    /// device what was not sent is flushed once the verdict is in, after one last look (R7).
    #[inline(never)]
    pub fn reap(&mut self) {
        // Asked before the look, so that the look is later than the verdict (C31).
        let last = self.lifecycle.is_broken() && self.lifecycle.verdict().is_some();
        if !self.ended {
            self.look();
        }
        self.ended |= last;
    }

    #[inline(always)]
    fn look(&mut self) {
        if self.tail == self.head {
            return;
        }
        // The last of a burst reports: where it is done, everything is.
        if F::is_done(self.ring.peek::<1>(self.tail.wrapping_sub(1))) {
            self.head = self.tail;
            return;
        }
        while self.tail.wrapping_sub(self.head) >= REPORT {
            let report = self.head | (REPORT - 1);
            if report.wrapping_sub(self.head) >= self.tail.wrapping_sub(self.head)
                || !F::is_done(self.ring.peek::<1>(report))
            {
                break;
            }
            self.head = report.wrapping_add(1);
        }
    }

    /// Where the device's head register stands once it has taken every descriptor.
    #[must_use]
    pub fn tail(&self) -> u32 {
        self.tail & self.ring.mask()
    }

    /// The accounts, as of the last [`Tx::reap`] or burst.
    #[must_use]
    pub fn completions(&self) -> Completions {
        let outstanding = u64::from(self.tail.wrapping_sub(self.head));
        let completions = Completions {
            posted: self.posted,
            success: self.posted - outstanding,
            error: 0,
            ..Completions::default()
        };
        if self.ended {
            completions.flush()
        } else {
            completions
        }
    }

    /// Flushes what is outstanding: the queue is proven stopped, or goes to quarantine. No slot is
    /// looked at again.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Whether it was flushed.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Bytes posted, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bursts that ended at a frame that the device or the ring cannot take.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The ring, to be taken apart with a proof.
    #[must_use = "a ring that is dropped is quarantined"]
    pub fn into_ring(self) -> ExchangeRing {
        self.ring
    }
}
