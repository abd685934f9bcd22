//! One climb: the steps, in their order, and what was shown so far.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, io};

use failstop_dma::space::Settled;
use failstop_pci::config::{BusMasterOff, CommandError, ConfigSpace};
use failstop_pci::reset::FunctionStopped;
use failstop_pci::transport::{Kind, ResetMethod};
use failstop_queues::lifecycle::{Cause, Verdict};

use super::Watched;
use super::deadlines::Deadlines;
use super::function::{AWAY, Function, LOOK, with_source};
use super::hand::{self, Hand, NoResult};
use super::report::{Outcome, RevocationReport, Step, StepReport};
use crate::events::DeviceEvent;
use crate::flight::Control;

mod reset;
mod verdict;

/// The step that stops DMA: two accesses of config space, repeated while nobody answers and
/// `patience` lasts.
pub(super) fn master_off_first(
    function: &Function,
    patience: Duration,
) -> Result<BusMasterOff, CommandError> {
    function.until_answered(patience, || function.master_off())
}

pub(super) type First =
    hand::Pending<Option<(Instant, Result<BusMasterOff, CommandError>, Duration)>>;
type Ended = (Outcome, Option<String>);

/// One climb: what was shown so far.
pub(super) struct Climb<'a> {
    function: &'a Arc<Function>,
    life: &'a Watched,
    cause: &'a Cause,
    /// Not the first climb of this life: nothing breaks.
    pub(super) again: bool,
    hand: Hand,
    wake: Duration,
    /// Why the function is taken to be gone, at this moment.
    gone: Option<String>,
    stopped: Option<FunctionStopped>,
    reset_method: Option<ResetMethod>,
    all_unmapped: bool,
    /// No thread of this life reaches a register any more.
    detached: bool,
    settled: Settled,
}

/// The steps, in the order taken: code, report, documentation and order test read the same.
const STEPS: [Step; 6] = [
    Step::MarkBroken,
    Step::BusMasterOff,
    Step::Detached,
    Step::PendingDrained,
    Step::Reset,
    Step::Unmapped,
];

impl<'a> Climb<'a> {
    pub(super) fn new(
        function: &'a Arc<Function>,
        life: &'a Watched,
        cause: &'a Cause,
        hand: Hand,
    ) -> Self {
        Self {
            function,
            life,
            cause,
            again: false,
            hand,
            wake: Duration::ZERO,
            gone: None,
            stopped: None,
            reset_method: None,
            all_unmapped: false,
            detached: false,
            settled: Settled::default(),
        }
    }

    pub(super) fn run(mut self, first: First) -> (RevocationReport, Verdict) {
        let mut steps = Vec::with_capacity(STEPS.len());
        for step in STEPS {
            let start = Instant::now();
            let mut took = None;
            let (outcome, note) = match step {
                Step::MarkBroken => self.mark(),
                Step::BusMasterOff => self.bus_master_off(&first, &mut took),
                Step::Detached => self.detach(),
                Step::PendingDrained => self.drain(),
                Step::Reset => self.reset(),
                Step::Unmapped => self.unmap(),
            };
            let because = note.as_deref().map_or("", |_| ": ");
            let note_text = note.as_deref().unwrap_or_default();
            self.function.flight.note(
                Control::Step,
                format_args!("{} {}{because}{note_text}", step.name(), outcome.name()),
            );
            steps.push(StepReport {
                step,
                outcome,
                took: took.unwrap_or_else(|| start.elapsed()),
                note,
            });
        }
        self.last_word(&mut steps);
        self.judge(steps)
    }

    fn deadlines(&self) -> Deadlines {
        self.function.deadlines
    }

    /// Makes a call of the function by the hand.
    fn call<T: Send + 'static>(
        &mut self,
        deadline: Duration,
        call: impl FnOnce(&Function) -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let counted = self.function.begin_call();
        let clock = &*self.function.clock;
        self.hand.call(clock, deadline, move || call(&counted.0))
    }

    /// The device is marked already, by who broke it (R4.1).
    fn mark(&mut self) -> Ended {
        self.function.space.close();
        // No MSI will come: whoever sleeps is woken by us (C40).
        self.function.interrupts.wake_all();
        if self.again {
            return (Outcome::Done, Some("another attempt".into()));
        }
        self.function.flight.note(
            Control::State,
            format_args!(
                "broken, generation {}: {}",
                self.life.generation.number(),
                self.cause
            ),
        );
        self.function.events.push(DeviceEvent::Broken {
            generation: self.life.generation,
            cause: self.cause.clone(),
        });
        (Outcome::Done, None)
    }

    fn bus_master_off(&mut self, first: &First, took: &mut Option<Duration>) -> Ended {
        let clock = &*self.function.clock;
        let patience = if self.again {
            AWAY
        } else {
            self.deadlines().answer
        };
        let end = clock.now() + self.deadlines().config + patience;
        match self.hand.finish(clock, end, first) {
            Ok(Some((awake, result, time))) => {
                let marked = self.life.lifecycle.broken_since();
                let marked = marked.filter(|_| !self.again);
                self.wake = marked.map_or(Duration::ZERO, |at| awake.saturating_duration_since(at));
                *took = Some(time);
                self.note_off(result.map(drop))
            }
            Ok(None) | Err(NoResult::NoHand) => {
                let again = self.call(self.deadlines().config, |f| f.master_off().map(drop));
                again.map_or((Outcome::TimedOut, None), |result| self.note_off(result))
            }
            Err(NoResult::Late) => (Outcome::TimedOut, None),
        }
    }

    fn note_off(&mut self, result: Result<(), CommandError>) -> Ended {
        match result {
            Ok(()) => (Outcome::Done, None),
            Err(error) => {
                let gone = matches!(
                    error,
                    CommandError::NoAnswer { .. } | CommandError::Access(_)
                );
                let why = with_source(&error);
                self.gone = gone.then(|| why.clone());
                (Outcome::Failed, Some(why))
            }
        }
    }

    fn detach(&mut self) -> Ended {
        let window = self.life.window.clone();
        let detached = self.call(self.deadlines().detach, move |f| {
            let window = window.detach();
            // Error and request events stay armed.
            let vectors = f.interrupts.disable_vectors();
            (window, vectors)
        });
        match detached {
            Ok((window, vectors)) => {
                self.detached = window.is_ok();
                let mut notes = Vec::new();
                notes.extend(window.err().map(|error| format!("the registers: {error}")));
                notes.extend(vectors.err().map(|error| error.to_string()));
                let outcome = if notes.is_empty() {
                    Outcome::Done
                } else {
                    Outcome::Failed
                };
                (outcome, join(notes))
            }
            Err(late) => no_result(late),
        }
    }

    /// A note, whatever it says (R4.4).
    fn drain(&mut self) -> Ended {
        if self.gone.is_some() {
            return (
                Outcome::Skipped,
                Some("the function does not answer".into()),
            );
        }
        let Some(pending) = self.function.pending else {
            return (Outcome::Skipped, Some("no PCI Express capability".into()));
        };
        let deadline = self.deadlines().drain;
        let drained = self.call(deadline + self.deadlines().config, move |f| {
            let config = ConfigSpace::new(&*f.transport);
            let end = f.clock.now() + deadline;
            loop {
                if !pending.outstanding(&config)? {
                    return Ok(true);
                }
                if f.clock.now() >= end {
                    return Ok(false);
                }
                f.clock.sleep(LOOK);
            }
        });
        match drained {
            Ok(Ok(true)) => (Outcome::Done, None),
            // Sticky on some parts: a note, not a verdict.
            Ok(Ok(false)) => (
                Outcome::NotProven,
                Some(format!("still pending after {deadline:?}")),
            ),
            Ok(Err(error)) => {
                let error: failstop_pci::transport::AccessError = error;
                (Outcome::Failed, Some(error.to_string()))
            }
            Err(late) => no_result(late),
        }
    }

    fn unmap(&mut self) -> Ended {
        let go_on = Arc::new(AtomicBool::new(true));
        let goes_on = go_on.clone();
        let swept = self.call(self.deadlines().unmap, move |f| {
            f.space.unmap_all(&|| goes_on.load(Ordering::Acquire))
        });
        go_on.store(false, Ordering::Release);
        let mut notes = Vec::new();
        let mut outcome = match &swept {
            Ok(swept) if swept.is_complete() => Outcome::Done,
            Ok(swept) => {
                notes.push(swept.to_string());
                Outcome::Failed
            }
            Err(late) => {
                let (outcome, why) = no_result(*late);
                notes.extend(why);
                outcome
            }
        };
        if outcome != Outcome::Done && self.function.transport.kind() == Kind::Iommufd {
            // Out of its address space the device reaches none of it, mapped or not.
            let detached = self.call(self.deadlines().unmap, |f| {
                let ground = f.space.detach()?;
                f.detached.store(true, Ordering::Release);
                Ok::<_, io::Error>(ground)
            });
            match detached {
                Ok(Ok(true)) => {
                    notes.push("detached from its address space".into());
                    outcome = Outcome::Done;
                }
                Ok(Ok(false)) => notes.push("detached from its address space, to no avail".into()),
                Ok(Err(error)) => notes.push(format!("not detached: {error}")),
                Err(_) => notes.push("the detach did not return".into()),
            }
        }
        self.all_unmapped = outcome == Outcome::Done;
        self.settled = self.function.space.settle(self.stopped.as_ref());
        (outcome, join(notes))
    }

    /// Writes the command word once more where it was not seen to take, or no reset was proven after
    /// it: a device that was away may be back, with bus mastering on (C47).
    fn last_word(&mut self, steps: &mut [StepReport]) {
        let off = |step: &&mut StepReport| step.step == Step::BusMasterOff;
        let Some(report) = steps.iter_mut().find(off) else {
            return;
        };
        // A reset that was not proven may have put back what was saved.
        if report.outcome == Outcome::Done && self.reset_method.is_some() {
            return;
        }
        let again = self.call(self.deadlines().config, Function::master_off_for_good);
        if !matches!(again, Ok(Ok(_)))
            && let Some(watch) = self.function.watch.get()
        {
            // Gone is a verdict of the moment, and this one the ladder's last.
            watch.is_perhaps_on();
        }
        let last = match again {
            Ok(Ok(_)) => "off at the ladder's end".to_owned(),
            Ok(Err(error)) if report.note == Some(error.to_string()) => {
                "and so at the ladder's end".to_owned()
            }
            Ok(Err(error)) => format!("at the ladder's end: {error}"),
            Err(_) => "no answer at the ladder's end".to_owned(),
        };
        let note = report
            .note
            .take()
            .map_or_else(String::new, |note| note + "; ");
        report.note = Some(note + &last);
    }
}

fn no_result(why: NoResult) -> Ended {
    match why {
        NoResult::Late => (
            Outcome::TimedOut,
            Some("had not returned by its deadline".into()),
        ),
        NoResult::NoHand => (
            Outcome::Failed,
            Some("no thread could make the call".into()),
        ),
    }
}

fn join(notes: Vec<String>) -> Option<String> {
    (!notes.is_empty()).then(|| notes.join("; "))
}

impl fmt::Debug for Climb<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Climb")
            .field("life", self.life)
            .finish_non_exhaustive()
    }
}
