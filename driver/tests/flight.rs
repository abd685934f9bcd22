//! What a revocation report tells of the time before it.
#![forbid(unsafe_code)]

mod scripted;

use failstop::flight::{Control, EVENTS, FlightEvent, ThreadKind};
use failstop::ladder::RevocationReport;
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop_pci::testing::ResetScript;
use failstop_pci::transport::ResetMethod;
use nix::errno::Errno;
use scripted::{Bench, Objects, Stop, Way, small};

/// Looks for events in this order, and returns each.
fn find<'a>(report: &'a RevocationReport, wanted: &[(Control, &str)]) -> Vec<&'a FlightEvent> {
    let mut events = report.flight.iter();
    let mut find = |(kind, text): &(Control, &str)| {
        let found = events.find(|event| event.event == *kind && event.text.contains(text));
        found.unwrap_or_else(|| panic!("no {kind:?} with {text:?} in its place:\n{report}"))
    };
    wanted.iter().map(&mut find).collect()
}

#[test]
fn a_report_tells_the_control_events_up_to_its_verdict() {
    let bench = Bench::new();
    bench
        .function
        .set_reset_methods(&[ResetMethod::Flr, ResetMethod::Bus]);
    let device = bench.open();
    let objects = Objects::new(&device, 1).unwrap();
    bench
        .function
        .script_reset(ResetMethod::Flr, ResetScript::Fails(Errno::EIO));
    bench.script.stop(Way::Receive, 1, Stop::Never);

    objects.rq.destroy();

    let report = device.revocation().unwrap();
    let found = find(
        &report,
        &[
            (Control::Reset, "flr at open: proven"),
            (Control::State, "opened"),
            (Control::Command, "start receive queue 1: 8 descriptors"),
            (Control::Config, "bus mastering reads on"),
            (
                Control::Command,
                "stop receive queue 1: register 0x1040 still reads",
            ),
            (Control::State, "to be broken: a queue did not stop"),
            (Control::State, "broken, generation 1: a queue did not stop"),
            (Control::Step, "bus_master_off done"),
            (Control::Reset, "flr: issued"),
            (Control::Reset, "Input/output error"),
            (Control::Reset, "bus: issued"),
            (Control::Reset, "bus: proven"),
            (Control::Step, "reset done"),
            (Control::Step, "unmapped done"),
            (Control::State, "revoked: the function is stopped"),
        ],
    );
    assert_eq!(found[0].thread, ThreadKind::Caller);
    assert_eq!(found[8].thread, ThreadKind::Hand);
    assert_eq!(found[14].thread, ThreadKind::Ladder);
    // On the hand's thread, beside the ladder's.
    find(
        &report,
        &[(Control::Config, "reads without bus mastering (attempt 1)")],
    );
    assert_eq!(report.flight_missed, 0);
}

#[test]
fn a_report_tells_people_the_last_events_and_machines_all() {
    let device = Bench::new().open();
    assert!(device.break_now(Cause::User));
    let report = device.revocation().unwrap();
    let text = report.to_string();
    let last = report.flight.last().unwrap().to_string();
    assert!(
        text.contains("since it was opened") && text.contains(&last),
        "{text}"
    );
    let json = serde_json::to_value(&report).unwrap();
    let events = json["flight"].as_array().unwrap();
    assert_eq!(events.len(), report.flight.len());
    let first = &events[0];
    assert_eq!(
        (&first["thread"], &first["event"]),
        (&"caller".into(), &"reset".into())
    );
    assert!(first["us"].is_u64() && first["text"].is_string(), "{first}");
    assert_eq!(json["flight_missed"], 0);
}

#[test]
fn a_report_of_a_later_life_has_the_last_64_events_its_recovery_among_them() {
    let bench = Bench::new();
    let device = bench.open();
    for _ in 0..8 {
        drop(Port::open(&device, &small()).unwrap());
    }
    assert!(device.break_now(Cause::User));
    device.recover().unwrap();
    assert!(device.break_now(Cause::User));
    let report = device.revocation().unwrap();
    assert_eq!(report.flight.len(), EVENTS);
    find(
        &report,
        &[
            (Control::State, "revoked"),
            (Control::Recovery, "from generation 1, asked for"),
            (Control::Recovery, "generation 2 began"),
            (Control::State, "broken, generation 2: it was asked for"),
            (Control::State, "revoked"),
        ],
    );
}

#[test]
fn a_map_that_fails_and_why_is_among_the_events() {
    let bench = Bench::new();
    let device = bench.open();
    let pd = device.alloc_pd().unwrap();
    bench.function.fail_next_map(Errno::ENOSPC);
    pd.register(8, 64).unwrap_err();
    assert!(device.break_now(Cause::User));
    let report = device.revocation().unwrap();
    find(
        &report,
        &[
            (Control::Mapping, "not mapped: MR"),
            (Control::State, "broken"),
        ],
    );
}
