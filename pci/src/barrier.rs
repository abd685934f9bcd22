//! The barriers between DMA memory and a device's registers.
//!
//! On x86-64 stores to write-back memory and to a BAR are seen in program order and loads are not
//! reordered with older loads, so that only the compiler has to be held. On aarch64 the device is
//! outside the inner-shareable domain that `fence` orders for, so the outer-shareable barriers are
//! named (as Linux's `dma_wmb`, `dma_rmb`).

/// Orders the descriptors written before it before the doorbell written after it.
#[inline(always)]
pub fn before_doorbell() {
    imp::before_doorbell();
}

/// Orders the reading of a descriptor's done bit before the reading of what the bit vouches for.
#[inline(always)]
pub fn after_done() {
    imp::after_done();
}

#[cfg(not(target_arch = "aarch64"))]
mod imp {
    use std::sync::atomic::{Ordering, fence};

    #[inline(always)]
    pub(super) fn before_doorbell() {
        fence(Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn after_done() {
        fence(Ordering::Acquire);
    }
}

#[cfg(target_arch = "aarch64")]
#[expect(unsafe_code, reason = "Rust has no name for outer-shareable barriers")]
mod imp {
    use std::arch::asm;

    #[inline(always)]
    pub(super) fn before_doorbell() {
        // SAFETY: a barrier reads and writes nothing; without `nomem` the compiler keeps the order too.
        unsafe { asm!("dmb oshst", options(nostack, preserves_flags)) }
    }

    #[inline(always)]
    pub(super) fn after_done() {
        // SAFETY: as above.
        unsafe { asm!("dmb oshld", options(nostack, preserves_flags)) }
    }
}
