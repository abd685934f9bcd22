//! Recovery over a scripted device: a new life only after a proven stop, and what is carried into
//! it.
#![forbid(unsafe_code)]

mod scripted;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use failstop::device::{Device, DeviceError, RecoverError, RecoveryReport};
use failstop::events::DeviceEvent;
use failstop::ladder::{Ground, Word};
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop_dma::frame::Frame;
use failstop_pci::clock::Clock;
use failstop_pci::testing::{Call, Happened, Hold, Reading, ResetScript};
use failstop_pci::transport::{IrqIndex, ResetMethod, Unmapped};
use nix::errno::Errno;
use scripted::{Bench, FRAME, Objects, RX, Software, Stop, Way, small};

fn break_it(device: &Device) {
    assert!(device.break_now(Cause::User));
    assert!(device.revocation().is_some());
}

fn full(frames: &mut [Frame]) {
    for frame in frames {
        frame.fill(&[7; 60]).unwrap();
    }
}

fn steps(report: &RecoveryReport) -> Vec<&'static str> {
    report.steps.iter().map(|step| step.step.name()).collect()
}

#[test]
fn a_recovery_says_how_long_each_of_its_steps_took() {
    let bench = Bench::new();
    let device = bench.open();
    assert_eq!(device.recovery(), None);
    break_it(&device);
    bench.script.fail_bring_ups(1);
    device.recover().unwrap_err();
    assert_eq!(device.recovery(), None, "no life began");
    device.recover().unwrap();
    let report = device.recovery().unwrap();
    assert_eq!((&*report.device, report.generation), ("fake", 2));
    assert_eq!(
        steps(&report),
        ["stopped", "reopened", "brought_up", "armed"]
    );
    let text = report.to_string();
    assert!(text.starts_with("fake, generation 2: began\n"), "{text}");
    assert!(text.contains(" us  brought_up\n"), "{text}");
    let mut told = None;
    while let Some(event) = device.events().try_next() {
        if let DeviceEvent::Recovered { report, .. } = event {
            told = Some(report);
        }
    }
    assert_eq!(told, Some(report));
}

#[test]
fn a_port_adds_its_part_of_a_recovery_once_it_was_carried() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    break_it(&device);
    device.recover().unwrap();
    let mut report = device.recovery().unwrap();
    report.add_port(&port.carried());
    assert_eq!(report.steps.len(), 4, "it was not carried yet");
    let mut frames = port.take_frames(1).unwrap();
    assert_eq!(port.rx_burst(&mut frames), 0);
    let carried = port.carried();
    report.add_port(&carried);
    assert_eq!(steps(&report)[4..], ["remapped", "requeued"]);
    assert_eq!(
        [report.steps[4].took, report.steps[5].took],
        [carried.remapped, carried.requeued]
    );
    assert_ne!(carried.remapped, Duration::ZERO);
    assert_ne!(carried.requeued, Duration::ZERO);
}

#[test]
fn r10_bus_mastering_is_off_until_a_queue_of_the_new_life_runs() {
    let bench = Bench::new();
    let device = bench.open();
    drop(Objects::new(&device, 0).unwrap());
    break_it(&device);
    assert_eq!(device.recover().unwrap().number(), 2);
    assert!(!bench.function.is_master());
    let objects = Objects::new(&device, 0).unwrap();
    assert!(bench.function.is_master());
    assert_eq!(device.broken(), None);
    drop(objects);
    assert_eq!(device.close().left, []);
}

#[test]
fn c43_a_device_whose_resets_reset_nothing_is_not_recovered() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.software(Software::ResetsNothing);
    bench
        .function
        .script_reset(ResetMethod::Server, ResetScript::ResetsNothing);
    break_it(&device);
    // It still knows where its rings were.
    assert!(bench.queue(Way::Receive, 0).is_some());
    let report = device.revocation().unwrap();
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::Unmapped)
    );
    for _ in 0..2 {
        let refused = device.recover().unwrap_err();
        assert!(
            matches!(refused, RecoverError::NotStopped { .. }),
            "{refused}"
        );
        assert!(!bench.function.is_master());
        assert_eq!(device.generation().number(), 1);
    }
    // Once a reset works it is.
    bench
        .function
        .script_reset(ResetMethod::Server, ResetScript::Works);
    assert_eq!(device.recover().unwrap().number(), 2);
    assert_eq!(bench.queue(Way::Receive, 0), None);
    drop(port);
}

#[test]
fn quarantine_is_released_when_a_later_attempt_proves_the_stop() {
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    for _ in 0..3 {
        bench
            .function
            .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    }
    break_it(&device);
    drop(objects);
    let totals = device.ledger().totals();
    assert_eq!((totals.live_mappings, totals.quarantined_mappings), (0, 3));
    bench.function.read_config_again();
    device.recover().unwrap();
    assert_eq!(device.ledger().lines(), []);
    assert_eq!(bench.function.mapped(), []);
    drop(Objects::new(&device, 0).unwrap());
}

#[test]
fn no_address_is_used_again_before_the_stop_is_proven_and_it_was_unmapped() {
    // Room for one set of objects: the next set needs the addresses of the first.
    let bench = Bench::with_limits(scripted::pages(8), |function| function.by_messages());
    let device = bench.open();
    let _before = bench.function.take_log();
    for life in 1..5 {
        let objects = Objects::new(&device, 0).unwrap();
        assert_eq!(device.generation().number(), life);
        break_it(&device);
        drop(objects);
        device.recover().unwrap();
    }
    let (mut used, mut unmapped, mut reset) = (BTreeMap::new(), BTreeMap::new(), 0);
    let mut again = 0;
    for (at, happened) in bench.function.log().into_iter().enumerate() {
        match happened {
            Happened::Reset(_) => reset = at,
            Happened::Unmap { iova, outcome, .. } => {
                assert_eq!(outcome, Unmapped::Exact);
                unmapped.insert(iova, at);
            }
            Happened::Map { iova, .. } => {
                if let Some(before) = used.insert(iova, at) {
                    again += 1;
                    assert!(before < reset && before < unmapped[&iova], "{iova:#x}");
                }
            }
            _ => {}
        }
    }
    assert!(again > 0, "no address came back: {used:?}");
}

#[test]
fn a_recovery_that_fails_in_bring_up_can_be_repeated() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    break_it(&device);
    bench.script.fail_bring_ups(2);
    for _ in 0..2 {
        let refused = device.recover().unwrap_err();
        assert!(matches!(refused, RecoverError::BringUp(_)), "{refused}");
        assert!(!bench.function.is_master());
        assert!(device.broken().is_some());
        let mut frames = port.take_frames(1).unwrap();
        assert_eq!(port.rx_burst(&mut frames), 0);
    }
    device.recover().unwrap();
    let mut frames = port.take_frames(4).unwrap();
    assert_eq!(port.rx_burst(&mut frames), 0);
    assert_eq!(bench.receive(0, 2, 60), 2);
    assert_eq!(port.rx_burst(&mut frames), 2);
    let events = std::iter::from_fn(|| device.events().try_next());
    let failed = events.filter(|event| matches!(event, DeviceEvent::RecoveryFailed { .. }));
    assert_eq!(failed.count(), 2);
}

#[test]
fn of_two_recoveries_at_once_one_begins_a_life() {
    let bench = Bench::new();
    let device = bench.open();
    break_it(&device);
    let results = thread::scope(|scope| {
        [0, 1]
            .map(|_| scope.spawn(|| device.recover()))
            .map(|thread| thread.join().unwrap())
    });
    let begun = results.iter().filter(|result| result.is_ok()).count();
    let none = |result: &&Result<_, _>| matches!(result, Err(RecoverError::NotBroken { .. }));
    assert_eq!(
        (begun, results.iter().filter(none).count()),
        (1, 1),
        "{results:?}"
    );
    assert_eq!(device.generation().number(), 2);
}

#[test]
fn a_recovery_waits_for_the_verdict_and_objects_of_the_old_life_stay_out_of_the_new() {
    let bench = Bench::new();
    let device = bench.open();
    let mut old = Objects::new(&device, 0).unwrap();
    let mut frames = old.pool.take_many(4).unwrap();
    full(&mut frames);
    assert!(device.break_now(Cause::User));
    device.recover().unwrap();
    let mut new = Objects::new(&device, 0).unwrap();
    let (log, before) = (bench.function.take_log(), bench.registers());
    assert!(!log.is_empty());
    assert_eq!(old.sq.burst(&mut frames), 0);
    assert_eq!(old.rq.burst(&mut frames), 0);
    assert!(old.pd.register(8, FRAME).is_err());
    drop((old, frames));
    assert_eq!(bench.function.log(), []);
    assert_eq!(bench.registers(), before);
    // And the new one moves frames.
    let mut frames = new.pool.take_many(2).unwrap();
    assert_eq!(bench.receive(0, 1, 60), 1);
    assert_eq!(new.rq.burst(&mut frames), 1);
    assert_eq!(new.sq.burst(&mut frames[..1]), 1);
    assert_eq!(bench.send(0, 1), 1);
    new.sq.reap();
    assert_eq!(new.sq.completions().success, 1);
}

#[test]
fn a_port_is_carried_and_every_request_ends_once() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(6).unwrap();
    full(&mut frames);
    assert_eq!(port.tx_burst(&mut frames[..3]), 3);
    assert_eq!(bench.receive(0, 2, 60), 2);
    break_it(&device);
    device.recover().unwrap();
    // What was received before the break is delivered, by the burst that carries the port.
    assert_eq!(port.rx_burst(&mut frames), 2);
    assert_eq!(frames[0].len(), 60);
    assert_eq!(port.rx_burst(&mut frames), 0);
    let carried = port.carried();
    assert_eq!(carried.times, 1);
    let ended = carried.completions;
    assert_eq!(ended.outstanding(), 0);
    assert_eq!((ended.posted, ended.success), (u64::from(RX - 1) + 3, 2));
    assert_eq!(bench.receive(0, 1, 60), 1);
    assert_eq!(port.rx_burst(&mut frames), 1);
    drop((port, frames));
    assert_eq!(device.close().left, []);
}

#[test]
fn a_port_whose_first_queues_in_the_new_life_fail_is_carried_by_a_later_burst() {
    for way in scripted::WAYS {
        let bench = Bench::new();
        let device = bench.open();
        let mut port = Port::open(&device, &small()).unwrap();
        let mut frames = port.take_frames(6).unwrap();
        full(&mut frames);
        break_it(&device);
        device.recover().unwrap();
        bench.script.fail_starts(way, 2);
        for _ in 0..2 {
            assert_eq!(port.rx_burst(&mut frames), 0, "{way:?}");
            assert_eq!(port.carried().times, 0, "{way:?}");
            bench.time.sleep(Duration::from_millis(10));
        }
        assert_eq!(port.tx_burst(&mut frames[..1]), 1, "{way:?}");
        assert_eq!(port.carried().times, 1, "{way:?}");
        assert_eq!(bench.receive(0, 1, 60), 1);
        assert_eq!(port.rx_burst(&mut frames), 1);
        assert_eq!(device.broken(), None);
        drop((port, frames));
        let closed = device.close();
        assert_eq!((closed.left, closed.completions.outstanding()), (vec![], 0));
    }
}

#[test]
fn a_port_whose_memory_cannot_be_mapped_in_the_new_life_is_carried_by_a_later_burst() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(2).unwrap();
    break_it(&device);
    device.recover().unwrap();
    bench.function.fail_next_map(Errno::ENOMEM);
    assert_eq!(port.rx_burst(&mut frames), 0);
    assert_eq!(port.carried().times, 0);
    bench.time.sleep(Duration::from_millis(10));
    assert_eq!(port.rx_burst(&mut frames), 0);
    assert_eq!(port.carried().times, 1);
    assert_eq!(bench.receive(0, 1, 60), 1);
    assert_eq!(port.rx_burst(&mut frames), 1);
    drop((port, frames));
    assert_eq!(device.close().left, []);
}

#[test]
fn a_port_is_carried_across_many_lives_and_its_frames_add_up() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(4).unwrap();
    for life in 1..20 {
        full(&mut frames);
        assert_eq!(port.tx_burst(&mut frames), 4);
        assert_eq!(bench.send(0, 4), 4);
        break_it(&device);
        device.recover().unwrap();
        assert_eq!(port.rx_burst(&mut frames), 0);
        assert_eq!(port.carried().times, life);
        let census = port.census().unwrap();
        assert_eq!(census.home + census.out, census.total);
        assert_eq!(device.ledger().lines().len(), 3);
    }
    let total = port.census().unwrap().total;
    assert!(port.pool().available() as u32 + 4 + RX + scripted::TX <= total);
    drop((port, frames));
    assert_eq!(device.close().left, []);
}

#[test]
fn c33_no_life_begins_before_the_last_one_is_known_to_reach_no_register() {
    let bench = Bench::of(|function| function.by_messages().with_interrupts(1));
    let device = bench.open();
    let time = bench.time.clone();
    // The step that replaces the window does not return.
    let hold = bench.function.hold_and(Call::Interrupts, move || {
        time.sleep(Duration::from_secs(60))
    });
    assert!(device.break_now(Cause::User));
    let report = device.revocation().unwrap();
    assert_eq!(report.ground, Ground::StoppedAndUnmapped, "{report}");
    let refused = device.recover().unwrap_err();
    assert!(
        matches!(refused, RecoverError::Outstanding { .. }),
        "{refused}"
    );
    hold.release();
    while device.recover().is_err() {
        thread::yield_now();
    }
    drop(Objects::new(&device, 0).unwrap());
    assert_eq!(device.broken(), None);
}

#[test]
fn c35_no_life_begins_under_a_reset_that_the_second_attempt_left_behind() {
    let bench = Bench::new();
    let device = bench.open();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    break_it(&device);
    bench.function.read_config_again();
    let time = bench.time.clone();
    let hold = bench
        .function
        .hold_and(Call::Reset, move || time.sleep(Duration::from_secs(60)));
    // It was never bus master, which is a stop; the reset is outstanding all the same.
    let refused = device.recover().unwrap_err();
    assert!(
        matches!(refused, RecoverError::Outstanding { .. }),
        "{refused}"
    );
    assert_eq!(device.generation().number(), 1);
    hold.release();
    while device.recover().is_err() {
        thread::yield_now();
    }
}

#[test]
fn a_proof_that_comes_later_reaches_a_port_of_the_life_that_ended() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    for _ in 0..3 {
        bench
            .function
            .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    }
    break_it(&device);
    bench.function.read_config_again();
    device.recover().unwrap();
    let mut frames = port.take_frames(2).unwrap();
    assert_eq!(port.rx_burst(&mut frames), 0);
    assert_eq!(port.carried().times, 1);
    assert_eq!(bench.receive(0, 1, 60), 1);
    assert_eq!(port.rx_burst(&mut frames), 1);
    drop((port, frames));
    assert_eq!(device.close().left, []);
}

#[test]
fn a_port_without_a_spare_frame_keeps_what_it_received_at_a_break() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let spare = port.pool().available();
    let mut frames = port.take_frames(spare).unwrap();
    full(&mut frames);
    assert_eq!(bench.receive(0, 3, 60), 3);
    break_it(&device);
    device.recover().unwrap();
    // Carrying by the sender would have nowhere to put what was received; its own frames come home.
    port.tx_burst(&mut frames);
    let mut received = 0;
    for _ in 0..8 {
        received += port.rx_burst(&mut frames[..1]);
    }
    assert_eq!(received, 3);
    assert_eq!(port.carried().times, 1);
    assert_eq!(port.carried().completions.success, 3);
}

#[test]
fn bus_mastering_that_was_not_seen_to_take_is_turned_off_again() {
    let bench = Bench::new();
    let device = bench.open();
    // Written, and read back as nobody reads it.
    bench.function.misread_config(Reading::AllOnes, 1);
    assert!(Objects::new(&device, 0).is_err());
    assert!(!bench.function.is_master());
}

#[test]
fn a_function_has_one_device_at_a_time() {
    let bench = Bench::new();
    let device = bench.open();
    let refused = bench.try_open().unwrap_err();
    assert!(matches!(refused, DeviceError::InUse { .. }), "{refused}");
    assert_eq!(device.close().left, []);
    drop(bench.open());
}

/// It came before the new life was there, and belongs to it all the same.
#[test]
fn c16_an_error_in_the_middle_of_a_recovery_breaks_the_new_life() {
    let bench = Bench::of(|function| function.by_messages().with_interrupts(2));
    let device = bench.open();
    break_it(&device);
    // The last thing that a bring-up does.
    let hold = bench.function.hold_next(Call::Interrupts);
    thread::scope(|scope| {
        let recovery = scope.spawn(|| device.recover());
        hold.wait_entered();
        assert!(bench.function.fire(IrqIndex::Error, 0), "nobody listens");
        while bench.function.is_signalled(IrqIndex::Error, 0) {
            thread::yield_now();
        }
        hold.release();
        assert_eq!(recovery.join().unwrap().unwrap().number(), 2);
    });
    assert!(device.revocation().is_some());
    assert_eq!(device.broken(), Some(Cause::BusError));
}

/// One break is one event, and what the report says is what the ledger says.
#[test]
fn another_attempt_replaces_the_report_and_is_no_second_break() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.never_revoked();
    break_it(&device);
    assert_eq!(device.revocation().unwrap().verdict, Word::Quarantined);
    // The unmaps are answered after a while; nothing else is.
    for _ in 0..32 {
        device.recover().unwrap_err();
    }
    assert_eq!(device.ledger().totals().quarantined_mappings, 0);
    let report = device.revocation().unwrap();
    assert_eq!(report.verdict, Word::Revoked, "{report}");
    let mut breaks = 0;
    while let Some(event) = device.events().try_next() {
        breaks += u32::from(matches!(event, DeviceEvent::Broken { .. }));
    }
    assert_eq!(breaks, 1);
    drop(port);
}

/// A burst that cannot carry its port is no loop of system calls.
#[test]
fn a_carry_that_fails_is_tried_again_after_a_while_and_not_with_every_burst() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    break_it(&device);
    device.recover().unwrap();
    for _ in 0..2 {
        bench.function.fail_next_map(Errno::ENOSPC);
    }
    let before = bench.function.map_calls();
    for attempts in 1..=2 {
        for _ in 0..100 {
            assert_eq!(port.rx_burst(&mut []), 0);
        }
        assert_eq!(bench.function.map_calls() - before, attempts);
        bench.time.sleep(Duration::from_millis(10));
    }
    assert_eq!(port.rx_burst(&mut []), 0);
    assert_eq!(port.carried().times, 1);
    assert_eq!(bench.receive(0, 1, 60), 1);
    let mut frames = port.take_frames(1).unwrap();
    assert_eq!(port.rx_burst(&mut frames), 1);
}

/// Bursts both ways, while a reset is held up; what they moved, or that one of them waited.
fn bursts_under(hold: Hold, port: &mut Port) -> Result<[usize; 3], mpsc::RecvTimeoutError> {
    let mut frames = port.take_frames(2).unwrap();
    full(&mut frames);
    let (done, moved) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let first = port.rx_burst(&mut frames);
            let second = port.rx_burst(&mut frames);
            let sent = port.tx_burst(&mut frames);
            let _ = done.send([first, second, sent]);
        });
        // Not how fast it is: one that waits does so until the hold is gone.
        let moved = moved.recv_timeout(Duration::from_secs(20));
        hold.wait_entered();
        hold.release();
        moved
    })
}

#[test]
fn r11_a_burst_whose_carry_is_overtaken_by_a_break_does_not_wait_for_the_ladder() {
    for (way, fails) in scripted::WAYS.map(|way| [(way, 0), (way, 1)]).concat() {
        let bench = Bench::new();
        let device = Arc::new(bench.open());
        let mut port = Port::open(&device, &small()).unwrap();
        break_it(&device);
        device.recover().unwrap();
        let breaks = device.clone();
        bench.script.fail_starts(way, fails);
        bench.script.at_next_start(way, move || {
            assert!(breaks.break_now(Cause::User));
        });
        let hold = bench.function.hold(Call::Reset);
        let moved = bursts_under(hold, &mut port);
        assert_eq!(moved, Ok([0; 3]), "{way:?} {fails}");
        assert_eq!(port.carried().times, 0);
        // What was made by then is in nobody's way.
        assert!(device.revocation().is_some());
        device.recover().unwrap();
        bench.time.sleep(Duration::from_millis(10));
        let mut frames = port.take_frames(1).unwrap();
        assert_eq!(port.rx_burst(&mut frames), 0);
        assert_eq!(port.carried().times, 1, "{way:?} {fails}");
        assert_eq!(bench.receive(0, 1, 60), 1);
        assert_eq!(port.rx_burst(&mut frames), 1);
        drop((port, frames));
        let closed = Arc::into_inner(device).unwrap().close();
        assert_eq!((closed.left, closed.completions.outstanding()), (vec![], 0));
    }
}

#[test]
fn r11_a_burst_does_not_wait_for_the_ladder_of_a_queue_that_neither_starts_nor_stops() {
    for way in scripted::WAYS {
        let bench = Bench::new();
        let device = bench.open();
        let mut port = Port::open(&device, &small()).unwrap();
        break_it(&device);
        device.recover().unwrap();
        bench.script.fail_starts(way, 1);
        bench.script.stop(way, 0, Stop::Never);
        let hold = bench.function.hold(Call::Reset);
        assert_eq!(bursts_under(hold, &mut port), Ok([0; 3]), "{way:?}");
        let cause = device.broken();
        assert!(matches!(cause, Some(Cause::StopFailed { .. })), "{cause:?}");
        // A port that is not carried again gives back what it had.
        drop(port);
        let closed = device.close();
        assert_eq!((closed.left, closed.completions.outstanding()), (vec![], 0));
    }
}

#[test]
fn r11_a_burst_does_not_wait_for_a_queue_that_did_not_start_and_is_busy() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(1).unwrap();
    break_it(&device);
    device.recover().unwrap();
    bench.script.fail_starts(Way::Receive, 1);
    bench.script.stop(Way::Receive, 0, Stop::Busy(3));
    for _ in 0..3 {
        let now = bench.time.now();
        assert_eq!(port.rx_burst(&mut frames), 0);
        assert_eq!(bench.time.now(), now, "it slept");
        assert_eq!(port.carried().times, 0);
        bench.time.sleep(Duration::from_millis(10));
    }
    assert_eq!(port.rx_burst(&mut frames), 0);
    assert_eq!((port.carried().times, device.broken()), (1, None));
    // One that is never let go of is the ladder's, as with any destroy.
    break_it(&device);
    device.recover().unwrap();
    bench.script.fail_starts(Way::Receive, 1);
    bench.script.stop(Way::Receive, 0, Stop::Busy(u32::MAX));
    for _ in 0..200 {
        assert_eq!(port.rx_burst(&mut frames), 0);
        bench.time.sleep(Duration::from_millis(10));
    }
    let cause = device.broken();
    assert!(matches!(cause, Some(Cause::TimedOut { .. })), "{cause:?}");
    drop((port, frames));
    assert_eq!(device.close().left, []);
}
