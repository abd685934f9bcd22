//! Descriptors and completions: whatever a device may write into its rings, between bursts.
//!
//! An input is a byte that says which direction, then commands of a byte each with what they take.

use std::sync::Arc;

use failstop::e1000e::format::{Extended, Legacy};
use failstop::igb::format::Advanced;
use failstop_dma::frame::Frame;
use failstop_dma::memory::Memory;
use failstop_dma::proof::ObjectId;
use failstop_dma::region::{FrameRegion, Pool};
use failstop_dma::ring::ExchangeRing;
use failstop_dma::space::AddressSpace;
use failstop_pci::clock::ManualClock;
use failstop_pci::id::Generation;
use failstop_pci::register::Reg;
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::transport::Transport;
use failstop_pci::window::Window;
use failstop_queues::completions::Completions;
use failstop_queues::format::{RxFormat, TxFormat};
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};
use failstop_queues::receive::Rx;
use failstop_queues::transmit::Tx;
use vm_memory::Bytes as _;

use crate::bytes::Bytes;

const TAIL: Reg = Reg::at(0x18);
const ENTRIES: u32 = 16;
const BUFFER: u32 = 2048;
const FRAMES: u32 = 64;

/// Rings of the igb family; the depth is how many requests ended in a completion of their own.
pub(crate) fn igb(data: &[u8]) -> u64 {
    rings::<Advanced, Advanced>(data)
}

/// Rings of the e1000e family.
pub(crate) fn e1000e(data: &[u8]) -> u64 {
    rings::<Extended, Legacy>(data)
}

fn rings<R: RxFormat, T: TxFormat>(data: &[u8]) -> u64 {
    let mut bytes = Bytes::new(data);
    let receives = bytes.u8() & 1 == 0;
    let Some((mut bench, ring)) = Bench::new() else {
        return 0;
    };
    let Some(bell) = bench.window.doorbell(TAIL) else {
        return 0;
    };
    if receives {
        let mut rx = Rx::<R>::new(ring, BUFFER, bell, bench.lifecycle.clone());
        rx.start();
        bench.drive(&mut bytes, &mut rx)
    } else {
        let mut tx = Tx::<T>::new(ring, BUFFER, bell, bench.lifecycle.clone());
        bench.drive(&mut bytes, &mut tx)
    }
}

/// What both directions have in common.
trait Queue {
    fn burst(&mut self, frames: &mut [Frame]) -> usize;
    fn reap(&mut self);
    fn ring_again(&self);
    fn completions(&self) -> Completions;
}

impl<F: RxFormat> Queue for Rx<F> {
    fn burst(&mut self, frames: &mut [Frame]) -> usize {
        let received = Self::burst(self, frames);
        for frame in &frames[..received] {
            assert!((F::SHORTEST..=BUFFER).contains(&frame.len()), "{frame:?}");
        }
        received
    }

    fn reap(&mut self) {
        let _ = self.is_ready();
    }

    fn ring_again(&self) {
        Self::ring_again(self);
    }

    fn completions(&self) -> Completions {
        Self::completions(self)
    }
}

impl<F: TxFormat> Queue for Tx<F> {
    fn burst(&mut self, frames: &mut [Frame]) -> usize {
        Self::burst(self, frames)
    }

    fn reap(&mut self) {
        Self::reap(self);
    }

    fn ring_again(&self) {
        Self::ring_again(self);
    }

    fn completions(&self) -> Completions {
        Self::completions(self)
    }
}

/// A ring whose device is the input.
struct Bench {
    window: Arc<Window>,
    lifecycle: Arc<Lifecycle>,
    ring: Arc<Memory>,
    pool: Pool,
    /// Keeps the frames.
    _region: FrameRegion,
    space: Arc<AddressSpace>,
}

impl Drop for Bench {
    /// Takes everything out of the function's reach, so that nothing is kept.
    fn drop(&mut self) {
        self.space.close();
        let swept = self.space.unmap_all(&|| true);
        assert!(swept.is_complete(), "{swept:?}");
        assert!(self.space.settle(None).quarantined.is_empty());
    }
}

impl Bench {
    fn new() -> Option<(Self, ExchangeRing)> {
        let function = Arc::new(FakeFunction::new(limits_39_bits()).ok()?.with_decoding());
        let clock = Arc::new(ManualClock::default());
        let space = AddressSpace::new(function.clone(), u64::MAX, clock).ok()?;
        let object = |serial, kind| ObjectId {
            device: function.id(),
            generation: Generation::FIRST,
            serial,
            kind,
        };
        let bytes = FRAMES as usize * BUFFER as usize;
        let memory = space.map(object(1, "MR"), bytes).ok()?;
        let (region, mut pool) = FrameRegion::new(memory, BUFFER, FRAMES).ok()?;
        let mapping = space
            .map(object(2, "RQ"), ExchangeRing::bytes(ENTRIES))
            .ok()?;
        let ring = mapping.memory().clone();
        let exchange = ExchangeRing::new(mapping, &mut pool, ENTRIES).ok()?;
        let window = Window::open(function, Generation::FIRST, 0, 0x1000).ok()?;
        let lifecycle = Arc::new(Lifecycle::default());
        let bench = Self {
            window,
            lifecycle,
            ring,
            pool,
            _region: region,
            space,
        };
        Some((bench, exchange))
    }

    fn write(&self, index: u8, word: usize, value: u64) {
        let at = usize::from(index) % ENTRIES as usize * 16 + word * 8;
        // Inside the ring's memory.
        let _ = self.ring.view().write_obj(value, at);
    }

    /// Follows the commands; how many requests ended by themselves.
    fn drive(&mut self, bytes: &mut Bytes<'_>, queue: &mut impl Queue) -> u64 {
        let mut flushes = false;
        while !bytes.is_empty() {
            match bytes.u8() % 10 {
                0..=3 => {
                    let (index, word) = (bytes.u8(), bytes.u64());
                    self.write(index, 1, word);
                }
                4 => {
                    let (index, word) = (bytes.u8(), bytes.u64());
                    self.write(index, 0, word);
                }
                5 | 6 => {
                    let (count, len) = (bytes.u8() % 32, bytes.u16());
                    let mut frames = self.pool.take_many(usize::from(count)).unwrap_or_default();
                    for frame in &mut frames {
                        // A length that no frame has is refused.
                        let _ = frame.set_len(len.into());
                    }
                    let moved = queue.burst(&mut frames);
                    assert!(moved <= frames.len());
                    // Dropped frames go home, and from there to the pool.
                }
                7 => queue.reap(),
                8 => queue.ring_again(),
                _ => match self.lifecycle.is_broken() {
                    false => drop(self.lifecycle.mark_broken(Cause::User)),
                    true if !flushes => {
                        flushes = true;
                        self.lifecycle.finish(Verdict::default());
                    }
                    true => {}
                },
            }
            self.check(queue.completions(), flushes);
        }
        let own = queue.completions();
        if !self.lifecycle.is_broken() {
            self.lifecycle.mark_broken(Cause::User);
        }
        if !flushes {
            self.lifecycle.finish(Verdict::default());
        }
        // One last sweep, then the flush (R7).
        for _ in 0..=ENTRIES {
            let mut frames = self.pool.take_many(8).unwrap_or_default();
            queue.burst(&mut frames);
            queue.reap();
        }
        let last = queue.completions();
        assert_eq!(last.outstanding(), 0, "{last:?}");
        self.check(last, true);
        own.success + own.error
    }

    /// Frames are conserved, and no request ends twice (C13, R7).
    fn check(&self, now: Completions, may_flush: bool) {
        let ended = now.success + now.error + now.flushed;
        assert!(ended <= now.posted, "{now:?}");
        assert!(may_flush || now.flushed == 0, "{now:?}");
        assert!(now.quarantined <= now.flushed, "{now:?}");
        // Nobody holds one between two commands: what is not in the ring can be taken.
        assert_eq!(self.pool.available(), (FRAMES - ENTRIES) as usize);
    }
}
