//! Time, passed in, so that no model test sleeps.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::time::ClockId;

/// What a wait needs of time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
    /// The same time, cheaper and a few milliseconds late at most: for accounts of how long
    /// something has been as it is, not for deadlines.
    fn coarse(&self) -> Duration {
        self.now()
    }
    /// Lets `time` pass.
    fn sleep(&self, time: Duration);
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
    /// The same moment as `CLOCK_MONOTONIC` gives it, which [`Instant`] does not tell.
    since_boot: Duration,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            since_boot: ClockId::CLOCK_MONOTONIC
                .now()
                .map_or(Duration::ZERO, Duration::from),
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// `CLOCK_MONOTONIC_COARSE`: as of the last tick, without a reading of the clock's hardware,
    /// which may be a system call.
    fn coarse(&self) -> Duration {
        ClockId::CLOCK_MONOTONIC_COARSE.now().map_or_else(
            |_| self.now(),
            |now| Duration::from(now).saturating_sub(self.since_boot),
        )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_time_is_never_ahead_and_catches_up() {
        let clock = SystemClock::default();
        let mark = clock.now();
        let caught_up = (0..1000).any(|_| {
            let coarse = clock.coarse();
            assert!(coarse <= clock.now());
            clock.sleep(Duration::from_millis(1));
            coarse > mark
        });
        assert!(caught_up, "{:?} at {:?}", clock.coarse(), clock.now());
    }
}
