//! Opening, closing, making and destroying.

use std::time::{Duration, Instant};

use failstop::objects::{CreateError, QueueInit};
use failstop::port::{Parts, Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;

use crate::fixture::{
    Fixture, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};

pub(super) fn open_and_close_leave_nothing(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    ensure(device.mac().is_station(), || {
        format!("MAC address {}", device.mac())
    })?;
    let port = Port::open(&device, &PortConfig::default())?;
    ensure(device.ledger().totals().live_mappings == 3, || {
        format!("{:?}", device.ledger())
    })?;
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn a_device_opens_again_and_again(fixture: &Fixture) -> Outcome {
    for turn in 0..5 {
        let device = fixture.open()?;
        let mut port = Port::open(&device, &PortConfig::default())?;
        let bytes = self_addressed(&device, 60, turn);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
        drop(port);
        close_clean(device)?;
    }
    Ok(())
}

/// (C41) (R5)
pub(super) fn a_port_dropped_in_any_order_releases_everything(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    // Parents first: they go with their last child (C41).
    let parts = Port::open(&device, &PortConfig::default())?.into_parts();
    drop(parts.pd);
    drop(parts.mr);
    drop(parts.rx_cq);
    drop(parts.tx_cq);
    drop(parts.pool);
    drop(parts.rq);
    drop(parts.sq);
    ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
    ensure_eq(device.objects(), 0, "objects")?;
    close_clean(device).map(drop)
}

pub(super) fn a_close_under_live_objects_makes_shells_of_them(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 9);
    send(&mut port, &bytes)?;
    let mut frames = port.take_frames(4).ok_or("no frames")?;
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger after close")?;
    ensure_eq(report.broken, Some(Cause::Closed), "what objects are told")?;
    ensure(report.totals.held_bytes > 0, || {
        "nothing is held for the objects that live on".into()
    })?;
    // What was received is still ours to take; nothing is sent, and everything ends.
    let received = port.rx_burst(&mut frames);
    ensure_eq(port.rx_burst(&mut frames), 0, "frames after the last")?;
    ensure_eq(port.tx_burst(&mut frames[received..]), 0, "frames sent")?;
    ensure_eq(port.completions().outstanding(), 0, "outstanding requests")?;
    drop((port, frames));
    let device = fixture.open()?;
    close_clean(device).map(drop)
}

/// (C8) (R5)
pub(super) fn a_parent_in_use_is_busy_and_stays_whole(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let parts = Port::open(&device, &PortConfig::default())?.into_parts();
    let live = device.ledger().totals().live_bytes;
    let busy = parts
        .mr
        .try_destroy()
        .err()
        .ok_or("a region in use was destroyed")?;
    let pd = parts
        .pd
        .try_destroy()
        .err()
        .ok_or("a domain in use was destroyed")?;
    ensure_eq(
        device.ledger().totals().live_bytes,
        live,
        "live bytes after a busy destroy",
    )?;
    parts.rq.try_destroy().map_err(|busy| busy.why)?;
    parts.sq.try_destroy().map_err(|busy| busy.why)?;
    busy.object.try_destroy().map_err(|busy| busy.why)?;
    parts.rx_cq.try_destroy().map_err(|busy| busy.why)?;
    parts.tx_cq.try_destroy().map_err(|busy| busy.why)?;
    pd.object.try_destroy().map_err(|busy| busy.why)?;
    close_clean(device).map(drop)
}

pub(super) fn c42_region_churn_on_a_live_port_leaves_no_quarantine(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let pd = device.alloc_pd()?;
    for turn in 0..50 {
        let (region, mut pool) = pd.register(16, 2048)?;
        let held = pool.take();
        let bytes = self_addressed(&device, 60, turn);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
        region.try_destroy().map_err(|busy| busy.why)?;
        drop(held);
    }
    ensure_eq(
        device.ledger().totals().quarantined_bytes,
        0,
        "quarantined bytes",
    )?;
    drop((pd, port));
    close_clean(device).map(drop)
}

pub(super) fn wrong_sizes_are_refused_and_leave_nothing(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let wrong = [
        PortConfig {
            rx_entries: 100,
            ..PortConfig::default()
        },
        PortConfig {
            tx_entries: 32,
            ..PortConfig::default()
        },
        PortConfig {
            rx_entries: 1 << 20,
            ..PortConfig::default()
        },
        PortConfig {
            frame_size: 100,
            ..PortConfig::default()
        },
        PortConfig {
            frame_size: 512,
            ..PortConfig::default()
        },
        PortConfig {
            frame_size: 1 << 17,
            ..PortConfig::default()
        },
    ];
    for config in wrong {
        ensure(Port::open(&device, &config).is_err(), || {
            format!("accepted: {config:?}")
        })?;
        ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
    }
    let (pd, other) = (device.alloc_pd()?, device.alloc_pd()?);
    let (mr, mut pool) = pd.register(64, 2048)?;
    let cq = device.create_cq(16)?;
    let mut init = |domain, entries, number| {
        pd.create_rq(QueueInit {
            pd: domain,
            cq: &cq,
            mr: &mr,
            pool: &mut pool,
            entries,
            number,
        })
    };
    ensure(
        matches!(
            init(&pd, 32, 0),
            Err(CreateError::CompletionQueueFull { .. })
        ),
        || "CQ overrun".into(),
    )?;
    ensure(
        matches!(init(&other, 16, 0), Err(CreateError::Foreign { .. })),
        || "foreign domain".into(),
    )?;
    ensure(
        matches!(init(&pd, 16, 99), Err(CreateError::Provider(_))),
        || "queue 99".into(),
    )?;
    drop((mr, pool, cq, pd, other));
    close_clean(device).map(drop)
}

pub(super) fn a_queue_goes_and_comes_back_beside_the_other(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let config = PortConfig::default();
    let Parts {
        mut rq,
        mut sq,
        mut pool,
        mr,
        rx_cq,
        tx_cq,
        pd,
    } = Port::open(&device, &config)?.into_parts();
    for turn in 0..6 {
        // What was posted before the other queue went is received or sent after it.
        let bytes = self_addressed(&device, 60, turn);
        let mut frame = pool.take_many(1).ok_or("no frame to send")?;
        frame[0].fill(&bytes)?;
        if turn % 2 == 0 {
            drop(rq);
            rq = pd.create_rq(QueueInit {
                pd: &pd,
                cq: &rx_cq,
                mr: &mr,
                pool: &mut pool,
                entries: config.rx_entries,
                number: 0,
            })?;
        } else {
            drop(sq);
            sq = pd.create_sq(QueueInit {
                pd: &pd,
                cq: &tx_cq,
                mr: &mr,
                pool: &mut pool,
                entries: config.tx_entries,
                number: 0,
            })?;
        }
        ensure_eq(device.broken(), None, "broken")?;
        ensure_eq(sq.burst(&mut frame), 1, "frames sent")?;
        let end = Instant::now() + Duration::from_secs(5);
        while rq.burst(&mut frame) == 0 {
            ensure(Instant::now() < end, || {
                format!("turn {turn}: no frame came within 5 s")
            })?;
            std::thread::yield_now();
        }
        let mut copy = vec![0; bytes.len()];
        frame[0].copy_to(&mut copy);
        ensure_eq(copy, bytes, "the frame")?;
    }
    drop((rq, sq, pool, mr, rx_cq, tx_cq, pd));
    close_clean(device).map(drop)
}

pub(super) fn a_port_comes_back_on_the_same_device(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    for turn in 0..3 {
        let mut port = Port::open(&device, &PortConfig::default())?;
        let bytes = self_addressed(&device, 60, turn);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    }
    close_clean(device).map(drop)
}

pub(super) fn a_hundred_closes_with_link_down_quarantine_nothing(fixture: &Fixture) -> Outcome {
    for _ in 0..5 {
        let device = fixture.open_with(&Config::default())?;
        for turn in 0..20 {
            let mut port = Port::open(&device, &PortConfig::default())?;
            ensure(!device.link().up, || "the link is up".into())?;
            // Frames that never go out.
            for _ in 0..8 {
                send(&mut port, &self_addressed(&device, 60, turn))?;
            }
            drop(port);
            ensure_eq(device.broken(), None, "broken")?;
            ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
        }
        ensure(device.revocation().is_none(), || "a ladder ran".into())?;
        close_clean(device)?;
    }
    Ok(())
}
