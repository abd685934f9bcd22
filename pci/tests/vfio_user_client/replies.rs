//! Answers: refusals, and what no server may say. The connection ends at the first violation.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use failstop_pci::id::Generation;
use failstop_pci::transport::vfio_user::wire::{Command, Flags, Header, encode};
use failstop_pci::transport::vfio_user::{Broken, Client, Violation};
use failstop_pci::transport::{
    AccessError, IrqIndex, RegionIndex, ResetFailed, ResetMethod, Transport,
};
use zerocopy::IntoBytes;

use crate::support::{Peer, Received, impatient, opened, patient};

const NOW: Generation = Generation::FIRST;
const BAR0: RegionIndex = RegionIndex::Bar(0);

fn read(client: &Client) -> Result<u32, AccessError> {
    let mut data = [0; 4];
    client.read(NOW, BAR0, 8, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn cause(error: AccessError) -> io::Error {
    match error {
        AccessError::Failed { source, .. } => source,
        other => panic!("{other}"),
    }
}

/// A read that the server answers as `answer` says. Returns why the connection is over; and the
/// server saw the client hang up.
fn broken_by(answer: impl FnOnce(&mut Peer, Received) + Send + 'static) -> Broken {
    let (client, server) = opened(patient(), |mut peer| {
        let asked = peer.expect(Command::RegionRead);
        answer(&mut peer, asked);
        peer.expect_hang_up();
    });
    read(&client).unwrap_err();
    server.join();
    client.broken().expect("the connection lives on")
}

fn violation_by(answer: impl FnOnce(&mut Peer, Received) + Send + 'static) -> Violation {
    match broken_by(answer) {
        Broken::Protocol(violation) => violation,
        other => panic!("{other}"),
    }
}

/// A good answer to a read of four bytes.
fn good(asked: &Received) -> (Header, Vec<u8>) {
    let mut payload = asked.access().as_bytes().to_vec();
    payload.extend_from_slice(&[1, 2, 3, 4]);
    (asked.header.reply(payload.len()), payload)
}

#[test]
fn refusal_is_an_error_with_the_servers_errno() {
    let (client, _server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DeviceReset);
        peer.fail(&asked, 16);
        peer.receive();
    });
    let error = client.reset().unwrap_err();
    assert!(error.is_busy(), "{error}");
}

#[test]
fn refusal_without_errno_is_an_error() {
    let (client, _server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DeviceReset);
        peer.fail(&asked, 0);
        peer.receive();
    });
    let error = client.reset().unwrap_err();
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.to_string().contains("without saying why"));
}

#[test]
fn refusal_with_an_errno_that_is_none_is_an_error() {
    let (client, _server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DeviceReset);
        peer.fail(&asked, u32::MAX);
        peer.receive();
    });
    assert!(client.reset().is_err());
}

#[test]
fn refused_access_leaves_the_connection_alive() {
    let (client, _server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::RegionRead);
        peer.fail(&asked, 22);
        let asked = peer.expect(Command::RegionRead);
        peer.answer_read(&asked, 0x1234_5678);
        peer.receive();
    });
    let error = cause(read(&client).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert_eq!(read(&client).unwrap(), 0x1234_5678);
}

#[test]
fn server_that_hangs_is_given_up_at_the_deadline() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::RegionRead);
        peer.expect_hang_up();
    });
    let error = cause(read(&client).unwrap_err());
    server.join();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(matches!(client.broken(), Some(Broken::TimedOut { .. })));
}

#[test]
fn everything_fails_at_once_after_the_end() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::RegionRead);
        // Nothing that the client does now reaches the server.
        peer.expect_hang_up();
    });
    read(&client).unwrap_err();
    assert!(read(&client).is_err());
    assert!(client.write(NOW, BAR0, 0, &[0; 4]).is_err());
    assert!(client.post(NOW, BAR0, 0, &[0; 4]).is_err());
    assert!(client.reset().is_err());
    assert!(client.set_irqs(IrqIndex::Msix, 0, &[]).is_err());
    server.join();
}

#[test]
fn server_that_dies_before_the_answer_is_closed() {
    let (client, _server) = opened(patient(), |peer| {
        peer.expect(Command::RegionRead);
    });
    read(&client).unwrap_err();
    assert_eq!(client.broken(), Some(Broken::Closed));
}

#[test]
fn server_that_dies_in_mid_header_is_a_violation() {
    let (client, _server) = opened(patient(), |mut peer| {
        let asked = peer.expect(Command::RegionRead);
        peer.raw(&good(&asked).0.as_bytes()[..7]);
    });
    read(&client).unwrap_err();
    assert!(matches!(
        client.broken(),
        Some(Broken::Protocol(Violation::Framing(_)))
    ));
}

#[test]
fn server_that_dies_in_mid_payload_is_a_violation() {
    let (client, _server) = opened(patient(), |mut peer| {
        let asked = peer.expect(Command::RegionRead);
        let (header, payload) = good(&asked);
        peer.raw(&encode(&header, &payload[..17], &[]));
    });
    read(&client).unwrap_err();
    assert!(matches!(
        client.broken(),
        Some(Broken::Protocol(Violation::Framing(_)))
    ));
}

#[test]
fn server_that_stalls_in_mid_message_is_given_up() {
    let (client, server) = opened(impatient(), |mut peer| {
        let asked = peer.expect(Command::RegionRead);
        peer.raw(&good(&asked).0.as_bytes()[..7]);
        peer.expect_hang_up();
    });
    read(&client).unwrap_err();
    server.join();
    assert!(client.broken().is_some());
}

#[test]
fn oversized_reply_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let mut header = good(&asked).0;
        header.size = u32::MAX;
        peer.raw(header.as_bytes());
    });
    assert!(matches!(
        violation,
        Violation::WrongSize { size: u32::MAX, .. }
    ));
}

#[test]
fn reply_with_a_byte_too_many_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let mut payload = good(&asked).1;
        payload.push(0);
        peer.reply(&asked, &payload);
    });
    assert!(matches!(violation, Violation::WrongSize { size: 37, .. }));
}

#[test]
fn reply_smaller_than_a_header_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let mut header = good(&asked).0;
        header.size = 15;
        peer.raw(header.as_bytes());
    });
    assert!(matches!(violation, Violation::WrongSize { size: 15, .. }));
}

#[test]
fn read_reply_without_data_is_a_violation() {
    let violation = violation_by(|peer, asked| peer.reply(&asked, asked.access().as_bytes()));
    assert!(matches!(violation, Violation::WrongSize { .. }));
}

#[test]
fn refusal_with_a_payload_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let mut header = asked.header.failure(5);
        header.size += 4;
        peer.send(&header, &[0; 4], &[]);
    });
    assert!(matches!(violation, Violation::WrongSize { size: 20, .. }));
}

#[test]
fn wrong_id_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (mut header, payload) = good(&asked);
        header.id ^= 0x100;
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(violation, Violation::Unasked { .. }));
}

#[test]
fn wrong_command_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (mut header, payload) = good(&asked);
        header.command = Command::RegionWrite.number();
        peer.send(&header, &payload, &[]);
    });
    let asked = Command::RegionRead;
    assert_eq!(violation, Violation::WrongCommand { asked, got: 10 });
}

#[test]
fn errno_without_the_error_flag_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (mut header, payload) = good(&asked);
        header.error = 5;
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(violation, Violation::WrongFlags { errno: 5, .. }));
}

#[test]
fn flags_that_no_reply_has_are_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (mut header, payload) = good(&asked);
        header.flags |= Flags::NO_REPLY.bits();
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(violation, Violation::WrongFlags { .. }));
}

#[test]
fn message_type_that_does_not_exist_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (mut header, payload) = good(&asked);
        header.flags = 0x3;
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(violation, Violation::WrongFlags { flags: 3, .. }));
}

#[test]
fn descriptor_that_nobody_asked_for_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (header, payload) = good(&asked);
        let file = tempfile::tempfile().unwrap();
        peer.send(&header, &payload, &[file.as_fd()]);
    });
    assert!(matches!(
        violation,
        Violation::UnexpectedFds { count: 1, .. }
    ));
}

#[test]
fn answer_about_another_register_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (header, mut payload) = good(&asked);
        payload[0] += 4;
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(
        violation,
        Violation::WrongSubject {
            what: "offset",
            got: 12,
            wanted: 8,
            ..
        }
    ));
}

#[test]
fn answer_about_another_region_is_a_violation() {
    let violation = violation_by(|peer, asked| {
        let (header, mut payload) = good(&asked);
        payload[8] = 1;
        peer.send(&header, &payload, &[]);
    });
    assert!(matches!(
        violation,
        Violation::WrongSubject { what: "region", .. }
    ));
}

#[test]
fn second_answer_to_one_question_is_a_violation() {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::RegionRead);
        peer.answer_read(&asked, 1);
        peer.answer_read(&asked, 2);
        // The next question is lost with the connection.
        while peer.receive().is_some() {}
    });
    assert_eq!(read(&client).unwrap(), 1);
    read(&client).unwrap_err();
    server.join();
    assert!(matches!(
        client.broken(),
        Some(Broken::Protocol(Violation::Unasked { .. }))
    ));
}

#[test]
fn answer_to_a_posted_write_is_a_violation() {
    let (client, server) = opened(patient(), |peer| {
        let posted = peer.expect(Command::RegionWrite);
        assert!(posted.header.wants_no_reply());
        peer.reply(&posted, posted.access().as_bytes());
        while peer.receive().is_some() {}
    });
    client.post(NOW, BAR0, 8, &[0; 4]).unwrap();
    read(&client).unwrap_err();
    server.join();
    assert!(matches!(
        client.broken(),
        Some(Broken::Protocol(Violation::Unasked { .. }))
    ));
}

#[test]
fn command_of_the_server_is_refused_and_the_answer_still_comes() {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::RegionRead);
        let dma_read = Header::command(77, Command::DmaRead, Flags::empty(), 16);
        peer.send(&dma_read, &[0; 16], &[]);
        let refusal = peer.receive().unwrap();
        assert_eq!(refusal.header, dma_read.failure(libc::EOPNOTSUPP as u32));
        peer.answer_read(&asked, 42);
        peer.expect_hang_up();
    });
    assert_eq!(read(&client).unwrap(), 42);
    drop(client);
    server.join();
}

#[test]
fn server_that_only_sends_commands_is_given_up_at_the_deadline() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::RegionRead);
        let command = Header::command(0, Command::DmaWrite, Flags::NO_REPLY, 0);
        let message = encode(&command, &[], &[]);
        while nix::unistd::write(peer.fd(), &message).is_ok() {}
    });
    read(&client).unwrap_err();
    assert!(matches!(client.broken(), Some(Broken::TimedOut { .. })));
    server.join();
}

#[test]
fn command_of_the_server_that_is_too_large_is_a_violation() {
    let violation = violation_by(|peer, _| {
        let command = Header::command(0, Command::DmaWrite, Flags::empty(), 1 << 30);
        peer.raw(command.as_bytes());
    });
    assert!(matches!(violation, Violation::Header { .. }));
}

#[test]
fn access_outside_the_region_is_not_sent() {
    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let mut data = [0; 8];
    let error = cause(client.read(NOW, BAR0, 0x1_fffc, &mut data).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert!(client.read(NOW, BAR0, u64::MAX, &mut data).is_err());
    assert!(client.write(NOW, RegionIndex::Rom, 0, &[0]).is_err());
    drop(client);
    server.join();
}

#[test]
fn large_read_is_split_as_the_server_wants() {
    let (client, server) = crate::support::opening(patient(), |peer| {
        peer.answer_opening_with(&failstop_pci::transport::vfio_user::wire::Capabilities {
            max_data_xfer_size: 16,
            ..Default::default()
        });
        for (offset, count) in [(4, 16), (20, 16), (36, 8)] {
            let asked = peer.expect(Command::RegionRead);
            let access = asked.access();
            assert_eq!((access.offset, access.count), (offset, count));
            let mut payload = access.as_bytes().to_vec();
            payload.resize(16 + count as usize, offset as u8);
            peer.reply(&asked, &payload);
        }
        peer.expect_hang_up();
    });
    let client: Arc<Client> = client.unwrap();
    let mut data = [0; 40];
    client.read(NOW, BAR0, 4, &mut data).unwrap();
    drop(client);
    server.join();
    assert_eq!((data[0], data[16], data[39]), (4, 20, 36));
}

#[test]
fn more_vectors_than_there_are_is_not_sent() {
    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let event = nix::sys::eventfd::EventFd::new().unwrap();
    let result = client.set_irqs(IrqIndex::Msix, 10, &[event.as_fd()]);
    assert_eq!(
        result.unwrap_err().source.raw_os_error(),
        Some(libc::EINVAL)
    );
    drop(client);
    server.join();
}

#[test]
fn vectors_are_routed_in_groups_that_the_server_can_take() {
    let (client, server) = opened(patient(), |peer| {
        for (start, count) in [(1u32, 4u32), (5, 2)] {
            let asked = peer.expect(Command::DeviceSetIrqs);
            let set: failstop_pci::transport::vfio_user::wire::IrqSet = asked.body();
            assert_eq!((set.start, set.count), (start, count));
            assert_eq!(asked.fds.len(), count as usize);
            peer.reply(&asked, &[]);
        }
        peer.expect_hang_up();
    });
    let event = nix::sys::eventfd::EventFd::new().unwrap();
    client
        .set_irqs(IrqIndex::Msix, 1, &[event.as_fd(); 6])
        .unwrap();
    drop(client);
    server.join();
}

#[test]
fn the_servers_reset_is_the_only_method() {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DeviceReset);
        peer.reply(&asked, &[]);
        peer.expect_hang_up();
    });
    assert_eq!(client.reset_methods(), [ResetMethod::Server]);
    client.reset_by(ResetMethod::Server).unwrap();
    for method in [ResetMethod::Flr, ResetMethod::Hot, ResetMethod::Software] {
        assert!(matches!(
            client.reset_by(method),
            Err(ResetFailed::NotOffered { .. })
        ));
    }
    assert!(client.detach_space().is_err());
    drop(client);
    server.join();
}
