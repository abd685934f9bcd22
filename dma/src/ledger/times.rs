//! When something was, told when somebody asks: an entry is stamped with ticks, since far more
//! entries come and go than are ever looked at.

use std::sync::Arc;
use std::time::Duration;

use failstop_pci::clock::{Clock, Ticks};

/// A clock, and what it showed once.
pub(super) struct Times {
    clock: Arc<dyn Clock>,
    /// Whether its ticks are the processor's.
    of_processor: bool,
    began: (Ticks, Duration),
}

impl Times {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let began = (clock.ticks(), clock.now());
        let of_processor = clock.has_ticks_of_processor();
        Self {
            clock,
            of_processor,
            began,
        }
    }

    #[inline]
    pub(super) fn stamp(&self) -> Ticks {
        match Ticks::of_processor() {
            Some(ticks) if self.of_processor => ticks,
            _ => self.ask(),
        }
    }

    #[cold]
    fn ask(&self) -> Ticks {
        self.clock.ticks()
    }

    /// What stamps up to now mean.
    pub(super) fn scale(&self) -> Scale {
        Scale {
            began: self.began,
            now: (self.clock.ticks(), self.clock.now()),
        }
    }
}

/// Two moments of which ticks and time are known.
pub(super) struct Scale {
    began: (Ticks, Duration),
    now: (Ticks, Duration),
}

impl Scale {
    /// Between the two moments.
    pub(super) fn time(&self, stamp: Ticks) -> Duration {
        let ((Ticks(first), began), (Ticks(last), now)) = (self.began, self.now);
        let all = u128::from(last.saturating_sub(first));
        let part = u128::from(stamp.0.saturating_sub(first)).min(all);
        let passed = now.saturating_sub(began).as_nanos();
        let nanos = passed.saturating_mul(part).checked_div(all).unwrap_or(0);
        began + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_becomes_a_time_between_the_moments_that_are_known() {
        let at = Duration::from_secs;
        let scale = Scale {
            began: (Ticks(1000), at(5)),
            now: (Ticks(3000), at(15)),
        };
        let times = [0, 1000, 1500, 3000, 4000].map(|ticks| scale.time(Ticks(ticks)));
        assert_eq!(times, [at(5), at(5), at(5) + at(5) / 2, at(15), at(15)]);
    }

    #[test]
    fn a_clock_that_stood_still_says_when_it_began() {
        let moment = (Ticks(7), Duration::from_secs(1));
        let scale = Scale {
            began: moment,
            now: moment,
        };
        assert_eq!(scale.time(Ticks(7)), Duration::from_secs(1));
    }
}
