//! The watch: a thread per device that waits for what the bus and the kernel have to say of it.
//!
//! An uncorrectable error on the bus (AER) breaks the device at once (C16), and so does the end of its
//! vfio-user server, so that nobody sleeps on for what cannot come. A request for the
//! function (an unbind, a removal) closes it on behalf of its owner, within a deadline, and lets go
//! of every descriptor and every mapped register, whoever still holds objects of it, so that the
//! kernel, which waits, goes on (C15).
//!
//! A device that was gone at the end of its ladder may come back with bus mastering on, and nobody need
//! look at it again: the known command word is written once more each second, until it is seen to
//! take, for ten minutes (C47).
//!
//! A function that was reset by somebody else, without a notice (a virtual function whose physical
//! one was reset, an administrator's write to sysfs), has forgotten its queues, and reads as idle:
//! the register that shows each reset is looked at now and then (C18).
//!
//! The thread keeps nothing of the device alive while it waits, and ends with it.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use failstop_pci::fork::Process;
use failstop_pci::interrupts::{Event, wait_any};
use failstop_queues::lifecycle::Cause;

use crate::device::{Inner, end_life, out_of_reach};
use crate::events::{DeviceEvent, Events};
use crate::flight::{Control, ThreadKind};
use crate::ladder::{Function, Hand};
use crate::life::Life;

/// What is done when the function is asked back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Removal {
    /// The device is closed and the function given back, as
    /// [`Device::give_back`](crate::device::Device::give_back) does, whatever its owner does
    /// meanwhile: an unbind returns. Objects that are held become shells.
    #[default]
    Close,
    /// The owner is told, by [`DeviceEvent::RemovalRequested`], and no more; again each time that
    /// the kernel asks, which is every ten seconds. Until he calls
    /// [`Device::give_back`](crate::device::Device::give_back), or drops the device and every object
    /// of it, an unbind waits.
    Tell,
}

/// Between two writes to a device whose bus mastering was not seen to be off.
const BETWEEN_WRITES: Duration = Duration::from_secs(1);
/// How many there are: ten minutes of them.
const WRITES: u32 = 600;

/// Whom the watch acts for. Nothing of it is kept alive.
#[derive(Default)]
struct Seat {
    inner: Weak<Inner>,
    /// The present life: objects keep it when the device's handle is gone.
    life: Mutex<Weak<Life>>,
    /// Error events so far; counted before the life that they break is looked up.
    errors: AtomicU64,
}

/// The watch over one function: ends with it.
#[derive(Debug)]
pub(crate) struct Watch {
    seat: Arc<Seat>,
    bell: Arc<Event>,
    /// Bus mastering was not seen to be off at a ladder's end.
    still_on: Arc<Event>,
    thread: Option<JoinHandle<()>>,
    /// Whose thread it is: a child of fork has none.
    process: Process,
}

impl Watch {
    /// Begins to watch the function of `inner`.
    ///
    /// # Errors
    ///
    /// When there is no thread or descriptor for it.
    pub(crate) fn new(
        inner: Weak<Inner>,
        life: &Arc<Life>,
        removal: Removal,
        look: Option<Duration>,
    ) -> io::Result<Self> {
        let function = life.function();
        let bell = Arc::new(Event::new()?);
        let still_on = Arc::new(Event::new()?);
        let seat = Arc::new(Seat {
            inner,
            life: Mutex::new(Arc::downgrade(life)),
            errors: AtomicU64::new(0),
        });
        let watcher = Watcher {
            seat: seat.clone(),
            bell: bell.clone(),
            still_on: still_on.clone(),
            lifeline: function.transport.lifeline(),
            error: function.interrupts.error().cloned(),
            request: function.interrupts.request().cloned(),
            events: function.events.clone(),
            removal,
            looks: Rounds::every(look),
            writes: Rounds::default(),
        };
        let named = thread::Builder::new().name("watch".to_owned());
        let thread = named.spawn(move || watcher.run())?;
        Ok(Self {
            seat,
            bell,
            still_on,
            thread: Some(thread),
            process: Process::this(),
        })
    }

    /// A new life began: errors break that one from now on.
    pub(crate) fn follow(&self, life: &Arc<Life>) {
        *self.seat.life() = Arc::downgrade(life);
    }

    /// Looks after a device whose bus mastering was not seen to be off.
    pub(crate) fn is_perhaps_on(&self) {
        self.still_on.signal();
    }

    /// How many error events there were. One that is not among them when a life is followed breaks
    /// that life.
    pub(crate) fn errors(&self) -> u64 {
        let _ordered = self.seat.life();
        self.seat.errors.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A child of fork shares the bell with its parent, and must not ring it.
            return;
        }
        self.bell.signal();
        let Some(thread) = self.thread.take() else {
            return;
        };
        // It drops the device itself when it was the last to hold it.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            log::error!("a watch's thread panicked");
        }
    }
}

impl Seat {
    fn life(&self) -> std::sync::MutexGuard<'_, Weak<Life>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").finish_non_exhaustive()
    }
}

/// What the thread has.
struct Watcher {
    seat: Arc<Seat>,
    bell: Arc<Event>,
    still_on: Arc<Event>,
    lifeline: Option<Arc<dyn AsFd + Send + Sync>>,
    error: Option<Arc<Event>>,
    request: Option<Arc<Event>>,
    events: Arc<Events>,
    removal: Removal,
    /// At whether the function was reset.
    looks: Rounds,
    /// To a device whose bus mastering was not seen to be off.
    writes: Rounds,
}

/// Something that is done now and then, whatever else the thread is woken by.
#[derive(Clone, Copy, Default, Debug)]
struct Rounds {
    between: Duration,
    /// None when it is not.
    next: Option<Instant>,
    /// How often yet.
    left: u32,
}

impl Rounds {
    fn every(between: Option<Duration>) -> Self {
        between.map_or_else(Self::default, |between| Self::times(u32::MAX, between))
    }

    fn times(left: u32, between: Duration) -> Self {
        Self {
            between,
            next: Instant::now().checked_add(between),
            left,
        }
    }

    /// Whether it is to be done at `now`. Not made up for, when it was late.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.next.is_some_and(|next| next <= now);
        if due {
            self.left = self.left.saturating_sub(1);
            self.next = (self.left > 0)
                .then(|| now.checked_add(self.between))
                .flatten();
        }
        due
    }

    fn pause(&self, now: Instant) -> Option<Duration> {
        Some(self.next?.saturating_duration_since(now))
    }
}

/// What the thread was woken by.
#[derive(Clone, Copy)]
enum Woken {
    Bell,
    StillOn,
    Error,
    Request,
}

impl Watcher {
    fn run(mut self) {
        ThreadKind::Watch.is_this();
        let (bell, error, request) = (self.bell.clone(), self.error.clone(), self.request.clone());
        let still_on = self.still_on.clone();
        let mut watched = vec![(Woken::Bell, &*bell), (Woken::StillOn, &*still_on)];
        watched.extend(error.as_deref().map(|event| (Woken::Error, event)));
        watched.extend(request.as_deref().map(|event| (Woken::Request, event)));
        let events: Vec<&Event> = watched.iter().map(|&(_, event)| event).collect();
        loop {
            let lifeline = self.lifeline.clone();
            let now = Instant::now();
            let pauses = [self.looks.pause(now), self.writes.pause(now)];
            let pause = pauses.into_iter().flatten().min();
            let woken = match wait_any(&events, lifeline.as_deref().map(AsFd::as_fd), pause) {
                Ok(woken) => woken,
                Err(error) => {
                    log::error!("errors and requests of a device are not seen any more: {error}");
                    return;
                }
            };
            if woken.ended {
                self.lifeline = None;
                self.break_lost();
            }
            for first in woken.signalled {
                match watched[first].0 {
                    Woken::Bell => return,
                    Woken::StillOn => self.writes = Rounds::times(WRITES, BETWEEN_WRITES),
                    Woken::Error => {
                        self.seat.errors.fetch_add(1, Ordering::AcqRel);
                        self.note(format_args!("the bus reported an error"));
                        self.break_life(Cause::BusError);
                    }
                    Woken::Request => {
                        self.note(format_args!("the function is asked back"));
                        self.events.push(DeviceEvent::RemovalRequested);
                        if self.removal == Removal::Close {
                            return self.remove();
                        }
                    }
                }
            }
            // Also under a storm of events, which would let no wait come to its end.
            let now = Instant::now();
            if self.writes.is_due(now) && self.write_off() {
                self.writes = Rounds::default();
            }
            if self.looks.is_due(now) {
                self.look();
            }
        }
    }

    fn note(&self, what: fmt::Arguments<'_>) {
        if let Some(life) = self.seat.life().upgrade() {
            life.note(Control::Notice, what);
        }
    }

    /// Breaks a device that was reset by somebody else.
    fn look(&self) {
        let Some(life) = self.seat.life().upgrade() else {
            return;
        };
        if let Err(reading) = life.check_not_reset() {
            life.note(Control::Watchdog, format_args!("{reading}"));
            life.break_device(Cause::Reset {
                what: reading.to_string(),
            });
        }
    }

    /// Writes the known command word to a device that is broken; whether no more need be written.
    fn write_off(&self) -> bool {
        let Some(life) = self.seat.life().upgrade() else {
            return true;
        };
        let function = life.function();
        // Whoever turns it on does so under the gate, on a life that is not broken.
        let off = function.gate.shut(|| {
            life.lifecycle()
                .is_broken()
                .then(|| function.master_off().is_ok())
        });
        if off == Some(true) {
            life.note(
                Control::Notice,
                format_args!("it answers again, bus mastering is off"),
            );
            log::warn!("{}: answers again, its bus mastering is off", life.name());
        }
        off.unwrap_or(true)
    }

    /// The server is gone; who ended the connection because of what it did knows more.
    fn break_lost(&self) {
        let life = self.seat.life().upgrade();
        if let Some(life) = life {
            let known = life.function().transport.why_lost();
            let what = known
                .unwrap_or_else(|| "the vfio-user server closed the connection, or died".into());
            life.note(Control::Notice, format_args!("{what}"));
            life.break_device(Cause::Gone { what });
        }
    }

    fn break_life(&self, cause: Cause) {
        let life = self.seat.life().upgrade();
        if let Some(life) = life {
            life.break_device(cause);
        }
    }

    fn remove(&self) {
        let inner = self.seat.inner.upgrade();
        let life = match &inner {
            Some(inner) => Some(inner.life()),
            None => self.seat.life().upgrade(),
        };
        if let Some(life) = life {
            give_back(inner, &life);
        }
    }
}

/// Closes the device, whoever holds objects of it, and lets go of its function: from the return of
/// this call on nothing of this process refers to it, unless the kernel held a call up beyond its
/// deadline, and then from that call's return on.
///
/// The orderly close has [`Deadlines::close`](crate::ladder::Deadlines::close); past it the ladder
/// ends the device.
pub(crate) fn give_back(inner: Option<Arc<Inner>>, life: &Arc<Life>) {
    if !life.is_ours() {
        return;
    }
    let function = life.function().clone();
    let deadlines = function.deadlines;
    let mut hand = match Hand::new("removal") {
        Ok(hand) => hand,
        Err(error) => {
            // Without a deadline rather than not at all.
            log::warn!("no thread to close a device with: {error}");
            life.break_device(Cause::Removal);
            let _ = life.verdict();
            return let_go(&function, life);
        }
    };
    let close = {
        let (inner, life) = (inner.clone(), life.clone());
        move || match inner {
            Some(inner) => drop(inner.close(Cause::Removal)),
            None => end_life(&life, Cause::Removal),
        }
    };
    // A life that began meanwhile is the one that ended.
    let present = || {
        inner
            .as_ref()
            .map_or_else(|| life.clone(), |inner| inner.life())
    };
    if hand.call(&*function.clock, deadlines.close, close).is_err() {
        log::warn!(
            "{}: not closed within {:?}: its ladder ends it",
            function.transport.name(),
            deadlines.close
        );
        if let Some(inner) = &inner {
            inner.give_up(Cause::Removal);
        }
        let life = present();
        life.break_device(Cause::Removal);
        let _ = life.verdict();
    }
    let_go_in_time(&mut hand, function, present());
}

/// Lets go of the function of a device that was closed, and that cannot be opened again as it is.
/// Once the kernel says that it left its address space, nothing there is within its reach (R3, the
/// end of the domain).
pub(crate) fn let_go_for_good(inner: &Inner) {
    let (function, life) = (inner.function().clone(), inner.life());
    match Hand::new("close") {
        Ok(mut hand) => let_go_in_time(&mut hand, function, life),
        Err(error) => log::warn!(
            "{}: no thread to let go of it with: {error}; its memory is kept",
            life.name()
        ),
    }
}

fn let_go_in_time(hand: &mut Hand, function: Arc<Function>, life: Arc<Life>) {
    let wait = function
        .deadlines
        .detach
        .saturating_add(function.deadlines.reset);
    let clock = function.clock.clone();
    let name = function.transport.name().to_owned();
    if hand
        .call(&*clock, wait, move || let_go(&function, &life))
        .is_err()
    {
        log::warn!(
            "{name}: the kernel has not let go of it after {wait:?}; an unbind waits until it does"
        );
    }
}

/// Closes what refers to the function: mapped registers, then descriptors. May block in the kernel
/// for as long as a reset takes. What is in quarantine goes, where the kernel says that this took the
/// function out of its address space.
fn let_go(function: &Function, life: &Life) {
    for window in [life.window(), &function.window] {
        if let Err(error) = window.detach() {
            log::error!("a window could not be detached, and keeps the function: {error}");
        }
    }
    let left = function.transport.hang_up();
    if let Some(settled) = left.and_then(|left| function.space.settle_left(&left)) {
        out_of_reach(life, settled, "the kernel took it out of its address space");
    }
    function.events.push(DeviceEvent::Removed);
}
