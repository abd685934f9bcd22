//! The client's memory: what it mapped, and nothing else. This is the emulated device's IOMMU.
//!
//! Files whose size is sealed (`F_SEAL_SHRINK`) are memory-mapped, once each and whole, however
//! many mappings name them: QEMU sends one per page behind a virtual IOMMU. Files that are not
//! sealed could be cut short under a mapping, and the access would end this process with SIGBUS, so
//! they are read and written by system call, which merely fails; a 64-bit store is then as atomic
//! as the kernel's copy.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use failstop_pci::transport::vfio_user::wire::DmaFlags;
use nix::errno::Errno;
use rustix::fs::{FileType, SealFlags};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::fork::Shared;
use crate::host::Abort;
use crate::stats::{DmaCounters, KEPT_ADDRESSES, StrayDma};

/// Mappings at once (`max_dma_maps`).
pub const MAX_MAPPINGS: usize = 65_535;
/// The page size that mappings are multiples of, in bytes.
pub const PAGE: u64 = 4096;
/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS: u64 = 0x9584_58f6;

/// A file of the client's, by device and inode.
#[derive(Debug)]
struct Backing {
    id: (u64, u64),
    access: Access,
}

#[derive(Debug)]
enum Access {
    /// Mapped whole.
    Mapped { region: MmapRegion, writable: bool },
    /// By system call.
    File(File),
}

impl Backing {
    fn covers(&self, end: u64, write: bool) -> bool {
        match &self.access {
            Access::Mapped { region, writable } => {
                end <= region.size() as u64 && (*writable || !write)
            }
            Access::File(_) => true,
        }
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Abort> {
        match &self.access {
            Access::Mapped { region, .. } => region
                .get_slice(offset as usize, data.len())
                .and_then(|slice| slice.read_slice(data, 0))
                .map_err(|_| Abort),
            Access::File(file) => file.read_exact_at(data, offset).map_err(|_| Abort),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let written = match &self.access {
            Access::Mapped { region, .. } => region
                .get_slice(offset as usize, data.len())
                .and_then(|slice| slice.write_slice(data, 0))
                .is_ok(),
            Access::File(file) => file.write_all_at(data, offset).is_ok(),
        };
        if !written {
            log::debug!(
                "{} bytes at {offset:#x} of client memory could not be written",
                data.len()
            );
        }
    }

    fn load(&self, offset: u64) -> Result<u64, Abort> {
        match &self.access {
            Access::Mapped { region, .. } => region
                .get_slice(offset as usize, 8)
                .and_then(|slice| slice.load::<u64>(0, Ordering::Acquire))
                .map(u64::from_le)
                .map_err(|_| Abort),
            Access::File(_) => {
                let mut bytes = [0; 8];
                self.read(offset, &mut bytes)?;
                Ok(u64::from_le_bytes(bytes))
            }
        }
    }

    fn store(&self, offset: u64, value: u64) {
        match &self.access {
            Access::Mapped { region, .. } => {
                let stored = region
                    .get_slice(offset as usize, 8)
                    .and_then(|slice| slice.store(value.to_le(), 0, Ordering::Release));
                if stored.is_err() {
                    log::debug!("a word at {offset:#x} of client memory could not be written");
                }
            }
            Access::File(_) => self.write(offset, &value.to_le_bytes()),
        }
    }
}

/// One mapping.
#[derive(Debug)]
struct Mapping {
    start: u64,
    /// The last byte.
    last: u64,
    /// Where it starts in its file.
    offset: u64,
    /// None when it came without a descriptor: mapped, but out of reach.
    backing: Option<Arc<Backing>>,
    flags: DmaFlags,
    /// No other mapping ever has this number.
    serial: u64,
}

/// Why an access goes nowhere.
enum Miss {
    /// Nothing is mapped there, or not for this direction.
    Stray,
    /// Something is, without a descriptor.
    Unreachable,
}

/// What a client mapped.
#[derive(Debug, Default)]
pub struct ClientMemory {
    /// Ascending, without overlap.
    mappings: Vec<Mapping>,
    files: Vec<Weak<Backing>>,
    next_serial: u64,
    peak: usize,
    dma: DmaCounters,
    stray: StrayDma,
}

impl ClientMemory {
    /// DMA that reached memory.
    #[must_use]
    pub const fn dma(&self) -> &DmaCounters {
        &self.dma
    }

    /// DMA that did not.
    #[must_use]
    pub const fn stray(&self) -> &StrayDma {
        &self.stray
    }

    /// How many mappings there are, how many bytes in them, and the most mappings at once.
    #[must_use]
    pub fn extent(&self) -> (u64, u64, u64) {
        let bytes = self.mappings.iter().map(|m| m.last - m.start + 1).sum();
        (self.mappings.len() as u64, bytes, self.peak as u64)
    }

    /// Sets the counters to 0.
    pub fn reset_counters(&mut self) {
        self.dma = DmaCounters::default();
        self.stray = StrayDma::default();
        self.peak = self.mappings.len();
    }

    /// Drops every mapping.
    pub fn clear(&mut self) {
        self.mappings.clear();
        self.files.clear();
    }

    /// The first mapping that ends at or after `iova`.
    fn first_from(&self, iova: u64) -> usize {
        self.mappings.partition_point(|m| m.last < iova)
    }

    /// The largest file that the client shared, as it is mapped into this process: payload, and no
    /// rings.
    pub(super) fn largest(&self) -> Option<Shared> {
        let files = self.files.iter().filter_map(Weak::upgrade);
        let shared = files.filter_map(|backing| match &backing.access {
            Access::Mapped { region, writable } => writable.then(|| Shared {
                start: region.as_ptr(),
                len: region.size(),
            }),
            Access::File(_) => None,
        });
        shared.max_by_key(|shared| shared.len)
    }

    /// The number of the mapping that holds this address: no other ever has it.
    #[must_use]
    pub fn mapping_at(&self, iova: u64) -> Option<u64> {
        let mapping = self.mappings.get(self.first_from(iova))?;
        (mapping.start <= iova).then_some(mapping.serial)
    }

    /// Maps `size` bytes at `address` to the file behind `fd`, from `offset` on. All in bytes.
    ///
    /// # Errors
    ///
    /// EINVAL for a range that is not whole pages, wraps around, or leaves the file; EEXIST for one
    /// that overlaps a mapping; ENOSPC when there are too many; EACCES when the file cannot be
    /// written and should be; or why the file could not be mapped.
    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        offset: u64,
        flags: u32,
        fd: Option<OwnedFd>,
    ) -> Result<(), Errno> {
        let flags = DmaFlags::from_bits(flags).ok_or(Errno::EINVAL)?;
        let whole = [address, size, offset]
            .iter()
            .all(|n| n.is_multiple_of(PAGE));
        let last = size
            .checked_sub(1)
            .and_then(|more| address.checked_add(more))
            .filter(|_| whole)
            .ok_or(Errno::EINVAL)?;
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(Errno::ENOSPC);
        }
        let at = self.first_from(address);
        if self.mappings.get(at).is_some_and(|next| next.start <= last) {
            return Err(Errno::EEXIST);
        }
        let backing = match fd {
            Some(fd) => Some(self.backing(fd, offset, size, flags.contains(DmaFlags::WRITE))?),
            None => None,
        };
        let mapping = Mapping {
            start: address,
            last,
            offset,
            backing,
            flags,
            serial: self.next_serial,
        };
        self.next_serial += 1;
        self.mappings.insert(at, mapping);
        self.peak = self.peak.max(self.mappings.len());
        Ok(())
    }

    /// The file behind a descriptor, mapped at most once.
    fn backing(
        &mut self,
        fd: OwnedFd,
        offset: u64,
        size: u64,
        write: bool,
    ) -> Result<Arc<Backing>, Errno> {
        let stat = rustix::fs::fstat(&fd).map_err(errno)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::EINVAL);
        }
        let file_size = u64::try_from(stat.st_size).map_err(|_| Errno::EINVAL)?;
        let end = offset
            .checked_add(size)
            .filter(|end| *end <= file_size)
            .ok_or(Errno::EINVAL)?;
        let id = (stat.st_dev, stat.st_ino);
        self.files.retain(|file| file.strong_count() > 0);
        let known = self.files.iter().filter_map(Weak::upgrade);
        if let Some(backing) = known
            .into_iter()
            .find(|b| b.id == id && b.covers(end, write))
        {
            return Ok(backing);
        }
        let backing = Arc::new(Backing {
            id,
            access: open(fd, file_size, write)?,
        });
        self.files.push(Arc::downgrade(&backing));
        Ok(backing)
    }

    /// Unmaps what lies between `address` and `address + size`, in bytes, and returns how many bytes
    /// were mapped there. As with type1 v2, a range may cover several whole mappings (QEMU unmaps
    /// a whole address space so), but none in part.
    ///
    /// # Errors
    ///
    /// EINVAL when the range cuts a mapping or makes no sense; ENOENT when nothing is mapped there.
    pub fn unmap(&mut self, address: u64, size: u64) -> Result<u64, Errno> {
        let last = size
            .checked_sub(1)
            .and_then(|more| address.checked_add(more))
            .ok_or(Errno::EINVAL)?;
        let from = self.first_from(address);
        let to = self.mappings.partition_point(|m| m.start <= last);
        if from >= to {
            return Err(Errno::ENOENT);
        }
        let found = &self.mappings[from..to];
        if found.iter().any(|m| m.start < address || m.last > last) {
            return Err(Errno::EINVAL);
        }
        let bytes = found.iter().map(|m| m.last - m.start + 1).sum();
        self.mappings.drain(from..to);
        Ok(bytes)
    }

    /// Checks that all of a range is mapped for a direction.
    fn check(&self, iova: u64, len: usize, direction: DmaFlags) -> Result<usize, Miss> {
        let last = iova
            .checked_add((len as u64).saturating_sub(1))
            .ok_or(Miss::Stray)?;
        let first = self.first_from(iova);
        let mut next = iova;
        for mapping in &self.mappings[first..] {
            if mapping.start > next || !mapping.flags.contains(direction) {
                return Err(Miss::Stray);
            }
            if mapping.backing.is_none() {
                return Err(Miss::Unreachable);
            }
            if mapping.last >= last {
                return Ok(first);
            }
            next = mapping.last + 1;
        }
        Err(Miss::Stray)
    }

    fn miss(&mut self, miss: &Miss, iova: u64, len: usize, write: bool) {
        match miss {
            Miss::Unreachable => self.stray.unreachable += 1,
            Miss::Stray => {
                self.stray.note(iova, len, write);
                // A device that does not stop would fill any log.
                let level = if self.stray.total() <= KEPT_ADDRESSES as u64 {
                    log::Level::Warn
                } else {
                    log::Level::Debug
                };
                let what = if write { "write" } else { "read" };
                log::log!(level, "stray {what} of {len} bytes at {iova:#x}");
            }
        }
    }

    /// Cuts a range that [`Self::check`] passed along the mappings: file, offset in it, and the
    /// part of the data, in bytes.
    fn parts(
        &self,
        first: usize,
        iova: u64,
        len: usize,
    ) -> impl Iterator<Item = (&Backing, u64, std::ops::Range<usize>)> {
        let mut done = 0;
        self.mappings[first..].iter().map_while(move |mapping| {
            if done == len {
                return None;
            }
            // Checked: this mapping holds the next byte.
            let at = iova + done as u64 - mapping.start;
            let room = mapping.last - mapping.start - at;
            let part = usize::try_from(room)
                .unwrap_or(usize::MAX)
                .saturating_add(1)
                .min(len - done);
            let range = done..done + part;
            done += part;
            Some((mapping.backing.as_deref()?, mapping.offset + at, range))
        })
    }

    /// A read by the device.
    ///
    /// # Errors
    ///
    /// [`Abort`] when it is stray; it is counted then.
    pub fn read(&mut self, iova: u64, data: &mut [u8]) -> Result<(), Abort> {
        match self.check(iova, data.len(), DmaFlags::READ) {
            Ok(first) => {
                self.dma.reads += 1;
                self.dma.read_bytes += data.len() as u64;
                let len = data.len();
                for (file, offset, range) in self.parts(first, iova, len) {
                    file.read(offset, &mut data[range])?;
                }
                Ok(())
            }
            Err(miss) => {
                self.miss(&miss, iova, data.len(), false);
                Err(Abort)
            }
        }
    }

    /// A write by the device; a stray one is counted and not performed.
    pub fn write(&mut self, iova: u64, data: &[u8]) {
        match self.check(iova, data.len(), DmaFlags::WRITE) {
            Ok(first) => {
                self.dma.writes += 1;
                self.dma.written_bytes += data.len() as u64;
                for (file, offset, range) in self.parts(first, iova, data.len()) {
                    file.write(offset, &data[range]);
                }
            }
            Err(miss) => self.miss(&miss, iova, data.len(), true),
        }
    }

    /// A read of one aligned word by the device, in one access.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn load(&mut self, iova: u64) -> Result<u64, Abort> {
        if !iova.is_multiple_of(8) {
            let mut bytes = [0; 8];
            self.read(iova, &mut bytes)?;
            return Ok(u64::from_le_bytes(bytes));
        }
        match self.check(iova, 8, DmaFlags::READ) {
            Ok(first) => {
                self.dma.reads += 1;
                self.dma.read_bytes += 8;
                // An aligned word never crosses a page, so it lies in one mapping.
                let (file, offset, _) = self.parts(first, iova, 8).next().ok_or(Abort)?;
                file.load(offset)
            }
            Err(miss) => {
                self.miss(&miss, iova, 8, false);
                Err(Abort)
            }
        }
    }

    /// A write of one aligned word by the device, in one access; a stray one is counted and not
    /// performed.
    pub fn store(&mut self, iova: u64, value: u64) {
        if !iova.is_multiple_of(8) {
            return self.write(iova, &value.to_le_bytes());
        }
        match self.check(iova, 8, DmaFlags::WRITE) {
            Ok(first) => {
                self.dma.writes += 1;
                self.dma.written_bytes += 8;
                if let Some((file, offset, _)) = self.parts(first, iova, 8).next() {
                    file.store(offset, value);
                }
            }
            Err(miss) => self.miss(&miss, iova, 8, true),
        }
    }
}

/// Opens a file for access by the device: mapped where that is safe.
fn open(fd: OwnedFd, size: u64, write: bool) -> Result<Access, Errno> {
    let mode = rustix::fs::fcntl_getfl(&fd).map_err(errno)? & rustix::fs::OFlags::RWMODE;
    let writable = mode == rustix::fs::OFlags::RDWR;
    if write && !writable {
        return Err(Errno::EACCES);
    }
    let sealed =
        rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let file = File::from(fd);
    if !sealed {
        return Ok(Access::File(file));
    }
    let mut protection = libc::PROT_READ;
    if writable {
        protection |= libc::PROT_WRITE;
    }
    // Without a reservation a page that the pool of huge pages cannot give is a SIGBUS; with one
    // the mapping fails instead.
    let huge = rustix::fs::fstatfs(file.as_fd()).is_ok_and(|fs| fs.f_type as u64 == HUGETLBFS);
    let reserve = if huge { 0 } else { libc::MAP_NORESERVE };
    let size = usize::try_from(size).map_err(|_| Errno::EFBIG)?;
    let region = MmapRegion::build(
        Some(FileOffset::new(file, 0)),
        size,
        protection,
        libc::MAP_SHARED | reserve,
    )
    .map_err(|error| {
        log::debug!("client memory of {size:#x} bytes cannot be mapped: {error}");
        Errno::ENOMEM
    })?;
    Ok(Access::Mapped { region, writable })
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

#[cfg(test)]
mod tests;
