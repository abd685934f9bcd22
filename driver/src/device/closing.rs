//! The end of a device: by its owner, or on his behalf.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use failstop_dma::ledger::{Line, Totals};
use failstop_dma::space::Settled;
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::{Cause, Verdict};

use super::Inner;
use crate::flight::Control;
use crate::ladder::{Hand, RevocationReport};
use crate::life::{Life, Way};

/// How often a close asks a device again that says that a queue is busy.
const PASSES: u32 = 100;
/// How long it waits in between.
const BETWEEN_PASSES: Duration = Duration::from_millis(1);

/// What a closed device left behind.
#[derive(Clone, PartialEq, Debug)]
pub struct CloseReport {
    /// The ledger's sums.
    pub totals: Totals,
    /// What is not released: quarantined, with the reason.
    pub left: Vec<Line>,
    /// Every request that was posted, and how it ended.
    pub completions: Completions,
    /// Why the device was broken, if it was.
    pub broken: Option<Cause>,
    /// What its ladder did, if it had to.
    pub revocation: Option<RevocationReport>,
}

impl Inner {
    /// Ends the present life, and with it the device; `cause` is what objects that are still held
    /// are told.
    pub(crate) fn close(&self, cause: Cause) -> CloseReport {
        if !self.process.is_this() {
            return CloseReport::of_a_child();
        }
        self.give_up(cause.clone());
        let _changing = self.changing();
        end_life(&self.life(), cause);
        self.close_report()
    }

    /// No life begins any more.
    pub(crate) fn give_up(&self, cause: Cause) {
        // The first reason stands.
        let _ = self.given_up.set(cause);
    }

    /// Whether it was closed or asked back.
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.get().is_some()
    }

    /// Releases what is in quarantine if the server, which this process started, has ended; how many
    /// bytes that were.
    pub(crate) fn reclaim(&self) -> u64 {
        // First: a lock may be held by a thread that only the parent has.
        if !self.process.is_this() {
            return 0;
        }
        let (life, function) = (self.life(), &self.function);
        // The ladder settles what it finds by itself.
        if life.lifecycle().verdict().is_none() {
            return 0;
        }
        let ended = function.transport.peer_ended();
        let settled = ended.and_then(|ended| function.space.settle_ended(&ended));
        settled.map_or(0, |settled| {
            out_of_reach(&life, settled, "its server has ended")
        })
    }

    /// What is left of a device whose life ended.
    pub(crate) fn close_report(&self) -> CloseReport {
        if !self.process.is_this() {
            return CloseReport::of_a_child();
        }
        let _released = self.reclaim();
        let life = self.life();
        let revocation = life.wait_report();
        let ledger = self.function.space.ledger();
        CloseReport {
            totals: ledger.totals(),
            left: ledger.lines(),
            completions: self.tally.completions(),
            broken: life.lifecycle().cause(),
            revocation: revocation.map(|report| (*report).clone()),
        }
    }
}

/// What was kept is released, since the device is out of reach of it, for that reason; how many bytes
/// that were. A verdict that said otherwise is improved.
pub(crate) fn out_of_reach(life: &Life, settled: Settled, why: &str) -> u64 {
    if settled.released_bytes > 0 {
        log::warn!(
            "{}: {why}: {} bytes that were kept are released",
            life.name(),
            settled.released_bytes
        );
    }
    if let Some(verdict) = life.lifecycle().verdict() {
        life.lifecycle().improve(Verdict {
            proof: settled.proof,
            revoked: settled.quarantined.is_empty(),
            restartable: verdict.restartable,
        });
    }
    settled.released_bytes
}

/// Ends a life, whoever holds objects of it; what they are told is `cause`.
pub(crate) fn end_life(life: &Arc<Life>, cause: Cause) {
    if life.objects() > 0 {
        stop_queues(life);
        life.break_device(cause);
    } else {
        close_idle_in_time(life);
    }
    let _ = life.verdict();
    life.join_ladder();
    life.note(Control::State, format_args!("closed"));
}

/// Stops every queue that an object has, again while the device says that it is busy: in passes,
/// like a kernel file close. What does not stop is the ladder's.
fn stop_queues(life: &Arc<Life>) {
    let mut left: Vec<(Way, u32)> = [Way::Receive, Way::Send]
        .into_iter()
        .flat_map(|way| life.claims(way).map(move |number| (way, number)))
        .collect();
    for _ in 0..PASSES {
        if life.lifecycle().is_broken() {
            return;
        }
        left.retain(|&(way, number)| life.stop_queue(way, number).is_err_and(|why| why.is_busy()));
        if left.is_empty() {
            return;
        }
        life.function().clock.sleep(BETWEEN_PASSES);
    }
}

/// As [`close_idle`], with a deadline: what it asks of the function is left behind past it, and the
/// ladder ends a device that was not let go of by then.
fn close_idle_in_time(life: &Arc<Life>) {
    let function = life.function();
    let deadline = function.deadlines.close + function.deadlines.reset;
    let closing = life.clone();
    let closed = match Hand::new("close") {
        Ok(mut hand) => hand.call(&*function.clock, deadline, move || close_idle(&closing)),
        Err(error) => {
            // Without a deadline rather than not at all.
            log::warn!("no thread to close a device with: {error}");
            close_idle(life);
            return;
        }
    };
    if closed.is_err() {
        log::warn!("{}: not closed within {deadline:?}", life.name());
        // Without effect on one whose bus mastering is off already: only its reset is late.
        life.break_device(Cause::TimedOut {
            what: "the close of the device".into(),
        });
    }
}

/// Nothing uses it: no ladder is needed, unless it does not let go of bus mastering.
fn close_idle(life: &Arc<Life>) {
    if life.lifecycle().is_broken() {
        return;
    }
    life.provider().quiesce();
    // Whoever turns bus mastering on does so under the gate, on a life that is not retired.
    let retired = life.function().gate.shut(|| {
        if let Err(error) = life.function().master_off() {
            // Not clean, whatever the ledger says: the report names it.
            life.break_device(Cause::StillMaster {
                what: error.to_string(),
            });
            return false;
        }
        if life.objects() > 0 {
            // Made since it was looked at: no idle close any more.
            life.break_device(Cause::Closed);
            return false;
        }
        life.lifecycle().retire()
    });
    if !retired {
        return;
    }
    if let Err(error) = life.function().transport.reset() {
        log::warn!("{error} at close");
    }
    if let Err(error) = life.window().detach() {
        log::error!("a window could not be detached at close: {error}");
    }
}

impl CloseReport {
    /// A child of fork closes nothing, and nothing is its own.
    fn of_a_child() -> Self {
        Self {
            totals: Totals::default(),
            left: Vec::new(),
            completions: Completions::default(),
            broken: None,
            revocation: None,
        }
    }
}

impl fmt::Display for CloseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (c, t) = (&self.completions, &self.totals);
        write!(
            f,
            "{} posted = {} successful + {} in error + {} flushed",
            c.posted, c.success, c.error, c.flushed
        )?;
        if c.quarantined > 0 {
            write!(f, " ({} of them with a buffer that is kept)", c.quarantined)?;
        }
        write!(
            f,
            "; {} bytes live, {} quarantined, {} held",
            t.live_bytes, t.quarantined_bytes, t.held_bytes
        )
    }
}
