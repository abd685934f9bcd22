//! What receive and send queues have in common.

use std::sync::Arc;

use failstop_dma::proof::ObjectId;
use failstop_dma::region::Pool;
use failstop_dma::ring::{ExchangeRing, NotMade};
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::Cause;
use failstop_queues::transmit::REPORT;

use super::CreateError;
use super::cq::{Cq, Reservation};
use super::mr::{Mr, MrShared};
use super::pd::Pd;
use crate::life::{Claim, Life, Way};
use crate::owned::{Object, Owned, Refusal, Release};
use crate::provider::{ProviderError, RingSpec};

/// What a queue of either kind keeps: its parents, and its place on the device.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) id: ObjectId,
    pub(super) number: u32,
    pub(super) way: Way,
    pub(super) life: Arc<Life>,
    /// Until the queue was carried away.
    held: Option<(Claim, Arc<MrShared>, Reservation)>,
}

impl Place {
    /// The family's stop sequence, whose end is the ground for this queue's memory.
    pub(super) fn stop(&self) -> Result<Release, Refusal> {
        let stopped = self.life.stop_queue(self.way, self.number);
        let stopped = stopped.map_err(|why| Refusal::of(&self.id, why))?;
        let queue = self.way.queue(self.number);
        // A provider that took another queue's reading for this one's has not stopped this one.
        if !stopped.is_of(queue) {
            return Err(Refusal::Failed(Cause::StopFailed {
                what: format!("{}: {stopped}, which says nothing of {queue}", self.id),
            }));
        }
        Release::acknowledged(self.id, stopped)
    }

    /// Takes a ring apart on the proof, and its frames go home. Without one, or where it does not
    /// cover them, they stay in quarantine, and the accounts say so (R7). Returns what `completions`
    /// are then.
    pub(super) fn dismantle(
        &self,
        ring: ExchangeRing,
        release: &Release,
        completions: Completions,
    ) -> Completions {
        let completions = match release.proof().map(|proof| (proof, ring.dismantle(proof))) {
            Some((proof, Ok((frames, mapping)))) => {
                drop(frames);
                super::release(mapping, proof, &self.life);
                completions
            }
            Some((_, Err(ring))) => {
                log::warn!("not proven, kept: {ring:?}");
                completions.quarantine()
            }
            None => completions.quarantine(),
        };
        self.life.add_completions(completions);
        completions
    }

    /// A queue that did not start: stopped as one that did, so that its memory is released only on
    /// the same proof.
    pub(super) fn abandon(self, ring: ExchangeRing) {
        drop(Owned::new(Stillborn { ring, place: self }));
    }

    /// Lets go of the queue's parents and number: it was carried away.
    pub(super) fn vacate(&mut self) {
        self.held = None;
    }
}

/// A queue that did not start, on its way out like any other.
#[derive(Debug)]
struct Stillborn {
    ring: ExchangeRing,
    place: Place,
}

impl Object for Stillborn {
    fn stop(&mut self) -> Result<Release, Refusal> {
        self.place.stop()
    }

    fn let_go(self, release: Release) {
        self.place
            .dismantle(self.ring, &release, Completions::default());
    }

    fn life(&self) -> &Arc<Life> {
        &self.place.life
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
pub(crate) fn check_entries(life: &Life, entries: u32, least: u32) -> Result<(), CreateError> {
    let most = life.limits().ring_entries;
    if (least..=most).contains(&entries) && entries.is_power_of_two() {
        return Ok(());
    }
    Err(CreateError::Provider(ProviderError::OutOfRange {
        device: life.name(),
        what: "the ring's number of entries, a power of two,",
        value: entries.into(),
        least: least.into(),
        most: most.into(),
    }))
}

impl QueueInit<'_> {
    pub(super) fn prepare(self, way: Way, least: u32) -> Result<Prepared, CreateError> {
        let life = self.pd.0.life.clone();
        life.check()?;
        let limits = *life.limits();
        let range = |what, value: u32, least: u32, most: u32| ProviderError::OutOfRange {
            device: life.name(),
            what,
            value: value.into(),
            least: least.into(),
            most: most.into(),
        };
        if self.number >= limits.queues {
            return Err(range("the queue's number", self.number, 0, limits.queues - 1).into());
        }
        check_entries(&life, self.entries, least)?;
        if !Arc::ptr_eq(&self.cq.0.life, &life) {
            return Err(CreateError::Foreign {
                device: life.name(),
                what: "completion queue",
            });
        }
        if self.mr.0.pd.id != self.pd.0.id {
            return Err(CreateError::Foreign {
                device: life.name(),
                what: "memory region",
            });
        }
        let region = self.mr.0.region.as_ref();
        if !region.is_some_and(|region| region.feeds(self.pool)) {
            return Err(CreateError::Foreign {
                device: life.name(),
                what: "pool",
            });
        }
        let buffer = self.pool.frame_size() / limits.buffer_step * limits.buffer_step;
        if way == Way::Receive && buffer < life.longest_frame() {
            // Such a frame would be spread over several descriptors.
            return Err(CreateError::FrameSize {
                device: life.name(),
                frame: self.pool.frame_size(),
                least: life.longest_frame().next_multiple_of(limits.buffer_step),
                longest: life.longest_frame(),
            });
        }
        let kind = match way {
            Way::Receive => "RQ",
            Way::Send => "SQ",
        };
        let claim = life
            .claim(way, self.number)
            .ok_or_else(|| CreateError::QueueTaken {
                device: life.name(),
                kind,
                number: self.number,
            })?;
        let refused = |source| CreateError::Ring {
            device: life.name(),
            source,
        };
        ExchangeRing::check(self.pool, self.entries).map_err(refused)?;
        // Before anything is mapped.
        let cq = self.cq.0.reserve(self.entries)?;
        let id = life.new_object(kind);
        let ring = ExchangeRing::create(life.space(), id, self.pool, self.entries);
        let ring = ring.map_err(|error| match error {
            NotMade::Ring(source) => refused(source),
            NotMade::Space(source) => {
                life.note_not_mapped(&source);
                source.into()
            }
        })?;
        let spec = RingSpec {
            iova: ring.iova(),
            entries: self.entries,
            buffer,
        };
        let place = Place {
            id,
            number: self.number,
            way,
            held: Some((claim, self.mr.0.clone(), cq)),
            life,
        };
        Ok(Prepared { place, ring, spec })
    }
}
