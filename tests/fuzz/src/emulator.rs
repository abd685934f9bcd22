//! What a vfio-user client may send to the emulator, which is a server that others connect to.
//!
//! An input is a byte of options, a byte that names a fault of the device, 32 bytes with which the
//! client's memory is filled over and over (a descriptor or two), and then the client's byte stream.
//! Descriptors come along where a message needs them, in a way that the options say.

use std::fs::File;
use std::io::{IoSlice, Read as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use failstop_emulator::emulator::DEFAULT_MAC;
use failstop_emulator::server::connection::Connection;
use failstop_emulator::server::handler::{Outcome, Service};
use failstop_emulator::server::wire::Wire;
use failstop_pci::transport::vfio_user::wire::{
    Command, DmaMap, Header, IrqSet, IrqSetFlags, split,
};
use failstop_scenario::{Spec, TABLE};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};

/// No message brings a descriptor.
const NO_FILES: u8 = 1 << 0;
/// The files can be cut short, so that they are not mapped.
const UNSEALED: u8 = 1 << 1;
/// Other descriptors come than the message needs.
const OTHERS: u8 = 1 << 2;
/// The files cannot be written.
const READ_ONLY: u8 = 1 << 3;

/// The largest file that a client has.
const LARGEST: u64 = 1 << 20;
/// Bytes that memory is filled with, over and over.
pub(crate) const PATTERN: usize = 32;

/// Serves the stream; the depth is how many messages were answered, and how many of the device's
/// accesses met the client's memory.
pub(crate) fn run(data: &[u8]) -> u64 {
    let (Some((options, rest)), Ok((mut theirs, ours))) = (data.split_first(), UnixStream::pair())
    else {
        return 0;
    };
    let Some((fault, rest)) = rest.split_first() else {
        return 0;
    };
    let Some((pattern, mut stream)) = rest.split_at_checked(PATTERN) else {
        return 0;
    };
    let (Ok(mut service), Ok(mut connection)) = (
        Service::new(DEFAULT_MAC, Wire::none()),
        Connection::new(ours),
    ) else {
        return 0;
    };
    let _ = setsockopt(&theirs, sockopt::SndBuf, &(1 << 20));
    let _ = theirs.set_nonblocking(true);
    if let Some(spec) = fault_of(*fault) {
        service.device.add_fault(spec, &mut service.world);
    }
    service.attach();
    let mut answered = 0;
    while !stream.is_empty() {
        let header = split::<Header>("header", stream).ok();
        let size = header.map_or(stream.len(), |(header, _)| header.size as usize);
        let (message, rest) = stream.split_at(size.clamp(1, stream.len()));
        stream = rest;
        let files = header.map_or_else(Vec::new, |(header, payload)| {
            files(&header, payload, pattern, *options)
        });
        if !send(&theirs, message, &files) {
            break;
        }
        match serve(&mut service, &mut connection) {
            Some(more) => answered += more,
            None => break,
        }
        // Whatever the client does with the answers.
        let mut read = [0; 4096];
        while theirs.read(&mut read).is_ok_and(|bytes| bytes > 0) {}
    }
    for _ in 0..64 {
        if !service.device.run(&mut service.world) {
            break;
        }
    }
    let stats = service.stats();
    service.detach();
    // The memory of a client that is gone is nobody's (R2).
    assert_eq!(service.stats().server.mappings, 0);
    assert!(!service.stats().bus_master || fault_of(*fault).is_some());
    answered + stats.dma.reads.min(16) + stats.dma.writes.min(16)
}

/// Handles what came, as the server's loop does; how many answers there were, none when the
/// connection is over.
fn serve(service: &mut Service, connection: &mut Connection) -> Option<u64> {
    let mut answered = 0;
    service.misbehave();
    connection.fill().ok()?;
    while let Some(message) = connection.next_message().ok()? {
        match service.handle(message) {
            Outcome::Reply(bytes, fd) => {
                answered += 1;
                connection.send(bytes, fd).ok()?;
            }
            Outcome::Silence => {}
            Outcome::Hangup(_) | Outcome::Death => return None,
        }
    }
    // Not until it rests: two queues may feed each other for ever.
    for _ in 0..16 {
        if !service.device.run(&mut service.world) {
            break;
        }
    }
    Some(answered)
}

/// The fault that a byte names: none for 0, and for what is beyond the table.
fn fault_of(number: u8) -> Option<Spec> {
    let entry = TABLE.get(usize::from(number.checked_sub(1)?))?;
    ["", ":1", ":100"]
        .iter()
        .find_map(|arguments| format!("{}{arguments}", entry.name).parse().ok())
}

fn send(socket: &UnixStream, message: &[u8], files: &[OwnedFd]) -> bool {
    let fds: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let control = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() {
        &[][..]
    } else {
        &control[..]
    };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(message)],
        control,
        flags,
        None,
    );
    sent == Ok(message.len())
}

/// The descriptors that a message needs.
fn files(header: &Header, payload: &[u8], pattern: &[u8], options: u8) -> Vec<OwnedFd> {
    let mut command = Command::from_number(header.command);
    if options & NO_FILES != 0 {
        return Vec::new();
    }
    if options & OTHERS != 0 {
        command = match command {
            Some(Command::DmaMap) => Some(Command::DeviceSetIrqs),
            Some(Command::DeviceSetIrqs) => Some(Command::DmaMap),
            other => other,
        };
    }
    match command {
        Some(Command::DmaMap) => {
            let size = split::<DmaMap>("map", payload).map_or(4096, |(map, _)| {
                map.offset.saturating_add(map.size).min(LARGEST)
            });
            memory(size, pattern, options).into_iter().collect()
        }
        Some(Command::DeviceSetIrqs) => {
            let count = match split::<IrqSet>("IRQ set", payload) {
                Ok((set, _)) if set.flags & IrqSetFlags::DATA_EVENTFD.bits() != 0 => set.count,
                _ => 0,
            };
            let event = |_| EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
            let events = (0..count.min(18)).map(event);
            events.filter_map(Result::ok).map(OwnedFd::from).collect()
        }
        _ => Vec::new(),
    }
}

fn memory(size: u64, pattern: &[u8], options: u8) -> Option<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create("fuzz", flags).ok()?);
    file.set_len(size).ok()?;
    let filled = pattern.repeat(
        usize::try_from(size.min(1 << 16))
            .ok()?
            .div_ceil(pattern.len()),
    );
    file.write_all_at(&filled[..filled.len().min(size as usize)], 0)
        .ok()?;
    let mut seals = SealFlag::empty();
    seals.set(SealFlag::F_SEAL_SHRINK, options & UNSEALED == 0);
    seals.set(SealFlag::F_SEAL_WRITE, options & READ_ONLY != 0);
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).ok()?;
    Some(file.into())
}
