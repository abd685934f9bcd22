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
const LAST: u64 = REPORT as u64 - 1;

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
    bell: Doorbell,
    lifecycle: Arc<Lifecycle>,
    /// Descriptors that are known to be done, all told: modulo the ring's size, where the device is.
    head: u64,
    /// Descriptors that were posted, all told: modulo the ring's size, where the next one goes.
    tail: u64,
    /// How many bytes more than the shortest frame the longest has.
    span: u32,
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
        Self {
            ring,
            bell,
            lifecycle,
            head: 0,
            tail: 0,
            // A descriptor has 16 bits for it.
            span: longest.min(u16::MAX.into()).saturating_sub(F::SHORTEST),
            bytes: 0,
            refused: 0,
            ended: false,
            format: PhantomData,
        }
    }

    /// Exchanges frames to send for as many that were sent (or never used), from the front of
    /// `frames` and as far as there is room; returns how many. Nothing is posted on a broken device.
    ///
    /// A frame that is too short or too long for the device, or of another memory region than the
    /// ring's, ends the burst at that frame and is counted ([`Tx::refused`]).
    #[inline(always)]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        if self.lifecycle.is_broken() {
            self.reap();
            return 0;
        }
        let room = self.room(frames.len());
        let frames = frames.get_mut(..room).unwrap_or_default();
        let mut sent = self.post(frames);
        if sent < room {
            sent += self.post_rest(frames.get_mut(sent..).unwrap_or_default());
        }
        if sent > 0 {
            self.ring_tail();
        }
        sent
    }

    /// Posts up to where a report is due, and lets the last report. Stops at a frame that is refused.
    #[inline(always)]
    fn post(&mut self, frames: &mut [Frame]) -> usize {
        let due = REPORT as usize - self.tail as usize % REPORT as usize;
        let most = frames.len().min(due);
        let due = frames.get_mut(..most).unwrap_or_default();
        // A ring full of frames has fewer bytes than 32 bits can count.
        let mut bytes = 0u32;
        let span = self.span;
        let posted = self.ring.offer(self.tail as u32, due, |slot| {
            let len = slot.frame_len();
            // One compare for both ends: what is too short wraps round.
            if len.wrapping_sub(F::SHORTEST) > span {
                return false;
            }
            let Some(iova) = slot.exchange() else {
                return false;
            };
            slot.post(F::post(iova, len, false));
            bytes = bytes.wrapping_add(len);
            true
        });
        if let Some(last) = posted.checked_sub(1).and_then(|last| frames.get(last)) {
            self.bytes += u64::from(bytes);
            self.tail += posted as u64;
            // Its second word again, from what was posted, never read back: an exchange leaves the
            // caller's frame its length.
            let [_, high] = F::post(Iova::default(), last.len(), true);
            self.ring.set::<1>((self.tail - 1) as u32, high);
        }
        posted
    }

    /// A burst goes on after a report, or ends at a frame that is refused.
    #[inline(never)]
    fn post_rest(&mut self, frames: &mut [Frame]) -> usize {
        let mut posted = 0;
        while let Some(rest) = frames.get_mut(posted..).filter(|rest| !rest.is_empty()) {
            match self.post(rest) {
                0 => {
                    self.refused += 1;
                    break;
                }
                more => posted += more,
            }
        }
        posted
    }

    /// Rings for what is posted once more, after the device was reset under the queue.
    #[cold]
    pub fn ring_again(&self) {
        if !self.lifecycle.is_broken() {
            self.ring_tail();
        }
    }

    #[inline(always)]
    fn ring_tail(&self) {
        self.bell.ring(self.tail());
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
        (u64::from(self.ring.mask()) - (self.tail - self.head)) as usize
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
        if self.is_done(self.tail - 1) {
            self.head = self.tail;
            return;
        }
        loop {
            let report = self.head | LAST;
            if report >= self.tail || !self.is_done(report) {
                break;
            }
            self.head = report + 1;
        }
    }

    #[inline(always)]
    fn is_done(&self, at: u64) -> bool {
        F::is_done(self.ring.peek::<1>(at as u32))
    }

    /// Where the device's head register stands once it has taken every descriptor.
    #[inline(always)]
    #[must_use]
    pub fn tail(&self) -> u32 {
        self.tail as u32 & self.ring.mask()
    }

    /// The accounts, as of the last [`Tx::reap`] or burst.
    #[must_use]
    pub fn completions(&self) -> Completions {
        let completions = Completions {
            posted: self.tail,
            success: self.head,
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
