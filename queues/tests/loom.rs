//! Every interleaving of a break with posts, polls, destroys, recovery and the switch of bus
//! mastering, on the real `Lifecycle` and `Gate`.
//!
//! loom sees neither DMA memory nor page tables nor time. What stands for them here is a cell behind a
//! lock, since each of their accesses is one moment of the bus.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gate::Gate;
use lifecycle::{Cause, Lifecycle, Verdict};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

// The sources of the crate itself, compiled against loom.
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the models do not need all of it"
)]
#[path = "../src/gate.rs"]
mod gate;
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the models do not need all of it"
)]
#[path = "../src/lifecycle.rs"]
mod lifecycle;
mod sync {
    pub(crate) use loom::sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    };
}

/// What the device may still do, and what it was told: the bus does one access after the other.
#[derive(Default)]
struct Function {
    bus_master: bool,
    detached: bool,
    rung: u64,
}

type Bus = Arc<Mutex<Function>>;

fn function() -> Bus {
    Arc::new(Mutex::new(Function::default()))
}

fn set_master(bus: &Bus, on: bool) {
    bus.lock().unwrap().bus_master = on;
}

/// A store through the window of a life: after the swap it goes to private memory.
fn ring(bus: &Bus, value: u64) {
    let mut function = bus.lock().unwrap();
    if !function.detached {
        function.rung = value;
    }
}

fn proven() -> Verdict {
    Verdict {
        restartable: true,
        ..Verdict::default()
    }
}

/// The ladder, as far as it meets other threads.
fn ladder(lifecycle: &Lifecycle, gate: &Gate, bus: &Bus) -> Option<Cause> {
    let cause = lifecycle.wait_broken()?;
    set_master(bus, false);
    bus.lock().unwrap().detached = true;
    gate.shut(|| set_master(bus, false));
    lifecycle.finish(proven());
    Some(cause)
}

fn master(lifecycle: &Lifecycle, gate: &Gate, bus: &Bus) -> bool {
    let on = || {
        set_master(bus, true);
        Ok::<_, ()>(())
    };
    gate.open(lifecycle, on, || set_master(bus, false)).unwrap()
}

#[test]
fn r11_of_two_breaks_one_is_the_first_and_its_cause_is_the_ladders() {
    loom::model(|| {
        let lifecycle = Arc::new(Lifecycle::default());
        let breaker = {
            let lifecycle = lifecycle.clone();
            thread::spawn(move || lifecycle.mark_broken(Cause::BusError))
        };
        let ladder = {
            let lifecycle = lifecycle.clone();
            thread::spawn(move || {
                let cause = lifecycle.wait_broken();
                lifecycle.finish(Verdict::default());
                cause
            })
        };
        let ours = lifecycle.mark_broken(Cause::User);
        let theirs = breaker.join().unwrap();
        assert!(ours != theirs);
        let first = if ours { Cause::User } else { Cause::BusError };
        assert_eq!(ladder.join().unwrap(), Some(first.clone()));
        assert_eq!(lifecycle.cause(), Some(first));
        assert!(lifecycle.is_broken() && lifecycle.verdict().is_some());
    });
}

#[test]
fn r10_bus_mastering_that_races_with_a_break_is_off_at_the_ladders_end() {
    loom::model(|| {
        let (lifecycle, gate) = (Arc::new(Lifecycle::default()), Arc::new(Gate::default()));
        let bus = function();
        let creating = {
            let (lifecycle, gate, bus) = (lifecycle.clone(), gate.clone(), bus.clone());
            thread::spawn(move || master(&lifecycle, &gate, &bus))
        };
        let climbing = {
            let (lifecycle, gate, bus) = (lifecycle.clone(), gate.clone(), bus.clone());
            thread::spawn(move || {
                ladder(&lifecycle, &gate, &bus);
                // From the shutting on it is off, not only at the end of everything.
                assert!(!bus.lock().unwrap().bus_master);
            })
        };
        lifecycle.mark_broken(Cause::User);
        creating.join().unwrap();
        climbing.join().unwrap();
        assert!(!bus.lock().unwrap().bus_master);
    });
}

#[test]
fn r10_bus_mastering_that_races_with_a_close_is_off_at_its_end() {
    loom::model(|| {
        let (lifecycle, gate) = (Arc::new(Lifecycle::default()), Arc::new(Gate::default()));
        let bus = function();
        let creating = {
            let (lifecycle, gate, bus) = (lifecycle.clone(), gate.clone(), bus.clone());
            thread::spawn(move || master(&lifecycle, &gate, &bus))
        };
        assert!(lifecycle.retire());
        gate.shut(|| set_master(&bus, false));
        creating.join().unwrap();
        assert!(!bus.lock().unwrap().bus_master);
    });
}

#[test]
fn c33_a_post_that_races_with_a_break_and_a_recovery_never_rings_the_new_life() {
    loom::model(|| {
        let (lifecycle, gate) = (Arc::new(Lifecycle::default()), Arc::new(Gate::default()));
        let old = function();
        let posting = {
            let (lifecycle, old) = (lifecycle.clone(), old.clone());
            thread::spawn(move || {
                if !lifecycle.is_broken() {
                    // Whatever happens between the look and this.
                    ring(&old, 7);
                }
            })
        };
        let recovering = {
            let (lifecycle, gate, old) = (lifecycle.clone(), gate.clone(), old.clone());
            thread::spawn(move || {
                ladder(&lifecycle, &gate, &old).unwrap();
                let rung = old.lock().unwrap().rung;
                let (next, new) = (Lifecycle::default(), function());
                assert!(master(&next, &gate, &new));
                (rung, new)
            })
        };
        lifecycle.mark_broken(Cause::User);
        posting.join().unwrap();
        let (rung, new) = recovering.join().unwrap();
        assert_eq!(old.lock().unwrap().rung, rung, "rung after the verdict");
        assert_eq!(new.lock().unwrap().rung, 0);
        assert!(new.lock().unwrap().bus_master);
    });
}

#[test]
fn c31_a_poll_that_races_with_the_ladder_completes_each_request_once() {
    loom::model(|| {
        let (lifecycle, gate) = (Arc::new(Lifecycle::default()), Arc::new(Gate::default()));
        let bus = function();
        set_master(&bus, true);
        let done = Arc::new(AtomicU64::new(0));
        // The device completes the one request, if it still can.
        let device = {
            let (bus, done) = (bus.clone(), done.clone());
            thread::spawn(move || {
                let function = bus.lock().unwrap();
                if function.bus_master {
                    done.store(1, Ordering::Release);
                }
                function.bus_master
            })
        };
        let climbing = {
            let (lifecycle, gate, bus) = (lifecycle.clone(), gate.clone(), bus.clone());
            thread::spawn(move || ladder(&lifecycle, &gate, &bus))
        };
        lifecycle.mark_broken(Cause::User);
        let (mut success, mut flushed) = (0, 0);
        while success + flushed == 0 {
            // As `Tx::reap`: the verdict is asked for before the look.
            let last = lifecycle.is_broken() && lifecycle.verdict().is_some();
            if done.load(Ordering::Relaxed) == 1 {
                success += 1;
            } else if last {
                flushed += 1;
            } else {
                // The next look is worth something only after the verdict.
                assert!(lifecycle.wait_verdict().is_some());
            }
        }
        let completed = device.join().unwrap();
        climbing.join().unwrap();
        assert_eq!(
            (success, flushed),
            (u32::from(completed), u32::from(!completed))
        );
    });
}

#[test]
fn c30_destroys_that_race_with_a_break_end_and_see_the_verdict() {
    loom::model(|| {
        let lifecycle = Arc::new(Lifecycle::default());
        let climbing = {
            let lifecycle = lifecycle.clone();
            thread::spawn(move || {
                assert!(lifecycle.wait_broken().is_some());
                lifecycle.finish(proven());
            })
        };
        let destroying = {
            let lifecycle = lifecycle.clone();
            thread::spawn(move || {
                // Its queue did not stop: it breaks the device, unless another did, and waits.
                lifecycle.mark_broken(Cause::TimedOut {
                    what: String::new(),
                });
                lifecycle.wait_verdict().unwrap().restartable
            })
        };
        lifecycle.mark_broken(Cause::User);
        assert!(lifecycle.wait_verdict().unwrap().restartable);
        assert!(destroying.join().unwrap());
        climbing.join().unwrap();
    });
}

#[test]
fn a_close_that_races_with_a_break_leaves_one_end_and_nobody_waiting() {
    loom::model(|| {
        let (lifecycle, gate) = (Arc::new(Lifecycle::default()), Arc::new(Gate::default()));
        let bus = function();
        set_master(&bus, true);
        let climbing = {
            let (lifecycle, gate, bus) = (lifecycle.clone(), gate.clone(), bus.clone());
            thread::spawn(move || ladder(&lifecycle, &gate, &bus))
        };
        let breaking = {
            let lifecycle = lifecycle.clone();
            thread::spawn(move || lifecycle.mark_broken(Cause::BusError))
        };
        let retired = lifecycle.retire();
        if retired {
            gate.shut(|| set_master(&bus, false));
        }
        let verdict = lifecycle.wait_verdict();
        assert_eq!(verdict.is_none(), retired);
        assert_eq!(breaking.join().unwrap(), !retired);
        assert_eq!(climbing.join().unwrap().is_none(), retired);
        assert!(lifecycle.is_broken() && !bus.lock().unwrap().bus_master);
    });
}

#[test]
fn r10_a_break_that_races_with_a_recovery_ends_one_life_only() {
    loom::model(|| {
        let old = Arc::new(Lifecycle::default());
        old.mark_broken(Cause::User);
        old.finish(proven());
        let present = Arc::new(Mutex::new(old.clone()));
        let breaking = {
            let present = present.clone();
            thread::spawn(move || {
                let life = present.lock().unwrap().clone();
                life.mark_broken(Cause::BusError)
            })
        };
        assert!(old.wait_verdict().unwrap().restartable);
        let new = Arc::new(Lifecycle::default());
        let climbing = {
            let new = new.clone();
            thread::spawn(move || {
                let cause = new.wait_broken();
                new.finish(Verdict::default());
                cause
            })
        };
        *present.lock().unwrap() = new.clone();
        let broke = breaking.join().unwrap();
        assert_eq!(new.is_broken(), broke);
        assert_eq!(old.cause(), Some(Cause::User));
        // Whoever holds an object of the old life breaks nothing.
        assert!(!old.mark_broken(Cause::User));
        assert_eq!(new.retire(), !broke);
        assert_eq!(climbing.join().unwrap().is_some(), broke);
    });
}
