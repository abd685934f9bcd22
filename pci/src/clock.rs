//! Time, passed in, so that no model test sleeps.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A reading of something that grows steadily, in a unit that nobody knows: it becomes a time between
/// two moments at which both were read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticks(pub u64);

impl Ticks {
    /// The processor's time-stamp counter (Intel SDM volume 3, "Time-Stamp Counter"); none where there is
    /// no such thing. Without an invariant one, or when the machine is suspended, times that are made
    /// of it are not exact.
    #[must_use]
    #[inline]
    pub fn of_processor() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "reads a counter of the processor")]
        // SAFETY: every x86-64 processor has this instruction, and Linux lets programs use it.
        return Some(Self(unsafe { std::arch::x86_64::_rdtsc() }));
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    fn of_time(time: Duration) -> Self {
        Self(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// What a wait needs of time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
    /// The same moment, at next to no cost: for accounts of when something was, which are seldom
    /// read, not for deadlines.
    fn ticks(&self) -> Ticks {
        Ticks::of_time(self.now())
    }
    /// Whether [`Self::ticks`] is [`Ticks::of_processor`], so that who needs it often need not ask a
    /// clock.
    fn has_ticks_of_processor(&self) -> bool {
        false
    }
    /// Lets `time` pass.
    fn sleep(&self, time: Duration);
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn ticks(&self) -> Ticks {
        Ticks::of_processor().unwrap_or_else(|| Ticks::of_time(self.now()))
    }

    fn has_ticks_of_processor(&self) -> bool {
        Ticks::of_processor().is_some()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// A clock that moves only when somebody sleeps on it: for tests.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self
            .now
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn sleep(&self, time: Duration) {
        *self
            .now
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) += time;
    }
}
