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
    success: u64,
    errors: u64,
    bytes: u64,
    started: bool,
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
            success: 0,
            errors: 0,
            bytes: 0,
            started: false,
            format: PhantomData,
        }
    }

    /// Posts every descriptor but the gap. Once, after the queue was enabled.
    pub fn start(&mut self) {
        if !self.started {
            self.started = true;
            self.tail.ring(self.ring.mask());
        }
    }

    /// Exchanges up to `frames.len()` empty frames for received ones, and returns how many: the
    /// first so many of `frames` are full, in the order of arrival.
    ///
    /// A frame of another memory region than the ring's ends the burst at that frame.
    #[inline]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        // Peeked first, so that an empty poll has no prologue.
        if F::is_done(self.ring.peek::<1>(self.next)) {
            self.exchange(frames)
        } else {
            0
        }
    }

    #[inline(never)]
    fn exchange(&mut self, frames: &mut [Frame]) -> usize {
        let mut left = self.ring.mask();
        let mut cursor = self.ring.cursor(self.next);
        let limit = cursor.limit(self.buffer);
        let mut received = 0;
        let mut bytes = 0;
        let mut wrong = None;
        while let Some(frame) = frames.get_mut(received) {
            let word = cursor.load::<1>();
            if !F::is_done(word) {
                break;
            }
            cursor.acquire();
            if !F::is_clean(word) {
                if word == u64::MAX || !F::is_error(word) {
                    wrong = Some(
                        "a receive descriptor that is done and reports neither a whole frame nor an error",
                    );
                    break;
                }
                // The frame in the slot is offered again.
                let [low, high] = F::post(cursor.slot_iova());
                cursor.store::<0>(low);
                cursor.store::<1>(high);
                cursor.step();
                self.errors += 1;
                // A device that reports nothing but errors does not keep us here [R8].
                left = left.saturating_sub(1);
                if left == 0 {
                    break;
                }
                continue;
            }
            let len = F::len(word);
            match cursor.receive(frame, len, limit) {
                Ok(iova) => {
                    let [low, high] = F::post(iova);
                    cursor.store::<0>(low);
                    cursor.store::<1>(high);
                    cursor.step();
                    received += 1;
                    bytes += u64::from(len);
                }
                Err(Refusal::Length) => {
                    wrong = Some("a received length beyond the buffer");
                    break;
                }
                Err(Refusal::Foreign) => break,
            }
        }
        let at = cursor.at();
        if at != self.next && !self.lifecycle.is_broken() {
            self.tail.ring(at.wrapping_sub(1) & self.ring.mask());
        }
        self.next = at;
        self.success += received as u64;
        self.bytes += bytes;
        if let Some(what) = wrong {
            self.impossible(what);
        }
        received
    }

    #[cold]
    #[inline(never)]
    fn impossible(&self, what: &'static str) {
        self.lifecycle.mark_broken(Cause::ImpossibleValue { what });
    }

    /// Whether a burst would find something.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        F::is_done(self.ring.peek::<1>(self.next))
    }

    /// The accounts: each done descriptor was posted once, and its slot was posted again.
    #[must_use]
    pub fn completions(&self) -> Completions {
        let (success, error) = (self.success, self.errors);
        let first = if self.started {
            u64::from(self.ring.mask())
        } else {
            0
        };
        Completions {
            posted: first + success + error,
            success,
            error,
            flushed: 0,
        }
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
