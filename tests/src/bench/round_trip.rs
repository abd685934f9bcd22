//! Frames that come back: how many in a second, and how late each is. Ours beside a loop by hand, each on an emulated
//! device of its own, in a process of its own; both in turn, so that what else the machine does meets both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::dma::frame::Frame;
use failstop::pci::transport::Transport;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use hdrhistogram::Histogram;
use libtest_mimic::Failed;

use super::Figure;
use super::by_hand::ByHand;
use crate::fixture::{Fixture, ensure, self_addressed};

/// Frames sent or received at once, at most.
pub(super) const BURST: usize = 32;
/// Frames under way at once, at most: half a ring.
const WINDOW: usize = 256;
/// Bytes of frames, without frame check sequence.
const SIZES: [u16; 8] = [64, 128, 256, 512, 1024, 1514, 4096, 9000];
/// Shares of the load that is possible, in percent.
const LOADS: [u32; 3] = [1, 50, 90];
const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 99.9];
/// How often both sides have their turn, and how long it is. Of speeds the best counts: in a short turn nobody else may have
/// had the processor.
const SPEED_TURNS: u32 = 20;
const SPEED_TURN: Duration = Duration::from_millis(25);
const DELAY_TURNS: u32 = 6;
const DELAY_TURN: Duration = Duration::from_millis(500);
/// How long no frame may come while some are under way: on a busy machine the device may not run for seconds.
const LOST: Duration = Duration::from_secs(20);
/// What is later counts as this late.
const LONGEST: Duration = Duration::from_secs(60);

/// Who sends and receives.
pub(super) trait Side {
    /// Sends so many frames, at most [`BURST`]; returns how many there was room for.
    fn send(&mut self, frames: usize) -> usize;
    /// Receives frames, at most [`BURST`]; returns how many.
    fn receive(&mut self) -> usize;
}

/// A port in loopback. Its frames go round: those received are sent next.
pub(super) struct Ours {
    port: Port,
    /// Full ones first.
    frames: Vec<Frame>,
    full: usize,
    device: Device,
}

impl Ours {
    /// Opens a device for frames of `len` bytes.
    pub(super) fn open(transport: Arc<dyn Transport>, len: u16) -> Result<Self, Failed> {
        let config = Config {
            loopback: true,
            longest_frame: u32::from(len).max(1514),
            ..Config::default()
        };
        let device = Device::open(transport, &config)?;
        let port = PortConfig {
            frame_size: u32::from(len).next_multiple_of(1024).max(2048),
            ..PortConfig::default()
        };
        let mut port = Port::open(&device, &port)?;
        let mut frames = port.take_frames(WINDOW).ok_or("no frames")?;
        let bytes = self_addressed(&device, len.into(), 5);
        for frame in &mut frames {
            frame.fill(&bytes)?;
        }
        Ok(Self {
            port,
            full: frames.len(),
            frames,
            device,
        })
    }

    /// Gives everything back.
    pub(super) fn close(self) -> Result<(), Failed> {
        drop(self.frames);
        drop(self.port);
        let broken = self.device.close().broken;
        ensure(broken.is_none(), || format!("the device broke: {broken:?}"))
    }
}

impl Side for Ours {
    fn send(&mut self, frames: usize) -> usize {
        let first = self.full - frames.min(self.full);
        let burst = &mut self.frames[first..self.full];
        let sent = self.port.tx_burst(burst);
        // Frames that came in exchange are empty, and come after those that are full.
        if sent < burst.len() {
            burst.rotate_left(sent);
        }
        self.full -= sent;
        sent
    }

    fn receive(&mut self) -> usize {
        let end = self.frames.len().min(self.full + BURST);
        let received = self.port.rx_burst(&mut self.frames[self.full..end]);
        self.full += received;
        received
    }
}

/// Both sides, each on the device of its fixture.
///
/// # Errors
///
/// When a device cannot be opened, or a frame is lost.
pub fn run(ours: &Fixture, by_hand: &Fixture) -> Result<Vec<Figure>, Failed> {
    let mut figures = Vec::new();
    let mut top = 0.0;
    for len in SIZES {
        let mut us = Ours::open(ours.transport()?, len)?;
        let mut hand = ByHand::open(by_hand.transport()?, len)?;
        let (mut best, mut beside) = (0.0f64, 0.0f64);
        for _ in 0..SPEED_TURNS {
            best = best.max(speed(&mut us)?);
            beside = beside.max(speed(&mut hand)?);
        }
        if len == SIZES[0] {
            top = best;
            figures.append(&mut delays(&mut us, &mut hand, top)?);
        }
        us.close()?;
        let name = format!("emulator: round trips, frames of {len} bytes");
        let note = format!(
            "bursts of {BURST}, at most {WINDOW} under way; the best of {SPEED_TURNS} turns"
        );
        figures.push(beside_it(name, "frames/s", best, beside).note(note));
    }
    ensure(top > 0.0, || "no frame came back".into())?;
    Ok(figures)
}

fn beside_it(name: String, unit: &'static str, ours: f64, beside: f64) -> Figure {
    let figure = Figure::plain(name, unit, ours);
    Figure {
        beside: Some(beside),
        ..figure
    }
}

/// Frames a second, as many under way as may be.
fn speed(side: &mut impl Side) -> Result<f64, Failed> {
    let start = Instant::now();
    let (mut sent, mut received) = (0, 0);
    while start.elapsed() < SPEED_TURN {
        if sent + BURST <= received + WINDOW {
            sent += side.send(BURST);
        }
        received += side.receive();
    }
    let speed = received as f64 / start.elapsed().as_secs_f64();
    drain(side, sent - received)?;
    Ok(speed)
}

/// Receives what is under way.
fn drain(side: &mut impl Side, mut frames: usize) -> Result<(), Failed> {
    let end = Instant::now() + LOST;
    while frames > 0 {
        frames -= side.receive();
        ensure(Instant::now() < end, || {
            format!("{frames} frames were lost")
        })?;
    }
    Ok(())
}

/// How late frames are, at shares of `top` frames a second.
fn delays(ours: &mut Ours, by_hand: &mut ByHand, top: f64) -> Result<Vec<Figure>, Failed> {
    let mut figures = Vec::new();
    for load in LOADS {
        let rate = top * f64::from(load) / 100.0;
        let mut late = [histogram()?, histogram()?];
        for _ in 0..DELAY_TURNS {
            delay(ours, rate, &mut late[0])?;
            delay(by_hand, rate, &mut late[1])?;
        }
        let figure = |what: String, of: &dyn Fn(&Histogram<u64>) -> u64| {
            let name = format!("emulator: round trip at {load} % load, {what}");
            let [us, hand] = late.each_ref().map(|late| of(late) as f64 / 1e3);
            beside_it(name, "us", us, hand).note(format!(
                "{rate:.0} frames/s, since each was due; {} and {} frames",
                late[0].len(),
                late[1].len()
            ))
        };
        for percentile in PERCENTILES {
            let of = |late: &Histogram<u64>| late.value_at_percentile(percentile);
            figures.push(figure(format!("p{percentile}"), &of));
        }
        figures.push(figure("max".into(), &|late| late.max()));
    }
    Ok(figures)
}

/// Of nanoseconds, to three digits.
fn histogram() -> Result<Histogram<u64>, Failed> {
    Ok(Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, 3)?)
}

/// Sends `rate` frames a second for a turn. A frame's time starts when it was due, also when it was sent late: what
/// waits for a device that does not keep up is not left out.
fn delay(side: &mut impl Side, rate: f64, late: &mut Histogram<u64>) -> Result<(), Failed> {
    let all = (rate * DELAY_TURN.as_secs_f64()) as u64;
    let due = |frame: u64| Duration::from_secs_f64(frame as f64 / rate);
    let start = Instant::now();
    let (mut sent, mut received) = (0, 0);
    // When a frame came last.
    let mut heard = Duration::ZERO;
    while received < all {
        let now = start.elapsed();
        let by_now = ((now.as_secs_f64() * rate) as u64 + 1).min(all);
        let room = (WINDOW as u64).saturating_sub(sent - received);
        let frames = (by_now - sent).min(room).min(BURST as u64) as usize;
        if frames > 0 {
            sent += side.send(frames) as u64;
        }
        let frames = side.receive() as u64;
        if frames > 0 {
            // In the order in which they were sent: it is one queue.
            heard = start.elapsed();
            for frame in received..received + frames {
                late.saturating_record(heard.saturating_sub(due(frame)).as_nanos() as u64);
            }
            received += frames;
        }
        ensure(now.saturating_sub(heard) < LOST, || {
            format!("{} frames were lost", sent - received)
        })?;
    }
    Ok(())
}
