//! The two destroys and the accounts, over a scripted device that refuses, and over one that is
//! broken.
#![forbid(unsafe_code)]

mod scripted;

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use failstop::device::{Device, DeviceError};
use failstop::objects::CreateError;
use failstop::port::Port;
use failstop::queues::lifecycle::Cause;
use failstop::rss::Rss;
use failstop_dma::ledger::State;
use failstop_pci::clock::Clock;
use failstop_pci::peer::Peer;
use failstop_pci::testing::{Call, Happened, Reading};
use failstop_pci::transport::Kind;
use scripted::{Bench, FRAME, FRAMES, Objects, RX, Stop, TX, Way, small};

fn stays_well(device: &Device) {
    assert_eq!(device.broken(), None);
}

#[test]
fn c8_a_busy_object_is_handed_back_whole_and_goes_when_it_is_asked_again() {
    let bench = Bench::new();
    let device = bench.open();
    let Objects {
        rq,
        sq,
        pool,
        mr,
        cq,
        pd,
    } = Objects::new(&device, 0).unwrap();
    bench.script.stop(Way::Receive, 0, Stop::Busy(1));
    let before = device.ledger().lines();
    let busy = rq.try_destroy().unwrap_err();
    assert_eq!(busy.why, "the device counts a reference");
    assert_eq!(device.ledger().lines(), before, "something has changed");
    stays_well(&device);

    // It works as before: the device receives, and the frame is delivered.
    let mut rq = busy.object;
    let mut pool = pool;
    let mut frames = pool.take_many(1).unwrap();
    assert_eq!(bench.receive(0, 1, 33), 1);
    assert_eq!(rq.burst(&mut frames), 1);
    assert_eq!(frames[0].len(), 33);
    drop(frames);
    rq.try_destroy().unwrap();
    assert_eq!(bench.script.count("stop_rx"), 2);
    sq.try_destroy().unwrap();
    drop(pool);
    for gone in [
        mr.try_destroy().is_ok(),
        cq.try_destroy().is_ok(),
        pd.try_destroy().is_ok(),
    ] {
        assert!(gone);
    }
    assert_eq!(device.ledger().lines(), []);
    stays_well(&device);
}

#[test]
fn c8_the_device_lets_go_before_its_memory_is_touched() {
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    bench.script.stop(Way::Send, 0, Stop::Busy(3));
    let _before = bench.function.take_log();
    objects.sq.destroy();
    assert_eq!(bench.script.count("stop_tx"), 4);
    let unmaps = bench.function.log();
    assert!(matches!(unmaps[..], [Happened::Unmap { .. }]), "{unmaps:?}");
    assert_eq!(bench.queue(Way::Send, 0), None);
    stays_well(&device);
}

#[test]
fn a_destroy_that_stays_busy_breaks_the_device_and_succeeds() {
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    bench.script.stop(Way::Receive, 0, Stop::Busy(u32::MAX));
    objects.rq.destroy();
    assert!(matches!(device.broken(), Some(Cause::TimedOut { .. })));
    assert!(bench.script.count("stop_rx") > 2);
    assert_eq!(device.ledger().lines(), []);
}

#[test]
fn c2_a_failed_stop_goes_through_the_ladder_before_anything_is_unmapped() {
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    bench.script.stop(Way::Receive, 0, Stop::Never);
    let _before = bench.function.take_log();
    objects.rq.try_destroy().unwrap();
    let log = bench.function.log();
    let reset = log.iter().position(|h| matches!(h, Happened::Reset(_)));
    let unmap = log.iter().position(|h| matches!(h, Happened::Unmap { .. }));
    assert!(reset.is_some() && reset < unmap, "{log:?}");
}

#[test]
fn c41_parents_that_go_first_are_deferred_without_a_ladder() {
    let bench = Bench::new();
    let device = bench.open();
    let Objects {
        rq,
        sq,
        pool,
        mr,
        cq,
        pd,
    } = Objects::new(&device, 0).unwrap();
    let busy = pd.try_destroy().unwrap_err();
    busy.object.destroy();
    cq.destroy();
    mr.destroy();
    assert_eq!(device.ledger().lines().len(), 3);
    drop(pool);
    sq.destroy();
    assert_eq!(device.ledger().lines().len(), 2);
    rq.destroy();
    assert_eq!(device.ledger().lines(), []);
    assert_eq!(device.objects(), 0);
    stays_well(&device);
}

#[test]
fn c12_frames_that_are_held_outlive_region_and_device() {
    let bench = Bench::new();
    let device = bench.open();
    let mut port = Port::open(&device, &small()).unwrap();
    let mut frames = port.take_frames(2).unwrap();
    frames[0].fill(b"still here").unwrap();
    drop(port);
    assert_eq!(device.ledger().lines(), []);
    let closed = device.close();
    assert_eq!(closed.left, []);
    // Nothing of the device reaches it any more.
    assert_eq!(bench.write_everywhere(0xff), 0);
    let mut bytes = [0; 10];
    assert_eq!(frames[0].copy_to(&mut bytes), 10);
    assert_eq!(&bytes, b"still here");
}

#[test]
fn c13_free_posted_and_held_add_up_before_during_and_after_a_break() {
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    let held = objects.pool.take_many(5).unwrap();
    let sum = |objects: &Objects, in_rings: u32| {
        let census = objects.mr.census().unwrap();
        let free = objects.pool.available() as u32;
        assert_eq!(census.home + census.out, FRAMES);
        assert_eq!(free + in_rings + 5, FRAMES);
    };
    sum(&objects, RX + TX);
    assert!(device.break_now(Cause::User));
    sum(&objects, RX + TX);
    assert!(device.revocation().is_some());
    sum(&objects, RX + TX);
    let Objects {
        rq, sq, pool, mr, ..
    } = objects;
    drop((rq, sq));
    // What was posted came home.
    assert_eq!(pool.available() as u32 + 5, FRAMES);
    drop(held);
    assert_eq!(pool.available() as u32, FRAMES);
    drop((pool, mr));
}

#[test]
fn c27_a_queue_that_could_overrun_its_completion_queue_is_refused() {
    let bench = Bench::new();
    let device = bench.open();
    let pd = device.alloc_pd().unwrap();
    let (mr, mut pool) = pd.register(FRAMES, FRAME).unwrap();
    let cq = device.create_cq(TX + RX - 1).unwrap();
    let sq = pd
        .create_sq(scripted::init(&pd, &cq, &mr, &mut pool, TX, 0))
        .unwrap();
    let refused = pd
        .create_rq(scripted::init(&pd, &cq, &mr, &mut pool, RX, 0))
        .unwrap_err();
    assert!(
        matches!(refused, CreateError::CompletionQueueFull { free: 7, .. }),
        "{refused}"
    );
    assert_eq!(device.ledger().lines().len(), 2);
    // The room comes back with the queue that had it.
    sq.destroy();
    pd.create_rq(scripted::init(&pd, &cq, &mr, &mut pool, RX, 0))
        .unwrap()
        .destroy();
    stays_well(&device);
}

#[test]
fn c27_a_device_that_completes_what_was_not_posted_is_broken_and_everything_flushed() {
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    let mut frames = objects.pool.take_many(8).unwrap();
    assert_eq!(bench.receive(0, RX, 60), RX - 1);
    // Of a ring's entries one is never posted: the device says that it received into that, too.
    let ring = bench.queue(Way::Receive, 0).unwrap().ring;
    let done = 60u64 << 32 | 0x3;
    assert!(
        bench
            .function
            .dma_write(ring + 7 * 16 + 8, &done.to_le_bytes())
    );
    assert_eq!(objects.rq.burst(&mut frames), 7);
    assert!(matches!(
        device.broken(),
        Some(Cause::ImpossibleValue { .. })
    ));
    assert!(device.revocation().is_some());
    while objects.rq.burst(&mut frames) > 0 {}
    let ended = objects.rq.completions();
    assert_eq!(
        (ended.outstanding(), ended.posted, ended.success),
        (0, 7, 7)
    );
}

#[test]
fn c29_a_completion_of_a_destroyed_queue_is_flushed_and_meets_nobody() {
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    let old = bench.queue(Way::Receive, 0).unwrap();
    objects.rq.destroy();
    assert_eq!(device.completions().flushed, 7);
    objects.rq = objects
        .pd
        .create_rq(scripted::init(
            &objects.pd,
            &objects.cq,
            &objects.mr,
            &mut objects.pool,
            RX,
            0,
        ))
        .unwrap();
    let new = bench.queue(Way::Receive, 0).unwrap();
    assert_ne!(old.ring, new.ring, "the address was used again at once");
    let done = 60u64 << 32 | 0x3;
    assert!(!bench.function.dma_write(old.ring + 8, &done.to_le_bytes()));
    let mut frames = objects.pool.take_many(1).unwrap();
    assert_eq!(objects.rq.burst(&mut frames), 0);
}

#[test]
fn a_queue_that_did_not_start_is_stopped_like_any_other() {
    let bench = Bench::new();
    let device = bench.open();
    bench.script.fail_starts(Way::Send, 1);
    let refused = Objects::new(&device, 0).unwrap_err();
    assert!(matches!(refused, CreateError::Provider(_)), "{refused}");
    assert_eq!(bench.script.count("stop_tx"), 1);
    assert_eq!(device.ledger().lines(), []);
    stays_well(&device);
    drop(Objects::new(&device, 0).unwrap());
}

#[test]
fn a_close_stops_busy_queues_in_passes_and_leaves_shells() {
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    let mut frames = objects.pool.take_many(1).unwrap();
    bench.script.stop(Way::Receive, 0, Stop::Busy(5));
    let held = device.ledger().totals().live_bytes;
    let (told, closed) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let user = thread::spawn(move || {
        // Another thread holds the objects meanwhile.
        told.1.recv().unwrap();
        assert_eq!(objects.rq.burst(&mut frames), 0);
        assert_eq!(objects.sq.burst(&mut frames), 0);
        assert!(objects.pd.register(8, FRAME).is_err());
        closed.0.send(()).unwrap();
        drop((objects, frames));
    });
    let report = device.close();
    assert!(bench.script.count("stop_rx") >= 6);
    assert_eq!(report.left, []);
    assert_eq!(report.totals.held_bytes, held);
    assert_eq!(report.broken, Some(Cause::Closed));
    assert_eq!(bench.function.mapped(), []);
    assert!(!bench.function.is_master());
    told.0.send(()).unwrap();
    closed.1.recv().unwrap();
    user.join().unwrap();
}

#[test]
fn c9_and_c10_on_a_broken_device_every_destroy_succeeds_without_touching_it() {
    // Each object alone, in the order of this list; what it is made of goes after it.
    type Destroy = fn(Objects) -> bool;
    let kinds: [(&str, Destroy); 5] = [
        ("RQ", |objects| objects.rq.try_destroy().is_ok()),
        ("SQ", |objects| objects.sq.try_destroy().is_ok()),
        (
            "MR",
            |Objects {
                 rq, sq, pool, mr, ..
             }| {
                drop((rq, sq, pool));
                mr.try_destroy().is_ok()
            },
        ),
        ("CQ", |Objects { rq, sq, cq, .. }| {
            drop((rq, sq));
            cq.try_destroy().is_ok()
        }),
        (
            "PD",
            |Objects {
                 rq,
                 sq,
                 pool,
                 mr,
                 pd,
                 ..
             }| {
                drop((rq, sq, pool, mr));
                pd.try_destroy().is_ok()
            },
        ),
    ];
    for (kind, destroy) in kinds {
        let bench = Bench::new();
        let device = bench.open();
        let objects = Objects::new(&device, 0).unwrap();
        // Whatever the device would say, it is not asked.
        for way in scripted::WAYS {
            bench.script.stop(way, 0, Stop::Never);
        }
        assert!(device.break_now(Cause::User));
        assert!(device.revocation().is_some());
        let _before = bench.function.take_log();
        let (calls, registers) = (bench.script.calls(), bench.registers());
        assert!(destroy(objects), "{kind}");
        assert_eq!(bench.function.log(), [], "{kind}");
        assert_eq!(bench.script.calls(), calls, "{kind}");
        assert_eq!(bench.registers(), registers, "{kind}");
        assert_eq!(device.ledger().lines(), [], "{kind}");
        assert_eq!(device.completions().outstanding(), 0, "{kind}");
    }
}

#[test]
fn r6_on_a_fenced_device_destroys_succeed_and_memory_is_quarantined() {
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    bench.never_revoked();
    assert!(device.break_now(Cause::User));
    assert!(device.revocation().is_some());
    let Objects {
        rq,
        sq,
        pool,
        mr,
        cq,
        pd,
    } = objects;
    assert!(rq.try_destroy().is_ok() && sq.try_destroy().is_ok());
    // The frames of a ring that is not proven stopped are not given back (R7).
    let completions = device.completions();
    assert_eq!(completions.flushed, u64::from(RX - 1));
    assert_eq!(completions.quarantined, completions.flushed);
    assert_eq!(pool.available() as u32, FRAMES - RX - TX);
    drop(pool);
    assert!(mr.try_destroy().is_ok() && cq.try_destroy().is_ok() && pd.try_destroy().is_ok());
    let lines = device.ledger().lines();
    assert_eq!(lines.len(), 3);
    assert!(
        lines.iter().all(|line| line.state == State::Quarantined),
        "{lines:?}"
    );
}

/// What a provider's command is to a broken device.
enum On {
    /// Given when the device is opened, or recovered, only.
    BringUp,
    /// A create, which is refused before it.
    Create(fn(&Device, &mut Objects) -> Result<(), CreateError>),
    /// A destroy, which does not give it.
    Destroy,
    /// A look, which meets no register.
    Look(fn(&Device)),
    /// Of the watchdog's, who asks a device that lives only.
    Watchdog,
    /// Nothing that is public gives it.
    Unused,
}

fn create_rq(_: &Device, objects: &mut Objects) -> Result<(), CreateError> {
    let Objects {
        pool, mr, cq, pd, ..
    } = objects;
    pd.create_rq(scripted::init(pd, cq, mr, pool, RX, 1))
        .map(drop)
}

fn create_sq(_: &Device, objects: &mut Objects) -> Result<(), CreateError> {
    let Objects {
        pool, mr, cq, pd, ..
    } = objects;
    pd.create_sq(scripted::init(pd, cq, mr, pool, TX, 1))
        .map(drop)
}

/// Every command of a provider.
const COMMANDS: &[(&str, On)] = &[
    (
        "name",
        On::Look(|device| assert_eq!(device.provider(), "scripted")),
    ),
    ("part", On::Look(|device| assert_eq!(device.part(), "none"))),
    (
        "limits",
        On::Look(|device| assert_eq!(device.limits().queues, 2)),
    ),
    ("formats", On::Create(create_rq)),
    ("restarts", On::Create(create_rq)),
    ("bring_up", On::BringUp),
    ("longest_received", On::Create(create_rq)),
    ("mac", On::Look(|device| assert!(device.mac().is_station()))),
    ("link", On::Look(|device| assert!(!device.link().up))),
    (
        "wait_link",
        On::Look(|device| assert!(!device.wait_link(Duration::from_secs(1)).up)),
    ),
    ("set_promiscuous", On::Unused),
    ("start_rx", On::Create(create_rq)),
    ("stop_rx", On::Destroy),
    ("start_tx", On::Create(create_sq)),
    ("stop_tx", On::Destroy),
    ("canary", On::BringUp),
    ("has_rss", On::BringUp),
    (
        "set_rss",
        On::Look(|device| assert!(device.set_rss(&Rss::default()).is_err())),
    ),
    ("set_rss_table", On::Destroy),
    ("software_reset", On::BringUp),
    (
        "statistics",
        On::Look(|device| assert_eq!(device.statistics().rx_frames, 0)),
    ),
    ("check_alive", On::Watchdog),
    ("is_paused", On::Watchdog),
    ("rx_position", On::Watchdog),
    ("tx_position", On::Watchdog),
    ("route_rx_interrupt", On::Create(create_rq)),
    ("quiesce", On::Destroy),
];

#[test]
fn c10_the_table_has_every_command_of_a_provider() {
    let source = include_str!("../src/provider.rs");
    let (_, methods) = source.split_once("pub trait Provider").unwrap();
    let names: BTreeSet<&str> = methods
        .lines()
        .take_while(|line| *line != "}")
        .filter_map(|line| {
            line.strip_prefix("    fn ")?
                .split_once('(')
                .map(|(name, _)| name)
        })
        .collect();
    assert!(names.len() > 10, "{names:?}");
    let table: BTreeSet<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
    assert_eq!(table, names);
}

#[test]
fn c10_on_a_broken_device_no_command_reaches_it_and_every_create_is_refused() {
    let bench = Bench::new();
    let device = bench.open();
    let mut objects = Objects::new(&device, 0).unwrap();
    assert!(device.break_now(Cause::User));
    assert!(device.revocation().is_some());
    let _before = bench.function.take_log();
    let registers = bench.registers();
    for (name, on) in COMMANDS {
        let count = bench.script.count(name);
        match on {
            On::Create(create) => {
                let refused = create(&device, &mut objects).unwrap_err();
                let broken = matches!(refused, CreateError::Device(DeviceError::Broken { .. }));
                assert!(broken, "{name}: {refused}");
            }
            On::Look(look) => look(&device),
            On::BringUp | On::Destroy | On::Watchdog | On::Unused => {}
        }
        let looked = matches!(on, On::Look(_));
        assert!(looked || bench.script.count(name) == count, "{name}");
    }
    let refused = [
        device.alloc_pd().map(drop),
        device.create_cq(8).map(drop),
        objects.pd.register(8, FRAME).map(drop),
        Port::open(&device, &small()).map(drop),
    ];
    for refused in refused {
        let broken = matches!(
            refused,
            Err(CreateError::Device(DeviceError::Broken { .. }))
        );
        assert!(broken, "{refused:?}");
    }
    // Posting does nothing, and is no error: polls cannot fail (R7).
    let mut frames = objects.pool.take_many(2).unwrap();
    for frame in &mut frames {
        frame.set_len(60).unwrap();
    }
    let posted = objects.sq.completions().posted;
    assert_eq!(objects.sq.burst(&mut frames), 0);
    assert_eq!(objects.sq.completions().posted, posted);
    drop(frames);
    let destroys: Vec<_> = COMMANDS
        .iter()
        .filter(|(_, on)| matches!(on, On::Destroy))
        .collect();
    let before: Vec<_> = destroys
        .iter()
        .map(|(name, _)| bench.script.count(name))
        .collect();
    drop(objects);
    assert_eq!(device.close().left, []);
    let after: Vec<_> = destroys
        .iter()
        .map(|(name, _)| bench.script.count(name))
        .collect();
    assert_eq!(before, after);
    assert_eq!(bench.registers(), registers);
}

/// What nobody answered for is released when the process that could reach it has ended (R3).
#[test]
fn r3_quarantine_is_released_when_the_server_that_we_started_has_ended() {
    let mut server = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let peer = Peer::of(&mut server).unwrap();
    let bench = Bench::of(|function| function.by_messages().with_peer(peer));
    let device = bench.open();
    let port = Port::open(&device, &small()).unwrap();
    bench.never_revoked();
    assert!(device.break_now(Cause::User));
    assert!(device.revocation().is_some());
    drop(port);
    assert_eq!(device.reclaim(), 0);
    let kept = device.ledger().totals().quarantined_bytes;
    assert_ne!(kept, 0);

    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(device.reclaim(), kept);
    assert_eq!(device.reclaim(), 0);
    assert_eq!(device.close().left, []);
}

/// What nobody answered for goes with the domain, once the kernel says that the function left it (R3).
#[test]
fn r3_quarantine_is_released_when_the_closed_function_has_left_its_address_space() {
    for leaves in [true, false] {
        let bench = Bench::of(|function| function.with_kind(Kind::Container));
        bench.function.set_leaves_space(leaves);
        let device = bench.open();
        let port = Port::open(&device, &small()).unwrap();
        bench.never_revoked();
        assert!(device.break_now(Cause::User));
        drop(port);
        let kept = device.ledger().totals().quarantined_bytes;
        assert_ne!(kept, 0);
        assert!(!bench.function.is_hung_up());

        let report = device.close();
        assert!(bench.function.is_hung_up());
        let still = if leaves { 0 } else { kept };
        assert_eq!(report.totals.quarantined_bytes, still);
        assert_eq!(report.left.is_empty(), leaves);
    }
}

/// Who closes a device with nothing in quarantine may open its function again: it is not hung up.
#[test]
fn a_close_that_leaves_nothing_keeps_the_functions_descriptors() {
    let bench = Bench::of(|function| function.with_kind(Kind::Container));
    let device = bench.open();
    assert_eq!(device.close().left, []);
    assert!(!bench.function.is_hung_up());
}

/// A function that was stopped and then goes away is not waited for either: the kernel resets it with
/// its last descriptor (R12).
#[test]
fn the_descriptors_of_a_function_that_was_not_recovered_are_closed_by_the_deadline() {
    let bench = Bench::of(|function| function.with_kind(Kind::Container));
    let device = bench.open();
    assert!(device.break_now(Cause::User));
    assert!(
        device
            .revocation()
            .is_some_and(|report| report.is_stopped())
    );
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    device.recover().unwrap_err();
    assert_eq!(device.close().left, []);
    assert!(bench.function.is_hung_up());
}

/// A provider that asks the wrong register has a reading, and no ground for this queue.
#[test]
fn r3_1_a_reading_of_another_queue_stops_nothing() {
    let bench = Bench::new();
    let device = bench.open();
    let (first, second) = (
        Objects::new(&device, 0).unwrap(),
        Objects::new(&device, 1).unwrap(),
    );
    second.rq.destroy();
    bench.script.ask_the_other(Way::Receive, 0);

    first.rq.destroy();

    let Some(Cause::StopFailed { what }) = device.broken() else {
        panic!("{:?}", device.broken());
    };
    assert!(
        what.contains("register 0x1040 reads that receive queue 1 stopped")
            && what.contains("nothing of receive queue 0"),
        "{what}"
    );
}

/// The kernel resets a function with its last descriptor, and waits minutes for one that is gone.
#[test]
fn c47_a_close_of_a_function_that_is_gone_does_not_wait_for_the_kernel() {
    let bench = Bench::of(|function| function.with_kind(Kind::Container));
    let device = bench.open();
    bench.function.misread_config(Reading::AllOnes, u64::MAX);
    assert!(device.break_now(Cause::User));
    let clock = bench.time.clone();
    let hold = bench
        .function
        .hold_and(Call::HangUp, move || clock.sleep(Duration::from_secs(3600)));
    assert_eq!(device.close().left, []);
    hold.wait_entered();
    hold.release();
}
