//! The resets of a climb: the kernel's or the server's, then the family's own (R4.5).

use std::fmt;
use std::time::Duration;

use failstop_pci::config::CommandError;
use failstop_pci::reset::{self, FunctionStopped};
use failstop_pci::transport::{Kind, ResetMethod};
use failstop_queues::lifecycle::Cause;

use super::super::function::{Function, with_source};
use super::super::hand::NoResult;
use super::super::report::Outcome;
use super::{Climb, Ended, join, no_result};
use crate::flight::Control;

/// How long after a reset that could not begin (EAGAIN, EBUSY) it is tried again.
const AGAIN: Duration = Duration::from_millis(10);
/// No reset is begun with less time left than this, or a quarter of all: it would be left behind at
/// once, and hit the device later. (PCIe base specification 6.0, §6.6.2: 100 ms after each.)
const SHORTEST_RESET: Duration = Duration::from_millis(100);

impl Climb<'_> {
    pub(super) fn reset(&mut self) -> Ended {
        let config = self.deadlines().config;
        match self.call(config, Function::master_off_for_good) {
            Ok(Ok(_off)) => {}
            Ok(Err(error)) => {
                let why = with_source(&error);
                let (CommandError::NoAnswer { .. } | CommandError::Access(_)) = error else {
                    return self.reset_unproven(why);
                };
                self.gone = Some(why.clone());
                return (Outcome::Skipped, Some(why));
            }
            Err(late) => {
                let (outcome, why) = no_result(late);
                let why = why.unwrap_or_default();
                return (
                    outcome,
                    Some(format!("bus mastering was not confirmed off: {why}")),
                );
            }
        }
        // Gone was a verdict of the moment.
        self.gone = None;
        if let Some(stopped) = reset::never_mastered(&self.function.command, self.life.generation) {
            self.stopped = Some(stopped);
        }
        let all = self.deadlines().reset;
        let begun = self.function.clock.now();
        let (end, last) = (begun + all - all / 4, begun + all);
        let mut notes = Vec::new();
        for method in self.methods() {
            match self.try_reset(method, end) {
                Ok(stopped) => {
                    self.stopped = Some(stopped);
                    self.reset_method = Some(method);
                    return (Outcome::Done, join(notes));
                }
                Err((late, why)) => {
                    notes.push(format!("{}: {why}", method.name()));
                    if late {
                        // No second reset while one is outstanding.
                        return (Outcome::TimedOut, join(notes));
                    }
                }
            }
        }
        self.reset_by_software(last, &mut notes);
        (Outcome::NotProven, join(notes))
    }

    /// The kernel's or the server's methods, then hot reset.
    fn methods(&mut self) -> Vec<ResetMethod> {
        let listed = self.call(self.deadlines().config, |f| f.transport.reset_methods());
        let mut methods = listed.unwrap_or_default();
        if self.function.transport.kind() != Kind::VfioUser {
            methods.push(ResetMethod::Hot);
        }
        methods
    }

    /// One method, again while it cannot begin. True with the reason when the call is outstanding.
    fn try_reset(
        &mut self,
        method: ResetMethod,
        end: Duration,
    ) -> Result<FunctionStopped, (bool, String)> {
        let generation = self.life.generation;
        loop {
            let left = end.saturating_sub(self.function.clock.now());
            if left < SHORTEST_RESET.min(self.deadlines().reset / 4) {
                return Err((false, "not begun: no time was left".into()));
            }
            match self.call(left, move |f| f.reset_by(method, generation)) {
                Ok(Ok(stopped)) => return Ok(stopped),
                // The call returned, and the reset did not.
                Ok(Err(unreset)) if self.function.transport.is_reset_outstanding() => {
                    return Err((true, unreset.why));
                }
                // While a removal waits for us the kernel refuses for ever.
                Ok(Err(unreset))
                    if unreset.again
                        && *self.cause != Cause::Removal
                        && self.function.clock.now() + AGAIN < end =>
                {
                    self.function.clock.sleep(AGAIN);
                }
                Ok(Err(unreset)) => return Err((false, unreset.why)),
                Err(NoResult::Late) => return Err((true, "had not returned in time".into())),
                Err(NoResult::NoHand) => {
                    return Err((true, "the call ended without result".into()));
                }
            }
        }
    }

    /// Bus mastering reads back set: a reset may stop the device all the same, and proves nothing.
    fn reset_unproven(&mut self, why: String) -> Ended {
        let reset = self.call(self.deadlines().reset, |f| {
            let reset = f.transport.reset();
            let what: &dyn fmt::Display = match &reset {
                Ok(()) => &"returned success, and proves nothing",
                Err(error) => error,
            };
            let what = format_args!("under bus mastering that reads set: {what}");
            f.flight.note(Control::Reset, what);
            reset
        });
        let also = match reset {
            Ok(Ok(())) => "reset all the same".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "and the reset did not return".to_owned(),
        };
        (Outcome::NotProven, Some(format!("{why}; {also}")))
    }

    fn reset_by_software(&mut self, end: Duration, notes: &mut Vec<String>) {
        let generation = self.life.generation;
        let left = end.saturating_sub(self.function.clock.now());
        let reset = self.call(left, move |f| {
            let stopped = f.reset_by_software(generation);
            f.note_reset(
                ResetMethod::Software,
                stopped.as_ref().err().map_or("proven", String::as_str),
            );
            stopped
        });
        match reset {
            Ok(Ok(stopped)) => {
                // A function that was never bus master is stopped on a better ground.
                self.stopped.get_or_insert(stopped);
                self.reset_method = Some(ResetMethod::Software);
                notes.push("software: done, no ground for a release by itself".into());
            }
            Ok(Err(why)) => notes.push(format!("software: {why}")),
            Err(_) => notes.push("software: had not returned in time".into()),
        }
    }
}
