//! The supervisor: recovers a device by policy, and breaks one that hangs.
//!
//! It recovers a device that broke (R10), at once and then with growing pauses, so often in so much
//! time, and gives up when that is used up; looks at the link; and breaks a device on evidence that
//! it hangs (R11, C19, C45), never on silence. What happens is told by the device's
//! [`Events`].
//!
//! A [`Supervisor`] is a thread of its own. Who has a loop of his own calls [`Duty::look`] in it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

use failstop_pci::clock::Clock;
use failstop_pci::fork::Process;
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Event;
use failstop_queues::lifecycle::Cause;

use crate::device::{Device, Inner, RecoverError};
use crate::events::{DeviceEvent, Events};
use crate::flight::{Control, ThreadKind};
use crate::life::{Life, Way, receive_positions, restarts};
use crate::provider::{Link, Provider};

mod watchdog;

use watchdog::{Sample, Watchdog};

/// What a supervisor does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Attempts at a recovery, successful or not, in any stretch of [`Policy::within`]. When they
    /// are used up the device stays fenced ([`DeviceEvent::GivenUp`]). 0 never recovers.
    pub attempts: u32,
    /// The stretch of time that attempts are counted in.
    pub within: Duration,
    /// The pause after a first attempt that failed; it doubles with each that follows. The first
    /// attempt is made when the verdict is in.
    pub backoff: Duration,
    /// The longest pause.
    pub longest_backoff: Duration,
    /// How long a device may hang before it is broken, where there is evidence that it does; none
    /// leaves hanging devices alone.
    pub watchdog: Option<Duration>,
    /// How often link and progress are looked at.
    pub interval: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            attempts: 8,
            within: Duration::from_secs(600),
            backoff: Duration::from_millis(100),
            longest_backoff: Duration::from_secs(30),
            watchdog: Some(Duration::from_secs(5)),
            interval: Duration::from_millis(500),
        }
    }
}

/// Supervises one device, on a thread of its own, until it or the device is dropped.
///
/// Dropped, it waits for an attempt that is under way: no recovery begins after that.
#[derive(Debug)]
pub struct Supervisor {
    bell: Arc<Event>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

impl Supervisor {
    /// Begins to supervise `device`.
    ///
    /// # Errors
    ///
    /// When there is no thread or descriptor for it.
    pub fn new(device: &Device, policy: Policy) -> io::Result<Self> {
        let bell = Arc::new(Event::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut duty = Duty::new(device, policy);
        device.events().add_bell(&bell);
        let (woken, told) = (bell.clone(), stop.clone());
        let run = move || {
            ThreadKind::Supervisor.is_this();
            while !told.load(Ordering::Acquire) {
                let Some(pause) = duty.look() else { return };
                if let Err(error) = woken.wait(Some(pause)) {
                    log::error!("a device is not supervised any more: {error}");
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("supervisor".to_owned())
            .spawn(run)?;
        Ok(Self {
            bell,
            stop,
            thread: Some(thread),
            process: Process::this(),
        })
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A child of fork has no such thread, and shares the bell with its parent.
            return;
        }
        self.stop.store(true, Ordering::Release);
        self.bell.signal();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a supervisor's thread panicked");
        }
    }
}

/// What a supervisor does, one look at a time, by the clock that the device was opened with.
pub struct Duty {
    inner: Weak<Inner>,
    events: Arc<Events>,
    clock: Arc<dyn Clock>,
    policy: Policy,
    link: Option<Link>,
    watched: Generation,
    watchdog: Option<Watchdog>,
    next_look: Duration,
    /// When attempts were made, oldest first.
    attempts: Vec<Duration>,
    /// Attempts on this break that failed, and when the next may be made.
    failed: u32,
    not_before: Duration,
    /// The life that is left as it is.
    given_up: Option<Generation>,
}

/// What one look found.
enum Seen {
    /// Nothing to do for so long.
    Rest(Duration),
    /// The device was given up by its owner, or is gone: there is nothing to supervise.
    End,
}

impl Duty {
    /// The duty over `device`: changes of its link are told from here on.
    #[must_use]
    pub fn new(device: &Device, policy: Policy) -> Self {
        let function = device.inner.function();
        let life = device.life();
        Self {
            inner: Arc::downgrade(&device.inner),
            events: function.events.clone(),
            clock: function.clock.clone(),
            policy,
            link: life.try_provider().map(|mut provider| provider.link()),
            watched: life.generation(),
            watchdog: policy.watchdog.map(Watchdog::new),
            next_look: Duration::ZERO,
            attempts: Vec::new(),
            failed: 0,
            not_before: Duration::ZERO,
            given_up: None,
        }
    }

    /// Does what is due, and says how long nothing will be, unless the device breaks; none when the
    /// device was closed, asked back or dropped.
    ///
    /// Waits for the ladder of a device that is breaking, and as long as a recovery takes.
    pub fn look(&mut self) -> Option<Duration> {
        let inner = self.inner.upgrade()?;
        if inner.is_given_up() {
            return None;
        }
        let life = inner.life();
        let seen = if life.lifecycle().is_broken() {
            self.look_at_broken(&inner, &life)
        } else {
            Seen::Rest(self.look_at_live(&life))
        };
        match seen {
            Seen::Rest(pause) => Some(pause),
            Seen::End => None,
        }
    }

    fn look_at_live(&mut self, life: &Life) -> Duration {
        let now = self.clock.now();
        if life.generation() != self.watched {
            self.watched = life.generation();
            self.watchdog = self.policy.watchdog.map(Watchdog::new);
            self.failed = 0;
        }
        if now < self.next_look {
            return self.next_look.saturating_sub(now);
        }
        self.next_look = now + self.policy.interval;
        // Whoever has the provider may have to wait for the device, and is not waited for.
        let Some(mut provider) = life.try_provider() else {
            return self.policy.interval;
        };
        if let Err(gone) = provider.check_alive() {
            drop(provider);
            // A server that is lost says more than a register that nobody reads.
            let lost = life.function().transport.why_lost();
            let what = lost.unwrap_or_else(|| gone.to_string());
            life.break_device(Cause::Gone { what });
            return Duration::ZERO;
        }
        let link = provider.link();
        let sample = self
            .watchdog
            .is_some()
            .then(|| sample(&mut **provider, life, link));
        drop(provider);
        // A link of a life that ended meanwhile was read from private pages.
        if life.lifecycle().is_broken() {
            return Duration::ZERO;
        }
        if self.link.replace(link).is_some_and(|last| last != link) {
            self.events.push(DeviceEvent::Link(link));
        }
        let evidence = match (&mut self.watchdog, sample) {
            (Some(watchdog), Some(sample)) => watchdog.look(now, sample),
            _ => None,
        };
        if let Some(evidence) = evidence {
            life.note(Control::Watchdog, format_args!("{evidence}"));
            life.break_device(Cause::Stalled {
                what: evidence.to_string(),
            });
            return Duration::ZERO;
        }
        self.policy.interval
    }

    fn look_at_broken(&mut self, inner: &Inner, life: &Life) -> Seen {
        let generation = life.generation();
        let _released = inner.reclaim();
        if self.given_up == Some(generation) {
            return Seen::Rest(self.policy.interval);
        }
        let now = self.clock.now();
        if now < self.not_before {
            return Seen::Rest(self.not_before.saturating_sub(now));
        }
        let within = self.policy.within;
        self.attempts.retain(|&at| now.saturating_sub(at) < within);
        if self.attempts.len() >= self.policy.attempts as usize {
            return self.give_up(
                generation,
                format!(
                    "{} attempts to recover it within {within:?} were not enough",
                    self.policy.attempts
                ),
            );
        }
        self.attempts.push(now);
        match inner.recover() {
            Ok(_) => {
                self.failed = 0;
                self.not_before = Duration::ZERO;
                self.next_look = Duration::ZERO;
                Seen::Rest(Duration::ZERO)
            }
            // Its owner was faster.
            Err(RecoverError::NotBroken { .. }) => Seen::Rest(Duration::ZERO),
            Err(RecoverError::GivenUp { .. }) => Seen::End,
            Err(forever @ RecoverError::Detached { .. }) => {
                self.give_up(generation, forever.to_string())
            }
            Err(_) => {
                let doubled = 1u32.checked_shl(self.failed).unwrap_or(u32::MAX);
                let pause = self.policy.backoff.saturating_mul(doubled);
                let pause = pause.min(self.policy.longest_backoff);
                self.failed = self.failed.saturating_add(1);
                self.not_before = self.clock.now() + pause;
                Seen::Rest(pause)
            }
        }
    }

    fn give_up(&mut self, generation: Generation, why: String) -> Seen {
        self.given_up = Some(generation);
        self.events.push(DeviceEvent::GivenUp { generation, why });
        Seen::Rest(self.policy.interval)
    }
}

impl fmt::Debug for Duty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Duty")
            .field("policy", &self.policy)
            .field("watched", &self.watched)
            .finish_non_exhaustive()
    }
}

fn sample(provider: &mut dyn Provider, life: &Life, link: Link) -> Sample {
    let mut sample = Sample {
        link,
        paused: provider.is_paused(),
        counted: provider.statistics(),
        send: Vec::new(),
        receive: receive_positions(provider, life),
        began: life.receiving(),
        restarts: restarts(provider),
    };
    for queue in life.claims(Way::Send) {
        sample
            .send
            .extend(provider.tx_position(queue).map(|at| (queue, at)));
    }
    sample
}
