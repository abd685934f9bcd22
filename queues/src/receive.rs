//! Receiving: a burst exchanges the caller's empty frames for full ones.

use std::marker::PhantomData;
use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::ring::{ExchangeRing, Refusal};
use failstop_pci::window::Doorbell;

use crate::completions::Completions;
use crate::format::{NOT_CLEAN, RxFormat};
use crate::lifecycle::{Cause, Lifecycle};

/// A receive queue's ring and the accounts of it.
///
/// ```text
///           next-1   next                              (modulo the ring's size)
///   ... posted | gap | done done done | posted posted ...
///              ^tail   ^ the driver looks here
/// ```
/// The device owns what lies after `next` and before the gap; one slot is always the gap, because
/// head = tail means an empty ring. Every slot, the gap included, holds a frame.
#[derive(Debug)]
pub struct Rx<F> {
    /// Watches the second word of the descriptor at `next`.
    ring: ExchangeRing,
    tail: Doorbell,
    lifecycle: Arc<Lifecycle>,
    /// Descriptors that completed, all told: where the next one is, modulo the ring's size.
    next: u64,
    /// Descriptors that the device was given, all told: as of the last time that the tail was rung.
    posted: u64,
    /// Of those that completed.
    errors: u64,
    bytes: u64,
    started: bool,
    /// Flushed: no slot is looked at again.
    ended: bool,
    format: PhantomData<F>,
}

impl<F: RxFormat> Rx<F> {
    /// A queue over `ring`, whose device takes at most `buffer` bytes into each frame and learns of
    /// new descriptors by `tail`. Writes every descriptor; nothing is posted yet.
    #[must_use]
    pub fn new(
        mut ring: ExchangeRing,
        buffer: u32,
        tail: Doorbell,
        lifecycle: Arc<Lifecycle>,
    ) -> Self {
        ring.set_longest(buffer);
        ring.write_all(F::post);
        ring.watch::<1>(0);
        Self {
            ring,
            tail,
            lifecycle,
            next: 0,
            posted: 0,
            errors: 0,
            bytes: 0,
            started: false,
            ended: false,
            format: PhantomData,
        }
    }

    /// Posts every descriptor but the gap. Once, after the queue was enabled.
    pub fn start(&mut self) {
        if !self.started {
            self.started = true;
            self.post();
        }
    }

    /// Descriptors that the device has.
    #[inline(always)]
    fn outstanding(&self) -> u64 {
        self.posted - self.next
    }

    /// Rings for what is posted once more, after the device was reset under the queue.
    #[cold]
    pub fn ring_again(&self) {
        if self.started && !self.lifecycle.is_broken() {
            self.ring_tail();
        }
    }

    /// The tail is the gap, behind the last descriptor that is the device's.
    #[inline(always)]
    fn ring_tail(&self) {
        self.tail.ring(self.posted as u32 & self.ring.mask());
    }

    /// Whether a burst would find nothing on a device that is not broken.
    #[inline(always)]
    #[must_use]
    pub fn is_idle(&self) -> bool {
        if F::is_done(self.ring.watched()) {
            return false;
        }
        !self.lifecycle.is_broken()
    }

    /// Exchanges up to `frames.len()` empty frames for received ones, and returns how many: the
    /// first so many of `frames` are full, in the order of arrival.
    ///
    /// A frame of another memory region than the ring's ends the burst at that frame. On a broken
    /// device what the hardware had written is delivered; what was not is flushed once the verdict
    /// is in, by the first burst that then finds nothing (R7).
    #[inline(always)]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        let received = self.exchange(frames);
        if received == 0 && self.lifecycle.is_broken() {
            return self.sweep(frames);
        }
        received
    }

    /// A burst that found nothing on a broken device.
    #[cold]
    #[inline(never)]
    fn sweep(&mut self, frames: &mut [Frame]) -> usize {
        // No flush before the verdict (C31).
        if self.lifecycle.verdict().is_none() {
            return 0;
        }
        // Looked at once more after it: what the hardware wrote meanwhile is delivered.
        let received = self.exchange(frames);
        self.ended |= received == 0 && !self.is_ready();
        received
    }

    #[inline(always)]
    fn exchange(&mut self, frames: &mut [Frame]) -> usize {
        if self.ended {
            return 0;
        }
        let first = self.next;
        // A ring's gap, and on a broken device every slot behind the tail, is not the device's.
        let most = frames.len().min(self.outstanding() as usize);
        let frames = frames.get_mut(..most).unwrap_or_default();
        let mut received = self.take(frames);
        if received < most && F::is_done(self.ring.watched()) {
            received += self.take_rest(frames.get_mut(received..).unwrap_or_default());
        }
        // The caller reads what the done bits vouch for.
        self.ring.acquire();
        // The gap, which the device was not given, lies behind the last that it was: a device that
        // runs on beyond the tail is seen before the gap is posted, and the done bit with it.
        if F::is_done(self.ring.peek::<1>(self.posted as u32)) {
            self.beyond();
        }
        if self.next != first {
            self.post();
        }
        received
    }

    /// Takes what is there and clean, as far as the ring's end.
    #[inline(always)]
    fn take(&mut self, frames: &mut [Frame]) -> usize {
        // A ring full of frames has fewer bytes than 32 bits can count.
        let mut bytes = 0u32;
        let taken = self.ring.offer(self.next as u32, frames, |slot| {
            let word = slot.load::<1>();
            let len = F::clean_len(word);
            let Ok(iova) = slot.receive(len, F::SHORTEST) else {
                return false;
            };
            slot.post(F::post(iova));
            bytes = bytes.wrapping_add(len as u32);
            true
        });
        self.bytes += u64::from(bytes);
        self.advance(taken);
        taken
    }

    #[inline(always)]
    fn advance(&mut self, taken: usize) {
        self.next += taken as u64;
        self.ring.watch::<1>(self.next as u32);
    }

    /// A burst goes on at the ring's start, or at what it does not take in its stride.
    #[cold]
    #[inline(never)]
    fn take_rest(&mut self, frames: &mut [Frame]) -> usize {
        let taken = self.take(frames);
        taken + self.take_odd(frames.get_mut(taken..).unwrap_or_default())
    }

    /// Gives the device every descriptor that it does not have but one, the gap; nothing on a broken
    /// one.
    #[inline(always)]
    fn post(&mut self) {
        if self.lifecycle.is_broken() {
            return;
        }
        self.posted = self.next + u64::from(self.ring.mask());
        self.ring_tail();
    }

    /// What the burst does not take in its stride, one descriptor at a time: frames in error,
    /// values that cannot be, and the caller's frames of another region. The descriptor is read
    /// anew, and what it says now is what counts. Rings nothing.
    fn take_odd(&mut self, frames: &mut [Frame]) -> usize {
        let mut received = 0;
        // A device that reports nothing but errors does not keep us here [R8].
        for _ in 0..self.outstanding() {
            let word = self.ring.watched();
            let rest = frames.get_mut(received..).unwrap_or_default();
            if !F::is_done(word) || rest.is_empty() {
                break;
            }
            let at = self.next as u32;
            let len = F::clean_len(word);
            if len < NOT_CLEAN {
                let mut refusal = None;
                let rest = rest.get_mut(..1).unwrap_or_default();
                received += self.ring.offer(at, rest, |slot| {
                    refusal = slot
                        .receive(len, F::SHORTEST)
                        .map(|iova| slot.post(F::post(iova)))
                        .err();
                    refusal.is_none()
                });
                match refusal {
                    None => self.bytes += len,
                    Some(Refusal::Foreign) => break,
                    Some(Refusal::Length) => {
                        self.impossible(
                            "a received length beyond the buffer, or shorter than a frame",
                        );
                        break;
                    }
                }
            } else if F::is_error(word) && word != u64::MAX {
                // One frame's error is that frame's [R9]; the slot's is offered again.
                self.ring.write(at, F::post);
                self.errors += 1;
            } else {
                self.impossible("a receive descriptor that is done and reports neither a whole frame nor an error");
                break;
            }
            self.advance(1);
        }
        received
    }

    /// The gap is done. It lies behind all that is outstanding: what the hardware wrote there is
    /// delivered first (R7).
    #[cold]
    #[inline(never)]
    fn beyond(&mut self) {
        self.lifecycle.mark_broken(Cause::ImpossibleValue {
            what: "a receive descriptor that was never posted is done",
        });
        self.ended |= self.outstanding() == 0 && self.lifecycle.verdict().is_some();
    }

    #[cold]
    #[inline(never)]
    fn impossible(&mut self, what: &'static str) {
        self.lifecycle.mark_broken(Cause::ImpossibleValue { what });
        // Behind it nothing can be believed: after the verdict it is where the sweep ends.
        self.ended |= self.lifecycle.verdict().is_some();
    }

    /// Whether a burst would find something.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.ended && F::is_done(self.ring.watched())
    }

    /// The accounts: each descriptor that is done was posted, and its slot was posted again, unless
    /// the device was broken then.
    #[must_use]
    pub fn completions(&self) -> Completions {
        let completions = Completions {
            posted: self.posted,
            success: self.next - self.errors,
            error: self.errors,
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

    /// Bytes received, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The ring, to be taken apart with a proof.
    #[must_use = "a ring that is dropped is quarantined"]
    pub fn into_ring(self) -> ExchangeRing {
        self.ring
    }
}
