use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;
use crate::transport::vfio_user::wire::{Command, Flags, encode};

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_millis(20))
}

fn null() -> File {
    File::open("/dev/null").unwrap()
}

fn message(payload: &[u8]) -> Vec<u8> {
    let header = Header::command(1, Command::DmaMap, Flags::empty(), payload.len());
    encode(&header, payload, &[])
}

#[test]
fn message_arrives_with_payload_and_descriptors() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = null();
    let fds = [file.as_fd(), file.as_fd()];
    send(theirs.as_fd(), &message(b"abc"), &fds, None).unwrap();

    let mut payload = Vec::new();
    let (header, fds) = receive(ours.as_fd(), 3, 2, None, &mut payload).unwrap();

    assert_eq!((header.size, fds.len(), &*payload), (19, 2, &b"abc"[..]));
}

#[test]
fn descriptors_of_the_second_message_do_not_come_with_the_first() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = null();
    send(theirs.as_fd(), &message(b"abc"), &[], None).unwrap();
    send(theirs.as_fd(), &message(b"def"), &[file.as_fd()], None).unwrap();

    let mut payload = Vec::new();
    let first = receive(ours.as_fd(), 3, 8, None, &mut payload).unwrap();
    let second = receive(ours.as_fd(), 3, 8, None, &mut payload).unwrap();

    assert_eq!((first.1.len(), second.1.len()), (0, 1));
}

#[test]
fn received_descriptors_are_not_inherited() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send(theirs.as_fd(), &message(b""), &[null().as_fd()], None).unwrap();

    let (_, fds) = receive_header(ours.as_fd(), 1, None).unwrap();

    let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFD).unwrap();
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

#[test]
fn more_descriptors_than_allowed_are_an_error_and_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let fds = vec![writer.as_fd(); MAX_FDS];
    send(theirs.as_fd(), &message(b""), &fds, None).unwrap();

    let result = receive_header(ours.as_fd(), 1, None);
    drop(writer);

    assert!(matches!(
        result,
        Err(ReceiveError::TooManyFds {
            count: MAX_FDS,
            max: 1
        })
    ));
    // End of file: no writer is left, so every copy that was received is closed.
    assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0));
}

#[test]
fn descriptors_in_mid_message_are_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let bytes = message(b"abc");
    send(theirs.as_fd(), &bytes[..Header::SIZE], &[], None).unwrap();
    send(
        theirs.as_fd(),
        &bytes[Header::SIZE..],
        &[null().as_fd()],
        None,
    )
    .unwrap();

    let result = receive(ours.as_fd(), 3, 8, None, &mut Vec::new());

    assert!(matches!(result, Err(ReceiveError::FdsLost)));
}

#[test]
fn nothing_in_time_is_idle() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let result = receive_header(ours.as_fd(), 0, soon());
    assert!(matches!(result, Err(ReceiveError::Idle)));
}

#[test]
fn half_a_header_in_time_is_stalled() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[0; 8]).unwrap();
    let result = receive_header(ours.as_fd(), 0, soon());
    assert!(matches!(
        result,
        Err(ReceiveError::Stalled {
            received: 8,
            expected: 16
        })
    ));
}

#[test]
fn close_between_messages_is_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let result = receive_header(ours.as_fd(), 0, None);
    assert!(matches!(result, Err(ReceiveError::Closed)));
}

#[test]
fn close_in_mid_message_is_truncated() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&message(b"abc")[..17]).unwrap();
    drop(theirs);
    let result = receive(ours.as_fd(), 3, 0, None, &mut Vec::new());
    assert!(matches!(
        result,
        Err(ReceiveError::Truncated {
            received: 17,
            expected: 19
        })
    ));
}

#[test]
fn message_larger_than_allowed_is_refused_unread() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let header = Header::command(1, Command::DmaMap, Flags::empty(), usize::MAX);
    theirs.write_all(header.as_bytes()).unwrap();
    let result = receive(ours.as_fd(), 4096, 0, None, &mut Vec::new());
    assert!(matches!(result, Err(ReceiveError::Size { size: u32::MAX })));
}

#[test]
fn peer_that_does_not_read_is_a_timeout() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let result = send(ours.as_fd(), &message(&vec![0; 4 << 20]), &[], soon());
    assert!(matches!(result, Err(SendError::TimedOut { sent: 1.., .. })));
}

#[test]
fn send_to_a_closed_peer_is_closed_and_raises_no_signal() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let result = send(ours.as_fd(), &message(b""), &[], None);
    assert!(matches!(result, Err(SendError::Closed)));
}

proptest::proptest! {
    #[test]
    fn no_control_bytes_make_the_parser_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
        let _ = rights(&bytes);
    }

    #[test]
    fn no_control_length_makes_the_parser_panic(len in proptest::num::usize::ANY) {
        let mut bytes = [0; 64];
        bytes[..size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
        let _ = rights(&bytes);
    }
}
