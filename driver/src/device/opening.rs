//! The reset at open, proven (R10): what a function's last owner started must not go on under the
//! next one, whose first addresses are the same.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use failstop_pci::clock::Clock;
use failstop_pci::config::{BusMasterOff, CommandRegister, ConfigSpace};
use failstop_pci::id::Generation;
use failstop_pci::reset::{self, Canary, FunctionStopped, Issued};
use failstop_pci::transport::{ResetFailed, ResetMethod, Transport};
use failstop_pci::window::Window;

use super::{Claimed, DeviceError};
use crate::flight::{Control, Flight};
use crate::ladder::{Hand, NoResult, with_source};
use crate::name::last_resort;
use crate::provider::SoftwareReset;

/// That all accesses together take no longer than they may, until dropped.
pub(super) struct Bound<'a>(&'a dyn Transport);

impl<'a> Bound<'a> {
    pub(super) fn new(transport: &'a dyn Transport, total: Duration) -> Self {
        transport.bound(Some(total));
        Self(transport)
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        self.0.bound(None);
    }
}

/// A function that is to be reset, and what shows it.
pub(super) struct Reset<'a> {
    pub(super) transport: &'a Arc<dyn Transport>,
    /// Kept by a reset that is left behind: none is begun while it is outstanding (R4).
    pub(super) claim: &'a Arc<Claimed>,
    pub(super) command: &'a CommandRegister,
    /// The ladder's.
    pub(super) window: &'a Window,
    pub(super) clock: &'a dyn Clock,
    /// For each reset but the family's own, which waits by the clock.
    pub(super) deadline: Duration,
    pub(super) canary: Canary,
    pub(super) software: SoftwareReset,
    pub(super) flight: &'a Flight,
}

impl Reset<'_> {
    /// Resets the function by what the kernel or the server has, or else by its family's own reset,
    /// and says which one the canary and Bus Master Enable show.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotReset`] when none of them does; [`DeviceError::Reset`] when one is under
    /// way, or may happen yet.
    pub(super) fn prove(&self) -> Result<FunctionStopped, DeviceError> {
        let mut tried = Vec::new();
        let listed = self.transport.reset_methods();
        for method in listed.into_iter().chain([ResetMethod::Software]) {
            let attempt = self.attempt(method)?;
            let what = attempt.as_ref().err().map_or("proven", String::as_str);
            self.flight
                .note(Control::Reset, format_args!("{method} at open: {what}"));
            match attempt {
                Ok(stopped) => {
                    if !tried.is_empty() || method == ResetMethod::Software {
                        let device = self.transport.name();
                        log::warn!("{device}: reset by {method} only: {}", tried.join("; "));
                    }
                    return Ok(stopped);
                }
                Err(why) => tried.push(format!("{method}: {why}")),
            }
        }
        Err(DeviceError::NotReset {
            device: self.transport.name().to_owned(),
            tried: tried.join("; "),
        })
    }

    fn attempt(&self, method: ResetMethod) -> Result<Result<FunctionStopped, String>, DeviceError> {
        let config = ConfigSpace::new(&**self.transport);
        // Shown for each: the reset before may have put back what was saved.
        let off = self.command.bus_master_off(&config)?;
        self.command.memory_space_on(&config)?;
        // As its last owner left it the register may not take a value. Then this reset cannot be
        // shown, and the next one can.
        let planted = self.canary.plant(self.window);
        let issued = if method == ResetMethod::Software {
            let reset = || (self.software)(self.window, self.clock);
            reset::issue_software(&**self.transport, &off, reset)
        } else {
            self.issue(off, method)?
        };
        match (issued, planted) {
            (Err(error @ (ResetFailed::Busy { .. } | ResetFailed::Unanswered { .. })), _) => {
                Err(error.into())
            }
            (Err(error), _) => Ok(Err(with_source(&error))),
            (Ok(_), Err(error)) => Ok(Err(format!("done, and nothing could show it: {error}"))),
            (Ok(issued), Ok(())) => Ok(self.verify(issued, &config)),
        }
    }

    /// Resets it by a call that may hang, and is left behind then.
    fn issue(
        &self,
        off: BusMasterOff,
        method: ResetMethod,
    ) -> Result<Result<Issued, ResetFailed>, DeviceError> {
        let device = || self.transport.name().to_owned();
        let no_thread = |source| DeviceError::NoThread {
            device: device(),
            source,
        };
        let mut hand = Hand::new("reset at open").map_err(no_thread)?;
        let (transport, claim) = (self.transport.clone(), self.claim.clone());
        let issued = hand.call(self.clock, self.deadline, move || {
            let issued = reset::issue(&*transport, &off, method);
            drop(claim);
            issued
        });
        match issued {
            Ok(issued) => Ok(issued),
            Err(NoResult::NoHand) => Err(no_thread(io::ErrorKind::Other.into())),
            Err(NoResult::Late) => Ok(Err(ResetFailed::Unanswered {
                device: device(),
                source: io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "the kernel, or the server, has not made it within {:?}; {}, or try again later",
                        self.deadline,
                        last_resort(self.transport.name())
                    ),
                ),
            })),
        }
    }

    fn verify(&self, issued: Issued, config: &ConfigSpace<'_>) -> Result<FunctionStopped, String> {
        let (command, canary) = (self.command, &self.canary);
        reset::verify(
            issued,
            config,
            command,
            self.window,
            canary,
            Generation::LADDER,
        )
        .map_err(|why| with_source(&why))
    }
}
