//! The vfio-user protocol as bytes: what client and server put on the socket.
//!
//! Source: QEMU `docs/interop/vfio-user.rst` and `hw/vfio-user/protocol.h`; libvfio-user
//! `include/vfio-user.h`. All numbers are in the byte order of the host, all sizes in bytes. The
//! payload structures are those of `linux/vfio.h` where there is one.
//!
//! A message is a [`Header`], a structure that the command defines, and data. Nothing here trusts
//! the peer: every function that reads bytes takes a slice, checks its bounds and cannot panic.

use bitflags::bitflags;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

mod codec;

pub use codec::{
    Capabilities, encode, encode_region_info, encode_version, exact, parse_region_info,
    parse_version, split,
};

/// The protocol's major version that this code speaks.
pub const MAJOR: u16 = 0;
/// The highest minor version that this code speaks.
pub const MINOR: u16 = 1;

/// Bytes of data in one access where a peer names no other limit (`max_data_xfer_size`).
pub const DEFAULT_MAX_DATA: u64 = 1 << 20;
/// Mappings that a server takes where it names no other limit (`max_dma_maps`).
pub const DEFAULT_MAX_DMA_MAPS: u64 = 65_535;
/// Descriptors in one message where a peer names no other limit (`max_msg_fds`).
pub const DEFAULT_MAX_FDS: u64 = 1;
/// Page sizes where a server names none (`pgsizes`): 4096 bytes.
pub const DEFAULT_PAGE_SIZES: u64 = 4096;
/// The largest version data, region capabilities or similar variable part that is accepted, in bytes.
pub const MAX_VARIABLE: usize = 64 << 10;

/// Bytes from a peer that do not have the form that the protocol gives them.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Malformed {
    /// A structure ends before it is complete.
    #[error("{what} has {len} bytes, {needed} are needed")]
    Short {
        /// The structure.
        what: &'static str,
        /// Bytes that came.
        len: usize,
        /// Bytes that were needed.
        needed: usize,
    },
    /// The version data is not NUL-terminated JSON of the expected form.
    #[error("version data: {0}")]
    VersionData(String),
    /// The capability list of a region leaves its bounds, or does not advance.
    #[error("capability list of region {region} is broken at offset {offset:#x}")]
    CapabilityList {
        /// Region number.
        region: u32,
        /// Bytes from the start of the region info.
        offset: u64,
    },
}

/// What a message asks for or answers (`VFIO_USER_*`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Command {
    /// Agrees on a version and capabilities; the first message.
    Version = 1,
    /// Lets the server reach memory at an address.
    DmaMap = 2,
    /// Takes memory out of the server's reach.
    DmaUnmap = 3,
    /// Asks what the device is.
    DeviceGetInfo = 4,
    /// Asks about one region.
    DeviceGetRegionInfo = 5,
    /// Asks for descriptors that stand for parts of a region.
    DeviceGetRegionIoFds = 6,
    /// Asks about one kind of interrupt.
    DeviceGetIrqInfo = 7,
    /// Routes interrupts.
    DeviceSetIrqs = 8,
    /// Reads a region.
    RegionRead = 9,
    /// Writes a region.
    RegionWrite = 10,
    /// The server reads the client's memory through the socket.
    DmaRead = 11,
    /// The server writes the client's memory through the socket.
    DmaWrite = 12,
    /// Resets the device.
    DeviceReset = 13,
}

impl Command {
    /// The command with this number, if it is one of those above.
    #[must_use]
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::DeviceGetInfo,
            5 => Self::DeviceGetRegionInfo,
            6 => Self::DeviceGetRegionIoFds,
            7 => Self::DeviceGetIrqInfo,
            8 => Self::DeviceSetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            11 => Self::DmaRead,
            12 => Self::DmaWrite,
            13 => Self::DeviceReset,
            _ => return None,
        })
    }

    /// Its number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }
}

bitflags! {
    /// The flags of a [`Header`]. Bits 0 to 3 are the type: 0 is a command, 1 a reply.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Flags: u32 {
        /// The message answers the command with the same id.
        const REPLY = 1 << 0;
        /// The command wants no answer.
        const NO_REPLY = 1 << 4;
        /// The command failed; [`Header::error`] may say why.
        const ERROR = 1 << 5;
    }
}

/// What every message begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of a command, repeated in the reply.
    pub id: u16,
    /// A [`Command`], by number; a reply repeats it.
    pub command: u16,
    /// Bytes of the whole message, this header included.
    pub size: u32,
    /// [`Flags`], with bits that the protocol does not define.
    pub flags: u32,
    /// An errno in a reply with [`Flags::ERROR`] (0: the server does not say); else 0.
    pub error: u32,
}

impl Header {
    /// Bytes of a header.
    pub const SIZE: usize = size_of::<Self>();

    /// The header of a command with `payload` bytes after it. A payload that no message can hold
    /// is cut to the largest size that the field expresses, which a peer refuses.
    #[must_use]
    pub fn command(id: u16, command: Command, flags: Flags, payload: usize) -> Self {
        Self {
            id,
            command: command.number(),
            size: Self::total(payload),
            flags: flags.bits(),
            error: 0,
        }
    }

    /// The header of a successful answer to this command, with `payload` bytes after it.
    #[must_use]
    pub fn reply(&self, payload: usize) -> Self {
        Self {
            id: self.id,
            command: self.command,
            size: Self::total(payload),
            flags: Flags::REPLY.bits(),
            error: 0,
        }
    }

    /// The header of the answer that this command failed; nothing follows it.
    #[must_use]
    pub fn failure(&self, errno: u32) -> Self {
        Self {
            flags: (Flags::REPLY | Flags::ERROR).bits(),
            error: errno,
            ..self.reply(0)
        }
    }

    /// The message's flags, if all its bits are defined ones.
    #[must_use]
    pub const fn flags(&self) -> Option<Flags> {
        Flags::from_bits(self.flags)
    }

    /// Whether the sender of this command wants no answer.
    #[must_use]
    pub const fn wants_no_reply(&self) -> bool {
        self.flags & Flags::NO_REPLY.bits() != 0
    }

    /// Bytes that follow the header; none where the size is smaller than a header.
    #[must_use]
    pub const fn payload(&self) -> Option<usize> {
        (self.size as usize).checked_sub(Self::SIZE)
    }

    fn total(payload: usize) -> u32 {
        u32::try_from(payload.saturating_add(Self::SIZE)).unwrap_or(u32::MAX)
    }
}

/// The fixed part of [`Command::Version`]; the data after it is JSON, see [`Capabilities`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Peers of another major version do not understand each other.
    pub major: u16,
    /// The server's is at most the client's.
    pub minor: u16,
}

bitflags! {
    /// What the server may do with mapped memory ([`DmaMap::flags`]).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct DmaFlags: u32 {
        /// The device may read it.
        const READ = 1 << 0;
        /// The device may write it.
        const WRITE = 1 << 1;
    }
}

/// [`Command::DmaMap`]: the descriptor of the memory comes along. The reply has no payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DmaFlags`].
    pub flags: u32,
    /// Where in the file the memory starts, in bytes.
    pub offset: u64,
    /// The IOVA.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// [`Command::DmaUnmap`] and its reply, which repeats what was unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// Unused.
    pub flags: u32,
    /// The IOVA.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

bitflags! {
    /// What a device is and can ([`DeviceInfo::flags`], `VFIO_DEVICE_FLAGS_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct DeviceFlags: u32 {
        /// It can be reset.
        const RESET = 1 << 0;
        /// It is a PCI function.
        const PCI = 1 << 1;
    }
}

/// [`Command::DeviceGetInfo`] and its reply (`struct vfio_device_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DeviceFlags`].
    pub flags: u32,
    /// Regions, numbered from 0.
    pub num_regions: u32,
    /// Kinds of interrupts, numbered from 0.
    pub num_irqs: u32,
}

bitflags! {
    /// What can be done with a region ([`RegionInfo::flags`], `VFIO_REGION_INFO_FLAG_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct RegionFlags: u32 {
        /// It can be read.
        const READ = 1 << 0;
        /// It can be written.
        const WRITE = 1 << 1;
        /// It, or parts of it, can be mapped; the reply brings a descriptor.
        const MMAP = 1 << 2;
        /// A capability list follows.
        const CAPS = 1 << 3;
    }
}

/// [`Command::DeviceGetRegionInfo`] and the fixed part of its reply (`struct vfio_region_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// In a command the largest payload that the reply may have; in a reply the payload that
    /// everything needs, even if it was not sent.
    pub argsz: u32,
    /// [`RegionFlags`].
    pub flags: u32,
    /// Region number.
    pub index: u32,
    /// Where the first capability is, from the start of this structure; 0 if there is none.
    pub cap_offset: u32,
    /// Bytes of the region.
    pub size: u64,
    /// Where the region starts in the file that comes along, in bytes.
    pub offset: u64,
}

/// The head of a region capability (`struct vfio_info_cap_header`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CapabilityHeader {
    /// What it is.
    pub id: u16,
    /// Of which version.
    pub version: u16,
    /// Where the next one is, from the start of the region info; 0 after the last.
    pub next: u32,
}

/// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`: only parts of the region can be mapped.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// What follows the head of a sparse mmap capability; the areas follow it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// How many areas.
    pub nr_areas: u32,
    /// Unused.
    pub reserved: u32,
}

/// One part of a region that can be mapped (`struct vfio_region_sparse_mmap_area`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Bytes from the region's start.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

bitflags! {
    /// How a kind of interrupt behaves ([`IrqInfo::flags`], `VFIO_IRQ_INFO_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct IrqFlags: u32 {
        /// It can signal an eventfd.
        const EVENTFD = 1 << 0;
        /// It can be masked.
        const MASKABLE = 1 << 1;
        /// It masks itself when it fires.
        const AUTOMASKED = 1 << 2;
        /// Its vectors are set up all at once.
        const NORESIZE = 1 << 3;
    }
}

/// [`Command::DeviceGetIrqInfo`] and its reply (`struct vfio_irq_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`IrqFlags`].
    pub flags: u32,
    /// Which kind.
    pub index: u32,
    /// How many vectors it has.
    pub count: u32,
}

bitflags! {
    /// What to do with vectors ([`IrqSet::flags`], `VFIO_IRQ_SET_*`): one `DATA` bit, one `ACTION` bit.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct IrqSetFlags: u32 {
        /// There is no data; with a count of 0 and [`Self::ACTION_TRIGGER`], the kind is disabled.
        const DATA_NONE = 1 << 0;
        /// A byte for each vector says whether the action is meant for it.
        const DATA_BOOL = 1 << 1;
        /// An eventfd for each vector comes along.
        const DATA_EVENTFD = 1 << 2;
        /// Masks.
        const ACTION_MASK = 1 << 3;
        /// Unmasks.
        const ACTION_UNMASK = 1 << 4;
        /// Fires, or sets what is signalled when the vector fires.
        const ACTION_TRIGGER = 1 << 5;
    }
}

/// [`Command::DeviceSetIrqs`] (`struct vfio_irq_set`). The reply has no payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Bytes of this structure and its data.
    pub argsz: u32,
    /// [`IrqSetFlags`].
    pub flags: u32,
    /// Which kind.
    pub index: u32,
    /// The first vector.
    pub start: u32,
    /// How many vectors.
    pub count: u32,
}

/// [`Command::RegionRead`] and [`Command::RegionWrite`], and the fixed part of their replies. The
/// data follows it in a write's command and in a read's reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Bytes from the region's start.
    pub offset: u64,
    /// Region number.
    pub region: u32,
    /// Bytes of data.
    pub count: u32,
}

const _: () = assert!(Header::SIZE == 16);
const _: () = assert!(size_of::<Version>() == 4);
const _: () = assert!(size_of::<DmaMap>() == 32);
const _: () = assert!(size_of::<DmaUnmap>() == 24);
const _: () = assert!(size_of::<DeviceInfo>() == 16);
const _: () = assert!(size_of::<RegionInfo>() == 32);
const _: () = assert!(size_of::<CapabilityHeader>() == 8);
const _: () = assert!(size_of::<SparseMmap>() == 8);
const _: () = assert!(size_of::<SparseArea>() == 16);
const _: () = assert!(size_of::<IrqInfo>() == 16);
const _: () = assert!(size_of::<IrqSet>() == 20);
const _: () = assert!(size_of::<RegionAccess>() == 16);

#[cfg(test)]
mod tests;
