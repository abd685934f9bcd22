//! Looks at a device by somebody who does not hold it: while it lives, when it is closed, and when it
//! is gone.
#![forbid(unsafe_code)]

mod scripted;

use std::sync::Arc;

use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use scripted::{Bench, RX, small};

/// Who ends a process must not say that nothing is kept because there is no device any more.
#[test]
fn r3_a_look_at_a_device_that_is_closed_sees_what_it_left_in_quarantine() {
    let bench = Bench::new();
    let device = bench.open();
    let glance = device.glance();
    let port = Port::open(&device, &small()).unwrap();
    bench.never_revoked();
    assert!(device.break_now(Cause::User));
    drop(port);
    let closed = device.close();
    assert_ne!(closed.totals.quarantined_bytes, 0);

    let seen = glance.look().unwrap();

    assert_eq!(seen.totals, closed.totals);
    assert_eq!(seen.left, closed.left);
    assert_eq!(seen.completions, closed.completions);
    assert_eq!(seen.broken, Some(Cause::User));
}

#[test]
fn a_look_at_a_device_in_its_next_life_sees_that_it_is_not_broken() {
    let bench = Bench::new();
    let device = bench.open();
    let glance = device.glance();
    let port = Port::open(&device, &small()).unwrap();
    assert!(device.break_now(Cause::User));
    assert!(device.revocation().is_some());
    assert_eq!(glance.look().unwrap().broken, Some(Cause::User));
    drop(port);
    device.recover().unwrap();

    let seen = glance.look().unwrap();

    assert_eq!(seen.broken, None);
    assert_eq!(seen.completions.flushed, u64::from(RX - 1));
    assert_eq!(seen.totals.live_bytes, 0);
}

/// The last holder of a device ends it, which takes as long as the device makes it.
#[test]
fn who_may_look_holds_nothing_of_a_device_that_was_dropped() {
    let bench = Bench::new();
    let device = bench.open();
    let glance = device.glance();
    drop(device);

    assert_eq!(Arc::strong_count(&bench.function), 1);
    assert!(bench.open().close().left.is_empty());
    assert!(glance.look().unwrap().left.is_empty());
}
