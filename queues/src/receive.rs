//! Receiving: a burst exchanges the caller's empty frames for full ones.

use std::marker::PhantomData;
use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::ring::{ExchangeRing, Refusal};
use failstop_pci::window::Doorbell;

use crate::completions::Completions;
use crate::format::RxFormat;
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
    ring: ExchangeRing,
    next: u32,
    buffer: u32,
    tail: Doorbell,
    lifecycle: Arc<Lifecycle>,
    /// Descriptors that the device was given, all told: as of the last time that the tail was rung.
    posted: u64,
    success: u64,
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
        ring.write_all(F::post);
        Self {
            ring,
            next: 0,
            buffer,
            tail,
            lifecycle,
            posted: 0,
            success: 0,
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
            self.posted = self.ring.mask().into();
            self.tail.ring(self.ring.mask());
        }
    }

    /// Descriptors that the device has.
    #[inline(always)]
    fn outstanding(&self) -> u64 {
        self.posted - self.success - self.errors
    }

    /// Rings for what is posted once more, after the device was reset under the queue.
    #[cold]
    pub fn ring_again(&self) {
        if self.started && !self.lifecycle.is_broken() {
            self.tail.ring(self.next.wrapping_sub(1) & self.ring.mask());
        }
    }

    /// Exchanges up to `frames.len()` empty frames for received ones, and returns how many: the
    /// first so many of `frames` are full, in the order of arrival.
    ///
    /// A frame of another memory region than the ring's ends the burst at that frame. On a broken
    /// device what the hardware had written is delivered; what was not is flushed once the verdict
    /// is in, by the first burst that then finds nothing (R7).
    #[inline(always)]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        // Peeked first, so that an empty poll has no prologue.
        if F::is_done(self.ring.peek::<1>(self.next)) {
            self.exchange(frames)
        } else if self.lifecycle.is_broken() {
            self.sweep(frames)
        } else {
            0
        }
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

    #[inline(never)]
    fn exchange(&mut self, frames: &mut [Frame]) -> usize {
        if self.ended {
            return 0;
        }
        let first = self.next;
        // A ring's gap, and on a broken device every slot behind the tail, is not the device's.
        let outstanding = self.outstanding() as usize;
        let most = frames.len().min(outstanding);
        let frames = frames.get_mut(..most).unwrap_or_default();
        let mut cursor = self.ring.cursor(first).lengths(F::SHORTEST, self.buffer);
        let mut bytes = 0;
        // Each check leaves by a jump of its own: joined, they cost two instructions more per packet.
        let odd = 'burst: {
            for frame in frames.iter_mut() {
                let word = cursor.load::<1>();
                // What is clean is done: whether it is the one or the other matters at the end only.
                if !F::is_clean(word) {
                    break 'burst F::is_done(word);
                }
                cursor.acquire();
                let len = F::len(word);
                let Ok(iova) = cursor.receive(frame, len) else {
                    break 'burst true;
                };
                let [low, high] = F::post(iova);
                cursor.store::<0>(low);
                cursor.store::<1>(high);
                cursor.step();
                bytes += u64::from(len);
            }
            false
        };
        self.next = cursor.at();
        self.bytes += bytes;
        let mut received = self.next.wrapping_sub(first) as usize;
        self.success += received as u64;
        if odd {
            received += self.odd(frames.get_mut(received..).unwrap_or_default());
        }
        // The gap, which the device was not given, lies behind the last that it was: a device that
        // runs on beyond the tail is seen before the gap is posted, and the done bit with it.
        if F::is_done(self.ring.peek::<1>(first.wrapping_add(outstanding as u32))) {
            self.impossible("a receive descriptor that was never posted is done");
        }
        if self.next != first {
            self.post(first);
        }
        received
    }

    /// Gives the device the descriptors from `first` to `next`; nothing on a broken one.
    #[inline(always)]
    fn post(&mut self, first: u32) {
        if self.lifecycle.is_broken() {
            return;
        }
        self.posted += u64::from(self.next.wrapping_sub(first));
        self.tail.ring(self.next.wrapping_sub(1) & self.ring.mask());
    }

    /// What the burst does not take in its stride, one descriptor at a time: frames in error,
    /// values that cannot be, and the caller's frames of another region. The descriptor is read
    /// anew, and what it says now is what counts. Rings nothing.
    #[cold]
    #[inline(never)]
    fn odd(&mut self, frames: &mut [Frame]) -> usize {
        let mut received = 0;
        // A device that reports nothing but errors does not keep us here [R8].
        for _ in 0..self.outstanding() {
            let Some(frame) = frames.get_mut(received) else {
                break;
            };
            let mut cursor = self
                .ring
                .cursor(self.next)
                .lengths(F::SHORTEST, self.buffer);
            let word = cursor.load::<1>();
            if !F::is_done(word) {
                break;
            }
            cursor.acquire();
            let offered = if F::is_clean(word) {
                match cursor.receive(frame, F::len(word)) {
                    Ok(iova) => iova,
                    Err(Refusal::Foreign) => break,
                    Err(Refusal::Length) => {
                        self.impossible(
                            "a received length beyond the buffer, or shorter than a frame",
                        );
                        break;
                    }
                }
            } else if F::is_error(word) && word != u64::MAX {
                // One frame's error is that frame's [R9]; the slot's is offered again.
                cursor.slot_iova()
            } else {
                self.impossible("a receive descriptor that is done and reports neither a whole frame nor an error");
                break;
            };
            let [low, high] = F::post(offered);
            cursor.store::<0>(low);
            cursor.store::<1>(high);
            self.next = self.next.wrapping_add(1);
            if F::is_clean(word) {
                received += 1;
                self.success += 1;
                self.bytes += u64::from(F::len(word));
            } else {
                self.errors += 1;
            }
        }
        received
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
        !self.ended && F::is_done(self.ring.peek::<1>(self.next))
    }

    /// The accounts: each descriptor that is done was posted, and its slot was posted again, unless
    /// the device was broken then.
    #[must_use]
    pub fn completions(&self) -> Completions {
        let (success, error) = (self.success, self.errors);
        let completions = Completions {
            posted: self.posted,
            success,
            error,
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
