//! Servers that do not answer, and what their silence ends.

use std::time::Duration;

use failstop_pci::id::Generation;
use failstop_pci::transport::vfio_user::Client;
use failstop_pci::transport::vfio_user::wire::Command;
use failstop_pci::transport::{
    AccessError, Iova, IrqIndex, RegionIndex, ResetFailed, Transport, Unmapped,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::support::{impatient, opened, patient};

fn read(client: &Client, region: RegionIndex) -> Result<u32, AccessError> {
    let mut data = [0; 4];
    client.read(Generation::FIRST, region, 0, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

/// The ladder unmaps after the reset, whatever became of it: a server that hangs in a reset of its
/// device may answer all the same, and its answer is the only proof that is left.
#[test]
fn c35_a_reset_that_is_not_answered_ends_no_connection() {
    let (client, server) = opened(impatient(), |peer| {
        let _reset = peer.expect(Command::DeviceReset);
        let asked = peer.expect(Command::DmaUnmap);
        peer.reply(&asked, &asked.payload);
        peer.expect_hang_up();
    });
    let failed = client.reset().unwrap_err();
    let unmapped = client.dma_unmap(Iova(0x1000), 0x1000);
    drop(client);
    server.join();
    assert!(matches!(failed, ResetFailed::Unanswered { .. }), "{failed}");
    assert_eq!(unmapped, Unmapped::Exact);
}

#[test]
fn c35_interrupts_that_are_not_disabled_in_time_end_no_connection() {
    let (client, server) = opened(impatient(), |peer| {
        let _irqs = peer.expect(Command::DeviceSetIrqs);
        let asked = peer.expect(Command::DmaUnmap);
        peer.reply(&asked, &asked.payload);
        peer.expect_hang_up();
    });
    assert!(client.set_irqs(IrqIndex::Msix, 0, &[]).is_err());
    let unmapped = client.dma_unmap(Iova(0x1000), 0x1000);
    drop(client);
    server.join();
    assert_eq!(unmapped, Unmapped::Exact);
}

/// It may happen at any time, and a second one would be on top of it.
#[test]
fn c35_no_second_reset_is_asked_for_before_the_first_is_answered() {
    let (answer, told) = std::sync::mpsc::channel();
    let (answered, seen) = std::sync::mpsc::channel();
    let (client, server) = opened(impatient(), move |peer| {
        let reset = peer.expect(Command::DeviceReset);
        told.recv().unwrap();
        peer.reply(&reset, &[]);
        answered.send(()).unwrap();
        let again = peer.expect(Command::DeviceReset);
        peer.reply(&again, &[]);
        peer.expect_hang_up();
    });
    client.reset().unwrap_err();
    assert!(client.is_reset_outstanding());
    let again = client.reset().unwrap_err();
    assert!(again.is_busy(), "{again}");
    answer.send(()).unwrap();
    seen.recv().unwrap();
    assert!(!client.is_reset_outstanding());
    client.reset().unwrap();
    drop(client);
    server.join();
}

#[test]
fn c35_a_late_answer_is_taken_for_no_other() {
    let (client, server) = opened(impatient(), |peer| {
        let late = peer.expect(Command::RegionRead);
        let asked = peer.expect(Command::RegionRead);
        peer.answer_read(&late, 1);
        peer.answer_read(&asked, 2);
        peer.expect_hang_up();
    });
    let late = read(&client, RegionIndex::Config);
    let value = read(&client, RegionIndex::Config);
    drop(client);
    server.join();
    assert!(late.is_err());
    assert_eq!(value.unwrap(), 2);
}

#[test]
fn a_register_that_is_not_answered_ends_the_connection() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::RegionRead);
        peer.expect_hang_up();
    });
    assert!(read(&client, RegionIndex::Bar(0)).is_err());
    assert!(client.is_lost());
    server.join();
}

/// Whoever polls it notices a server that died, also while nobody asks anything.
#[test]
fn the_lifeline_hangs_up_with_the_server_and_keeps_nothing_open() {
    let (client, server) = opened(patient(), drop);
    let lifeline = client.lifeline().unwrap();
    server.join();
    let mut polled = [PollFd::new((*lifeline).as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::from(20_000u16)).unwrap();
    assert_eq!(polled[0].revents(), Some(PollFlags::POLLHUP));

    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let _kept = client.lifeline().unwrap();
    drop(client);
    server.join();
}

/// Each answer comes within its deadline, and all of them together would take an hour.
#[test]
fn accesses_of_a_slow_server_take_no_longer_than_they_may_together() {
    let (client, server) = opened(patient(), |peer| {
        while let Some(asked) = peer.receive() {
            std::thread::sleep(Duration::from_millis(20));
            peer.answer_read(&asked, 7);
        }
    });
    client.bound(Some(Duration::from_millis(50)));
    let answered = (0..1000)
        .take_while(|_| read(&client, RegionIndex::Bar(0)).is_ok())
        .count();
    assert!((1..=3).contains(&answered), "{answered} were answered");
    assert!(read(&client, RegionIndex::Config).is_err());
    // Nothing was sent that nobody waits for.
    client.bound(None);
    assert_eq!(read(&client, RegionIndex::Bar(0)).unwrap(), 7);
    drop(client);
    server.join();
}
