//! Interrupts as eventfds: MSI-X vectors, the error event (AER) and the request event.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::transport::{IrqError, IrqIndex, Transport};

/// One interrupt vector, or anything else that wakes a sleeper.
#[derive(Debug)]
pub struct Event {
    fd: EventFd,
}

impl Event {
    /// An event that nothing signals yet.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fd: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Wakes whoever waits, as the device would.
    pub fn signal(&self) {
        // A full counter is signalled already.
        let _ = self.fd.write(1);
    }

    /// Takes what was signalled since the last call.
    #[must_use]
    pub fn take(&self) -> bool {
        self.fd.read().is_ok()
    }

    /// Waits until it is signalled, at most `timeout` (for ever without one), and takes it.
    /// False when time was up or a signal handler ran.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        Ok(wait_any(&[self], timeout)?.is_some())
    }
}

/// Waits until one of `events` is signalled, at most `timeout` (for ever without one), and takes
/// it: the index of the first that is. None when time was up, a signal handler ran, or another
/// thread took it first.
///
/// # Errors
///
/// When the kernel refuses to wait.
pub fn wait_any(events: &[&Event], timeout: Option<Duration>) -> io::Result<Option<usize>> {
    let timeout = match timeout {
        // Rounded up, so that a short wait does not become a busy loop.
        Some(time) => {
            PollTimeout::try_from(time.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX)
        }
        None => PollTimeout::NONE,
    };
    let mut watched: Vec<PollFd<'_>> = events
        .iter()
        .map(|event| PollFd::new(event.fd.as_fd(), PollFlags::POLLIN))
        .collect();
    match poll(&mut watched, timeout) {
        Ok(0) | Err(Errno::EINTR) => Ok(None),
        Ok(_) => Ok(events.iter().position(|event| event.take())),
        Err(errno) => Err(errno.into()),
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The interrupts of one function, routed to events until dropped.
#[derive(Debug)]
pub struct Interrupts {
    transport: Arc<dyn Transport>,
    vectors: Vec<Arc<Event>>,
    error: Option<Arc<Event>>,
    request: Option<Arc<Event>>,
}

impl Interrupts {
    /// Routes the first `vectors` MSI-X vectors (fewer where the function has fewer), and the error
    /// and request events where the transport has them.
    ///
    /// # Errors
    ///
    /// [`IrqError`]; nothing is routed then.
    pub fn route(transport: Arc<dyn Transport>, vectors: u32) -> Result<Self, IrqError> {
        let event = |index, first| {
            Event::new().map(Arc::new).map_err(|source| IrqError {
                device: transport.name().to_owned(),
                index,
                first,
                source,
            })
        };
        let count = vectors.min(transport.irq_count(IrqIndex::Msix));
        let vectors = (0..count)
            .map(|n| event(IrqIndex::Msix, n))
            .collect::<Result<Vec<_>, _>>()?;
        let mut interrupts = Self {
            transport: transport.clone(),
            vectors,
            error: None,
            request: None,
        };
        interrupts.enable_vectors()?;
        let single = |index| -> Result<Option<Arc<Event>>, IrqError> {
            if transport.irq_count(index) == 0 {
                return Ok(None);
            }
            let event = event(index, 0)?;
            transport.set_irqs(index, 0, &[event.as_fd()])?;
            Ok(Some(event))
        };
        interrupts.error = single(IrqIndex::Error)?;
        interrupts.request = single(IrqIndex::Request)?;
        Ok(interrupts)
    }

    /// The event of MSI-X vector `n`, where there is one.
    #[must_use]
    pub fn vector(&self, n: u32) -> Option<&Arc<Event>> {
        self.vectors.get(n as usize)
    }

    /// Signalled when the bus reports an uncorrectable error of the function.
    #[must_use]
    pub fn error(&self) -> Option<&Arc<Event>> {
        self.error.as_ref()
    }

    /// Signalled when the kernel or the server wants the function back.
    #[must_use]
    pub fn request(&self) -> Option<&Arc<Event>> {
        self.request.as_ref()
    }

    /// Signals every vector's event: whoever sleeps on one wakes, though no message comes any more
    /// (C40).
    pub fn wake_all(&self) {
        self.vectors.iter().for_each(|event| event.signal());
    }

    /// Routes the vectors to their events, also again after [`Interrupts::disable_vectors`].
    ///
    /// # Errors
    ///
    /// [`IrqError`].
    pub fn enable_vectors(&self) -> Result<(), IrqError> {
        if self.vectors.is_empty() {
            return Ok(());
        }
        let fds: Vec<BorrowedFd<'_>> = self.vectors.iter().map(|event| event.as_fd()).collect();
        self.transport.set_irqs(IrqIndex::Msix, 0, &fds)
    }

    /// Disables the vectors; the error and request events stay [R4.3].
    ///
    /// # Errors
    ///
    /// [`IrqError`].
    pub fn disable_vectors(&self) -> Result<(), IrqError> {
        if self.vectors.is_empty() {
            return Ok(());
        }
        self.transport.set_irqs(IrqIndex::Msix, 0, &[])
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        let mut routed = Vec::new();
        if !self.vectors.is_empty() {
            routed.push(IrqIndex::Msix);
        }
        routed.extend(self.error.is_some().then_some(IrqIndex::Error));
        routed.extend(self.request.is_some().then_some(IrqIndex::Request));
        for index in routed {
            if let Err(error) = self.transport.set_irqs(index, 0, &[]) {
                log::debug!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeFunction, limits_39_bits};

    fn routed() -> (Arc<FakeFunction>, Interrupts) {
        let function = FakeFunction::new(limits_39_bits()).unwrap();
        let function = Arc::new(function.with_interrupts(2));
        let interrupts = Interrupts::route(function.clone(), 2).unwrap();
        (function, interrupts)
    }

    /// No message comes from a broken device (R4.1).
    #[test]
    fn c40_every_sleeper_is_woken_without_an_interrupt() {
        let (_function, interrupts) = routed();
        std::thread::scope(|scope| {
            let sleepers = [0, 1].map(|n| {
                let event = interrupts.vector(n).unwrap();
                scope.spawn(|| event.wait(None).unwrap())
            });
            interrupts.wake_all();
            for sleeper in sleepers {
                assert!(sleeper.join().unwrap());
            }
        });
    }

    #[test]
    fn error_and_request_stay_armed_when_the_vectors_are_disabled() {
        let (function, interrupts) = routed();
        interrupts.disable_vectors().unwrap();
        assert!(!function.fire(IrqIndex::Msix, 0));
        assert!(function.fire(IrqIndex::Error, 0));
        assert!(function.fire(IrqIndex::Request, 0));
        assert!(interrupts.error().unwrap().take());
        assert!(interrupts.request().unwrap().take());
    }

    #[test]
    fn one_wait_watches_several_events() {
        let (function, interrupts) = routed();
        let wake = Event::new().unwrap();
        let (error, request) = (interrupts.error().unwrap(), interrupts.request().unwrap());
        let events = [&**error, &**request, &wake];
        let now = || wait_any(&events, Some(Duration::ZERO)).unwrap();
        assert_eq!(now(), None);
        assert!(function.fire(IrqIndex::Request, 0));
        assert_eq!(now(), Some(1));
        wake.signal();
        assert!(function.fire(IrqIndex::Error, 0));
        assert_eq!((now(), now(), now()), (Some(0), Some(2), None));
    }

    #[test]
    fn a_signalled_event_wakes_once() {
        let event = Event::new().unwrap();
        event.signal();
        event.signal();
        assert!(event.wait(None).unwrap());
        assert!(!event.wait(Some(Duration::ZERO)).unwrap());
    }

    #[test]
    fn a_sleeper_is_woken_by_another_thread() {
        let event = Event::new().unwrap();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| event.wait(None).unwrap());
            event.signal();
            assert!(sleeper.join().unwrap());
        });
    }
}
