//! What the recorder keeps, and whom it holds up: nobody.

use std::sync::Arc;
use std::thread;

use failstop_pci::testing::{Counting, allocated};

use failstop_queues::lifecycle::Cause;

use super::*;
use crate::device::Options;
use fake_82576::World;

#[path = "../../tests/fake_82576/mod.rs"]
mod fake_82576;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn texts(flight: &Flight) -> Vec<String> {
    let events = flight.recording().events.into_iter();
    events.map(|event| event.text).collect()
}

#[test]
fn the_last_64_events_are_kept_in_order() {
    let flight = Flight::new();
    for number in 0..150 {
        flight.note(Control::State, format_args!("{number}"));
    }
    let expected: Vec<_> = (86..150).map(|number: u32| number.to_string()).collect();
    assert_eq!(texts(&flight), expected);
    let times: Vec<_> = flight
        .recording()
        .events
        .iter()
        .map(|event| event.at)
        .collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn an_event_says_whose_thread_it_was() {
    let flight = Arc::new(Flight::new());
    flight.note(Control::Command, format_args!("mine"));
    let theirs = flight.clone();
    let watch = move || {
        ThreadKind::Watch.is_this();
        theirs.note(Control::Notice, format_args!("theirs"));
    };
    thread::spawn(watch).join().unwrap();
    let events = flight.recording().events;
    let kinds: Vec<_> = events.iter().map(|event| event.thread).collect();
    assert_eq!(kinds, [ThreadKind::Caller, ThreadKind::Watch]);
}

#[test]
fn a_text_that_is_too_long_is_cut_between_two_characters() {
    let flight = Flight::new();
    let long = "\u{fc}".repeat(TEXT);
    flight.note(Control::State, format_args!("x{long}{}", "more"));
    let [text] = &texts(&flight)[..] else {
        panic!()
    };
    let (kept, cut) = text.split_at(TEXT - 1);
    assert!(kept.ends_with('\u{fc}'), "{text}");
    assert_eq!(cut, "\u{2026}");
}

#[test]
fn recording_allocates_nothing() {
    let flight = Flight::new();
    let before = allocated().calls;
    for number in 0..2 * EVENTS {
        flight.note(Control::Config, format_args!("{number} of {EVENTS}"));
    }
    assert_eq!(allocated().calls, before);
}

#[test]
fn what_a_panic_left_locked_goes_on_recording() {
    let flight = Arc::new(Flight::new());
    let panics = flight.clone();
    let panicking = thread::spawn(move || {
        let _ring = panics.ring.lock().unwrap();
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    panicking.join().unwrap_err();
    flight.note(Control::State, format_args!("after"));
    assert_eq!(texts(&flight), ["after"]);
}

/// Somebody was preempted with the recorder in his hands, for as long as the ladder takes.
#[test]
fn a_recorder_that_is_held_delays_no_ladder() {
    let world = World::new(Options::default());
    let flight = &world.device.inner.function().flight;
    flight.note(Control::State, format_args!("before"));
    let held = flight.ring.lock().unwrap();

    assert!(world.device.break_now(Cause::User));
    let report = world.device.revocation().unwrap();

    assert!(report.is_stopped(), "{report}");
    assert_eq!(report.flight, []);
    assert!(report.flight_missed > 0);
    drop(held);
    assert!(texts(flight).contains(&"before".to_owned()));
}
