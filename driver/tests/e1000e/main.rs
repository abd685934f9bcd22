//! How the 82574's queues stop, and what goes on beside them.
#![forbid(unsafe_code)]

mod model;

use failstop::device::RecoverError;
use failstop::device::{Device, Options};
use failstop::e1000e::bits::InterruptCause;
use failstop::e1000e::registers as reg;
use failstop::intel::bits::{Control, ReceiveControl, Status, TransmitControl};
use failstop::ladder::{Ground, Outcome, RevocationReport, Step, Word};
use failstop::objects::CreateError;
use failstop::port::{Parts, Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop_pci::clock::ManualClock;
use failstop_pci::testing::ResetScript;
use failstop_pci::transport::{ResetMethod, Strength, Transport};
use std::sync::Arc;
use std::time::Duration;

use model::{CANARY_PLANTED, Model, Written};

fn open(model: &Arc<Model>) -> Device {
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    Device::open_with(model.clone(), &Config::default(), options).unwrap()
}

fn parts(device: &Device) -> Parts {
    Port::open(device, &PortConfig::default())
        .unwrap()
        .into_parts()
}

fn receives(model: &Model) -> bool {
    model.register(reg::RCTL) & ReceiveControl::RXEN.bits() != 0
}

fn sends(model: &Model) -> bool {
    model.register(reg::TCTL) & TransmitControl::TXEN.bits() != 0
}

/// The steps of the stop among what was written.
fn steps(written: &[Written]) -> Vec<&'static str> {
    let disable = Control::GIO_MASTER_DISABLE.bits();
    let mut steps = Vec::new();
    for write in written {
        let step = match *write {
            Written(at, value) if at == reg::RCTL.offset() => {
                match value & ReceiveControl::RXEN.bits() {
                    0 => continue,
                    _ => "receiver on",
                }
            }
            Written(at, value) if at == reg::CTRL.offset() => {
                match (value & Control::RST.bits(), value & disable) {
                    (0, 0) => "master on",
                    (0, _) => "master off",
                    _ => "reset",
                }
            }
            Written(at, _) if at == reg::RXCSUM.offset() => "canary",
            _ => continue,
        };
        if steps.last() != Some(&step) {
            steps.push(step);
        }
    }
    steps
}

/// What the ladder did, once it is through.
fn revocation(device: &Device) -> RevocationReport {
    device.revocation().expect("no ladder ran")
}

/// The server's reset was proven, and nothing stays mapped.
#[track_caller]
fn assert_revoked_by_the_server(device: &Device) {
    let expected = (
        Some(ResetMethod::Server),
        Ground::StoppedAndUnmapped,
        Word::Revoked,
    );
    assert_eq!(grounds(&revocation(device)), expected);
}

/// The reset that was proven, if any, what the verdict rests on, and the verdict.
fn grounds(report: &RevocationReport) -> (Option<ResetMethod>, Ground, Word) {
    (report.reset_method, report.ground, report.verdict)
}

/// The step's outcome, and what the report says of it.
fn reset(report: &RevocationReport) -> (Outcome, &str) {
    let step = report.step(Step::Reset).unwrap();
    (step.outcome, step.note.as_deref().unwrap_or_default())
}

/// Breaks a device behind the kernel with a port in use, where those resets return success and
/// reset nothing.
fn broken_where(resets_nothing: &[ResetMethod]) -> (Arc<Model>, Device, Port) {
    let model = Model::of_the_kernel();
    let device = open(&model);
    let port = Port::open(&device, &PortConfig::default()).unwrap();
    for method in resets_nothing {
        model.script_reset(*method, ResetScript::ResetsNothing);
    }
    (model, device, port)
}

#[test]
fn a_port_comes_and_goes_without_a_trace() {
    let model = Model::new();
    let device = open(&model);
    assert_eq!((device.provider(), device.part()), ("e1000e", "82574"));
    drop(parts(&device));
    let report = device.close();
    assert_eq!(report.broken, None);
    assert_eq!(report.left, []);
}

#[test]
fn a_queue_is_stopped_by_handshake_reset_and_handshake() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    drop(parts.sq);
    model.take_written();
    parts.rq.destroy();
    assert_eq!(
        steps(&model.take_written()),
        [
            "master off",
            "canary",
            "reset",
            "master off",
            "canary",
            "master on"
        ]
    );
    assert!(!receives(&model) && !sends(&model));
    assert_eq!(model.register(reg::RDBAL), 0, "the ring's address stays");
    assert_eq!(device.broken(), None);
}

#[test]
fn the_other_queue_goes_on_where_it_was() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    let ring = model.register(reg::TDBAL);
    model.set(reg::TDH, 7);
    model.set(reg::TDT, 9);
    parts.rq.destroy();
    assert!(sends(&model) && !receives(&model));
    assert_eq!(model.register(reg::TDBAL), ring);
    assert_eq!(model.register(reg::TDLEN), 512 * 16);
    assert_eq!((model.register(reg::TDH), model.register(reg::TDT)), (7, 9));
    assert_eq!(device.broken(), None);
}

#[test]
fn a_doorbell_that_the_reset_swallowed_is_rung_again() {
    let model = Model::new();
    let device = open(&model);
    let mut parts = parts(&device);
    let posted = model.register(reg::RDT);
    assert_eq!(posted, 511);
    parts.sq.destroy();
    // As if it had been rung between the reading of the tail and the reset.
    model.set(reg::RDT, 0);
    let mut frames = parts.pool.take_many(1).unwrap();
    assert_eq!(parts.rq.burst(&mut frames), 0);
    assert_eq!(model.register(reg::RDT), posted);
    // And once only.
    model.set(reg::RDT, 0);
    assert_eq!(parts.rq.burst(&mut frames), 0);
    assert_eq!(model.register(reg::RDT), 0);
}

#[test]
fn a_sleeper_beside_the_stopped_queue_is_woken_to_ring_again() {
    let model = Model::with_vectors(1);
    let device = open(&model);
    let parts = parts(&device);
    model.take_written();
    parts.sq.destroy();
    let cause = InterruptCause::RXQ0.bits();
    let written = model.take_written();
    let armed = written.contains(&Written(reg::IMS.offset(), cause));
    let fired = written.contains(&Written(reg::ICS.offset(), cause));
    assert!(armed && fired, "{written:?}");
    assert_eq!(model.register(reg::IVAR), 0x8);
}

#[test]
fn requests_that_stay_pending_until_the_reset_stop_nothing() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    drop(parts.sq);
    // As with the link down on siblings.
    model.keep_master_until_resets(1);
    parts.rq.destroy();
    assert_eq!(device.broken(), None);
    drop((parts.pool, parts.mr, parts.rx_cq, parts.tx_cq, parts.pd));
    assert_eq!(device.close().left, []);
}

/// What is under way for the queue that goes on may be lost in the reset: its ring would wait for
/// ever for a descriptor that the head has passed.
#[test]
fn requests_that_stay_pending_beside_another_queue_break_the_device() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    model.keep_master_until_resets(1);
    parts.rq.destroy();
    assert!(matches!(device.broken(), Some(Cause::StopFailed { .. })));
    assert_revoked_by_the_server(&device);
    drop((
        parts.sq,
        parts.pool,
        parts.mr,
        parts.rx_cq,
        parts.tx_cq,
        parts.pd,
    ));
    assert_eq!(device.close().left, []);
}

#[test]
fn a_status_that_stays_set_after_one_reset_is_reset_twice() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    drop(parts.sq);
    let before = model.resets();
    model.keep_master_until_resets(2);
    parts.rq.destroy();
    assert_eq!(model.resets() - before, 2);
    assert_eq!(device.broken(), None);
}

#[test]
fn a_device_that_never_lets_go_of_the_bus_is_broken() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    model.keep_master_until_resets(u32::MAX);
    parts.rq.destroy();
    assert!(
        matches!(device.broken(), Some(Cause::StopFailed { .. })),
        "{:?}",
        device.broken()
    );
    assert_revoked_by_the_server(&device);
}

#[test]
fn a_software_reset_that_resets_nothing_stops_nothing() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    model.ignore_resets();
    parts.rq.destroy();
    assert!(
        matches!(device.broken(), Some(Cause::StopFailed { .. })),
        "{:?}",
        device.broken()
    );
    assert_revoked_by_the_server(&device);
}

#[test]
fn c32_a_status_of_zero_is_no_answer() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    model.answer(reg::STATUS, 0);
    parts.rq.destroy();
    assert!(
        matches!(device.broken(), Some(Cause::Gone { .. })),
        "{:?}",
        device.broken()
    );
    assert_revoked_by_the_server(&device);
}

#[test]
fn c43_a_pm_reset_that_resets_nothing_is_not_believed_and_the_bus_reset_is_the_ground() {
    let (model, device, port) = broken_where(&[ResetMethod::Pm]);
    let ring = model.register(reg::RDBAL);
    assert!(device.break_now(Cause::User));
    let report = revocation(&device);
    assert_eq!(
        grounds(&report),
        (
            Some(ResetMethod::Bus),
            Ground::StoppedAndUnmapped,
            Word::Revoked
        )
    );
    let (outcome, note) = reset(&report);
    assert_eq!(outcome, Outcome::Done);
    assert!(
        note.starts_with("pm: returned success and is not believed")
            && note.contains("nothing was reset"),
        "{note}"
    );
    assert_eq!(
        model.asked_resets()[1..],
        [ResetMethod::Pm, ResetMethod::Bus]
    );
    assert_ne!(ring, 0);
    assert_eq!(model.register(reg::RDBAL), 0, "the bus reset left the ring");
    drop(port);
    device.recover().unwrap();
}

#[test]
fn c43_a_reset_that_resets_nothing_leaves_every_register_as_it_was() {
    let (model, device, port) = broken_where(&[ResetMethod::Pm]);
    let registers = || [model.register(reg::RDBAL), model.register(reg::RXCSUM)];
    let before = registers();
    model.reset_by(ResetMethod::Pm).unwrap();
    assert_eq!(registers(), before);
    model.reset_by(ResetMethod::Bus).unwrap();
    assert_ne!(registers(), before);
    drop((port, device));
}

/// Its own reset forgets every ring, which is no ground by itself, and enough to begin again where
/// every mapping is gone.
#[test]
fn c43_where_no_reset_of_the_kernels_resets_the_verdict_rests_on_the_iommu() {
    let (_model, device, port) = broken_where(&[ResetMethod::Pm, ResetMethod::Bus]);
    assert!(device.break_now(Cause::User));
    let report = revocation(&device);
    assert_eq!(
        grounds(&report),
        (Some(ResetMethod::Software), Ground::Unmapped, Word::Revoked)
    );
    let (outcome, note) = reset(&report);
    assert_eq!(outcome, Outcome::NotProven);
    assert!(
        note.contains("pm: returned success and is not believed")
            && note.contains("bus: returned success and is not believed"),
        "{note}"
    );
    assert_eq!(
        report.step(Step::BusMasterOff).unwrap().outcome,
        Outcome::Done
    );
    drop(port);
    assert_eq!(device.ledger().lines(), []);
    device.recover().unwrap();
}

#[test]
fn c43_where_nothing_resets_the_iommu_is_the_ground_and_no_life_follows() {
    let (model, device, port) = broken_where(&[ResetMethod::Pm, ResetMethod::Bus]);
    model.ignore_resets();
    assert!(device.break_now(Cause::User));
    let report = revocation(&device);
    assert_eq!(grounds(&report), (None, Ground::Unmapped, Word::Revoked));
    assert_eq!(reset(&report).0, Outcome::NotProven);
    drop(port);
    assert_eq!(device.ledger().lines(), []);
    let refused = device.recover().unwrap_err();
    assert!(
        matches!(refused, RecoverError::NotStopped { .. }),
        "{refused}"
    );
}

#[test]
fn c43_where_nothing_resets_and_nothing_enforces_nothing_is_released() {
    let (model, device, port) = broken_where(&[ResetMethod::Pm, ResetMethod::Bus]);
    model.set_strength(Strength::None);
    assert!(device.break_now(Cause::User));
    let report = revocation(&device);
    assert_eq!(
        grounds(&report),
        (
            Some(ResetMethod::Software),
            Ground::Nothing,
            Word::Quarantined
        )
    );
    assert_eq!(report.released_bytes, 0);
    drop(port);
    assert_ne!(device.ledger().lines(), []);
}

/// The resets that stop a queue are the driver's own, whenever the watch looks.
#[test]
fn c18_a_stop_that_resets_the_device_is_nobody_elses_reset() {
    let model = Model::new();
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        look: Some(Duration::from_micros(1)),
        ..Options::default()
    };
    let device = Device::open_with(model.clone(), &Config::default(), options).unwrap();
    for _ in 0..50 {
        drop(parts(&device));
        std::thread::sleep(Duration::from_micros(100));
    }
    assert_eq!(device.broken(), None);
}

#[test]
fn c43_the_canary_is_planted_again_after_every_stop() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    parts.rq.destroy();
    assert_eq!(model.register(reg::RXCSUM), CANARY_PLANTED);
    parts.sq.destroy();
    assert_eq!(model.register(reg::RXCSUM), CANARY_PLANTED);
}

#[test]
fn with_the_link_down_nobody_waits_for_what_cannot_be_sent() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    model.set_link(false);
    model.set(reg::TDT, 9);
    assert!(!device.link().up);
    drop(parts);
    assert_eq!(device.broken(), None);
    assert_eq!(device.close().left, []);
}

#[test]
fn long_packets_need_buffers_for_the_longest_that_may_come() {
    let model = Model::new();
    let config = Config {
        longest_frame: 9000,
        ..Config::default()
    };
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    let device = Device::open_with(model.clone(), &config, options).unwrap();
    assert_eq!(device.least_frame_size(), 16 * 1024);
    let frames = |frame_size| PortConfig {
        frame_size,
        rx_entries: 64,
        tx_entries: 64,
        spare_frames: 8,
    };
    assert!(matches!(
        Port::open(&device, &frames(10_240)),
        Err(CreateError::FrameSize { .. })
    ));
    let port = Port::open(&device, &frames(device.least_frame_size())).unwrap();
    let control = model.register(reg::RCTL);
    assert_eq!(control & 0x7A03_0000, 0x0201_0000, "buffer size");
    assert_eq!(control & ReceiveControl::LPE.bits(), 0x20);
    drop(port);
}

#[test]
fn a_reading_while_stopped_shows_the_forced_duplex_mode() {
    let model = Model::new();
    let device = open(&model);
    let parts = parts(&device);
    // Half duplex, as a hub's: the bit is there only because the stop forces it.
    model.set_half_duplex();
    drop(parts);
    assert_eq!(device.broken(), None);
    assert!(!device.link().full_duplex);
    let control = Control::from_bits_retain(model.register(reg::CTRL));
    assert!(!control.contains(Control::FRCDPLX));
    assert!(!Status::from_bits_retain(model.status()).contains(Status::FD));
}
