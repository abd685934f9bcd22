//! A vfio-user server that does exactly what a test tells it.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use failstop_pci::transport::DmaMemory;
use failstop_pci::transport::vfio_user::socket::{self, ReceiveError};
use failstop_pci::transport::vfio_user::wire::{
    self, Capabilities, Command, DeviceFlags, DeviceInfo, Header, IrqInfo, RegionAccess,
    RegionFlags, RegionInfo, Version,
};
use failstop_pci::transport::vfio_user::{Client, ConnectError, Options};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{setsockopt, sockopt};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of BAR 0.
pub(crate) const BAR: u64 = 0x2_0000;
/// MSI-X vectors.
pub(crate) const VECTORS: u32 = 10;

/// Long enough for any honest answer.
pub(crate) fn patient() -> Options {
    Options {
        deadline: Duration::from_secs(5),
        reset_deadline: Duration::from_secs(5),
        peer: None,
    }
}

/// For servers that hang.
pub(crate) fn impatient() -> Options {
    Options {
        deadline: Duration::from_millis(50),
        reset_deadline: Duration::from_millis(50),
        peer: None,
    }
}

/// A message that the client sent.
pub(crate) struct Received {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Received {
    pub(crate) fn body<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.payload).unwrap().0
    }

    pub(crate) fn access(&self) -> RegionAccess {
        self.body()
    }
}

/// The server's end.
pub(crate) struct Peer(pub(crate) UnixStream);

impl Peer {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// The client's next message; none when it hung up.
    pub(crate) fn receive(&self) -> Option<Received> {
        let mut payload = Vec::new();
        // A client that neither speaks nor hangs up fails the test, instead of hanging it.
        let deadline = Some(Instant::now() + Duration::from_secs(20));
        match socket::receive(self.fd(), 1 << 21, 64, deadline, &mut payload) {
            Ok((header, fds)) => Some(Received {
                header,
                payload,
                fds,
            }),
            Err(ReceiveError::Closed) => None,
            Err(error) => panic!("the client did not do what it should: {error}"),
        }
    }

    /// The client's next message, which is this command.
    pub(crate) fn expect(&self, command: Command) -> Received {
        let received = self.receive().expect("the client hung up");
        assert_eq!(received.header.command, command.number());
        received
    }

    pub(crate) fn send(&self, header: &Header, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let message = wire::encode(header, payload, &[]);
        socket::send(self.fd(), &message, fds, None).unwrap();
    }

    pub(crate) fn reply(&self, to: &Received, payload: &[u8]) {
        self.send(&to.header.reply(payload.len()), payload, &[]);
    }

    pub(crate) fn fail(&self, to: &Received, errno: u32) {
        self.send(&to.header.failure(errno), &[], &[]);
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// The answer to a register read, as it is sent.
    pub(crate) fn read_answer(to: &Received, value: u32) -> Vec<u8> {
        let mut payload = to.access().as_bytes().to_vec();
        payload.extend_from_slice(&value.to_le_bytes());
        wire::encode(&to.header.reply(payload.len()), &payload, &[])
    }

    /// Answers a register read.
    pub(crate) fn answer_read(&self, to: &Received, value: u32) {
        socket::send(self.fd(), &Self::read_answer(to, value), &[], None).unwrap();
    }

    /// Waits until the client has hung up; it says nothing more before that.
    pub(crate) fn expect_hang_up(&self) {
        assert!(self.receive().is_none(), "the client went on talking");
    }

    /// Answers everything that a client asks when it opens the device.
    pub(crate) fn answer_opening(&self) {
        self.answer_opening_with(&Capabilities {
            max_msg_fds: 4,
            ..Capabilities::default()
        });
    }

    pub(crate) fn answer_opening_with(&self, capabilities: &Capabilities) {
        self.answer_version(capabilities);
        self.answer_device_info(DeviceFlags::PCI | DeviceFlags::RESET);
        for _ in 0..8 {
            let asked = self.expect(Command::DeviceGetRegionInfo);
            self.answer_region(&asked);
        }
        for _ in 0..5 {
            let asked = self.expect(Command::DeviceGetIrqInfo);
            let mut info: IrqInfo = asked.body();
            info.count = if info.index == 2 { VECTORS } else { 1 };
            self.reply(&asked, info.as_bytes());
        }
    }

    pub(crate) fn answer_version(&self, capabilities: &Capabilities) {
        let asked = self.expect(Command::Version);
        let version = Version { major: 0, minor: 1 };
        self.reply(&asked, &wire::encode_version(version, capabilities));
    }

    pub(crate) fn answer_device_info(&self, flags: DeviceFlags) {
        let asked = self.expect(Command::DeviceGetInfo);
        let info = DeviceInfo {
            argsz: 16,
            flags: flags.bits(),
            num_regions: 9,
            num_irqs: 5,
        };
        self.reply(&asked, info.as_bytes());
    }

    pub(crate) fn answer_region(&self, asked: &Received) {
        let mut info: RegionInfo = asked.body();
        info.size = match info.index {
            0 => BAR,
            7 => 4096,
            _ => 0,
        };
        info.flags = (RegionFlags::READ | RegionFlags::WRITE).bits();
        self.reply(asked, &wire::encode_region_info(info, &[], 32));
    }
}

/// A server thread. Joining it shows its panics.
pub(crate) struct Server(Option<JoinHandle<()>>);

impl Server {
    pub(crate) fn join(mut self) {
        self.0.take().unwrap().join().unwrap();
    }
}

/// Connects a client to a server that answers the opening, and does what `script` says after it.
pub(crate) fn opened(
    options: Options,
    script: impl FnOnce(Peer) + Send + 'static,
) -> (Arc<Client>, Server) {
    let (client, server) = opening(options, |peer| {
        peer.answer_opening();
        script(peer);
    });
    (client.unwrap(), server)
}

/// As [`opened`], and the socket takes so little that a message of many KiB goes out in parts.
pub(crate) fn opened_narrow(
    options: Options,
    script: impl FnOnce(Peer) + Send + 'static,
) -> (Arc<Client>, Server) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    setsockopt(&ours, sockopt::SndBuf, &(8 << 10)).unwrap();
    let (client, server) = opening_on(ours, theirs, options, |peer| {
        peer.answer_opening();
        script(peer);
    });
    (client.unwrap(), server)
}

/// Connects a client to a server that does what `script` says from the start.
pub(crate) fn opening(
    options: Options,
    script: impl FnOnce(Peer) + Send + 'static,
) -> (Result<Arc<Client>, ConnectError>, Server) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    opening_on(ours, theirs, options, script)
}

fn opening_on(
    ours: UnixStream,
    theirs: UnixStream,
    options: Options,
    script: impl FnOnce(Peer) + Send + 'static,
) -> (Result<Arc<Client>, ConnectError>, Server) {
    let server = std::thread::spawn(move || script(Peer(theirs)));
    let client = Client::from_socket(ours.into(), "vfio-user:test", options);
    (client, Server(Some(server)))
}

/// One page of shared memory, mapped here.
pub(crate) struct Page {
    file: File,
    map: memmap2::MmapRaw,
}

impl Page {
    pub(crate) const LEN: u64 = 4096;

    pub(crate) fn unsealed() -> Self {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("page", flags).unwrap());
        file.set_len(Self::LEN).unwrap();
        let map = memmap2::MmapRaw::map_raw(&file).unwrap();
        Self { file, map }
    }

    pub(crate) fn sealed() -> Self {
        let page = Self::unsealed();
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&page.file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        page
    }

    #[expect(unsafe_code, reason = "a test vouches for its page")]
    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        let addr = NonNull::new(self.map.as_mut_ptr()).unwrap();
        // SAFETY: the page is mapped for as long as `self` is borrowed, and nobody looks at it
        // through a reference.
        unsafe { DmaMemory::new(addr, Self::LEN, self.file.as_fd(), 0) }
    }

    #[expect(unsafe_code, reason = "reads memory that a peer may write")]
    pub(crate) fn first_byte(&self) -> u8 {
        // SAFETY: the mapping has at least one byte and lives as long as `self`.
        unsafe { self.map.as_ptr().read_volatile() }
    }
}

/// A file of `len` bytes in memory, as servers have for a region that can be mapped.
pub(crate) fn memory_file(len: u64) -> File {
    let file = File::from(memfd_create("region", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}
