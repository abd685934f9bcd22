//! What the bus and the kernel have to say of a device: errors (C16) and requests (C15).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop::device::{Options, RecoverError};
use failstop::events::DeviceEvent;
use failstop::igb::registers as reg;
use failstop::queues::lifecycle::Cause;
use failstop::watch::Removal;
use failstop_pci::clock::Clock;
use failstop_pci::testing::{Call, FakeFunction};
use failstop_pci::transport::{IrqIndex, RegionIndex};

use fake_82576::{SOON, World};

mod fake_82576;

const HOUR: Duration = Duration::from_secs(3600);

fn world(removal: Removal) -> World {
    World::new(Options {
        removal,
        ..Options::default()
    })
}

/// Waits until nothing of a device is left: whoever let go of it for us ends a moment after it said so.
fn only_ours(function: &Arc<FakeFunction>) {
    let end = Instant::now() + SOON;
    while Arc::strong_count(function) > 1 {
        assert!(Instant::now() < end, "something keeps the device");
        std::thread::yield_now();
    }
}

#[test]
fn c16_an_error_on_the_bus_breaks_the_device_in_each_of_its_lives() {
    let world = world(Removal::default());
    let port = world.port();
    for generation in 1..=3 {
        world.fire(IrqIndex::Error);
        assert_eq!(world.broken(generation), Cause::BusError);
        assert_eq!(world.device.recover().unwrap().number(), generation + 1);
        assert!(matches!(world.next(), DeviceEvent::Recovered { .. }));
    }
    assert_eq!(world.device.broken(), None);
    drop(port);
    assert_eq!(world.device.close().left, []);
}

#[test]
fn c15_a_request_closes_a_device_in_use_and_lets_go_of_it() {
    let world = world(Removal::default());
    let mut port = world.port();
    world.fire(IrqIndex::Request);
    assert_eq!(world.next(), DeviceEvent::RemovalRequested);
    assert_eq!(world.broken(1), Cause::Removal);
    assert_eq!(world.next(), DeviceEvent::Removed);
    assert!(world.function.is_hung_up());
    assert!(!world.function.is_master());
    assert_eq!(world.function.mapped(), []);

    let refused = world.device.recover();
    assert!(
        matches!(refused, Err(RecoverError::GivenUp { .. })),
        "{refused:?}"
    );
    let mut frames = port.take_frames(1).unwrap();
    assert_eq!(port.tx_burst(&mut frames), 0);
    drop((frames, port));
    let report = world.device.close();
    assert_eq!(report.left, []);
    assert_eq!(report.totals.held_bytes, 0);
    assert_eq!(report.completions.outstanding(), 0);
}

#[test]
fn c15_a_request_of_an_idle_device_needs_no_ladder() {
    let world = world(Removal::default());
    world.fire(IrqIndex::Request);
    assert_eq!(world.next(), DeviceEvent::RemovalRequested);
    assert_eq!(world.next(), DeviceEvent::Removed);
    assert!(world.function.is_hung_up());
    assert!(world.device.revocation().is_none());
    assert!(world.device.alloc_pd().is_err());
}

#[test]
fn c15_a_request_of_a_broken_device_lets_go_of_it() {
    let world = world(Removal::default());
    let port = world.port();
    world.device.break_now(Cause::User);
    world.fire(IrqIndex::Request);
    world.until_removed();
    assert!(world.function.is_hung_up());
    assert!(world.device.recover().is_err());
    drop(port);
    assert_eq!(world.device.close().left, []);
}

#[test]
fn c15_a_request_finds_objects_whose_device_was_dropped() {
    let world = world(Removal::default());
    let parts = world.port().into_parts();
    let events = world.device.events().clone();
    let function = world.function.clone();
    drop(world.device);
    assert!(function.fire(IrqIndex::Request, 0), "nobody listens");
    while events.next(SOON).unwrap().expect("not removed") != DeviceEvent::Removed {}
    assert!(function.is_hung_up());
    drop(parts);
    drop(world.function);
    only_ours(&function);
}

#[test]
fn c15_a_close_that_hangs_does_not_hold_a_removal_up() {
    let world = world(Removal::default());
    let port = world.port();
    // The stop of a queue does not return, and meanwhile the orderly close's time is over.
    let clock = world.clock.clone();
    let stop = Call::Write(RegionIndex::Bar(0));
    let hold = world.function.hold_and(stop, move || clock.sleep(HOUR));
    world.fire(IrqIndex::Request);
    hold.wait_entered();
    assert_eq!(world.next(), DeviceEvent::RemovalRequested);
    assert_eq!(world.broken(1), Cause::Removal);
    world.until_removed();
    assert!(world.function.is_hung_up());
    hold.release();
    drop(port);
    assert_eq!(world.device.close().left, []);
}

#[test]
fn c15_a_kernel_that_does_not_let_go_is_not_waited_for() {
    let world = world(Removal::Tell);
    let clock = world.clock.clone();
    let hold = world
        .function
        .hold_and(Call::HangUp, move || clock.sleep(HOUR));
    let events = world.device.events().clone();
    assert_eq!(world.device.give_back().left, []);
    assert_eq!(events.try_next(), None, "removed, and is not");
    hold.release();
    assert_eq!(events.next(SOON).unwrap(), Some(DeviceEvent::Removed));
}

#[test]
fn c15_an_owner_who_wants_to_is_only_told() {
    let world = world(Removal::Tell);
    let port = world.port();
    for _ in 0..2 {
        world.fire(IrqIndex::Request);
        assert_eq!(world.next(), DeviceEvent::RemovalRequested);
    }
    assert_eq!(world.device.broken(), None);
    assert!(!world.function.is_hung_up());
    let report = world.device.give_back();
    assert_eq!(report.broken, Some(Cause::Removal));
    assert!(world.function.is_hung_up());
    drop(port);
}

#[test]
fn a_dropped_device_takes_its_watch_with_it() {
    let world = world(Removal::default());
    drop(world.device);
    only_ours(&world.function);
    assert!(!world.function.fire(IrqIndex::Request, 0));
}

/// Whoever opens the function next, or unbinds it, finds it free (C15, C21). Many at once: a thread that is
/// left behind has to be one that the scheduler left out.
#[test]
fn nothing_of_a_device_is_left_when_its_close_returns() {
    let open_and_close = || {
        for round in 0..50 {
            let world = world(Removal::default());
            if round % 2 == 0 {
                world.device.break_now(Cause::User);
            }
            assert_eq!(world.device.close().left, []);
            assert_eq!(Arc::strong_count(&world.function), 1, "round {round}");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(open_and_close);
        }
    });
}

/// A world whose watch looks all the time.
fn looked_at() -> World {
    World::new(Options {
        look: Some(Duration::from_millis(1)),
        ..Options::default()
    })
}

#[test]
fn c18_a_function_that_was_reset_without_a_notice_is_broken_and_recovered() {
    let world = looked_at();
    let mut port = world.port();
    for generation in 1..=3 {
        world.function.reset_registers();
        let cause = world.broken(generation);
        let text = cause.to_string();
        assert!(matches!(cause, Cause::Reset { .. }), "{text}");
        assert!(
            text.contains("reads 0x0 after 0x5afe was written"),
            "{text}"
        );
        assert_eq!(world.device.recover().unwrap().number(), generation + 1);
        assert!(matches!(world.next(), DeviceEvent::Recovered { .. }));
        let mut frames = port.take_frames(1).unwrap();
        assert_eq!(port.rx_burst(&mut frames), 0);
    }
}

/// Its own resets are none: neither at a recovery nor at a close.
#[test]
fn c18_a_function_that_nobody_else_reset_goes_on() {
    let world = looked_at();
    let _port = world.port();
    for generation in 1..=20 {
        std::thread::sleep(Duration::from_millis(2));
        assert!(world.device.break_now(Cause::User));
        assert_eq!(world.broken(generation), Cause::User);
        assert_eq!(world.device.recover().unwrap().number(), generation + 1);
        assert!(matches!(world.next(), DeviceEvent::Recovered { .. }));
    }
    assert_eq!(world.device.events().try_next(), None);
}

/// Gone is another cause, which others look for.
#[test]
fn c18_a_register_that_does_not_answer_is_no_reset() {
    let world = looked_at();
    let canary = u64::from(reg::FCTTV.offset());
    world.function.answer_register(canary, u32::MAX);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(world.device.broken(), None);
}

/// Errors that never rest let no wait come to its end: bus mastering goes off all the same.
#[test]
fn c47_a_storm_of_errors_hides_no_function_that_comes_back_as_bus_master() {
    let world = world(Removal::default());
    let _port = world.port();
    world.function.ignore_config_writes();
    world.function.set_reset_methods(&[]);
    assert!(world.device.break_now(Cause::User));
    assert!(!world.device.revocation().unwrap().is_stopped());
    assert!(world.function.is_master());
    world.function.take_config_writes();
    let end = Instant::now() + SOON;
    while world.function.is_master() {
        assert!(Instant::now() < end, "bus mastering stays on");
        world.fire(IrqIndex::Error);
    }
}
