//! The switch of bus mastering, without other threads; with them: `loom.rs`.
#![forbid(unsafe_code)]

use std::cell::Cell;

use failstop_queues::gate::Gate;
use failstop_queues::lifecycle::{Cause, Lifecycle};

#[test]
fn r10_a_broken_life_is_not_switched_on() {
    let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
    lifecycle.mark_broken(Cause::User);
    let never = || -> Result<(), ()> { panic!("switched on") };
    assert_eq!(gate.open(&lifecycle, never, || {}), Ok(false));
}

#[test]
fn r10_a_break_while_it_is_switched_on_is_undone() {
    let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
    let is_on = Cell::new(false);
    let on = || -> Result<(), ()> {
        lifecycle.mark_broken(Cause::User);
        is_on.set(true);
        Ok(())
    };
    assert_eq!(gate.open(&lifecycle, on, || is_on.set(false)), Ok(false));
    assert!(!is_on.get());
}

#[test]
fn what_keeps_it_off_is_said() {
    let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
    assert_eq!(gate.open(&lifecycle, || Err(5), || {}), Err(5));
    assert_eq!(gate.open(&lifecycle, || Ok::<_, ()>(()), || {}), Ok(true));
    assert_eq!(gate.shut(|| 7), 7);
}
