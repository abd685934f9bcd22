use std::sync::Arc;
use std::time::Duration;

use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::transport::Iova;

use super::*;

const PAGE: u64 = 4096;

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
    let ledger = Ledger::default();
    let memory = Arc::new(Memory::new(2 * PAGE as usize).unwrap());
    let owner = owner(Generation::FIRST);
    let enter = |iova| ledger.enter(Iova(iova), owner, memory.clone(), Duration::ZERO);
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
    assert_eq!(ledger.totals().live_mappings, 3);
}
