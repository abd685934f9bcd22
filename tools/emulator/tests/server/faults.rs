//! Faults of the server, as its client sees them.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use failstop_emulator::stats::Outcome;
use failstop_pci::transport::vfio_user::wire::{IrqSet, IrqSetFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fs::OFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::*;

/// Waits for something that comes soon.
fn soon(mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while Instant::now() < end {
        if done() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

/// An emulator with a fault from the start, and its client.
fn faulty(fault: &str) -> (Running, Raw) {
    let mut emulator = emulator();
    let client = Raw::connect(&emulator);
    emulator.fault(fault).unwrap();
    (emulator, client)
}

/// How long a client waits for the answer to a question.
fn answered_after(client: &mut Raw) -> Duration {
    let start = Instant::now();
    client.device_id().unwrap();
    start.elapsed()
}

fn config_read() -> Vec<u8> {
    Raw::access(7, 0, 4).as_bytes().to_vec()
}

fn reset(client: &mut Raw) -> Result<(), Errno> {
    client.call(Command::DeviceReset, &[]).map(drop)
}

#[test]
fn server_error_refuses_with_its_errno() {
    let (mut emulator, mut client) = faulty("server-error:19");
    assert_eq!(client.device_id(), Err(Errno::ENODEV));
    emulator.clear_faults().unwrap();
    assert!(client.device_id().is_ok());
}

#[test]
fn server_hangs_answers_when_the_fault_is_cleared_and_not_before() {
    let (mut emulator, mut client) = faulty("server-hangs");
    client.ask(Command::RegionRead, &config_read());
    // The control socket answers all the while, after the port has seen the message.
    let messages = emulator.stats().unwrap().server.messages;
    assert_eq!(emulator.stats().unwrap().server.messages, messages);
    emulator.clear_faults().unwrap();
    assert!(client.answer().is_ok());
}

#[test]
fn server_slow_answers_late() {
    let (_emulator, mut client) = faulty("server-slow 30");
    assert!(answered_after(&mut client) >= Duration::from_millis(30));
}

#[test]
fn gone_reads_all_ones_through_the_server() {
    let (_emulator, mut client) = faulty("gone");
    assert_eq!(client.device_id(), Ok(vec![0xFF; 4]));
}

#[test]
fn an_unknown_fault_is_refused_with_the_list() {
    let error = emulator().fault("nonsense").unwrap_err().to_string();
    assert!(error.contains("rxq-stuck"), "{error}");
}

#[test]
fn a_fault_of_one_type_of_message_leaves_the_others_alone() {
    let (mut emulator, mut client) = faulty("server-error:EBUSY:unmap");
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    assert_eq!(client.unmap(0x1000, PAGE), Err(Errno::EBUSY));
    assert!(client.device_id().is_ok());
    assert_eq!(
        emulator.stats().unwrap().server.mappings,
        1,
        "it was not carried out"
    );
}

#[test]
fn a_fault_of_configuration_space_leaves_registers_alone() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(7, 4, &[2, 0]).unwrap();
    emulator.fault("server-error:config").unwrap();
    assert_eq!(client.device_id(), Err(Errno::EIO));
    assert!(client.read(0, 8, 4).is_ok());
}

#[test]
fn a_fault_that_happens_once_is_over_then() {
    let (_emulator, mut client) = faulty("server-error:read:once");
    assert_eq!(client.device_id(), Err(Errno::EIO));
    assert!(client.device_id().is_ok());
}

#[test]
fn server_hangs_in_one_type_and_answers_the_others() {
    let (_emulator, mut client) = faulty("server-hangs:reset");
    client.ask(Command::DeviceReset, &[]);
    assert!(
        client.device_id().is_ok(),
        "the next answer is the next question's"
    );
}

#[test]
fn server_dies_in_one_type_of_message() {
    let (mut emulator, mut client) = faulty("server-dies:unmap");
    assert!(client.device_id().is_ok());
    let unmap = DmaUnmap {
        argsz: 24,
        flags: 0,
        address: 0,
        size: PAGE,
    };
    client.ask(Command::DmaUnmap, unmap.as_bytes());
    assert!(client.reply().is_none());
    assert!(soon(|| emulator.stats().is_err()));
}

#[test]
fn server_short_cuts_replies() {
    let (_emulator, mut client) = faulty("server-short");
    client.ask(Command::RegionRead, &config_read());
    let (header, payload) = client.reply().unwrap();
    assert_eq!((header.payload(), payload.len()), (Some(10), 10));
    client.ask(Command::DeviceReset, &[]);
    let mut head = [0; Header::SIZE];
    client.socket.read_exact(&mut head).unwrap();
    assert_eq!(Header::read_from_bytes(&head).unwrap().payload(), None);
}

#[test]
fn server_reorder_answers_the_second_before_the_first() {
    let (_emulator, mut client) = faulty("server-reorder");
    // The version's reply was the first.
    let asked = [(); 2].map(|()| client.ask(Command::RegionRead, &config_read()));
    let answered = [(); 2].map(|()| client.reply().unwrap().0.id);
    assert_eq!(answered, [asked[1], asked[0]]);
}

#[test]
fn server_reorder_holds_no_reply_for_ever() {
    let (_emulator, mut client) = faulty("server-reorder");
    assert!(answered_after(&mut client) >= Duration::from_millis(5));
}

#[test]
fn server_twice_sends_each_reply_twice() {
    let (_emulator, mut client) = faulty("server-twice");
    client.device_id().unwrap();
    assert_eq!(client.reply().unwrap().0.id, client.id);
}

#[test]
fn server_drip_sends_a_byte_at_a_time_and_all_of_them() {
    let (_emulator, mut client) = faulty("server-drip");
    client.ask(Command::DeviceReset, &[]);
    let start = Instant::now();
    client.socket.read_exact(&mut [0; 3]).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[test]
fn server_asks_floods_and_takes_answers_without_answering_them() {
    let (mut emulator, mut client) = faulty("server-asks");
    for _ in 0..100 {
        let (header, _) = client.reply().unwrap();
        assert_eq!(header.flags & 0xF, 0, "a command");
        assert_eq!(header.command, Command::DmaRead.number());
        let refusal = wire::encode(&header.failure(Errno::ENOTSUP as u32), &[], &[]);
        client.socket.write_all(&refusal).unwrap();
    }
    emulator.clear_faults().unwrap();
    let asked = client.ask(Command::RegionRead, &config_read());
    assert!(soon(|| {
        let (header, _) = client.reply().unwrap();
        header.flags & 0xF == 1 && header.id == asked
    }));
}

#[test]
fn an_answer_that_comes_after_server_asks_was_cleared_is_taken_for_no_question() {
    let (mut emulator, mut client) = faulty("server-asks");
    let asked: Vec<Header> = (0..16).map(|_| client.reply().unwrap().0).collect();
    emulator.clear_faults().unwrap();
    for header in asked {
        let refusal = wire::encode(&header.failure(Errno::ENOTSUP as u32), &[], &[]);
        client.socket.write_all(&refusal).unwrap();
    }
    client.ask(Command::RegionRead, &config_read());
    let replies = std::iter::repeat_with(|| client.reply().unwrap().0);
    let first = replies.into_iter().find(|header| header.flags & 0xF == 1);
    assert_eq!(first.unwrap().flags, Flags::REPLY.bits());
}

#[test]
fn truncate_dma_cuts_files_or_punches_holes_into_sealed_ones() {
    let (_emulator, mut client) = faulty("truncate-dma");
    let sealed = memory(2);
    rustix::io::pwrite(&sealed, &[7; 8], 0).unwrap();
    client.map(0x1000, 2, &[sealed.as_fd()]).unwrap();
    let mut bytes = [7; 8];
    rustix::io::pread(&sealed, &mut bytes, 0).unwrap();
    assert_eq!(
        (rustix::fs::fstat(&sealed).unwrap().st_size, bytes),
        (2 * PAGE as i64, [0; 8])
    );
    let open = rustix::fs::memfd_create("client", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&open, PAGE).unwrap();
    assert!(client.map(0x10000, 1, &[open.as_fd()]).is_err());
    assert_eq!(rustix::fs::fstat(&open).unwrap().st_size, 0);
}

#[test]
fn truncate_bar_offers_registers_and_cuts_their_file_short() {
    let (_emulator, mut client) = faulty("truncate-bar");
    let info = RegionInfo {
        argsz: 256,
        flags: 0,
        index: 0,
        cap_offset: 0,
        size: 0,
        offset: 0,
    };
    client.ask(Command::DeviceGetRegionInfo, info.as_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 512];
    let mut buffers = [IoSliceMut::new(&mut bytes)];
    rustix::net::recvmsg(
        &client.socket,
        &mut buffers,
        &mut control,
        RecvFlags::empty(),
    )
    .unwrap();
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let file = file.expect("a descriptor of BAR 0");
    assert!(soon(|| rustix::fs::fstat(&file).unwrap().st_size == 0));
}

/// The kinds of events, by their number.
const MSI_X: u32 = 2;
const ERROR: u32 = 3;

/// A client with an eventfd for the first event of a kind, and that eventfd.
fn listening(emulator: &Running, index: u32) -> (Raw, OwnedFd) {
    let mut client = Raw::connect(emulator);
    let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let flags = IrqSetFlags::ACTION_TRIGGER | IrqSetFlags::DATA_EVENTFD;
    let set = IrqSet {
        argsz: 20,
        flags: flags.bits(),
        index,
        start: 0,
        count: 1,
    };
    client
        .call_with(Command::DeviceSetIrqs, set.as_bytes(), &[event.as_fd()])
        .unwrap();
    (client, event)
}

fn is_ready(event: &OwnedFd, events: PollFlags) -> bool {
    let mut poll = [PollFd::new(event, events)];
    rustix::event::poll(&mut poll, Some(&Timespec::default())) == Ok(1)
}

fn is_blocking(event: &OwnedFd) -> bool {
    !rustix::fs::fcntl_getfl(event)
        .unwrap()
        .contains(OFlags::NONBLOCK)
}

#[test]
fn irq_block_fills_the_eventfds_and_makes_them_block() {
    let mut emulator = emulator();
    let (_client, event) = listening(&emulator, MSI_X);
    emulator.fault("irq-block:full").unwrap();
    assert!(soon(
        || is_blocking(&event) && !is_ready(&event, PollFlags::OUT)
    ));
}

#[test]
fn irq_block_says_nothing_of_an_error() {
    let mut emulator = emulator();
    let (_client, event) = listening(&emulator, ERROR);
    emulator.fault("irq-block:full").unwrap();
    assert!(soon(|| is_blocking(&event)));
    assert!(!is_ready(&event, PollFlags::IN));
}

#[test]
fn irq_block_empty_takes_every_signal_away() {
    let mut emulator = emulator();
    let (_client, event) = listening(&emulator, ERROR);
    emulator.fault("irq-block:empty").unwrap();
    assert!(soon(|| is_blocking(&event)));
    rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
    assert!(soon(|| !is_ready(&event, PollFlags::IN)));
}

#[test]
fn a_storm_of_errors_reaches_the_client() {
    let mut emulator = emulator();
    let (_client, event) = listening(&emulator, ERROR);
    emulator.fault("irq-storm:error").unwrap();
    for _ in 0..10 {
        assert!(soon(|| rustix::io::read(&event, &mut [0u8; 8]).is_ok()));
    }
}

#[test]
fn a_reset_that_fails_says_so_and_one_that_is_absent_is_not_offered() {
    let (mut emulator, mut client) = faulty("flr-fails:EAGAIN");
    assert_eq!(reset(&mut client), Err(Errno::EAGAIN));
    emulator.clear_faults().unwrap();
    assert_eq!(reset(&mut client), Ok(()));
    emulator.fault("no-flr").unwrap();
    assert_eq!(reset(&mut client), Err(Errno::ENOTSUP));
    let info = wire::DeviceInfo {
        argsz: 16,
        flags: 0,
        num_regions: 0,
        num_irqs: 0,
    };
    let reply = client
        .call(Command::DeviceGetInfo, info.as_bytes())
        .unwrap();
    let info = wire::DeviceInfo::read_from_bytes(&reply).unwrap();
    assert_eq!(info.flags & wire::DeviceFlags::RESET.bits(), 0);
}

#[test]
fn a_reset_that_hangs_has_no_answer_and_other_messages_have() {
    let (_emulator, mut client) = faulty("flr-hangs");
    client.ask(Command::DeviceReset, &[]);
    assert_eq!(client.device_id(), Ok(vec![0xFF; 4]));
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    assert_eq!(client.unmap(0x1000, PAGE), Ok(PAGE));
}

#[test]
fn faults_wait_for_what_the_server_sees() {
    let (_emulator, mut client) = faulty("gone @ map+unmap");
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    assert_ne!(client.device_id(), Ok(vec![0xFF; 4]));
    client.unmap(0x1000, PAGE).unwrap();
    assert_eq!(client.device_id(), Ok(vec![0xFF; 4]));
}

#[test]
fn a_function_loses_bus_mastering_with_its_client_even_where_no_reset_works() {
    let (emulator, mut client) = faulty("flr-noop");
    client.write(7, 4, &[6, 0]).unwrap();
    drop(client);
    assert_eq!(Raw::connect(&emulator).read(7, 4, 1), Ok(vec![2]));
}

#[test]
fn the_log_is_read_over_the_control_socket() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(7, 4, &[6, 0]).unwrap();
    emulator.phase("outside").unwrap();
    emulator.fault("dma-outside").unwrap();
    assert!(soon(|| emulator.stats().unwrap().rogue.blocked > 3));
    emulator.clear_faults().unwrap();
    let stats = emulator.stats().unwrap();
    assert_eq!((stats.rogue.reached, stats.rogue.late), (0, 0));
    assert_eq!(stats.stray.total(), stats.rogue.blocked);
    let log = emulator.log(4096).unwrap();
    assert_eq!(
        (log[0].what.as_str(), log[0].outcome),
        ("outside", Outcome::Phase)
    );
    assert!(
        log[1..]
            .iter()
            .all(|entry| entry.outcome == Outcome::Blocked)
    );
}

#[test]
fn a_power_cycle_under_a_client_leaves_its_mappings() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(7, 4, &[6, 0]).unwrap();
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    emulator.power_cycle().unwrap();
    assert!(soon(|| client.read(7, 4, 1) == Ok(vec![0])));
    assert_eq!(client.unmap(0x1000, PAGE), Ok(PAGE));
}

#[test]
fn a_child_of_the_server_writes_after_the_unmap_and_ends_when_it_is_told() {
    let program = Path::new(env!("CARGO_BIN_EXE_failstop-emulator"));
    let mut emulator = Emulator::in_process(program, &[], &Options::default()).unwrap();
    let mut client = Raw::connect(&emulator);
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    emulator.fault("server-forks").unwrap();
    let mut written = || {
        let mut bytes = [0; PAGE as usize];
        rustix::io::pread(&memory, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&memory, &[0; PAGE as usize], 0).unwrap();
        bytes.contains(&0xD6)
    };
    assert!(soon(&mut written));
    client.unmap(0x1000, PAGE).unwrap();
    assert!(soon(&mut written));
    emulator.clear_faults().unwrap();
    // Answered when the child is gone.
    emulator.stats().unwrap();
    written();
    assert!(!written());
}

#[test]
fn a_child_of_the_server_ends_with_it() {
    let program = Path::new(env!("CARGO_BIN_EXE_failstop-emulator"));
    let mut emulator = Emulator::in_process(program, &[], &Options::default()).unwrap();
    let mut client = Raw::connect(&emulator);
    let memory = memory(1);
    client.map(0x1000, 1, &[memory.as_fd()]).unwrap();
    emulator.fault("server-forks").unwrap();
    let written = || {
        let mut bytes = [0; PAGE as usize];
        rustix::io::pread(&memory, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&memory, &[0; PAGE as usize], 0).unwrap();
        bytes.contains(&0xD6)
    };
    assert!(soon(written));
    emulator.fault("server-dies").unwrap();
    assert!(
        client.reply().is_none(),
        "the child does not hold the connection open"
    );
    assert!(soon(|| {
        std::thread::sleep(Duration::from_millis(50));
        !written()
    }));
}
