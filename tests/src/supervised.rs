//! A device that is watched and supervised: errors, requests, hangs, and a link that comes and goes.

use std::time::{Duration, Instant};

use failstop::device::{Device, Options};
use failstop::events::DeviceEvent;
use failstop::name::DeviceName;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop::rss::Table;
use failstop::supervisor::{Duty, Policy, Supervisor};
use failstop_emulator::{Cable, Emulator, Notice, Running};
use libtest_mimic::{Failed, Trial};

use crate::fixture::{
    Fixture, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};
use crate::flows::{self, Round};

type EventCase = fn(&Fixture, &mut Running) -> Outcome;

const CASES: &[(&str, EventCase)] = &[
    ("c15_a_request_closes_a_port_in_use", request),
    (
        "c16_an_error_breaks_the_device_which_is_recovered_under_the_same_port",
        error,
    ),
    (
        "c19_a_device_that_sends_nothing_is_recovered_under_the_same_port",
        sends_nothing,
    ),
    (
        "c19_a_device_that_delivers_nothing_is_recovered_under_the_same_port",
        delivers_nothing,
    ),
    (
        "c19_frames_that_came_between_a_stall_and_the_next_look_are_missed",
        stalls_between_looks,
    ),
    (
        "c19_frames_that_several_queues_owe_together_are_missed",
        several_queues_stall,
    ),
    ("c45_frames_that_wait_for_a_link_break_nothing", no_link),
    (
        "c45_counters_that_wrap_on_an_idle_port_break_nothing",
        counters_wrap,
    ),
    ("a_link_that_flaps_is_told", link_flaps),
];

/// The cases, as tests.
pub fn trials() -> Vec<Trial> {
    let trial = |&(name, case): &(&str, EventCase)| {
        Trial::test(format!("supervised/{name}"), move || {
            let options = failstop_emulator::Options {
                cable: Cable::Pair,
                ..Default::default()
            };
            let mut emulator = Emulator::on_threads(&options)?;
            let device = DeviceName::VfioUser(emulator.socket_path());
            let fixture = Fixture {
                device,
                iommu: Default::default(),
            };
            case(&fixture, &mut emulator)?;
            let stats = emulator.stats()?;
            ensure_eq(stats.stray.total(), 0, "accesses outside the mappings")?;
            ensure_eq(stats.server.mappings, 0, "mappings that are left")
        })
    };
    CASES.iter().map(trial).collect()
}

/// Fast enough for a test; the periods themselves are the watchdog's unit tests'.
fn policy() -> Policy {
    Policy {
        watchdog: Some(Duration::from_millis(200)),
        interval: Duration::from_millis(10),
        ..Policy::default()
    }
}

/// The next event but those of the link.
fn next(device: &Device) -> Result<DeviceEvent, Failed> {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        match device.events().next(Duration::from_secs(1))? {
            None | Some(DeviceEvent::Link(_)) => {}
            Some(event) => return Ok(event),
        }
    }
    Err("nothing happened".into())
}

/// Expects a break for such a reason and the recovery from it, then traffic on the same port.
fn recovered(device: &Device, port: &mut Port, why: fn(&Cause) -> bool) -> Outcome {
    match next(device)? {
        DeviceEvent::Broken { cause, .. } if why(&cause) => {}
        other => return Err(format!("not broken: {other:?}").into()),
    }
    match next(device)? {
        DeviceEvent::Recovered { .. } => {}
        other => return Err(format!("not recovered: {other:?}").into()),
    }
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    // The first calls carry the port across.
    let mut frames = port.take_frames(1).ok_or("no frames")?;
    let end = Instant::now() + Duration::from_secs(5);
    while port.carried().times == 0 && Instant::now() < end {
        port.rx_burst(&mut frames);
        port.tx_burst(&mut []);
    }
    drop(frames);
    // Behind what was sent meanwhile.
    let bytes = self_addressed(device, 90, 7);
    send(port, &bytes)?;
    while receive(port)? != bytes {}
    Ok(())
}

fn request(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 1);
    send(&mut port, &bytes)?;
    emulator.notice(Notice::Request)?;
    ensure_eq(next(&device)?, DeviceEvent::RemovalRequested, "first")?;
    while next(&device)? != DeviceEvent::Removed {}
    // The server sees us go, whatever objects are held.
    let end = Instant::now() + Duration::from_secs(5);
    while emulator.stats()?.server.mappings > 0 && Instant::now() < end {
        std::thread::yield_now();
    }
    let stats = emulator.stats()?;
    ensure_eq(stats.server.mappings, 0, "mappings after the removal")?;
    ensure_eq(stats.bus_master, false, "bus master after the removal")?;
    let mut frames = port.take_frames(1).ok_or("no frames")?;
    ensure_eq(port.tx_burst(&mut frames), 0, "frames sent after it")?;
    drop((frames, port));
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger")?;
    ensure_eq(report.completions.outstanding(), 0, "outstanding requests")
}

fn error(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let supervisor = Supervisor::new(&device, policy())?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    emulator.notice(Notice::Error)?;
    recovered(&device, &mut port, |cause| *cause == Cause::BusError)?;
    drop((port, supervisor));
    close_clean(device).map(drop)
}

fn stalled(cause: &Cause) -> bool {
    matches!(cause, Cause::Stalled { .. })
}

fn sends_nothing(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("tx-stalls")?;
    let supervisor = Supervisor::new(&device, policy())?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    recovered(&device, &mut port, stalled)?;
    drop((port, supervisor));
    close_clean(device).map(drop)
}

fn delivers_nothing(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("rx-stalls")?;
    let supervisor = Supervisor::new(&device, policy())?;
    // Until a look falls between two of them.
    let end = Instant::now() + Duration::from_secs(10);
    while device.generation().number() == 1 && Instant::now() < end {
        let _ = send(&mut port, &self_addressed(&device, 60, 1));
        std::thread::sleep(Duration::from_millis(5));
    }
    recovered(&device, &mut port, stalled)?;
    drop((port, supervisor));
    close_clean(device).map(drop)
}

fn stalls_between_looks(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut duty = Duty::new(&device, policy());
    let mut port = Port::open(&device, &PortConfig::default())?;
    ensure(duty.look().is_some(), || "the device is closed".into())?;
    let bytes = self_addressed(&device, 60, 1);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes.clone(), "a frame before it")?;
    emulator.fault("rx-stalls")?;
    for _ in 0..3 {
        send(&mut port, &bytes)?;
    }
    let end = Instant::now() + Duration::from_secs(10);
    while device.statistics().tx_frames < 4 && Instant::now() < end {
        std::thread::yield_now();
    }
    // All of it before the second look, and nothing after it.
    while device.broken().is_none() && Instant::now() < end {
        let pause = duty.look().ok_or("the device is closed")?;
        std::thread::sleep(pause);
    }
    match device.broken() {
        Some(Cause::Stalled { what }) => ensure(what.contains("3 frames"), || what.clone())?,
        other => return Err(format!("not broken for it: {other:?}").into()),
    }
    device.recover()?;
    drop((port, duty));
    close_clean(device).map(drop)
}

/// More than half a ring is missing, in all: one queue alone would seldom owe so much.
fn several_queues_stall(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    const QUEUES: u32 = 4;
    const EACH: u64 = 100;
    let device = flows::open(fixture)?;
    let mut duty = Duty::new(&device, policy());
    let mut ports = Port::open_many(&device, &PortConfig::default(), QUEUES)?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link".into()
    })?;
    ensure(duty.look().is_some(), || "the device is closed".into())?;
    let owner = flows::by(Table::even(QUEUES));
    Round::new(&device, flows::all(), (0, 4096), &owner).go(&mut ports)?;
    let before = device.statistics().tx_frames;
    emulator.fault("rx-stalls")?;
    let bytes = self_addressed(&device, 60, 1);
    for port in &mut ports {
        for _ in 0..EACH {
            send(port, &bytes)?;
        }
    }
    let sent = before + u64::from(QUEUES) * EACH;
    let end = Instant::now() + Duration::from_secs(10);
    while device.statistics().tx_frames < sent && Instant::now() < end {
        std::thread::yield_now();
    }
    while device.broken().is_none() && Instant::now() < end {
        let pause = duty.look().ok_or("the device is closed")?;
        std::thread::sleep(pause);
    }
    match device.broken() {
        Some(Cause::Stalled { what }) => ensure(what.contains("400 frames"), || what.clone())?,
        other => return Err(format!("not broken for it: {other:?}").into()),
    }
    device.recover()?;
    drop((ports, duty));
    close_clean(device).map(drop)
}

fn counters_wrap(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 1);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes, "a frame before it")?;
    emulator.fault("stats-wrap")?;
    let mut duty = Duty::new(&device, policy());
    let end = Instant::now() + 5 * Duration::from_millis(200);
    while Instant::now() < end {
        let pause = duty.look().ok_or("the device is closed")?;
        std::thread::sleep(pause);
    }
    ensure_eq(device.broken(), None, "after five periods")?;
    drop((port, duty));
    close_clean(device).map(drop)
}

fn no_link(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open_with(&Config::default())?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link".into()
    })?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let supervisor = Supervisor::new(&device, policy())?;
    emulator.set_link(false)?;
    loop {
        match device.events().next(Duration::from_secs(10))? {
            Some(DeviceEvent::Link(link)) if !link.up => break,
            Some(_) => {}
            None => return Err("the link is not down".into()),
        }
    }
    send(&mut port, &self_addressed(&device, 60, 1))?;
    let broken = device.events().next(Duration::from_secs(1))?;
    ensure_eq(broken, None, "what happened in five periods")?;
    drop((port, supervisor));
    close_clean(device).map(drop)
}

fn link_flaps(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = Device::open_with(fixture.transport()?, &Config::default(), Options::default())?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link".into()
    })?;
    let supervisor = Supervisor::new(&device, policy())?;
    let mut told = Vec::new();
    for up in [false, true, false, true] {
        emulator.set_link(up)?;
        match device.events().next(Duration::from_secs(10))? {
            Some(DeviceEvent::Link(link)) => told.push(link.up),
            other => return Err(format!("{other:?} after {told:?}").into()),
        }
    }
    ensure_eq(told, vec![false, true, false, true], "what was told")?;
    drop(supervisor);
    close_clean(device).map(drop)
}
