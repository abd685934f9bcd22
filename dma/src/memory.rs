//! Memory that a device may reach: files of pages, shared, sealed, not inherited by a child.
#![expect(unsafe_code, reason = "maps memory")]

use std::fmt;
use std::fs;
use std::io;
use std::mem;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use failstop_pci::fork::NotInherited;
use failstop_pci::transport::DmaMemory;
use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags, mmap_anonymous, mremap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;
use thiserror::Error;
use vm_memory::VolatileSlice;

/// Bytes of a large page.
pub const HUGE: usize = 2 << 20;

/// The page size that memory was made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// The system's base pages.
    Base,
    /// 2 MiB pages (`MFD_HUGETLB`), reserved in `/proc/sys/vm/nr_hugepages`.
    Huge,
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Base => "base pages",
            Self::Huge => "2 MiB pages",
        })
    }
}

/// Memory that could not be had.
#[derive(Debug, Error)]
#[error("no {len:#x} bytes of memory for DMA: {what} failed")]
pub struct MemoryError {
    len: usize,
    what: &'static str,
    #[source]
    source: io::Error,
}

/// A stretch of memory for DMA.
///
/// Whoever holds it can read and write it by volatile or atomic access only: a device may write at
/// any moment, so that no reference to its bytes is ever formed.
///
/// # Invariants
///
/// `mapped` is all of `file`.
pub struct Memory {
    mapped: Mapped,
    file: OwnedFd,
    pages: Pages,
}

/// A shared mapping of a whole file.
///
/// # Invariants
///
/// The file's size is sealed, so that every page of `map` is backed; it stays mapped, at the same
/// address, as long as `self` lives. `base` is where it starts.
pub(crate) struct Mapped {
    /// Before `map`: fields are dropped in this order.
    _not_inherited: NotInherited,
    map: MmapRaw,
    base: NonNull<u8>,
    /// The file's inode number, as `/proc/self/maps` has it; empty where nobody knows.
    inode: String,
}

impl Mapped {
    /// All of `file`, of `len` bytes.
    fn of(file: &OwnedFd, len: usize) -> Result<Self, (&'static str, io::Error)> {
        let map = MmapOptions::new()
            .len(len)
            .map_raw(file.as_raw_fd())
            .map_err(|e| ("mmap", e))?;
        // After a fork the parent's pages stay where the device knows them (C28) [R12].
        map.advise(Advice::DontFork).map_err(|e| ("madvise", e))?;
        let base = NonNull::new(map.as_mut_ptr())
            .ok_or_else(|| ("mmap", io::ErrorKind::AddrNotAvailable.into()))?;
        // SAFETY: all of `map`, advised above, until `Mapped` drops it after the result.
        let not_inherited = unsafe { NotInherited::new(map.as_mut_ptr(), map.len()) };
        Ok(Self {
            _not_inherited: not_inherited.map_err(|e| ("pthread_atfork", e))?,
            map,
            base,
            inode: fstat(file)
                .map(|stat| stat.st_ino.to_string())
                .unwrap_or_default(),
        })
    }

    /// Whether it is where it was mapped; false where nobody can tell.
    fn is_there(&self) -> bool {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let start = format!("{:x}-", self.base.addr());
        // Address, access, offset, device, inode, name.
        let mut found = maps.lines().filter(|line| line.starts_with(&start));
        found.any(|line| line.split_whitespace().nth(4) == Some(self.inode.as_str()))
    }

    /// Gives its pages back to the kernel: from here on it reads as zeros, and what is written takes
    /// a page again.
    ///
    /// # Errors
    ///
    /// The pages stay.
    pub(crate) fn give_pages_back(&self) -> io::Result<()> {
        // SAFETY: it stays mapped, and as all access is volatile or atomic, the compiler relies on no
        // byte of it.
        unsafe { self.map.unchecked_advise(UncheckedAdvice::Remove) }
    }

    /// It, if it is still there; zeros in its place, if nothing is. None where something is, which
    /// may be somebody else's: it is never unmapped then.
    fn filled(mut self) -> Option<Self> {
        let len = NonZeroUsize::new(self.map.len())?;
        let at = NonZeroUsize::new(self.base.addr().get());
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: with MAP_FIXED_NOREPLACE it maps where nothing is or fails, so that no mapping, and
        // nothing that points into one, is touched.
        let filled = unsafe { mmap_anonymous(at, len, access, flags) };
        let advised = filled.is_ok() && self.map.advise(Advice::DontFork).is_ok();
        if advised {
            self.inode.clear();
            return Some(self);
        }
        if filled.is_err() && self.is_there() {
            return Some(self);
        }
        mem::forget(self);
        None
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes at {:?}", self.map.len(), self.base)
    }
}

impl Memory {
    /// `len` bytes of zeros, rounded up to whole pages; 2 MiB pages where `len` fills at least one
    /// and there are any. [`Memory::pages`] says which it got.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] when the kernel has no memory or `len` is 0.
    pub fn new(len: usize) -> Result<Self, MemoryError> {
        if len >= HUGE
            && let Ok(memory) = Self::of(len, Pages::Huge)
        {
            return Ok(memory);
        }
        Self::of(len, Pages::Base)
    }

    /// As [`Memory::new`], of base pages always.
    ///
    /// # Errors
    ///
    /// As [`Memory::new`].
    pub fn of_base_pages(len: usize) -> Result<Self, MemoryError> {
        Self::of(len, Pages::Base)
    }

    fn of(len: usize, pages: Pages) -> Result<Self, MemoryError> {
        let fail = |what, source: io::Error| MemoryError { len, what, source };
        let (file, whole) = Self::file(len, pages)?;
        let mapped = Mapped::of(&file, whole).map_err(|(what, e)| fail(what, e))?;
        Ok(Self {
            mapped,
            file,
            pages,
        })
    }

    /// A sealed file of `len` bytes of zeros, rounded up to whole pages, and how many those are.
    fn file(len: usize, pages: Pages) -> Result<(OwnedFd, usize), MemoryError> {
        let fail = |what, source: io::Error| MemoryError { len, what, source };
        let (flags, page) = match pages {
            Pages::Base => (MFdFlags::empty(), page_size()),
            Pages::Huge => (MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB, HUGE),
        };
        let whole = len
            .checked_next_multiple_of(page)
            .filter(|&whole| whole > 0)
            .ok_or_else(|| fail("rounding", io::ErrorKind::InvalidInput.into()))?;
        let size = i64::try_from(whole).map_err(|e| fail("rounding", io::Error::other(e)))?;
        let file = memfd_create(
            "failstop-dma",
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flags,
        )
        .map_err(|e| fail("memfd_create", e.into()))?;
        ftruncate(&file, size).map_err(|e| fail("ftruncate", e.into()))?;
        // A peer that is given this file must not be able to take pages away under us (C46).
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(|e| fail("sealing", e.into()))?;
        Ok((file, whole))
    }

    /// New memory with the same content, in a file and at an address of its own: who was sent this
    /// one's file, and keeps it, reaches nothing of the other. What others write meanwhile may be
    /// missing in it.
    ///
    /// Never over this one's address, where frames still point: a move there that fails may leave a
    /// hole, which is the next caller's of `mmap` ([`Memory::moved_to`]).
    ///
    /// # Errors
    ///
    /// [`MemoryError`].
    pub(crate) fn renewed(&self) -> Result<Self, MemoryError> {
        let new = Self::of(self.len(), self.pages)?;
        self.view().copy_to_volatile_slice(new.view());
        Ok(new)
    }

    /// Moves the mapping to where `place` is, of as many bytes, which ends `place`: what points
    /// there points into this memory from now on, without a moment at which nothing is there.
    ///
    /// # Errors
    ///
    /// This memory, where it was; with `place`, unless nobody knows what is there now: the kernel may
    /// have unmapped it before it failed. A hole is filled with zeros, so that an access there does no
    /// harm.
    pub(crate) fn moved_to(self, place: Mapped) -> Result<Self, (Self, Option<Mapped>, io::Error)> {
        let (from, len) = (self.mapped.base.cast(), self.len());
        if place.map.len() != len {
            return Err((self, Some(place), io::ErrorKind::InvalidInput.into()));
        }
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        // SAFETY: both are mappings of ours, of so many bytes. `place` is one before, during and
        // after the call, but for whoever looks there to find other bytes, and all access is volatile
        // or atomic; nobody has a pointer into the other yet, since `self` is moved in here. What was
        // advised goes along.
        let moved = unsafe { mremap(from, len, len, flags, Some(place.base.cast())) };
        match moved {
            Ok(_) => {
                let Mapped {
                    _not_inherited,
                    map,
                    inode,
                    ..
                } = self.mapped;
                // Nothing of ours is there any more to be unmapped.
                mem::forget(map);
                Ok(Self {
                    mapped: Mapped { inode, ..place },
                    ..self
                })
            }
            Err(error) => {
                let place = place.filled();
                Err((self, place, error.into()))
            }
        }
    }

    /// Keeps the mapping only: what points into this memory may go on doing so.
    pub(crate) fn into_mapped(self) -> Mapped {
        self.mapped
    }

    /// Bytes, a multiple of the page size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapped.map.len()
    }

    /// Never: memory has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What pages it got.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// All of it, for volatile and atomic access.
    #[must_use]
    pub fn view(&self) -> VolatileSlice<'_> {
        // SAFETY: the mapping lives as long as `self` by the invariant, and the slice borrows it;
        // volatile slices are made for memory that others write.
        unsafe { VolatileSlice::new(self.base().as_ptr(), self.len()) }
    }

    /// Where it starts, for this crate's typed views.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapped.base
    }

    /// What a transport needs to map it.
    ///
    /// # Safety
    ///
    /// The caller keeps `self` alive until an unmap was exact or the device was proven unable to
    /// reach it.
    pub(crate) unsafe fn for_device(&self) -> DmaMemory<'_> {
        // SAFETY: mapped and backed by `file` by the invariant; for long enough by this function's
        // contract.
        unsafe { DmaMemory::new(self.base(), self.len() as u64, self.file.as_fd(), 0) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes in {}", self.len(), self.pages)
    }
}

// SAFETY: `base` names memory that belongs to no thread; all access goes through volatile or atomic
// operations.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

/// Bytes of a base page.
#[must_use]
pub fn page_size() -> usize {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|size| usize::try_from(size).ok())
        .unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn length_is_rounded_up_to_whole_pages() {
        assert_eq!(Memory::new(1).unwrap().len(), page_size());
        assert_eq!(Memory::new(page_size() + 1).unwrap().len(), 2 * page_size());
    }

    #[test]
    fn nothing_is_refused() {
        assert!(Memory::new(0).is_err());
        assert!(Memory::new(usize::MAX).is_err());
    }

    #[test]
    fn renewed_memory_has_the_content_and_shares_nothing() {
        let memory = Memory::new(2 * page_size()).unwrap();
        memory.view().write_obj(7u64, page_size()).unwrap();
        let new = memory.renewed().unwrap();
        assert_eq!(new.view().read_obj::<u64>(page_size()).unwrap(), 7);
        memory.view().write_obj(8u64, page_size()).unwrap();
        assert_eq!(new.view().read_obj::<u64>(page_size()).unwrap(), 7);
    }

    #[test]
    fn memory_that_is_moved_is_found_at_the_other_place_and_nowhere_else() {
        let (memory, other) = (Memory::new(4096).unwrap(), Memory::new(4096).unwrap());
        memory.view().write_obj(7u64, 8).unwrap();
        let (from, to) = (memory.base(), other.base());
        let place = other.into_mapped();
        let moved = memory.moved_to(place).map_err(|(.., error)| error).unwrap();
        assert_eq!(moved.base(), to);
        assert_eq!(moved.view().read_obj::<u64>(8).unwrap(), 7);
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let left = format!("{:x}-", from.as_ptr() as usize);
        let left = maps.lines().find(|line| line.starts_with(&left));
        assert!(
            !left.is_some_and(|line| line.contains("failstop-dma")),
            "{maps}"
        );
    }

    #[test]
    fn memory_of_another_size_is_not_moved() {
        let (memory, other) = (Memory::new(4096).unwrap(), Memory::new(8192).unwrap());
        memory.view().write_obj(7u64, 8).unwrap();
        let (memory, place, _) = memory.moved_to(other.into_mapped()).unwrap_err();
        assert!(place.is_some());
        assert_eq!(memory.view().read_obj::<u64>(8).unwrap(), 7);
    }

    #[test]
    fn a_place_that_the_kernel_did_not_unmap_is_kept() {
        let place = Memory::new(4096).unwrap().into_mapped();
        assert!(place.filled().is_some());
    }

    #[test]
    fn a_place_where_something_else_is_mapped_is_left_as_it_is() {
        let (memory, other) = (Memory::new(4096).unwrap(), Memory::new(4096).unwrap());
        let base = memory.base().as_ptr() as usize;
        let mut place = memory.into_mapped();
        place.inode = other.into_mapped().inode.clone();
        assert!(place.filled().is_none());
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let still = format!("{base:x}-");
        let still = maps.lines().find(|line| line.starts_with(&still)).unwrap();
        assert!(still.contains("failstop-dma"), "{still}");
    }

    #[test]
    fn c46_nobody_can_truncate_it() {
        let memory = Memory::new(4096).unwrap();
        assert_eq!(ftruncate(&memory.file, 0), Err(nix::errno::Errno::EPERM));
        memory.view().write_obj(7u64, 8).unwrap();
        assert_eq!(memory.view().read_obj::<u64>(8).unwrap(), 7);
    }

    #[test]
    fn without_large_pages_it_says_base_pages() {
        let reserved = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
        let memory = Memory::new(HUGE).unwrap();
        let expected = if reserved.trim() == "0" {
            Pages::Base
        } else {
            memory.pages()
        };
        assert_eq!(memory.pages(), expected);
        assert_eq!(memory.len(), HUGE);
    }

    /// (R12)
    #[test]
    fn c28_a_child_does_not_inherit_it() {
        let memory = Memory::new(4096).unwrap();
        let start = format!("{:x}-", memory.base().as_ptr() as usize);
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }
}
