//! The faults that a device and its server were told to have, and which of them have begun. What
//! there is, and how it is written, stands in one table: [`TABLE`].

use std::time::Duration;

use failstop_scenario::table::{Ends, entry};

pub use failstop_scenario::fault;
pub use failstop_scenario::table::{Entry, TABLE, help};
pub use failstop_scenario::{Count, Fault, Moment, ParseError, Spec, Trigger};

/// A fault that has not begun.
#[derive(Clone, Debug)]
struct Waiting {
    fault: Fault,
    /// What it waits for still, the present count first.
    counts: Vec<Count>,
    /// Where the present count's random numbers are.
    random: u64,
}

impl Waiting {
    fn new(spec: Spec) -> Self {
        let mut counts = spec.trigger.0;
        counts.reverse();
        let mut waiting = Self {
            fault: spec.fault,
            counts,
            random: 0,
        };
        waiting.seed();
        waiting
    }

    fn seed(&mut self) {
        if let Some(Count {
            at: Moment::Random { seed, .. },
            ..
        }) = self.counts.last()
        {
            self.random = *seed;
        }
    }

    /// Takes a moment into account; true when nothing is left to wait for.
    fn note(&mut self, moment: Moment) -> bool {
        let Some(count) = self.counts.last_mut() else {
            return true;
        };
        let counts = match count.at {
            Moment::Random { per_mille, .. } => {
                moment == Moment::Access && next(&mut self.random) % 1000 < u64::from(per_mille)
            }
            at => at == moment,
        };
        if counts {
            count.n = count.n.saturating_sub(1);
            if count.n == 0 {
                self.counts.pop();
                self.seed();
            }
        }
        self.counts.is_empty()
    }
}

/// The next of a sequence of numbers that looks random (SplitMix64).
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A fault that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Active {
    fault: Fault,
    since: Duration,
}

/// The faults that were asked for, and which of them have begun.
#[derive(Clone, Default, Debug)]
pub struct Faults {
    waiting: Vec<Waiting>,
    active: Vec<Active>,
    /// One has begun or ended since [`Faults::take_change`].
    changed: bool,
}

impl Faults {
    /// Adds a fault; one of the same name is replaced. What it waits for is counted from here on.
    pub fn add(&mut self, spec: Spec, now: Duration) {
        let name = spec.fault.name();
        self.end(name);
        self.waiting.retain(|old| old.fault.name() != name);
        if spec.trigger.is_now() {
            self.begin(spec.fault, now);
        } else {
            self.waiting.push(Waiting::new(spec));
        }
    }

    fn begin(&mut self, fault: Fault, now: Duration) {
        log::info!("fault {fault} begins");
        self.active.push(Active { fault, since: now });
        self.changed = true;
    }

    /// Something happens that faults may wait for.
    #[inline]
    pub fn note(&mut self, moment: Moment, now: Duration) {
        if self.is_waiting() {
            self.count(moment, now);
        }
    }

    fn count(&mut self, moment: Moment, now: Duration) {
        let mut due = Vec::new();
        self.waiting.retain_mut(|waiting| {
            let begins = waiting.note(moment);
            if begins {
                due.push(waiting.fault);
            }
            !begins
        });
        for fault in due {
            self.begin(fault, now);
        }
    }

    /// Whether any fault waits for a moment.
    #[must_use]
    #[inline]
    pub const fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether none has begun.
    #[must_use]
    #[inline]
    pub const fn is_quiet(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether this fault has begun.
    #[must_use]
    pub fn has(&self, fault: Fault) -> bool {
        self.active.iter().any(|active| active.fault == fault)
    }

    /// What `wanted` makes of the first of the faults that have begun.
    #[must_use]
    pub fn find<T>(&self, wanted: impl Fn(Fault) -> Option<T>) -> Option<T> {
        self.active.iter().find_map(|active| wanted(active.fault))
    }

    /// As [`Faults::find`], with the time at which it began.
    #[must_use]
    pub fn find_since<T>(&self, wanted: impl Fn(Fault) -> Option<T>) -> Option<(T, Duration)> {
        self.active
            .iter()
            .find_map(|active| Some((wanted(active.fault)?, active.since)))
    }

    /// The faults that have begun.
    pub fn active(&self) -> impl Iterator<Item = Fault> + '_ {
        self.active.iter().map(|active| active.fault)
    }

    /// A function level reset worked.
    pub fn function_reset(&mut self) {
        self.retain(|active| {
            entry(&active.fault).is_none_or(|entry| entry.ends != Ends::FunctionReset)
        });
    }

    /// Ends the fault of this name, if it has begun.
    pub fn end(&mut self, name: &str) {
        self.retain(|active| active.fault.name() != name);
    }

    /// Ends what was for a while only.
    pub fn expire(&mut self, now: Duration) {
        if self.is_quiet() {
            return;
        }
        self.retain(|active| match active.fault {
            Fault::Gone(Some(time)) | Fault::GoneZero(Some(time)) => now < active.since + time,
            _ => true,
        });
    }

    /// When [`Faults::expire`] has something to do, if ever.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Duration> {
        let ends = self.active.iter().filter_map(|active| match active.fault {
            Fault::Gone(Some(time)) | Fault::GoneZero(Some(time)) => Some(active.since + time),
            _ => None,
        });
        ends.min()
    }

    fn retain(&mut self, keep: impl Fn(&Active) -> bool) {
        let before = self.active.len();
        self.active.retain(keep);
        self.changed |= self.active.len() != before;
    }

    /// Whether a fault has begun or ended since the last call.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Ends and forgets all faults.
    pub fn clear(&mut self) {
        *self = Self {
            changed: true,
            ..Self::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(specs: &[&str]) -> Faults {
        let mut faults = Faults::default();
        for spec in specs {
            faults.add(spec.parse().unwrap(), Duration::ZERO);
        }
        faults
    }

    fn names(faults: &Faults) -> Vec<&'static str> {
        faults.active().map(|fault| fault.name()).collect()
    }

    #[test]
    fn a_fault_begins_at_the_moment_that_it_waits_for_and_no_other() {
        let mut faults = faults(&["gone@2", "lie@destroy"]);
        faults.note(Moment::Frames, Duration::ZERO);
        faults.note(Moment::Access, Duration::ZERO);
        assert_eq!(names(&faults), [""; 0]);
        faults.note(Moment::Frames, Duration::ZERO);
        assert_eq!(names(&faults), ["gone"]);
    }

    #[test]
    fn the_second_count_begins_after_the_first() {
        let mut faults = faults(&["lie@bme-on+unmap=2"]);
        for moment in [
            Moment::Unmap,
            Moment::Unmap,
            Moment::MasterOn,
            Moment::Unmap,
        ] {
            faults.note(moment, Duration::ZERO);
            assert!(faults.is_quiet(), "at {moment:?}");
        }
        faults.note(Moment::Unmap, Duration::ZERO);
        assert_eq!(names(&faults), ["lie"]);
    }

    #[test]
    fn a_random_fault_begins_at_the_same_access_each_time() {
        let when = |seed: u32| {
            let mut faults = faults(&[&format!("lie@random={seed}/10")]);
            (0..100_000).find(|_| {
                faults.note(Moment::Access, Duration::ZERO);
                !faults.is_quiet()
            })
        };
        assert_eq!(when(1), when(1));
        assert!(when(1).is_some() && when(1) != when(2));
    }

    #[test]
    fn a_fault_replaces_one_of_its_name() {
        let faults = faults(&["slow:1", "slow:2"]);
        let slow: Vec<Fault> = faults.active().collect();
        assert_eq!(slow, [Fault::SlowStop(Duration::from_millis(2))]);
    }

    #[test]
    fn what_is_for_a_while_ends_in_time() {
        let mut faults = faults(&["gone:20", "lie"]);
        faults.expire(Duration::from_millis(19));
        assert_eq!(names(&faults), ["gone", "lie"]);
        faults.expire(faults.next_expiry().unwrap());
        assert_eq!(names(&faults), ["lie"]);
    }

    #[test]
    fn a_function_level_reset_cures_what_the_table_says() {
        let mut faults = faults(&["rx-stalls", "lie"]);
        faults.function_reset();
        assert_eq!(names(&faults), ["lie"]);
    }
}
