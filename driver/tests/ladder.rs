//! The ladder over a scripted device: the order of what reaches the function, what each outcome is
//! a ground for, and that nobody waits for ever.
#![forbid(unsafe_code)]

mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use failstop::device::{Device, RecoverError};
use failstop::ladder::{Ground, Outcome, RevocationReport, Step, Word};
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop_dma::ledger::State;
use failstop_pci::clock::Clock;
use failstop_pci::config::Command;
use failstop_pci::testing::{Call, FakeFunction, Happened, Reading, ResetScript};
use failstop_pci::transport::{Kind, RegionIndex, ResetMethod, Strength, Unmapped};
use nix::errno::Errno;
use scripted::{Bench, Objects, PAYLOAD, RX, Software, Stop, Way, small};

/// The steps in the order in which the contract names them.
const STEPS: [Step; 6] = [
    Step::MarkBroken,
    Step::BusMasterOff,
    Step::Detached,
    Step::PendingDrained,
    Step::Reset,
    Step::Unmapped,
];
const MASTER: u16 = Command::BUS_MASTER.bits();

fn kernel(function: FakeFunction) -> FakeFunction {
    function.by_messages().with_kind(Kind::Container)
}

fn broken(device: &Device) -> RevocationReport {
    assert!(device.break_now(Cause::User));
    device.revocation().unwrap()
}

fn outcome(report: &RevocationReport, step: Step) -> Outcome {
    report.step(step).unwrap().outcome
}

fn note(report: &RevocationReport, step: Step) -> String {
    report.step(step).unwrap().note.clone().unwrap_or_default()
}

fn resets(log: &[Happened]) -> Vec<ResetMethod> {
    let method = |happened: &Happened| match happened {
        Happened::Reset(method) => Some(*method),
        _ => None,
    };
    log.iter().filter_map(method).collect()
}

fn words(log: &[Happened]) -> Vec<u16> {
    let word = |happened: &Happened| match happened {
        Happened::Command(word) => Some(*word),
        _ => None,
    };
    log.iter().filter_map(word).collect()
}

fn first(log: &[Happened], is: impl Fn(&Happened) -> bool) -> usize {
    log.iter().position(is).unwrap()
}

#[test]
fn r4_bus_master_off_precedes_the_reset_and_that_every_unmap() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let mapped = bench.function.mapped().len();
    let _before = bench.function.take_log();
    let report = broken(&device);
    let log = bench.function.log();

    let steps: Vec<Step> = report.steps.iter().map(|step| step.step).collect();
    assert_eq!(steps, STEPS);
    let off = first(
        &log,
        |h| matches!(h, Happened::Command(word) if word & MASTER == 0),
    );
    let expired = first(&log, |h| matches!(h, Happened::Expire(_)));
    let reset = first(&log, |h| matches!(h, Happened::Reset(_)));
    let unmap = first(&log, |h| matches!(h, Happened::Unmap { .. }));
    assert_eq!(off, 0, "{log:?}");
    assert!(off < expired && expired < reset && reset < unmap, "{log:?}");
    let unmaps = log.iter().filter(|h| matches!(h, Happened::Unmap { .. }));
    assert_eq!(unmaps.count(), mapped);
    drop(port);
}

#[test]
fn c7_no_mapping_is_removed_before_the_reset_returned() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let mapped = bench.function.mapped();
    let hold = bench.function.hold(Call::Reset);
    assert!(device.break_now(Cause::User));
    hold.wait_entered();
    assert_eq!(bench.function.mapped(), mapped);
    hold.release();
    assert_eq!(device.revocation().unwrap().verdict, Word::Revoked);
    assert_eq!(bench.function.mapped(), []);
    drop(port);
}

#[test]
fn r4_memory_is_released_after_its_unmap_returned() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let lines = device.ledger().lines().len();
    let hold = bench.function.hold(Call::Unmap);
    assert!(device.break_now(Cause::User));
    hold.wait_entered();
    let destroyed = thread::spawn(move || drop(port));
    assert_eq!(device.ledger().lines().len(), lines);
    hold.release();
    destroyed.join().unwrap();
    let report = device.revocation().unwrap();
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::StoppedAndUnmapped)
    );
    assert_eq!(device.ledger().lines(), []);
}

#[test]
fn c17_a_device_that_is_gone_is_never_written_a_reading_and_no_step_waits_for_it() {
    for reading in [Reading::AllOnes, Reading::Zero] {
        let bench = Bench::new();
        let device = bench.open();
        let port = Port::open(&device, &small()).unwrap();
        let _before = bench.function.take_log();
        let start = bench.time.now();
        bench.function.misread_config(reading, u64::MAX);
        let report = broken(&device);
        let log = bench.function.log();

        // Memory Space Enable and INTx Disable: the word that was chosen at open.
        assert!(words(&log).iter().all(|&word| word == 0x0402), "{log:x?}");
        assert_eq!(resets(&log), []);
        assert_eq!(outcome(&report, Step::BusMasterOff), Outcome::Failed);
        assert_eq!(outcome(&report, Step::PendingDrained), Outcome::Skipped);
        assert_eq!(outcome(&report, Step::Reset), Outcome::Skipped);
        assert!(
            bench.time.now() - start < Duration::from_millis(50),
            "{report}"
        );
        // The server's word that nothing is mapped is what memory goes on.
        assert_eq!(
            (report.verdict, report.ground),
            (Word::Revoked, Ground::Unmapped)
        );
        assert!(device.recover().is_err(), "recovered without a proven stop");
        drop(port);
    }
}

/// A function that is in the middle of a link reset answers a few milliseconds later.
#[test]
fn c47_a_function_that_does_not_answer_at_once_is_written_to_again_and_reset() {
    let bench = Bench::new();
    let device = bench.open();
    let _port = Port::open(&device, &small()).unwrap();
    bench.function.misread_config(Reading::AllOnes, 3);
    let report = broken(&device);
    assert_eq!(
        outcome(&report, Step::BusMasterOff),
        Outcome::Done,
        "{report}"
    );
    assert_eq!(outcome(&report, Step::Reset), Outcome::Done, "{report}");
    assert_eq!(report.ground, Ground::StoppedAndUnmapped);
}

#[test]
fn c47_the_known_word_is_written_again_at_the_end_and_on_return_bus_mastering_is_off() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let _before = bench.function.take_log();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    let hold = bench.function.hold(Call::Unmap);
    assert!(device.break_now(Cause::User));
    hold.wait_entered();
    // It comes back while the ladder unmaps, with what the platform left in the register.
    bench.function.read_config_again();
    hold.release();
    let report = device.revocation().unwrap();
    let log = bench.function.log();
    let last_unmap = log
        .iter()
        .rposition(|h| matches!(h, Happened::Unmap { .. }));
    let last_word = log
        .iter()
        .rposition(|h| matches!(h, Happened::Command(0x0402)));
    assert!(last_word > last_unmap, "{log:x?}");
    assert!(
        note(&report, Step::BusMasterOff).contains("off at the ladder's end"),
        "{report}"
    );
    assert!(!bench.function.is_master());
    drop(port);
}

/// Also when nobody recovers it, nor looks at it (the watch does, each second).
#[test]
fn c47_on_return_after_the_ladder_bus_mastering_goes_off() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    // Away: nothing that is written arrives.
    bench.function.ignore_config_writes();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    let report = broken(&device);
    assert_eq!(outcome(&report, Step::BusMasterOff), Outcome::Failed);
    assert!(bench.function.is_master());
    bench.function.take_config_writes();
    bench.function.read_config_again();
    let soon = std::time::Instant::now() + Duration::from_secs(60);
    while bench.function.is_master() {
        assert!(std::time::Instant::now() < soon, "it is master for good");
        thread::yield_now();
    }
    drop(port);
}

#[test]
fn c31_nothing_is_flushed_before_the_verdict_and_what_was_received_is_delivered() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(8).unwrap();
    assert_eq!(bench.receive(0, 2, 60), 2);
    let hold = bench.function.hold(Call::Reset);
    assert!(device.break_now(Cause::User));
    hold.wait_entered();

    assert_eq!(port.rx_burst(&mut frames[..1]), 1);
    assert_eq!(frames[0].len(), 60);
    let mut byte = [0];
    assert_eq!(frames[0].copy_to(&mut byte), 1);
    assert_eq!(byte, [PAYLOAD]);
    assert_eq!(port.rx_burst(&mut frames[1..2]), 1);
    for _ in 0..3 {
        assert_eq!(port.rx_burst(&mut frames[2..]), 0);
        let now = port.completions();
        assert_eq!(
            (now.success, now.flushed),
            (2, 0),
            "flushed before the verdict"
        );
    }
    hold.release();
    assert!(device.revocation().is_some());
    assert_eq!(port.rx_burst(&mut frames[2..]), 0);
    let ended = port.completions();
    assert_eq!(ended.outstanding(), 0);
    assert_eq!((ended.success, ended.flushed), (2, u64::from(RX - 1) - 2));
    assert_eq!(port.rx_burst(&mut frames[2..]), 0);
    assert_eq!(port.completions(), ended, "flushed twice");
}

#[test]
fn c31_a_done_bit_after_the_flush_is_no_second_completion() {
    // Nothing takes the ring away from this device: it stays mapped, and the device master.
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    let ring = bench.queue(Way::Receive, 0).unwrap().ring;
    bench.function.ignore_config_writes();
    for _ in 0..8 {
        bench
            .function
            .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    }
    bench
        .function
        .script_reset(ResetMethod::Server, ResetScript::Fails(Errno::EIO));
    let report = broken(&device);
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Quarantined, Ground::Nothing)
    );
    let mut frames = objects.pool.take_many(4).unwrap();
    assert_eq!(objects.rq.burst(&mut frames), 0);
    let ended = objects.rq.completions();
    assert_eq!((ended.flushed, ended.outstanding()), (7, 0));

    let done = 60u64 << 32 | 0x3;
    assert!(bench.function.dma_write(ring + 8, &done.to_le_bytes()));
    assert_eq!(objects.rq.burst(&mut frames), 0);
    assert_eq!(objects.rq.completions(), ended);
}

#[test]
fn c34_a_map_in_flight_at_the_break_unmaps_itself_and_counts_until_then() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let hold = bench.function.hold(Call::Map);
    thread::scope(|scope| {
        let late = scope.spawn(|| pd.register(4, 64).map(drop));
        hold.wait_entered();
        assert!(device.break_now(Cause::User));
        bench.wait_logged(|h| matches!(h, Happened::Unmap { .. }));
        let verdict = scope.spawn(|| device.revocation().unwrap());
        bench.pass_until(|| verdict.is_finished());
        let report = verdict.join().unwrap();
        assert_eq!(
            outcome(&report, Step::Unmapped),
            Outcome::TimedOut,
            "{report}"
        );
        let lines = device.ledger().lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!(lines[0].state, State::Mapping);
        hold.release();
        assert!(late.join().unwrap().is_err(), "mapped on a broken device");
    });
    assert_eq!(bench.function.mapped(), []);
    assert_eq!(device.ledger().lines(), []);
    drop(port);
}

#[test]
fn c35_a_reset_that_hangs_holds_up_nobody_and_no_second_one_is_issued() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let _before = bench.function.take_log();
    let (entered, time) = (Arc::new(AtomicUsize::new(0)), bench.time.clone());
    let entries = entered.clone();
    let hold = bench.function.hold_and(Call::Reset, move || {
        entries.fetch_add(1, Ordering::SeqCst);
        time.sleep(Duration::from_secs(60));
    });
    let report = broken(&device);
    assert_eq!(outcome(&report, Step::Reset), Outcome::TimedOut);
    assert_eq!(outcome(&report, Step::Unmapped), Outcome::Done);
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::Unmapped)
    );
    // Nobody waits, and nothing is left.
    drop(port);
    assert_eq!(device.ledger().lines(), []);

    let refused = device.recover();
    assert!(
        matches!(refused, Err(RecoverError::Outstanding { .. })),
        "{refused:?}"
    );
    assert_eq!(
        entered.load(Ordering::SeqCst),
        1,
        "a second reset was issued"
    );
    hold.release();
    bench.wait_logged(|h| matches!(h, Happened::Reset(_)));
    // It is over: now there can be another.
    while device.recover().is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(device.generation().number(), 2);
}

#[test]
fn c36_where_a_hot_reset_would_touch_a_sibling_the_verdict_rests_on_the_unmaps() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.software(Software::NoAnswer);
    for method in [ResetMethod::Flr, ResetMethod::Bus] {
        bench
            .function
            .script_reset(method, ResetScript::ResetsNothing);
    }
    // Not scripted: the transport refuses the hot reset, as it does for a sibling's sake.
    let _before = bench.function.take_log();
    let report = broken(&device);
    assert_eq!(
        resets(&bench.function.log()),
        [ResetMethod::Flr, ResetMethod::Bus]
    );
    assert_eq!(outcome(&report, Step::Reset), Outcome::NotProven);
    assert!(note(&report, Step::Reset).contains("hot: "), "{report}");
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::Unmapped)
    );
    drop(port);
}

#[test]
fn r4_5_a_hot_reset_comes_after_the_kernels_methods() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench
        .function
        .script_reset(ResetMethod::Flr, ResetScript::Fails(Errno::EIO));
    bench
        .function
        .script_reset(ResetMethod::Bus, ResetScript::ResetsNothing);
    bench
        .function
        .script_reset(ResetMethod::Hot, ResetScript::Works);
    let _before = bench.function.take_log();
    let report = broken(&device);
    let methods = [ResetMethod::Flr, ResetMethod::Bus, ResetMethod::Hot];
    assert_eq!(resets(&bench.function.log()), methods);
    assert_eq!(report.reset_method, Some(ResetMethod::Hot));
    assert_eq!(report.ground, Ground::StoppedAndUnmapped);
    drop(port);
}

#[test]
fn a_reset_that_puts_bus_mastering_back_is_not_believed() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench
        .function
        .script_reset(ResetMethod::Flr, ResetScript::RestoresMaster);
    let report = broken(&device);
    assert_eq!(report.reset_method, Some(ResetMethod::Bus), "{report}");
    assert!(!bench.function.is_master(), "{report}");
    drop(port);
}

#[test]
fn a_reset_that_cannot_begin_is_tried_again_but_not_after_a_removal_request() {
    for (cause, times) in [(Cause::User, 4), (Cause::Removal, 1)] {
        let bench = Bench::new();
        let device = bench.open();
        let port = Port::open(&device, &small()).unwrap();
        let _before = bench.function.take_log();
        for _ in 0..3 {
            bench
                .function
                .script_next_reset(ResetScript::Fails(Errno::EAGAIN));
        }
        assert!(device.break_now(cause.clone()));
        let report = device.revocation().unwrap();
        assert_eq!(resets(&bench.function.log()).len(), times, "{report}");
        let proven = report.reset_method == Some(ResetMethod::Server);
        assert_eq!(proven, cause == Cause::User, "{report}");
        assert_eq!(report.verdict, Word::Revoked);
        drop(port);
    }
}

#[test]
fn r1_a_stop_is_no_ground_where_another_function_shares_the_address_space() {
    for shared in [false, true] {
        let bench = Bench::of(kernel);
        let device = bench.open();
        let port = Port::open(&device, &small()).unwrap();
        bench.function.set_shares_space(shared);
        // What is unmapped counts for nothing without the stop.
        bench.function.set_strength(Strength::None);
        let report = broken(&device);
        assert_eq!(outcome(&report, Step::Reset), Outcome::Done);
        let verdict = if shared {
            Word::Quarantined
        } else {
            Word::Revoked
        };
        assert_eq!(report.verdict, verdict, "{report}");
        drop(port);
        let totals = device.ledger().totals();
        assert_eq!(totals.live_mappings, 0);
        assert_eq!(totals.quarantined_mappings, if shared { 3 } else { 0 });
    }
}

#[test]
fn bus_mastering_that_was_on_its_way_while_the_device_broke_is_off_at_the_end() {
    let bench = Bench::new();
    let device = bench.open();
    // The write of the first queue's bus mastering is the next one.
    let hold = bench.function.hold_next(Call::Write(RegionIndex::Config));
    thread::scope(|scope| {
        let opening = scope.spawn(|| Port::open(&device, &small()).map(drop));
        hold.wait_entered();
        assert!(device.break_now(Cause::User));
        // The ladder's own first write waits for nobody.
        bench.wait_logged(|h| matches!(h, Happened::Expire(_)));
        hold.release();
        assert!(
            opening.join().unwrap().is_err(),
            "a queue on a broken device"
        );
    });
    let report = device.revocation().unwrap();
    assert!(!bench.function.is_master(), "{report}");
    assert_eq!(report.verdict, Word::Revoked);
    assert_eq!(outcome(&report, Step::Reset), Outcome::Done, "{report}");
    assert_eq!(device.ledger().lines(), []);
}

#[test]
fn a_software_reset_that_panics_is_not_proven_and_the_ladder_goes_on() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.software(Software::Panics);
    for method in [ResetMethod::Flr, ResetMethod::Bus] {
        bench
            .function
            .script_reset(method, ResetScript::ResetsNothing);
    }
    let report = broken(&device);
    assert_eq!(outcome(&report, Step::Reset), Outcome::NotProven);
    assert_eq!(outcome(&report, Step::Unmapped), Outcome::Done);
    assert_eq!(
        (report.verdict, report.ground),
        (Word::Revoked, Ground::Unmapped)
    );
    drop(port);
}

#[test]
fn a_panic_of_the_ladder_itself_ends_as_quarantined_and_nobody_waits_for_ever() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let mapped = bench.function.mapped();
    bench.time.panic_on("ladder");
    assert!(device.break_now(Cause::User));
    // Each of these waits for the verdict.
    assert_eq!(device.revocation(), None);
    drop(port);
    assert_eq!(bench.function.mapped(), mapped);
    let totals = device.ledger().totals();
    assert_eq!((totals.live_mappings, totals.quarantined_mappings), (0, 3));
    let closed = device.close();
    assert_eq!(closed.completions.outstanding(), 0);
    assert_eq!(closed.left.len(), 3);
}

#[test]
fn r3_a_software_reset_alone_releases_nothing_without_an_iommu() {
    let bench = Bench::of(kernel);
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.function.set_strength(Strength::None);
    for method in [ResetMethod::Flr, ResetMethod::Bus] {
        bench
            .function
            .script_reset(method, ResetScript::ResetsNothing);
    }
    let report = broken(&device);
    assert_eq!(report.reset_method, Some(ResetMethod::Software));
    assert_eq!(report.verdict, Word::Quarantined, "{report}");
    drop(port);
    assert_eq!(device.ledger().totals().quarantined_mappings, 3);
    assert!(device.recover().is_err());
}

#[test]
fn c5_a_failed_unmap_keeps_record_and_memory_and_breaks_the_device() {
    let bench = Bench::new();
    let device = bench.open();
    let pd = device.alloc_pd().unwrap();
    let (mr, pool) = pd.register(8, 64).unwrap();
    let mapped = bench.function.mapped();
    // The owner's attempt and the ladder's.
    for _ in 0..2 {
        bench
            .function
            .answer_next_unmap(Unmapped::Failed(Errno::EIO));
    }
    drop(pool);
    mr.destroy();
    assert!(matches!(device.broken(), Some(Cause::UnmapFailed { .. })));
    let report = device.revocation().unwrap();
    assert_eq!(report.verdict, Word::Quarantined, "{report}");
    assert_eq!(outcome(&report, Step::Unmapped), Outcome::Failed);
    let lines = device.ledger().lines();
    let ranges: Vec<_> = lines.iter().map(|line| (line.iova.0, line.len)).collect();
    assert_eq!(ranges, mapped);
    assert_eq!(lines[0].state, State::Quarantined);
    assert_eq!(bench.function.mapped(), mapped);
}

#[test]
fn c6_an_unmap_of_another_size_is_no_success() {
    let bench = Bench::new();
    let device = bench.open();
    let pd = device.alloc_pd().unwrap();
    let (mr, pool) = pd.register(8, 64).unwrap();
    bench
        .function
        .answer_next_unmap(Unmapped::Partial { bytes: 0 });
    bench
        .function
        .answer_next_unmap(Unmapped::Partial { bytes: 0 });
    drop(pool);
    mr.destroy();
    assert!(matches!(device.broken(), Some(Cause::UnmapFailed { .. })));
    assert_eq!(device.revocation().unwrap().verdict, Word::Quarantined);
    let lines = device.ledger().lines();
    assert_eq!((lines.len(), lines[0].state), (1, State::Quarantined));
}

#[test]
fn c30_a_destroy_while_the_ladder_runs_ends_with_it() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    let hold = bench.function.hold(Call::Reset);
    assert!(device.break_now(Cause::User));
    hold.wait_entered();
    let destroying = thread::spawn(move || drop(port));
    hold.release();
    destroying.join().unwrap();
    let closed = device.close();
    assert_eq!(closed.left, []);
    assert_eq!(
        (closed.completions.outstanding(), closed.completions.flushed),
        (0, 7)
    );
}

#[test]
fn c40_a_break_wakes_whoever_sleeps_and_whoever_goes_to_sleep_then() {
    let bench = Bench::of(|function| function.by_messages().with_interrupts(1));
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| port.rq().wait(None).unwrap());
        thread::sleep(Duration::from_millis(5));
        assert!(device.break_now(Cause::User));
        assert!(!sleeper.join().unwrap(), "a frame that nobody sent");
    });
    assert!(!port.rq().wait(None).unwrap());
    assert!(device.revocation().is_some());
    assert!(!port.rq().wait(None).unwrap());
}

#[test]
fn c33_a_doorbell_after_the_ladder_rings_nothing() {
    for messages in [false, true] {
        let make = |function: FakeFunction| {
            if messages {
                function.by_messages()
            } else {
                function
            }
        };
        let bench = Bench::of(make);
        let device = bench.open();
        let mut port = Port::open(&device, &small()).unwrap();
        let mut frames = port.take_frames(4).unwrap();
        assert_eq!(bench.receive(0, 4, 60), 4);
        let _report = broken(&device);
        let before = bench.function.register(0x1014);
        assert_eq!(port.rx_burst(&mut frames), 4);
        assert_eq!(bench.function.register(0x1014), before);
        assert!(!device.link().up);
    }
}

#[test]
fn c1_a_queue_that_does_not_stop_frees_nothing_before_the_ladder() {
    for stop in [Stop::Never, Stop::AllOnes, Stop::Zero] {
        let bench = Bench::new();
        let device = bench.open();
        let objects = Objects::new(&device, 0).unwrap();
        bench.script.stop(Way::Receive, 0, stop);
        let lines = device.ledger().lines().len();
        let hold = bench.function.hold(Call::Reset);
        let Objects { rq, .. } = objects;
        let destroying = thread::spawn(move || rq.destroy());
        hold.wait_entered();
        assert_eq!(device.ledger().lines().len(), lines, "{stop:?}");
        hold.release();
        destroying.join().unwrap();
        let stuck = matches!(device.broken(), Some(Cause::StopFailed { .. }));
        assert_eq!(stuck, stop == Stop::Never, "{:?}", device.broken());
        assert_eq!(device.revocation().unwrap().verdict, Word::Revoked);
        assert_eq!(device.ledger().lines(), []);
    }
}

#[test]
fn a_slow_queue_stops_without_a_ladder() {
    let bench = Bench::new();
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.script.stop(Way::Receive, 0, Stop::Slow(20));
    bench.script.stop(Way::Send, 0, Stop::Slow(99));
    drop(port);
    assert_eq!(device.broken(), None);
    assert_eq!(device.ledger().lines(), []);
}
