//! Questions and answers over one socket, from many threads.
//!
//! Two roles, two locks, and no lock is held while a server takes its time:
//!
//! - A *sender* holds the send lock for as long as it takes to hand one whole message to the
//!   socket. When the socket has no room it lets go of the lock, waits, and tries again.
//! - Every thread with an open question waits for its answer. One of them, the *leader*, reads the
//!   socket, and hands answers to those who wait for them; when it has its own it leaves, and
//!   another takes over. So the answer to a lone thread, the usual case, is read by that thread
//!   itself, without a switch to another.
//!
//! The first fault ends the connection for all: the socket is shut down, which wakes whoever reads
//! or waits for room, and every later call fails at once. Silence is such a fault, but not about a
//! reset, config space and interrupts ([`Silence`]).

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{Shutdown, shutdown};

use super::error::{Broken, CallError, Doing, Violation};
use super::socket::{self, MAX_FDS, ReceiveError};
use super::wire::{Command, Flags, Header, MAX_VARIABLE, encode};
use crate::descriptor::Descriptor;
use crate::fork::Process;
use crate::id::Generation;

/// Message ids from here on belong to posted writes, which nobody answers: an answer to one of
/// them can never be taken for that to a question.
const POSTED: u16 = 0x8000;

/// A question.
pub(super) struct Question<'a> {
    pub command: Command,
    /// The structure that the command defines.
    pub body: &'a [u8],
    /// What follows it.
    pub data: &'a [u8],
    pub fds: &'a [BorrowedFd<'a>],
    /// Bytes that the payload of a good answer has.
    pub payload: RangeInclusive<usize>,
    /// Descriptors that a good answer may bring.
    pub max_fds: usize,
    /// Whose question it is; none where life and death of the driver do not matter.
    pub generation: Option<Generation>,
    /// What it means when no answer comes in time.
    pub silence: Silence,
    pub time: Time,
}

/// What a question without an answer does to its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Silence {
    /// Ends it: a server that hangs would cost every later call a deadline of its own.
    EndsTheConnection,
    /// Leaves it: the question stays open and keeps its id, so that a late answer is told apart, and
    /// dropped. For what the ladder asks before the unmaps: a device that hangs in a reset, in config
    /// space or over its interrupts must not take the only proof away that is left (C35).
    LeavesItOpen,
}

/// How long a call may take: a moment, and the duration that led to it, for messages.
#[derive(Clone, Copy)]
pub(super) struct Time {
    deadline: Instant,
    given: Duration,
}

impl Time {
    pub(super) fn from_now(given: Duration) -> Self {
        let now = Instant::now();
        // A deadline beyond the clock's range is as good as a day.
        let deadline = now
            .checked_add(given)
            .unwrap_or(now + Duration::from_secs(86_400));
        Self { deadline, given }
    }

    fn left(self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn over(self, doing: Doing) -> Broken {
        Broken::TimedOut {
            doing,
            deadline: self.given,
        }
    }
}

/// A good answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A connected server.
pub(super) struct Connection {
    socket: Arc<Descriptor>,
    /// The last generation that is over. The lock makes senders take turns.
    sending: Mutex<Option<Generation>>,
    inbox: Mutex<Inbox>,
    /// Signalled when `inbox` changed and somebody waits for that.
    changed: Condvar,
    next_posted: AtomicU16,
    /// The server sent commands of its own: said once, however many it sends.
    asked_by_server: AtomicBool,
    broken: OnceLock<Broken>,
    process: Process,
}

#[derive(Default)]
struct Inbox {
    open: HashMap<u16, Open>,
    last_id: u16,
    /// Whether a leader reads the socket.
    led: bool,
    /// Threads that wait for `changed`.
    followers: usize,
}

/// An open question.
struct Open {
    command: Command,
    payload: RangeInclusive<usize>,
    max_fds: usize,
    answer: Option<Result<Answer, u32>>,
    /// Nobody waits for the answer any more.
    left_behind: bool,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("socket", &self.socket)
            .field("broken", &self.broken.get())
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Takes over a socket on which nothing was said yet.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            socket: Arc::new(Descriptor::new(socket)?),
            sending: Mutex::new(None),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            next_posted: AtomicU16::new(0),
            asked_by_server: AtomicBool::new(false),
            broken: OnceLock::new(),
            process: Process::this(),
        })
    }

    /// Why the connection is over, if it is.
    pub(super) fn broken(&self) -> Option<&Broken> {
        self.broken.get()
    }

    /// The socket, to see its end by. Whoever keeps it keeps nothing open.
    pub(super) fn socket(&self) -> Arc<Descriptor> {
        self.socket.clone()
    }

    /// Whether a question of this kind was left behind and has no answer yet.
    pub(super) fn is_left_behind(&self, command: Command, time: Time) -> bool {
        self.take_late_answers(time);
        let inbox = lock(&self.inbox);
        inbox
            .open
            .values()
            .any(|open| open.left_behind && open.command == command)
    }

    /// Reads what has arrived while nobody waited for an answer.
    fn take_late_answers(&self, time: Time) {
        loop {
            let inbox = lock(&self.inbox);
            let late = inbox.open.values().any(|open| open.left_behind);
            // A leader reads them, too.
            if !late || inbox.led || self.broken.get().is_some() {
                return;
            }
            let now = Some(Instant::now());
            if socket::wait(self.socket.as_fd(), PollFlags::POLLIN, now).is_err() {
                return;
            }
            drop(self.lead(inbox, time));
        }
    }

    /// Refuses messages of `generation` and older ones from now on: on return none of them is
    /// being sent, and none will be.
    pub(super) fn expire(&self, generation: Generation) {
        let mut expired = lock(&self.sending);
        *expired = (*expired).max(Some(generation));
    }

    /// Ends the connection.
    pub(super) fn end(&self, why: Broken) -> Broken {
        let why = self.broken.get_or_init(|| why).clone();
        // Wakes who reads or waits for room. An error means that the peer was faster.
        let _ = shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Both);
        // Under the lock, so that nobody is between his look at `broken` and his sleep.
        let _inbox = lock(&self.inbox);
        self.changed.notify_all();
        why
    }

    /// Ends the connection and closes the socket, also while others wait on it.
    pub(super) fn hang_up(&self) {
        self.end(Broken::HungUp);
        self.socket.hang_up();
    }

    /// Sends a command that nobody answers: one system call, if the socket has room.
    pub(super) fn post(
        &self,
        command: Command,
        body: &[u8],
        data: &[u8],
        generation: Option<Generation>,
        time: Time,
    ) -> Result<(), CallError> {
        self.check_process()?;
        let id = POSTED | self.next_posted.fetch_add(1, Ordering::Relaxed);
        let header = Header::command(id, command, Flags::NO_REPLY, body.len() + data.len());
        let message = encode(&header, body, data);
        self.send(Doing::Reading(command), &message, &[], generation, time)
    }

    /// Sends a command and waits for its answer.
    pub(super) fn ask(&self, question: &Question<'_>) -> Result<Answer, CallError> {
        self.check_process()?;
        let command = question.command;
        // Before it is sent, since the leader may see the answer before this thread runs again.
        let id = lock(&self.inbox)
            .open(question)
            .ok_or(CallError::NotSent(Errno::EBUSY))?;
        let len = question.body.len() + question.data.len();
        let header = Header::command(id, command, Flags::empty(), len);
        let message = encode(&header, question.body, question.data);
        let sent = self.send(
            Doing::Reading(command),
            &message,
            question.fds,
            question.generation,
            question.time,
        );
        if let Err(error) = sent {
            lock(&self.inbox).open.remove(&id);
            return Err(error);
        }
        self.wait(id, question)
    }

    /// A child of fork has no socket, and its parent's other threads may have held any lock.
    fn check_process(&self) -> Result<(), CallError> {
        if self.process.is_this() {
            return Ok(());
        }
        Err(CallError::NotSent(Errno::EBADF))
    }

    fn send(
        &self,
        doing: Doing,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
        generation: Option<Generation>,
        time: Time,
    ) -> Result<(), CallError> {
        loop {
            if let Some(result) = self.try_send(doing, message, fds, generation, time) {
                return result;
            }
            // Without the lock: a server that does not read must not hold up `expire`.
            match socket::wait(self.socket.as_fd(), PollFlags::POLLOUT, Some(time.deadline)) {
                Ok(()) if !time.left().is_zero() => {}
                Ok(()) | Err(Errno::ETIMEDOUT) => {
                    let why = self.end(time.over(doing));
                    return Err(CallError::Dead(why));
                }
                Err(errno) => return Err(CallError::NotSent(errno)),
            }
        }
    }

    /// One attempt to send; none when the socket has no room, and nothing was sent.
    fn try_send(
        &self,
        doing: Doing,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
        generation: Option<Generation>,
        time: Time,
    ) -> Option<Result<(), CallError>> {
        let expired = lock(&self.sending);
        if let Some(why) = self.broken.get() {
            return Some(Err(CallError::Dead(why.clone())));
        }
        if generation.is_some() && generation <= *expired {
            return Some(Err(CallError::Expired));
        }
        let socket = self.socket.as_fd();
        match socket::send_now(socket, message, fds) {
            Ok(sent) if sent == message.len() => Some(Ok(())),
            // The rest must follow before any other message, so the lock stays held. A message as
            // short as a register access is never split by the kernel.
            Ok(sent) => {
                let rest = socket::send(socket, &message[sent..], &[], Some(time.deadline));
                Some(
                    rest.map_err(|error| {
                        CallError::Unanswered(self.end_sending(error, doing, time))
                    }),
                )
            }
            Err(Errno::EAGAIN) => None,
            Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => {
                Some(Err(CallError::Dead(self.end(Broken::Closed))))
            }
            Err(errno) => Some(Err(CallError::NotSent(errno))),
        }
    }

    fn end_sending(&self, error: socket::SendError, doing: Doing, time: Time) -> Broken {
        self.end(match error {
            socket::SendError::Closed => Broken::Closed,
            socket::SendError::TimedOut { .. } => time.over(doing),
            socket::SendError::Socket(errno) => Broken::Socket(errno),
        })
    }

    /// Waits for the answer to question `id`: leads or follows.
    fn wait(&self, id: u16, question: &Question<'_>) -> Result<Answer, CallError> {
        let time = question.time;
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(answer) = inbox.take(id) {
                return answer.map_err(CallError::Refused);
            }
            if let Some(why) = self.broken.get() {
                inbox.open.remove(&id);
                return Err(CallError::Unanswered(why.clone()));
            }
            let left = time.left();
            if left.is_zero() {
                let why = time.over(Doing::Answering(question.command));
                if question.silence == Silence::LeavesItOpen {
                    if let Some(open) = inbox.open.get_mut(&id) {
                        open.left_behind = true;
                    }
                    return Err(CallError::LeftBehind(why));
                }
                drop(inbox);
                self.end(why);
                inbox = lock(&self.inbox);
            } else if inbox.led {
                inbox.followers += 1;
                inbox = match self.changed.wait_timeout(inbox, left) {
                    Ok((inbox, _)) => inbox,
                    Err(poisoned) => poisoned.into_inner().0,
                };
                inbox.followers -= 1;
            } else {
                inbox = self.lead(inbox, time);
            }
        }
    }

    /// Leads for one message.
    fn lead<'a>(&'a self, mut inbox: MutexGuard<'a, Inbox>, time: Time) -> MutexGuard<'a, Inbox> {
        inbox.led = true;
        drop(inbox);
        let received = self.receive_one(time);
        if let Err(Some(why)) = received {
            self.end(why);
        }
        inbox = lock(&self.inbox);
        inbox.led = false;
        // Some have their answers now; one of the others leads next.
        if inbox.followers > 0 {
            self.changed.notify_all();
        }
        inbox
    }

    /// Reads one message and delivers it. `Err(None)`: nothing came in time.
    fn receive_one(&self, time: Time) -> Result<(), Option<Broken>> {
        let socket = self.socket.as_fd();
        let deadline = Some(time.deadline);
        let failed = |error| match error {
            ReceiveError::Idle => None,
            other => Some(Broken::from(other)),
        };
        let (header, fds) = socket::receive_header(socket, MAX_FDS, deadline).map_err(failed)?;
        if header.flags & Flags::REPLY.bits() == 0 {
            return self.refuse(&header, time).map_err(Some);
        }
        let len = lock(&self.inbox)
            .check(&header, fds.len())
            .map_err(|violation| Some(violation.into()))?;
        let mut payload = vec![0; len];
        socket::receive_payload(socket, &mut payload, deadline).map_err(failed)?;

        let failed = header.flags & Flags::ERROR.bits() != 0;
        let answer = if failed {
            Err(header.error)
        } else {
            Ok(Answer { payload, fds })
        };
        let mut inbox = lock(&self.inbox);
        match inbox.open.get_mut(&header.id) {
            // Nobody wants it; its id is free again.
            Some(open) if open.left_behind => drop(inbox.open.remove(&header.id)),
            Some(open) => open.answer = Some(answer),
            // Who asked has given up, and the connection is over.
            None => {}
        }
        Ok(())
    }

    /// Answers a command of the server's: all memory that it may reach was given to it by
    /// descriptor, so it has no reason to ask.
    fn refuse(&self, header: &Header, time: Time) -> Result<(), Broken> {
        let &Header {
            command,
            size,
            flags,
            ..
        } = header;
        let len = header
            .payload()
            .filter(|len| *len <= MAX_VARIABLE && header.flags().is_some())
            .ok_or(Violation::Header {
                command,
                size,
                flags,
            })?;
        let mut payload = vec![0; len];
        socket::receive_payload(self.socket.as_fd(), &mut payload, Some(time.deadline))?;
        if !self.asked_by_server.swap(true, Ordering::Relaxed) {
            log::warn!("vfio-user: refused the server's command {command}, and will every other");
        }
        if header.wants_no_reply() {
            return Ok(());
        }
        let refusal = header.failure(Errno::EOPNOTSUPP as u32);
        let message = encode(&refusal, &[], &[]);
        // Only the end of the connection is of interest here.
        match self.send(Doing::ReadingRefusal, &message, &[], None, time) {
            Err(CallError::Dead(why) | CallError::Unanswered(why)) => Err(why),
            Err(CallError::NotSent(errno)) => Err(Broken::Socket(errno)),
            _ => Ok(()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Whoever watches for its end keeps the descriptor.
        self.socket.hang_up();
    }
}

impl Inbox {
    /// Registers a question under a free id; none when all are taken.
    fn open(&mut self, question: &Question<'_>) -> Option<u16> {
        let id = (0..POSTED)
            .map(|n| (self.last_id.wrapping_add(1).wrapping_add(n)) % POSTED)
            .find(|id| !self.open.contains_key(id))?;
        self.last_id = id;
        let open = Open {
            command: question.command,
            payload: question.payload.clone(),
            max_fds: question.max_fds,
            answer: None,
            left_behind: false,
        };
        self.open.insert(id, open);
        Some(id)
    }

    /// Takes the answer to a question, if it is there; that closes the question.
    fn take(&mut self, id: u16) -> Option<Result<Answer, u32>> {
        self.open.get(&id)?.answer.as_ref()?;
        self.open.remove(&id)?.answer
    }

    /// Checks the header of a reply against its question, and returns the size of its payload.
    fn check(&self, header: &Header, fds: usize) -> Result<usize, Violation> {
        let id = header.id;
        let open = self
            .open
            .get(&id)
            .filter(|open| open.answer.is_none())
            .ok_or(Violation::Unasked { id })?;
        let asked = open.command;
        if header.command != asked.number() {
            let got = header.command;
            return Err(Violation::WrongCommand { asked, got });
        }
        let failed = match header.flags() {
            Some(flags) if flags == Flags::REPLY | Flags::ERROR => true,
            // An errno without the error flag says yes and no.
            Some(Flags::REPLY) if header.error == 0 => false,
            _ => {
                let (flags, errno) = (header.flags, header.error);
                return Err(Violation::WrongFlags {
                    asked,
                    flags,
                    errno,
                });
            }
        };
        let (sizes, max_fds) = if failed {
            (0..=0, 0)
        } else {
            (open.payload.clone(), open.max_fds)
        };
        if fds > max_fds {
            return Err(Violation::UnexpectedFds { asked, count: fds });
        }
        header
            .payload()
            .filter(|len| sizes.contains(len))
            .ok_or(Violation::WrongSize {
                asked,
                size: header.size,
            })
    }
}

/// A panic of another thread left nothing half-done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_answer_while_the_first_waits_to_be_taken_is_a_violation() {
        let mut inbox = Inbox::default();
        let question = Question {
            command: Command::RegionRead,
            body: &[],
            data: &[],
            fds: &[],
            payload: 4..=4,
            max_fds: 0,
            generation: None,
            silence: Silence::EndsTheConnection,
            time: Time::from_now(Duration::ZERO),
        };
        let id = inbox.open(&question).unwrap();
        let asked = Header::command(id, Command::RegionRead, Flags::empty(), 0);
        let answer = asked.reply(4);
        assert_eq!(inbox.check(&answer, 0), Ok(4));
        let (payload, fds) = (vec![0; 4], Vec::new());
        inbox.open.get_mut(&id).unwrap().answer = Some(Ok(Answer { payload, fds }));
        assert_eq!(inbox.check(&answer, 0), Err(Violation::Unasked { id }));
    }
}
