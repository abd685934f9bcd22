//! What a server says of its device when it is opened, asked once and checked.

use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::fstat;
use zerocopy::IntoBytes;

use super::connection::{Answer, Connection, Question, Silence, Time};
use super::error::{Broken, CallError, ConnectError, Violation};
use super::wire::{
    self, Capabilities, Command, DeviceFlags, DeviceInfo, IrqInfo, MAJOR, MAX_VARIABLE, MINOR,
    RegionFlags, RegionInfo, SparseArea, Version,
};
use crate::transport::Region;

/// Descriptors that we take in one message. libvfio-user sends one for each mappable area.
pub(super) const MAX_FDS: usize = 16;
/// Room for region capabilities at the first attempt, in bytes.
const ROOM: usize = 4096;
/// Regions that a PCI function has: six BARs, ROM, config space.
pub(super) const REGIONS: usize = 8;
/// Interrupt kinds that a PCI function has.
pub(super) const IRQS: usize = 5;
/// MSI-X has the most vectors (PCIe Base Specification, "MSI-X Capability": table size).
const MAX_VECTORS: u32 = 2048;
/// No page is smaller.
const PAGE: u64 = 4096;
/// No offset or length of a file is larger (`off_t`).
const MAX_OFFSET: u64 = i64::MAX as u64;

/// A region, and the file to map it from.
#[derive(Debug)]
pub(super) struct Described {
    pub region: Region,
    /// The file, and where in it the region starts, in bytes.
    pub file: Option<(OwnedFd, u64)>,
}

impl Described {
    const ABSENT: Self = Self {
        region: Region {
            size: 0,
            readable: false,
            writable: false,
            mappable: Vec::new(),
        },
        file: None,
    };
}

/// What a server is and has.
#[derive(Debug)]
pub(super) struct Description {
    pub capabilities: Capabilities,
    pub resettable: bool,
    pub regions: [Described; REGIONS],
    pub irqs: [u32; IRQS],
}

/// Agrees on a version and asks for everything.
pub(super) fn describe(
    connection: &Connection,
    name: &str,
    time: impl Fn() -> Time,
) -> Result<Description, ConnectError> {
    let capabilities = negotiate(connection, name, time())?;
    let failed = |step| {
        move |error: CallError| ConnectError::Describe {
            name: name.to_owned(),
            step,
            source: error.into_io(),
        }
    };
    let info = device_info(connection, time()).map_err(failed(Command::DeviceGetInfo))?;
    if info.flags & DeviceFlags::PCI.bits() == 0 {
        return Err(ConnectError::NotPci {
            name: name.to_owned(),
            flags: info.flags,
        });
    }
    let mut regions = [Described::ABSENT; REGIONS];
    for (index, region) in (0..info.num_regions).zip(&mut regions) {
        *region =
            region_info(connection, index, time()).map_err(failed(Command::DeviceGetRegionInfo))?;
    }
    let mut irqs = [0; IRQS];
    for (index, count) in (0..info.num_irqs).zip(&mut irqs) {
        *count = irq_count(connection, index, time()).map_err(failed(Command::DeviceGetIrqInfo))?;
    }
    Ok(Description {
        capabilities,
        resettable: info.flags & DeviceFlags::RESET.bits() != 0,
        regions,
        irqs,
    })
}

fn negotiate(
    connection: &Connection,
    name: &str,
    time: Time,
) -> Result<Capabilities, ConnectError> {
    let name = || name.to_owned();
    let ours = Version {
        major: MAJOR,
        minor: MINOR,
    };
    let offer = Capabilities {
        max_msg_fds: MAX_FDS as u64,
        ..Capabilities::default()
    };
    let answer = ask(
        connection,
        Command::Version,
        &wire::encode_version(ours, &offer),
        size_of::<Version>()..=size_of::<Version>() + MAX_VARIABLE,
        0,
        time,
    );
    let answer = match answer {
        Ok(answer) => answer,
        Err(CallError::Refused(errno)) => {
            return Err(ConnectError::VersionRefused {
                name: name(),
                errno,
            });
        }
        Err(CallError::Dead(source) | CallError::Unanswered(source)) => {
            return Err(match source {
                Broken::TimedOut { deadline, .. } => ConnectError::NoAnswer {
                    name: name(),
                    deadline,
                },
                Broken::Closed => ConnectError::HungUp { name: name() },
                source => ConnectError::NotVfioUser {
                    name: name(),
                    source,
                },
            });
        }
        Err(error) => {
            return Err(ConnectError::Socket {
                name: name(),
                source: error.into_io(),
            });
        }
    };
    let broken = |violation: Violation| ConnectError::NotVfioUser {
        name: name(),
        source: connection.end(violation.into()),
    };
    let (version, capabilities) =
        wire::parse_version(&answer.payload).map_err(|malformed| broken(malformed.into()))?;
    if version.major != MAJOR || version.minor > MINOR {
        return Err(ConnectError::Version {
            name: name(),
            major: version.major,
            minor: version.minor,
        });
    }
    // A register of eight bytes is read by one access or not at all.
    if capabilities.max_data_xfer_size < 8 {
        return Err(broken(Violation::Impossible {
            what: "max_data_xfer_size",
            object: "the server's version".to_owned(),
            value: capabilities.max_data_xfer_size,
        }));
    }
    Ok(capabilities)
}

fn device_info(connection: &Connection, time: Time) -> Result<DeviceInfo, CallError> {
    let size = size_of::<DeviceInfo>();
    let question = DeviceInfo {
        argsz: argsz(size),
        flags: 0,
        num_regions: 0,
        num_irqs: 0,
    };
    let command = Command::DeviceGetInfo;
    let answer = ask(
        connection,
        command,
        question.as_bytes(),
        size..=size,
        0,
        time,
    )?;
    parsed(connection, wire::exact("device info", &answer.payload))
}

fn irq_count(connection: &Connection, index: u32, time: Time) -> Result<u32, CallError> {
    let size = size_of::<IrqInfo>();
    let question = IrqInfo {
        argsz: argsz(size),
        flags: 0,
        index,
        count: 0,
    };
    let command = Command::DeviceGetIrqInfo;
    let answer = ask(
        connection,
        command,
        question.as_bytes(),
        size..=size,
        0,
        time,
    )?;
    let info: IrqInfo = parsed(connection, wire::exact("interrupt info", &answer.payload))?;
    let count = check_index(command, info.index, index).and_then(|()| {
        (info.count <= MAX_VECTORS)
            .then_some(info.count)
            .ok_or(Violation::Impossible {
                what: "vector count",
                object: format!("interrupt kind {index}"),
                value: info.count.into(),
            })
    });
    checked(connection, count)
}

fn region_info(connection: &Connection, index: u32, time: Time) -> Result<Described, CallError> {
    let mut room = ROOM;
    loop {
        let question = RegionInfo {
            argsz: argsz(room),
            flags: 0,
            index,
            cap_offset: 0,
            size: 0,
            offset: 0,
        };
        let command = Command::DeviceGetRegionInfo;
        let sizes = size_of::<RegionInfo>()..=room;
        let answer = ask(
            connection,
            command,
            question.as_bytes(),
            sizes,
            MAX_FDS,
            time,
        )?;
        let (info, areas) = parsed(connection, wire::parse_region_info(&answer.payload))?;
        checked(connection, check_index(command, info.index, index))?;
        let needed = info.argsz as usize;
        // The answer says how much room its capabilities need; that is taken once, within bounds.
        if room == ROOM && (ROOM + 1..=MAX_VARIABLE).contains(&needed) {
            room = needed;
            continue;
        }
        // Capabilities that are announced and withheld may forbid what the flags allow.
        let withheld = info.flags & RegionFlags::CAPS.bits() != 0
            && answer.payload.len() == size_of::<RegionInfo>();
        let described = if withheld {
            Err(Violation::Impossible {
                what: "capability size",
                object: format!("region {index}"),
                value: needed as u64,
            })
        } else {
            described(&info, areas, answer.fds)
        };
        return checked(connection, described);
    }
}

/// Checks a region's description, and settles what can be mapped.
fn described(
    info: &RegionInfo,
    areas: Option<Vec<SparseArea>>,
    fds: Vec<OwnedFd>,
) -> Result<Described, Violation> {
    let flags = RegionFlags::from_bits_truncate(info.flags);
    let impossible = |what, value| Violation::Impossible {
        what,
        object: format!("region {}", info.index),
        value,
    };
    if info.size > MAX_OFFSET {
        return Err(impossible("size", info.size));
    }
    let mut described = Described {
        region: Region {
            size: info.size,
            readable: flags.contains(RegionFlags::READ),
            writable: flags.contains(RegionFlags::WRITE),
            mappable: Vec::new(),
        },
        file: None,
    };
    if !flags.contains(RegionFlags::MMAP) {
        return if fds.is_empty() {
            Ok(described)
        } else {
            Err(Violation::UnexpectedFds {
                asked: Command::DeviceGetRegionInfo,
                count: fds.len(),
            })
        };
    }
    // Some servers set the flag and send no file: then all accesses go by message.
    let Some(file) = one_file(fds)? else {
        return Ok(described);
    };
    if info.offset > MAX_OFFSET - info.size || !info.offset.is_multiple_of(PAGE) {
        return Err(impossible("file offset", info.offset));
    }
    let whole = SparseArea {
        offset: 0,
        size: info.size,
    };
    let mut areas = areas.unwrap_or_else(|| vec![whole]);
    areas.sort_by_key(|area| area.offset);
    let mut end = 0;
    for area in areas {
        let past = area
            .offset
            .checked_add(area.size)
            .filter(|past| *past <= info.size)
            .ok_or_else(|| impossible("mappable area's size", area.size))?;
        if area.offset < end {
            return Err(impossible("mappable area's offset", area.offset));
        }
        end = past;
        // Whole pages only: the rest of a page may be anything.
        let first = area.offset.next_multiple_of(PAGE);
        let pages = (past - past % PAGE).saturating_sub(first);
        if pages > 0 {
            described.region.mappable.push((first, pages));
        }
    }
    let Some(len) = memory_len(&file) else {
        described.region.mappable.clear();
        return Ok(described);
    };
    // An access beyond the end of a file is a SIGBUS.
    let needed = info.offset + end;
    if len < needed {
        return Err(Violation::ShortFile {
            object: format!("region {}", info.index),
            len,
            needed,
        });
    }
    described.file = Some((file, info.offset));
    Ok(described)
}

/// The one file that all the descriptors stand for.
fn one_file(fds: Vec<OwnedFd>) -> Result<Option<OwnedFd>, Violation> {
    let count = fds.len();
    let identity = |fd: &OwnedFd| {
        fstat(fd.as_fd())
            .map(|stat| (stat.st_dev, stat.st_ino))
            .ok()
    };
    let mut fds = fds.into_iter();
    let first = fds.next();
    let same = first.as_ref().and_then(identity);
    if fds.any(|fd| same.is_none() || identity(&fd) != same) {
        return Err(Violation::UnexpectedFds {
            asked: Command::DeviceGetRegionInfo,
            count,
        });
    }
    Ok(first)
}

/// Bytes of a file whose pages are the kernel's own memory: a memfd, or a file of tmpfs or
/// hugetlbfs, which alone have seals. Every other file is accessed by messages, which have a deadline:
/// a page of one that a file system in user space or a remote one serves (FUSE, NFS) comes when its
/// server likes, and an access of it waits for that for ever.
fn memory_len(file: &OwnedFd) -> Option<u64> {
    fcntl(file.as_fd(), FcntlArg::F_GET_SEALS).ok()?;
    let stat = fstat(file.as_fd()).ok()?;
    u64::try_from(stat.st_size).ok()
}

fn check_index(asked: Command, got: u32, wanted: u32) -> Result<(), Violation> {
    if got == wanted {
        return Ok(());
    }
    Err(Violation::WrongSubject {
        asked,
        what: "index",
        got: got.into(),
        wanted: wanted.into(),
    })
}

fn ask(
    connection: &Connection,
    command: Command,
    body: &[u8],
    payload: std::ops::RangeInclusive<usize>,
    max_fds: usize,
    time: Time,
) -> Result<Answer, CallError> {
    connection.ask(&Question {
        command,
        body,
        data: &[],
        fds: &[],
        payload,
        max_fds,
        generation: None,
        silence: Silence::EndsTheConnection,
        time,
    })
}

/// A structure of `size` bytes announces itself; none here comes near the limit.
fn argsz(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

fn parsed<T>(connection: &Connection, result: Result<T, wire::Malformed>) -> Result<T, CallError> {
    checked(connection, result.map_err(Violation::from))
}

/// Ends the connection when the server broke the protocol.
pub(super) fn checked<T>(
    connection: &Connection,
    result: Result<T, Violation>,
) -> Result<T, CallError> {
    result.map_err(|violation| CallError::Unanswered(connection.end(violation.into())))
}
