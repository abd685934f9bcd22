//! Several queue pairs, and what is received spread over them: on a scripted device with two, and the
//! registers of an 82576.
#![forbid(unsafe_code)]

mod fake_82576;
mod scripted;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use failstop::device::{Device, DeviceError, Options};
use failstop::igb::registers as reg;
use failstop::objects::CreateError;
use failstop::port::Port;
use failstop::provider::{Config, ProviderError};
use failstop::queues::lifecycle::Cause;
use failstop::rss::{HashTypes, MICROSOFT_KEY, Rss, RssError, TABLE_ENTRIES, Table};
use failstop_pci::clock::ManualClock;
use failstop_pci::testing::{Call, FakeFunction, limits_39_bits};
use failstop_pci::transport::{IrqIndex, RegionIndex};
use scripted::{Bench, Objects, QUEUES, Stop, Way, small};

/// The next access of its registers that does not return.
const NEXT_WRITE: Call = Call::Write(RegionIndex::Bar(0));
/// Longer than any of this takes, on any machine.
const SOON: Duration = Duration::from_secs(60);

fn hashing(types: HashTypes) -> Rss {
    Rss {
        types,
        ..Rss::default()
    }
}

fn spread(bench: &Bench) -> Device {
    bench.try_open_with(Some(Rss::default())).unwrap()
}

fn all_to(queue: u8) -> Table {
    Table([queue; TABLE_ENTRIES])
}

fn table(bench: &Bench) -> Table {
    *bench.script.tables().last().unwrap()
}

#[test]
fn ports_share_what_is_received() {
    let bench = Bench::new();
    let device = spread(&bench);
    let ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    assert_eq!(ports.iter().map(Port::number).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(table(&bench), Table::even(2));
    drop(ports);
    assert_eq!(bench.script.lost(), [""; 0]);
    assert_eq!(device.close().left, []);
}

#[test]
fn a_queue_leaves_the_table_before_it_is_stopped() {
    let bench = Bench::new();
    let device = spread(&bench);
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    drop(ports.pop());
    assert_eq!(bench.queue(Way::Receive, 1), None, "it does not run");
    assert_eq!(table(&bench), all_to(0));
    assert_eq!(bench.script.lost(), [""; 0]);
    drop(ports);
    assert_eq!(device.close().broken, None);
}

#[test]
fn the_last_queue_that_a_table_names_leaves_its_flows_to_those_that_run() {
    let bench = Bench::new();
    let rss = Rss {
        table: Some(all_to(1)),
        ..Rss::default()
    };
    let device = bench.try_open_with(Some(rss)).unwrap();
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    assert_eq!(table(&bench), all_to(1));
    drop(ports.pop());
    assert_eq!(table(&bench), all_to(0));
    assert_eq!(bench.script.lost(), [""; 0]);
}

#[test]
fn ports_that_cannot_be_opened_leave_the_flows_where_they_are() {
    let bench = Bench::new();
    let device = spread(&bench);
    let ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    let refused = Port::open_many(&device, &small(), 1).unwrap_err();
    assert!(matches!(refused, CreateError::QueueTaken { .. }));
    assert_eq!(table(&bench), Table::even(2));
    drop(ports);
    assert_eq!(bench.script.lost(), [""; 0]);
}

#[test]
fn a_queue_that_is_busy_gets_its_flows_back() {
    let bench = Bench::new();
    let device = spread(&bench);
    let port = Port::open_queue(&device, &small(), 0).unwrap();
    let other = Objects::new(&device, 1).unwrap();
    bench.script.stop(Way::Receive, 1, Stop::Busy(1));
    let busy = other.rq.try_destroy().unwrap_err();
    assert_eq!(table(&bench), Table::even(2));
    drop(busy);
    assert_eq!(table(&bench), all_to(0));
    drop((port, other.sq, other.pool, other.mr, other.cq, other.pd));
    assert_eq!(bench.script.lost(), [""; 0]);
}

#[test]
fn r10_a_new_life_spreads_as_the_one_before() {
    let bench = Bench::new();
    let device = spread(&bench);
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    let rss = Rss {
        key: [7; 40],
        types: HashTypes::IPV4,
        table: None,
    };
    device.set_rss(&rss).unwrap();
    assert_eq!(bench.script.rss(), Some(rss));
    device.break_now(Cause::User);
    device.recover().unwrap();
    assert_eq!((bench.script.rss(), device.rss()), (Some(rss), Some(rss)));
    for port in &mut ports {
        let mut frames = port.take_frames(1).unwrap();
        assert_eq!(port.rx_burst(&mut frames), 0);
        assert_eq!(port.carried().times, 1);
    }
    assert_eq!(table(&bench), Table::even(2));
    drop(ports);
    assert_eq!(bench.script.lost(), [""; 0]);
    assert_eq!(device.close().left, []);
}

/// Neither the recovery nor another port's carry waits for a thread that never polls.
#[test]
fn a_port_that_is_carried_first_receives_the_flows_of_the_others() {
    let bench = Bench::new();
    let device = spread(&bench);
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    device.break_now(Cause::User);
    device.recover().unwrap();
    let mut frames = ports[1].take_frames(1).unwrap();
    assert_eq!(ports[1].rx_burst(&mut frames), 0);
    assert_eq!(table(&bench), all_to(1));
    bench.receive(1, 1, 60);
    assert_eq!(ports[1].rx_burst(&mut frames), 1);
    drop((frames, ports));
    assert_eq!(device.close().left, []);
}

#[test]
fn what_a_broken_device_is_told_is_for_its_next_life() {
    let bench = Bench::new();
    let device = spread(&bench);
    let rss = Rss {
        table: Some(all_to(1)),
        ..Rss::default()
    };
    device.break_now(Cause::User);
    device.set_rss(&rss).unwrap();
    assert_eq!(bench.script.count("set_rss"), 0, "it was asked");
    device.recover().unwrap();
    assert_eq!(bench.script.rss(), Some(rss));
    let ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    assert_eq!(table(&bench), all_to(1));
    drop(ports);
}

#[test]
fn r11_nobody_waits_for_a_thread_that_tells_a_device_which_does_not_answer() {
    let bench = Bench::new();
    let device = spread(&bench);
    let hold = bench.function.hold_next(NEXT_WRITE);
    let last = hashing(HashTypes::IPV6);
    let ended = thread::scope(|scope| {
        scope.spawn(|| device.set_rss(&hashing(HashTypes::IPV4)));
        hold.wait_entered();
        device.break_now(Cause::User);
        let (tell, told) = mpsc::channel();
        let device = &device;
        scope.spawn(move || {
            let said = device.set_rss(&last);
            let _ = tell.send((said, device.recover().is_ok()));
        });
        let ended = told.recv_timeout(SOON);
        hold.release();
        ended
    });
    assert_eq!(ended, Ok((Ok(()), true)));
    assert_eq!((bench.script.rss(), device.rss()), (Some(last), Some(last)));
    assert_eq!(device.close().left, []);
}

#[test]
fn r10_what_is_changed_while_a_life_begins_is_told_to_it() {
    let bench = Bench::new();
    let device = spread(&bench);
    device.break_now(Cause::User);
    assert!(device.revocation().unwrap().is_stopped());
    let hold = bench.function.hold_next(NEXT_WRITE);
    let last = hashing(HashTypes::IPV6);
    thread::scope(|scope| {
        let recovered = scope.spawn(|| device.recover());
        hold.wait_entered();
        device.set_rss(&last).unwrap();
        hold.release();
        recovered.join().unwrap().unwrap();
    });
    assert_eq!((bench.script.rss(), device.rss()), (Some(last), Some(last)));
    assert_eq!(device.close().left, []);
}

#[test]
fn a_failed_destroy_of_one_queue_breaks_the_device_once_for_all() {
    let bench = Bench::new();
    let device = spread(&bench);
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    bench.script.stop(Way::Receive, 1, Stop::Never);
    drop(ports.pop());
    let Some(Cause::StopFailed { .. }) = device.broken() else {
        panic!("{:?}", device.broken());
    };
    assert!(device.revocation().unwrap().is_stopped());
    let asked = || ["stop_rx", "stop_tx", "set_rss_table"].map(|what| bench.script.count(what));
    let before = asked();
    drop(ports);
    assert_eq!(asked(), before, "a destroy on a broken device asks nothing");
    let report = device.close();
    assert_eq!(report.left, []);
    let c = report.completions;
    assert_eq!(
        (c.posted, c.outstanding()),
        (c.success + c.error + c.flushed, 0)
    );
}

#[test]
fn what_cannot_be_spread_is_refused_and_nothing_changes() {
    let bench = Bench::new();
    let device = spread(&bench);
    let refused = |rss: Rss| device.set_rss(&rss).unwrap_err();
    let three = Rss {
        table: Some(Table::even(3)),
        ..Rss::default()
    };
    assert!(matches!(
        refused(three),
        RssError::NoSuchQueue {
            entry: 2,
            queue: 2,
            queues: 2,
            ..
        }
    ));
    let nothing = Rss {
        types: HashTypes::empty(),
        ..Rss::default()
    };
    assert!(matches!(refused(nothing), RssError::NoHashTypes { .. }));
    assert_eq!(device.rss(), Some(Rss::default()));
    assert!(matches!(
        Bench::new().try_open_with(Some(three)),
        Err(DeviceError::Rss(RssError::NoSuchQueue { .. }))
    ));
    for count in [0, QUEUES + 1] {
        assert!(matches!(
            Port::open_many(&device, &small(), count),
            Err(CreateError::Provider(ProviderError::OutOfRange { .. }))
        ));
    }
    assert_eq!(device.close().left, []);
}

#[test]
fn without_rss_there_is_one_port_that_receives() {
    let bench = Bench::new();
    let device = bench.open();
    assert!(matches!(
        Port::open_many(&device, &small(), 2),
        Err(CreateError::Rss(RssError::Off { .. }))
    ));
    assert!(matches!(
        device.set_rss(&Rss::default()),
        Err(RssError::Off { .. })
    ));
    assert_eq!(Port::open_many(&device, &small(), 1).unwrap().len(), 1);
    assert_eq!(bench.script.count("set_rss_table"), 0);
}

#[test]
fn a_part_without_rss_is_refused_by_name() {
    let mut header = vec![0; 64];
    header[..4].copy_from_slice(&[0x86, 0x80, 0xd3, 0x10]);
    header[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]);
    let function = FakeFunction::new(limits_39_bits()).unwrap();
    let function = Arc::new(function.with_config(&header));
    let config = Config {
        rss: Some(Rss::default()),
        ..Config::default()
    };
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    let error = Device::open_with(function, &config, options).unwrap_err();
    assert!(matches!(
        error,
        DeviceError::Rss(RssError::Unsupported { part: "82574", .. })
    ));
}

/// The values are those that Linux's igb writes for the same key and types.
#[test]
fn an_82576_is_told_key_and_types_and_a_table() {
    let function = fake_82576::fake();
    let config = Config {
        rss: Some(Rss {
            table: Some(Table::even(4)),
            ..Rss::default()
        }),
        ..Config::default()
    };
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    let device = Device::open_with(function.clone(), &config, options).unwrap();
    let read = |offset: u32| function.register(offset.into());
    assert_eq!(read(reg::MRQC.offset()), 0x0037_0002);
    assert_eq!(read(reg::RXCSUM.offset()) & 1 << 13, 1 << 13);
    assert_eq!(read(reg::RSSRK.offset()), 0xda56_5a6d);
    assert_eq!(read(reg::RSSRK.offset() + 36), 0xfa01_acbe);
    assert_eq!(MICROSOFT_KEY[36..], [0xbe, 0xac, 0x01, 0xfa]);
    assert_eq!(read(reg::RETA.offset()), 0, "all to queue 0");
    assert_eq!(device.close().left, []);
}

#[test]
fn c26_each_queue_has_a_sleeper_of_its_own() {
    let bench = Bench::of(|function| function.with_interrupts(2).by_messages());
    let device = spread(&bench);
    let mut ports = Port::open_many(&device, &small(), QUEUES).unwrap();
    assert!(bench.function.fire(IrqIndex::Msix, 1));
    bench.receive(1, 1, 60);
    let soon = Some(Duration::from_millis(1));
    assert!(ports[1].rq().wait(soon).unwrap());
    assert!(!ports[0].rq().wait(soon).unwrap());
}
