//! Time, passed in, so that no model test sleeps.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A reading of something that grows steadily, in a unit that nobody knows: it becomes a time between
/// two moments at which both were read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticks(pub u64);

/// What a wait needs of time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
    /// The same moment, at next to no cost: for accounts of when something was, which are seldom
    /// read, not for deadlines.
    fn ticks(&self) -> Ticks {
        Ticks(u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX))
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

    /// The time-stamp counter (Intel SDM volume 3, "Time-Stamp Counter"). A processor without an
    /// invariant one, or a suspended machine, makes times of it that are not exact.
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "reads a counter of the processor")]
    fn ticks(&self) -> Ticks {
        // SAFETY: every x86-64 processor has this instruction, and Linux lets programs use it.
        Ticks(unsafe { std::arch::x86_64::_rdtsc() })
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
