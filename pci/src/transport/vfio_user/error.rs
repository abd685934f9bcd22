//! What goes wrong with a vfio-user server, in words.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use thiserror::Error;

use super::socket::ReceiveError;
use super::wire::{Command, MAJOR, MINOR, Malformed};

/// Why a connection is over. From then on every call on it fails at once, with this.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Broken {
    /// The server closed its end, or died.
    #[error("the vfio-user server closed the connection (did it exit? look at its log)")]
    Closed,
    /// We ended the connection ([`Transport::hang_up`](crate::transport::Transport::hang_up)).
    #[error("the connection to the vfio-user server was ended by us; open the device again")]
    HungUp,
    /// The server did not answer, or did not read, within the deadline. Every later call would wait
    /// for as long, so the connection ends; but not for a reset, an access of config space or a
    /// routing of interrupts that was read and is not answered, of which this is said, too.
    #[error(
        "the vfio-user server did not {doing} within {} ms; it hangs, or the deadline is too short",
        deadline.as_millis()
    )]
    TimedOut {
        /// What it did not do.
        doing: Doing,
        /// How long it had.
        deadline: Duration,
    },
    /// The server sent something that the protocol forbids.
    #[error("the vfio-user server broke the protocol: {0}")]
    Protocol(#[from] Violation),
    /// The socket itself failed.
    #[error("the socket to the vfio-user server failed: {0}")]
    Socket(Errno),
}

/// What a server was to do when its time was over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doing {
    /// Read a message.
    Reading(Command),
    /// Read our refusal of a command of its own.
    ReadingRefusal,
    /// Answer a message.
    Answering(Command),
}

impl std::fmt::Display for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reading(command) => write!(f, "read a {command:?} message"),
            Self::ReadingRefusal => f.write_str("read the refusal of its own command"),
            Self::Answering(command) => write!(f, "answer {command:?}"),
        }
    }
}

/// What a server did that the protocol forbids.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    /// An answer to no question: an unknown id, the second answer to one id, or an answer to a
    /// posted write.
    #[error("reply to message {id:#06x}, which waits for none")]
    Unasked {
        /// The reply's message id.
        id: u16,
    },
    /// The answer names another command than the question with its id.
    #[error("reply to {asked:?} names command {got}")]
    WrongCommand {
        /// What was asked.
        asked: Command,
        /// Command number in the reply.
        got: u16,
    },
    /// Flags that a reply cannot have.
    #[error("reply to {asked:?} has flags {flags:#x} and errno {errno}")]
    WrongFlags {
        /// What was asked.
        asked: Command,
        /// Header flags.
        flags: u32,
        /// Header errno.
        errno: u32,
    },
    /// A size that an answer to this command cannot have.
    #[error("reply to {asked:?} claims {size} bytes")]
    WrongSize {
        /// What was asked.
        asked: Command,
        /// Bytes, header included.
        size: u32,
    },
    /// Descriptors that an answer to this command does not bring.
    #[error("reply to {asked:?} brings {count} descriptors")]
    UnexpectedFds {
        /// What was asked.
        asked: Command,
        /// How many came.
        count: usize,
    },
    /// The answer is about something else than the question.
    #[error("reply to {asked:?} is about {what} {got:#x}, asked was {wanted:#x}")]
    WrongSubject {
        /// What was asked.
        asked: Command,
        /// Which value differs.
        what: &'static str,
        /// The value in the reply.
        got: u64,
        /// The value in the question.
        wanted: u64,
    },
    /// A header that no message has.
    #[error("message header with command {command}, {size} bytes, flags {flags:#x}")]
    Header {
        /// Command number.
        command: u16,
        /// Bytes, header included.
        size: u32,
        /// Header flags.
        flags: u32,
    },
    /// A message that ends, stalls, or brings descriptors, where it cannot.
    #[error("{0}")]
    Framing(String),
    /// A payload without the form that it must have.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// A file that ends before the registers that it is to hold.
    #[error(
        "{object} is shorter than the server said: its file has {len:#x} bytes, and {needed:#x} are needed"
    )]
    ShortFile {
        /// What it is of.
        object: String,
        /// Bytes of the file.
        len: u64,
        /// Bytes up to the end of what is mapped of it.
        needed: u64,
    },
    /// A value that no device has, or that cannot be worked with.
    #[error("{what} of {object} is {value:#x}")]
    Impossible {
        /// Which value.
        what: &'static str,
        /// Of what.
        object: String,
        /// The value.
        value: u64,
    },
}

impl From<ReceiveError> for Broken {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Closed => Self::Closed,
            ReceiveError::Socket(errno) => Self::Socket(errno),
            other => Violation::Framing(other.to_string()).into(),
        }
    }
}

impl Broken {
    /// The nearest errno, for callers that can take no more.
    #[must_use]
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Closed => Errno::ECONNRESET,
            Self::HungUp => Errno::EBADF,
            Self::TimedOut { .. } => Errno::ETIMEDOUT,
            Self::Protocol(_) => Errno::EPROTO,
            Self::Socket(errno) => *errno,
        }
    }

    pub(super) fn into_io(self) -> io::Error {
        let kind = match &self {
            Self::HungUp => io::ErrorKind::NotConnected,
            Self::Closed => io::ErrorKind::ConnectionReset,
            Self::TimedOut { .. } => io::ErrorKind::TimedOut,
            Self::Protocol(_) => io::ErrorKind::InvalidData,
            Self::Socket(errno) => io::Error::from(*errno).kind(),
        };
        io::Error::new(kind, self)
    }
}

/// A call that failed, before it is put into the words of the [`Transport`] method.
///
/// [`Transport`]: crate::transport::Transport
#[derive(Debug)]
pub(super) enum CallError {
    /// The caller's generation is over; nothing was sent.
    Expired,
    /// Nothing was sent; the connection is as it was.
    NotSent(Errno),
    /// The connection was over before anything was sent.
    Dead(Broken),
    /// The connection ended between the first byte of the question and the answer: whether the
    /// server did what was asked is not known.
    Unanswered(Broken),
    /// No answer came in time, and the connection goes on: whether and when the server does what was
    /// asked is not known.
    LeftBehind(Broken),
    /// The server answered that it failed, with this errno; 0 when it did not say which.
    Refused(u32),
}

impl CallError {
    pub(super) fn into_io(self) -> io::Error {
        match self {
            Self::Expired => io::Error::other("the caller's generation is over"),
            Self::NotSent(errno) => errno.into(),
            Self::Dead(broken) | Self::Unanswered(broken) | Self::LeftBehind(broken) => {
                broken.into_io()
            }
            Self::Refused(errno) => match refusal(errno) {
                Some(errno) => errno.into(),
                None => io::Error::other(format!(
                    "the vfio-user server refused without saying why (errno {errno}); look at its log"
                )),
            },
        }
    }

    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Expired => Errno::ESTALE,
            Self::NotSent(errno) => *errno,
            Self::Dead(broken) | Self::Unanswered(broken) | Self::LeftBehind(broken) => {
                broken.errno()
            }
            Self::Refused(errno) => refusal(*errno).unwrap_or(Errno::EIO),
        }
    }
}

/// The errno that a server answered, if it is one: a refusal stays a refusal when it names none.
fn refusal(errno: u32) -> Option<Errno> {
    let errno = Errno::from_raw(i32::try_from(errno).ok()?);
    (errno != Errno::UnknownErrno).then_some(errno)
}

/// A vfio-user device that could not be opened. Nothing is left open.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is nothing at the path.
    #[error("{}: no such socket; start the vfio-user server first, or correct the path", path.display())]
    NoSocket {
        /// Where the socket should be.
        path: PathBuf,
    },
    /// There is something at the path, and nobody listens on it.
    #[error(
        "{}: nobody listens there; it is no socket, or was left behind by a server that ended: start the server again",
        path.display()
    )]
    Refused {
        /// Where the socket is.
        path: PathBuf,
    },
    /// The socket's permissions forbid it.
    #[error("{}: permission denied; give this user write permission on the socket and search permission on its folders", path.display())]
    Permission {
        /// Where the socket is.
        path: PathBuf,
    },
    /// The server does not accept the connection, or says nothing on it.
    #[error(
        "{name}: the server did not answer within {} ms; it hangs, or serves another client (most vfio-user servers serve one at a time)",
        deadline.as_millis()
    )]
    NoAnswer {
        /// The device's name.
        name: String,
        /// How long it had.
        deadline: Duration,
    },
    /// The server hung up when it was asked for its version.
    #[error(
        "{name}: the server closed the connection at once; it is no vfio-user server, speaks another version than {MAJOR}.{MINOR}, or wants no second client"
    )]
    HungUp {
        /// The device's name.
        name: String,
    },
    /// The path or the descriptor cannot be used.
    #[error("{name}: cannot connect a Unix stream socket")]
    Socket {
        /// The device's name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The server answered that it will not talk to us.
    #[error(
        "{name}: the server refused version {MAJOR}.{MINOR} (errno {errno}); use a server of this version, or look at its log"
    )]
    VersionRefused {
        /// The device's name.
        name: String,
        /// What it answered; 0 when it did not say.
        errno: u32,
    },
    /// The server speaks another version.
    #[error(
        "{name}: the server speaks vfio-user {major}.{minor}, not {MAJOR}.x; use a server of that major version"
    )]
    Version {
        /// The device's name.
        name: String,
        /// Its major version.
        major: u16,
        /// Its minor version.
        minor: u16,
    },
    /// What listens there does not answer as a vfio-user server does.
    #[error("{name}: whatever listens there is no vfio-user server")]
    NotVfioUser {
        /// The device's name.
        name: String,
        /// What it did.
        #[source]
        source: Broken,
    },
    /// The server's device is no PCI function.
    #[error(
        "{name}: the server's device is no PCI function (flags {flags:#x}); serve a PCI device"
    )]
    NotPci {
        /// The device's name.
        name: String,
        /// `VFIO_DEVICE_FLAGS_*`.
        flags: u32,
    },
    /// The server did not describe its device.
    #[error("{name}: the server did not describe its device: {step:?} failed")]
    Describe {
        /// The device's name.
        name: String,
        /// What was asked.
        step: Command,
        /// Why.
        #[source]
        source: io::Error,
    },
}
