//! What the ladder is given, and the calls that it makes of it.

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use failstop_dma::space::AddressSpace;
use failstop_pci::clock::Clock;
use failstop_pci::config::{BusMasterOff, CommandError, CommandRegister, ConfigSpace};
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::reset::{self, Canary, FunctionStopped, Issued, Pending};
use failstop_pci::transport::{ResetMethod, Transport};
use failstop_pci::window::{NoAnswer, Window};
use failstop_queues::gate::Gate;

use super::deadlines::Deadlines;
use crate::events::Events;
use crate::flight::{Control, Flight};
use crate::provider::SoftwareReset;
use crate::watch::Watch;

/// How long another attempt waits for a function that does not answer to come back: the ladder waits for
/// none, and whoever asks for a recovery wants the device.
pub(super) const AWAY: Duration = Duration::from_millis(500);
/// Between two looks at Transactions Pending.
pub(super) const LOOK: Duration = Duration::from_millis(1);

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
pub(super) struct Call(pub(super) Arc<Function>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.outstanding.fetch_sub(1, Ordering::Release);
    }
}

impl Function {
    /// Counted before the hand is asked: one that is starved may act as late as one that hangs.
    pub(super) fn begin_call(self: &Arc<Self>) -> Call {
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
    pub(super) fn until_answered(
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
    pub(super) fn reset_by(
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
    pub(super) fn reset_by_software(
        &self,
        generation: Generation,
    ) -> Result<FunctionStopped, String> {
        let off = self
            .master_off_for_good()
            .map_err(|error| error.to_string())?;
        self.plant().map_err(|error| error.to_string())?;
        let reset = || (self.software_reset)(&self.window, &*self.clock);
        let issued = reset::issue_software(&*self.transport, &off, reset)
            .map_err(|error| error.to_string())?;
        self.verify(issued, generation)
    }

    pub(super) fn note_reset(&self, method: ResetMethod, what: &str) {
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
pub(super) struct Unreset {
    pub(super) again: bool,
    pub(super) why: String,
}
