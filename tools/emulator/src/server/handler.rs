//! What each command does, and its reply.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use failstop_pci::transport::vfio_user::wire::{
    Capabilities, Command, DeviceFlags, DeviceInfo, DmaMap, DmaUnmap, Header, IrqInfo, IrqSet,
    MAJOR, MINOR, Malformed, RegionAccess, RegionFlags, RegionInfo, SparseArea, Version, encode,
    encode_region_info, encode_version, exact, parse_version, split,
};
use nix::errno::Errno;
use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::IntoBytes;

use super::connection::{MAX_DATA, MAX_FDS, Message};
use super::irqs::{self, Irqs};
use super::memory::{ClientMemory, MAX_MAPPINGS, PAGE};
use super::wire::Wire;
use crate::device::{CONFIG_SIZE, Device, Region, bar_size};
use crate::faults::Fault;
use crate::host::{Abort, Host};
use crate::stats::{ServerCounters, Stats};

/// BARs, expansion ROM (none), configuration space, VGA (none) (`VFIO_PCI_NUM_REGIONS`).
const REGIONS: u32 = 9;
const FLASH: u32 = 1;
const CONFIG: u32 = 7;
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
    negotiated: bool,
    counters: ServerCounters,
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
    }

    /// The client is gone, and with it all that it mapped and asked for. The device is reset, as the
    /// kernel resets a function when the last reference to it is closed.
    pub fn detach(&mut self) {
        let now = self.world.now();
        self.device.reset_function(now);
        self.world.memory.clear();
        self.world.irqs.clear();
        self.negotiated = false;
    }

    /// Does what a message asks.
    pub fn handle(&mut self, message: Message) -> Outcome {
        self.counters.messages += 1;
        let header = message.header;
        let first = !self.negotiated;
        let result = self.dispatch(message);
        if let Err(errno) = &result {
            self.counters.refused += 1;
            log::debug!("command {} refused: {errno}", header.command);
        }
        let hang_up = first && result.is_err();
        if header.wants_no_reply() && !hang_up {
            return Outcome::Silence;
        }
        match result {
            Ok((payload, fd)) => {
                Outcome::Reply(encode(&header.reply(payload.len()), &payload, &[]), fd)
            }
            Err(errno) => {
                let reply = encode(&header.failure(errno as u32), &[], &[]);
                if hang_up {
                    Outcome::Hangup(reply)
                } else {
                    Outcome::Reply(reply, None)
                }
            }
        }
    }

    fn dispatch(&mut self, message: Message) -> Result<Payload, Errno> {
        let header: Header = message.header;
        let payload = &message.payload[..];
        // A server-initiated command is never sent, so there is no reply to expect.
        if header.flags().is_none_or(|flags| flags.bits() & 0xF != 0) {
            return Err(Errno::EINVAL);
        }
        let command = Command::from_number(header.command).ok_or(Errno::ENOTSUP)?;
        if self.negotiated == (command == Command::Version) {
            return Err(Errno::EINVAL);
        }
        if self.negotiated {
            for fault in self.device.faults().active() {
                if let Fault::ServerError(errno) = fault {
                    return Err(*errno);
                }
            }
        }
        match command {
            Command::Version => self.version(payload).map(plain),
            Command::DmaMap => {
                let map: DmaMap = exact("DMA map", payload).map_err(invalid)?;
                let fd = one(message.fds)?;
                self.world
                    .memory
                    .map(map.address, map.size, map.offset, map.flags, fd)?;
                Ok(plain(Vec::new()))
            }
            Command::DmaUnmap => self.unmap(payload).map(plain),
            Command::DeviceGetInfo => {
                exact::<DeviceInfo>("device info", payload).map_err(invalid)?;
                let flags = DeviceFlags::RESET | DeviceFlags::PCI;
                let info = DeviceInfo {
                    argsz: size_of::<DeviceInfo>() as u32,
                    flags: flags.bits(),
                    num_regions: REGIONS,
                    num_irqs: irqs::KINDS,
                };
                Ok(plain(info.as_bytes().to_vec()))
            }
            Command::DeviceGetRegionInfo => self.region_info(payload),
            Command::DeviceGetIrqInfo => irq_info(payload).map(plain),
            Command::DeviceSetIrqs => {
                let (set, data) = split::<IrqSet>("IRQ set", payload).map_err(invalid)?;
                self.world.irqs.set(&set, data, message.fds)?;
                // A message that waited for its eventfd goes out.
                self.device.run(&mut self.world);
                Ok(plain(Vec::new()))
            }
            Command::RegionRead => self.region_read(payload).map(plain),
            Command::RegionWrite => self.region_write(payload).map(plain),
            Command::DeviceReset => {
                exact::<[u8; 0]>("reset", payload).map_err(invalid)?;
                let now = self.world.now();
                self.device.reset_function(now);
                Ok(plain(Vec::new()))
            }
            Command::DeviceGetRegionIoFds | Command::DmaRead | Command::DmaWrite => {
                Err(Errno::ENOTSUP)
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

    fn region_info(&self, payload: &[u8]) -> Result<Payload, Errno> {
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
        if asked.index == FLASH {
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
        let fd = (reply.len() > size_of::<RegionInfo>())
            .then(|| self.flash.try_clone())
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
    let fd = rustix::fs::memfd_create(
        "failstop-flash",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let file = File::from(fd);
    file.write_all_at(&vec![0xFF; bar_size(1) as usize], 0)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
