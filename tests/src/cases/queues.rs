//! Sixteen queue pairs on four threads: who receives what, and what becomes of all of them when one
//! thing goes wrong.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use failstop::device::Device;
use failstop::events::DeviceEvent;
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop::rss::{Rss, Table};

use crate::fixture::{Fixture, Outcome, close_clean, ensure, ensure_eq};
use crate::flows::{
    Flow, QUEUES, Round, THREADS, all, blast, by, carry, completions, open, port_config, rss,
};

const FRAMES: u64 = 4096;
const LONG: Option<Duration> = Some(Duration::from_secs(20));

fn link(device: &Device) -> Outcome {
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link".into()
    })
}

/// Breaks that were told.
fn breaks(device: &Device) -> usize {
    let events = std::iter::from_fn(|| device.events().try_next());
    events
        .filter(|event| matches!(event, DeviceEvent::Broken { .. }))
        .count()
}

pub(super) fn every_flow_arrives_in_the_queue_that_its_hash_names(fixture: &Fixture) -> Outcome {
    let device = open(fixture)?;
    link(&device)?;
    let mut ports = Port::open_many(&device, &port_config(), QUEUES)?;
    let expected = by(Table::even(QUEUES));
    Round::new(&device, all(), (0, FRAMES), &expected).go(&mut ports)?;
    // Another table sends all of them to one.
    let skewed = Rss {
        table: Some(Table([3; 128])),
        ..rss()
    };
    device.set_rss(&skewed)?;
    Round::new(&device, all(), (FRAMES, FRAMES), &|_| Some(3)).go(&mut ports)?;
    let received = ports.iter_mut().map(|port| port.rq().completions().success);
    ensure_eq(received.sum(), 2 * FRAMES, "requests that received")?;
    let posted = completions(&mut ports).posted;
    drop(ports);
    let report = close_clean(device)?;
    ensure_eq(report.completions.posted, posted, "posted requests")
}

pub(super) fn a_port_that_goes_leaves_its_flows_to_the_others(fixture: &Fixture) -> Outcome {
    const GOES: u32 = 5;
    let device = open(fixture)?;
    link(&device)?;
    let mut ports = Port::open_many(&device, &port_config(), QUEUES)?;
    let table = Table::even(QUEUES);
    let owner = by(table);
    let others = all()
        .into_iter()
        .filter(|flow| owner(*flow) != Some(GOES))
        .collect();
    let goes = ports.remove(GOES as usize);
    let round = Round::new(&device, others, (0, 2 * FRAMES), &owner);
    // It goes in the middle of the others' traffic.
    thread::scope(|scope| {
        let going = scope.spawn(|| {
            while round.received() < FRAMES / 2 && !round.is_over() {
                thread::yield_now();
            }
            drop(goes);
        });
        let went = round.go(&mut ports);
        going.join().map_err(|_| "the drop panicked")?;
        went
    })?;
    // Its flows have another place now, those of the others the same.
    let moved = |flow: Flow| owner(flow).filter(|queue| *queue != GOES);
    Round::new(&device, all(), (2 * FRAMES, FRAMES), &moved).go(&mut ports)?;
    // And it comes back to them.
    ports.push(Port::open_queue(&device, &port_config(), GOES)?);
    Round::new(&device, all(), (3 * FRAMES, FRAMES), &owner).go(&mut ports)?;
    drop(ports);
    close_clean(device).map(drop)
}

pub(super) fn breaks_from_every_thread_in_traffic_are_one_ladder(fixture: &Fixture) -> Outcome {
    let device = open(fixture)?;
    link(&device)?;
    let mut ports = Port::open_many(&device, &port_config(), QUEUES)?;
    let owner = by(Table::even(QUEUES));
    let (stop, first) = (AtomicBool::new(false), AtomicU64::new(0));
    let mac = device.mac();
    thread::scope(|scope| {
        let (device, stop, first) = (&device, &stop, &first);
        for mine in ports.chunks_mut(QUEUES as usize / THREADS) {
            scope.spawn(move || blast(mac, mine, stop));
        }
        thread::sleep(Duration::from_millis(50));
        let breaker = || {
            first.fetch_add(device.break_now(Cause::User).into(), Ordering::Relaxed);
        };
        let breakers: Vec<_> = (0..THREADS).map(|_| scope.spawn(breaker)).collect();
        for breaker in breakers {
            let _ = breaker.join();
        }
        let report = device.revocation();
        stop.store(true, Ordering::Relaxed);
        let report = report.ok_or("no ladder ran")?;
        ensure(report.is_stopped(), || report.to_string())
    })?;
    ensure_eq(first.into_inner(), 1, "threads that broke it")?;
    ensure_eq(breaks(&device), 1, "breaks told")?;
    ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
    device.recover()?;
    link(&device)?;
    carry(&mut ports, 1)?;
    for port in &ports {
        ensure_eq(port.carried().completions.outstanding(), 0, "requests lost")?;
    }
    Round::new(&device, all(), (1, FRAMES), &owner).go(&mut ports)?;
    drop(ports);
    close_clean(device).map(drop)
}

/// Neither a recovery nor a port waits for a thread that never polls.
pub(super) fn a_port_is_carried_while_the_others_do_not_poll(fixture: &Fixture) -> Outcome {
    const POLLS: usize = 2;
    let device = open(fixture)?;
    let mut ports = Port::open_many(&device, &port_config(), 4)?;
    device.break_now(Cause::User);
    device.recover()?;
    link(&device)?;
    carry(&mut ports[POLLS..=POLLS], 1)?;
    // Until the others poll, it receives for them.
    let here = |_: Flow| Some(POLLS as u32);
    Round::new(&device, all(), (1, 1024), &here).go(&mut ports[POLLS..=POLLS])?;
    carry(&mut ports, 1)?;
    let owner = by(Table::even(4));
    Round::new(&device, all(), (1025, 1024), &owner).go(&mut ports)?;
    drop(ports);
    close_clean(device).map(drop)
}

pub(super) fn a_close_under_ports_on_threads_leaves_nothing(fixture: &Fixture) -> Outcome {
    let device = open(fixture)?;
    link(&device)?;
    let mut ports = Port::open_many(&device, &port_config(), QUEUES)?;
    let (mac, stop) = (device.mac(), AtomicBool::new(false));
    let report = thread::scope(|scope| {
        for mine in ports.chunks_mut(QUEUES as usize / THREADS) {
            let stop = &stop;
            scope.spawn(move || blast(mac, mine, stop));
        }
        thread::sleep(Duration::from_millis(50));
        let report = device.close();
        thread::sleep(Duration::from_millis(20));
        stop.store(true, Ordering::Relaxed);
        report
    });
    ensure_eq(report.left, Vec::new(), "ledger after close")?;
    ensure_eq(report.broken, Some(Cause::Closed), "what ports are told")?;
    for port in &mut ports {
        let mut frames = port.take_frames(1).unwrap_or_default();
        while port.rx_burst(&mut frames) > 0 {}
    }
    ensure_eq(completions(&mut ports).outstanding(), 0, "outstanding")?;
    drop(ports);
    close_clean(open(fixture)?).map(drop)
}

pub(super) fn c26_a_sleeper_on_each_queue_is_woken_by_its_own_frame(fixture: &Fixture) -> Outcome {
    let device = open(fixture)?;
    link(&device)?;
    let mut ports = Port::open_many(&device, &port_config(), 4)?;
    let owner = by(Table::even(4));
    let own = |queue| all().into_iter().find(|flow| owner(*flow) == Some(queue));
    for queue in [3, 1] {
        let flow = own(queue).ok_or("no flow")?;
        let (before, after) = ports.split_at_mut(queue as usize);
        let (sleeper, sender) = (&mut after[0], &mut before[0]);
        let round = Round::new(&device, vec![flow], (0, 16), &owner);
        let woken = thread::scope(|scope| {
            let sleeper = scope.spawn(move || sleeper.rq().wait(LONG));
            thread::sleep(Duration::from_millis(50));
            let mut frames = sender.take_frames(16).ok_or("no frames")?;
            round.fill(&mut frames);
            ensure_eq(sender.tx_burst(&mut frames), 16, "frames sent")?;
            let woken = sleeper.join().map_err(|_| "the sleeper panicked")?;
            Ok::<_, libtest_mimic::Failed>(woken?)
        })?;
        ensure(woken, || format!("queue {queue}: not woken by its frames"))?;
        round.go(&mut after[..1])?;
    }
    drop(ports);
    close_clean(device).map(drop)
}
