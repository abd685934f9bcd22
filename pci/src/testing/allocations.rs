//! What a thread allocates, counted: for tests and benchmarks that bound it.
//!
//! Counted by thread, so that what the harness and other tests do beside one does not show. No
//! crate is used for it: those that are kept up count for the whole process, or leave out what each
//! piece costs beyond its length.
#![expect(unsafe_code, reason = "an allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, which counts. A program that asks [`allocated`] makes it its own:
///
/// ```
/// use failstop_pci::testing::{Counting, allocated};
///
/// #[global_allocator]
/// static ALLOCATOR: Counting = Counting;
///
/// let before = allocated();
/// let boxed = Box::new([0u8; 100]);
/// assert_eq!(allocated().calls, before.calls + 1);
/// # drop(boxed);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct Counting;

/// What one thread has allocated since it began.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Allocated {
    /// How often.
    pub calls: u64,
    /// Bytes that are not freed, with what the C library's allocator adds to each piece; below 0 for
    /// a thread that frees what another allocated.
    pub bytes: isize,
}

thread_local! {
    // Neither has a destructor, nor is made when first used: an allocator may use them at any time.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

/// What this thread has allocated; nothing where [`Counting`] is not the program's allocator.
#[must_use]
pub fn allocated() -> Allocated {
    Allocated {
        calls: CALLS.get(),
        bytes: BYTES.get(),
    }
}

/// What a piece takes in the GNU C library: a header of 8 bytes, in steps of 16, 32 at the least.
fn cost(layout: Layout) -> isize {
    let bytes = layout.size().saturating_add(8).next_multiple_of(16).max(32);
    bytes.cast_signed()
}

// SAFETY: each method passes its arguments to the same method of `System`, which keeps
// `GlobalAlloc`'s contract, and returns its result; what is done besides touches two cells of the
// thread, which neither allocates nor unwinds. Memory that `alloc` returns is `System`'s own, so that
// `dealloc`, and the provided `realloc` and `alloc_zeroed`, which call these two, give `System` nothing
// else.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get().wrapping_add(1));
        BYTES.set(BYTES.get().wrapping_add(cost(layout)));
        // SAFETY: the caller gives a layout of a size that is not 0, as `System.alloc` wants it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(cost(layout)));
        // SAFETY: the caller got `at` from `alloc` with this layout, so from `System.alloc` with it, and
        // frees it once.
        unsafe { System.dealloc(at, layout) }
    }
}
