//! The ladder: what happens to a device that is broken (R4).
//!
//! One thread per life of a device, made with it. Whoever breaks the device marks it, wakes that
//! thread, and goes on. The ladder is given the function and its ledger, never an object or a
//! handle, so that it cannot meet itself in a destructor; calls that can block are made by a hand
//! (`hand`) with a deadline, past which they are left behind and prove nothing.
//!
//! ```text
//!  mark_broken ─> bus_master_off ─> detached ─> pending_drained ─> reset ─> unmapped ─> verdict
//!                                                                               revoked | quarantined
//! ```
//!
//! | step | shows | rests on |
//! | --- | --- | --- |
//! | `mark_broken` | no new mapping, nobody sleeps | our own flags |
//! | `bus_master_off` | the function issues no DMA | Command register, Bus Master Enable (PCIe base specification 6.0, §7.5.1.1.3) |
//! | `detached` | no thread reaches a register | private pages in place of the windows |
//! | `pending_drained` | nothing is under way: a note, not a proof | Device Status, Transactions Pending (§7.5.3.5) |
//! | `reset` | the function forgot every address | a reset that returned 0, and a register that shows it |
//! | `unmapped` | no address leads anywhere | the IOMMU, or a server's answer |
//!
//! Where to look: `deadlines` for how long a step may take, `function` for what the ladder is given
//! and the calls that it makes of it, `climb` for the steps and their order, `climb/reset` for the
//! resets, `climb/verdict` for what it all comes to, `report` for what is said of it, `hand` for the
//! threads that make the calls. This file has the thread that waits for the break.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use failstop_pci::id::Generation;
use failstop_pci::window::Window;
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};

use crate::events::DeviceEvent;
use crate::flight::ThreadKind;

mod climb;
mod deadlines;
mod function;
mod hand;
mod report;

use climb::{Climb, master_off_first};
pub use deadlines::Deadlines;
use function::AWAY;
pub(crate) use function::{Function, with_source};
pub(crate) use hand::{Hand, NoResult};
pub(crate) use report::micros;
pub use report::{Ground, Outcome, RevocationReport, Step, StepReport, Word};

thread_local! {
    static ON_LADDER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a ladder's: it does not wait for itself (R5).
pub(crate) fn is_this_thread() -> bool {
    ON_LADDER.get()
}

/// The life that the ladder watches.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) generation: Generation,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// What the data path sees of the registers.
    pub(crate) window: Arc<Window>,
}

/// A ladder that stands ready.
#[derive(Debug)]
pub(crate) struct Ladder {
    thread: Option<JoinHandle<()>>,
    report: Arc<Mutex<Option<Arc<RevocationReport>>>>,
}

impl Ladder {
    /// Makes the thread and its hand: nothing has to be made when the device breaks.
    pub(crate) fn new(function: Arc<Function>, life: Watched) -> io::Result<Self> {
        let number = life.generation.number();
        let name = |what: &str| format!("{what} {number}");
        let mut hand = Hand::new(name("hand"))?;
        // The hand waits for the break itself, so that turning bus mastering off waits for nobody.
        let first = {
            let (call, lifecycle) = (function.begin_call(), life.lifecycle.clone());
            hand.begin(move || {
                if !lifecycle.wait_for_break() {
                    return None;
                }
                let awake = Instant::now();
                let patience = call.0.deadlines.answer;
                Some((awake, master_off_first(&call.0, patience), awake.elapsed()))
            })
        };
        let lifecycle = life.lifecycle.clone();
        let report = Arc::new(Mutex::new(None));
        let filed = report.clone();
        let run = move || {
            ON_LADDER.set(true);
            ThreadKind::Ladder.is_this();
            let Some(cause) = life.lifecycle.wait_broken() else {
                // Who joins this thread lets go of the function next: nobody else may have it then.
                first.wait();
                return;
            };
            let climbed = catch_unwind(AssertUnwindSafe(|| {
                Climb::new(&function, &life, &cause, hand).run(first)
            }));
            let (report, verdict) = climbed.map_or_else(
                |_| {
                    let space = AssertUnwindSafe(&function.space);
                    // Whatever it says, no proof comes of it.
                    let _ = catch_unwind(|| space.settle(None));
                    (None, Verdict::default())
                },
                |(report, verdict)| (Some(Arc::new(report)), verdict),
            );
            let restartable = verdict.restartable;
            filed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone_from(&report);
            life.lifecycle.finish(verdict);
            // Who went to sleep since the first call is woken by the verdict.
            function.interrupts.wake_all();
            if !restartable {
                function.events.push(DeviceEvent::Fenced {
                    generation: life.generation,
                });
            }
            // Last: the logger is the user's, and may panic.
            match report {
                Some(report) => log::warn!("{report}"),
                None => log::error!("the ladder panicked: what was not proven is kept"),
            }
        };
        let thread = thread::Builder::new()
            .name(name("ladder"))
            .spawn(run)
            // The hand waits for a break that nobody would follow up.
            .inspect_err(|_| {
                lifecycle.retire();
            })?;
        Ok(Self {
            thread: Some(thread),
            report,
        })
    }

    /// The report, once the verdict is in.
    pub(crate) fn report(&self) -> Option<Arc<RevocationReport>> {
        self.report
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Files the report of a later attempt, which is what holds now.
    pub(crate) fn file(&self, report: &RevocationReport) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::new(report.clone()));
    }

    /// Waits for the thread's end, which comes with the verdict or with the life's retirement.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a ladder's thread panicked");
        }
    }
}

/// Climbs once more, on this thread, for a device that was not proven stopped: a verdict of the
/// moment may have changed. No call is outstanding then, as the caller made sure: a reset among
/// them would have another on top of it (R4).
pub(crate) fn climb_again(
    function: &Arc<Function>,
    life: &Watched,
    cause: &Cause,
) -> io::Result<(RevocationReport, Verdict)> {
    let mut hand = Hand::new("hand again")?;
    let call = function.begin_call();
    let first = hand.begin(move || {
        let awake = Instant::now();
        Some((awake, master_off_first(&call.0, AWAY), awake.elapsed()))
    });
    let mut climb = Climb::new(function, life, cause, hand);
    climb.again = true;
    Ok(climb.run(first))
}
