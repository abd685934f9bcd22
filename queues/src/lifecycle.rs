//! Whether a device may still be used: the only state that breaking it and the data path share.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// An uncorrectable error was reported on the bus (AER).
    BusError,
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
            Self::UnmapFailed { what } => write!(f, "an unmap failed: {what}"),
            Self::StillMaster { what } => write!(f, "bus mastering was not seen to go off: {what}"),
            Self::BusError => f.write_str("the bus reported an uncorrectable error"),
            Self::User => f.write_str("it was asked for"),
        }
    }
}

/// What happens when a device breaks.
type Fence = Box<dyn Fn() + Send + Sync>;

/// One life of a device, as every handle of it sees it.
#[derive(Default)]
pub struct Lifecycle {
    broken: AtomicBool,
    cause: OnceLock<Cause>,
    fence: OnceLock<Fence>,
}

impl fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lifecycle")
            .field("cause", &self.cause)
            .finish_non_exhaustive()
    }
}

impl Lifecycle {
    /// Whether the device is broken: one relaxed load, once per burst. What can go stale after it
    /// is harmless, because a dead generation's window is private memory (R4.3).
    #[inline(always)]
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Sets what fences the device when it breaks: it runs once, on the thread that breaks the
    /// device first, whoever that is. Without effect when it was set before.
    pub fn on_break(&self, fence: impl Fn() + Send + Sync + 'static) {
        // The first one counts.
        let _ = self.fence.set(Box::new(fence));
    }

    /// Breaks the device, from any thread; true for the first who does, when the device was fenced
    /// ([`Lifecycle::on_break`]).
    pub fn mark_broken(&self, cause: Cause) -> bool {
        let text = cause.to_string();
        let first = self.cause.set(cause).is_ok();
        self.broken.store(true, Ordering::Release);
        if first {
            log::error!("the device is broken: {text}");
            if let Some(fence) = self.fence.get() {
                fence();
            }
        }
        first
    }

    /// Why the device was broken, if it was.
    #[must_use]
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.get()
    }
}
