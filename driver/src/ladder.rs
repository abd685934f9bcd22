//! The ladder: what happens to a device that is broken (R4).
//!
//! One thread per life of a device, made with it. Whoever breaks the device marks it, wakes that
//! thread, and goes on. The ladder is given the function and its ledger, never an object or a
//! handle, so that it cannot meet itself in a destructor; calls that can block are made by a hand
//! (`hand`) with a deadline, past which they are left behind and prove nothing.
//!
//! ```text
//!  mark_broken ─> bus_master_off ─> detached ─> pending_drained ─> reset ─> unmapped ─> verdict
//!                                                                               revoked | quarantined
//! ```
//!
//! | step | shows | rests on |
//! | --- | --- | --- |
//! | `mark_broken` | no new mapping, nobody sleeps | our own flags |
//! | `bus_master_off` | the function issues no DMA | Command register, Bus Master Enable (PCIe base specification 6.0, §7.5.1.1.3) |
//! | `detached` | no thread reaches a register | private pages in place of the windows |
//! | `pending_drained` | nothing is under way: a note, not a proof | Device Status, Transactions Pending (§7.5.3.5) |
//! | `reset` | the function forgot every address | a reset that returned 0, and a register that shows it |
//! | `unmapped` | no address leads anywhere | the IOMMU, or a server's answer |

use std::cell::Cell;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use failstop_dma::space::{AddressSpace, Settled};
use failstop_pci::clock::Clock;
use failstop_pci::config::{BusMasterOff, CommandError, CommandRegister, ConfigSpace};
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::reset::{self, Canary, FunctionStopped, Issued, Pending};
use failstop_pci::transport::{Kind, ResetMethod, Transport};
use failstop_pci::window::{NoAnswer, Window};
use failstop_queues::gate::Gate;
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};

use crate::events::{DeviceEvent, Events};
use crate::flight::{Control, Flight, Recording, ThreadKind};
use crate::provider::SoftwareReset;
use crate::watch::Watch;

mod hand;
mod report;

pub(crate) use hand::Hand;
use hand::NoResult;
pub(crate) use report::micros;
pub use report::{Ground, Outcome, RevocationReport, Step, StepReport, Word};

/// How long each step may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadlines {
    /// An access to config space.
    pub config: Duration,
    /// How long a function that does not answer is written to again.
    pub answer: Duration,
    /// Replacing the windows and disabling the vectors.
    pub detach: Duration,
    /// Transactions that are under way.
    pub drain: Duration,
    /// All attempts at a reset together, of which a quarter is kept for the family's own. The kernel
    /// alone waits 100 ms after each (PCIe base specification 6.0, §6.6.2), and up to a minute for a
    /// function that does not come back.
    pub reset: Duration,
    /// All unmaps together.
    pub unmap: Duration,
    /// The orderly part of a close on behalf of somebody who cannot wait: a removal. Past it the
    /// ladder ends the device.
    pub close: Duration,
    /// Accesses of an open, and of a recovery, from one reset to the next, behind a server: each of
    /// them may need almost the server's deadline.
    pub bring_up: Duration,
}

impl Deadlines {
    /// How long a ladder takes at the longest, from the mark to the verdict, with every call hanging:
    /// what a destroy that cannot fail may wait for.
    #[must_use]
    pub fn total(&self) -> Duration {
        // Bus mastering off; looks for pending transactions; off again; the list of methods; the last
        // word.
        let accesses = 5 * self.config + self.answer + self.drain;
        // The unmaps, and the detach from the address space where they are slow.
        accesses + self.detach + self.reset + 2 * self.unmap
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            config: Duration::from_secs(1),
            answer: Duration::from_millis(10),
            detach: Duration::from_secs(2),
            drain: Duration::from_millis(100),
            reset: Duration::from_secs(10),
            unmap: Duration::from_secs(10),
            close: Duration::from_secs(2),
            bring_up: Duration::from_secs(10),
        }
    }
}

/// How long after a reset that could not begin (EAGAIN, EBUSY) it is tried again.
const AGAIN: Duration = Duration::from_millis(10);
/// No reset is begun with less time left than this, or a quarter of all: it would be left behind at
/// once, and hit the device later. (PCIe base specification 6.0, §6.6.2: 100 ms after each.)
const SHORTEST_RESET: Duration = Duration::from_millis(100);
/// How long another attempt waits for a function that does not answer to come back: the ladder waits for
/// none, and whoever asks for a recovery wants the device.
const AWAY: Duration = Duration::from_millis(500);
/// Between two looks at Transactions Pending.
const LOOK: Duration = Duration::from_millis(1);

thread_local! {
    static ON_LADDER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a ladder's: it does not wait for itself (R5).
pub(crate) fn is_this_thread() -> bool {
    ON_LADDER.get()
}

/// The function and its ledger: all that the ladder is given, the same for every life.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) command: CommandRegister,
    /// Held by whoever turns bus mastering on or off, but for the ladder's first, unconditional write.
    pub(crate) gate: Gate,
    /// A view of the registers that no detach replaces.
    pub(crate) window: Arc<Window>,
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) interrupts: Interrupts,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) pending: Option<Pending>,
    /// It was taken out of its address space: nothing that is mapped there is reached any more.
    pub(crate) detached: AtomicBool,
    pub(crate) canary: Canary,
    pub(crate) software_reset: SoftwareReset,
    pub(crate) deadlines: Deadlines,
    pub(crate) events: Arc<Events>,
    pub(crate) watch: OnceLock<Watch>,
    pub(crate) flight: Flight,
    /// Calls by hands that have not returned, those that were left behind included.
    pub(crate) outstanding: AtomicUsize,
}

/// A hand's call, from when it was asked for until it returned, however it ends.
struct Call(Arc<Function>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.outstanding.fetch_sub(1, Ordering::Release);
    }
}

impl Function {
    /// Counted before the hand is asked: one that is starved may act as late as one that hangs.
    fn begin_call(self: &Arc<Self>) -> Call {
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        Call(self.clone())
    }

    /// Whether a call that was left behind may yet act: a reset that returns late would hit
    /// whatever life there is then.
    pub(crate) fn is_call_outstanding(&self) -> bool {
        self.outstanding.load(Ordering::Acquire) > 0 || self.transport.is_reset_outstanding()
    }

    /// Writes the known command word without Bus Master Enable, and reads it back.
    pub(crate) fn master_off(&self) -> Result<BusMasterOff, CommandError> {
        self.command
            .bus_master_off(&ConfigSpace::new(&*self.transport))
    }

    /// As [`Function::master_off`], once nobody can be about to turn it on: who holds the gate
    /// looks at the broken flag under it.
    pub(crate) fn master_off_for_good(&self) -> Result<BusMasterOff, CommandError> {
        let off = self.gate.shut(|| self.master_off());
        self.note_master_off(&off, 1);
        off
    }

    /// The same on a function that may be away for a moment, and is wanted back.
    pub(crate) fn master_off_once_back(&self) -> Result<BusMasterOff, CommandError> {
        self.until_answered(AWAY, || self.gate.shut(|| self.master_off()))
    }

    /// Turns bus mastering off by `off`, again while nobody answers and `patience` lasts.
    fn until_answered(
        &self,
        patience: Duration,
        off: impl Fn() -> Result<BusMasterOff, CommandError>,
    ) -> Result<BusMasterOff, CommandError> {
        let mut attempts = 1;
        let mut result = off();
        if matches!(result, Err(CommandError::NoAnswer { .. })) {
            let end = self.clock.now() + patience;
            loop {
                self.clock.sleep(LOOK);
                attempts += 1;
                result = off();
                let silent = matches!(result, Err(CommandError::NoAnswer { .. }));
                if !silent || self.clock.now() >= end {
                    break;
                }
            }
        }
        self.note_master_off(&result, attempts);
        result
    }

    /// Records that bus mastering was turned off, in so many attempts. After the accesses, since
    /// nothing comes before them (R4.2).
    pub(crate) fn note_master_off(&self, off: &Result<BusMasterOff, CommandError>, attempts: u32) {
        let known = self.command.known().bits();
        match off {
            Ok(_) => self.flight.note(
                Control::Config,
                format_args!(
                    "command {known:#06x} written, reads without bus mastering (attempt {attempts})"
                ),
            ),
            Err(error) => self
                .flight
                .note(Control::Config, format_args!("attempt {attempts}: {error}")),
        }
    }

    /// Resets by `method` and verifies that it did.
    fn reset_by(
        &self,
        method: ResetMethod,
        generation: Generation,
    ) -> Result<FunctionStopped, Unreset> {
        // Shown for each: the reset before may have put back what was saved.
        let off = self.master_off_for_good().map_err(|error| Unreset {
            again: false,
            why: error.to_string(),
        })?;
        let planted = self.plant();
        self.note_reset(method, "issued");
        let issued = reset::issue(&*self.transport, &off, method).map_err(|error| Unreset {
            again: error.is_busy(),
            why: with_source(&error),
        });
        let stopped = issued.and_then(|issued| {
            planted.map_err(|error| Unreset {
                again: false,
                why: format!("returned success, and nothing could show it: {error}"),
            })?;
            self.verify(issued, generation)
                .map_err(|why| Unreset { again: false, why })
        });
        match &stopped {
            Ok(_) => self.note_reset(method, "proven"),
            Err(unreset) => self.note_reset(method, &unreset.why),
        }
        stopped
    }

    /// Resets by the family's own registers, and verifies that it did.
    fn reset_by_software(&self, generation: Generation) -> Result<FunctionStopped, String> {
        let off = self
            .master_off_for_good()
            .map_err(|error| error.to_string())?;
        self.plant().map_err(|error| error.to_string())?;
        let reset = || (self.software_reset)(&self.window, &*self.clock);
        let issued = reset::issue_software(&*self.transport, &off, reset)
            .map_err(|error| error.to_string())?;
        self.verify(issued, generation)
    }

    fn note_reset(&self, method: ResetMethod, what: &str) {
        self.flight
            .note(Control::Reset, format_args!("{method}: {what}"));
    }

    /// Gives the canary its value: before each reset, since whatever reset the function last, a proof
    /// or its own provider, left it where the next one would seem proven (C43).
    pub(crate) fn plant(&self) -> Result<(), NoAnswer> {
        self.canary.plant(&self.window)
    }

    /// A reset that returned 0 is believed only for what it undid.
    fn verify(&self, issued: Issued, generation: Generation) -> Result<FunctionStopped, String> {
        let config = ConfigSpace::new(&*self.transport);
        reset::verify(
            issued,
            &config,
            &self.command,
            &self.window,
            &self.canary,
            generation,
        )
        .map_err(|why| format!("returned success and is not believed: {why}"))
    }
}

/// A message with what it comes from: who did not answer, and why, is known at the bottom only (R13).
pub(crate) fn with_source(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let why = error.to_string();
        // Some messages have their cause's in them.
        if !text.contains(&why) {
            text = format!("{text}: {why}");
        }
        source = error.source();
    }
    text
}

/// Why a reset proves nothing.
struct Unreset {
    again: bool,
    why: String,
}

/// The life that the ladder watches.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) generation: Generation,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// What the data path sees of the registers.
    pub(crate) window: Arc<Window>,
}

/// A ladder that stands ready.
#[derive(Debug)]
pub(crate) struct Ladder {
    thread: Option<JoinHandle<()>>,
    report: Arc<Mutex<Option<Arc<RevocationReport>>>>,
}

impl Ladder {
    /// Makes the thread and its hand: nothing has to be made when the device breaks.
    pub(crate) fn new(function: Arc<Function>, life: Watched) -> io::Result<Self> {
        let number = life.generation.number();
        let name = |what: &str| format!("{what} {number}");
        let mut hand = Hand::new(name("hand"))?;
        // The hand waits for the break itself, so that turning bus mastering off waits for nobody.
        let first = {
            let (call, lifecycle) = (function.begin_call(), life.lifecycle.clone());
            hand.begin(move || {
                if !lifecycle.wait_for_break() {
                    return None;
                }
                let awake = Instant::now();
                let patience = call.0.deadlines.answer;
                Some((awake, master_off_first(&call.0, patience), awake.elapsed()))
            })
        };
        let lifecycle = life.lifecycle.clone();
        let report = Arc::new(Mutex::new(None));
        let filed = report.clone();
        let run = move || {
            ON_LADDER.set(true);
            ThreadKind::Ladder.is_this();
            let Some(cause) = life.lifecycle.wait_broken() else {
                return;
            };
            let climbed = catch_unwind(AssertUnwindSafe(|| {
                Climb::new(&function, &life, &cause, hand).run(first)
            }));
            let (report, verdict) = climbed.map_or_else(
                |_| {
                    let space = AssertUnwindSafe(&function.space);
                    // Whatever it says, no proof comes of it.
                    let _ = catch_unwind(|| space.settle(None));
                    (None, Verdict::default())
                },
                |(report, verdict)| (Some(Arc::new(report)), verdict),
            );
            let restartable = verdict.restartable;
            filed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone_from(&report);
            life.lifecycle.finish(verdict);
            // Who went to sleep since the first call is woken by the verdict.
            function.interrupts.wake_all();
            if !restartable {
                function.events.push(DeviceEvent::Fenced {
                    generation: life.generation,
                });
            }
            // Last: the logger is the user's, and may panic.
            match report {
                Some(report) => log::warn!("{report}"),
                None => log::error!("the ladder panicked: what was not proven is kept"),
            }
        };
        let thread = thread::Builder::new()
            .name(name("ladder"))
            .spawn(run)
            // The hand waits for a break that nobody would follow up.
            .inspect_err(|_| {
                lifecycle.retire();
            })?;
        Ok(Self {
            thread: Some(thread),
            report,
        })
    }

    /// The report, once the verdict is in.
    pub(crate) fn report(&self) -> Option<Arc<RevocationReport>> {
        self.report
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Files the report of a later attempt, which is what holds now.
    pub(crate) fn file(&self, report: &RevocationReport) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::new(report.clone()));
    }

    /// Waits for the thread's end, which comes with the verdict or with the life's retirement.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a ladder's thread panicked");
        }
    }
}

/// Climbs once more, on this thread, for a device that was not proven stopped: a verdict of the
/// moment may have changed. No call is outstanding then, as the caller made sure: a reset among
/// them would have another on top of it (R4).
pub(crate) fn climb_again(
    function: &Arc<Function>,
    life: &Watched,
    cause: &Cause,
) -> io::Result<(RevocationReport, Verdict)> {
    let mut hand = Hand::new("hand again")?;
    let call = function.begin_call();
    let first = hand.begin(move || {
        let awake = Instant::now();
        Some((awake, master_off_first(&call.0, AWAY), awake.elapsed()))
    });
    let mut climb = Climb::new(function, life, cause, hand);
    climb.again = true;
    Ok(climb.run(first))
}

/// The step that stops DMA: two accesses of config space, repeated while nobody answers and
/// `patience` lasts.
fn master_off_first(function: &Function, patience: Duration) -> Result<BusMasterOff, CommandError> {
    function.until_answered(patience, || function.master_off())
}

type First = hand::Pending<Option<(Instant, Result<BusMasterOff, CommandError>, Duration)>>;
type Ended = (Outcome, Option<String>);

/// One climb: what was shown so far.
struct Climb<'a> {
    function: &'a Arc<Function>,
    life: &'a Watched,
    cause: &'a Cause,
    /// Not the first climb of this life: nothing breaks.
    again: bool,
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
    fn new(function: &'a Arc<Function>, life: &'a Watched, cause: &'a Cause, hand: Hand) -> Self {
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

    fn run(mut self, first: First) -> (RevocationReport, Verdict) {
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

    fn reset(&mut self) -> Ended {
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
            Ok(Err(error)) => format!("at the ladder's end: {error}"),
            Err(_) => "no answer at the ladder's end".to_owned(),
        };
        let note = report
            .note
            .take()
            .map_or_else(String::new, |note| note + "; ");
        report.note = Some(note + &last);
    }

    fn judge(self, steps: Vec<StepReport>) -> (RevocationReport, Verdict) {
        // A transport that enforces nothing unmaps all the same, and nothing is released for it.
        let unmapped = self.all_unmapped
            && (self.settled.proof.is_some() || self.settled.quarantined.is_empty());
        let stopped = self.stopped.filter(FunctionStopped::is_ground_for_release);
        let ground = match (stopped.is_some(), unmapped) {
            (true, true) => Ground::StoppedAndUnmapped,
            (true, false) => Ground::Stopped,
            (false, true) => Ground::Unmapped,
            (false, false) => Ground::Nothing,
        };
        let revoked = self.settled.quarantined.is_empty() && ground != Ground::Nothing;
        let verdict = Verdict {
            proof: self.settled.proof.clone(),
            revoked,
            // A software reset alone does not keep the device from addresses that still lead somewhere;
            // and a thread of this life that still reaches a register would ring for the next.
            restartable: self.detached
                && self
                    .stopped
                    .is_some_and(|stopped| stopped.is_ground_for_release() || unmapped),
        };
        let word = if revoked {
            Word::Revoked
        } else {
            Word::Quarantined
        };
        let flight = &self.function.flight;
        flight.note(Control::State, format_args!("{word}: {ground}"));
        let Recording { events, missed } = flight.recording();
        let report = RevocationReport {
            device: self.function.transport.name().to_owned(),
            generation: self.life.generation.number(),
            cause: self.cause.to_string(),
            first: None,
            wake: self.wake,
            steps,
            reset_method: self.reset_method,
            verdict: word,
            ground,
            released_bytes: self.settled.released_bytes,
            quarantined_bytes: self.settled.quarantined.iter().map(|line| line.len).sum(),
            quarantined: self.settled.quarantined,
            flight: events,
            flight_missed: missed,
        };
        (report, verdict)
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
