//! Receive queues.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop_dma::frame::Frame;
use failstop_dma::proof::ReleaseProof;
use failstop_pci::interrupts::Event;
use failstop_pci::window::Doorbell;
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::Cause;

use super::CreateError;
use super::pd::Pd;
use super::queue::{Place, Prepared, QueueInit, RX_LEAST};
use super::rings::{RxRing, layout};
use crate::life::{Life, Way};
use crate::owned::{Object, Owned, Refusal, Release};

/// A receive queue.
#[derive(Debug)]
pub struct Rq {
    rx: Option<RxRing>,
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

impl Owned<Pd> {
    /// Makes a receive queue, enables it and posts its descriptors.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    pub fn create_rq(&self, init: QueueInit<'_>) -> Result<Owned<Rq>, CreateError> {
        let Prepared { place, ring, spec } = init.prepare(Way::Receive, RX_LEAST)?;
        let life = place.life.clone();
        let started = life.start_queue(Way::Receive, place.number, &spec);
        let bell = match started {
            Ok(bell) => bell,
            Err(error) => {
                place.abandon(ring);
                return Err(error);
            }
        };
        let layout = layout(&life);
        let rx = RxRing::new(layout, ring, spec.buffer, bell, life.lifecycle().clone());
        // A vector for each queue: with one for two sleepers, each would take what woke the other.
        let vector = place.number;
        let event = life.interrupts().vector(vector);
        let sleep = event.and_then(|event| {
            let (arm, value) = life.provider().route_rx_interrupt(place.number, vector)?;
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
        life.master()?;
        if let Some(rx) = &mut queue.rx {
            rx.start();
        }
        life.began_to_receive();
        life.spread_to(queue.place.number, true);
        Ok(queue)
    }
}

impl Rq {
    /// Exchanges up to `frames.len()` empty frames for received ones; the first so many are full.
    #[inline]
    pub fn burst(&mut self, frames: &mut [Frame]) -> usize {
        if self.is_idle() {
            return 0;
        }
        self.receive(frames)
    }

    /// Whether a burst would find nothing, and nothing else is to be done.
    #[inline(always)]
    pub(crate) fn is_idle(&self) -> bool {
        match &self.rx {
            Some(rx) => rx.is_idle(),
            None => false,
        }
    }

    /// A burst that does not look first whether the queue is idle.
    #[inline(always)]
    pub(crate) fn receive(&mut self, frames: &mut [Frame]) -> usize {
        match &mut self.rx {
            Some(rx) => rx.burst(frames),
            None => 0,
        }
    }

    /// Whether its requests were flushed: nothing comes of it any more.
    #[inline]
    pub(crate) fn is_ended(&self) -> bool {
        self.rx.as_ref().is_none_or(RxRing::is_ended)
    }

    /// Gives up ring, parents and number on a broken device, and stays as a queue that receives
    /// nothing.
    pub(crate) fn vacate(&mut self, proof: &Arc<ReleaseProof>) -> Completions {
        let ended = self.dismantle(&Release::On(proof.clone()));
        self.place.vacate();
        ended
    }

    fn dismantle(&mut self, release: &Release) -> Completions {
        if let Some(mut rx) = self.rx.take() {
            rx.end();
            let completions = rx.completions();
            self.place.dismantle(rx.into_ring(), release, completions)
        } else {
            Completions::default()
        }
    }

    /// Whether a burst would find something.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.rx.as_ref().is_some_and(RxRing::is_ready)
    }

    /// Sleeps until a frame is there, the device breaks, or `timeout` passes (never, without one).
    /// True when a burst would find something.
    ///
    /// Arms the interrupt, looks once more, then sleeps, so that a frame that came in between is
    /// not left lying (C26). False when time was up or a signal handler ran, and in a child of fork.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Unsupported`] where the device has no MSI-X vector for the queue: each has
    /// its own, as far as the function has any (the 82576 has 10), and without RSS
    /// ([`Config::rss`](crate::provider::Config)) only queue 0 has one; otherwise when the kernel
    /// refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let sleep = self.sleep.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        if !self.place.life.is_ours() {
            // The events are the parent's, who would miss what is taken here.
            return Ok(false);
        }
        // An end beyond the clock's range is none.
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            // The event is that of the next life's queue too: what it signals is not for this one.
            if self.place.life.lifecycle().is_broken() {
                return Ok(self.is_ready());
            }
            // What an earlier frame signalled says nothing of the next.
            let _ = sleep.event.take();
            sleep.arm.ring(sleep.value);
            if sleep.arm.is_lost() {
                // Nobody would wake us. Without effect on a device that is broken already.
                self.place.life.break_device(Cause::Gone {
                    what: format!("{}: its interrupt cannot be armed", self.place.id),
                });
            }
            if self.is_ready() || self.place.life.lifecycle().is_broken() {
                return Ok(self.is_ready());
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let woken = sleep.event.wait(left)?;
            // Woken with nothing there: that was the interrupt of a frame that was taken without a
            // sleep, on its way until now. A device that interrupts all the time ends no later.
            let over = left.is_some_and(|left| left.is_zero());
            if !woken || over || self.is_ready() {
                return Ok(self.is_ready());
            }
        }
    }

    /// Requests so far, and how they ended.
    #[must_use]
    pub fn completions(&self) -> Completions {
        self.rx
            .as_ref()
            .map(RxRing::completions)
            .unwrap_or_default()
    }

    /// Bytes received, without frame check sequences.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rx.as_ref().map_or(0, RxRing::bytes)
    }
}

impl Object for Rq {
    fn stop(&mut self) -> Result<Release, Refusal> {
        let (life, number) = (&self.place.life, self.place.number);
        // First: what still came for it would be lost without a word.
        life.spread_to(number, false);
        let stopped = self.place.stop();
        if let Err(Refusal::Busy(_)) = stopped {
            life.spread_to(number, true);
        }
        stopped
    }

    fn let_go(mut self, release: Release) {
        self.dismantle(&release);
    }

    fn life(&self) -> &Arc<Life> {
        &self.place.life
    }
}
