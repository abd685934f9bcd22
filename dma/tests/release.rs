//! What leaves the device's reach, on which ground, and what stays [R2] [R3].

mod common;

use std::slice;
use std::sync::Arc;

use failstop_dma::frame::Frame;
use failstop_dma::ledger::State;
use failstop_dma::proof::{Acknowledged, ReleaseProof};
use failstop_dma::region::{FrameRegion, ReleaseRegion};
use failstop_dma::ring::{ExchangeRing, Refusal, RingError};
use failstop_dma::space::{NotReleased, SpaceError};
use failstop_pci::transport::{MapError, Unmapped};
use nix::errno::Errno;

use common::Bench;

/// (R2) (R3.1)
#[test]
fn released_memory_leaves_ledger_and_device() {
    let bench = Bench::new();
    let mapping = bench.map(1, 4096);
    assert_eq!(bench.function.mapped(), [(mapping.iova().0, 4096)]);

    mapping.release(&bench.proof(1)).unwrap();

    assert_eq!(bench.function.mapped(), []);
    assert_eq!(bench.space.ledger().totals().live_bytes, 0);
    assert_eq!(bench.space.ledger().totals().peak_bytes, 4096);
}

/// (R3)
#[test]
fn proof_of_another_object_hands_the_mapping_back() {
    let bench = Bench::new();
    let Err(NotReleased::Scope(mapping)) = bench.map(1, 4096).release(&bench.proof(2)) else {
        panic!()
    };
    assert_eq!(bench.space.ledger().totals().live_bytes, 4096);
    mapping.release(&bench.proof(1)).unwrap();
}

/// A reading says nothing of another life of the device (R3.1).
#[test]
fn a_stop_in_another_life_acknowledges_nothing() {
    let mut bench = Bench::new();
    let stopped = bench.queue_stopped();
    bench.life = bench.life.next();
    assert!(Acknowledged::by_register(bench.object(1), stopped).is_none());
}

/// (R3)
#[test]
fn dropped_without_proof_is_quarantined_and_stays_mapped() {
    let bench = Bench::new();
    drop(bench.map(1, 4096));
    let totals = bench.space.ledger().totals();
    assert_eq!((totals.live_bytes, totals.quarantined_bytes), (0, 4096));
    assert_eq!(bench.function.mapped().len(), 1);
}

#[test]
fn c5_a_failed_unmap_keeps_record_and_memory() {
    let bench = Bench::new();
    let mapping = bench.map(1, 4096);
    let memory = Arc::downgrade(mapping.memory());
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));

    let released = mapping.release(&bench.proof(1));

    assert!(matches!(
        released,
        Err(NotReleased::Unmap {
            outcome: Unmapped::Failed(Errno::EIO),
            ..
        })
    ));
    assert_eq!(bench.space.ledger().lines()[0].state, State::Quarantined);
    assert!(memory.upgrade().is_some());
}

#[test]
fn c6_an_unmap_of_another_size_is_not_success() {
    let bench = Bench::new();
    for outcome in [
        Unmapped::Partial { bytes: 0 },
        Unmapped::Partial { bytes: 4096 },
        Unmapped::Absent,
    ] {
        let mapping = bench.map(1, 8192);
        bench.function.answer_next_unmap(outcome);
        assert!(
            matches!(
                mapping.release(&bench.proof(1)),
                Err(NotReleased::Unmap { .. })
            ),
            "{outcome:?}"
        );
    }
    assert_eq!(bench.space.ledger().totals().quarantined_mappings, 3);
}

#[test]
fn c6_an_existing_mapping_is_an_error() {
    let bench = Bench::new();
    bench.function.fail_next_map(Errno::EEXIST);
    let refused = bench.space.map(bench.object(1), 4096);
    assert!(matches!(
        refused,
        Err(SpaceError::Map {
            source: MapError::Exists { .. },
            ..
        })
    ));
    assert_eq!(bench.space.ledger().lines(), []);
}

#[test]
fn a_busy_unmap_changes_nothing() {
    let bench = Bench::new();
    let mapping = bench.map(1, 4096);
    bench.function.answer_next_unmap(Unmapped::Busy);
    let Err(NotReleased::Busy(mapping)) = mapping.release(&bench.proof(1)) else {
        panic!()
    };
    assert_eq!(bench.space.ledger().lines()[0].state, State::Live);
    mapping.release(&bench.proof(1)).unwrap();
}

#[test]
fn c25_contiguous_memory_is_one_mapping() {
    let bench = Bench::new();
    let _mapping = bench.map(1, 64 << 20);
    assert_eq!(bench.function.map_calls(), 1);
    assert_eq!(bench.space.ledger().totals().live_mappings, 1);
}

/// (R2) (R4.1)
#[test]
fn a_closed_ledger_takes_no_mapping() {
    let bench = Bench::new();
    bench.space.close();
    assert!(matches!(
        bench.space.map(bench.object(1), 4096),
        Err(SpaceError::Refused { .. })
    ));
    assert_eq!(bench.function.map_calls(), 0);
}

/// (R2)
#[test]
fn failed_map_leaves_nothing_behind() {
    let bench = Bench::new();
    for errno in [Errno::ENOMEM, Errno::ENOSPC, Errno::EINVAL] {
        bench.function.fail_next_map(errno);
        assert!(bench.space.map(bench.object(1), 4096).is_err());
    }
    assert_eq!(bench.space.ledger().lines(), []);
    assert_eq!(bench.function.mapped(), []);
}

fn region(bench: &Bench, frames: usize) -> (FrameRegion, failstop_dma::region::Pool) {
    FrameRegion::new(bench.map(10, frames * 2048), 2048, frames as u32).unwrap()
}

#[test]
fn c13_frames_add_up_wherever_they_are() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench, 16);
    let ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    let held = pool.take_many(3).unwrap();
    assert_eq!(pool.available(), 16 - 8 - 3);

    drop(held);
    let (frames, mapping) = ring.dismantle(&bench.proof(1)).unwrap();
    drop(frames);
    mapping.release(&bench.proof(1)).unwrap();
    drop(pool.take_many(16).unwrap());

    assert_eq!(region.census().home, 16);
}

/// Every queue that held one of its addresses is acknowledged first (R3.3).
#[test]
fn a_region_that_a_ring_holds_is_not_released() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench, 16);
    let ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    let Err(ReleaseRegion::Referenced(region)) = region.release() else {
        panic!()
    };

    let (frames, mapping) = ring.dismantle(&bench.proof(1)).unwrap();
    mapping.release(&bench.proof(1)).unwrap();
    region.release().unwrap();

    assert_eq!(bench.space.ledger().lines(), []);
    // The caller's frames keep their pages; the device has no way to them.
    assert_eq!(frames[0].capacity(), 2048);
}

/// (R3.3)
#[test]
fn what_no_queue_holds_says_nothing_of_another_region_of_the_same_object() {
    let bench = Bench::new();
    let (held, mut pool) = region(&bench, 16);
    let (idle, _) = region(&bench, 16);
    let ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    let proof = ReleaseProof::from(idle.unreferenced().unwrap());
    assert!(matches!(
        held.into_mapping().release(&proof),
        Err(NotReleased::Scope(_))
    ));
    idle.into_mapping().release(&proof).unwrap();
    drop(ring);
}

#[test]
fn a_ring_dropped_without_proof_holds_its_region_for_ever() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench, 16);
    drop(ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap());
    assert_eq!(pool.available(), 8);
    assert!(matches!(
        region.release(),
        Err(ReleaseRegion::Referenced(_))
    ));
    assert_eq!(bench.space.ledger().totals().quarantined_mappings, 2);
}

#[test]
fn a_ring_is_not_dismantled_on_the_proof_of_another() {
    let bench = Bench::new();
    let (_region, mut pool) = region(&bench, 16);
    let ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    assert!(ring.dismantle(&bench.proof(2)).is_err());
}

#[test]
fn a_closed_region_takes_no_ring() {
    let bench = Bench::new();
    let (region, mut pool) = region(&bench, 16);
    let _unreferenced = region.unreferenced().unwrap();
    let Err((_, error)) = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8) else {
        panic!()
    };
    assert_eq!(error, RingError::RegionClosed);
    assert_eq!(pool.available(), 16);
}

#[test]
fn wrong_ring_sizes_are_refused() {
    let bench = Bench::new();
    let (_region, mut pool) = region(&bench, 16);
    let refusal = |entries, pool: &mut _| {
        let Err((_, error)) = ExchangeRing::new(bench.map(1, 4096), pool, entries) else {
            panic!()
        };
        error
    };
    assert!(matches!(
        refusal(7, &mut pool),
        RingError::NotPowerOfTwo { .. }
    ));
    assert!(matches!(refusal(512, &mut pool), RingError::Memory { .. }));
    assert!(matches!(refusal(32, &mut pool), RingError::Frames { .. }));
}

#[test]
fn foreign_frames_and_false_lengths_are_not_exchanged() {
    let bench = Bench::new();
    let (_a, mut pool) = region(&bench, 16);
    let (_b, mut other) = FrameRegion::new(bench.map(11, 4096), 2048, 2).unwrap();
    let mut ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    let (mut own, mut foreign) = (pool.take().unwrap(), other.take().unwrap());
    // A limit beyond a frame's size is none.
    ring.set_longest(u32::MAX);
    let mut receive = |frame: &mut Frame, len| {
        let mut result = None;
        let taken = ring.offer(0, slice::from_mut(frame), |slot| {
            result = Some(slot.receive(len, 14).map(drop));
            true
        });
        assert_eq!(taken, 1);
        result.unwrap()
    };

    assert_eq!(receive(&mut foreign, 60), Err(Refusal::Foreign));
    for impossible in [0, 13, 2049, u32::MAX.into(), 1 << 32 | 60, u64::MAX] {
        assert_eq!(receive(&mut own, impossible), Err(Refusal::Length));
    }
    assert_eq!(receive(&mut own, 2048), Ok(()));
    assert_eq!(own.len(), 2048);
}

#[test]
fn slots_are_offered_up_to_the_rings_end_and_as_long_as_they_are_taken() {
    let bench = Bench::new();
    let (_region, mut pool) = region(&bench, 16);
    let mut ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    let mut frames = pool.take_many(4).unwrap();
    let mut offered = |index, most| {
        let mut offered = Vec::new();
        let taken = ring.offer(index, &mut frames, |slot| {
            offered.push(slot.exchange().unwrap());
            slot.post([offered.len() as u64, index.into()]);
            offered.len() <= most
        });
        (taken, offered)
    };

    let (taken, first) = offered(6, 9);
    assert_eq!((taken, first.len()), (2, 2));
    // What was in these slots is the caller's now, and goes back.
    let (taken, second) = offered(14, 9);
    assert!(taken == 2 && second != first);
    assert_eq!(offered(6, 9), (2, first));
    assert_eq!(offered(0, 3).0, 3);
    assert_eq!(offered(0, 0).0, 0);
    assert_eq!((ring.peek::<0>(6), ring.peek::<1>(7)), (1, 6));
}

#[test]
fn the_word_that_is_watched_is_that_of_the_descriptor() {
    let bench = Bench::new();
    let (_region, mut pool) = region(&bench, 16);
    let mut ring = ExchangeRing::new(bench.map(1, 4096), &mut pool, 8).unwrap();
    assert_eq!(ring.watched(), 0);
    ring.set::<1>(3, 7);
    ring.watch::<1>(11);
    assert_eq!(ring.watched(), 7);
    ring.set::<1>(3, 8);
    assert_eq!(ring.watched(), 8);
}

#[test]
fn frames_copy_and_are_bounded() {
    let bench = Bench::new();
    let (_region, mut pool) = region(&bench, 2);
    let mut frame = pool.take().unwrap();
    frame.fill(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let mut copy = [0; 16];
    assert_eq!(frame.copy_to(&mut copy), 8);
    assert_eq!(copy[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(frame.head::<8>().unwrap().word::<4>(), 0x0807_0605);
    assert!(frame.head::<12>().is_none());
    assert!(frame.fill(&[0; 2049]).is_err());
    assert!(frame.set_len(2049).is_err());
}

#[test]
fn a_map_that_nobody_answered_is_quarantined() {
    let bench = Bench::new();
    bench.function.fail_next_map(Errno::ETIMEDOUT);
    assert!(bench.space.map(bench.object(1), 4096).is_err());
    assert_eq!(bench.space.ledger().totals().quarantined_bytes, 4096);
    // Its address is not handed out again.
    let other = bench.map(2, 4096);
    assert_ne!(other.iova().0, bench.function.mapped()[0].0);
}

#[test]
fn frames_that_do_not_fit_are_refused_with_their_number() {
    let bench = Bench::new();
    for (frame, count) in [
        (100, 1),
        (0, 1),
        (2048, 0),
        (2048, 3),
        (1 << 17, 1),
        (65_536, 65_536),
    ] {
        let Err((_, refused)) = FrameRegion::new(bench.map(10, 4096), frame, count) else {
            panic!()
        };
        assert!(
            refused
                .to_string()
                .contains(&format!("{count} frames of {frame} bytes")),
            "{refused}"
        );
    }
}

#[test]
fn a_region_has_as_many_frames_as_were_asked_for() {
    let bench = Bench::new();
    // The mapping is rounded up to a page, which would hold two.
    let (region, mut pool) = FrameRegion::new(bench.map(10, 2048), 2048, 1).unwrap();
    assert_eq!(region.census().total, 1);
    assert!(pool.take_many(2).is_none());
}
