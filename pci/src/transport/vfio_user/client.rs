//! The client: a [`Transport`] over a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::sys::stat::fstat;
use zerocopy::IntoBytes;

use super::access::{Access, same};
use super::connection::{Connection, Question, Silence, Time};
use super::describe::{Described, Description, IRQS, REGIONS, checked, describe};
use super::dial::dial;
use super::error::{Broken, CallError, ConnectError, Violation};
use super::socket::MAX_FDS;
use super::wire::{
    self, Command, DEFAULT_MAX_DATA, DmaFlags, DmaMap, DmaUnmap, IrqSet, IrqSetFlags,
};
use crate::id::{DeviceId, Generation};
use crate::left::SpaceLeft;
use crate::peer::{Peer, PeerEnded};
use crate::transport::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, ResetMethod, Strength, Transport, Unmapped,
};

/// IOVAs that a server may be given: as many as a four-level page table translates. The protocol
/// names no limit of its own.
const LAST_IOVA: u64 = (1 << 48) - 1;

/// How a client treats its server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// How long any call but a reset may take, however many messages it needs.
    pub deadline: Duration,
    /// How long a reset may take.
    pub reset_deadline: Duration,
    /// The process that serves, if this one started it: what is kept for want of an answer is
    /// released once it has ended.
    pub peer: Option<Arc<Peer>>,
}

impl Default for Options {
    /// Three seconds for a call and ten for a reset: long for a local process, short for a person.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(3),
            reset_deadline: Duration::from_secs(10),
            peer: None,
        }
    }
}

/// A PCI function that a vfio-user server serves to us.
///
/// Dropping it closes the connection, upon which a server must unmap everything; that it did is
/// not known.
#[derive(Debug)]
pub struct Client {
    id: DeviceId,
    name: String,
    options: Options,
    server_pid: Option<i32>,
    resettable: bool,
    regions: [Described; REGIONS],
    irqs: [u32; IRQS],
    /// Bytes of data in one access.
    max_data: usize,
    /// Descriptors in one message to the server.
    max_fds: usize,
    page_sizes: u64,
    max_maps: u64,
    live_maps: AtomicU64,
    /// When the last access may begin; none where there is no limit.
    bound: Mutex<Option<Instant>>,
    connection: Connection,
}

impl Client {
    /// Connects to the server that listens at `path`, and asks what it serves. The device is named
    /// `vfio-user:PATH`.
    ///
    /// # Errors
    ///
    /// [`ConnectError`], which says what to do about it.
    pub fn connect(path: impl AsRef<Path>, options: Options) -> Result<Arc<Self>, ConnectError> {
        let path = path.as_ref();
        let name = format!("vfio-user:{}", path.display());
        let socket = dial(path, &name, &options)?;
        Self::from_socket(socket, name, options)
    }

    /// Takes over a connected Unix stream socket on which nothing was said yet, and asks what is
    /// served there. With it a process can connect, or be given the socket, and then drop its
    /// privileges. `name` names the device in messages.
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub fn from_socket(
        socket: OwnedFd,
        name: impl Into<String>,
        options: Options,
    ) -> Result<Arc<Self>, ConnectError> {
        let name = name.into();
        match getsockopt(&socket, sockopt::SockType) {
            Ok(SockType::Stream) => {}
            other => {
                let source = other.err().unwrap_or(Errno::EPROTOTYPE).into();
                return Err(ConnectError::Socket { name, source });
            }
        }
        let server_pid = getsockopt(&socket, sockopt::PeerCredentials)
            .ok()
            .map(|credentials| credentials.pid())
            .filter(|pid| *pid > 0);
        let connection = match Connection::new(socket) {
            Ok(connection) => connection,
            Err(source) => return Err(ConnectError::Socket { name, source }),
        };
        let Description {
            capabilities,
            resettable,
            regions,
            irqs,
        } = describe(&connection, &name, || Time::from_now(options.deadline))?;
        Ok(Arc::new(Self {
            id: DeviceId::fresh(),
            name,
            options,
            server_pid,
            resettable,
            regions,
            irqs,
            max_data: clamp(capabilities.max_data_xfer_size.min(DEFAULT_MAX_DATA)),
            max_fds: clamp(capabilities.max_msg_fds).min(MAX_FDS),
            page_sizes: capabilities.pgsizes,
            max_maps: capabilities.max_dma_maps,
            live_maps: AtomicU64::new(0),
            bound: Mutex::default(),
            connection,
        }))
    }

    /// The process that listened on the socket when we connected (`SO_PEERCRED`). It names the
    /// server in messages and proves nothing: another process may hold the socket by now.
    #[must_use]
    pub fn server_pid(&self) -> Option<i32> {
        self.server_pid
    }

    /// Whether the server says that its device can be reset.
    #[must_use]
    pub fn can_reset(&self) -> bool {
        self.resettable
    }

    /// Why the connection is over, if it is. Every call fails then.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.connection.broken().cloned()
    }

    fn time(&self) -> Time {
        Time::from_now(self.options.deadline)
    }

    /// A question whose answer has a payload of `payload` bytes and no descriptors.
    fn ask(
        &self,
        command: Command,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        payload: usize,
        time: Time,
    ) -> Result<Vec<u8>, CallError> {
        let answer = self.connection.ask(&Question {
            command,
            body,
            data: &[],
            fds,
            payload: payload..=payload,
            max_fds: 0,
            generation: None,
            silence: match command {
                Command::DeviceReset | Command::DeviceSetIrqs => Silence::LeavesItOpen,
                _ => Silence::EndsTheConnection,
            },
            time,
        })?;
        Ok(answer.payload)
    }

    fn access(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        len: usize,
        perform: impl FnOnce(Access<'_>) -> Result<(), CallError>,
    ) -> Result<(), AccessError> {
        let end = offset.checked_add(len as u64);
        let inside = end.is_some_and(|end| end <= self.region_of(index).size);
        let result = if !inside {
            Err(CallError::NotSent(Errno::EINVAL))
        } else if self.is_bound_over() {
            Err(CallError::NotSent(Errno::ETIMEDOUT))
        } else {
            perform(Access {
                connection: &self.connection,
                region: index.number(),
                // The ladder turns bus mastering off in config space when the life is over.
                generation: (index != RegionIndex::Config).then_some(generation),
                silence: if index == RegionIndex::Config {
                    Silence::LeavesItOpen
                } else {
                    Silence::EndsTheConnection
                },
                time: self.time(),
            })
        };
        result.map_err(|error| match error {
            CallError::Expired => AccessError::Expired {
                device: self.name.clone(),
                region: index,
                generation,
            },
            error => AccessError::Failed {
                device: self.name.clone(),
                region: index,
                offset,
                len,
                source: error.into_io(),
            },
        })
    }

    fn is_bound_over(&self) -> bool {
        let bound = *self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.is_some_and(|last| Instant::now() >= last)
    }

    fn region_of(&self, index: RegionIndex) -> &Region {
        const ABSENT: &Region = &Region {
            size: 0,
            readable: false,
            writable: false,
            mappable: Vec::new(),
        };
        self.regions
            .get(index.number() as usize)
            .map_or(ABSENT, |described| &described.region)
    }

    fn map(&self, iova: Iova, memory: &DmaMemory<'_>) -> Result<(), CallError> {
        // A peer that can shrink the file can kill us: an access beyond its end is a SIGBUS (C46).
        let sealed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        let seals = fcntl(memory.fd(), FcntlArg::F_GET_SEALS).map_err(CallError::NotSent)?;
        if !SealFlag::from_bits_retain(seals).contains(sealed) {
            return Err(CallError::NotSent(Errno::EPERM));
        }
        let stat = fstat(memory.fd()).map_err(CallError::NotSent)?;
        let file = u64::try_from(stat.st_size).unwrap_or(0);
        let within = |end: Option<u64>, limit: u64| end.is_some_and(|end| end <= limit);
        if memory.is_empty()
            || !within(memory.offset().checked_add(memory.len()), file)
            || !within(iova.0.checked_add(memory.len() - 1), LAST_IOVA)
        {
            return Err(CallError::NotSent(Errno::EINVAL));
        }
        let body = DmaMap {
            argsz: argsz::<DmaMap>(),
            flags: (DmaFlags::READ | DmaFlags::WRITE).bits(),
            offset: memory.offset(),
            address: iova.0,
            size: memory.len(),
        };
        let fds = [memory.fd()];
        self.ask(Command::DmaMap, body.as_bytes(), &fds, 0, self.time())?;
        Ok(())
    }

    fn unmap(&self, iova: Iova, len: u64) -> Result<u64, CallError> {
        let command = Command::DmaUnmap;
        let body = DmaUnmap {
            argsz: argsz::<DmaUnmap>(),
            flags: 0,
            address: iova.0,
            size: len,
        };
        let size = size_of::<DmaUnmap>();
        let answer = self.ask(command, body.as_bytes(), &[], size, self.time())?;
        let answer = wire::exact::<DmaUnmap>("unmap reply", &answer)
            .map_err(Violation::from)
            .and_then(|answer| {
                same(command, "address", answer.address, iova.0)?;
                Ok(answer.size)
            });
        checked(&self.connection, answer)
    }

    fn set_some_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
        time: Time,
    ) -> Result<(), CallError> {
        let data = if eventfds.is_empty() {
            IrqSetFlags::DATA_NONE
        } else {
            IrqSetFlags::DATA_EVENTFD
        };
        let body = IrqSet {
            argsz: argsz::<IrqSet>(),
            flags: (data | IrqSetFlags::ACTION_TRIGGER).bits(),
            index: index.number(),
            start: first,
            count: u32::try_from(eventfds.len()).unwrap_or(u32::MAX),
        };
        self.ask(Command::DeviceSetIrqs, body.as_bytes(), eventfds, 0, time)?;
        Ok(())
    }
}

impl Transport for Client {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_lost(&self) -> bool {
        self.broken().is_some()
    }

    fn why_lost(&self) -> Option<String> {
        self.connection.broken().map(ToString::to_string)
    }

    fn kind(&self) -> Kind {
        Kind::VfioUser
    }

    fn strength(&self) -> Strength {
        Strength::ServerWord
    }

    fn region(&self, index: RegionIndex) -> Region {
        self.region_of(index).clone()
    }

    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        self.access(generation, index, offset, data.len(), |access| {
            let mut at = offset;
            for part in data.chunks_mut(self.max_data) {
                access.read(at, part)?;
                at += part.len() as u64;
            }
            Ok(())
        })
    }

    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.access(generation, index, offset, data.len(), |access| {
            let mut at = offset;
            for part in data.chunks(self.max_data) {
                access.write(at, part)?;
                at += part.len() as u64;
            }
            Ok(())
        })
    }

    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.access(generation, index, offset, data.len(), |access| {
            let mut at = offset;
            for part in data.chunks(self.max_data) {
                access.post(at, part)?;
                at += part.len() as u64;
            }
            Ok(())
        })
    }

    fn expire(&self, generation: Generation) {
        self.connection.expire(generation);
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        let unmappable = || {
            io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "{}: {index} cannot be mapped at {offset:#x}; access it by messages",
                    self.name
                ),
            )
        };
        let described = self
            .regions
            .get(index.number() as usize)
            .ok_or_else(unmappable)?;
        let mut areas = described.region.mappable.iter();
        let inside = areas.any(|(start, len)| (*start..*start + *len).contains(&offset));
        let (file, base) = described
            .file
            .as_ref()
            .filter(|_| inside)
            .ok_or_else(unmappable)?;
        Ok((file.try_clone()?, base + offset))
    }

    /// The protocol names no address limits; ours are those of a four-level page table. Page size
    /// and number of mappings are the server's (`pgsizes`, `max_dma_maps`).
    fn dma_limits(&self) -> io::Result<DmaLimits> {
        let smallest = 1u64
            .checked_shl(self.page_sizes.trailing_zeros())
            .unwrap_or(wire::DEFAULT_PAGE_SIZES);
        let live = self.live_maps.load(Ordering::Relaxed);
        let left = self.max_maps.saturating_sub(live);
        Ok(DmaLimits {
            ranges: vec![0..=LAST_IOVA],
            page_size: smallest.max(wire::DEFAULT_PAGE_SIZES),
            entries_left: Some(u32::try_from(left).unwrap_or(u32::MAX)),
        })
    }

    /// Sends the memory's file to the server, which can map it from then on, for as long as it
    /// likes. A file that is not sealed against shrinking, growing and further sealing is not sent
    /// (EPERM).
    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        let device = || self.name.clone();
        let len = memory.len();
        let room = self
            .live_maps
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
                (live < self.max_maps).then_some(live + 1)
            });
        if room.is_err() {
            return Err(MapError::TooMany { device: device() });
        }
        let Err(error) = self.map(iova, &memory) else {
            return Ok(());
        };
        // An unanswered map may be live for ever: it goes on counting.
        if let CallError::Unanswered(broken) = error {
            return Err(MapError::Unanswered {
                device: device(),
                iova,
                len,
                source: broken.into_io(),
            });
        }
        self.live_maps.fetch_sub(1, Ordering::Relaxed);
        let refused = matches!(error, CallError::Refused(_));
        Err(match error.errno() {
            Errno::EEXIST if refused => MapError::Exists {
                device: device(),
                iova,
                len,
            },
            Errno::ENOSPC if refused => MapError::TooMany { device: device() },
            // The server's memory, or its limit: raising ours would not help.
            Errno::ENOMEM if refused => MapError::Failed {
                device: device(),
                iova,
                len,
                source: io::Error::new(
                    io::ErrorKind::OutOfMemory,
                    "the vfio-user server has no memory for it (ENOMEM); look at its log",
                ),
            },
            _ => MapError::Failed {
                device: device(),
                iova,
                len,
                source: error.into_io(),
            },
        })
    }

    /// An answer that repeats address and size is `Exact`; one with another size is `Partial`, or
    /// `Absent` if that is 0. A refusal is `Absent` for ENOENT, `Busy` for EBUSY and EAGAIN, and
    /// otherwise `Failed`: a server that refuses with EINVAL may have found nothing, or only a part.
    /// No answer, or one that the protocol forbids, is `Failed`.
    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        match self.unmap(iova, len) {
            Ok(bytes) if bytes == len && len > 0 => {
                let _ = self
                    .live_maps
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
                        live.checked_sub(1)
                    });
                Unmapped::Exact
            }
            Ok(0) => Unmapped::Absent,
            Ok(bytes) => Unmapped::Partial { bytes },
            Err(error @ CallError::Refused(_)) => match error.errno() {
                Errno::ENOENT => Unmapped::Absent,
                Errno::EBUSY | Errno::EAGAIN => Unmapped::Busy,
                errno => Unmapped::Failed(errno),
            },
            Err(error) => Unmapped::Failed(error.errno()),
        }
    }

    fn irq_count(&self, index: IrqIndex) -> u32 {
        self.irqs.get(index.number() as usize).copied().unwrap_or(0)
    }

    /// As many messages as the server's `max_msg_fds` makes necessary. When one of them fails,
    /// the vectors of those before it are routed.
    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        let failed = |first: u32, error: CallError| IrqError {
            device: self.name.clone(),
            index,
            first,
            source: error.into_io(),
        };
        let time = self.time();
        if eventfds.is_empty() {
            return self
                .set_some_irqs(index, 0, &[], time)
                .map_err(|error| failed(0, error));
        }
        let end = u64::from(first) + eventfds.len() as u64;
        if end > self.irq_count(index).into() || self.max_fds == 0 {
            return Err(failed(first, CallError::NotSent(Errno::EINVAL)));
        }
        for (first, part) in (first..)
            .step_by(self.max_fds)
            .zip(eventfds.chunks(self.max_fds))
        {
            self.set_some_irqs(index, first, part, time)
                .map_err(|error| failed(first, error))?;
        }
        Ok(())
    }

    /// EINVAL, without asking, where the server says that there is no reset, as in the kernel; EBUSY,
    /// without asking, while an earlier reset has no answer. One that is not answered in time leaves
    /// the connection as it is.
    fn reset(&self) -> Result<(), ResetFailed> {
        let result = if !self.resettable {
            Err(CallError::NotSent(Errno::EINVAL))
        } else if self.is_reset_outstanding() {
            Err(CallError::NotSent(Errno::EBUSY))
        } else {
            let time = Time::from_now(self.options.reset_deadline);
            self.ask(Command::DeviceReset, &[], &[], 0, time).map(drop)
        };
        result.map_err(|error| match error {
            CallError::LeftBehind(_) => ResetFailed::Unanswered {
                device: self.name.clone(),
                source: error.into_io(),
            },
            error => ResetFailed::new(&self.name, error.into_io()),
        })
    }

    fn is_reset_outstanding(&self) -> bool {
        self.connection
            .is_left_behind(Command::DeviceReset, self.time())
    }

    fn reset_methods(&self) -> Vec<ResetMethod> {
        Vec::from_iter(self.resettable.then_some(ResetMethod::Server))
    }

    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        if self.reset_methods().contains(&method) {
            return self.reset();
        }
        Err(ResetFailed::NotOffered {
            device: self.name.clone(),
            method,
        })
    }

    /// Ends the connection, upon which a server must unmap everything; that it did is not known.
    fn hang_up(&self) -> Option<SpaceLeft> {
        self.connection.hang_up();
        None
    }

    fn peer_ended(&self) -> Option<PeerEnded> {
        PeerEnded::of(self.options.peer.as_deref()?, self.id)
    }

    fn bound(&self, total: Option<Duration>) {
        // One beyond the clock's range is none.
        let last = total.and_then(|total| Instant::now().checked_add(total));
        *self.bound.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }

    fn lifeline(&self) -> Option<Arc<dyn AsFd + Send + Sync>> {
        Some(self.connection.socket())
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.options.deadline.max(self.options.reset_deadline))
    }
}

const fn argsz<T>() -> u32 {
    const { assert!(size_of::<T>() <= 64) };
    size_of::<T>() as u32
}

fn clamp(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}
