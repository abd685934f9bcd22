//! Breaking a device in use, and starting it again.

use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{Device, RecoverError};
use failstop::ladder::{Outcome as Ended, RevocationReport, Step, Word};
use failstop::port::{Port, PortConfig};
use failstop::queues::lifecycle::Cause;
use libtest_mimic::Failed;

use crate::fixture::{
    Fixture, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};

/// The steps in the order in which the contract names them.
const STEPS: [Step; 6] = [
    Step::MarkBroken,
    Step::BusMasterOff,
    Step::Detached,
    Step::PendingDrained,
    Step::Reset,
    Step::Unmapped,
];

/// Breaks a device on purpose, and makes sure that everything was taken away from it.
fn break_now(device: &Device) -> Result<RevocationReport, Failed> {
    ensure(device.break_now(Cause::User), || {
        "it was broken before".into()
    })?;
    let report = device.revocation().ok_or("no report")?;
    let steps: Vec<Step> = report.steps.iter().map(|step| step.step).collect();
    ensure_eq(steps, STEPS.to_vec(), "steps")?;
    ensure_eq(report.verdict, Word::Revoked, &report.to_string())?;
    ensure(report.is_stopped(), || format!("not stopped:\n{report}"))?;
    for step in [
        Step::MarkBroken,
        Step::BusMasterOff,
        Step::Detached,
        Step::Unmapped,
    ] {
        let outcome = report.step(step).map(|step| step.outcome);
        ensure_eq(outcome, Some(Ended::Done), &report.to_string())?;
    }
    ensure(report.reset_method.is_some(), || report.to_string())?;
    let left = device.ledger().lines();
    ensure_eq(left, Vec::new(), "ledger after the ladder")?;
    Ok(report)
}

pub(super) fn a_break_in_traffic_is_revoked_and_recovered_under_the_same_port(
    fixture: &Fixture,
) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let first = self_addressed(&device, 60, 1);
    send(&mut port, &first)?;
    ensure_eq(receive(&mut port)?, first, "the frame before the break")?;
    break_now(&device)?;
    let mut frames = port.take_frames(4).ok_or("no frames")?;
    ensure_eq(
        port.tx_burst(&mut frames),
        0,
        "frames sent on a broken device",
    )?;
    drop(frames);

    let generation = device.recover()?;
    ensure_eq(generation.number(), 2, "generation")?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    let second = self_addressed(&device, 90, 2);
    send(&mut port, &second)?;
    ensure_eq(receive(&mut port)?, second, "the frame after the recovery")?;
    let carried = port.carried();
    ensure_eq(carried.times, 1, "times carried")?;
    ensure(carried.completions.flushed > 0, || {
        "nothing was flushed".into()
    })?;
    ensure_eq(
        carried.completions.outstanding(),
        0,
        "requests lost in the gap",
    )?;
    drop(port);
    close_clean(device).map(drop)
}

/// Frames that the device had received when it broke, and that nobody had asked for, are delivered
/// in order, before any of its next life (R7).
pub(super) fn what_was_received_before_a_break_comes_first_after_it(fixture: &Fixture) -> Outcome {
    const BEFORE: u8 = 5;
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    for seed in 0..BEFORE {
        send(&mut port, &self_addressed(&device, 60, seed))?;
    }
    let end = Instant::now() + Duration::from_secs(5);
    while device.statistics().rx_frames < BEFORE.into() {
        ensure(Instant::now() < end, || "the frames did not arrive".into())?;
    }
    break_now(&device)?;
    device.recover()?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    // Sending carries the port before anybody receives.
    for seed in BEFORE..2 * BEFORE {
        send(&mut port, &self_addressed(&device, 60, seed))?;
    }
    let end = Instant::now() + Duration::from_secs(5);
    while device.statistics().rx_frames < BEFORE.into() {
        ensure(Instant::now() < end, || {
            "no frames after the recovery".into()
        })?;
    }
    for seed in 0..2 * BEFORE {
        let expected = self_addressed(&device, 60, seed);
        ensure_eq(receive(&mut port)?, expected, "the frame")?;
    }
    drop(port);
    close_clean(device).map(drop)
}

/// After the ladder, at once (R6).
pub(super) fn c9_after_the_ladder_every_destroy_succeeds_and_frees(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let parts = Port::open(&device, &PortConfig::default())?.into_parts();
    break_now(&device)?;
    ensure(device.alloc_pd().is_err(), || {
        "a domain on a broken device".into()
    })?;
    ensure(device.create_cq(64).is_err(), || {
        "a completion queue on a broken device".into()
    })?;
    ensure(parts.pd.register(16, 2048).is_err(), || {
        "a region on a broken device".into()
    })?;
    parts.rq.try_destroy().map_err(|busy| busy.why)?;
    parts.sq.try_destroy().map_err(|busy| busy.why)?;
    drop(parts.pool);
    parts.mr.try_destroy().map_err(|busy| busy.why)?;
    parts.rx_cq.try_destroy().map_err(|busy| busy.why)?;
    parts.tx_cq.try_destroy().map_err(|busy| busy.why)?;
    parts.pd.try_destroy().map_err(|busy| busy.why)?;
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger")?;
    ensure_eq(report.totals.held_bytes, 0, "held bytes")?;
    ensure_eq(report.completions.outstanding(), 0, "outstanding requests")
}

pub(super) fn c30_a_destroy_while_the_ladder_runs_ends(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let port = Port::open(&device, &PortConfig::default())?;
    device.break_now(Cause::User);
    // The ladder has only begun.
    drop(port);
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger")?;
    ensure_eq(report.completions.outstanding(), 0, "outstanding requests")
}

pub(super) fn c40_a_break_wakes_a_sleeper(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let start = Instant::now();
    let ready = thread::scope(|scope| {
        let port = &mut port;
        let sleeper = scope.spawn(move || port.rq().wait(Some(Duration::from_secs(60))));
        thread::sleep(Duration::from_millis(50));
        device.break_now(Cause::User);
        sleeper.join()
    });
    let ready = ready.map_err(|_| "the sleeper panicked")??;
    ensure(!ready, || "a frame that nobody sent".into())?;
    ensure(start.elapsed() < Duration::from_secs(30), || {
        "it slept on".into()
    })?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

pub(super) fn a_device_that_is_not_broken_is_not_recovered(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let refused = device.recover();
    ensure(
        matches!(refused, Err(RecoverError::NotBroken { .. })),
        || format!("{refused:?}"),
    )?;
    close_clean(device).map(drop)
}

pub(super) fn many_breaks_and_recoveries_leave_nothing(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    for turn in 0..5 {
        break_now(&device)?;
        device.recover()?;
        ensure(device.wait_link(Duration::from_secs(5)).up, || {
            "no link".into()
        })?;
        let bytes = self_addressed(&device, 64, turn);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
        ensure_eq(device.ledger().totals().live_mappings, 3, "live mappings")?;
    }
    ensure_eq(port.carried().times, 5, "times carried")?;
    drop(port);
    close_clean(device).map(drop)
}
