//! The supervisor: recovery by policy, and devices that hang.
#![forbid(unsafe_code)]

use std::time::Duration;

use failstop::device::Options;
use failstop::events::DeviceEvent;
use failstop::igb::registers as reg;
use failstop::igb::statistics as stat;
use failstop::queues::lifecycle::Cause;
use failstop::supervisor::{Duty, Policy, Supervisor};
use failstop_pci::clock::Clock;
use failstop_pci::testing::ResetScript;
use failstop_pci::transport::ResetMethod;
use nix::errno::Errno;

use fake_82576::{LINK_DOWN, LINK_UP, World};

mod fake_82576;

fn world() -> World {
    World::new(Options::default())
}

fn policy() -> Policy {
    Policy::default()
}

/// Looks for `time` of the device's clock, as often as `duty` wants; false when it ended.
fn pass(world: &World, duty: &mut Duty, time: Duration) -> bool {
    let end = world.clock.now() + time;
    while world.clock.now() < end {
        let Some(pause) = duty.look() else {
            return false;
        };
        world.clock.sleep(pause.max(Duration::from_millis(1)));
    }
    true
}

const LONG: Duration = Duration::from_secs(60);

fn send_one(port: &mut failstop::port::Port) {
    let mut frames = port.take_frames(1).unwrap();
    frames[0].fill(&[0x55; 60]).unwrap();
    assert_eq!(port.tx_burst(&mut frames), 1);
}

#[test]
fn c19_a_send_queue_that_hangs_breaks_the_device_which_is_recovered() {
    let world = world();
    let mut port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    send_one(&mut port);
    assert!(pass(&world, &mut duty, Duration::from_secs(4)));
    assert_eq!(world.device.broken(), None, "before the period was over");
    assert!(pass(&world, &mut duty, Duration::from_secs(3)));
    let cause = world.broken(1);
    assert!(
        matches!(&cause, Cause::Stalled { what } if what.contains("send queue 0")),
        "{cause}"
    );
    assert!(matches!(world.next(), DeviceEvent::Recovered { .. }));
    assert_eq!(world.device.broken(), None);
    assert_eq!(world.device.generation().number(), 2);
}

#[test]
fn c19_frames_accepted_and_never_completed_break_the_device() {
    let world = world();
    let _port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    // Counted anew by each reading.
    world.function.set_register(stat::GPRC.offset().into(), 3);
    assert!(pass(&world, &mut duty, Duration::from_secs(7)));
    let cause = world.broken(1);
    assert!(
        matches!(&cause, Cause::Stalled { what } if what.contains("completed none")),
        "{cause}"
    );
}

#[test]
fn c45_silence_breaks_nothing() {
    let world = world();
    let _port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    assert!(pass(&world, &mut duty, LONG));
    assert_eq!(world.device.events().try_next(), None);
}

#[test]
fn c45_work_that_waits_for_a_link_breaks_nothing() {
    let world = world();
    let mut port = world.port();
    let status = u64::from(reg::STATUS.offset());
    world.function.answer_register(status, LINK_DOWN);
    let mut duty = Duty::new(&world.device, policy());
    send_one(&mut port);
    assert!(pass(&world, &mut duty, LONG));
    assert_eq!(world.device.events().try_next(), None);
}

#[test]
fn c45_work_that_waits_for_the_peer_breaks_nothing() {
    let world = world();
    let mut port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    send_one(&mut port);
    world
        .function
        .set_register(stat::XOFFRXC.offset().into(), 1);
    assert!(pass(&world, &mut duty, LONG));
    assert_eq!(world.device.events().try_next(), None);
}

#[test]
fn c45_a_caller_who_does_not_poll_breaks_nothing() {
    let world = world();
    let _port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    let tail = world.function.register(reg::RDT.offset().into());
    world.function.set_register(reg::RDH.offset().into(), tail);
    world.function.set_register(stat::GPRC.offset().into(), 3);
    assert!(pass(&world, &mut duty, LONG));
    assert_eq!(world.device.events().try_next(), None);
}

#[test]
fn a_supervisor_without_a_watchdog_leaves_a_device_that_hangs_alone() {
    let world = world();
    let mut port = world.port();
    let watchdog = None;
    let mut duty = Duty::new(
        &world.device,
        Policy {
            watchdog,
            ..policy()
        },
    );
    send_one(&mut port);
    assert!(pass(&world, &mut duty, LONG));
    assert_eq!(world.device.broken(), None);
}

#[test]
fn a_function_that_is_gone_is_broken() {
    let world = world();
    let mut duty = Duty::new(&world.device, policy());
    let status = u64::from(reg::STATUS.offset());
    world.function.answer_register(status, u32::MAX);
    assert!(duty.look().is_some());
    assert!(matches!(world.broken(1), Cause::Gone { .. }));
}

#[test]
fn the_link_s_changes_are_told() {
    let world = world();
    let mut duty = Duty::new(&world.device, policy());
    let second = Duration::from_secs(1);
    pass(&world, &mut duty, second);
    let status = u64::from(reg::STATUS.offset());
    for (value, up) in [(LINK_DOWN, false), (LINK_UP, true)] {
        world.function.answer_register(status, value);
        pass(&world, &mut duty, second);
        let event = world.next();
        assert!(
            matches!(event, DeviceEvent::Link(link) if link.up == up),
            "{event:?}"
        );
    }
    assert_eq!(world.device.events().try_next(), None);
}

#[test]
fn attempts_that_fail_are_made_again_with_growing_pauses_and_then_no_more() {
    let world = world();
    let _port = world.port();
    let fails = ResetScript::Fails(Errno::EIO);
    world.function.script_reset(ResetMethod::Server, fails);
    let policy = Policy {
        attempts: 4,
        longest_backoff: Duration::from_millis(300),
        ..policy()
    };
    let mut duty = Duty::new(&world.device, policy);
    // No reset, and the software's own is no ground for another start while something is mapped.
    world
        .function
        .set_strength(failstop_pci::transport::Strength::None);
    world.device.break_now(Cause::User);
    for pause in [100, 200, 300, 300] {
        let pause = Duration::from_millis(pause);
        assert_eq!(duty.look(), Some(pause));
        // Not earlier.
        assert_eq!(duty.look(), Some(pause));
        world.clock.sleep(pause);
    }
    assert!(duty.look().is_some());
    let mut events = Vec::new();
    while let Some(event) = world.device.events().try_next() {
        events.push(event);
    }
    let failed = |event: &&DeviceEvent| matches!(event, DeviceEvent::RecoveryFailed { .. });
    assert_eq!(events.iter().filter(failed).count(), 4, "{events:?}");
    assert!(
        matches!(events.last(), Some(DeviceEvent::GivenUp { .. })),
        "{events:?}"
    );
    assert!(pass(&world, &mut duty, policy.within * 2));
    assert_eq!(world.device.events().try_next(), None, "it goes on");
}

#[test]
fn a_device_that_breaks_too_often_is_left_as_it_is() {
    let world = world();
    let policy = Policy {
        attempts: 3,
        ..policy()
    };
    let mut duty = Duty::new(&world.device, policy);
    for generation in 2..=4 {
        world.device.break_now(Cause::User);
        assert!(duty.look().is_some());
        assert_eq!(world.device.generation().number(), generation);
    }
    world.device.break_now(Cause::User);
    assert!(duty.look().is_some());
    assert!(world.device.broken().is_some());
    // Its owner may; and is supervised again, once the attempts are old enough.
    world.device.recover().unwrap();
    world.clock.sleep(policy.within);
    world.device.break_now(Cause::User);
    assert!(duty.look().is_some());
    assert_eq!(world.device.generation().number(), 6);
}

#[test]
fn a_device_that_was_closed_is_not_recovered() {
    let world = world();
    let port = world.port();
    let mut duty = Duty::new(&world.device, policy());
    assert_eq!(world.device.close().broken, Some(Cause::Closed));
    assert_eq!(duty.look(), None);
    drop(port);
}

#[test]
fn a_supervisor_recovers_by_itself_and_ends_with_its_device() {
    let world = world();
    let supervisor = Supervisor::new(&world.device, policy()).unwrap();
    for generation in 1..=3 {
        world.device.break_now(Cause::User);
        assert_eq!(world.broken(generation), Cause::User);
        assert!(matches!(world.next(), DeviceEvent::Recovered { .. }));
    }
    drop(world.device);
    drop(supervisor);
}
