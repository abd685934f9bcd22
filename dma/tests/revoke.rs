//! What the ladder takes out of a broken device's reach, what it keeps, and for how long [R3] [R4].

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use common::{Bench, PAGE};
use failstop_dma::iova::Iova;
use failstop_dma::ledger::{Line, Refused, State, Totals};
use failstop_dma::memory::Memory;
use failstop_dma::proof::{Ground, ReleaseProof};
use failstop_dma::space::{Mapping, NotReleased, Settled, SpaceError, Swept};
use failstop_pci::testing::{Call, Happened};
use failstop_pci::transport::{ResetMethod, Strength, Unmapped};
use nix::errno::Errno;

fn on() -> bool {
    true
}

/// Breaks the device, unmaps everything, and settles on `stopped`.
fn break_down(bench: &Bench, stop: bool) -> (Swept, Settled) {
    bench.space.close();
    let stopped = stop.then(|| bench.stop(ResetMethod::Flr));
    let swept = bench.space.unmap_all(&on);
    (swept, bench.space.settle(stopped.as_ref()))
}

fn memory_of(mapping: &Mapping) -> Weak<Memory> {
    Arc::downgrade(mapping.memory())
}

fn reasons(lines: &[Line]) -> Vec<(State, &'static str)> {
    lines
        .iter()
        .map(|line| (line.state, line.reason.unwrap_or("none")))
        .collect()
}

/// The verdict is the ground, not the call (R3.2) (R4.6).
#[test]
fn memory_is_released_after_its_unmap_and_not_by_it() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    drop(mapping);
    bench.space.close();

    let swept = bench.space.unmap_all(&on);

    assert!(swept.is_complete() && swept.unmapped == 1, "{swept:?}");
    assert_eq!(bench.function.mapped(), []);
    assert!(memory.upgrade().is_some());
    assert_eq!(bench.space.ledger().lines()[0].state, State::Revoking);

    let settled = bench.space.settle(None);

    assert_eq!(
        (settled.released_bytes, settled.released_mappings),
        (4096, 1)
    );
    assert!(memory.upgrade().is_none());
    assert_eq!(bench.space.ledger().lines(), []);
}

#[test]
fn settling_twice_releases_once() {
    let bench = Bench::new();
    let _mapping = bench.map(1, PAGE);
    let (_, first) = break_down(&bench, false);
    assert_eq!(first.released_mappings, 1);

    let second = bench.space.settle(None);

    assert_eq!((second.released_bytes, second.released_mappings), (0, 0));
    assert!(second.proof.is_some());
    assert_eq!(bench.unmaps(), 1);
}

#[test]
fn an_open_space_is_not_unmapped_and_gives_no_proof_of_a_life() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    assert_eq!(bench.space.unmap_all(&on).untried, 1);
    let settled = bench.space.settle(None);
    assert!(settled.proof.is_none() && settled.quarantined.is_empty());
    assert_eq!(bench.unmaps(), 0);
    mapping.release(&bench.proof(1)).unwrap();
}

#[test]
fn a_stop_says_nothing_of_a_life_that_goes_on() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    let stopped = bench.stop(ResetMethod::Flr);
    let _nothing = bench.space.settle(Some(&stopped));
    drop(bench.map(1, PAGE));
    let (_, settled) = break_down(&bench, false);
    assert_eq!(settled.released_mappings, 0);
}

/// (R3.2)
#[test]
fn without_a_ground_nothing_is_released() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    drop(mapping);

    let (swept, settled) = break_down(&bench, false);

    assert!(swept.is_complete());
    assert_eq!(settled.released_bytes, 0);
    assert!(settled.proof.is_none());
    let (state, reason) = reasons(&settled.quarantined)[0];
    assert_eq!(state, State::Quarantined);
    assert!(reason.contains("not proven stopped"), "{reason}");
    assert!(memory.upgrade().is_some());
}

#[test]
fn a_later_stop_releases_what_was_quarantined_for_want_of_it() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    drop(mapping);
    let _quarantined = break_down(&bench, false);

    let (_, settled) = break_down(&bench, true);

    assert_eq!(
        (settled.released_bytes, settled.released_mappings),
        (4096, 1)
    );
    assert_eq!(settled.proof.unwrap().ground(), Ground::Stopped);
    assert!(memory.upgrade().is_none());
    assert_eq!(bench.space.ledger().totals().quarantined_bytes, 0);
}

/// (R1) (R3.2)
#[test]
fn a_stopped_function_with_neighbours_in_its_space_is_no_ground() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    bench.function.set_shares_space(true);
    drop(bench.map(1, PAGE));
    let (_, settled) = break_down(&bench, true);
    assert_eq!((settled.released_bytes, settled.quarantined.len()), (0, 1));
    assert!(settled.proof.is_none());
    let stopped = bench.stop(ResetMethod::Flr);
    assert!(ReleaseProof::stopped(&stopped, &bench.space).is_none());
}

#[test]
fn c44_a_software_reset_is_no_ground_without_an_iommu() {
    let bench = Bench::new();
    bench.function.set_strength(Strength::None);
    drop(bench.map(1, PAGE));
    bench.space.close();
    let stopped = bench.stop(ResetMethod::Software);
    let _swept = bench.space.unmap_all(&on);
    let settled = bench.space.settle(Some(&stopped));
    assert_eq!((settled.released_bytes, settled.quarantined.len()), (0, 1));
    assert!(ReleaseProof::stopped(&stopped, &bench.space).is_none());
}

#[test]
fn a_stop_of_another_function_is_no_ground() {
    let (bench, other) = (Bench::new(), Bench::new());
    bench.function.set_strength(Strength::None);
    drop(bench.map(1, PAGE));
    bench.space.close();
    let _swept = bench.space.unmap_all(&on);
    let stopped = other.stop(ResetMethod::Flr);
    assert_eq!(bench.space.settle(Some(&stopped)).released_bytes, 0);
    assert!(ReleaseProof::stopped(&stopped, &bench.space).is_none());
}

/// Only what was unmapped exactly counts (R4.6) (C6).
#[test]
fn c5_c6_an_unmap_that_was_not_exact_keeps_record_and_memory() {
    for outcome in [
        Unmapped::Failed(Errno::EIO),
        Unmapped::Partial { bytes: 0 },
        Unmapped::Partial { bytes: 4096 },
    ] {
        let bench = Bench::new();
        let mapping = bench.map(1, 2 * PAGE);
        let memory = memory_of(&mapping);
        drop(mapping);
        bench.function.answer_next_unmap(outcome);

        let (swept, settled) = break_down(&bench, true);

        assert_eq!((swept.failed, swept.first.unwrap().2), (1, outcome));
        assert_eq!(settled.released_bytes, 0, "{outcome:?}");
        assert!(memory.upgrade().is_some());
        assert_eq!(bench.space.ledger().totals().quarantined_mappings, 1);

        let (_, settled) = break_down(&bench, true);
        assert_eq!(settled.released_mappings, 1, "{outcome:?}: tried again");
    }
}

#[test]
fn c6_an_absent_mapping_counts_only_of_a_stopped_function() {
    let bench = Bench::new();
    drop(bench.map(1, PAGE));
    bench.function.answer_next_unmap(Unmapped::Absent);
    let (swept, settled) = break_down(&bench, false);
    assert_eq!((swept.absent, settled.released_mappings), (1, 0));

    let stopped = bench.stop(ResetMethod::Flr);
    assert_eq!(bench.space.settle(Some(&stopped)).released_mappings, 1);
}

#[test]
fn the_proof_of_a_life_leaves_out_what_is_quarantined() {
    let bench = Bench::new();
    let (kept, gone) = (bench.map(1, PAGE), bench.map(2, PAGE));
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    let (_, settled) = break_down(&bench, false);
    let proof = settled.proof.unwrap();
    assert_eq!(proof.ground(), Ground::Unmapped);
    assert!(proof.covers(gone.owner(), gone.iova()));
    assert!(!proof.covers(kept.owner(), kept.iova()));

    assert!(!kept.is_shell());
    let Err(NotReleased::Scope(kept)) = kept.release(&proof) else {
        panic!()
    };
    drop(kept);
    gone.release(&proof).unwrap();
    assert_eq!(bench.space.ledger().totals().quarantined_mappings, 1);
}

/// (R10)
#[test]
fn the_proof_of_a_life_says_nothing_of_newer_ones_and_of_others() {
    let mut bench = Bench::new();
    let old = bench.object(1);
    drop(bench.map(1, PAGE));
    let proof = break_down(&bench, true).1.proof.unwrap();
    bench.begin();
    let new = bench.map(1, PAGE);
    assert!(proof.covers(old, new.iova()));
    assert!(!proof.covers(new.owner(), new.iova()));
    assert!(!proof.covers(Bench::new().object(1), Iova(0x1000)));
    new.release(&bench.proof(1)).unwrap();
}

#[test]
fn nothing_is_mapped_for_a_life_that_a_proof_covers() {
    let mut bench = Bench::new();
    drop(bench.map(1, PAGE));
    let old = bench.object(1);
    let _settled = break_down(&bench, true);
    bench.begin();
    assert!(matches!(
        bench.space.map(old, PAGE),
        Err(SpaceError::Refused {
            source: Refused::Closed,
            ..
        })
    ));
}

/// (R5)
#[test]
fn c12_a_shell_holds_its_pages_and_is_counted_until_it_is_dropped() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    let _settled = break_down(&bench, true);

    assert!(mapping.is_shell());
    let held = Totals {
        held_bytes: 4096,
        held_mappings: 1,
        peak_bytes: 4096,
        peak_mappings: 1,
        ..Totals::default()
    };
    assert_eq!(bench.space.ledger().totals(), held);

    drop(mapping);
    assert_eq!(bench.space.ledger().totals().held_mappings, 0);
    assert!(memory.upgrade().is_none());
}

#[test]
fn a_shell_does_not_touch_the_next_user_of_its_address() {
    for by_release in [false, true] {
        let mut bench = Bench::with_room_for_one();
        let shell = bench.map(1, PAGE);
        let acknowledged = bench.proof(1);
        let _settled = break_down(&bench, true);
        bench.begin();
        let next = bench.map(1, PAGE);
        assert_eq!(next.iova(), shell.iova());

        if by_release {
            shell.release(&acknowledged).unwrap();
        } else {
            drop(shell);
        }

        assert_eq!(bench.space.ledger().lines()[0].state, State::Live);
        assert_eq!(bench.function.mapped(), [(next.iova().0, 4096)]);
        next.release(&bench.proof(1)).unwrap();
    }
}

#[test]
fn a_shell_is_released_whatever_the_proof() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let proof_of_another = bench.proof(2);
    let _settled = break_down(&bench, true);
    mapping.release(&proof_of_another).unwrap();
    assert_eq!(bench.space.ledger().totals().held_mappings, 0);
    assert_eq!(bench.unmaps(), 1);
}

/// (R2)
#[test]
fn an_address_is_not_handed_out_again_before_the_function_is_stopped() {
    let mut bench = Bench::with_room_for_one();
    let first = bench.map(1, PAGE).iova();
    // Released, since the mapping is gone; but the device may still aim there.
    let (_, settled) = break_down(&bench, false);
    assert_eq!(settled.released_mappings, 1);
    bench.begin();
    let refused = bench.space.map(bench.object(1), PAGE);
    assert!(
        matches!(refused, Err(SpaceError::Iova { .. })),
        "{refused:?}"
    );

    let _settled = break_down(&bench, true);
    bench.begin();
    assert_eq!(bench.map(1, PAGE).iova(), first);
}

/// A queue that survives a reset which the function only says to have made goes on at its old
/// addresses as soon as bus mastering is on again (R4).
#[test]
fn c44_an_address_is_not_handed_out_again_after_a_software_reset_alone() {
    let mut bench = Bench::with_room_for_one();
    let first = bench.map(1, PAGE).iova();
    bench.space.close();
    let stopped = bench.stop(ResetMethod::Software);
    let _swept = bench.space.unmap_all(&on);
    assert_eq!(bench.space.settle(Some(&stopped)).released_mappings, 1);
    bench.begin();
    let refused = bench.space.map(bench.object(1), PAGE);
    assert!(
        matches!(refused, Err(SpaceError::Iova { .. })),
        "{refused:?}"
    );

    let _settled = break_down(&bench, true);
    bench.begin();
    assert_eq!(bench.map(1, PAGE).iova(), first);
}

#[test]
fn an_address_is_not_handed_out_again_before_its_unmap() {
    let mut bench = Bench::with_room_for_one();
    drop(bench.map(1, PAGE));
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    let _settled = break_down(&bench, true);
    bench.begin();
    assert!(bench.space.map(bench.object(1), PAGE).is_err());
}

#[test]
fn a_release_that_the_break_overtakes_keeps_the_address() {
    let mut bench = Bench::with_room_for_one();
    let mapping = bench.map(1, PAGE);
    let proof = bench.proof(1);
    bench.space.close();
    mapping.release(&proof).unwrap();
    assert_eq!(bench.space.ledger().lines(), []);
    bench.begin();
    assert!(bench.space.map(bench.object(1), PAGE).is_err());
}

#[test]
fn a_busy_unmap_is_tried_again() {
    let bench = Bench::new();
    drop(bench.map(1, PAGE));
    bench.function.answer_next_unmap(Unmapped::Busy);
    bench.function.answer_next_unmap(Unmapped::Busy);
    let (swept, settled) = break_down(&bench, false);
    assert!(swept.is_complete());
    assert_eq!((bench.unmaps(), settled.released_mappings), (3, 1));
}

#[test]
fn told_to_stop_it_says_what_was_not_tried() {
    let bench = Bench::new();
    let _mappings = [bench.map(1, PAGE), bench.map(2, PAGE)];
    bench.space.close();
    let unmaps = || bench.unmaps();
    let swept = bench.space.unmap_all(&|| unmaps() == 0);
    assert_eq!((swept.unmapped, swept.untried), (1, 1));
    let settled = bench.space.settle(None);
    assert_eq!(settled.released_mappings, 1);
    assert_eq!(
        reasons(&settled.quarantined),
        [(State::Quarantined, "its unmap was not tried")]
    );
}

/// A closed ledger knows of every map in flight (R2).
#[test]
fn c34_a_map_in_flight_at_the_break_counts_and_then_unmaps_itself() {
    for recovered in [false, true] {
        let mut bench = Bench::new();
        let held = bench.function.hold(Call::Map);
        let (space, owner) = (bench.space.clone(), bench.object(1));
        let late = thread::spawn(move || space.map(owner, PAGE));
        held.wait_entered();
        bench.space.close();

        let swept = bench.space.unmap_all(&|| false);
        let settled = bench.space.settle(None);
        assert_eq!((swept.in_flight, settled.released_mappings), (1, 0));
        assert_eq!(
            reasons(&settled.quarantined),
            [(State::Mapping, "its map call has not returned")]
        );
        if recovered {
            bench.begin();
        }
        held.release();

        assert!(matches!(
            late.join().unwrap(),
            Err(SpaceError::Refused {
                source: Refused::Closed,
                ..
            })
        ));
        assert_eq!(bench.function.mapped(), []);
        assert_eq!(bench.space.ledger().lines(), []);
        assert_eq!(bench.space.ledger().totals().held_mappings, 0);
    }
}

#[test]
fn c34_a_late_map_that_cannot_be_undone_is_quarantined() {
    let bench = Bench::new();
    let held = bench.function.hold(Call::Map);
    let (space, owner) = (bench.space.clone(), bench.object(1));
    let late = thread::spawn(move || space.map(owner, PAGE));
    held.wait_entered();
    bench.space.close();
    bench.function.answer_next_unmap(Unmapped::Busy);
    held.release();
    assert!(late.join().unwrap().is_err());
    assert_eq!(bench.space.ledger().lines()[0].state, State::Quarantined);

    let (_, settled) = break_down(&bench, false);
    assert_eq!(settled.released_mappings, 1);
}

#[test]
fn the_sweep_waits_for_a_map_in_flight() {
    let bench = Bench::new();
    let held = bench.function.hold(Call::Map);
    let (space, owner) = (bench.space.clone(), bench.object(1));
    let late = thread::spawn(move || space.map(owner, PAGE).is_err());
    held.wait_entered();
    bench.space.close();
    let space = bench.space.clone();
    let sweep = thread::spawn(move || space.unmap_all(&on));
    held.release();
    assert!(sweep.join().unwrap().is_complete());
    assert!(late.join().unwrap());
    assert_eq!(bench.space.ledger().lines(), []);
}

#[test]
fn a_release_under_way_is_waited_for_and_not_repeated() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let proof = bench.proof(1);
    let held = bench.function.hold(Call::Unmap);
    let release = thread::spawn(move || mapping.release(&proof));
    held.wait_entered();
    bench.space.close();

    assert_eq!(bench.space.unmap_all(&|| false).in_flight, 1);
    let settled = bench.space.settle(None);
    assert_eq!(
        reasons(&settled.quarantined),
        [(State::Unmapping, "its unmap call has not returned")]
    );
    let space = bench.space.clone();
    let sweep = thread::spawn(move || space.unmap_all(&on));
    held.release();

    release.join().unwrap().unwrap();
    assert!(sweep.join().unwrap().is_complete());
    assert_eq!(bench.unmaps(), 1);
    assert_eq!(bench.space.ledger().lines(), []);
}

/// An unmap of the ladder's that hangs, and was settled as such.
struct Abandoned {
    bench: Bench,
    memory: Weak<Memory>,
    held: failstop_pci::testing::Hold,
    hand: thread::JoinHandle<Swept>,
    mapping: Mapping,
}

fn abandoned(strength: Strength) -> Abandoned {
    let bench = Bench::with_room_for_one();
    bench.function.set_strength(strength);
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    bench.space.close();
    let held = bench.function.hold(Call::Unmap);
    let (space, go_on) = (bench.space.clone(), Arc::new(AtomicBool::new(true)));
    let asked = go_on.clone();
    let hand = thread::spawn(move || space.unmap_all(&|| asked.load(Ordering::Relaxed)));
    held.wait_entered();
    go_on.store(false, Ordering::Relaxed);

    // The same range is not unmapped by a second hand meanwhile.
    let asked = AtomicBool::new(false);
    let once = || !asked.swap(true, Ordering::Relaxed);
    assert_eq!(bench.space.unmap_all(&once).in_flight, 1);
    let settled = bench.space.settle(None);
    assert_eq!(settled.released_mappings, 0);
    assert_eq!(
        reasons(&settled.quarantined),
        [(State::Quarantined, "its unmap call has not returned")]
    );
    Abandoned {
        bench,
        memory,
        held,
        hand,
        mapping,
    }
}

#[test]
fn c35_an_unmap_that_comes_back_late_and_exact_releases_then() {
    let Abandoned {
        bench,
        memory,
        held,
        hand,
        mapping,
    } = abandoned(Strength::Enforcing);
    drop(mapping);
    assert!(memory.upgrade().is_some());
    held.release();
    let _swept = hand.join().unwrap();
    assert!(memory.upgrade().is_none());
    assert_eq!(bench.space.ledger().lines(), []);
    assert_eq!(bench.unmaps(), 1);
}

#[test]
fn c35_a_late_unmap_that_nothing_enforces_waits_for_a_stop() {
    let Abandoned {
        bench,
        memory,
        held,
        hand,
        mapping,
    } = abandoned(Strength::None);
    drop(mapping);
    held.release();
    let _swept = hand.join().unwrap();
    assert!(memory.upgrade().is_some());
    let stopped = bench.stop(ResetMethod::Flr);
    assert_eq!(bench.space.settle(Some(&stopped)).released_mappings, 1);
    assert!(memory.upgrade().is_none());
}

#[test]
fn c35_an_abandoned_hand_that_returns_after_a_recovery_touches_its_own_entry_only() {
    let Abandoned {
        mut bench,
        held,
        hand,
        mapping,
        ..
    } = abandoned(Strength::None);
    let stopped = bench.stop(ResetMethod::Flr);
    assert_eq!(bench.space.settle(Some(&stopped)).released_mappings, 0);
    bench.begin();
    // Its address is taken until the call returns.
    assert!(bench.space.map(bench.object(2), PAGE).is_err());

    held.release();
    let _swept = hand.join().unwrap();

    assert!(mapping.is_shell());
    let next = bench.map(2, PAGE);
    drop(mapping);
    assert_eq!(bench.space.ledger().totals().live_mappings, 1);
    next.release(&bench.proof(2)).unwrap();
}

#[test]
fn c35_an_abandoned_hand_does_not_go_on_in_the_next_break() {
    let mut bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    bench.space.close();
    let held = bench.function.hold(Call::Unmap);
    let space = bench.space.clone();
    let hand = thread::spawn(move || space.unmap_all(&on));
    held.wait_entered();
    bench.begin();
    let next = bench.map(2, PAGE);
    bench.space.close();

    held.release();
    let _swept = hand.join().unwrap();

    assert_eq!(bench.function.mapped(), [(next.iova().0, 4096)]);
    drop(mapping);
}

#[test]
fn what_was_not_settled_is_quarantined_when_a_new_life_begins() {
    let mut bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    bench.space.close();
    bench.begin();
    assert_eq!(
        reasons(&bench.space.ledger().lines()),
        [(State::Quarantined, "its unmap was not tried")]
    );
    assert!(!mapping.is_shell());
}

#[test]
fn an_owner_that_lets_go_while_the_ladder_unmaps_needs_no_other_ground() {
    let Abandoned {
        bench,
        memory,
        held,
        hand,
        mapping,
    } = abandoned(Strength::None);
    let acknowledged = bench.proof(1);
    mapping.release(&acknowledged).unwrap();
    assert!(memory.upgrade().is_some());
    held.release();
    let _swept = hand.join().unwrap();
    assert!(memory.upgrade().is_none());
    assert_eq!(bench.space.ledger().lines(), []);
}

/// What a device goes on with is stopped before its mappings go (C7).
#[test]
fn reset_precedes_unmap_in_what_the_backend_saw() {
    let bench = Bench::new();
    let mapping = bench.map(1, PAGE);
    let _log = bench.function.take_log();
    let _settled = break_down(&bench, true);
    let log = bench.function.log();
    let at = |wanted: &dyn Fn(&Happened) -> bool| log.iter().position(wanted).unwrap();
    let reset = at(&|happened| matches!(happened, Happened::Reset(_)));
    let unmap = at(&|happened| matches!(happened, Happened::Unmap { .. }));
    assert!(reset < unmap, "{log:?}");
    assert!(mapping.is_shell());
}

#[test]
fn a_function_that_was_detached_reaches_nothing_even_where_unmaps_fail() {
    let mut bench = Bench::iommufd();
    bench.function.set_strength(Strength::Enforcing);
    let mapping = bench.map(1, PAGE);
    let memory = memory_of(&mapping);
    drop(mapping);
    bench
        .function
        .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    bench.space.close();
    let _swept = bench.space.unmap_all(&on);
    assert!(bench.space.detach().unwrap());
    let stopped = bench.stop(ResetMethod::Flr);
    assert_eq!(bench.space.settle(Some(&stopped)).released_mappings, 1);
    assert!(memory.upgrade().is_none());
    // What is still mapped there never gets its address back.
    bench.begin();
    let refused = bench.space.map(bench.object(1), PAGE);
    assert!(
        matches!(refused, Err(SpaceError::Iova { .. })),
        "{refused:?}"
    );
}

#[test]
fn only_a_cdev_can_be_detached() {
    assert!(Bench::new().space.detach().is_err());
}

#[test]
fn a_shared_space_is_not_left_by_detaching_one_function() {
    let bench = Bench::iommufd();
    bench.function.set_strength(Strength::Enforcing);
    bench.function.set_shares_space(true);
    drop(bench.map(1, PAGE));
    bench.space.close();
    assert!(!bench.space.detach().unwrap());
    assert_eq!(bench.space.settle(None).released_mappings, 0);
}
