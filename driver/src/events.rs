//! What happened to a device, for its owner.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use failstop_pci::id::Generation;
use failstop_pci::interrupts::Event;
use failstop_queues::lifecycle::Cause;

use crate::device::RecoveryReport;
use crate::provider::Link;

/// Something that happened to a device.
#[derive(Clone, PartialEq, Debug)]
pub enum DeviceEvent {
    /// It was broken: its ladder runs.
    Broken {
        /// Which of its lives ends.
        generation: Generation,
        /// Why.
        cause: Cause,
    },
    /// It cannot be started again until a reset of it is proven
    /// ([`Device::recover`](crate::device::Device::recover) tries).
    Fenced {
        /// Which of its lives ended.
        generation: Generation,
    },
    /// A new life began.
    Recovered {
        /// Which.
        generation: Generation,
        /// What was done, and how long it took.
        report: RecoveryReport,
    },
    /// An attempt to recover it failed.
    RecoveryFailed {
        /// Which of its lives ended.
        generation: Generation,
        /// Why, for people.
        why: String,
    },
    /// A supervisor used up its attempts: the device stays as it is, until its owner recovers it.
    GivenUp {
        /// Which of its lives ended.
        generation: Generation,
        /// Why, for people.
        why: String,
    },
    /// The link changed: seen by a [`Supervisor`](crate::supervisor::Supervisor).
    Link(Link),
    /// It is asked back: it is being unbound or removed.
    RemovalRequested,
    /// It was given up: everything of it is closed, and an unbind that waited goes on.
    Removed,
}

/// The most events that are kept for an owner who does not look.
const KEPT: usize = 1024;

/// The events of one device, in order.
#[derive(Debug)]
pub struct Events {
    queue: Mutex<VecDeque<DeviceEvent>>,
    bell: Event,
    /// Those of supervisors.
    bells: Mutex<Vec<Weak<Event>>>,
}

impl Events {
    /// None so far.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            queue: Mutex::default(),
            bell: Event::new()?,
            bells: Mutex::default(),
        }))
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<DeviceEvent>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, event: DeviceEvent) {
        {
            let mut queue = self.queue();
            if queue.len() == KEPT {
                queue.pop_front();
            }
            queue.push_back(event);
        }
        self.bell.signal();
        for bell in self.bells().iter().filter_map(Weak::upgrade) {
            bell.signal();
        }
    }

    fn bells(&self) -> MutexGuard<'_, Vec<Weak<Event>>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Signals `bell`, too, whenever something happens, until it is dropped.
    pub(crate) fn add_bell(&self, bell: &Arc<Event>) {
        let mut bells = self.bells();
        bells.retain(|bell| bell.strong_count() > 0);
        bells.push(Arc::downgrade(bell));
    }

    /// The oldest event that was not taken yet.
    #[must_use]
    pub fn try_next(&self) -> Option<DeviceEvent> {
        self.queue().pop_front()
    }

    /// Waits for an event, at most `timeout`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait.
    pub fn next(&self, timeout: Duration) -> io::Result<Option<DeviceEvent>> {
        let end = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.try_next() {
                return Ok(Some(event));
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            self.bell.wait(left)?;
        }
    }
}
