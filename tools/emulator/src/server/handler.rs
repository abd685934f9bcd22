//! What each command does, and its reply.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use failstop_pci::transport::vfio_user::wire::{
    Capabilities, Command, DeviceFlags, DeviceInfo, DmaMap, DmaUnmap, Flags, Header, IrqInfo,
    IrqSet, MAJOR, MINOR, Malformed, RegionAccess, RegionFlags, RegionInfo, SparseArea, Version,
    encode, encode_region_info, encode_version, exact, parse_version, split,
};
use nix::errno::Errno;
use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::IntoBytes;

use super::connection::{MAX_DATA, MAX_FDS, Message};
use super::incoming::Incoming;
use super::irqs::{self, Irqs};
use super::memory::{ClientMemory, MAX_MAPPINGS, PAGE};
use super::misbehaviour::{Trouble, cut_short};
use super::wire::Wire;
use crate::device::{CONFIG_SIZE, Device, Region, Reset, bar_size};
use crate::faults::fault::MessageType;
use crate::faults::{Fault, Moment};
use crate::host::{Abort, Host, Notice};
use crate::stats::{ServerCounters, Stats};

/// BARs, expansion ROM (none), configuration space, VGA (none) (`VFIO_PCI_NUM_REGIONS`).
const REGIONS: u32 = 9;
pub(super) const REGISTERS: u32 = 0;
const FLASH: u32 = 1;
pub(super) const CONFIG: u32 = 7;
/// `VFIO_DMA_UNMAP_FLAG_ALL` of `linux/vfio.h`.
const UNMAP_ALL: u32 = 1 << 1;

/// The world around the device: its client's memory and eventfds, the cable, the machine's clock.
#[derive(Debug)]
pub struct World {
    /// What the client mapped.
    pub memory: ClientMemory,
    /// What the client wants to hear.
    pub irqs: Irqs,
    /// The cable.
    pub wire: Wire,
    start: Instant,
}

impl Host for World {
    fn dma_read(&mut self, iova: u64, data: &mut [u8]) -> Result<(), Abort> {
        self.memory.read(iova, data)
    }

    fn dma_write(&mut self, iova: u64, data: &[u8]) {
        self.memory.write(iova, data);
    }

    fn dma_load(&mut self, iova: u64) -> Result<u64, Abort> {
        self.memory.load(iova)
    }

    fn dma_store(&mut self, iova: u64, value: u64) {
        self.memory.store(iova, value);
    }

    fn mapping(&self, iova: u64) -> Option<u64> {
        self.memory.mapping_at(iova)
    }

    fn notice(&mut self, notice: Notice) {
        self.irqs.tell(notice);
    }

    fn interrupt(&mut self, vector: u32) {
        self.irqs.fire(vector);
    }

    fn transmit(&mut self, frame: &[u8]) {
        self.wire.send(frame);
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// What a handled message leads to.
#[derive(Debug)]
pub enum Outcome {
    /// This goes to the client, with a descriptor perhaps.
    Reply(Vec<u8>, Option<OwnedFd>),
    /// Nothing does.
    Silence,
    /// This goes to the client, and the connection ends.
    Hangup(Vec<u8>),
    /// The server ends.
    Death,
}

/// Why a command is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    /// For this reason.
    Errno(Errno),
    /// A fault leaves it without an answer.
    Silence,
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

type Payload = (Vec<u8>, Option<OwnedFd>);

/// A device with its world, and the commands that a client may give.
#[derive(Debug)]
pub struct Service {
    /// The device.
    pub device: Device,
    /// The world around it.
    pub world: World,
    flash: File,
    /// What faults of the server are about.
    pub(super) trouble: Trouble,
    negotiated: bool,
    pub(super) counters: ServerCounters,
}

impl Service {
    /// A device with this MAC address on this cable.
    ///
    /// # Errors
    ///
    /// When the memory of the flash BAR cannot be made.
    pub fn new(mac: [u8; 6], wire: Wire) -> io::Result<Self> {
        let mut world = World {
            memory: ClientMemory::default(),
            irqs: Irqs::default(),
            wire,
            start: Instant::now(),
        };
        let mut device = Device::new(mac, world.now());
        if world.wire.is_connected() {
            device.set_carrier(true, &mut world);
        }
        Ok(Self {
            device,
            world,
            flash: flash()?,
            trouble: Trouble::default(),
            negotiated: false,
            counters: ServerCounters::default(),
        })
    }

    /// Everything that is counted.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (mappings, mapped_bytes, peak_mappings) = self.world.memory.extent();
        Stats {
            device: self.device.counters().clone(),
            dma: self.world.memory.dma().clone(),
            stray: self.world.memory.stray().clone(),
            rogue: self.device.rogue_dma().clone(),
            server: ServerCounters {
                mappings,
                mapped_bytes,
                peak_mappings,
                wire_dropped: self.world.wire.dropped(),
                ..self.counters.clone()
            },
            bus_master: self.device.is_bus_master(),
            link: self.device.has_link(),
            queues: self.device.running_queues(),
        }
    }

    /// Sets every counter to 0.
    pub fn reset_counters(&mut self) {
        self.device.reset_counters();
        self.world.memory.reset_counters();
        self.world.wire.reset_counters();
        self.counters = ServerCounters {
            clients: self.counters.clients,
            ..ServerCounters::default()
        };
    }

    /// A client came.
    pub fn attach(&mut self) {
        self.counters.clients += 1;
        self.negotiated = false;
        self.trouble.unanswered = 0;
        self.device.note(Moment::Open, &mut self.world);
    }

    /// The client is gone, and with it all that it mapped and asked for. The device loses bus
    /// mastering and is reset, as the kernel does it when the last reference to a function is closed.
    pub fn detach(&mut self) {
        self.device.note(Moment::Detach, &mut self.world);
        self.device.release(&mut self.world);
        self.world.memory.clear();
        self.world.irqs.clear();
        self.negotiated = false;
    }

    /// Whether this fault has begun.
    pub(super) fn has(&self, fault: Fault) -> bool {
        self.device.faults().has(fault)
    }

    /// Does what a message asks, or what a fault makes of it.
    pub fn handle(&mut self, message: Message) -> Outcome {
        self.counters.messages += 1;
        let header = message.header;
        let incoming = Incoming::of(&message);
        self.note(incoming);
        if let Some(instead) = self.interfere(incoming, &header) {
            return instead;
        }
        let first = !self.negotiated;
        let result = self.dispatch(message);
        if let Err(Refusal::Errno(errno)) = &result {
            self.counters.refused += 1;
            log::debug!("command {} refused: {errno}", header.command);
        }
        let hang_up = first && result.is_err();
        if header.wants_no_reply() && !hang_up {
            return Outcome::Silence;
        }
        match result {
            Ok((payload, fd)) => {
                let reply = encode(&header.reply(payload.len()), &payload, &[]);
                Outcome::Reply(self.shorten(incoming, reply), fd)
            }
            Err(Refusal::Silence) => Outcome::Silence,
            Err(Refusal::Errno(errno)) => {
                let reply = encode(&header.failure(errno as u32), &[], &[]);
                if hang_up {
                    Outcome::Hangup(reply)
                } else {
                    Outcome::Reply(reply, None)
                }
            }
        }
    }

    /// Tells faults that wait for a message that it came.
    fn note(&mut self, incoming: Incoming) {
        self.device.note(Moment::Message, &mut self.world);
        let moment = match incoming.of {
            Some(MessageType::Map) => Moment::Map,
            Some(MessageType::Unmap) => Moment::Unmap,
            Some(MessageType::Reset) => Moment::Reset,
            _ => return,
        };
        self.device.note(moment, &mut self.world);
    }

    fn dispatch(&mut self, message: Message) -> Result<Payload, Refusal> {
        let header: Header = message.header;
        let payload = &message.payload[..];
        if header.flags().is_none_or(|flags| flags.bits() & 0xF != 0) {
            // No reply is expected, but to what a fault made the server ask.
            let answers = header
                .flags()
                .is_some_and(|flags| flags.contains(Flags::REPLY));
            return Err(if answers && self.trouble.take_answer() {
                Refusal::Silence
            } else {
                Errno::EINVAL.into()
            });
        }
        let command = Command::from_number(header.command).ok_or(Errno::ENOTSUP)?;
        if self.negotiated == (command == Command::Version) {
            return Err(Errno::EINVAL.into());
        }
        match command {
            Command::Version => Ok(plain(self.version(payload)?)),
            Command::DmaMap => {
                let map: DmaMap = exact("DMA map", payload).map_err(invalid)?;
                let fd = one(message.fds)?;
                if let Some(fd) = &fd
                    && self.has(Fault::TruncateDma)
                {
                    cut_short(fd);
                }
                self.world
                    .memory
                    .map(map.address, map.size, map.offset, map.flags, fd)?;
                Ok(plain(Vec::new()))
            }
            Command::DmaUnmap => Ok(plain(self.unmap(payload)?)),
            Command::DeviceGetInfo => {
                exact::<DeviceInfo>("device info", payload).map_err(invalid)?;
                let mut flags = DeviceFlags::RESET | DeviceFlags::PCI;
                flags.set(DeviceFlags::RESET, !self.has(Fault::NoFlr));
                let info = DeviceInfo {
                    argsz: size_of::<DeviceInfo>() as u32,
                    flags: flags.bits(),
                    num_regions: REGIONS,
                    num_irqs: irqs::KINDS,
                };
                Ok(plain(info.as_bytes().to_vec()))
            }
            Command::DeviceGetRegionInfo => Ok(self.region_info(payload)?),
            Command::DeviceGetIrqInfo => Ok(plain(irq_info(payload)?)),
            Command::DeviceSetIrqs => {
                let (set, data) = split::<IrqSet>("IRQ set", payload).map_err(invalid)?;
                self.world.irqs.set(&set, data, message.fds)?;
                // A message that waited for its eventfd goes out.
                self.device.run(&mut self.world);
                Ok(plain(Vec::new()))
            }
            Command::RegionRead => Ok(plain(self.region_read(payload)?)),
            Command::RegionWrite => Ok(plain(self.region_write(payload)?)),
            Command::DeviceReset => {
                exact::<[u8; 0]>("reset", payload).map_err(invalid)?;
                match self.device.reset_function(&mut self.world) {
                    Reset::Done => Ok(plain(Vec::new())),
                    Reset::Failed(errno) => Err(errno.into()),
                    Reset::Absent => Err(Errno::ENOTSUP.into()),
                    Reset::Hangs => Err(Refusal::Silence),
                }
            }
            Command::DeviceGetRegionIoFds | Command::DmaRead | Command::DmaWrite => {
                Err(Errno::ENOTSUP.into())
            }
        }
    }

    fn version(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let (theirs, capabilities) = parse_version(payload).map_err(invalid)?;
        if theirs.major != MAJOR {
            log::warn!(
                "the client speaks vfio-user {}.{}",
                theirs.major,
                theirs.minor
            );
            return Err(Errno::ENOTSUP);
        }
        log::debug!("client: {capabilities:?}");
        self.negotiated = true;
        let ours = Version {
            major: MAJOR,
            minor: theirs.minor.min(MINOR),
        };
        let capabilities = Capabilities {
            max_msg_fds: MAX_FDS as u64,
            max_data_xfer_size: MAX_DATA as u64,
            max_dma_maps: MAX_MAPPINGS as u64,
            pgsizes: PAGE,
        };
        Ok(encode_version(ours, &capabilities))
    }

    fn unmap(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        // With a dirty bitmap asked for, more follows; there is none to give.
        let mut unmap: DmaUnmap = exact("DMA unmap", payload).map_err(invalid)?;
        unmap.size = match unmap.flags {
            0 => self.world.memory.unmap(unmap.address, unmap.size)?,
            UNMAP_ALL if unmap.address == 0 && unmap.size == 0 => {
                let (_, bytes, _) = self.world.memory.extent();
                self.world.memory.clear();
                bytes
            }
            _ => return Err(Errno::EINVAL),
        };
        Ok(unmap.as_bytes().to_vec())
    }

    fn region_info(&mut self, payload: &[u8]) -> Result<Payload, Errno> {
        let asked: RegionInfo = exact("region info", payload).map_err(invalid)?;
        if asked.index >= REGIONS {
            return Err(Errno::EINVAL);
        }
        let size = region_size(asked.index);
        let mut flags = RegionFlags::READ | RegionFlags::WRITE;
        if size == 0 {
            flags = RegionFlags::empty();
        }
        let mut areas = Vec::new();
        let file = match asked.index {
            FLASH => Some(self.flash.try_clone()),
            REGISTERS if self.has(Fault::TruncateBar) => Some(self.offer_registers()),
            _ => None,
        };
        if file.is_some() {
            flags |= RegionFlags::MMAP;
            areas.push(SparseArea { offset: 0, size });
        }
        let info = RegionInfo {
            argsz: asked.argsz,
            flags: flags.bits(),
            index: asked.index,
            cap_offset: 0,
            size,
            offset: 0,
        };
        let reply = encode_region_info(info, &areas, asked.argsz);
        // The descriptor comes with the areas that it is for.
        let fd = file
            .filter(|_| reply.len() > size_of::<RegionInfo>())
            .transpose()
            .map_err(|_| Errno::EMFILE)?;
        Ok((reply, fd.map(OwnedFd::from)))
    }

    fn region_read(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let access: RegionAccess = exact("region read", payload).map_err(invalid)?;
        let count = bounded(&access)?;
        let mut reply = access.as_bytes().to_vec();
        let head = reply.len();
        reply.resize(head + count, 0);
        let data = &mut reply[head..];
        match model_region(access.region) {
            Some(region) => self
                .device
                .read(region, access.offset, data, &mut self.world)
                .map_err(|_| Errno::EINVAL)?,
            None => self
                .flash
                .read_exact_at(data, access.offset)
                .map_err(|_| Errno::EIO)?,
        }
        Ok(reply)
    }

    fn region_write(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let (access, data) = split::<RegionAccess>("region write", payload).map_err(invalid)?;
        let count = bounded(&access)?;
        if data.len() != count {
            return Err(Errno::EINVAL);
        }
        match model_region(access.region) {
            Some(region) => self
                .device
                .write(region, access.offset, data, &mut self.world)
                .map_err(|_| Errno::EINVAL)?,
            None => self
                .flash
                .write_all_at(data, access.offset)
                .map_err(|_| Errno::EIO)?,
        }
        Ok(access.as_bytes().to_vec())
    }
}

/// The part of the model that a region is; none for the flash, which is mere memory.
const fn model_region(index: u32) -> Option<Region> {
    match index {
        0 => Some(Region::Registers),
        2 => Some(Region::Io),
        3 => Some(Region::MsiX),
        CONFIG => Some(Region::Config),
        _ => None,
    }
}

const fn region_size(index: u32) -> u64 {
    match index {
        0..=5 => bar_size(index as usize),
        CONFIG => CONFIG_SIZE as u64,
        _ => 0,
    }
}

/// The bytes of an access that lies within its region.
fn bounded(access: &RegionAccess) -> Result<usize, Errno> {
    let size = if access.region < REGIONS {
        region_size(access.region)
    } else {
        0
    };
    let count = access.count as usize;
    access
        .offset
        .checked_add(u64::from(access.count))
        .filter(|end| *end <= size && (1..=MAX_DATA).contains(&count))
        .map(|_| count)
        .ok_or(Errno::EINVAL)
}

fn irq_info(payload: &[u8]) -> Result<Vec<u8>, Errno> {
    let asked: IrqInfo = exact("IRQ info", payload).map_err(invalid)?;
    let (count, flags) = Irqs::info(asked.index).ok_or(Errno::EINVAL)?;
    let info = IrqInfo {
        argsz: size_of::<IrqInfo>() as u32,
        flags: flags.bits(),
        index: asked.index,
        count,
    };
    Ok(info.as_bytes().to_vec())
}

const fn plain(payload: Vec<u8>) -> Payload {
    (payload, None)
}

fn invalid(malformed: Malformed) -> Errno {
    log::debug!("{malformed}");
    Errno::EINVAL
}

/// The only descriptor of a message, or none.
fn one(mut fds: Vec<OwnedFd>) -> Result<Option<OwnedFd>, Errno> {
    match fds.len() {
        0 | 1 => Ok(fds.pop()),
        _ => Err(Errno::EINVAL),
    }
}

/// The flash: memory that clients may map, of a size that they cannot change.
fn flash() -> io::Result<File> {
    let file = file_of("failstop-flash", bar_size(FLASH as usize), 0xFF)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A file in memory of so many bytes of this value.
pub(super) fn file_of(name: &str, bytes: u64, value: u8) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(name, flags)?);
    file.write_all_at(&vec![value; bytes as usize], 0)?;
    Ok(file)
}
