use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use failstop_pci::clock::{ManualClock, Ticks};
use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::transport::Iova;

use super::*;
use crate::iova::IovaAllocator;

const PAGE: u64 = 4096;

fn iovas() -> IovaAllocator {
    IovaAllocator::new(&[0..=0x7f_ffff_ffff], u64::MAX, PAGE)
}

fn owner(generation: Generation) -> ObjectId {
    ObjectId {
        device: DeviceId::fresh(),
        generation,
        serial: 1,
        kind: "RQ",
    }
}

#[test]
fn c24_an_overlap_is_refused_with_the_name_of_what_is_there() {
    let mut accounts = Accounts::new(iovas());
    let memory = Arc::new(Memory::new(2 * PAGE as usize).unwrap());
    let owner = owner(Generation::FIRST);
    let mut enter = |iova| accounts.enter(Iova(iova), &owner, &memory, Ticks(0));
    enter(16 * PAGE).unwrap();
    for overlap in [15 * PAGE, 16 * PAGE, 17 * PAGE] {
        let refused = enter(overlap).err().unwrap().to_string();
        assert!(
            refused.contains("overlap") && refused.contains("RQ 1"),
            "{refused}"
        );
    }
    enter(14 * PAGE).unwrap();
    enter(18 * PAGE).unwrap();
    assert_eq!(accounts.totals().live_mappings, 3);
}

/// Counts what the thread that asks has allocated, in bytes, with what the C library's allocator
/// adds to each piece.
struct Counting;

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(layout: Layout, sign: isize) {
    let bytes = (layout.size() + 8).next_multiple_of(16).max(32);
    BYTES.with(|counted| counted.set(counted.get() + sign * bytes.cast_signed()));
}

// SAFETY: everything is passed on to the system's allocator as it is.
#[expect(unsafe_code, reason = "an allocator that counts")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout, -1);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that one of 60,000 mappings takes in ledger and allocator; `gap` of two are taken.
fn bytes_per_mapping(gap: u64) -> isize {
    const MAPPINGS: isize = 60_000;
    let memory = Arc::new(Memory::new(PAGE as usize).unwrap());
    let owner = owner(Generation::FIRST);
    let before = BYTES.get();
    let ledger = Ledger::new(iovas(), Arc::new(ManualClock::default()));
    for _ in 0..MAPPINGS {
        let key = ledger.enter(&owner, &memory, 1).unwrap();
        assert!(ledger.mapped(&key));
        if gap > 0 {
            let iovas = &mut ledger.accounts().iovas;
            let hole = iovas.take(gap, 1).unwrap();
            iovas.give_back(hole, gap);
        }
    }
    (BYTES.get() - before) / MAPPINGS
}

#[test]
fn a_mapping_takes_at_most_256_bytes_of_accounts() {
    for gap in [0, PAGE] {
        let bytes = bytes_per_mapping(gap);
        assert!(
            (64..=256).contains(&bytes),
            "{bytes} bytes with gaps of {gap}"
        );
    }
}
