//! Regions and rings across a break: which frames come back, and what a new life gets [R7] [R10].

mod common;

use std::slice;
use std::sync::Arc;

use common::{Bench, PAGE};
use failstop_dma::proof::ReleaseProof;
use failstop_dma::region::{FrameRegion, Pool};
use failstop_dma::ring::{ExchangeRing, NotMade, RingError};
use failstop_dma::space::{Settled, SpaceError};
use failstop_pci::transport::{ResetMethod, Strength, Unmapped};
use nix::errno::Errno;

const FRAMES: usize = 16;

fn region(bench: &Bench) -> (FrameRegion, Pool) {
    FrameRegion::new(bench.map(10, FRAMES * 2048), 2048, FRAMES as u32).unwrap()
}

fn break_down(bench: &Bench, stop: bool) -> Settled {
    bench.space.close();
    let stopped = stop.then(|| bench.stop(ResetMethod::Flr));
    let _swept = bench.space.unmap_all(&|| true);
    bench.space.settle(stopped.as_ref())
}

fn proof(bench: &Bench, stop: bool) -> Arc<ReleaseProof> {
    break_down(bench, stop).proof.unwrap()
}

fn why(error: SpaceError) -> &'static str {
    match error {
        SpaceError::NotCarried { why, .. } => why,
        error => panic!("{error}"),
    }
}

#[test]
fn a_carried_region_keeps_its_frames_and_gets_a_new_address() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let mut frame = pool.take().unwrap();
    frame.fill(b"before").unwrap();
    let old = region.iova();
    let proof = proof(&bench, true);
    bench.begin();

    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();

    assert_ne!(region.iova(), old);
    assert_eq!(region.owner().generation, bench.life);
    let totals = bench.space.ledger().totals();
    assert_eq!((totals.live_mappings, totals.held_mappings), (1, 0));
    let mut bytes = [0; 6];
    frame.copy_to(&mut bytes);
    assert_eq!(&bytes, b"before");
    assert!(pool.put(frame).is_ok());

    // The new ring tells the device the new addresses, and that is where it writes.
    let mut ring = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap();
    let slot = ring.slot_iova(0);
    assert!((region.iova().0..region.iova().0 + 16 * 2048).contains(&slot.0));
    bench.bus_master_on();
    assert!(bench.function.dma_write(slot.0, b"after!"));
    let mut frame = pool.take().unwrap();
    let taken = ring.offer(0, slice::from_mut(&mut frame), |slot| {
        slot.receive(6, 0).is_ok()
    });
    assert_eq!(taken, 1);
    frame.copy_to(&mut bytes);
    assert_eq!(&bytes, b"after!");
    let (frames, mapping) = ring.dismantle(&bench.proof(1)).unwrap();
    drop(frames);
    mapping.release(&bench.proof(1)).unwrap();
    region.release().unwrap();
    assert_eq!(bench.space.ledger().lines(), []);
}

#[test]
fn a_region_that_a_ring_holds_is_not_carried() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let ring = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap();
    let proof = proof(&bench, true);
    bench.begin();
    let (region, error) = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap_err();
    assert!(why(error).contains("queues hold frames"));

    let (frames, mapping) = ring.dismantle(&proof).unwrap();
    mapping.release(&proof).unwrap();
    drop(frames);
    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();
    assert_eq!(region.rings(), 0);
}

#[test]
fn a_region_that_was_not_released_is_not_carried() {
    let mut bench = Bench::new();
    let (region, _pool) = region(&bench);
    let owner = region.owner();
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    let left_out = proof(&bench, true);
    let stopped = bench.stop(ResetMethod::Flr);
    let whole = ReleaseProof::stopped(&stopped, &bench.space).unwrap();
    bench.begin();
    let (region, error) = region
        .carry(&left_out, &bench.space, bench.object(10))
        .unwrap_err();
    assert!(why(error).contains("does not cover"));
    let (region, error) = region
        .carry(&whole, &bench.space, bench.object(10))
        .unwrap_err();
    assert!(why(error).contains("not released"));
    assert_eq!(region.owner(), owner);
}

#[test]
fn a_region_that_is_being_destroyed_is_not_carried() {
    let mut bench = Bench::new();
    let (region, _pool) = region(&bench);
    let _unreferenced = region.unreferenced().unwrap();
    let proof = proof(&bench, true);
    bench.begin();
    let carried = region.carry(&proof, &bench.space, bench.object(10));
    assert!(why(carried.unwrap_err().1).contains("destroyed"));
}

#[test]
fn a_region_that_cannot_be_mapped_is_handed_back_and_can_be_tried_again() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let proof = proof(&bench, true);
    bench.begin();
    bench.function.fail_next_map(Errno::ENOSPC);
    let (region, error) = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap_err();
    assert!(matches!(error, SpaceError::Map { .. }));
    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();
    let ring = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap();
    assert_eq!(region.rings(), 1);
    drop(ring);
}

#[test]
fn frames_do_not_come_back_with_a_ring_while_their_region_is_in_reach() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let ring = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap();
    // The region was mapped first, so that it is unmapped first: that fails.
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    let proof = proof(&bench, false);
    assert!(!ring.is_covered_by(&proof));
    let ring = ring.dismantle(&proof).unwrap_err();

    let proof = self::proof(&bench, true);
    assert!(ring.is_covered_by(&proof));
    let (frames, _shell) = ring.dismantle(&proof).unwrap();
    assert_eq!(frames.len(), 8);
    assert_eq!(region.rings(), 0);
}

#[test]
fn frames_of_a_lost_ring_come_home_when_their_region_is_carried() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    drop(ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap());
    assert_eq!((region.rings(), pool.available()), (1, 8));
    let proof = proof(&bench, true);
    bench.begin();
    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();
    assert_eq!((region.rings(), pool.available()), (0, 16));
    let ring = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 16).unwrap();
    drop(ring);
    assert_eq!(region.rings(), 1);
}

#[test]
fn memory_of_a_lost_ring_is_freed_when_a_proof_comes_later() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    let mapping = bench.map(10, FRAMES * 2048);
    let memory = Arc::downgrade(mapping.memory());
    let (region, mut pool) = FrameRegion::new(mapping, 2048, FRAMES as u32).unwrap();
    drop(ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap());
    drop((region, pool));
    assert_eq!(break_down(&bench, false).released_mappings, 0);
    assert!(memory.upgrade().is_some());

    assert_eq!(break_down(&bench, true).released_mappings, 2);

    assert!(memory.upgrade().is_none());
}

#[test]
fn a_region_closes_to_rings_only_while_it_is_carried() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let proof = proof(&bench, true);
    bench.begin();
    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();
    let _closed = region.unreferenced().unwrap();
    let (_, error) = ExchangeRing::new(bench.map(1, PAGE), &mut pool, 8).unwrap_err();
    assert_eq!(error, RingError::RegionClosed);
}

/// A server keeps what it was sent, or a child of it does, and writes to it in the next life.
#[test]
fn a_carried_region_is_in_no_file_that_a_server_was_sent_before() {
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let mut frame = pool.take().unwrap();
    frame.fill(b"before").unwrap();
    let kept = bench.function.files().unwrap();
    assert_eq!(kept.len(), 1);
    let proof = proof(&bench, true);
    bench.begin();
    let region = region
        .carry(&proof, &bench.space, bench.object(10))
        .unwrap();

    let scribbled = [0xee; FRAMES * 2048];
    assert_eq!(
        nix::sys::uio::pwrite(&kept[0], &scribbled, 0),
        Ok(scribbled.len())
    );

    let mut bytes = [0; 6];
    frame.copy_to(&mut bytes);
    assert_eq!(&bytes, b"before");
    // And the device reaches what we do, wherever in the region the frame is.
    bench.bus_master_on();
    let mut all = [0; FRAMES * 2048];
    assert!(bench.function.dma_read(region.iova().0, &mut all));
    assert!(all.windows(6).any(|bytes| bytes == b"before"));
}

#[test]
fn a_ring_that_cannot_be_made_leaves_no_mapping_and_no_frame_behind() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let _taken = pool.take_many(FRAMES - 4).unwrap();
    let maps = bench.function.map_calls();
    let made = ExchangeRing::create(&bench.space, bench.object(1), &mut pool, 8);
    assert!(
        matches!(made, Err(NotMade::Ring(RingError::Frames { .. }))),
        "{made:?}"
    );
    assert_eq!(bench.function.map_calls(), maps);

    bench.function.fail_next_map(Errno::ENOSPC);
    let made = ExchangeRing::create(&bench.space, bench.object(1), &mut pool, 4);
    assert!(matches!(made, Err(NotMade::Space(_))), "{made:?}");
    assert_eq!((region.rings(), pool.available()), (0, 4));
    assert_eq!(bench.space.ledger().totals().live_mappings, 1);
    assert_eq!(bench.space.ledger().totals().quarantined_mappings, 0);
    let _made = ExchangeRing::create(&bench.space, bench.object(1), &mut pool, 4).unwrap();
    assert_eq!(region.rings(), 1);
}
