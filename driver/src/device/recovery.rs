//! Recovery: a new life after a break (R10).

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use failstop_pci::config::ConfigSpace;
use failstop_pci::id::Generation;
use failstop_pci::window::Window;
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};
use thiserror::Error;

use super::opening::Bound;
use super::recovered::{RecoveryStep, Steps};
use super::{Device, DeviceError, Inner};
use crate::events::DeviceEvent;
use crate::flight::Control;
use crate::ladder::{self, RevocationReport, Watched};
use crate::life::Life;
use crate::name::last_resort;
use crate::provider::Config;
use crate::rss::Settings;
use crate::watch::Watch;

/// A device that was not recovered. It stays as it was: fenced, if it was broken.
#[derive(Debug, Error)]
pub enum RecoverError {
    /// It is not broken.
    #[error("{device}: it is not broken, there is nothing to recover from")]
    NotBroken {
        /// The function's name.
        device: String,
    },
    /// A child of fork has copies of its parent's objects, and no device.
    #[error("{device}: it is driven by the process that this one was forked from")]
    Child {
        /// The function's name.
        device: String,
    },
    /// It was closed, or given back to who asked for it.
    #[error("{device}: it was given up ({cause}); open it again")]
    GivenUp {
        /// The function's name.
        device: String,
        /// Why.
        cause: Cause,
    },
    /// It could not be proven stopped, also by another attempt: turning bus mastering on again
    /// could let it finish what it was told before.
    #[error(
        "{device}: not proven stopped, so it stays fenced; {}, or try again later\n{report}",
        last_resort(.device)
    )]
    NotStopped {
        /// The function's name.
        device: String,
        /// What the attempt did.
        report: Box<RevocationReport>,
    },
    /// It was taken out of its address space, which is the only reason why its memory could be
    /// released: in it, it would reach nothing.
    #[error("{device}: it was detached from its address space; close it and open it again")]
    Detached {
        /// The function's name.
        device: String,
    },
    /// A call that the ladder left behind has not returned: a reset among them would hit the new life.
    #[error(
        "{device}: a call that the ladder left behind has not returned yet; it stays fenced, try again later"
    )]
    Outstanding {
        /// The function's name.
        device: String,
    },
    /// Another attempt could not be made.
    #[error("{device}: no thread for another attempt to stop it")]
    NoThread {
        /// The function's name.
        device: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is stopped, and was not brought up again.
    #[error("{0}; it stays fenced, try again later")]
    BringUp(#[from] DeviceError),
}

impl Device {
    /// Begins a new life of a broken device, and says which: waits for the verdict, proves it
    /// stopped (by another reset, where the ladder did not), and brings it up as it was opened.
    ///
    /// Objects of the life that ended go on as on any broken device and never touch the new one;
    /// a [`Port`](crate::port::Port) is carried across by its next burst. Bus mastering comes last:
    /// with the first queue of the new life, after its registers were read back. How long that took
    /// is in [`Device::recovery`].
    ///
    /// # Errors
    ///
    /// [`RecoverError`]; the device stays fenced then, and this may be tried again.
    pub fn recover(&self) -> Result<Generation, RecoverError> {
        self.inner.recover()
    }
}

impl Inner {
    /// As [`Device::recover`].
    pub(crate) fn recover(&self) -> Result<Generation, RecoverError> {
        if !self.process.is_this() {
            return Err(RecoverError::Child {
                device: self.function.transport.name().to_owned(),
            });
        }
        let changing = self.changing();
        self.check_given_up()?;
        let told = *self.rss();
        let old = self.life();
        let device = || self.function.transport.name().to_owned();
        let verdict = old
            .verdict()
            .ok_or_else(|| RecoverError::NotBroken { device: device() })?;
        if self.function.detached.load(Ordering::Acquire) {
            return Err(RecoverError::Detached { device: device() });
        }
        old.join_ladder();
        old.note(
            Control::Recovery,
            format_args!("from generation {}, asked for", old.generation().number()),
        );
        let mut steps = Steps::begin();
        let begun = self
            .all_returned()
            .and_then(|()| self.prove_stopped(&old, &verdict))
            // The attempt may have left a call behind itself.
            .and_then(|()| self.all_returned())
            .and_then(|()| {
                steps.ended(RecoveryStep::Stopped);
                self.begin(old.generation().next(), told, &mut steps)
            });
        self.unrecovered.store(begun.is_err(), Ordering::Release);
        let event = match &begun {
            Ok(generation) => {
                old.note(
                    Control::Recovery,
                    format_args!("generation {} began", generation.number()),
                );
                let report = steps.report(device(), generation.number());
                *self.recovery.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(report.clone());
                DeviceEvent::Recovered {
                    generation: *generation,
                    report,
                }
            }
            Err(error) => {
                let why = ladder::with_source(error);
                old.note(Control::Recovery, format_args!("failed: {why}"));
                DeviceEvent::RecoveryFailed {
                    generation: old.generation(),
                    why,
                }
            }
        };
        self.function.events.push(event);
        drop(changing);
        // Who changed it meanwhile may have found the old life only.
        if begun.is_ok() && *self.rss() != told {
            self.tell_rss();
        }
        begun
    }

    /// No second reset while one is outstanding, and no new life that the first would end (R4).
    fn all_returned(&self) -> Result<(), RecoverError> {
        if self.function.is_call_outstanding() {
            return Err(RecoverError::Outstanding {
                device: self.function.transport.name().to_owned(),
            });
        }
        Ok(())
    }

    /// No recovery without *stopped* (C43): what the ladder did not prove is tried again now.
    fn prove_stopped(&self, old: &Arc<Life>, verdict: &Verdict) -> Result<(), RecoverError> {
        if verdict.restartable {
            return Ok(());
        }
        let device = || self.function.transport.name().to_owned();
        let watched = Watched {
            generation: old.generation(),
            lifecycle: Arc::<Lifecycle>::clone(old.lifecycle()),
            window: old.window().clone(),
        };
        let cause = old.lifecycle().cause().unwrap_or(Cause::User);
        let (mut report, verdict) =
            ladder::climb_again(&self.function, &watched, &cause).map_err(|source| {
                RecoverError::NoThread {
                    device: device(),
                    source,
                }
            })?;
        // What is proven now holds for what the old life's handles have left, too.
        old.lifecycle().improve(verdict.clone());
        // What broke it, and what came of that, stays what is read first (R13).
        report.first = old.first_report().map(Box::new);
        old.file_report(&report);
        if verdict.restartable {
            log::warn!("proven stopped after all: {report}");
            return Ok(());
        }
        Err(RecoverError::NotStopped {
            device: device(),
            report: Box::new(report),
        })
    }

    /// Refuses for a device that was closed, or asked back.
    fn check_given_up(&self) -> Result<(), RecoverError> {
        match self.given_up.get() {
            None => Ok(()),
            Some(cause) => Err(RecoverError::GivenUp {
                device: self.function.transport.name().to_owned(),
                cause: cause.clone(),
            }),
        }
    }

    /// Begins the life that follows.
    fn begin(
        &self,
        generation: Generation,
        rss: Option<Settings>,
        steps: &mut Steps,
    ) -> Result<Generation, RecoverError> {
        let watch = self.function.watch.get();
        let errors = watch.map(Watch::errors);
        let life = self.bring_up(generation, rss, steps)?;
        // Asked back while it was brought up: dropped, the new life turns bus mastering off.
        self.check_given_up()?;
        let function = &self.function;
        function.space.reopen();
        if let Some(watch) = watch {
            watch.follow(&life);
        }
        // One that came before it was followed broke the old life, to no effect (C16).
        if watch.map(Watch::errors) != errors {
            life.break_device(Cause::BusError);
        }
        {
            let mut present = self.life.lock().unwrap_or_else(PoisonError::into_inner);
            self.accounts.follow(&life);
            *present = life;
            self.generation
                .store(generation.number(), Ordering::Release);
        }
        steps.ended(RecoveryStep::Armed);
        Ok(generation)
    }

    /// Brings the function up once more; bus mastering stays off.
    fn bring_up(
        &self,
        generation: Generation,
        rss: Option<Settings>,
        steps: &mut Steps,
    ) -> Result<Arc<Life>, DeviceError> {
        let function = &self.function;
        let config = ConfigSpace::new(&*function.transport);
        let _bounded = Bound::new(&*function.transport, function.deadlines.bring_up);
        let _off = function.master_off_once_back()?;
        function.command.memory_space_on(&config)?;
        let window = Window::open(
            function.transport.clone(),
            generation,
            0,
            self.driver.bar_bytes,
        )?;
        steps.ended(RecoveryStep::Reopened);
        let mut provider = self.driver.provider(window.clone(), function.clock.clone());
        let config = Config {
            rss: rss.map(|settings| settings.rss),
            ..self.config
        };
        provider.bring_up(&config)?;
        steps.ended(RecoveryStep::BroughtUp);
        function.plant().map_err(|source| DeviceError::Canary {
            device: function.transport.name().to_owned(),
            source,
        })?;
        function.interrupts.enable_vectors()?;
        Life::new(
            function.clone(),
            self.tally.clone(),
            generation,
            window,
            provider,
            rss,
        )
    }
}
