//! What receive and send queues have in common.

use std::sync::Arc;

use failstop_dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop_dma::region::Pool;
use failstop_dma::ring::ExchangeRing;
use failstop_pci::window::{NoAnswer, Stopped};
use failstop_queues::lifecycle::Cause;
use failstop_queues::transmit::REPORT;

use super::cq::{Cq, Reservation};
use super::mr::{Mr, MrShared};
use super::pd::Pd;
use super::{CreateError, release};
use crate::device::{Claim, Core, Way};
use crate::owned::{Owned, Refusal};
use crate::provider::{ProviderError, RingSpec};

/// What a queue of either kind keeps: its parents, and its place on the device.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) id: ObjectId,
    pub(super) number: u32,
    pub(super) way: Way,
    pub(super) core: Arc<Core>,
    _claim: Claim,
    _mr: Arc<MrShared>,
    _cq: Reservation,
}

impl Place {
    /// The stop sequence's answer, as a proof for this queue's memory.
    pub(super) fn proof(
        &self,
        answer: Result<Stopped, NoAnswer>,
    ) -> Result<Option<ReleaseProof>, Refusal> {
        let failed = |what: String| Refusal::Failed(Cause::StopFailed { what });
        match answer {
            Ok(stopped) => Acknowledged::by_register(self.id, stopped)
                .map(|acknowledged| Some(acknowledged.into()))
                .ok_or_else(|| failed(format!("{}: the reading is of another device", self.id))),
            Err(gone @ NoAnswer::Gone { .. }) => Err(Refusal::Failed(Cause::Gone {
                what: format!("{}: {gone}", self.id),
            })),
            Err(stuck) => Err(failed(format!("{}: {stuck}", self.id))),
        }
    }

    /// Takes a ring apart on the proof; without one it is quarantined, and its frames with it.
    pub(super) fn dismantle(&self, ring: ExchangeRing, proof: Option<&ReleaseProof>) {
        let Some(proof) = proof else {
            return drop(ring);
        };
        match ring.dismantle(proof) {
            Ok((frames, mapping)) => {
                drop(frames);
                release(mapping, proof, &self.core);
            }
            Err(ring) => log::error!("a proof of another object was offered for {ring:?}"),
        }
    }

    /// Whether the queue can still be asked: a broken device is not (R6).
    pub(super) fn refuse_broken(&self) -> Result<(), Refusal> {
        match self.core.lifecycle().cause() {
            Some(cause) => Err(Refusal::Failed(cause.clone())),
            None => Ok(()),
        }
    }

    /// A queue that did not start: stopped as one that did, so that its memory is released only on
    /// the same proof.
    pub(super) fn abandon(&self, ring: ExchangeRing) {
        let answer = match self.way {
            Way::Receive => self.core.provider().stop_rx(self.number),
            Way::Send => self.core.provider().stop_tx(self.number, 0),
        };
        match self.proof(answer) {
            Ok(proof) => self.dismantle(ring, proof.as_ref()),
            Err(Refusal::Failed(cause)) => {
                self.core.break_device(cause);
                self.dismantle(ring, None);
            }
            Err(Refusal::Busy(_)) => self.dismantle(ring, None),
        }
    }
}

/// A queue's parents and size.
#[derive(Debug)]
pub struct QueueInit<'a> {
    /// The protection domain.
    pub pd: &'a Owned<Pd>,
    /// Where requests complete.
    pub cq: &'a Owned<Cq>,
    /// Whose frames it exchanges.
    pub mr: &'a Owned<Mr>,
    /// Where its first frames come from: a pool of `mr`.
    pub pool: &'a mut Pool,
    /// Descriptors: a power of two.
    pub entries: u32,
    /// Which of the device's queues, from 0.
    pub number: u32,
}

/// A queue's ring, made but unknown to the device.
pub(super) struct Prepared {
    pub(super) place: Place,
    pub(super) ring: ExchangeRing,
    pub(super) spec: RingSpec,
}

/// The fewest entries of a receive ring: RDLEN counts in steps of 128 bytes.
pub(crate) const RX_LEAST: u32 = 8;
/// The fewest entries of a send ring: room for one report beside another.
pub(crate) const TX_LEAST: u32 = 2 * REPORT;

/// Whether the device takes a ring of so many entries.
pub(crate) fn check_entries(core: &Core, entries: u32, least: u32) -> Result<(), CreateError> {
    let most = core.limits().ring_entries;
    if (least..=most).contains(&entries) && entries.is_power_of_two() {
        return Ok(());
    }
    Err(CreateError::Provider(ProviderError::OutOfRange {
        device: core.name(),
        what: "the ring's number of entries, a power of two,",
        value: entries.into(),
        least: least.into(),
        most: most.into(),
    }))
}

impl QueueInit<'_> {
    pub(super) fn prepare(self, way: Way, least: u32) -> Result<Prepared, CreateError> {
        let core = self.pd.0.core.clone();
        core.check()?;
        let limits = *core.limits();
        let range = |what, value: u32, least: u32, most: u32| ProviderError::OutOfRange {
            device: core.name(),
            what,
            value: value.into(),
            least: least.into(),
            most: most.into(),
        };
        if self.number >= limits.queues {
            return Err(range("the queue's number", self.number, 0, limits.queues - 1).into());
        }
        check_entries(&core, self.entries, least)?;
        if !Arc::ptr_eq(&self.cq.0.core, &core) {
            return Err(CreateError::Foreign {
                device: core.name(),
                what: "completion queue",
            });
        }
        if self.mr.0.pd.id != self.pd.0.id {
            return Err(CreateError::Foreign {
                device: core.name(),
                what: "memory region",
            });
        }
        let region = self.mr.0.region.as_ref();
        if !region.is_some_and(|region| region.feeds(self.pool)) {
            return Err(CreateError::Foreign {
                device: core.name(),
                what: "pool",
            });
        }
        let buffer = self.pool.frame_size() / limits.buffer_step * limits.buffer_step;
        if way == Way::Receive && buffer < core.longest_frame() {
            // Such a frame would be spread over several descriptors.
            return Err(CreateError::FrameSize {
                device: core.name(),
                frame: self.pool.frame_size(),
                least: core.longest_frame().next_multiple_of(limits.buffer_step),
                longest: core.longest_frame(),
            });
        }
        let kind = match way {
            Way::Receive => "RQ",
            Way::Send => "SQ",
        };
        let claim = core
            .claim(way, self.number)
            .ok_or_else(|| CreateError::QueueTaken {
                device: core.name(),
                kind,
                number: self.number,
            })?;
        let refused = |source| CreateError::Ring {
            device: core.name(),
            source,
        };
        ExchangeRing::check(self.pool, self.entries).map_err(refused)?;
        let cq = self.cq.0.reserve(self.entries)?;
        let id = core.new_object(kind);
        let mapping = core.space().map(id, ExchangeRing::bytes(self.entries))?;
        let ring = ExchangeRing::new(mapping, self.pool, self.entries)
            .map_err(|(_, source)| refused(source))?;
        let spec = RingSpec {
            iova: ring.iova(),
            entries: self.entries,
            buffer,
        };
        let place = Place {
            id,
            number: self.number,
            way,
            _claim: claim,
            _mr: self.mr.0.clone(),
            _cq: cq,
            core,
        };
        Ok(Prepared { place, ring, spec })
    }
}
