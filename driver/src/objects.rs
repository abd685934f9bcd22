//! Verbs: protection domains, memory regions, completion queues, receive and send queues.
//!
//! An object keeps what it is made from: a queue its memory region, completion queue and
//! protection domain. Handles may be dropped in any order; a parent goes with its last child.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use failstop_dma::frame::Frame;
use failstop_dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop_dma::region::{BadFrameSize, Census, FrameRegion, Pool};
use failstop_dma::ring::{ExchangeRing, RingError};
use failstop_dma::space::{Mapping, NotReleased, SpaceError};
use failstop_pci::interrupts::Event;
use failstop_pci::window::{Doorbell, NoAnswer, Stopped};
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::Cause;
use failstop_queues::receive::Rx;
use failstop_queues::transmit::{REPORT, Tx};
use thiserror::Error;

use crate::device::{Claim, Core, Device, DeviceError, Entered, Way};
use crate::igb::format::Advanced;
use crate::owned::{Object, Owned, Refusal};
use crate::provider::{ProviderError, RingSpec};

/// An object that was not made. Nothing is left of it.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The device is broken, or cannot be made bus master.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Its memory could not be had or mapped.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Frames of that size cannot be cut.
    #[error("{device}: {source}")]
    Frame {
        /// The function's name.
        device: String,
        /// Why.
        source: BadFrameSize,
    },
    /// The frames are too small for what the device is set to receive.
    #[error(
        "{device}: frames of {frame} bytes are too small for a receive queue that takes frames of {longest}: register at least {least} bytes each, or open the device with a shorter longest frame"
    )]
    FrameSize {
        /// The function's name.
        device: String,
        /// Bytes of each frame.
        frame: u32,
        /// The least that it may be.
        least: u32,
        /// The longest frame that the device is set to receive, in bytes.
        longest: u32,
    },
    /// A ring of that size cannot be made.
    #[error("{device}: {source}")]
    Ring {
        /// The function's name.
        device: String,
        /// Why.
        source: RingError,
    },
    /// The device refused.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// The completion queue has no room for the completions of so many requests.
    #[error(
        "{device}: the completion queue has {free} of {capacity} entries left, the queue posts up to {needed}"
    )]
    CompletionQueueFull {
        /// The function's name.
        device: String,
        /// Entries not reserved.
        free: u32,
        /// Entries.
        capacity: u32,
        /// Entries needed.
        needed: u32,
    },
    /// Another object has that queue.
    #[error(
        "{device}: {kind} {number} of the device is in use: destroy it first, or take another number"
    )]
    QueueTaken {
        /// The function's name.
        device: String,
        /// Which kind of queue.
        kind: &'static str,
        /// Its number.
        number: u32,
    },
    /// The completion queue, memory region, pool or protection domain is of another device.
    #[error("{device}: the {what} belongs to another device, protection domain or memory region")]
    Foreign {
        /// The function's name.
        device: String,
        /// What.
        what: &'static str,
    },
}

/// Gives a mapping that the device never learnt of, or let go of, back; escalates if the unmap
/// goes wrong.
fn release(mapping: Mapping, proof: &ReleaseProof, core: &Core) {
    let mut mapping = mapping;
    // Another thread's unmap of the same range is impossible by construction; a transport that
    // says busy is asked a few times and then not believed.
    for _ in 0..100 {
        match mapping.release(proof) {
            Ok(()) => return,
            Err(NotReleased::Busy(again)) => mapping = again,
            Err(NotReleased::Scope(kept)) => {
                log::error!("a proof of another object was offered for {kept:?}");
                return;
            }
            Err(error @ NotReleased::Unmap { .. }) => {
                core.break_device(Cause::UnmapFailed {
                    what: error.to_string(),
                });
                return;
            }
        }
        std::thread::yield_now();
    }
    core.break_device(Cause::UnmapFailed {
        what: format!("{mapping:?} stays busy"),
    });
}

// ---- protection domain

#[derive(Debug)]
struct PdShared {
    id: ObjectId,
    core: Arc<Core>,
    _entered: Entered,
}

/// A protection domain: what may be used together.
#[derive(Debug)]
pub struct Pd(Arc<PdShared>);

impl Object for Pd {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(None),
            _ => Err(Refusal::Busy(
                "memory regions or queues use the protection domain",
            )),
        }
    }

    fn let_go(self, _: Option<ReleaseProof>) {}

    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }
}

impl Device {
    /// Makes a protection domain.
    ///
    /// # Errors
    ///
    /// [`CreateError::Device`] on a broken device.
    pub fn alloc_pd(&self) -> Result<Owned<Pd>, CreateError> {
        self.core.check()?;
        let core = self.core.clone();
        let id = core.new_object("PD");
        let pd = PdShared {
            id,
            _entered: core.enter(),
            core,
        };
        Ok(Owned::new(Pd(Arc::new(pd))))
    }
}

// ---- memory region

#[derive(Debug)]
struct MrShared {
    /// There until the last user goes.
    region: Option<FrameRegion>,
    pd: Arc<PdShared>,
}

impl Drop for MrShared {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else {
            return;
        };
        match region.unreferenced() {
            Some(proof) => release(region.into_mapping(), &proof.into(), &self.pd.core),
            // A ring that holds it was quarantined: so is the region, by its mapping's drop.
            None => drop(region),
        }
    }
}

/// A memory region: DMA memory cut into frames. On a NIC the device learns an address only from a
/// ring, so that the region is released once every ring that held one was proven stopped (R3.3).
#[derive(Debug)]
pub struct Mr(Arc<MrShared>);

impl Mr {
    /// Where its frames are.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.0.region.as_ref().map(FrameRegion::census)
    }
}

impl Object for Mr {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(None),
            _ => Err(Refusal::Busy("queues hold frames of the memory region")),
        }
    }

    fn let_go(self, _: Option<ReleaseProof>) {
        // Dropping the last reference releases the memory.
    }

    fn core(&self) -> &Arc<Core> {
        &self.0.pd.core
    }
}

impl Owned<Pd> {
    /// Registers new memory: `frames` buffers of `frame_size` bytes (64 to 65536, in steps of 64),
    /// as one mapping. The pool hands the buffers out.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    pub fn register(&self, frames: u32, frame_size: u32) -> Result<(Owned<Mr>, Pool), CreateError> {
        let core = &self.0.core;
        core.check()?;
        let id = core.new_object("MR");
        let frame = |source| CreateError::Frame {
            device: core.name(),
            source,
        };
        let bytes = FrameRegion::check(frame_size, frames).map_err(frame)?;
        let mapping = core.space().map(id, bytes)?;
        let (region, pool) =
            FrameRegion::new(mapping, frame_size, frames).map_err(|(_, source)| frame(source))?;
        let shared = MrShared {
            region: Some(region),
            pd: self.0.clone(),
        };
        Ok((Owned::new(Mr(Arc::new(shared))), pool))
    }
}

// ---- completion queue

#[derive(Debug)]
struct CqShared {
    core: Arc<Core>,
    capacity: u32,
    reserved: AtomicU32,
    _entered: Entered,
}

/// A completion queue: where requests end. Its capacity is reserved by the queues that complete
/// into it, so that it cannot overrun (C27). Families whose rings carry their own completions need
/// no memory for it.
#[derive(Debug)]
pub struct Cq(Arc<CqShared>);

impl Object for Cq {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(None),
            _ => Err(Refusal::Busy("queues complete into the completion queue")),
        }
    }

    fn let_go(self, _: Option<ReleaseProof>) {}

    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }
}

/// Reserved entries of a completion queue.
#[derive(Debug)]
struct Reservation {
    cq: Arc<CqShared>,
    entries: u32,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.cq.reserved.fetch_sub(self.entries, Ordering::AcqRel);
    }
}

impl CqShared {
    fn reserve(self: &Arc<Self>, entries: u32) -> Result<Reservation, CreateError> {
        let take = |now: u32| now.checked_add(entries).filter(|&sum| sum <= self.capacity);
        match self
            .reserved
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
        {
            Ok(_) => Ok(Reservation {
                cq: self.clone(),
                entries,
            }),
            Err(now) => Err(CreateError::CompletionQueueFull {
                device: self.core.name(),
                free: self.capacity - now,
                capacity: self.capacity,
                needed: entries,
            }),
        }
    }
}

impl Device {
    /// Makes a completion queue of `capacity` entries.
    ///
    /// # Errors
    ///
    /// [`CreateError::Device`] on a broken device.
    pub fn create_cq(&self, capacity: u32) -> Result<Owned<Cq>, CreateError> {
        self.core.check()?;
        let core = self.core.clone();
        let cq = CqShared {
            capacity,
            reserved: AtomicU32::new(0),
            _entered: core.enter(),
            core,
        };
        Ok(Owned::new(Cq(Arc::new(cq))))
    }
}

// ---- receive and send queues

/// What a queue of either kind keeps: its parents, and its place on the device.
#[derive(Debug)]
struct Place {
    id: ObjectId,
    number: u32,
    way: Way,
    core: Arc<Core>,
    _claim: Claim,
    _mr: Arc<MrShared>,
    _cq: Reservation,
}

impl Place {
    /// The stop sequence's answer, as a proof for this queue's memory.
    fn proof(&self, answer: Result<Stopped, NoAnswer>) -> Result<Option<ReleaseProof>, Refusal> {
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
    fn dismantle(&self, ring: ExchangeRing, proof: Option<&ReleaseProof>) {
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
    fn refuse_broken(&self) -> Result<(), Refusal> {
        match self.core.lifecycle().cause() {
            Some(cause) => Err(Refusal::Failed(cause.clone())),
            None => Ok(()),
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
struct Prepared {
    place: Place,
    ring: ExchangeRing,
    spec: RingSpec,
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
    fn prepare(self, way: Way, least: u32) -> Result<Prepared, CreateError> {
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

/// A receive queue.
#[derive(Debug)]
pub struct Rq {
    rx: Option<Rx<Advanced>>,
    sleep: Option<Sleep>,
    place: Place,
}

/// How a receive queue sleeps.
#[derive(Debug)]
struct Sleep {
    arm: Doorbell,
    value: u32,
    event: Arc<Event>,
}

/// A send queue.
#[derive(Debug)]
pub struct Sq {
    tx: Option<Tx<Advanced>>,
    place: Place,
}

impl Owned<Pd> {
    /// Makes a receive queue, enables it and posts its descriptors.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    pub fn create_rq(&self, init: QueueInit<'_>) -> Result<Owned<Rq>, CreateError> {
        let Prepared { place, ring, spec } = init.prepare(Way::Receive, RX_LEAST)?;
        let core = place.core.clone();
        let started = core.provider().start_rx(place.number, &spec);
        let bell = match started {
            Ok(bell) => bell,
            Err(error) => {
                place.abandon(ring);
                return Err(error.into());
            }
        };
        let rx = Rx::new(ring, spec.buffer, bell, core.lifecycle().clone());
        // One vector wakes one sleeper: with two, each would take what woke the other.
        let event = core.interrupts().vector(0).filter(|_| place.number == 0);
        let sleep = event.and_then(|event| {
            let (arm, value) = core.provider().route_rx_interrupt(place.number, 0)?;
            Some(Sleep {
                arm,
                value,
                event: event.clone(),
            })
        });
        let mut queue = Owned::new(Rq {
            rx: Some(rx),
            sleep,
            place,
        });
        // On failure the queue is destroyed as any other.
        core.master()?;
        if let Some(rx) = &mut queue.rx {
            rx.start();
        }
        Ok(queue)
    }

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
        let tx = Tx::new(ring, longest, bell, core.lifecycle().clone());
        let queue = Owned::new(Sq {
            tx: Some(tx),
            place,
        });
        core.master()?;
        Ok(queue)
    }
}

impl Place {
    /// A queue that did not start: stopped as one that did, so that its memory is released only on
    /// the same proof.
    fn abandon(&self, ring: ExchangeRing) {
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

impl Rq {
    /// Exchanges up to `frames.len()` empty frames for received ones; the first so many are full.
    #[inline]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        self.rx.as_mut().map_or(0, |rx| rx.burst(frames))
    }

    /// Whether a burst would find something.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.rx.as_ref().is_some_and(Rx::is_ready)
    }

    /// Sleeps until a frame is there, the device breaks, or `timeout` passes (never, without one).
    /// True when a burst would find something.
    ///
    /// Arms the interrupt, looks once more, then sleeps, so that a frame that came in between is
    /// not left lying (C26). False when time was up or a signal handler ran.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Unsupported`] where the device has no MSI-X vector, and for any receive
    /// queue but number 0, which has the only one; otherwise when the
    /// kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let sleep = self.sleep.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        // An end beyond the clock's range is none.
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            // What an earlier frame signalled says nothing of the next.
            let _ = sleep.event.take();
            sleep.arm.ring(sleep.value);
            if self.is_ready() || self.place.core.lifecycle().is_broken() {
                return Ok(self.is_ready());
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            // Woken with nothing there: that was the interrupt of a frame that was taken without a
            // sleep, on its way until now.
            if !sleep.event.wait(left)? || self.is_ready() {
                return Ok(self.is_ready());
            }
        }
    }

    /// Requests so far, and how they ended.
    #[must_use]
    pub fn completions(&self) -> Completions {
        self.rx.as_ref().map(Rx::completions).unwrap_or_default()
    }

    /// Bytes received, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rx.as_ref().map_or(0, Rx::bytes)
    }
}

impl Object for Rq {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        self.place.refuse_broken()?;
        let answer = self.place.core.provider().stop_rx(self.place.number);
        self.place.proof(answer)
    }

    fn let_go(mut self, proof: Option<ReleaseProof>) {
        if let Some(rx) = mem::take(&mut self.rx) {
            self.place.core.add_completions(rx.completions().flush());
            self.place.dismantle(rx.into_ring(), proof.as_ref());
        }
    }

    fn core(&self) -> &Arc<Core> {
        &self.place.core
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
        self.tx.as_ref().map(Tx::completions).unwrap_or_default()
    }

    /// Bytes posted, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tx.as_ref().map_or(0, Tx::bytes)
    }

    /// Bursts that ended at a frame that cannot be sent: too short, too long, or not of this
    /// queue's memory region.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.tx.as_ref().map_or(0, Tx::refused)
    }
}

impl Object for Sq {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        self.place.refuse_broken()?;
        let tail = self.tx.as_ref().map_or(0, Tx::tail);
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
