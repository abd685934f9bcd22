//! Memory that a device could write to meets no other user: poisoned, and looked at afterwards.

mod common;

use common::{Bench, PAGE};
use failstop_dma::frame::Frame;
use failstop_dma::region::{FrameRegion, Pool};

const POISON: [u8; 2048] = [0x5a; 2048];

/// Memory of other objects, each with a frame full of poison.
fn others(bench: &Bench) -> Vec<(FrameRegion, Pool, Frame)> {
    let other = |serial| {
        let (region, mut pool) = FrameRegion::new(bench.map(serial, PAGE), 2048, 2).unwrap();
        let mut frame = pool.take().unwrap();
        frame.fill(&POISON).unwrap();
        (region, pool, frame)
    };
    (10..42).map(other).collect()
}

fn assert_intact(others: &[(FrameRegion, Pool, Frame)]) {
    for (region, _, frame) in others {
        let mut bytes = [0; 2048];
        assert_eq!(frame.copy_to(&mut bytes), POISON.len());
        assert_eq!(bytes, POISON, "{}", region.owner());
    }
}

#[test]
fn c11_what_a_device_goes_on_writing_lands_in_nobody_elses_memory() {
    let bench = Bench::new();
    let lost = bench.map(1, PAGE);
    let iova = lost.iova().0;
    drop(lost);
    bench.bus_master_on();
    let others = others(&bench);
    assert!(bench.function.dma_write(iova, &[0xee; PAGE]));
    assert_intact(&others);
}

#[test]
fn c11_memory_that_was_released_is_out_of_the_devices_reach() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let iova = mapping.iova().0;
    bench.bus_master_on();
    mapping.release(&bench.proof(1)).unwrap();
    let others = others(&bench);
    assert!(!bench.function.dma_write(iova, &[0xee; PAGE]));
    assert_intact(&others);
}
