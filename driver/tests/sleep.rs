//! Sleeping on a receive queue, whatever the device does with its interrupts.
#![forbid(unsafe_code)]

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use failstop::device::Options;
use failstop::igb::registers as reg;
use failstop::queues::lifecycle::Cause;

use fake_82576::{SOON, World};

mod fake_82576;

/// Arming makes the device interrupt at once, each time, with nothing received.
#[test]
fn an_interrupt_storm_prolongs_no_sleep() {
    let world = World::new(Options::default());
    let port = world.port();
    world.function.storm_at(reg::EIMS.offset().into());
    let (woken, wait) = mpsc::channel();
    thread::spawn(move || {
        let parts = port.into_parts();
        let _ = woken.send(parts.rq.wait(Some(Duration::from_millis(1))).unwrap());
    });
    assert_eq!(wait.recv_timeout(SOON), Ok(false));
}

/// No message comes from a server that died, and nobody says anything to it meanwhile.
#[test]
fn c40_the_death_of_a_server_wakes_who_sleeps_for_ever() {
    let (function, server) = fake_82576::unserved().with_lifeline().unwrap();
    let world = World::over(function.into(), Options::default());
    let parts = world.port().into_parts();
    let (woken, wait) = mpsc::channel();
    thread::spawn(move || {
        let found = parts.rq.wait(None).unwrap();
        let _ = woken.send(found);
    });
    drop(server);
    assert_eq!(wait.recv_timeout(SOON), Ok(false));
    assert!(matches!(world.broken(1), Cause::Gone { .. }));
}
