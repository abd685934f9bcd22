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
        let free = slots().find(|slot| !slot.taken.swap(true, Ordering::AcqRel));
        let slot = free.unwrap_or_else(Slot::more);
        slot.len.store(len, Ordering::Relaxed);
        slot.base.store(addr.addr(), Ordering::Release);
        Ok(Self { slot })
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        self.slot.base.store(0, Ordering::Release);
        self.slot.taken.store(false, Ordering::Release);
    }
}

/// One line of the table. Never freed, so that a child can walk it whatever the other threads of
/// its parent were doing.
#[derive(Debug)]
struct Slot {
    /// Where the mapping begins; 0 while there is none.
    base: AtomicUsize,
    len: AtomicUsize,
    taken: AtomicBool,
    next: AtomicPtr<Slot>,
}

impl Slot {
    /// One more, taken.
    fn more() -> &'static Self {
        let slot: &'static mut Self = Box::leak(Box::new(Self {
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            taken: AtomicBool::new(true),
            next: AtomicPtr::new(ptr::null_mut()),
        }));
        let mut head = SLOTS.load(Ordering::Acquire);
        loop {
            *slot.next.get_mut() = head;
            match SLOTS.compare_exchange(head, slot, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return slot,
                Err(now) => head = now,
            }
        }
    }
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

fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<c_int> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: `in_child` is async-signal-safe, and lives as long as the program.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match *installed {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Runs in every child of fork, on its only thread: atomic accesses and system calls only.
extern "C" fn in_child() {
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
