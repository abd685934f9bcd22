//! What a driver asks of the thing that carries a PCI function to it: registers, DMA mappings,
//! interrupts, reset. One file per transport.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use thiserror::Error;

use crate::id::{DeviceId, Generation};
use crate::left::SpaceLeft;
use crate::peer::PeerEnded;

pub mod container;
pub mod iommufd;
mod reset;
pub mod vfio;
pub mod vfio_user;

pub use reset::{ResetFailed, ResetMethod, UnknownMethod};

/// An I/O virtual address: what a device puts on the bus.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Iova(pub u64);

impl fmt::Debug for Iova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Iova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// How a function reaches us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Kernel VFIO: group and type1 v2 container (`linux/vfio.h`).
    Container,
    /// Kernel VFIO: device cdev and iommufd (`linux/iommufd.h`).
    Iommufd,
    /// A device in another process, over the vfio-user protocol.
    VfioUser,
}

impl Kind {
    /// The name that reports and options use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Iommufd => "iommufd",
            Self::VfioUser => "vfio-user",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How strongly a transport can revoke DMA by unmapping (R1).
///
/// What each leaves a device that lies, or a peer that means harm:
///
/// | strength | an unmap that was exact | what the other side can still do |
/// | --- | --- | --- |
/// | [`Enforcing`](Self::Enforcing) | proves that the device reaches the memory no more, whatever it is told or does | read and write what is mapped for it, at any time while it is, also what no queue of it was given; fill the IOMMU's fault log |
/// | [`ServerWord`](Self::ServerWord) | is believed, because the server, which translates, answered that it dropped the mapping | all of the above; and keep the file that it was sent, or give it to a child or another process, and read and write it for ever after it said that it had not: see below |
/// | [`None`](Self::None) | proves nothing; memory is released only when the function is *stopped*: bus mastering read back off, and a reset that a register shows | reach all of the machine's memory, ours, other processes' and the kernel's, from the moment that bus mastering is on until it is stopped |
///
/// # A vfio-user server
///
/// A server that *acknowledged* an unmap is proof: it is the device, its translation is part of it, and
/// there is nothing else to ask. One that *hangs* is none: what it was asked to unmap, and did not
/// answer for, stays in quarantine until a process that we started is seen to have ended
/// ([`Peer`](crate::peer::Peer), by a pidfd). Who merely listens at a socket is not known (SO_PEERCRED names who
/// made it), and its end proves nothing.
///
/// What its word does not cover is bounded on our side, so that a server that lies reaches what it was
/// sent, and nothing else of this process: each object's memory is a file of its own, which is never used
/// for another object, nor sent for a second life of the device (a carried region moves to a new
/// file); files are sealed, so that a truncation cannot kill us (C46); its eventfds are read without
/// blocking and never written to; each message has a deadline. It can punch holes into the files that
/// it was sent (no seal forbids that and leaves them writable): our next access finds zeros in a page
/// that is charged to us, and under a memory limit of the control group that is full, SIGBUS. It can spoil payload in
/// flight, as any device can; and it can send nothing at all.
///
/// # A machine without IOMMU
///
/// VFIO's no-IOMMU mode (`enable_unsafe_noiommu_mode`) gives the device physical addresses and
/// translates nothing, so that nothing that this library does keeps it from any memory but the
/// function's own Bus Master Enable, and a reset. This crate refuses it by name. An IOMMU that is
/// there does not make a function [`Enforcing`](Self::Enforcing) while Address Translation Services are on
/// (ATS Control, Enable; PCIe base specification 6.0, §10.5.1): it may hold translations that an unmap does
/// not reach, and its requests with translated addresses are not looked at.
///
/// Behind every strength the unit is the IOMMU *domain*: what "the function stopped" releases needs every
/// function of it that can issue DMA to be stopped ([`Transport::shares_space`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strength {
    /// An IOMMU translates in hardware and the device holds no translations of its own (ATS off).
    Enforcing,
    /// A vfio-user server: believed only for what it answered.
    ServerWord,
    /// Nothing stands between the device and memory (no-IOMMU, or ATS on).
    None,
}

/// A region of a function, by its number in `linux/vfio.h` (`VFIO_PCI_*_REGION_INDEX`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RegionIndex {
    /// Base address register 0 to 5.
    Bar(u8),
    /// Expansion ROM.
    Rom,
    /// Configuration space.
    Config,
}

impl RegionIndex {
    /// The number that VFIO and vfio-user give to it.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Bar(n) => n as u32,
            Self::Rom => 6,
            Self::Config => 7,
        }
    }
}

impl fmt::Display for RegionIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bar(n) => write!(f, "BAR {n}"),
            Self::Rom => f.write_str("expansion ROM"),
            Self::Config => f.write_str("config space"),
        }
    }
}

/// What the transport says of a region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Bytes; 0 when the function does not implement it.
    pub size: u64,
    /// Reads are possible.
    pub readable: bool,
    /// Writes are possible.
    pub writable: bool,
    /// The parts that may be memory-mapped, as offset and length in bytes within the region,
    /// ascending, whole pages. Accesses outside them go through [`Transport::read`].
    pub mappable: Vec<(u64, u64)>,
}

/// Interrupt kinds of a PCI function (`VFIO_PCI_*_IRQ_INDEX`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IrqIndex {
    /// Legacy line interrupt.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// An uncorrectable PCIe error (AER) was reported.
    Error,
    /// The kernel or the server wants the device back.
    Request,
}

impl IrqIndex {
    /// The number that VFIO and vfio-user give to it.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Intx => 0,
            Self::Msi => 1,
            Self::Msix => 2,
            Self::Error => 3,
            Self::Request => 4,
        }
    }
}

/// Memory that is about to be mapped for DMA.
///
/// # Invariants
///
/// `addr` is the start of `len` bytes that stay mapped in this process, shared, backed by `fd`
/// from `offset`, until the device can no longer reach them.
#[derive(Clone, Copy, Debug)]
pub struct DmaMemory<'a> {
    addr: NonNull<u8>,
    len: u64,
    fd: BorrowedFd<'a>,
    offset: u64,
}

impl<'a> DmaMemory<'a> {
    /// Describes `len` bytes at `addr`, which are `fd` from `offset` on. All in bytes.
    ///
    /// # Safety
    ///
    /// The memory stays mapped at `addr` until an unmap of it was exact, or the device was proven
    /// unable to reach it; nobody relies on its contents not changing meanwhile.
    #[expect(unsafe_code, reason = "the caller vouches for the memory's life")]
    #[must_use]
    pub const unsafe fn new(addr: NonNull<u8>, len: u64, fd: BorrowedFd<'a>, offset: u64) -> Self {
        Self {
            addr,
            len,
            fd,
            offset,
        }
    }

    /// Where the memory is in this process.
    #[must_use]
    pub const fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is nothing to map.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file behind the memory (vfio-user passes it to the server).
    #[must_use]
    pub const fn fd(&self) -> BorrowedFd<'a> {
        self.fd
    }

    /// Where in the file the memory starts, in bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }
}

/// What may be mapped, and how much of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DmaLimits {
    /// Usable IOVAs, ascending, reserved windows left out (`VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`,
    /// `IOMMU_IOAS_IOVA_RANGES`).
    pub ranges: Vec<RangeInclusive<u64>>,
    /// The smallest IOMMU page, in bytes: a power of two.
    pub page_size: u64,
    /// How many more mappings the transport takes (`VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL`), where it says so.
    pub entries_left: Option<u32>,
}

/// What an unmap did, whatever the transport calls it (R2). Only `Exact` means that the range is
/// gone from the device's address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmapped {
    /// Precisely the range asked for was unmapped.
    Exact,
    /// Nothing was mapped there.
    Absent,
    /// Another number of bytes than asked for was unmapped.
    Partial {
        /// Bytes that the transport says it unmapped.
        bytes: u64,
    },
    /// The transport refused or failed.
    Failed(Errno),
    /// Another operation was under way; nothing changed.
    Busy,
}

/// A register or config access that did not reach the function.
#[derive(Debug, Error)]
pub enum AccessError {
    /// The transport refused or failed.
    #[error("{device}: access of {len} bytes at {offset:#x} in {region} failed")]
    Failed {
        /// The function's name.
        device: String,
        /// Where.
        region: RegionIndex,
        /// Bytes from the region's start.
        offset: u64,
        /// Bytes.
        len: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The window belongs to a life of the device that is over (R4.3).
    #[error("{device}: access to {region} by a handle of {generation}, which is over")]
    Expired {
        /// The function's name.
        device: String,
        /// Where.
        region: RegionIndex,
        /// Whose handle it was.
        generation: Generation,
    },
}

/// A mapping that was not made. Nothing is mapped by the failed call, except perhaps by one that
/// was [`Unanswered`](Self::Unanswered).
#[derive(Debug, Error)]
pub enum MapError {
    /// Part of the range is mapped already (EEXIST).
    #[error("{device}: {len:#x} bytes at IOVA {iova} overlap an existing mapping")]
    Exists {
        /// The function's name.
        device: String,
        /// Where.
        iova: Iova,
        /// Bytes.
        len: u64,
    },
    /// The transport holds as many mappings as it can (ENOSPC).
    #[error(
        "{device}: no room for another mapping; use fewer, larger ones (type1 limit: dma_entry_limit)"
    )]
    TooMany {
        /// The function's name.
        device: String,
    },
    /// Memory could not be locked (ENOMEM).
    #[error("{device}: {len:#x} bytes could not be locked; raise RLIMIT_MEMLOCK (`ulimit -l`)")]
    Locked {
        /// The function's name.
        device: String,
        /// Bytes.
        len: u64,
    },
    /// The memory was handed over, and the connection ended before the answer: whether it is
    /// mapped is not known, so it must be treated as if it were.
    #[error("{device}: nobody answered whether {len:#x} bytes are mapped at IOVA {iova}")]
    Unanswered {
        /// The function's name.
        device: String,
        /// Where.
        iova: Iova,
        /// Bytes.
        len: u64,
        /// Why there was no answer.
        #[source]
        source: io::Error,
    },
    /// Anything else.
    #[error("{device}: could not map {len:#x} bytes at IOVA {iova}")]
    Failed {
        /// The function's name.
        device: String,
        /// Where.
        iova: Iova,
        /// Bytes.
        len: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Interrupts that could not be routed to eventfds.
#[derive(Debug, Error)]
#[error("{device}: could not route {index:?} vectors from {first} on")]
pub struct IrqError {
    /// The function's name.
    pub device: String,
    /// Which kind.
    pub index: IrqIndex,
    /// First vector.
    pub first: u32,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// What a driver asks of the thing that carries a function: registers, DMA, interrupts, reset.
///
/// Every call is bounded in time on vfio-user (a deadline per message); a kernel call may block
/// for as long as the kernel likes, which is why the ladder runs them on helpers (R4).
pub trait Transport: Send + Sync + fmt::Debug {
    /// The opened function.
    fn id(&self) -> DeviceId;

    /// The function's name, for messages: `0000:01:00.0` or `vfio-user:PATH`.
    fn name(&self) -> &str;

    /// Which transport this is.
    fn kind(&self) -> Kind;

    /// How strongly an unmap revokes DMA, computed now (R1): [`Strength`] says what each leaves to a
    /// device, or a server, that lies.
    fn strength(&self) -> Strength;

    /// Describes a region.
    fn region(&self, index: RegionIndex) -> Region;

    /// Reads `data.len()` bytes of a region, as one access where that is 1, 2, 4 or 8.
    ///
    /// # Errors
    ///
    /// [`AccessError::Expired`] when `generation` is over; `Failed` when the transport says so.
    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError>;

    /// Writes a region and returns when the function has seen it.
    ///
    /// # Errors
    ///
    /// As [`Transport::read`].
    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError>;

    /// Writes a region without waiting for the function: a posted write, as a doorbell needs.
    ///
    /// # Errors
    ///
    /// As [`Transport::read`], for what is known when the write was handed over.
    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError>;

    /// Ends `generation`: from the return of this call on, no read or write that names it or an
    /// older one reaches the function, except in [`RegionIndex::Config`], which is exempt: the
    /// ladder must turn bus mastering off on a function whose life is over (R4.2). Mapped windows are replaced by [`crate::window::Window::detach`].
    fn expire(&self, generation: Generation);

    /// The file and the file offset that a mapping of a region's mappable part at `offset` needs.
    ///
    /// # Errors
    ///
    /// When the part is not mappable, or the descriptor cannot be duplicated.
    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)>;

    /// What may be mapped now.
    ///
    /// # Errors
    ///
    /// When the kernel or the server does not say.
    fn dma_limits(&self) -> io::Result<DmaLimits>;

    /// Lets the function reach `memory` at `iova`, for reading and writing.
    ///
    /// # Errors
    ///
    /// [`MapError`]; nothing is mapped then, unless it is [`MapError::Unanswered`].
    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError>;

    /// Takes `len` bytes from `iova` on out of the function's reach.
    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped;

    /// How many vectors of a kind there are.
    fn irq_count(&self, index: IrqIndex) -> u32;

    /// Signals `eventfds[n]` when vector `first + n` fires; an empty slice disables the whole kind.
    ///
    /// # Errors
    ///
    /// [`IrqError`].
    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError>;

    /// Resets the function by the best method that the kernel or server has
    /// (`VFIO_DEVICE_RESET`). Success is a claim, to be verified (R4).
    ///
    /// # Errors
    ///
    /// [`ResetFailed`], with the errno.
    fn reset(&self) -> Result<(), ResetFailed>;

    /// The methods that [`Transport::reset_by`] has for this function, the best first: what sysfs
    /// `reset_method` says now; [`ResetMethod::Server`] where a server can reset. Empty when there
    /// is none. [`ResetMethod::Hot`] is never listed: whether it is possible shows when it is tried.
    fn reset_methods(&self) -> Vec<ResetMethod>;

    /// Resets the function by this very method. Success is a claim, to be verified (R4).
    ///
    /// The first of [`Transport::reset_methods`] is what [`Transport::reset`] does. Another of the
    /// kernel's is chosen by writing sysfs `reset_method`, which takes root and holds for everybody
    /// on the machine: the former text is put back, whatever happens. [`ResetMethod::Hot`] is done
    /// only when it touches no other function.
    ///
    /// # Errors
    ///
    /// [`ResetFailed`].
    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed>;

    /// Whether other functions that this process opened through the same container or I/O address
    /// space can reach what is mapped for this one (R1).
    fn shares_space(&self) -> bool {
        false
    }

    /// Takes the function out of its address space, so that it reaches nothing any more, whatever
    /// is mapped there (`VFIO_DEVICE_DETACH_IOMMUFD_PT`). Only iommufd can.
    ///
    /// # Errors
    ///
    /// `Unsupported` from other transports; otherwise what the kernel says.
    fn detach_space(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Closes every descriptor of the function for good, also while others keep this transport: an
    /// unbind that waits for them returns (C15). Every later call fails. Windows must be detached
    /// first: a mapped BAR is a reference, too.
    ///
    /// The last reference makes the kernel turn bus mastering off and reset the function, and may
    /// block for as long as that takes. A call that another thread is inside of keeps its reference
    /// until it returns.
    ///
    /// Returns the proof that the function has left its address space, where the kernel said so.
    fn hang_up(&self) -> Option<SpaceLeft>;

    /// Whether the other end is known to be gone for good: a vfio-user connection that ended.
    fn is_lost(&self) -> bool {
        false
    }

    /// In words, why the other end is known to be gone for good; none while it is not known to be, or
    /// nobody saw why.
    fn why_lost(&self) -> Option<String> {
        None
    }

    /// Whether a reset that was asked for has not been answered, although who asked was told so: it
    /// may happen at any time. A kernel call returns only when the reset is over.
    fn is_reset_outstanding(&self) -> bool {
        false
    }

    /// What hangs up (POLLHUP) when the other end is gone for good: a vfio-user server that died is
    /// noticed by whoever polls it, also while nobody says anything. Keeping it keeps nothing open.
    fn lifeline(&self) -> Option<Arc<dyn AsFd + Send + Sync>> {
        None
    }

    /// Proof that the server, which this process started and said so
    /// ([`Options::peer`](vfio_user::Options::peer)), has ended.
    fn peer_ended(&self) -> Option<PeerEnded> {
        None
    }

    /// Lets the accesses to registers and config space that begin from now on take `total` together;
    /// none lifts that. One that would begin later fails, and so a window reads all-ones: a server
    /// that needs almost its whole deadline for each of some hundred accesses holds nobody up for an
    /// hour. Only a server has deadlines to add up.
    fn bound(&self, total: Option<Duration>) {
        let _ = total;
    }

    /// How long the slowest call may take before the caller should treat it as hung; none where
    /// only the kernel knows.
    fn deadline(&self) -> Option<Duration> {
        None
    }
}
