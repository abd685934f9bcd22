//! The server as a client sees it that knows only the protocol: well-behaved, careless, hostile.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use failstop_emulator::{Emulator, Options, Running};
use failstop_pci::transport::vfio_user::wire::{
    self, Capabilities, Command, DmaMap, DmaUnmap, Flags, Header, RegionAccess, RegionInfo, Version,
};
use nix::errno::Errno;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use zerocopy::{FromBytes, IntoBytes};

#[path = "server/faults.rs"]
mod faults;

const PAGE: u64 = 4096;

/// A client that says whatever a test wants said.
struct Raw {
    socket: UnixStream,
    id: u16,
}

impl Raw {
    /// Connected, nothing said yet.
    fn silent(emulator: &Running) -> Self {
        let socket = UnixStream::connect(emulator.socket_path()).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self { socket, id: 0 }
    }

    /// Connected and agreed on a version.
    fn connect(emulator: &Running) -> Self {
        let mut client = Self::silent(emulator);
        let version = Version { major: 0, minor: 1 };
        let payload = wire::encode_version(version, &Capabilities::default());
        client.call(Command::Version, &payload).unwrap();
        client
    }

    fn header(&mut self, command: Command, flags: Flags, payload: usize) -> Header {
        self.id += 1;
        Header::command(self.id, command, flags, payload)
    }

    fn call(&mut self, command: Command, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        self.call_with(command, payload, &[])
    }

    fn call_with(
        &mut self,
        command: Command,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, Errno> {
        let header = self.header(command, Flags::empty(), payload.len());
        let bytes = wire::encode(&header, payload, &[]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .unwrap();
        self.answer()
    }

    /// The next reply: its payload, or its errno.
    fn answer(&mut self) -> Result<Vec<u8>, Errno> {
        let (header, payload) = self.reply().expect("the connection ended");
        assert_eq!(header.id, self.id, "a reply to another message");
        if header.flags & Flags::ERROR.bits() != 0 {
            Err(Errno::from_raw(header.error as i32))
        } else {
            Ok(payload)
        }
    }

    /// The next message from the server; none when it hung up.
    fn reply(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; Header::SIZE];
        self.socket.read_exact(&mut head).ok()?;
        let header = Header::read_from_bytes(&head).unwrap();
        let mut payload = vec![0; header.payload().unwrap()];
        self.socket.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }

    fn map(&mut self, address: u64, pages: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let map = DmaMap {
            argsz: 32,
            flags: 3,
            offset: 0,
            address,
            size: pages * PAGE,
        };
        self.call_with(Command::DmaMap, map.as_bytes(), fds)
            .map(drop)
    }

    /// Asks, and waits for nothing.
    fn ask(&mut self, command: Command, payload: &[u8]) -> u16 {
        let header = self.header(command, Flags::empty(), payload.len());
        let bytes = wire::encode(&header, payload, &[]);
        self.socket.write_all(&bytes).unwrap();
        header.id
    }

    fn unmap(&mut self, address: u64, size: u64) -> Result<u64, Errno> {
        let unmap = DmaUnmap {
            argsz: 24,
            flags: 0,
            address,
            size,
        };
        let reply = self.call(Command::DmaUnmap, unmap.as_bytes())?;
        Ok(DmaUnmap::read_from_bytes(&reply).unwrap().size)
    }

    fn access(region: u32, offset: u64, count: u32) -> RegionAccess {
        RegionAccess {
            offset,
            region,
            count,
        }
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, Errno> {
        let access = Self::access(region, offset, count);
        let reply = self.call(Command::RegionRead, access.as_bytes())?;
        Ok(reply[size_of::<RegionAccess>()..].to_vec())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let mut payload = Self::access(region, offset, data.len() as u32)
            .as_bytes()
            .to_vec();
        payload.extend_from_slice(data);
        self.call(Command::RegionWrite, &payload).map(drop)
    }

    fn post(&mut self, region: u32, offset: u64, data: &[u8]) {
        let mut payload = Self::access(region, offset, data.len() as u32)
            .as_bytes()
            .to_vec();
        payload.extend_from_slice(data);
        let header = self.header(Command::RegionWrite, Flags::NO_REPLY, payload.len());
        let bytes = wire::encode(&header, &payload, &[]);
        self.socket.write_all(&bytes).unwrap();
    }

    fn device_id(&mut self) -> Result<Vec<u8>, Errno> {
        self.read(7, 0, 4)
    }
}

fn emulator() -> Running {
    Emulator::on_threads(&Options::default()).unwrap()
}

fn memory(pages: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("client", flags).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

/// The server serves: it takes a client and knows what it is.
fn assert_serves(emulator: &Running) {
    let id = Raw::connect(emulator).device_id();
    assert_eq!(id, Ok(vec![0x86, 0x80, 0xc9, 0x10]));
}

#[test]
fn the_device_is_an_82576() {
    assert_serves(&emulator());
}

#[test]
fn clients_come_one_after_another() {
    let mut emulator = emulator();
    for _ in 0..3 {
        assert_serves(&emulator);
    }
    assert_eq!(emulator.stats().unwrap().server.clients, 3);
}

#[test]
fn a_first_message_that_is_no_version_ends_the_connection() {
    let emulator = emulator();
    let mut client = Raw::silent(&emulator);
    assert_eq!(client.device_id(), Err(Errno::EINVAL));
    assert!(client.reply().is_none());
    assert_serves(&emulator);
}

#[test]
fn another_major_version_is_refused() {
    let emulator = emulator();
    let mut client = Raw::silent(&emulator);
    let payload = wire::encode_version(Version { major: 9, minor: 0 }, &Capabilities::default());
    assert_eq!(
        client.call(Command::Version, &payload),
        Err(Errno::EOPNOTSUPP)
    );
    assert_serves(&emulator);
}

#[test]
fn only_the_flash_can_be_mapped() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let mut mappable = Vec::new();
    for index in 0..9 {
        let info = RegionInfo {
            argsz: 256,
            flags: 0,
            index,
            cap_offset: 0,
            size: 0,
            offset: 0,
        };
        let reply = client
            .call(Command::DeviceGetRegionInfo, info.as_bytes())
            .unwrap();
        let (_, areas) = wire::parse_region_info(&reply).unwrap();
        mappable.extend(areas.map(|areas| (index, areas[0].size)));
    }
    assert_eq!(mappable, [(1, 128 * 1024)]);
}

#[test]
fn the_flash_is_read_and_written_by_message_too() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(1, 0x100, &[1, 2, 3]).unwrap();
    assert_eq!(client.read(1, 0xff, 5), Ok(vec![0xff, 1, 2, 3, 0xff]));
}

#[test]
fn an_unmap_answers_what_it_unmapped_and_refuses_the_rest() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let fd = memory(4);
    client.map(0x10000, 4, &[fd.as_fd()]).unwrap();
    assert_eq!(client.unmap(0x10000, PAGE), Err(Errno::EINVAL));
    assert_eq!(client.unmap(0x80000, PAGE), Err(Errno::ENOENT));
    assert_eq!(client.unmap(0x10000, 4 * PAGE), Ok(4 * PAGE));
    assert_eq!(client.unmap(0x10000, 4 * PAGE), Err(Errno::ENOENT));
}

#[test]
fn two_descriptors_for_one_mapping_are_refused() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let fd = memory(1);
    let result = client.map(0, 1, &[fd.as_fd(), fd.as_fd()]);
    assert_eq!(result, Err(Errno::EINVAL));
    assert!(client.device_id().is_ok());
}

#[test]
fn more_descriptors_than_a_message_may_have_end_the_connection() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let fd = memory(1);
    let header = client.header(Command::DmaMap, Flags::empty(), 0);
    let fds = [fd.as_fd(); 20];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [IoSlice::new(header.as_bytes())];
    rustix::net::sendmsg(&client.socket, &bytes, &mut control, SendFlags::empty()).unwrap();
    assert!(client.reply().is_none());
    assert_serves(&emulator);
}

#[test]
fn mappings_end_with_their_client() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.map(0, 1, &[memory(1).as_fd()]).unwrap();
    assert_eq!(emulator.stats().unwrap().server.mappings, 1);
    drop(client);
    assert_serves(&emulator);
    assert_eq!(emulator.stats().unwrap().server.mappings, 0);
}

#[test]
fn the_device_is_reset_when_its_client_goes() {
    let emulator = emulator();
    Raw::connect(&emulator).write(7, 4, &[6, 0]).unwrap();
    assert_eq!(Raw::connect(&emulator).read(7, 4, 2), Ok(vec![0, 0]));
}

#[test]
fn a_reset_turns_bus_mastering_off() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(7, 4, &[6, 0]).unwrap();
    assert!(emulator.stats().unwrap().bus_master);
    client.call(Command::DeviceReset, &[]).unwrap();
    assert!(!emulator.stats().unwrap().bus_master);
}

#[test]
fn a_posted_write_is_done_and_not_answered() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.post(7, 4, &[6, 0]);
    // One out of range, too: its refusal is not answered either.
    client.post(0, u64::MAX, &[0; 4]);
    assert_eq!(client.read(7, 4, 1), Ok(vec![6]));
}

#[test]
fn truncated_payloads_of_every_command_are_answered_with_an_error() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    for number in 1..=13 {
        let command = Command::from_number(number).unwrap();
        for len in 0..12 {
            let result = client.call(command, &vec![0xFF; len]);
            let may_be_empty = command == Command::DeviceReset;
            assert!(
                result.is_err() || may_be_empty,
                "{command:?} of {len} bytes"
            );
        }
    }
    assert!(client.device_id().is_ok());
}

#[test]
fn an_unknown_command_is_not_supported() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let mut header = client.header(Command::Version, Flags::empty(), 0);
    header.command = 77;
    client.socket.write_all(header.as_bytes()).unwrap();
    assert_eq!(client.answer(), Err(Errno::EOPNOTSUPP));
}

#[test]
fn accesses_out_of_range_are_refused() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    for (region, offset, count) in [
        (0, 128 * 1024, 4),
        (0, 0, 0),
        (0, u64::MAX, 8),
        (1, 128 * 1024 - 1, 2),
        (4, 0, 4),
        (7, 4096, 1),
        (8, 0, 4),
        (9, 0, 4),
        (u32::MAX, 0, 4),
        (7, 0, u32::MAX),
    ] {
        let result = client.read(region, offset, count);
        assert_eq!(result, Err(Errno::EINVAL), "{region} {offset:#x} {count}");
    }
}

#[test]
fn garbage_ends_its_connection_and_nothing_else() {
    let emulator = emulator();
    // A linear congruential generator: every run says the same nonsense.
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    for _ in 0..50 {
        let mut client = Raw::connect(&emulator);
        let mut bytes = Vec::new();
        for _ in 0..64 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            bytes.extend_from_slice(&state.to_ne_bytes());
        }
        // A size that is believed now and then, so that the payload is looked at too.
        let size = 16 + (state >> 40) as u32 % 64;
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        bytes[2] = (state >> 32) as u8 % 16;
        bytes[3] = 0;
        bytes[8..12].copy_from_slice(&[0; 4]);
        // The server may hang up while we still talk.
        let _refused = client.socket.write_all(&bytes);
    }
    assert_serves(&emulator);
}

#[test]
fn a_message_cut_short_ends_its_connection_and_nothing_else() {
    let emulator = emulator();
    let mut client = Raw::connect(&emulator);
    let header = client.header(Command::RegionWrite, Flags::empty(), 4096);
    client.socket.write_all(header.as_bytes()).unwrap();
    drop(client);
    assert_serves(&emulator);
}

#[test]
fn stray_dma_is_counted_and_wedges_nothing_but_its_queue() {
    let mut emulator = emulator();
    let mut client = Raw::connect(&emulator);
    client.write(7, 4, &[6, 0]).unwrap();
    for (offset, value) in [
        (0x0000, 0x0000_0A41u32), // CTRL: set link up, forced 1000 Mb/s full duplex
        (0x0020, 0x0420_4140),    // MDIC: PHY loopback
        (0xE000, 0xDEAD_0000),    // TDBAL
        (0xE008, 128),            // TDLEN
        (0xE028, 1 << 25),        // TXDCTL: enable
        (0x0400, 2),              // TCTL: enable
        (0xE018, 1),              // TDT
    ] {
        client.write(0, offset, &value.to_le_bytes()).unwrap();
    }
    let stray = emulator.stats().unwrap().stray;
    assert_eq!((stray.reads, stray.addresses), (1, vec![0xDEAD_0000]));
    assert!(client.device_id().is_ok());
}
