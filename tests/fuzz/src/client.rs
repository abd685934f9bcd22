//! What a vfio-user server may send to our client.
//!
//! An input is a byte of options, and then the byte stream of the server: whatever the client asks,
//! these are the answers. Descriptors cannot be written as bytes, so that answers about regions bring a
//! memory file, in a way that the options say. The stream ends where the input does, so that the client
//! never waits for a deadline.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use failstop_dma::proof::ObjectId;
use failstop_dma::space::AddressSpace;
use failstop_pci::clock::ManualClock;
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::register::Reg;
use failstop_pci::transport::vfio_user::wire::{Command, Header, RegionInfo, split};
use failstop_pci::transport::vfio_user::{Client, Options};
use failstop_pci::transport::{IrqIndex, RegionIndex, Transport};
use failstop_pci::window::Window;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};

/// Answers about regions bring no descriptor.
pub(crate) const NO_FILES: u8 = 1 << 0;
/// The file can be cut short.
const UNSEALED: u8 = 1 << 1;
/// The file is shorter than the region.
const SHORT: u8 = 1 << 2;
/// Two descriptors come instead of one.
const TWICE: u8 = 1 << 3;

/// The largest file that is made for a region.
const LARGEST: u64 = 1 << 20;

/// Connects, and uses all that a client is used for; the depth is how many of these steps went well.
pub(crate) fn run(data: &[u8]) -> u64 {
    let Some((options, stream)) = data.split_first() else {
        return 0;
    };
    let Ok((ours, theirs)) = UnixStream::pair() else {
        return 0;
    };
    // Both directions fit into the socket's buffer, so that one thread can be both ends.
    let _ = setsockopt(&theirs, sockopt::SndBuf, &(1 << 20));
    let _ = setsockopt(&ours, sockopt::SndBuf, &(1 << 20));
    send(&theirs, stream, *options);
    let _ = theirs.shutdown(std::net::Shutdown::Write);
    let depth = connect(ours.into());
    drop(theirs);
    depth
}

/// The options of every run of [`run`].
pub(crate) fn options() -> Options {
    Options {
        deadline: Duration::from_secs(2),
        reset_deadline: Duration::from_secs(2),
        peer: None,
    }
}

/// A client on this socket, and all that it is used for, until something goes wrong.
pub(crate) fn connect(socket: OwnedFd) -> u64 {
    match Client::from_socket(socket, "fuzz", options()) {
        Ok(client) => 1 + use_all(client),
        Err(_) => 0,
    }
}

fn use_all(client: Arc<Client>) -> u64 {
    let now = Generation::FIRST;
    let mut went_well = 0;
    let mut step = |well: bool| went_well += u64::from(well);
    let mut bytes = [0; 64];
    step(client.read(now, RegionIndex::Config, 0, &mut bytes).is_ok());
    step(client.write(now, RegionIndex::Config, 4, &[2, 0]).is_ok());
    step(
        client
            .read(now, RegionIndex::Bar(0), 8, &mut bytes[..4])
            .is_ok(),
    );
    step(client.post(now, RegionIndex::Bar(0), 8, &[0; 4]).is_ok());
    let interrupts = Interrupts::route(client.clone(), client.irq_count(IrqIndex::Msix).min(4));
    step(interrupts.is_ok());
    if let Ok(window) = Window::open(client.clone(), now, 0, 0x1000) {
        step(true);
        window.write(Reg::<u32>::at(0x18), 1);
        let _ = window.read(Reg::<u32>::at(8));
        step(window.detach().is_ok());
    }
    for bar in 0..6 {
        // What may be mapped is mapped and looked at, as a window does it.
        let region = client.region(RegionIndex::Bar(bar));
        for (offset, len) in region.mappable {
            assert!(
                offset
                    .checked_add(len)
                    .is_some_and(|end| end <= region.size)
            );
            step(client.region_file(RegionIndex::Bar(bar), offset).is_ok());
        }
    }
    let clock = Arc::new(ManualClock::default());
    // What a server does not unmap is kept for ever: on a connection that is over, nothing is mapped.
    if client.broken().is_none()
        && let Ok(space) = AddressSpace::new(client.clone(), u64::MAX, clock)
    {
        let owner = ObjectId {
            device: client.id(),
            generation: now,
            serial: 1,
            kind: "MR",
        };
        for _ in 0..2 {
            // Dropped without proof: kept, until it is unmapped.
            step(space.map(owner, 4096).is_ok());
        }
        space.close();
        step(space.unmap_all(&|| true).unmapped == 2);
        step(space.settle(None).quarantined.is_empty());
    }
    step(client.reset().is_ok());
    client.expire(now);
    assert!(
        client
            .read(now, RegionIndex::Bar(0), 8, &mut bytes[..4])
            .is_err()
    );
    client.hang_up();
    went_well
}

/// Sends the stream message by message, as far as there is room for it: a descriptor belongs to a
/// message.
fn send(socket: &UnixStream, mut stream: &[u8], options: u8) {
    while !stream.is_empty() {
        let header = split::<Header>("header", stream).ok();
        let size = header.map_or(stream.len(), |(header, _)| header.size as usize);
        let (message, rest) = stream.split_at(size.clamp(1, stream.len()));
        stream = rest;
        let files = header.map_or_else(Vec::new, |(header, _)| {
            let about_regions = header.command == Command::DeviceGetRegionInfo.number();
            match about_regions && options & NO_FILES == 0 {
                true => files(message.get(Header::SIZE..).unwrap_or(&[]), options),
                false => Vec::new(),
            }
        });
        let fds: Vec<_> = files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        let control = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() {
            &[][..]
        } else {
            &control[..]
        };
        let sent = sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(message)],
            control,
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
            None,
        );
        if sent != Ok(message.len()) {
            return;
        }
    }
}

/// The files for an answer about a region: none for one that says nothing of mappings.
fn files(payload: &[u8], options: u8) -> Vec<File> {
    let Ok((info, areas)) = split::<RegionInfo>("region info", payload) else {
        return Vec::new();
    };
    if areas.is_empty() {
        return Vec::new();
    }
    let whole = info.size.min(LARGEST);
    let size = if options & SHORT == 0 {
        whole
    } else {
        whole / 2
    };
    let one = || {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("fuzz", flags).ok()?);
        file.set_len(size).ok()?;
        if options & UNSEALED == 0 {
            let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
            fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).ok()?;
        }
        Some(file)
    };
    let count = if options & TWICE == 0 { 1 } else { 2 };
    (0..count).filter_map(|_| one()).collect()
}
