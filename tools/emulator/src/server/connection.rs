//! The byte stream of one client: whole messages in, with their descriptors, replies out; neither
//! ever blocks, and neither grows without bound.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use failstop_pci::transport::vfio_user::wire::{Header, split};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use thiserror::Error;

/// Bytes of data in one access (`max_data_xfer_size`).
pub const MAX_DATA: usize = 64 << 10;
/// Descriptors in one message (`max_msg_fds`): every MSI-X vector at once, and more.
pub const MAX_FDS: usize = 16;
/// The longest message that is read.
const MAX_MESSAGE: usize = MAX_DATA + 4096;
/// Room for a longest message behind the rest of one.
const BUFFER: usize = 2 * MAX_MESSAGE;
/// Replies that wait for a client that does not read; more are not made until it does.
const MAX_UNSENT: usize = 256 << 10;

/// Why a connection is over.
#[derive(Debug, Error)]
pub enum Closed {
    /// The client closed it.
    #[error("the client closed the connection")]
    ByClient,
    /// The client closed it in the middle of a message.
    #[error("the client closed the connection in the middle of a message")]
    Truncated,
    /// A message whose size no message can have.
    #[error(
        "a message of {size} bytes; from {} to {MAX_MESSAGE} are possible",
        Header::SIZE
    )]
    Size {
        /// What its header says.
        size: u32,
    },
    /// The client was refused.
    #[error("the client was refused: its first message was no version that this server speaks")]
    Refused,
    /// More descriptors than a message may have.
    #[error("more than {MAX_FDS} descriptors in a message")]
    Descriptors,
    /// The socket failed.
    #[error("the socket failed")]
    Socket(#[source] Errno),
}

/// A message from the client.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// What follows the header.
    pub payload: Vec<u8>,
    /// The descriptors that came along.
    pub fds: Vec<OwnedFd>,
}

/// A reply that waits to be sent.
#[derive(Debug)]
struct Unsent {
    bytes: Vec<u8>,
    done: usize,
    fd: Option<OwnedFd>,
}

/// One client.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    input: Vec<u8>,
    /// What is in `input`: from `start` to before `end`.
    start: usize,
    end: usize,
    /// Descriptors, by the position in `input` of the last byte that came with them. The kernel
    /// ends a read behind the message that carried descriptors, so that byte is in their message.
    fds: VecDeque<(usize, Vec<OwnedFd>)>,
    unsent: VecDeque<Unsent>,
    unsent_bytes: usize,
}

impl Connection {
    /// Takes a connected socket over.
    ///
    /// # Errors
    ///
    /// When the socket cannot be made non-blocking.
    pub fn new(socket: UnixStream) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            input: vec![0; BUFFER],
            start: 0,
            end: 0,
            fds: VecDeque::new(),
            unsent: VecDeque::new(),
            unsent_bytes: 0,
        })
    }

    /// The socket, to wait on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether replies wait to be sent.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether so many replies wait that no further message should be handled.
    #[must_use]
    pub const fn is_clogged(&self) -> bool {
        self.unsent_bytes > MAX_UNSENT
    }

    /// Reads what is there, once.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the connection is over.
    pub fn fill(&mut self) -> Result<(), Closed> {
        if self.start > 0 && BUFFER - self.end < MAX_MESSAGE {
            self.compact();
        }
        if self.end == BUFFER {
            return Ok(());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(&mut self.input[self.end..])];
        let received = rustix::net::recvmsg(
            &self.socket,
            &mut buffers,
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        let received = match received {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(Errno::CONNRESET) => return Err(self.eof()),
            Err(error) => return Err(Closed::Socket(error)),
        };
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Closed::Descriptors);
        }
        if received.bytes == 0 {
            return Err(self.eof());
        }
        self.end += received.bytes;
        if !fds.is_empty() {
            self.fds.push_back((self.end - 1, fds));
        }
        Ok(())
    }

    fn eof(&self) -> Closed {
        if self.start == self.end {
            Closed::ByClient
        } else {
            Closed::Truncated
        }
    }

    fn compact(&mut self) {
        self.input.copy_within(self.start..self.end, 0);
        for (position, _) in &mut self.fds {
            *position -= self.start;
        }
        self.end -= self.start;
        self.start = 0;
    }

    /// Whether a whole message was read (or something that cannot be one).
    #[must_use]
    pub fn has_message(&self) -> bool {
        let ready = &self.input[self.start..self.end];
        split::<Header>("header", ready).is_ok_and(|(header, _)| {
            let size = header.size as usize;
            size <= ready.len() || size > MAX_MESSAGE
        })
    }

    /// Takes the next whole message out of what was read.
    ///
    /// # Errors
    ///
    /// [`Closed`] when what was read is no message: there is no way to find the next one then.
    pub fn next_message(&mut self) -> Result<Option<Message>, Closed> {
        let ready = &self.input[self.start..self.end];
        let Ok((header, rest)) = split::<Header>("header", ready) else {
            return Ok(None);
        };
        let size = header.size as usize;
        if !(Header::SIZE..=MAX_MESSAGE).contains(&size) {
            return Err(Closed::Size { size: header.size });
        }
        let Some(payload) = rest.get(..size - Header::SIZE) else {
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.start += size;
        let mut fds = Vec::new();
        while let Some((position, _)) = self.fds.front()
            && *position < self.start
        {
            fds.extend(self.fds.pop_front().into_iter().flat_map(|(_, fds)| fds));
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if fds.len() > MAX_FDS {
            return Err(Closed::Descriptors);
        }
        Ok(Some(Message {
            header,
            payload,
            fds,
        }))
    }

    /// Sends a reply, or keeps it until the client reads.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the connection is over.
    pub fn send(&mut self, bytes: Vec<u8>, fd: Option<OwnedFd>) -> Result<(), Closed> {
        self.unsent_bytes += bytes.len();
        self.unsent.push_back(Unsent { bytes, done: 0, fd });
        self.flush()
    }

    /// Sends what waits, as far as the client reads.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the connection is over.
    pub fn flush(&mut self) -> Result<(), Closed> {
        while let Some(unsent) = self.unsent.front_mut() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [unsent.fd.as_ref().map_or(self.socket.as_fd(), AsFd::as_fd)];
            if unsent.fd.is_some() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let sent = rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(&unsent.bytes[unsent.done..])],
                &mut control,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(sent) => {
                    unsent.fd = None;
                    unsent.done += sent;
                    self.unsent_bytes -= sent;
                    if unsent.done == unsent.bytes.len() {
                        self.unsent.pop_front();
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Closed::ByClient),
                Err(error) => return Err(Closed::Socket(error)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use failstop_pci::transport::vfio_user::wire::{Command, Flags, encode};
    use std::io::Write;

    fn pair() -> (UnixStream, Connection) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        (theirs, Connection::new(ours).unwrap())
    }

    fn command(id: u16, payload: &[u8]) -> Vec<u8> {
        let header = Header::command(id, Command::DmaMap, Flags::empty(), payload.len());
        encode(&header, payload, &[])
    }

    fn send_with_fd(socket: &UnixStream, bytes: &[u8], fd: &impl AsFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
    }

    /// Reads until no more comes, and takes every message out.
    fn take(connection: &mut Connection) -> Vec<Message> {
        let mut messages = Vec::new();
        for _ in 0..8 {
            connection.fill().unwrap();
            while let Some(message) = connection.next_message().unwrap() {
                messages.push(message);
            }
        }
        messages
    }

    #[test]
    fn a_message_in_pieces_is_one_message() {
        let (mut theirs, mut connection) = pair();
        let bytes = command(7, b"abc");
        theirs.write_all(&bytes[..10]).unwrap();
        connection.fill().unwrap();
        assert!(connection.next_message().unwrap().is_none());
        theirs.write_all(&bytes[10..]).unwrap();
        let messages = take(&mut connection);
        assert_eq!(
            (messages[0].header.id, &messages[0].payload[..]),
            (7, &b"abc"[..])
        );
    }

    #[test]
    fn descriptors_stay_with_their_message_among_others_without() {
        let (mut theirs, mut connection) = pair();
        theirs.write_all(&command(1, b"first")).unwrap();
        send_with_fd(&theirs, &command(2, b"second"), &theirs);
        theirs.write_all(&command(3, b"third")).unwrap();
        send_with_fd(&theirs, &command(4, b"fourth"), &theirs);
        let counts: Vec<usize> = take(&mut connection).iter().map(|m| m.fds.len()).collect();
        assert_eq!(counts, [0, 1, 0, 1]);
    }

    #[test]
    fn a_size_that_no_message_has_ends_the_connection() {
        for size in [0, 15, u32::MAX] {
            let (mut theirs, mut connection) = pair();
            let mut bytes = command(1, &[]);
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            theirs.write_all(&bytes).unwrap();
            connection.fill().unwrap();
            assert!(
                matches!(connection.next_message(), Err(Closed::Size { .. })),
                "{size}"
            );
        }
    }

    #[test]
    fn a_message_cut_short_by_a_close_is_told_from_a_clean_close() {
        let (mut theirs, mut connection) = pair();
        theirs.write_all(&command(1, &[])[..8]).unwrap();
        connection.fill().unwrap();
        drop(theirs);
        assert!(matches!(connection.fill(), Err(Closed::Truncated)));
    }

    #[test]
    fn a_client_that_never_reads_clogs_and_does_not_block() {
        let (_theirs, mut connection) = pair();
        for _ in 0..64 {
            connection.send(vec![0; MAX_DATA], None).unwrap();
        }
        assert!(connection.is_clogged());
    }

    #[test]
    fn many_messages_pass_through_the_buffer() {
        let (mut theirs, mut connection) = pair();
        let bytes = command(1, &vec![0; MAX_DATA]);
        let mut seen = 0;
        for _ in 0..10 {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let part = rest.len().min(30_000);
                theirs.write_all(&rest[..part]).unwrap();
                rest = &rest[part..];
                seen += take(&mut connection).len();
            }
        }
        assert_eq!(seen, 10);
    }
}
