//! The loop that serves one device: messages, frames, commands from the control socket and time, on
//! one thread, which sleeps when there is nothing to do.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::connection::{Closed, Connection};
use super::fork;
use super::handler::{Outcome, Service};
use super::irqs::Notice;
use super::replies::Replies;
use crate::faults::fault::Messages;
use crate::faults::{Fault, Spec};
use crate::host::Host;
use crate::stats::{LogEntry, Stats};

/// Messages handled before frames and commands get their turn.
const MESSAGES: usize = 64;
/// Frames taken from the wire before messages get their turn.
const FRAMES: usize = 256;

/// How soon frames that wait for room at a datagram socket are tried again.
const RETRY: Duration = Duration::from_millis(1);

/// How long a port may take to answer the control socket.
const ANSWER: Duration = Duration::from_secs(5);

/// What the control socket asks of a port.
#[derive(Debug)]
pub enum Request {
    /// Everything that is counted.
    Stats(Sender<Stats>),
    /// Sets every counter to 0.
    ResetCounters,
    /// Plugs or pulls the cable.
    Link(bool),
    /// Tells the client of an error, or asks it for the function.
    Notice(Notice),
    /// Makes the device or its server misbehave.
    Fault(Spec),
    /// Ends all misbehaviour.
    ClearFaults,
    /// Switches the device off and on.
    PowerCycle,
    /// Puts a mark into the log.
    Phase(String),
    /// The latest lines of the log.
    Log(usize, Sender<Vec<LogEntry>>),
    /// Ends the port.
    Stop,
}

/// How the control socket reaches a port.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: Sender<Request>,
    wake: Arc<OwnedFd>,
}

impl Handle {
    /// Hands a request over; false when the port has ended.
    pub fn send(&self, request: Request) -> bool {
        let sent = self.requests.send(request).is_ok();
        let _full = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        sent
    }

    /// Everything that the port counts; none when it has ended or does not answer.
    #[must_use]
    pub fn stats(&self) -> Option<Stats> {
        let (sender, receiver) = mpsc::channel();
        self.send(Request::Stats(sender));
        receiver.recv_timeout(ANSWER).ok()
    }

    /// The latest accesses that faults made, so many at most, oldest first; none when the port has
    /// ended or does not answer.
    #[must_use]
    pub fn log(&self, lines: usize) -> Option<Vec<LogEntry>> {
        let (sender, receiver) = mpsc::channel();
        self.send(Request::Log(lines, sender));
        receiver.recv_timeout(ANSWER).ok()
    }
}

/// Why a port ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It was told to.
    Stopped,
    /// The fault `server-dies`.
    Died,
}

/// A device on a socket.
#[derive(Debug)]
pub struct Port {
    service: Service,
    listener: UnixListener,
    connection: Option<Connection>,
    requests: Receiver<Request>,
    wake: Arc<OwnedFd>,
    /// When the message that waits may be handled (fault `server-slow`).
    not_before: Option<Duration>,
    replies: Replies,
    /// Whether this is a process of its own, which may have children.
    may_fork: bool,
    child: Option<fork::Child>,
}

/// What one round of the loop leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Something to do at once.
    Again,
    /// Nothing until something happens.
    Wait,
}

/// Why a client is served no longer.
enum Ended {
    /// Its connection is over.
    Closed(Closed),
    /// The server dies.
    Dead,
}

impl From<Closed> for Ended {
    fn from(closed: Closed) -> Self {
        Self::Closed(closed)
    }
}

impl Port {
    /// Serves `service` on `listener`.
    ///
    /// # Errors
    ///
    /// When no eventfd can be made, or the listener cannot be made non-blocking.
    pub fn new(service: Service, listener: UnixListener) -> io::Result<(Self, Handle)> {
        listener.set_nonblocking(true)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (sender, requests) = mpsc::channel();
        let handle = Handle {
            requests: sender,
            wake: Arc::clone(&wake),
        };
        let port = Self {
            service,
            listener,
            connection: None,
            requests,
            wake,
            not_before: None,
            replies: Replies::default(),
            may_fork: false,
            child: None,
        };
        Ok((port, handle))
    }

    /// Lets the fault `server-forks` happen: the process is the emulator's own.
    pub const fn allow_fork(&mut self) {
        self.may_fork = true;
    }

    /// Serves until told to stop.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait.
    pub fn serve(mut self) -> io::Result<End> {
        loop {
            if let Some(end) = self.requests() {
                return Ok(end);
            }
            if self.has(Fault::ServerDies(None)) {
                return Ok(End::Died);
            }
            self.service.misbehave();
            self.fork();
            let messages = match self.messages() {
                Some(next) => next,
                None => return Ok(End::Died),
            };
            let frames = self.frames();
            let more = self.service.device.run(&mut self.service.world);
            if !more && messages == Next::Wait && frames == Next::Wait {
                self.wait()?;
            }
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.service.device.faults().has(fault)
    }

    fn delay(&self) -> Option<Duration> {
        let faults = self.service.device.faults();
        faults.find(|fault| match fault {
            Fault::ServerSlow(delay) => Some(delay),
            _ => None,
        })
    }

    /// Whether no message is taken at all.
    fn hangs(&self) -> bool {
        self.has(Fault::ServerHangs(Messages::ALL))
    }

    fn fork(&mut self) {
        if !self.has(Fault::ServerForks) {
            return;
        }
        self.service.device.end_fault(Fault::ServerForks);
        if !self.may_fork {
            log::warn!("server-forks needs an emulator in a process of its own");
            return;
        }
        let Some(largest) = self.service.world.memory.largest() else {
            log::warn!("server-forks needs memory that the client has mapped and sealed");
            return;
        };
        match fork::Child::start(largest) {
            Ok(child) => self.child = Some(child),
            Err(error) => log::warn!("no child can be started: {error}"),
        }
    }

    fn requests(&mut self) -> Option<End> {
        loop {
            let service = &mut self.service;
            match self.requests.try_recv() {
                Ok(Request::Stats(reply)) => {
                    // Whoever asked may have given up.
                    let _gone = reply.send(service.stats());
                }
                Ok(Request::ResetCounters) => service.reset_counters(),
                Ok(Request::Link(up)) => service.device.set_carrier(up, &mut service.world),
                Ok(Request::Notice(notice)) => {
                    if !service.world.irqs.tell(notice) {
                        log::warn!("no client listens for {notice:?}");
                    }
                }
                Ok(Request::Fault(spec)) => service.device.add_fault(spec, &mut service.world),
                Ok(Request::ClearFaults) => {
                    service.device.clear_faults(&mut service.world);
                    self.child = None;
                }
                Ok(Request::PowerCycle) => service.device.power_cycle(&mut service.world),
                Ok(Request::Phase(word)) => service.device.mark(word, &service.world),
                Ok(Request::Log(lines, reply)) => {
                    let _gone = reply.send(service.device.log(lines));
                }
                Ok(Request::Stop) | Err(mpsc::TryRecvError::Disconnected) => {
                    return Some(End::Stopped);
                }
                Err(mpsc::TryRecvError::Empty) => return None,
            }
        }
    }

    /// Handles messages; none when the server dies of one.
    fn messages(&mut self) -> Option<Next> {
        if self.hangs() {
            return Some(Next::Wait);
        }
        let result = match &mut self.connection {
            Some(_) => self.serve_client(),
            None => return Some(self.accept()),
        };
        Some(match result {
            Ok(next) => next,
            Err(Ended::Dead) => return None,
            Err(Ended::Closed(closed)) => {
                match closed {
                    Closed::ByClient => log::info!("{closed}"),
                    _ => log::warn!("{closed}: {:?}", std::error::Error::source(&closed)),
                }
                self.connection = None;
                self.not_before = None;
                self.replies.clear();
                self.service.detach();
                Next::Again
            }
        })
    }

    fn accept(&mut self) -> Next {
        let accepted = self.listener.accept();
        match accepted.and_then(|(socket, _)| Connection::new(socket)) {
            Ok(connection) => {
                self.connection = Some(connection);
                self.service.attach();
                Next::Again
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Next::Wait,
            Err(error) => {
                log::warn!("a client could not be accepted: {error}");
                Next::Wait
            }
        }
    }

    fn serve_client(&mut self) -> Result<Next, Ended> {
        let delay = self.delay();
        let Some(connection) = &mut self.connection else {
            return Ok(Next::Wait);
        };
        connection.flush()?;
        let now = self.service.world.now();
        let faults = self.service.device.faults();
        let asked = self.replies.run(faults, now, connection)?;
        self.service.trouble.unanswered += asked;
        let mut filled = false;
        for _ in 0..MESSAGES {
            if connection.is_clogged() || self.replies.is_clogged() {
                return Ok(Next::Wait);
            }
            if self
                .not_before
                .is_some_and(|until| self.service.world.now() < until)
            {
                return Ok(Next::Wait);
            }
            let Some(message) = connection.next_message()? else {
                if filled {
                    return Ok(Next::Wait);
                }
                connection.fill()?;
                filled = true;
                if delay.is_some() && self.not_before.is_none() && connection.has_message() {
                    self.not_before = delay.map(|delay| self.service.world.now() + delay);
                }
                continue;
            };
            self.not_before = None;
            match self.service.handle(message) {
                Outcome::Reply(bytes, fd) => {
                    let now = self.service.world.now();
                    let faults = self.service.device.faults();
                    self.replies.send((bytes, fd), faults, now, connection)?;
                }
                Outcome::Silence => {}
                Outcome::Hangup(bytes) => {
                    connection.send(bytes, None)?;
                    return Err(Closed::Refused.into());
                }
                Outcome::Death => return Err(Ended::Dead),
            }
            if delay.is_some() && connection.has_message() {
                self.not_before = delay.map(|delay| self.service.world.now() + delay);
            }
        }
        Ok(Next::Again)
    }

    fn frames(&mut self) -> Next {
        let service = &mut self.service;
        for _ in 0..FRAMES {
            if !service.device.has_room() {
                return Next::Wait;
            }
            match service.world.wire.receive() {
                Some(frame) => service.device.receive(frame, &mut service.world),
                None => return Next::Wait,
            }
        }
        Next::Again
    }

    /// Sleeps until a client, a frame, a request or the clock wants something.
    fn wait(&mut self) -> io::Result<()> {
        let now = self.service.world.now();
        let event = self.service.device.next_event(now);
        let retry = self.service.world.wire.flush().then_some(now + RETRY);
        let asks = self.connection.is_some() && self.has(Fault::ServerAsks);
        let replies = self.replies.next_event(asks);
        let faults = self.service.next_misbehaviour();
        let events = [event, self.not_before, retry, replies, faults];
        let until = events.into_iter().flatten().min();
        let timeout = until.map(|until| {
            // A moment that has come is no reason to spin: the round that led here has seen it.
            let left = until.saturating_sub(now).max(Duration::from_micros(50));
            Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let hangs = self.hangs();
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        match &self.connection {
            Some(connection) => {
                let mut events = PollFlags::empty();
                let clogged = connection.is_clogged() || self.replies.is_clogged();
                if !hangs && self.not_before.is_none() && !clogged {
                    events |= PollFlags::IN;
                }
                if !hangs && connection.has_unsent() {
                    events |= PollFlags::OUT;
                }
                // Without events the kernel still reports a hang-up, for ever: leave it out.
                if !events.is_empty() {
                    fds.push(PollFd::from_borrowed_fd(connection.fd(), events));
                }
            }
            None if !hangs => fds.push(PollFd::from_borrowed_fd(
                self.listener.as_fd(),
                PollFlags::IN,
            )),
            None => {}
        }
        if self.service.device.has_room()
            && let Some(fd) = self.service.world.wire.fd()
        {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let woken = fds.first().is_some_and(|fd| !fd.revents().is_empty());
        if woken {
            let _empty = rustix::io::read(&*self.wake, &mut [0u8; 8]);
        }
        Ok(())
    }
}
