//! Send queues.

use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::proof::ReleaseProof;
use failstop_queues::completions::Completions;

use super::CreateError;
use super::pd::Pd;
use super::queue::{Place, Prepared, QueueInit, TX_LEAST};
use super::rings::{TxRing, layout};
use crate::life::{Life, Way};
use crate::owned::{Object, Owned, Refusal, Release};

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
        let life = place.life.clone();
        let longest = life.limits().longest_frame.min(ring.frame_size());
        let started = life.start_queue(Way::Send, place.number, &spec);
        let bell = match started {
            Ok(bell) => bell,
            Err(error) => {
                place.abandon(ring);
                return Err(error);
            }
        };
        let layout = layout(&life);
        let tx = TxRing::new(layout, ring, longest, bell, life.lifecycle().clone());
        let queue = Owned::new(Sq {
            tx: Some(tx),
            place,
        });
        life.master()?;
        Ok(queue)
    }
}

impl Sq {
    /// Exchanges frames to send for as many that were sent, from the front of `frames`; returns
    /// how many.
    #[inline(always)]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        match &mut self.tx {
            Some(tx) => tx.burst(frames),
            None => 0,
        }
    }

    /// Whether its requests were flushed: nothing comes of it any more.
    #[inline]
    pub(crate) fn is_ended(&self) -> bool {
        self.tx.as_ref().is_none_or(TxRing::is_ended)
    }

    /// Gives up ring, parents and number on a broken device, and stays as a queue that sends
    /// nothing.
    pub(crate) fn vacate(&mut self, proof: &Arc<ReleaseProof>) -> Completions {
        let ended = self.dismantle(&Release::On(proof.clone()));
        self.place.vacate();
        ended
    }

    fn dismantle(&mut self, release: &Release) -> Completions {
        if let Some(mut tx) = self.tx.take() {
            tx.reap();
            tx.end();
            let completions = tx.completions();
            self.place.dismantle(tx.into_ring(), release, completions)
        } else {
            Completions::default()
        }
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
    fn stop(&mut self) -> Result<Release, Refusal> {
        self.place.stop()
    }

    fn let_go(mut self, release: Release) {
        self.dismantle(&release);
    }

    fn life(&self) -> &Arc<Life> {
        &self.place.life
    }
}
