//! The flight recorder: the last [`EVENTS`] control events of a device, for whoever asks afterwards
//! how it came to break.
//!
//! A control event is one of the control path: nothing of a burst is recorded. Its room is allocated
//! at open. Recording allocates nothing and waits for nobody, so that the ladder can: an event that
//! finds the recorder taken is missed, and counted (R4.2).

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ladder::micros;

/// How many events are kept: the latest.
pub const EVENTS: usize = 64;
/// Bytes of an event's text; what is longer is cut.
const TEXT: usize = 118;
/// How often a recorder that another thread has, for as long as a copy takes, is asked again.
const ATTEMPTS: usize = 64;

/// Whose thread did it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ThreadKind {
    /// One of the program's own.
    #[default]
    Caller,
    /// The ladder's.
    Ladder,
    /// One that makes calls which can block, for the ladder or a close.
    Hand,
    /// The one that waits for what bus and kernel have to say.
    Watch,
    /// A supervisor's.
    Supervisor,
}

impl ThreadKind {
    /// The word that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Caller => "caller",
            Self::Ladder => "ladder",
            Self::Hand => "hand",
            Self::Watch => "watch",
            Self::Supervisor => "supervisor",
        }
    }

    /// Says of this thread what it is.
    pub(crate) fn is_this(self) {
        KIND.set(self);
    }
}

thread_local! {
    static KIND: Cell<ThreadKind> = const { Cell::new(ThreadKind::Caller) };
}

/// What kind of event it was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// The device is in another state: opened, broken, closed; or a verdict is in.
    State,
    /// A provider's command, and what came of it.
    Command,
    /// The command register was written and read back.
    Config,
    /// A reset, and what came of it.
    Reset,
    /// A step of the ladder ended.
    Step,
    /// A map or an unmap failed.
    Mapping,
    /// The bus, the kernel or a server had something to say.
    Notice,
    /// A recovery began or ended.
    Recovery,
    /// There is evidence that the device hangs, or was reset by somebody else.
    Watchdog,
}

impl Control {
    /// The word that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Command => "command",
            Self::Config => "config",
            Self::Reset => "reset",
            Self::Step => "step",
            Self::Mapping => "mapping",
            Self::Notice => "notice",
            Self::Recovery => "recovery",
            Self::Watchdog => "watchdog",
        }
    }
}

/// One event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FlightEvent {
    /// When, since the device was opened, in microseconds.
    #[serde(rename = "us", serialize_with = "micros")]
    pub at: Duration,
    /// On whose thread.
    pub thread: ThreadKind,
    /// Of which kind.
    pub event: Control,
    /// What, for people; at most 118 bytes.
    pub text: String,
}

impl fmt::Display for FlightEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>12} us  {:<10}  {:<8}  {}",
            self.at.as_micros(),
            self.thread.name(),
            self.event.name(),
            self.text
        )
    }
}

/// What the recorder has at one moment.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Recording {
    /// Oldest first.
    pub(crate) events: Vec<FlightEvent>,
    /// How many are missing because the recorder was taken.
    pub(crate) missed: u64,
}

/// The recorder.
#[derive(Debug)]
pub(crate) struct Flight {
    opened: Instant,
    ring: Mutex<Ring>,
    missed: AtomicU64,
}

#[derive(Debug)]
struct Ring {
    /// As many as there were, and then [`EVENTS`].
    entries: Vec<Entry>,
    /// Of so many, the oldest: what is replaced next.
    oldest: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Duration,
    thread: ThreadKind,
    event: Control,
    text: Text,
}

impl Flight {
    /// A recorder whose time begins now.
    pub(crate) fn new() -> Self {
        let entries = Vec::with_capacity(EVENTS);
        Self {
            opened: Instant::now(),
            ring: Mutex::new(Ring { entries, oldest: 0 }),
            missed: AtomicU64::new(0),
        }
    }

    /// Records an event of this thread's. Allocates nothing, and does not wait.
    pub(crate) fn note(&self, event: Control, what: fmt::Arguments<'_>) {
        let mut text = Text::default();
        // It cuts, and never fails.
        let _ = text.write_fmt(what);
        let entry = Entry {
            at: self.opened.elapsed(),
            thread: KIND.get(),
            event,
            text,
        };
        match self.ring() {
            Some(mut ring) => ring.put(entry),
            None => {
                self.missed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// A copy of what it has. Does not wait: without one, everything counts as missed.
    pub(crate) fn recording(&self) -> Recording {
        let missed = self.missed.load(Ordering::Relaxed);
        match self.ring() {
            Some(ring) => Recording {
                events: ring.in_order().map(Entry::event).collect(),
                missed,
            },
            None => Recording {
                events: Vec::new(),
                missed: missed.saturating_add(EVENTS as u64),
            },
        }
    }

    /// The ring, unless another thread has it for longer than a copy takes. A panic leaves no entry
    /// half written: they are put in by one assignment.
    fn ring(&self) -> Option<MutexGuard<'_, Ring>> {
        for _ in 0..ATTEMPTS {
            match self.ring.try_lock() {
                Ok(ring) => return Some(ring),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }
}

impl Ring {
    fn put(&mut self, entry: Entry) {
        if self.entries.len() < EVENTS {
            self.entries.push(entry);
        } else {
            self.entries[self.oldest] = entry;
            self.oldest = (self.oldest + 1) % EVENTS;
        }
    }

    fn in_order(&self) -> impl Iterator<Item = &Entry> {
        let (later, earlier) = self.entries.split_at(self.oldest);
        earlier.iter().chain(later)
    }
}

impl Entry {
    fn event(&self) -> FlightEvent {
        FlightEvent {
            at: self.at,
            thread: self.thread,
            event: self.event,
            text: self.text.to_string(),
        }
    }
}

/// Text of a bounded length, without memory of its own.
#[derive(Clone, Copy)]
struct Text {
    bytes: [u8; TEXT],
    len: usize,
    /// What comes now is left out.
    cut: bool,
}

impl Default for Text {
    fn default() -> Self {
        Self {
            bytes: [0; TEXT],
            len: 0,
            cut: false,
        }
    }
}

impl Text {
    fn as_str(&self) -> &str {
        // Cut between two characters only.
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let mut fits = more.len().min(TEXT - self.len);
        while !more.is_char_boundary(fits) {
            fits -= 1;
        }
        if self.cut {
            return Ok(());
        }
        self.cut = fits < more.len();
        self.bytes[self.len..self.len + fits].copy_from_slice(&more.as_bytes()[..fits]);
        self.len += fits;
        Ok(())
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        f.write_str(if self.cut { "\u{2026}" } else { "" })
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests;
