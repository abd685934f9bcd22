//! A function that is gone for a moment, at each moment of a ladder and of a recovery, is recovered in
//! the end, and never left with bus mastering on (C17, C47).
#![forbid(unsafe_code)]

mod scripted;

use std::time::Duration;

use failstop::device::Device;
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop::supervisor::{Duty, Policy};
use failstop_pci::clock::Clock;
use scripted::{Bench, small};

/// Calls that a ladder and a recovery make, and some more.
const MOMENTS: u64 = 120;

/// Looks as a supervisor does until the device goes on, or the supervisor does nothing more.
fn supervise(bench: &Bench, duty: &mut Duty) {
    let end = bench.time.now() + Duration::from_secs(600);
    while bench.time.now() < end {
        let Some(pause) = duty.look() else { return };
        bench.time.sleep(pause.max(Duration::from_millis(1)));
    }
}

/// Breaks a device that leaves after so many calls for so many; whether it is recovered, and its
/// port with it.
fn recovers(after: u64, calls: u64) -> Result<(), String> {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut duty = Duty::new(&device, Policy::default());
    bench.function.go_away(after, calls);
    assert!(device.break_now(Cause::User));
    let report = device.revocation().unwrap();
    if bench.function.is_back() && !report.is_stopped() && bench.function.is_master() {
        return Err(format!("bus mastering was left on\n{report}"));
    }
    supervise(&bench, &mut duty);
    passes(&bench, &device, &mut port)
}

fn passes(bench: &Bench, device: &Device, port: &mut Port) -> Result<(), String> {
    if let Some(cause) = device.broken() {
        return Err(format!("fenced: {cause}\n{}", device.revocation().unwrap()));
    }
    let mut frames = port.take_frames(4).unwrap();
    for _ in 0..16 {
        port.rx_burst(&mut frames);
        bench.time.sleep(Duration::from_secs(1));
    }
    match bench.receive(0, 3, 60) {
        3 => Ok(()),
        received => Err(format!("{received} frames of 3 were received")),
    }
}

fn all_recover(calls: u64) {
    let failed: Vec<_> = (0..MOMENTS)
        .filter_map(|after| Some((after, recovers(after, calls).err()?)))
        .collect();
    let moments: Vec<_> = failed.iter().map(|(after, _)| after).collect();
    assert!(
        failed.is_empty(),
        "after {moments:?} calls\n{}",
        failed[0].1
    );
}

#[test]
fn c47_a_function_that_is_gone_for_one_call_is_recovered_whenever_that_was() {
    all_recover(1);
}

#[test]
fn c47_a_function_that_is_gone_for_a_step_is_recovered_whenever_that_was() {
    all_recover(8);
}

#[test]
fn c47_a_function_that_is_gone_for_a_ladder_is_recovered_whenever_that_was() {
    all_recover(60);
}

/// Who has no supervisor asks again.
#[test]
fn c47_a_function_that_is_back_is_recovered_when_somebody_asks_again() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    bench.function.go_away(2, u64::MAX);
    assert!(device.break_now(Cause::User));
    assert!(!device.revocation().unwrap().is_stopped());
    assert!(device.recover().is_err());
    bench.function.go_away(0, 0);
    device.recover().unwrap();
    passes(&bench, &device, &mut port).unwrap();
}

/// A reset may cure what made it unproven: the next attempt sees it.
#[test]
fn r4_5_a_function_that_read_as_bus_master_until_its_reset_is_recovered() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut duty = Duty::new(&device, Policy::default());
    bench.function.set_reads_as_master(true);
    assert!(device.break_now(Cause::User));
    assert!(!device.revocation().unwrap().is_stopped());
    bench.function.set_reads_as_master(false);
    supervise(&bench, &mut duty);
    passes(&bench, &device, &mut port).unwrap();
}
