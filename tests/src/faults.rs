//! Devices that misbehave: what the driver makes of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{Device, DeviceError};
use failstop::events::DeviceEvent;
use failstop::ladder::Word;
use failstop::name::DeviceName;
use failstop::port::{Port, PortConfig};
use failstop::provider::ProviderError;
use failstop::queues::lifecycle::Cause;
use failstop::rss::Table;
use failstop_emulator::{Emulator, Options, Running};
use libtest_mimic::{Failed, Trial};

use crate::fixture::{Fixture, Outcome, close_clean, ensure, ensure_eq, self_addressed, send};
use crate::flows::{self, QUEUES, Round, THREADS};

/// A case with an emulator of its own, which it makes misbehave.
type FaultCase = fn(&Fixture, &mut Running) -> Outcome;

const CASES: &[(&str, FaultCase)] = &[
    (
        "c1_a_receive_queue_that_does_not_stop_frees_nothing",
        receive_queue_stuck,
    ),
    (
        "c1_a_send_queue_that_does_not_stop_frees_nothing",
        send_queue_stuck,
    ),
    (
        "c11_frames_that_came_home_are_not_written_any_more",
        frames_stay_untouched,
    ),
    (
        "c1_one_queue_of_sixteen_that_does_not_stop_breaks_the_device_once_for_all",
        one_queue_of_many_stuck,
    ),
    ("c32_all_zero_is_no_acknowledgement", gone_reads_zero),
    ("c32_all_ones_is_no_acknowledgement", gone_reads_ones),
    (
        "a_device_that_reads_all_ones_is_not_opened",
        all_ones_at_open,
    ),
    (
        "a_device_that_reads_all_zero_is_not_opened",
        all_zero_at_open,
    ),
    (
        "c20_a_reset_ends_what_a_queue_that_does_not_stop_does",
        reset_ends_it,
    ),
    ("a_server_that_dies_leaves_the_process_alive", server_dies),
    (
        "a_server_that_answers_errors_is_not_believed",
        server_errors,
    ),
];

/// The cases, as tests.
pub fn trials() -> Vec<Trial> {
    let trial = |&(name, case): &(&str, FaultCase)| {
        Trial::test(format!("fault/{name}"), move || {
            let mut emulator = Emulator::on_threads(&Options::default())?;
            let device = DeviceName::VfioUser(emulator.socket_path());
            case(
                &Fixture {
                    device,
                    iommu: Default::default(),
                },
                &mut emulator,
            )
        })
    };
    CASES.iter().map(trial).collect()
}

/// How a device that was broken is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// Proven stopped: everything is released, and it can be recovered.
    Stopped,
    /// Everything is released, because the server said of every mapping that it is gone.
    Unmapped,
    /// Nothing is proven: the memory stays.
    Quarantined,
}

/// Closes a broken device and makes sure that it ended like that, every request once.
fn ensure_ended(device: Device, end: End, why: fn(&Cause) -> bool) -> Outcome {
    let report = device.close();
    let cause = report.broken.ok_or("the device is not broken")?;
    ensure(why(&cause), || {
        format!("broken for another reason: {cause}")
    })?;
    let revocation = report.revocation.ok_or("no ladder ran")?;
    ensure_eq(
        revocation.verdict == Word::Revoked,
        end != End::Quarantined,
        &format!("revoked\n{revocation}"),
    )?;
    ensure_eq(
        revocation.is_stopped(),
        end == End::Stopped,
        &format!("stopped\n{revocation}"),
    )?;
    ensure_eq(report.totals.live_bytes, 0, "live bytes")?;
    if end == End::Quarantined {
        let kinds: Vec<_> = report.left.iter().map(|line| line.owner.kind).collect();
        ensure(kinds.contains(&"MR"), || {
            format!("the frames' memory was released: {kinds:?}")
        })?;
    } else {
        ensure_eq(report.left, Vec::new(), "ledger")?;
    }
    let c = report.completions;
    ensure_eq(
        c.posted,
        c.success + c.error + c.flushed,
        "posted = success + error + flushed",
    )
}

fn receive_queue_stuck(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    emulator.fault("rxq-stuck")?;
    drop(port);
    ensure_ended(device, End::Stopped, |cause| {
        matches!(cause, Cause::StopFailed { .. })
    })?;
    let stats = emulator.stats()?;
    ensure_eq(
        stats.stray.total(),
        0,
        "accesses to memory that was released",
    )
}

/// The queue goes on writing to its frames until the ladder has reset the device; they are ours
/// after it, and not before.
fn frames_stay_untouched(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    const POISON: [u8; 2048] = [0xA5; 2048];
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    let mut parts = port.into_parts();
    emulator.fault("rxq-stuck")?;
    parts.rq.destroy();
    parts.sq.destroy();
    let total = parts.mr.census().ok_or("no region")?.total;
    let frames = parts.pool.take_many(total as usize);
    let mut frames = frames.ok_or("frames are missing after the destroy")?;
    for frame in &mut frames {
        frame.fill(&POISON)?;
    }
    thread::sleep(Duration::from_millis(100));
    let mut bytes = [0; POISON.len()];
    for frame in &frames {
        frame.copy_to(&mut bytes);
        ensure(bytes == POISON, || {
            "a frame was written after it came home".into()
        })?;
    }
    ensure_eq(
        emulator.stats()?.stray.total(),
        0,
        "accesses outside the mappings",
    )?;
    drop((
        frames,
        parts.pool,
        parts.mr,
        parts.rx_cq,
        parts.tx_cq,
        parts.pd,
    ));
    ensure_ended(device, End::Stopped, |cause| {
        matches!(cause, Cause::StopFailed { .. })
    })
}

fn send_queue_stuck(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("txq-stuck")?;
    drop(port);
    ensure_ended(device, End::Stopped, |cause| {
        matches!(cause, Cause::StopFailed { .. })
    })
}

/// Fifteen others are in traffic on four threads meanwhile (R4) (R7).
fn one_queue_of_many_stuck(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    const STUCK: u32 = 5;
    let device = flows::open(fixture)?;
    let mut ports = Port::open_many(&device, &flows::port_config(), QUEUES)?;
    let owner = flows::by(Table::even(QUEUES));
    Round::new(&device, flows::all(), (1, 1024), &owner).go(&mut ports)?;
    let stuck = ports.remove(STUCK as usize);
    emulator.fault("rxq-stuck@destroy=1")?;
    let (mac, stop) = (device.mac(), AtomicBool::new(false));
    thread::scope(|scope| {
        for mine in ports.chunks_mut(THREADS) {
            let stop = &stop;
            scope.spawn(move || flows::blast(mac, mine, stop));
        }
        thread::sleep(Duration::from_millis(20));
        // Returns on the verdict.
        drop(stuck);
        stop.store(true, Ordering::Relaxed);
    });
    let cause = device.broken().ok_or("the device is not broken")?;
    ensure(matches!(cause, Cause::StopFailed { .. }), || {
        format!("broken for another reason: {cause}")
    })?;
    let report = device.revocation().ok_or("no ladder ran")?;
    ensure(report.is_stopped(), || report.to_string())?;
    let told = std::iter::from_fn(|| device.events().try_next());
    let breaks = told.filter(|event| matches!(event, DeviceEvent::Broken { .. }));
    ensure_eq(breaks.count(), 1, "breaks told")?;
    ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
    for port in &mut ports {
        let mut frames = port.take_frames(1).ok_or("no frame")?;
        ensure_eq(port.tx_burst(&mut frames), 0, "frames sent")?;
        while port.rx_burst(&mut frames) > 0 {}
    }
    ensure_eq(flows::completions(&mut ports).outstanding(), 0, "requests")?;
    emulator.clear_faults()?;
    device.recover()?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    flows::carry(&mut ports, 1)?;
    ports.push(Port::open_queue(&device, &flows::port_config(), STUCK)?);
    Round::new(&device, flows::all(), (2000, 2048), &owner).go(&mut ports)?;
    drop(ports);
    close_clean(device)?;
    let stray = emulator.stats()?.stray.total();
    ensure_eq(stray, 0, "accesses to memory that was released")
}

fn gone_reads_zero(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("gone-zero")?;
    drop(port);
    ensure_ended(device, End::Unmapped, |cause| {
        matches!(cause, Cause::Gone { .. })
    })
}

fn gone_reads_ones(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("gone")?;
    drop(port);
    ensure_ended(device, End::Unmapped, |cause| {
        matches!(cause, Cause::Gone { .. })
    })
}

fn refused_as_gone(fixture: &Fixture) -> Outcome {
    match Device::open(fixture.transport()?, &Default::default()) {
        Err(DeviceError::Gone { .. } | DeviceError::Provider(ProviderError::Gone { .. })) => Ok(()),
        Err(DeviceError::Command(error)) => {
            ensure(error.to_string().contains("no live function"), || {
                error.to_string()
            })
        }
        Err(other) => Err(format!("refused for another reason: {other}").into()),
        Ok(_) => Err("opened a device that is not there".into()),
    }
}

fn all_ones_at_open(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    emulator.fault("gone")?;
    refused_as_gone(fixture)
}

fn all_zero_at_open(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    emulator.fault("gone-zero")?;
    refused_as_gone(fixture)
}

fn reset_ends_it(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    emulator.fault("rxq-stuck")?;
    drop(port);
    device.transport().reset()?;
    let before = emulator.stats()?;
    thread::sleep(Duration::from_millis(50));
    let after = emulator.stats()?;
    ensure_eq(after.dma, before.dma, "DMA after a reset")?;
    ensure_eq(after.queues, (0, 0), "queues that run after a reset")?;
    drop(device);
    Ok(())
}

fn server_dies(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    emulator.fault("server-dies")?;
    let mut frames = port.take_frames(1).ok_or("no frame")?;
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        port.rx_burst(&mut frames);
        port.tx_burst(&mut frames);
    }
    drop(frames);
    drop(port);
    ensure_ended(device, End::Quarantined, |cause| {
        matches!(cause, Cause::Gone { .. })
    })
}

fn server_errors(fixture: &Fixture, emulator: &mut Running) -> Result<(), Failed> {
    let device = fixture.open()?;
    let port = Port::open(&device, &PortConfig::default())?;
    emulator.fault("server-error")?;
    drop(port);
    let report = device.close();
    ensure(report.broken.is_some(), || "errors went unnoticed".into())?;
    ensure(report.totals.quarantined_bytes > 0, || {
        "memory was released on an error".into()
    })?;
    Ok(())
}
