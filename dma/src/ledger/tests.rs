use std::sync::Arc;

use failstop_pci::clock::{ManualClock, Ticks};
use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::testing::{Counting, allocated};
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

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that one of 60,000 mappings takes in ledger and allocator; `gap` of two are taken.
fn bytes_per_mapping(gap: u64) -> isize {
    const MAPPINGS: isize = 60_000;
    let memory = Arc::new(Memory::new(PAGE as usize).unwrap());
    let owner = owner(Generation::FIRST);
    let before = allocated().bytes;
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
    (allocated().bytes - before) / MAPPINGS
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
