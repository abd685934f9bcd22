//! Hands: threads that make the ladder's blocking calls, so that the ladder itself never blocks.
//!
//! A kernel call can take minutes, and cannot be taken back. A hand that does not return in time
//! is abandoned: it keeps what it was given, and whatever it finds out later goes nowhere.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use failstop_pci::clock::Clock;

use crate::flight::ThreadKind;

type Job = Box<dyn FnOnce() + Send>;

/// How often a wait looks at the clock, which need not be the machine's.
const LOOK: Duration = Duration::from_millis(1);

/// A call that gave no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoResult {
    /// It had not returned by its deadline; it may yet act.
    Late,
    /// There was no hand to make it: no thread could be had, or the call panicked.
    NoHand,
}

/// A thread that makes one call after the other.
#[derive(Debug)]
pub(crate) struct Hand {
    name: String,
    jobs: Option<Sender<Job>>,
}

/// The result of a call, when it comes. What the call was given has been dropped by then.
#[derive(Debug)]
pub(crate) struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits, without a deadline, for a call that asks nothing of the device.
    pub(crate) fn wait(self) {
        // An error says that the call panicked, which dropped what it was given as well.
        let _ = self.0.recv();
    }
}

impl Hand {
    /// A hand that waits for its first call.
    pub(crate) fn new(name: impl Into<String>) -> io::Result<Self> {
        let name = name.into();
        let jobs = Some(Self::thread(&name)?);
        Ok(Self { name, jobs })
    }

    fn thread(name: &str) -> io::Result<Sender<Job>> {
        let (jobs, calls) = mpsc::channel::<Job>();
        let run = move || {
            ThreadKind::Hand.is_this();
            calls.into_iter().for_each(|job| job());
        };
        thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(jobs)
    }

    /// Begins a call.
    pub(crate) fn begin<T: Send + 'static>(
        &mut self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Pending<T> {
        let (result, pending) = mpsc::sync_channel(1);
        if self.jobs.is_none() {
            self.jobs = Self::thread(&self.name)
                .inspect_err(|error| log::error!("{}: no thread: {error}", self.name))
                .ok();
        }
        if let Some(jobs) = &self.jobs {
            // Nobody waits for what an abandoned hand finds out; without a hand the result's sender
            // is dropped, which is what the wait sees.
            let job = move || drop(result.send(call()));
            let _ = jobs.send(Box::new(job));
        }
        Pending(pending)
    }

    /// Waits for a call's result until `end` on `clock`; past it the hand is abandoned, and the next
    /// call gets a new one.
    pub(crate) fn finish<T>(
        &mut self,
        clock: &dyn Clock,
        end: Duration,
        pending: &Pending<T>,
    ) -> Result<T, NoResult> {
        loop {
            let left = end.saturating_sub(clock.now());
            match pending.0.recv_timeout(left.min(LOOK)) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(why) => {
                    self.jobs = None;
                    return Err(match why {
                        RecvTimeoutError::Timeout => NoResult::Late,
                        RecvTimeoutError::Disconnected => NoResult::NoHand,
                    });
                }
            }
        }
    }

    /// Makes a call and waits for it, at most `deadline` on `clock`.
    pub(crate) fn call<T: Send + 'static>(
        &mut self,
        clock: &dyn Clock,
        deadline: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let end = clock.now().saturating_add(deadline);
        let pending = self.begin(call);
        self.finish(clock, end, &pending)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use failstop_pci::clock::{ManualClock, SystemClock};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_call_gives_its_result() {
        let mut hand = Hand::new("hand").unwrap();
        let clock = SystemClock::default();
        assert_eq!(hand.call(&clock, SECOND, || 1), Ok(1));
        assert_eq!(hand.call(&clock, SECOND, || 2), Ok(2));
    }

    #[test]
    fn c35_a_call_that_hangs_is_left_behind_and_the_next_has_a_hand_of_its_own() {
        let mut hand = Hand::new("hand").unwrap();
        let clock = Arc::new(ManualClock::default());
        let (release, hung) = mpsc::channel::<()>();
        let passing = clock.clone();
        let late = hand.call(&*clock, SECOND, move || {
            passing.sleep(2 * SECOND);
            let _ = hung.recv();
        });
        assert_eq!(late, Err(NoResult::Late));
        assert_eq!(hand.call(&*clock, SECOND, || 3), Ok(3));
        drop(release);
    }

    #[test]
    fn a_call_that_panics_has_no_result_and_the_next_one_has() {
        let mut hand = Hand::new("hand").unwrap();
        let clock = SystemClock::default();
        let panicked = hand.call(&clock, SECOND, || {
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert_eq!(panicked, Err(NoResult::NoHand));
        assert_eq!(hand.call(&clock, SECOND, || 4), Ok(4));
    }
}
