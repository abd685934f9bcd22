//! Interrupts as eventfds: MSI-X vectors, the error event (AER) and the request event.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rustix::io::ReadWriteFlags;

use crate::transport::{IrqError, IrqIndex, Transport};

/// One interrupt vector, or anything else that wakes a sleeper.
///
/// What this process signals goes through an eventfd that nobody else has. The one that the kernel
/// or a vfio-user server signals is *shared*: O_NONBLOCK belongs to the open file, not to the
/// descriptor, so that a server can take it away, empty the counter under a reader and fill it up
/// under a writer. It is never written to here, and read without relying on that flag.
#[derive(Debug)]
pub struct Event {
    own: EventFd,
    /// What an interrupt is routed to.
    shared: Option<EventFd>,
}

impl Event {
    /// An event that nothing signals yet, and only this process can.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            own: eventfd()?,
            shared: None,
        })
    }

    /// An event that an interrupt can be routed to, too.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    fn routable() -> io::Result<Self> {
        Ok(Self {
            own: eventfd()?,
            shared: Some(eventfd()?),
        })
    }

    /// Wakes whoever waits, as the device would. Does not block, whatever a server does.
    pub fn signal(&self) {
        // A full counter is signalled already.
        let _ = self.own.write(1);
    }

    /// Takes what was signalled since the last call. Does not block, whatever a server does.
    #[must_use]
    pub fn take(&self) -> bool {
        let own = self.own.read().is_ok();
        self.shared.as_ref().is_some_and(take_now) || own
    }

    /// Waits until it is signalled, at most `timeout` (for ever without one), and takes it.
    /// False when time was up, a signal handler ran, or somebody else took it first.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        Ok(!wait_any(&[self], None, timeout)?.signalled.is_empty())
    }

    fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(&self.own), self.shared.as_ref()]
            .into_iter()
            .flatten()
            .map(AsFd::as_fd)
    }
}

fn eventfd() -> io::Result<EventFd> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    Ok(EventFd::from_flags(flags)?)
}

/// Reads a counter that somebody else can read, fill and make blocking.
fn take_now(shared: &EventFd) -> bool {
    /// "At the file's own position", which an eventfd does not have.
    const NO_OFFSET: u64 = u64::MAX;
    let mut counter = [0; 8];
    let into = &mut [IoSliceMut::new(&mut counter)];
    match rustix::io::preadv2(shared, into, NO_OFFSET, ReadWriteFlags::NOWAIT) {
        Ok(_) => true,
        // Before Linux 5.12 an eventfd does not know the flag.
        Err(rustix::io::Errno::OPNOTSUPP) => shared.read().is_ok(),
        Err(_) => false,
    }
}

/// What a wait ended with: nothing when time was up, a signal handler ran, or somebody else took
/// what was signalled first.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Woken {
    /// Which events were signalled, ascending, and taken.
    pub signalled: Vec<usize>,
    /// The lifeline hung up.
    pub ended: bool,
}

/// Waits until one of `events` is signalled or `lifeline`
/// ([`Transport::lifeline`]) hangs up, at most `timeout`
/// (for ever without one). Takes everything that is signalled, so that an event that never rests
/// hides no other.
///
/// # Errors
///
/// When the kernel refuses to wait.
pub fn wait_any(
    events: &[&Event],
    lifeline: Option<BorrowedFd<'_>>,
    timeout: Option<Duration>,
) -> io::Result<Woken> {
    let timeout = match timeout {
        // Rounded up, so that a short wait does not become a busy loop.
        Some(time) => {
            PollTimeout::try_from(time.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX)
        }
        None => PollTimeout::NONE,
    };
    let mut watched: Vec<PollFd<'_>> = events
        .iter()
        .flat_map(|event| event.files())
        .map(|file| PollFd::new(file, PollFlags::POLLIN))
        // A hang-up is told without being asked for.
        .chain(lifeline.map(|end| PollFd::new(end, PollFlags::empty())))
        .collect();
    match poll(&mut watched, timeout) {
        Ok(0) | Err(Errno::EINTR) => Ok(Woken::default()),
        Ok(_) => Ok(Woken {
            signalled: (0..events.len()).filter(|&n| events[n].take()).collect(),
            ended: lifeline.is_some()
                && watched.last().and_then(PollFd::revents) != Some(PollFlags::empty()),
        }),
        Err(errno) => Err(errno.into()),
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
            Event::routable().map(Arc::new).map_err(|source| IrqError {
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
            let shared: Vec<_> = event.shared.iter().map(AsFd::as_fd).collect();
            transport.set_irqs(index, 0, &shared)?;
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
        let shared = self
            .vectors
            .iter()
            .filter_map(|event| event.shared.as_ref());
        let fds: Vec<BorrowedFd<'_>> = shared.map(AsFd::as_fd).collect();
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
        let now = || {
            wait_any(&events, None, Some(Duration::ZERO))
                .unwrap()
                .signalled
        };
        assert_eq!(now(), [0; 0]);
        assert!(function.fire(IrqIndex::Request, 0));
        assert_eq!(now(), [1]);
        wake.signal();
        assert!(function.fire(IrqIndex::Error, 0));
        assert_eq!((now(), now()), (vec![0, 2], vec![]));
    }

    /// A storm of one kind of event must not starve the others (C15: an unbind waits for Request).
    #[test]
    fn c15_an_event_that_never_rests_hides_no_other() {
        let (function, interrupts) = routed();
        let (error, request) = (interrupts.error().unwrap(), interrupts.request().unwrap());
        assert!(function.fire(IrqIndex::Error, 0));
        assert!(function.fire(IrqIndex::Request, 0));
        let woken = wait_any(&[&**error, &**request], None, Some(Duration::ZERO)).unwrap();
        assert_eq!(woken.signalled, [0, 1]);
    }

    /// What a server has of an event: a descriptor of the same open file, as SCM_RIGHTS gives it.
    fn servers_end(event: &Event) -> std::fs::File {
        let shared = event.shared.as_ref().unwrap();
        shared.as_fd().try_clone_to_owned().unwrap().into()
    }

    fn made_blocking() -> (Event, std::fs::File) {
        let event = Event::routable().unwrap();
        let server = servers_end(&event);
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
        nix::fcntl::fcntl(&server, flags).unwrap();
        (event, server)
    }

    /// Whether a call returns: one that does not leaves its thread behind.
    fn returns(call: impl FnOnce() + Send + 'static) -> bool {
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            call();
            let _ = done.send(());
        });
        wait.recv_timeout(Duration::from_secs(10)).is_ok()
    }

    /// The ladder wakes the sleepers on its own thread, which has no deadline for it.
    #[test]
    fn c40_a_server_that_fills_the_counter_blocks_no_wake() {
        use std::io::Write as _;
        let (event, mut server) = made_blocking();
        server.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(returns(move || event.signal()));
    }

    #[test]
    fn c40_a_server_that_empties_the_counter_blocks_no_reader() {
        let (event, _server) = made_blocking();
        assert!(returns(move || assert!(!event.take())));
    }

    /// Its own wakes come through, whatever the server does to what it was sent.
    #[test]
    fn c40_a_server_cannot_take_a_wake_of_ours() {
        let (event, server) = made_blocking();
        event.signal();
        let mut poll_server = [PollFd::new(server.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut poll_server, PollTimeout::ZERO), Ok(0));
        assert!(event.wait(None).unwrap());
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
