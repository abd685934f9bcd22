//! From nothing to the first packet, and back; and what memory a port takes that does nothing.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop::device::{Device, Options};
use failstop::pci::clock::{Clock, SystemClock, Ticks};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use libtest_mimic::Failed;
use std::sync::atomic::{AtomicU64, Ordering};

use super::by_hand::ByHand;
use super::round_trip::Side;
use super::timed::{Timed, nanos};
use super::{Figure, median, micros};
use crate::fixture::{Fixture, ensure, ensure_eq, receive, self_addressed, send};

/// Bytes of the first frame.
const FRAME: u16 = 60;
/// How long it may be under way.
const PATIENCE: Duration = Duration::from_secs(2);

/// A clock that knows how long was slept by it: what a device is waited for.
#[derive(Debug, Default)]
pub(super) struct Waits {
    clock: SystemClock,
    slept: AtomicU64,
}

impl Waits {
    /// Microseconds since the last look.
    pub(super) fn take(&self) -> f64 {
        self.slept.swap(0, Ordering::Relaxed) as f64 / 1e3
    }
}

impl Clock for Waits {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn ticks(&self) -> Ticks {
        self.clock.ticks()
    }

    fn has_ticks_of_processor(&self) -> bool {
        self.clock.has_ticks_of_processor()
    }

    fn sleep(&self, time: Duration) {
        let start = nanos();
        self.clock.sleep(time);
        self.slept.fetch_add(nanos() - start, Ordering::Relaxed);
    }
}

/// How long something took, and how much of that was spent in calls of the kernel or the server, and in waits for the
/// device. In microseconds.
#[derive(Default)]
struct Times {
    all: Vec<f64>,
    outside: Vec<f64>,
    waited: Vec<f64>,
}

impl Times {
    fn add(&mut self, all: Duration, outside: f64, waited: f64) {
        self.all.push(micros(all));
        self.outside.push(outside);
        self.waited.push(waited);
    }

    fn figure(self, name: &str, beside: Option<f64>) -> Figure {
        let rounds = self.all.len();
        let (all, outside, waited) = (median(self.all), median(self.outside), median(self.waited));
        let share = |part: f64| 100.0 * part / all;
        let note = format!(
            "{:.0} % of it in calls of the kernel or the device, {:.0} % in waits for the device; medians of {rounds}",
            share(outside),
            share(waited)
        );
        let figure = Figure::plain(name.into(), "us", all).note(note);
        Figure { beside, ..figure }
    }
}

/// Opens and closes the device `rounds` times.
///
/// # Errors
///
/// When it cannot be opened, or a frame is lost.
pub fn run(fixture: &Fixture, on: &str, rounds: usize) -> Result<Vec<Figure>, Failed> {
    // First, as long as nothing was allocated that could be used again.
    let mut figures = idle(fixture)?;
    let (mut opened, mut closed, mut by_hand) = (Times::default(), Times::default(), Vec::new());
    for _ in 0..rounds {
        one(fixture, &mut opened, &mut closed)?;
        let start = Instant::now();
        let mut hand = ByHand::open(fixture.transport()?, FRAME)?;
        hand.send(1);
        while hand.receive() == 0 {
            ensure(start.elapsed() < PATIENCE, || "no frame came back".into())?;
        }
        by_hand.push(micros(start.elapsed()));
    }
    let name = format!("open to first packet ({on})");
    figures.push(opened.figure(&name, Some(median(by_hand))));
    figures.push(closed.figure(&format!("last packet to closed ({on})"), None));
    Ok(figures)
}

/// Opens, sends, receives and closes once.
fn one(fixture: &Fixture, opened: &mut Times, closed: &mut Times) -> Result<(), Failed> {
    let start = Instant::now();
    let transport = fixture.transport()?;
    let connected = micros(start.elapsed());
    let transport = Arc::new(Timed::new(transport, nanos));
    let clock = Arc::new(Waits::default());
    let options = Options {
        clock: clock.clone(),
        ..Options::default()
    };
    let outside = || transport.take() as f64 / 1e3;
    let device = Device::open_with(transport.clone(), &loopback(), options)?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, FRAME.into(), 1);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    opened.add(start.elapsed(), connected + outside(), clock.take());
    let start = Instant::now();
    drop(port);
    let report = device.close();
    closed.add(start.elapsed(), outside(), clock.take());
    ensure_eq(report.broken, None, "broken")
}

fn loopback() -> Config {
    Config {
        loopback: true,
        ..Config::default()
    }
}

/// What a device and a port take of memory, beside what they map.
fn idle(fixture: &Fixture) -> Result<Vec<Figure>, Failed> {
    let transport = fixture.transport()?;
    let before = resident()?;
    let device = Device::open(transport, &loopback())?;
    let with_device = resident()?;
    let port = Port::open(&device, &PortConfig::default())?;
    let with_port = resident()?;
    let mapped = device.ledger().totals().live_bytes as f64;
    drop(port);
    drop(device.close());
    let figure = |name: &str, from: u64, to: u64| {
        Figure::plain(name.into(), "bytes", to.saturating_sub(from) as f64)
    };
    let device = figure("resident memory of an open device", before, with_device);
    let port = figure("resident memory of an idle port", with_device, with_port);
    Ok(vec![
        device.note("its threads, its accounts; pages of program files are not counted"),
        Figure {
            beside: Some(mapped),
            ..port.note("beside the bytes that the device can reach")
        },
    ])
}

/// Bytes of memory that this process has in use: its own and shared, files left out (`proc_pid_status(5)`).
fn resident() -> Result<u64, Failed> {
    let status = fs::read_to_string("/proc/self/status")?;
    let of = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let sum = of("RssAnon:").zip(of("RssShmem:"));
    let (own, shared) = sum.ok_or("the kernel does not say what is resident")?;
    Ok(1024 * (own + shared))
}
