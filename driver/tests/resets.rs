//! Resets that hang, that come too late, or that do nothing: what the ladder and an open make of
//! them.
#![forbid(unsafe_code)]

mod scripted;

use std::error::Error as _;
use std::thread;
use std::time::Duration;

use failstop::device::{Device, DeviceError, RecoverError};
use failstop::ladder::{Ground, Outcome, RevocationReport, Step, Word};
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop_pci::capabilities::PowerState;
use failstop_pci::clock::Clock;
use failstop_pci::testing::{Call, FakeFunction, Happened, ResetScript};
use failstop_pci::transport::{Kind, ResetFailed, ResetMethod};
use nix::errno::Errno;
use scripted::{Bench, Software, small};

fn kernel(function: FakeFunction) -> FakeFunction {
    function.by_messages().with_kind(Kind::Container)
}

fn broken(device: &Device) -> RevocationReport {
    assert!(device.break_now(Cause::User));
    device.revocation().unwrap()
}

fn resets(bench: &Bench) -> Vec<ResetMethod> {
    let method = |happened: &Happened| match happened {
        Happened::Reset(method) => Some(*method),
        _ => None,
    };
    bench.function.log().iter().filter_map(method).collect()
}

/// The server goes on answering, the unmaps among other things.
#[test]
fn c35_a_reset_that_a_server_does_not_answer_leaves_the_unmaps_and_blocks_other_resets() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let _before = bench.function.take_log();
    bench.function.script_next_reset(ResetScript::Unanswered);
    let report = broken(&device);
    assert_eq!(resets(&bench), [ResetMethod::Server]);
    let reset = report.step(Step::Reset).unwrap();
    assert_eq!(reset.outcome, Outcome::TimedOut, "{report}");
    assert_eq!(report.reset_method, None, "{report}");
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::Unmapped)
    );

    let refused = device.recover();
    assert!(
        matches!(refused, Err(RecoverError::Outstanding { .. })),
        "{refused:?}"
    );
    bench.function.end_unanswered_reset();
    assert_eq!(device.recover().unwrap().number(), 2);
    drop(port);
}

/// A method that is begun with no time left is left behind at once, and its reset comes later.
#[test]
fn c35_no_reset_is_begun_when_the_time_for_them_is_over() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let busy = ResetScript::Fails(Errno::EAGAIN);
    bench.function.script_reset(ResetMethod::Flr, busy);
    let _before = bench.function.take_log();
    let report = broken(&device);
    assert!(!resets(&bench).contains(&ResetMethod::Bus), "{report}");
    let note = report.step(Step::Reset).unwrap().note.clone().unwrap();
    assert!(note.contains("bus: not begun"), "{report}");
    // The family's own has time of its own.
    assert_eq!(report.reset_method, Some(ResetMethod::Software), "{report}");
    drop(port);
    device.recover().unwrap();
}

/// Its first addresses would be those that the next owner gives out first.
#[test]
fn c43_a_function_whose_resets_do_nothing_is_not_opened() {
    let bench = Bench::new();
    bench.software(Software::ResetsNothing);
    bench
        .function
        .script_reset(ResetMethod::Server, ResetScript::ResetsNothing);
    let refused = bench.try_open().unwrap_err();
    let DeviceError::NotReset { tried, .. } = &refused else {
        panic!("{refused}");
    };
    assert!(
        tried.contains("server: ") && tried.contains("software: "),
        "{tried}"
    );
    assert!(!bench.function.is_master());
    assert_eq!(bench.function.mapped(), []);
}

#[test]
fn c17_a_function_without_any_reset_is_opened_on_its_own_when_that_is_proven() {
    let bench = Bench::new();
    bench.function.set_reset_methods(&[]);
    let device = bench.open();
    assert_eq!(resets(&bench), []);
    let port = Port::open(&device, &small()).unwrap();
    drop(port);
    assert_eq!(device.close().left, []);
}

#[test]
fn c43_a_reset_that_does_nothing_is_followed_by_the_next_at_open() {
    let bench = Bench::of(kernel);
    bench
        .function
        .script_reset(ResetMethod::Flr, ResetScript::ResetsNothing);
    let _device = bench.open();
    assert_eq!(resets(&bench), [ResetMethod::Flr, ResetMethod::Bus]);
}

#[test]
fn c35_a_reset_that_hangs_at_open_is_left_behind_and_none_is_begun_beside_it() {
    let bench = Bench::of(kernel);
    let time = bench.time.clone();
    let hour = Duration::from_secs(3600);
    let reset = Call::Reset;
    let hold = bench.function.hold_and(reset, move || time.sleep(hour));
    let late = bench.try_open().unwrap_err();
    assert!(
        matches!(late, DeviceError::Reset(ResetFailed::Unanswered { .. })),
        "{late}"
    );
    // It says who hangs, and what to do (R13).
    let why = late.source().expect("no reason").to_string();
    assert!(
        why.contains("the kernel, or the server") && why.contains("try again later"),
        "{why}"
    );
    let again = bench.try_open().unwrap_err();
    assert!(matches!(again, DeviceError::InUse { .. }), "{again}");
    assert_eq!(bench.function.mapped(), []);
    hold.release();
    let device = loop {
        match bench.try_open() {
            Err(DeviceError::InUse { .. }) => thread::yield_now(),
            other => break other.unwrap(),
        }
    };
    assert_eq!(device.close().left, []);
}

#[test]
fn c43_a_reset_that_puts_bus_mastering_back_is_not_believed_at_open() {
    let bench = Bench::of(kernel);
    bench
        .function
        .script_reset(ResetMethod::Flr, ResetScript::RestoresMaster);
    let _device = bench.open();
    assert_eq!(resets(&bench), [ResetMethod::Flr, ResetMethod::Bus]);
    assert!(!bench.function.is_master());
}

/// A reset that may happen yet would hit the new life.
#[test]
fn c35_a_function_whose_reset_is_not_answered_is_not_opened() {
    let bench = Bench::new();
    bench.function.script_next_reset(ResetScript::Unanswered);
    let refused = bench.try_open().unwrap_err();
    assert!(
        matches!(refused, DeviceError::Reset(ResetFailed::Unanswered { .. })),
        "{refused}"
    );
}

/// As its last owner left it, no register takes a value: what shows the reset is planted after it.
#[test]
fn a_function_that_its_last_owner_left_asleep_is_opened() {
    let bench = Bench::new();
    bench.function.set_power_state(PowerState::D3hot);
    let device = bench.open();
    assert_eq!(device.close().left, []);
}

#[test]
fn the_accesses_of_an_open_and_of_a_recovery_are_bounded_together() {
    let bench = Bench::new();
    let device = bench.open();
    let ten = Some(Duration::from_secs(10));
    // The reset has a deadline of its own.
    assert_eq!(bench.function.bounds(), [ten, None, ten, None]);
    let _report = broken(&device);
    device.recover().unwrap();
    assert_eq!(bench.function.bounds()[4..], [ten, None]);
    bench.software(Software::ResetsNothing);
    drop(device);
    bench.script.fail_bring_ups(1);
    bench.try_open().unwrap_err();
    assert_eq!(bench.function.bounds().last(), Some(&None));
}

/// The kernel resets a function that is closed, and may hang in it; whoever closes is not held up.
#[test]
fn c35_a_reset_that_hangs_at_an_idle_close_holds_up_nobody() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let time = bench.time.clone();
    let hold = bench
        .function
        .hold_and(Call::Reset, move || time.sleep(Duration::from_secs(3600)));
    let report = device.close();
    assert_eq!((report.broken, report.left.len()), (None, 0));
    assert!(!bench.function.is_master());
    hold.release();
}

/// A server that takes pages of its registers away, which nobody saw when it described them.
#[test]
fn c14_a_bar_that_ends_before_it_should_is_named_at_open() {
    let bench = Bench::of(|function| function);
    bench.function.cut_bar(0x1000).unwrap();
    let error = bench.try_open().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, DeviceError::Short { .. }), "{text}");
    assert!(text.contains("shorter than the server said"), "{text}");
    assert!(!bench.function.is_master());
}
