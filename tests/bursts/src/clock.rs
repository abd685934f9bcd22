//! The time-stamp counter. QEMU advances it by one for each instruction with `-icount shift=0`.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "reads a counter of the processor")
)]

use std::array;

/// Runs `f` between two readings; the ticks between them, and what it returned.
#[inline(always)]
pub(super) fn timed<R>(f: impl FnOnce() -> R) -> (u64, R) {
    let start = now();
    let result = f();
    (now() - start, result)
}

/// Ticks of nothing: the middle of many.
pub(super) fn between() -> u64 {
    let mut ticks: [u64; 1001] = array::from_fn(|_| timed(|| ()).0);
    ticks.sort_unstable();
    ticks[ticks.len() / 2]
}

/// The counter. Nothing that touches memory is moved across this, and its three instructions stay together: what of a reading
/// lies between two is the same everywhere.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn now() -> u64 {
    let ticks;
    // SAFETY: every x86-64 processor has this instruction, Linux lets programs use it, and it changes nothing else.
    unsafe {
        std::arch::asm!("rdtsc", "shl rdx, 32", "or rax, rdx", out("rax") ticks, out("rdx") _, options(nostack));
    }
    ticks
}

/// Ticks of a million turns of a loop of two instructions.
#[cfg(target_arch = "x86_64")]
pub(super) fn million_turns() -> u64 {
    let (ticks, ()) = timed(|| {
        // SAFETY: counts a register of its own down to 0, and changes nothing else.
        unsafe {
            std::arch::asm!("2: dec {0}", "jnz 2b", inout(reg) 1_000_000_u64 => _, options(nomem, nostack));
        }
    });
    ticks
}

#[cfg(not(target_arch = "x86_64"))]
fn now() -> u64 {
    0
}

/// No such clock here.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn million_turns() -> u64 {
    0
}
