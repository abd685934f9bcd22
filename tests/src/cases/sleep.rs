//! Sleeping until a frame comes.

use std::time::Duration;

use failstop::objects::QueueInit;
use failstop::port::{Port, PortConfig};
use libtest_mimic::Failed;

use crate::fixture::{
    Fixture, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};

const LONG: Option<Duration> = Some(Duration::from_secs(20));

pub(super) fn c26_a_sleeper_is_woken_by_a_frame(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let parts = Port::open(&device, &PortConfig::default())?.into_parts();
    let (mut pool, mut sq, mut rq) = (parts.pool, parts.sq, parts.rq);
    let mut frame = pool.take().ok_or("no frame")?;
    frame.fill(&self_addressed(&device, 60, 1))?;
    let woken = std::thread::scope(|scope| {
        let queue = &mut rq;
        let sleeper = scope.spawn(move || queue.wait(LONG));
        std::thread::sleep(Duration::from_millis(50));
        sq.burst(std::slice::from_mut(&mut frame));
        sleeper.join().map_err(|_| "the sleeper panicked")
    })??;
    ensure(woken, || "woken without a frame, or not at all".into())?;
    drop(frame);
    drop((rq, sq, pool, parts.mr, parts.rx_cq, parts.tx_cq, parts.pd));
    close_clean(device).map(drop)
}

pub(super) fn c26_a_frame_that_came_before_the_sleep_is_not_left_lying(
    fixture: &Fixture,
) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    for turn in 0..3 {
        let bytes = self_addressed(&device, 60, turn);
        send(&mut port, &bytes)?;
        ensure(port.rq().wait(LONG)?, || {
            format!("turn {turn}: nothing is ready")
        })?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    }
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn a_sleep_without_frames_times_out(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    ensure(!port.rq().wait(Some(Duration::from_millis(50)))?, || {
        "something is ready".into()
    })?;
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn a_sleeper_outlasts_the_send_queue_beside_it(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let config = PortConfig::default();
    let parts = Port::open(&device, &config)?.into_parts();
    let (mut pool, sq, mut rq) = (parts.pool, parts.sq, parts.rq);
    let mut frame = pool.take().ok_or("no frame")?;
    frame.fill(&self_addressed(&device, 60, 1))?;
    let woken = std::thread::scope(|scope| {
        let queue = &mut rq;
        let sleeper = scope.spawn(move || queue.wait(LONG));
        std::thread::sleep(Duration::from_millis(50));
        drop(sq);
        let mut sq = parts.pd.create_sq(QueueInit {
            pd: &parts.pd,
            cq: &parts.tx_cq,
            mr: &parts.mr,
            pool: &mut pool,
            entries: config.tx_entries,
            number: 0,
        })?;
        sq.burst(std::slice::from_mut(&mut frame));
        let woken = sleeper.join().map_err(|_| "the sleeper panicked")?;
        Ok::<_, Failed>(woken?)
    })?;
    ensure(woken, || "woken without a frame, or not at all".into())?;
    drop(frame);
    drop((rq, pool, parts.mr, parts.rx_cq, parts.tx_cq, parts.pd));
    close_clean(device).map(drop)
}
