//! Whether a device may still be used: the only state that breaking it, the ladder and the data
//! path share.
//!
//! ```text
//!            mark_broken (any thread)        finish (the ladder)
//!   Live ───────────────────────> Breaking ──────────────────────> Down
//!     │ retire (close)
//!     └──────────────────────────────────────────────────────────> Retired
//! ```
//!
//! One value stands for one generation: a recovery makes a new one, and handles of the old keep
//! theirs, which stays Down for ever (R10).

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use failstop_dma::proof::ReleaseProof;

use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering};

/// Why a device was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// A queue did not stop as its family's stop sequence says.
    StopFailed {
        /// Which object, and what was read.
        what: String,
    },
    /// The device wrote a value that cannot be (R8).
    ImpossibleValue {
        /// What it was.
        what: &'static str,
    },
    /// Registers or config space read as those of a function that is not there.
    Gone {
        /// Where it was seen.
        what: String,
    },
    /// A command did not end in time.
    TimedOut {
        /// Which, and how long was waited.
        what: String,
    },
    /// An unmap did something else than what was asked.
    UnmapFailed {
        /// What it did.
        what: String,
    },
    /// Bus mastering was not seen to go off.
    StillMaster {
        /// What was read instead.
        what: String,
    },
    /// Work makes no progress, and nothing explains why (R11).
    Stalled {
        /// The evidence.
        what: String,
    },
    /// It was reset, and nobody here did it: it has forgotten its queues (C18).
    Reset {
        /// What shows it.
        what: String,
    },
    /// An uncorrectable error was reported on the bus (AER).
    BusError,
    /// The function was asked back: it is being unbound or removed.
    Removal,
    /// It was closed while other threads still held objects of it.
    Closed,
    /// Somebody asked for it.
    User,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StopFailed { what } => write!(f, "a queue did not stop: {what}"),
            Self::ImpossibleValue { what } => {
                write!(f, "the device wrote an impossible value: {what}")
            }
            Self::Gone { what } => write!(f, "the device is gone: {what}"),
            Self::TimedOut { what } => write!(f, "no answer in time: {what}"),
            Self::UnmapFailed { what } => write!(f, "an unmap failed: {what}"),
            Self::StillMaster { what } => write!(f, "bus mastering was not seen to go off: {what}"),
            Self::Stalled { what } => write!(f, "work makes no progress: {what}"),
            Self::Reset { what } => write!(
                f,
                "the device was reset by somebody else, or reads as zeros: {what}"
            ),
            Self::BusError => f.write_str("the bus reported an uncorrectable error"),
            Self::Removal => f.write_str("the function is being removed or unbound"),
            Self::Closed => f.write_str("it was closed while objects of it were in use"),
            Self::User => f.write_str("it was asked for"),
        }
    }
}

/// What the ladder proved of a broken device (R4).
#[derive(Clone, Default, Debug)]
pub struct Verdict {
    /// The ground on which memory that the device may have known is released; without one, nothing is.
    pub proof: Option<Arc<ReleaseProof>>,
    /// Every mapping is released: nothing went to quarantine.
    pub revoked: bool,
    /// The function was proven stopped and forgot what it was told: what a recovery needs (R10).
    pub restartable: bool,
}

#[derive(Clone, Debug)]
enum Stage {
    Live,
    Breaking(Cause, Instant),
    Down(Cause, Instant, Verdict),
    Retired,
}

/// One life of a device, as every handle of it sees it.
///
/// Its lock is a leaf, held for a few assignments, and never taken on the data path of a device
/// that is not broken.
pub struct Lifecycle {
    broken: AtomicBool,
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self {
            broken: AtomicBool::new(false),
            stage: Mutex::new(Stage::Live),
            changed: Condvar::new(),
        }
    }
}

impl fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lifecycle").field(&*self.stage()).finish()
    }
}

impl Lifecycle {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        // A stage is whole between any two statements.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, stage: MutexGuard<'a, Stage>) -> MutexGuard<'a, Stage> {
        self.changed
            .wait(stage)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the device is broken: one relaxed load, once per burst. What can go stale after it
    /// is harmless, because a dead generation's window is private memory (R4.3).
    #[inline(always)]
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Breaks the device, from any thread, and wakes its ladder; true for the first who does
    /// (R11). Does not wait. Without effect on a device that was closed.
    pub fn mark_broken(&self, cause: Cause) -> bool {
        {
            let mut stage = self.stage();
            if !matches!(*stage, Stage::Live) {
                return false;
            }
            *stage = Stage::Breaking(cause.clone(), Instant::now());
            self.broken.store(true, Ordering::Release);
            self.changed.notify_all();
        }
        log::error!("the device is broken: {cause}");
        true
    }

    /// Why the device was broken, if it was.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match &*self.stage() {
            Stage::Breaking(cause, _) | Stage::Down(cause, ..) => Some(cause.clone()),
            Stage::Live | Stage::Retired => None,
        }
    }

    /// When the device was broken, if it was.
    #[must_use]
    pub fn broken_since(&self) -> Option<Instant> {
        match &*self.stage() {
            Stage::Breaking(_, since) | Stage::Down(_, since, _) => Some(*since),
            Stage::Live | Stage::Retired => None,
        }
    }

    /// The ladder's part: waits until the device is broken and says why; none once it was closed.
    #[must_use]
    pub fn wait_broken(&self) -> Option<Cause> {
        let mut stage = self.stage();
        loop {
            match &*stage {
                Stage::Live => stage = self.wait(stage),
                Stage::Breaking(cause, _) | Stage::Down(cause, ..) => return Some(cause.clone()),
                Stage::Retired => return None,
            }
        }
    }

    /// As [`Lifecycle::wait_broken`], without asking why, for who must lose no time: true when it is
    /// broken, false when it was closed. Allocates nothing.
    #[must_use]
    pub fn wait_for_break(&self) -> bool {
        let mut stage = self.stage();
        while matches!(*stage, Stage::Live) {
            stage = self.wait(stage);
        }
        !matches!(*stage, Stage::Retired)
    }

    /// The ladder's last word. Without effect unless the device is breaking: a verdict does not
    /// change.
    pub fn finish(&self, verdict: Verdict) {
        let mut stage = self.stage();
        if let Stage::Breaking(cause, since) = &*stage {
            *stage = Stage::Down(cause.clone(), *since, verdict);
            self.changed.notify_all();
        }
    }

    /// A later attempt proved more: what was not covered by the verdict may be now. Without effect
    /// unless there is a verdict, or without a proof.
    pub fn improve(&self, verdict: Verdict) {
        if let Stage::Down(_, _, old) = &mut *self.stage()
            && verdict.proof.is_some()
        {
            *old = verdict;
        }
    }

    /// The verdict, once it is in.
    #[must_use]
    pub fn verdict(&self) -> Option<Verdict> {
        match &*self.stage() {
            Stage::Down(.., verdict) => Some(verdict.clone()),
            _ => None,
        }
    }

    /// Whether the device is broken and the verdict is not in.
    #[must_use]
    pub fn is_breaking(&self) -> bool {
        matches!(&*self.stage(), Stage::Breaking(..))
    }

    /// Waits for the verdict of a device that is breaking; none of one that is not.
    ///
    /// The ladder's steps have deadlines, so that this ends. Not for the ladder's own thread.
    #[must_use]
    pub fn wait_verdict(&self) -> Option<Verdict> {
        let mut stage = self.stage();
        loop {
            match &*stage {
                Stage::Breaking(..) => stage = self.wait(stage),
                Stage::Down(.., verdict) => return Some(verdict.clone()),
                Stage::Live | Stage::Retired => return None,
            }
        }
    }

    /// Ends the life in good order: the ladder will not be needed. False when it ended before.
    pub fn retire(&self) -> bool {
        let mut stage = self.stage();
        if !matches!(*stage, Stage::Live) {
            return false;
        }
        *stage = Stage::Retired;
        // Whoever still looks posts nothing more.
        self.broken.store(true, Ordering::Release);
        self.changed.notify_all();
        true
    }
}
