//! Send queues.

use std::mem;
use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::proof::ReleaseProof;
use failstop_queues::completions::Completions;

use super::CreateError;
use super::pd::Pd;
use super::queue::{Place, Prepared, QueueInit, TX_LEAST};
use super::rings::TxRing;
use crate::device::{Core, Way};
use crate::owned::{Object, Owned, Refusal};

/// A send queue.
#[derive(Debug)]
pub struct Sq {
    tx: Option<TxRing>,
    place: Place,
}

impl Owned<Pd> {
    /// Makes a send queue and enables it.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    pub fn create_sq(&self, init: QueueInit<'_>) -> Result<Owned<Sq>, CreateError> {
        let Prepared { place, ring, spec } = init.prepare(Way::Send, TX_LEAST)?;
        let core = place.core.clone();
        let longest = core.limits().longest_frame.min(ring.frame_size());
        let started = core.provider().start_tx(place.number, &spec);
        let bell = match started {
            Ok(bell) => bell,
            Err(error) => {
                place.abandon(ring);
                return Err(error.into());
            }
        };
        let formats = core.provider().formats();
        let tx = TxRing::new(formats, ring, longest, bell, core.lifecycle().clone());
        let queue = Owned::new(Sq {
            tx: Some(tx),
            place,
        });
        core.master()?;
        Ok(queue)
    }
}

impl Sq {
    /// Exchanges frames to send for as many that were sent, from the front of `frames`; returns
    /// how many.
    #[inline]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        self.tx.as_mut().map_or(0, |tx| tx.burst(frames))
    }

    /// Looks which frames were sent.
    pub fn reap(&mut self) {
        if let Some(tx) = &mut self.tx {
            tx.reap();
        }
    }

    /// Requests so far, and how they ended, as of the last burst or [`Sq::reap`].
    #[must_use]
    pub fn completions(&self) -> Completions {
        self.tx
            .as_ref()
            .map(TxRing::completions)
            .unwrap_or_default()
    }

    /// Bytes posted, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tx.as_ref().map_or(0, TxRing::bytes)
    }

    /// Bursts that ended at a frame that cannot be sent: too short, too long, or not of this
    /// queue's memory region.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.tx.as_ref().map_or(0, TxRing::refused)
    }
}

impl Object for Sq {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        self.place.refuse_broken()?;
        let tail = self.tx.as_ref().map_or(0, TxRing::tail);
        let answer = self.place.core.provider().stop_tx(self.place.number, tail);
        self.place.proof(answer)
    }

    fn let_go(mut self, proof: Option<ReleaseProof>) {
        if let Some(mut tx) = mem::take(&mut self.tx) {
            tx.reap();
            self.place.core.add_completions(tx.completions().flush());
            self.place.dismantle(tx.into_ring(), proof.as_ref());
        }
    }

    fn core(&self) -> &Arc<Core> {
        &self.place.core
    }
}
