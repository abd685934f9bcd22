//! What a child of fork is to know, and to have in place of its parent's memory (R12).
//!
//! DMA memory and mapped registers are not inherited (`MADV_DONTFORK`), and none of a device's
//! threads is: a child's copies of our objects point at addresses that nothing is mapped at, which
//! the child's next `mmap` may be given, and wait for threads that are not there. So a handler
//! (`pthread_atfork(3)`) puts private pages of zeros at each such place: an access does no harm, and
//! unmapping takes nothing of somebody else's. And it counts, so that a destructor can tell that the
//! object is its parent's, and leave it alone.
//!
//! What this cannot see: `clone(2)` called directly, which runs no handlers.
#![expect(unsafe_code, reason = "maps pages in a child of fork")]

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// How many forks lie between this process and the first one that had a [`Process`].
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process(u32);

impl Process {
    /// This one.
    #[must_use]
    pub fn this() -> Self {
        if let Err(error) = install() {
            log::warn!("children of fork are not told apart from this process: {error}");
        }
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is that process: not in a child of it, to which the object is nothing but a
    /// copy of numbers. One load, no system call.
    #[must_use]
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// A mapping that a child does not inherit, and has zeros in place of.
///
/// # Invariants
///
/// `slot` describes a mapping of ours as long as `self` lives.
#[derive(Debug)]
pub struct NotInherited {
    slot: &'static Slot,
}

impl NotInherited {
    /// Enters `len` bytes at `addr`, both of whole pages.
    ///
    /// # Errors
    ///
    /// When the handler cannot be installed: no memory is left.
    ///
    /// # Safety
    ///
    /// They are a mapping of the caller's, advised `MADV_DONTFORK`, for as long as the result lives;
    /// nobody relies on a child's having anything else there.
    pub unsafe fn new(addr: *mut u8, len: usize) -> io::Result<Self> {
        install()?;
        let table = Table::lock();
        let slot = table.take();
        slot.len.store(len, Ordering::Relaxed);
        slot.base.store(addr.addr(), Ordering::Release);
        drop(table);
        Ok(Self { slot })
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        let table = Table::lock();
        self.slot.base.store(0, Ordering::Release);
        table.give_back(self.slot);
    }
}

/// One line of the table. Never freed, so that a child can walk it.
#[derive(Debug)]
struct Slot {
    /// Where the mapping begins; 0 while there is none.
    base: AtomicUsize,
    len: AtomicUsize,
    /// Of all slots.
    next: AtomicPtr<Slot>,
    /// Of those that are free.
    next_free: AtomicPtr<Slot>,
}

/// The heads of the lists of slots; both change under the lock only.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static FREE: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// Held for a few instructions, and across a fork: the child's only thread finds it its own.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// The table, while this thread has it.
struct Table;

impl Table {
    fn lock() -> Self {
        while LOCKED
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            std::thread::yield_now();
        }
        Self
    }

    fn take(&self) -> &'static Slot {
        // SAFETY: the list holds leaked slots only.
        if let Some(slot) = unsafe { FREE.load(Ordering::Relaxed).as_ref() } {
            FREE.store(slot.next_free.load(Ordering::Relaxed), Ordering::Relaxed);
            return slot;
        }
        let slot = Box::leak(Box::new(Slot {
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            next: AtomicPtr::new(SLOTS.load(Ordering::Relaxed)),
            next_free: AtomicPtr::new(ptr::null_mut()),
        }));
        SLOTS.store(slot, Ordering::Release);
        slot
    }

    fn give_back(&self, slot: &'static Slot) {
        slot.next_free
            .store(FREE.load(Ordering::Relaxed), Ordering::Relaxed);
        FREE.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let follow = |link: &'static AtomicPtr<Slot>| {
        // SAFETY: the list holds leaked slots only, published with Release.
        unsafe { link.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(follow(&SLOTS), move |slot| follow(&slot.next))
}

fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<c_int> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: the handlers make system calls and atomic accesses only, and live as long as the
        // program.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) }
    });
    match *installed {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// No other thread is in the middle of a change when the process is copied.
extern "C" fn before_fork() {
    std::mem::forget(Table::lock());
}

extern "C" fn in_parent() {
    drop(Table);
}

/// Runs in every child of fork, on its only thread: atomic accesses and system calls only.
extern "C" fn in_child() {
    drop(Table);
    FORKS.fetch_add(1, Ordering::Relaxed);
    for slot in slots() {
        let base = slot.base.load(Ordering::Acquire);
        if base == 0 {
            continue;
        }
        let at = ptr::without_provenance_mut::<c_void>(base);
        // SAFETY: nothing is mapped there, since the parent's mapping is not inherited (INVARIANT
        // of `NotInherited`) and no other code of the child has run but handlers like this one;
        // MAP_FIXED_NOREPLACE replaces nothing in any case. Where it fails an access faults.
        unsafe {
            libc::mmap(
                at,
                slot.len.load(Ordering::Relaxed),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            );
        }
    }
}
