//! Rings of whatever format the device's family has.
//!
//! A ring is generic over its format, so that the loops of a burst are compiled for it; which format
//! it is, is one comparison per burst.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use failstop_dma::frame::Frame;
use failstop_dma::ring::ExchangeRing;
use failstop_pci::window::Doorbell;
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::Lifecycle;
use failstop_queues::receive::Rx;
use failstop_queues::transmit::Tx;

use crate::e1000e::format::{Extended, Legacy};
use crate::igb::format::Advanced;
use crate::life::Life;
use crate::provider::Formats;

/// What a provider says of its rings: [`Provider::formats`](crate::provider::Provider::formats) and
/// [`Provider::restarts`](crate::provider::Provider::restarts).
pub(super) type Layout = (Formats, Option<Arc<AtomicU32>>);

/// What the device's rings are.
pub(super) fn layout(life: &Life) -> Layout {
    let provider = life.provider();
    (provider.formats(), provider.restarts())
}

/// Whether the device was reset under a queue since that last rang (`Provider::restarts`).
#[derive(Debug)]
pub(super) struct Restarts {
    count: Arc<AtomicU32>,
    seen: Cell<u32>,
}

impl Restarts {
    fn new(count: Option<Arc<AtomicU32>>) -> Self {
        let count = count.unwrap_or_default();
        let seen = Cell::new(count.load(Ordering::Acquire));
        Self { count, seen }
    }

    /// True until [`Self::take`] after each such reset. Three loads and a comparison.
    #[inline(always)]
    fn is_due(&self) -> bool {
        self.seen.get() != self.count.load(Ordering::Acquire)
    }

    /// True once after each such reset.
    #[inline(always)]
    fn take(&self) -> bool {
        let now = self.count.load(Ordering::Acquire);
        self.seen.replace(now) != now
    }
}

/// A receive ring.
#[derive(Debug)]
pub(super) enum RxRing {
    Advanced(Rx<Advanced>),
    Extended(Rx<Extended>, Restarts),
}

/// Does the same with a receive ring of either format.
macro_rules! each_rx {
    ($ring:expr, $rx:ident => $act:expr) => {
        match $ring {
            RxRing::Advanced($rx) => $act,
            RxRing::Extended($rx, _) => $act,
        }
    };
}

impl RxRing {
    /// As [`Rx::new`].
    pub(super) fn new(
        (formats, restarts): Layout,
        ring: ExchangeRing,
        buffer: u32,
        tail: Doorbell,
        lifecycle: Arc<Lifecycle>,
    ) -> Self {
        match formats {
            Formats::Advanced => Self::Advanced(Rx::new(ring, buffer, tail, lifecycle)),
            Formats::Extended => Self::Extended(
                Rx::new(ring, buffer, tail, lifecycle),
                Restarts::new(restarts),
            ),
        }
    }

    /// As [`Rx::start`].
    pub(super) fn start(&mut self) {
        each_rx!(self, rx => rx.start());
    }

    /// As [`Rx::is_idle`], with no doorbell lost.
    #[inline(always)]
    pub(super) fn is_idle(&self) -> bool {
        match self {
            Self::Advanced(rx) => rx.is_idle(),
            Self::Extended(rx, restarts) => rx.is_idle() && !restarts.is_due(),
        }
    }

    /// As [`Rx::burst`].
    #[inline(always)]
    pub(super) fn burst(&mut self, frames: &mut [Frame]) -> usize {
        self.catch_up();
        each_rx!(self, rx => rx.burst(frames))
    }

    /// Rings again where the device was reset meanwhile.
    #[inline(always)]
    fn catch_up(&self) {
        if let Self::Extended(rx, restarts) = self
            && restarts.take()
        {
            rx.ring_again();
        }
    }

    /// As [`Rx::is_ready`].
    pub(super) fn is_ready(&self) -> bool {
        self.catch_up();
        each_rx!(self, rx => rx.is_ready())
    }

    /// As [`Rx::completions`].
    pub(super) fn completions(&self) -> Completions {
        each_rx!(self, rx => rx.completions())
    }

    /// As [`Rx::bytes`].
    pub(super) fn bytes(&self) -> u64 {
        each_rx!(self, rx => rx.bytes())
    }

    /// As [`Rx::end`].
    pub(super) fn end(&mut self) {
        each_rx!(self, rx => rx.end());
    }

    /// As [`Rx::is_ended`].
    #[inline]
    pub(super) fn is_ended(&self) -> bool {
        each_rx!(self, rx => rx.is_ended())
    }

    /// As [`Rx::into_ring`].
    pub(super) fn into_ring(self) -> ExchangeRing {
        each_rx!(self, rx => rx.into_ring())
    }
}

/// A transmit ring.
#[derive(Debug)]
pub(super) enum TxRing {
    Advanced(Tx<Advanced>),
    Legacy(Tx<Legacy>, Restarts),
}

/// Does the same with a transmit ring of either format.
macro_rules! each_tx {
    ($ring:expr, $tx:ident => $act:expr) => {
        match $ring {
            TxRing::Advanced($tx) => $act,
            TxRing::Legacy($tx, _) => $act,
        }
    };
}

impl TxRing {
    /// As [`Tx::new`].
    pub(super) fn new(
        (formats, restarts): Layout,
        ring: ExchangeRing,
        longest: u32,
        bell: Doorbell,
        lifecycle: Arc<Lifecycle>,
    ) -> Self {
        match formats {
            Formats::Advanced => Self::Advanced(Tx::new(ring, longest, bell, lifecycle)),
            Formats::Extended => Self::Legacy(
                Tx::new(ring, longest, bell, lifecycle),
                Restarts::new(restarts),
            ),
        }
    }

    /// As [`Tx::burst`].
    #[inline(always)]
    pub(super) fn burst(&mut self, frames: &mut [Frame]) -> usize {
        self.catch_up();
        each_tx!(self, tx => tx.burst(frames))
    }

    /// Rings again where the device was reset meanwhile.
    #[inline(always)]
    fn catch_up(&self) {
        if let Self::Legacy(tx, restarts) = self
            && restarts.take()
        {
            tx.ring_again();
        }
    }

    /// As [`Tx::reap`].
    pub(super) fn reap(&mut self) {
        self.catch_up();
        each_tx!(self, tx => tx.reap());
    }

    /// As [`Tx::completions`].
    pub(super) fn completions(&self) -> Completions {
        each_tx!(self, tx => tx.completions())
    }

    /// As [`Tx::bytes`].
    pub(super) fn bytes(&self) -> u64 {
        each_tx!(self, tx => tx.bytes())
    }

    /// As [`Tx::refused`].
    pub(super) fn refused(&self) -> u64 {
        each_tx!(self, tx => tx.refused())
    }

    /// As [`Tx::end`].
    pub(super) fn end(&mut self) {
        each_tx!(self, tx => tx.end());
    }

    /// As [`Tx::is_ended`].
    #[inline]
    pub(super) fn is_ended(&self) -> bool {
        each_tx!(self, tx => tx.is_ended())
    }

    /// As [`Tx::into_ring`].
    pub(super) fn into_ring(self) -> ExchangeRing {
        each_tx!(self, tx => tx.into_ring())
    }
}
