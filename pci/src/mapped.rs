//! Mapped parts of a BAR, and the guard that keeps an access to one from killing the process.
//!
//! A mapped BAR raises SIGBUS while the function's memory decode is off, as when it is unplugged
//! under us (C14). The guard's handler makes the same move as the ladder's *detach* [R4.3]: it
//! replaces the window by private pages that read all-ones, and returns; the instruction runs again.
#![expect(unsafe_code, reason = "maps device memory and handles SIGBUS")]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::pwrite;
use volatile_register::RW;

use crate::fork::NotInherited;

/// A mapped part of a BAR.
///
/// # Invariants
///
/// `map` stays mapped as long as `self` lives: to the BAR, or, after [`Mapped::detach`] or the
/// guard's move, to private pages. `slot` names it in the guard's table for just as long.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Before `map`: fields are dropped in this order.
    _not_inherited: NotInherited,
    map: MmapRaw,
    slot: &'static Slot,
}

impl Mapped {
    /// Maps `len` bytes of `file` from `offset` on and puts them under the guard first.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let guard = Guard::install()?;
        let map = MmapOptions::new()
            .offset(offset)
            .len(len)
            .map_raw(file.as_raw_fd())?;
        // A child must not reach the device through an inherited window [R12].
        map.advise(Advice::DontFork)?;
        // SAFETY: all of `map`, advised above, until `Mapped` drops it after the result.
        let not_inherited = unsafe { NotInherited::new(map.as_mut_ptr(), map.len()) }?;
        let slot = guard.protect(map.as_mut_ptr() as usize, len)?;
        Ok(Self {
            _not_inherited: not_inherited,
            map,
            slot,
        })
    }

    /// The register `offset` bytes in; none outside the mapping or between two registers.
    #[inline(always)]
    pub(crate) fn cell(&self, offset: usize) -> Option<Cell<'_>> {
        if offset.is_multiple_of(4)
            && offset
                .checked_add(4)
                .is_some_and(|end| end <= self.map.len())
        {
            // SAFETY: `offset + 4` is within the mapping by the check above.
            let at = unsafe { self.map.as_mut_ptr().add(offset) };
            // SAFETY: aligned by the check above (mappings start at a page); live as long as
            // `self` by its invariant; `RW` is a volatile cell, which promises nothing of its contents.
            Some(Cell(unsafe { &*at.cast::<RW<u32>>() }))
        } else {
            None
        }
    }

    /// Replaces the window by private pages that read all-ones, atomically for each page: what is
    /// stored through it afterwards reaches nothing.
    pub(crate) fn detach(&self) -> io::Result<()> {
        self.slot.overlaid.store(true, Ordering::SeqCst);
        overlay(
            self.map.as_mut_ptr() as usize,
            self.map.len(),
            self.slot.ones.load(Ordering::Acquire),
        )
    }

    /// Whether the window no longer shows the device, or may be about to, by [`Mapped::detach`] or
    /// by the guard. True before the first private page is placed: a reading after which this is
    /// false came from the device.
    pub(crate) fn is_detached(&self) -> bool {
        self.slot.overlaid.load(Ordering::Acquire)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Before the mapping goes (fields are dropped after this), so that the guard never
        // overlays an address that belongs to somebody else by then.
        self.slot.base.store(0, Ordering::Release);
        self.slot.taken.store(false, Ordering::Release);
    }
}

/// One register of a mapped BAR.
#[derive(Clone, Copy)]
pub(crate) struct Cell<'w>(&'w RW<u32>);

impl Cell<'_> {
    #[inline(always)]
    pub(crate) fn read(self) -> u32 {
        self.0.read()
    }

    #[inline(always)]
    pub(crate) fn write(self, value: u32) {
        // SAFETY: `volatile-register` calls writes unsafe because a register's write can have any
        // effect on the device; none can break this process's memory, because DMA reaches only
        // what the ledger lists.
        unsafe { self.0.write(value) }
    }

    /// Where the register is, for a doorbell that keeps the window alive itself.
    pub(crate) fn address(self) -> NonNull<RW<u32>> {
        NonNull::from(self.0)
    }
}

/// A register whose bounds were checked once.
///
/// # Invariants
///
/// `cell` is a register within a [`Mapped`] that outlives `self`: whoever makes one keeps the
/// window next to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedCell {
    cell: NonNull<RW<u32>>,
}

// SAFETY: a volatile store of 32 bits is one access of the CPU, from any thread.
unsafe impl Send for FixedCell {}
// SAFETY: as above.
unsafe impl Sync for FixedCell {}

impl FixedCell {
    /// The register at `cell`.
    ///
    /// # Safety
    ///
    /// The caller keeps the [`Mapped`] that `cell` belongs to alive for as long as the result.
    pub(crate) unsafe fn new(cell: Cell<'_>) -> Self {
        Self {
            cell: cell.address(),
        }
    }

    #[inline(always)]
    pub(crate) fn write(self, value: u32) {
        // SAFETY: live by the invariant.
        let cell = unsafe { self.cell.as_ref() };
        Cell(cell).write(value);
    }
}

/// Bytes of all-ones that one mapping call places: large windows take several.
const ONES: usize = 1 << 16;

/// Places private all-ones pages over `len` bytes at `base`. Only system calls: a signal handler
/// calls it too.
fn overlay(base: usize, len: usize, ones: c_int) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let part = ONES.min(len - done);
        let at = ptr::without_provenance_mut::<c_void>(base + done);
        // SAFETY: [base, base + len) is a mapping of ours (`Mapped`'s invariant, or a slot of the
        // guard's table), so that MAP_FIXED replaces nothing else.
        let placed = unsafe {
            libc::mmap(
                at,
                part,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED,
                ones,
                0,
            )
        };
        if placed == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the pages placed above; a child must not share them either.
        unsafe { libc::madvise(at, part, libc::MADV_DONTFORK) };
        done += part;
    }
    Ok(())
}

/// One guarded window. Slots are never freed, so that the handler may walk them at any time.
#[derive(Debug)]
struct Slot {
    /// Start of the window, 0 while there is none.
    base: AtomicUsize,
    len: AtomicUsize,
    taken: AtomicBool,
    /// Set before the first private page is placed.
    overlaid: AtomicBool,
    /// The file of all-ones, for the handler.
    ones: AtomicI32,
    next: AtomicPtr<Slot>,
}

/// The head of the list of slots, which only grows.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

fn slots() -> impl Iterator<Item = &'static Slot> {
    let follow = |link: &'static AtomicPtr<Slot>| {
        // SAFETY: the list holds leaked slots only, published with Release.
        unsafe { link.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(follow(&SLOTS), move |slot| follow(&slot.next))
}

/// The SIGBUS handler's installation.
struct Guard {
    ones: OwnedFd,
    former: libc::sigaction,
}

static GUARD: OnceLock<Guard> = OnceLock::new();

impl Guard {
    fn install() -> io::Result<&'static Self> {
        // The handler reads GUARD, which is therefore set before the handler is: only the flag says
        // that the handler is there.
        static INSTALLED: AtomicBool = AtomicBool::new(false);
        static INSTALLING: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let installed = || GUARD.get().filter(|_| INSTALLED.load(Ordering::Acquire));
        if let Some(guard) = installed() {
            return Ok(guard);
        }
        let _one_at_a_time = INSTALLING
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(guard) = installed() {
            return Ok(guard);
        }
        let ones = memfd_create("all-ones", MFdFlags::MFD_CLOEXEC)?;
        if pwrite(&ones, &[0xff; ONES], 0)? != ONES {
            return Err(io::Error::other("could not fill the all-ones pages"));
        }
        // SAFETY: `sigaction` is plain data, for which zero is valid.
        let mut former: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: reads the present action only.
        let asked = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut former) };
        if asked != 0 {
            return Err(io::Error::last_os_error());
        }
        let guard = GUARD.get_or_init(|| Self { ones, former });
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        // On the thread's alternate stack where it has one, as Rust's own handler of this signal.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for and is async-signal-safe.
        let set = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        INSTALLED.store(true, Ordering::Release);
        Ok(guard)
    }

    /// Puts `len` bytes at `base` under the guard.
    fn protect(&self, base: usize, len: usize) -> io::Result<&'static Slot> {
        let free = slots().find(|slot| !slot.taken.swap(true, Ordering::AcqRel));
        let slot = match free {
            Some(slot) => slot,
            None => {
                let slot = Box::leak(Box::new(Slot {
                    base: AtomicUsize::new(0),
                    len: AtomicUsize::new(0),
                    taken: AtomicBool::new(true),
                    overlaid: AtomicBool::new(false),
                    ones: AtomicI32::new(-1),
                    next: AtomicPtr::new(ptr::null_mut()),
                }));
                let mut head = SLOTS.load(Ordering::Acquire);
                loop {
                    slot.next.store(head, Ordering::Relaxed);
                    match SLOTS.compare_exchange(head, slot, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => break slot,
                        Err(now) => head = now,
                    }
                }
            }
        };
        slot.len.store(len, Ordering::Relaxed);
        slot.overlaid.store(false, Ordering::Relaxed);
        slot.ones
            .store(self.ones.as_fd().as_raw_fd(), Ordering::Relaxed);
        // Last: what the handler finds at a base is complete.
        slot.base.store(base, Ordering::Release);
        Ok(slot)
    }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let errno = nix::errno::Errno::last_raw();
    // SAFETY: the kernel passes a valid siginfo with SA_SIGINFO.
    let info_read = unsafe { &*info };
    // SAFETY: SIGBUS fills in the address.
    let address = unsafe { info_read.si_addr() } as usize;
    let hit = slots().find(|slot| {
        let base = slot.base.load(Ordering::Acquire);
        base != 0
            && address
                .checked_sub(base)
                .is_some_and(|into| into < slot.len.load(Ordering::Relaxed))
    });
    let saved = hit.is_some_and(|slot| {
        slot.overlaid.store(true, Ordering::SeqCst);
        overlay(
            slot.base.load(Ordering::Acquire),
            slot.len.load(Ordering::Relaxed),
            slot.ones.load(Ordering::Relaxed),
        )
        .is_ok()
    });
    if !saved {
        pass_on(signal, info, context);
    }
    nix::errno::Errno::set_raw(errno);
}

/// Not a window of ours: what would have happened without the guard.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(guard) = GUARD.get() else { return };
    let former = &guard.former;
    match former.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction runs again and ends the process, as it would have.
            // SAFETY: restores a default action.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        handler if former.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: installed with SA_SIGINFO by whoever came before, so it has this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: installed without SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 0x2_0000;

    fn bar() -> OwnedFd {
        let bar = memfd_create("bar", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&bar, LEN as i64).unwrap();
        bar
    }

    #[test]
    fn c14_access_to_a_vanished_bar_reads_all_ones_and_the_process_lives() {
        let bar = bar();
        let window = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        window.cell(0x2818).unwrap().write(5);
        assert_eq!(window.cell(0x2818).unwrap().read(), 5);

        nix::unistd::ftruncate(&bar, 0).unwrap(); // As memory decode off: every access is a SIGBUS.

        assert_eq!(window.cell(0x2818).unwrap().read(), u32::MAX);
        window.cell(0x1_f000).unwrap().write(1);
        assert!(window.is_detached());
    }

    #[test]
    fn c33_no_store_reaches_the_device_after_detach() {
        let bar = bar();
        let device = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        let old = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut n = 1;
                while !stop.load(Ordering::Relaxed) {
                    old.cell(0x2818).unwrap().write(n);
                    n += 1;
                }
            });
            while device.cell(0x2818).unwrap().read() == 0 {}

            old.detach().unwrap();

            device.cell(0x2818).unwrap().write(0);
            for _ in 0..10_000 {
                assert_eq!(device.cell(0x2818).unwrap().read(), 0);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(old.cell(0).unwrap().read(), u32::MAX);
    }

    #[test]
    fn slots_are_used_again() {
        let bar = bar();
        let first = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        first.detach().unwrap();
        drop(first);
        let second = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        assert!(!second.is_detached());
    }

    #[test]
    fn registers_outside_or_misaligned_are_refused() {
        let bar = bar();
        let window = Mapped::new(bar.as_fd(), 0, LEN).unwrap();
        assert!(window.cell(LEN - 4).is_some());
        assert!(window.cell(LEN - 2).is_none());
        assert!(window.cell(LEN).is_none());
        assert!(window.cell(usize::MAX - 3).is_none());
        assert!(window.cell(2).is_none());
    }
}
