//! Whole vfio-user messages over a Unix stream socket, descriptors included, for both sides.
//!
//! A message's descriptors travel with its header: a sender hands header, payload and descriptors
//! to one `sendmsg`, and a receiver reads the header first and alone, so that no descriptor can be
//! taken for another message's. Descriptors that come anywhere else are a fault of the peer.
//!
//! No function keeps state between calls. A receiver that fails in mid-message, or a sender that
//! fails after some bytes went out, leaves the stream between two message boundaries: all that is
//! left to do with it is to close it.

#![expect(
    unsafe_code,
    reason = "descriptors that the kernel installed become owned ones"
)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, recvmsg, send as send_bytes, sendmsg};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::Header;

/// Descriptors that one message can carry: the kernel's own limit (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// A message that could not be received. The stream is unusable afterwards, except after
/// [`ReceiveError::Idle`].
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The peer closed the connection between two messages.
    #[error("the peer closed the connection")]
    Closed,
    /// The deadline passed, and nothing of a message had come.
    #[error("no message came in time")]
    Idle,
    /// The deadline passed in mid-message.
    #[error("a message stopped after {received} of {expected} bytes")]
    Stalled {
        /// Bytes of the part that was being read.
        received: usize,
        /// Bytes that it has.
        expected: usize,
    },
    /// The peer closed the connection in mid-message.
    #[error("the peer closed the connection after {received} of {expected} bytes of a message")]
    Truncated {
        /// Bytes of the part that was being read.
        received: usize,
        /// Bytes that it has.
        expected: usize,
    },
    /// The header's size is smaller than a header, or larger than what was allowed.
    #[error("a message claims {size} bytes")]
    Size {
        /// Bytes that the header claims.
        size: u32,
    },
    /// More descriptors came with a header than were allowed; they are closed.
    #[error("{count} descriptors came with a message, at most {max} may")]
    TooManyFds {
        /// How many came.
        count: usize,
        /// How many were allowed.
        max: usize,
    },
    /// Descriptors came with a payload, or could not be installed in this process.
    #[error("descriptors of a message were lost (unexpected, or too many files are open)")]
    FdsLost,
    /// The socket failed.
    #[error("the socket failed")]
    Socket(#[source] Errno),
}

/// A message that could not be sent.
#[derive(Debug, Error)]
pub enum SendError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not read in time.
    #[error("the peer took {sent} of {len} bytes in time")]
    TimedOut {
        /// Bytes that went out. If there are any, the stream is unusable.
        sent: usize,
        /// Bytes that the message has.
        len: usize,
    },
    /// The socket failed.
    #[error("the socket failed")]
    Socket(#[source] Errno),
}

/// Sends a whole message with its descriptors, waiting for room until `deadline`, if there is one.
///
/// A message that the socket has room for is one system call.
///
/// # Errors
///
/// [`SendError`].
pub fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> Result<(), SendError> {
    let mut sent = 0;
    while sent < message.len() {
        // The descriptors go with the first bytes, once.
        let fds = if sent == 0 { fds } else { &[] };
        match send_now(socket, &message[sent..], fds) {
            Ok(n) => sent += n,
            Err(Errno::EAGAIN) => match wait(socket, PollFlags::POLLOUT, deadline) {
                Ok(()) => {}
                Err(Errno::ETIMEDOUT) => {
                    let len = message.len();
                    return Err(SendError::TimedOut { sent, len });
                }
                Err(errno) => return Err(SendError::Socket(errno)),
            },
            Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(SendError::Closed),
            Err(errno) => return Err(SendError::Socket(errno)),
        }
    }
    Ok(())
}

/// Hands as much of a message to the socket as it has room for: one system call that does not
/// block. Returns the bytes that went out; if there are any, the descriptors went with them.
///
/// # Errors
///
/// The errno of `send` or `sendmsg`; `EAGAIN` when there is no room. Nothing was sent then.
pub fn send_now(
    socket: BorrowedFd<'_>,
    message: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let socket = socket.as_raw_fd();
    loop {
        let sent = if fds.is_empty() {
            send_bytes(socket, message, flags)
        } else {
            let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            let rights = [ControlMessage::ScmRights(&fds)];
            sendmsg::<()>(socket, &[IoSlice::new(message)], &rights, flags, None)
        };
        if sent != Err(Errno::EINTR) {
            return sent;
        }
    }
}

/// Waits until the socket is ready, or closed by the peer.
///
/// # Errors
///
/// `ETIMEDOUT` when `deadline` passes first, or the errno of `poll`.
pub fn wait(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    deadline: Option<Instant>,
) -> Result<(), Errno> {
    loop {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // Rounded up, so that the last millisecond is not spent polling.
                let millis = left.as_nanos().div_ceil(1_000_000);
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut [PollFd::new(socket, flags)], timeout) {
            Ok(0) if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                return Err(Errno::ETIMEDOUT);
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}

/// Receives one whole message: its payload into `payload`, whose former content is lost, and
/// returns header and descriptors. `max_payload` (bytes) and `max_fds` bound what is accepted.
///
/// # Errors
///
/// [`ReceiveError`].
pub fn receive(
    socket: BorrowedFd<'_>,
    max_payload: usize,
    max_fds: usize,
    deadline: Option<Instant>,
    payload: &mut Vec<u8>,
) -> Result<(Header, Vec<OwnedFd>), ReceiveError> {
    let (header, fds) = receive_header(socket, max_fds, deadline)?;
    let len = header
        .payload()
        .filter(|len| *len <= max_payload)
        .ok_or(ReceiveError::Size { size: header.size })?;
    payload.clear();
    payload.resize(len, 0);
    receive_payload(socket, payload, deadline)?;
    Ok((header, fds))
}

/// Receives a header and the descriptors that come with it, at most `max_fds`. The descriptors are
/// not inherited by programs that this process starts.
///
/// # Errors
///
/// [`ReceiveError`], except for `Size`: the header's size is not looked at.
pub fn receive_header(
    socket: BorrowedFd<'_>,
    max_fds: usize,
    deadline: Option<Instant>,
) -> Result<(Header, Vec<OwnedFd>), ReceiveError> {
    let mut bytes = [0; Header::SIZE];
    let mut fds = Vec::new();
    let mut received = 0;
    while received < Header::SIZE {
        let progress = Progress::new(received, Header::SIZE);
        let mut control = Control::default();
        let part = receive_some(
            socket,
            &mut bytes[received..],
            Some(&mut control),
            deadline,
            progress,
        )?;
        // Taken in any case: what the kernel installed must be closed again.
        fds.append(&mut control.into_fds());
        if part.fds_lost {
            return Err(ReceiveError::FdsLost);
        }
        if fds.len() > max_fds {
            let count = fds.len();
            return Err(ReceiveError::TooManyFds {
                count,
                max: max_fds,
            });
        }
        received += part.bytes;
    }
    let header = Header::read_from_bytes(&bytes).map_err(|_| ReceiveError::Size { size: 0 })?;
    Ok((header, fds))
}

/// Receives the payload that a header announced: exactly `payload.len()` bytes.
///
/// # Errors
///
/// [`ReceiveError`], except for `Closed`, `Idle`, `Size` and `TooManyFds`.
pub fn receive_payload(
    socket: BorrowedFd<'_>,
    payload: &mut [u8],
    deadline: Option<Instant>,
) -> Result<(), ReceiveError> {
    let expected = Header::SIZE + payload.len();
    let mut received = 0;
    while received < payload.len() {
        let progress = Progress::new(Header::SIZE + received, expected);
        let part = receive_some(socket, &mut payload[received..], None, deadline, progress)?;
        if part.fds_lost {
            return Err(ReceiveError::FdsLost);
        }
        received += part.bytes;
    }
    Ok(())
}

/// How much of a message is there already, for errors.
#[derive(Clone, Copy)]
struct Progress {
    received: usize,
    expected: usize,
}

impl Progress {
    const fn new(received: usize, expected: usize) -> Self {
        Self { received, expected }
    }

    const fn late(self) -> ReceiveError {
        let Self { received, expected } = self;
        if received == 0 {
            ReceiveError::Idle
        } else {
            ReceiveError::Stalled { received, expected }
        }
    }

    const fn closed(self) -> ReceiveError {
        let Self { received, expected } = self;
        if received == 0 {
            ReceiveError::Closed
        } else {
            ReceiveError::Truncated { received, expected }
        }
    }
}

struct Part {
    bytes: usize,
    fds_lost: bool,
}

fn receive_some(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    mut control: Option<&mut Control>,
    deadline: Option<Instant>,
    progress: Progress,
) -> Result<Part, ReceiveError> {
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    loop {
        match wait(socket, PollFlags::POLLIN, deadline) {
            Ok(()) => {}
            Err(Errno::ETIMEDOUT) => return Err(progress.late()),
            Err(errno) => return Err(ReceiveError::Socket(errno)),
        }
        let mut parts = [IoSliceMut::new(buffer)];
        let room = control.as_deref_mut().map(Control::room);
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, room, flags) {
            Ok(message) if message.bytes == 0 => return Err(progress.closed()),
            Ok(message) => {
                return Ok(Part {
                    bytes: message.bytes,
                    fds_lost: message.flags.contains(MsgFlags::MSG_CTRUNC),
                });
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(Errno::ECONNRESET) => return Err(progress.closed()),
            Err(errno) => return Err(ReceiveError::Socket(errno)),
        }
    }
}

/// Room for the control messages of one `recvmsg`.
///
/// It always has room for all descriptors that the kernel can pass at once, and is read by us:
/// descriptors beyond a smaller room, or behind a `MSG_CTRUNC`, would stay open for ever.
///
/// # Invariants
///
/// `words` is all zero, or was filled by one `recvmsg`.
struct Control {
    words: [u64; Self::WORDS],
}

impl Default for Control {
    fn default() -> Self {
        Self {
            words: [0; Self::WORDS],
        }
    }
}

impl Control {
    /// A head, its descriptors, and room for credentials if somebody asked the socket for them.
    const WORDS: usize = (size_of::<libc::cmsghdr>() + MAX_FDS * size_of::<RawFd>() + 64) / 8 + 1;

    fn room(&mut self) -> &mut [u8] {
        self.words.as_mut_bytes()
    }

    /// The descriptors that the kernel installed in this process.
    fn into_fds(self) -> Vec<OwnedFd> {
        rights(self.words.as_bytes())
            .into_iter()
            .filter(|fd| *fd >= 0)
            // SAFETY: the kernel has just installed this descriptor for us (INVARIANT of
            // `Control`), nobody else knows of it, and `self` is consumed, so that it is taken once.
            .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
            .collect()
    }
}

/// The descriptors in a buffer of control messages (`struct cmsghdr`, `SCM_RIGHTS`). Ends at the
/// first head that is not one, as in the zeroes behind the last message.
fn rights(control: &[u8]) -> Vec<RawFd> {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    const LEVEL: usize = std::mem::offset_of!(libc::cmsghdr, cmsg_level);
    const KIND: usize = std::mem::offset_of!(libc::cmsghdr, cmsg_type);
    let number = |bytes: &[u8]| RawFd::read_from_prefix(bytes).map_or(-1, |(n, _)| n);

    let mut fds = Vec::new();
    let mut at = 0;
    while let Some(message) = control.get(at..) {
        let Ok((len, _)) = usize::read_from_prefix(message) else {
            break;
        };
        let Some(message) = message.get(..len).filter(|message| message.len() >= HEAD) else {
            break;
        };
        let level = number(&message[LEVEL..]);
        let kind = number(&message[KIND..]);
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            fds.extend(message[HEAD..].chunks_exact(size_of::<RawFd>()).map(number));
        }
        at += len.next_multiple_of(size_of::<usize>());
    }
    fds
}

#[cfg(test)]
mod tests;
