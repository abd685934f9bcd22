//! Memory that a device may reach: files of pages, shared, sealed, not inherited by a child.
#![expect(unsafe_code, reason = "maps memory")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use failstop_pci::fork::NotInherited;
use failstop_pci::transport::DmaMemory;
use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
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
/// `map` is all of `file`, whose size is sealed, and stays mapped as long as `self` lives. `base` is
/// where it starts.
pub struct Memory {
    /// Before `map`: fields are dropped in this order.
    _not_inherited: NotInherited,
    map: MmapRaw,
    base: NonNull<u8>,
    file: OwnedFd,
    pages: Pages,
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
        let map = MmapOptions::new()
            .len(whole)
            .map_raw(file.as_raw_fd())
            .map_err(|e| fail("mmap", e))?;
        // After a fork the parent's pages stay where the device knows them (C28) [R12].
        map.advise(Advice::DontFork)
            .map_err(|e| fail("madvise", e))?;
        let base = NonNull::new(map.as_mut_ptr())
            .ok_or_else(|| fail("mmap", io::ErrorKind::AddrNotAvailable.into()))?;
        // SAFETY: all of `map`, advised above, until `Memory` drops it after the result.
        let not_inherited = unsafe { NotInherited::new(map.as_mut_ptr(), map.len()) };
        Ok(Self {
            _not_inherited: not_inherited.map_err(|e| fail("pthread_atfork", e))?,
            map,
            base,
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

    /// Puts a new file with the same content in place of the old one, at the same address: whoever
    /// was sent the old one, and keeps it, reaches nothing of this memory any more. What other
    /// threads write meanwhile may be lost.
    ///
    /// Base pages only: the memory of a peer has no others.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]; the memory is as it was.
    pub(crate) fn renew(&self) -> Result<(), MemoryError> {
        let len = self.map.len();
        let fail = |what, source: io::Error| MemoryError { len, what, source };
        if self.pages != Pages::Base {
            return Err(fail("renewing", io::ErrorKind::Unsupported.into()));
        }
        let (file, _) = Self::file(len, self.pages)?;
        self.copy_into(&file).map_err(|e| fail("pwrite", e))?;
        self.place(&file).map_err(|e| fail("mmap", e))?;
        // The number stays, since a borrow of it may be in somebody's hands.
        // SAFETY: both are open, and the one that is replaced is this memory's own.
        let replaced =
            unsafe { libc::dup3(file.as_raw_fd(), self.file.as_raw_fd(), libc::O_CLOEXEC) };
        if replaced < 0 {
            let why = io::Error::last_os_error();
            // The content is the same in both.
            self.place(&self.file).map_err(|e| fail("mmap", e))?;
            return Err(fail("dup3", why));
        }
        Ok(())
    }

    fn copy_into(&self, file: &OwnedFd) -> io::Result<()> {
        let mut done = 0;
        while done < self.map.len() {
            // SAFETY: within the mapping by the loop's condition.
            let from = unsafe { self.map.as_ptr().add(done) };
            let left = self.map.len() - done;
            // SAFETY: `left` bytes from there on are mapped (INVARIANT); that others write them
            // meanwhile is nothing to the kernel.
            let copied = unsafe {
                libc::pwrite(
                    file.as_raw_fd(),
                    from.cast(),
                    left,
                    done.try_into().unwrap_or(-1),
                )
            };
            match copied {
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                0 => return Err(io::ErrorKind::WriteZero.into()),
                copied => done += copied.cast_unsigned(),
            }
        }
        Ok(())
    }

    /// Maps `file`, which is as long, where this memory is.
    fn place(&self, file: &OwnedFd) -> io::Result<()> {
        let (at, len) = (self.map.as_mut_ptr().cast(), self.map.len());
        // SAFETY: [at, at + len) is `map`, so that MAP_FIXED replaces nothing else; the file's size
        // is sealed, so that it stays mapped as the invariant says.
        let placed = unsafe {
            libc::mmap(
                at,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if placed == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.map.advise(Advice::DontFork)
    }

    /// Bytes, a multiple of the page size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
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
        unsafe { VolatileSlice::new(self.map.as_mut_ptr(), self.map.len()) }
    }

    /// Where it starts, for this crate's typed views.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
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
        unsafe { DmaMemory::new(self.base(), self.map.len() as u64, self.file.as_fd(), 0) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes in {}", self.len(), self.pages)
    }
}

// SAFETY: all access goes through volatile or atomic operations.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

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
    fn c46_nobody_can_truncate_it() {
        let memory = Memory::new(4096).unwrap();
        assert_eq!(ftruncate(&memory.file, 0), Err(nix::errno::Errno::EPERM));
        memory.view().write_obj(7u64, 8).unwrap();
        assert_eq!(memory.view().read_obj::<u64>(8).unwrap(), 7);
    }

    #[test]
    fn without_large_pages_it_says_base_pages() {
        let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
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
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }
}
