//! Frames a second and thread on a ring whose device is this process, beside a roofline: a loop over memory of the same shape
//! that touches the same cache lines (descriptor, slot, the caller's frame) and does nothing else, no check and no account.
//!
//! Descriptors are completed in batches, out of the time. Both sides take turns in one run, so that whatever else the machine
//! does hits both, and the best round of each counts. Cycles are counted without the processor's counters, which a virtual
//! machine often has not: by how long a chain of multiplications takes, each of which waits for the one before.

use std::hint::black_box;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use failstop::dma::frame::Frame;
use failstop::port::{Port, PortConfig};
use libtest_mimic::Failed;

use super::Figure;
use super::scripted::{RX, Script, TX, received, sent};
use crate::fixture::ensure_eq;

/// Frames of a burst.
const BURST: usize = 32;
/// Bursts of a batch: as many frames as a ring's descriptors less one, rounded down.
const BATCH: usize = 15;
/// Descriptors of a ring.
const ENTRIES: usize = 512;
/// Batches of a round.
const BATCHES: usize = 200;
/// Frames of a round.
const FRAMES: f64 = (BATCHES * BATCH * BURST) as f64;
/// Rounds of each side.
const ROUNDS: usize = 20;
/// Bytes of a frame.
const BYTES: u32 = 60;
/// What ours must be at least, in what the roofline is.
const LEAST: f64 = 0.8;
/// Multiplications of a chain.
const CHAIN: u32 = 1_000_000;
/// Cycles of one: 64 by 64 bits to 64, on x86-64 since Nehalem and Zen, and on Neoverse.
const MULTIPLICATION: f64 = 3.0;

/// What is done with a burst.
#[derive(Clone, Copy, Debug)]
enum Path {
    Rx,
    Tx,
    Io,
}

/// Receiving, sending and both.
///
/// # Errors
///
/// When a burst does not do what it should.
pub fn run() -> Result<Vec<Figure>, Failed> {
    let paths = [(Path::Rx, "rx"), (Path::Tx, "tx"), (Path::Io, "io")];
    let mut figures = Vec::new();
    for (path, name) in paths {
        let best = measure(path)?;
        figures.push(speed(name, best));
        figures.push(cycles(name, best));
    }
    Ok(figures)
}

fn cycles(name: &str, [ours, beside, chain]: [Duration; 3]) -> Figure {
    let cycle = chain.as_secs_f64() / f64::from(CHAIN) / MULTIPLICATION;
    let each = |time: Duration| time.as_secs_f64() / cycle / FRAMES;
    Figure {
        beside: Some(each(beside)),
        ..Figure::plain(
            format!("scripted ring, {name}: cycles per packet"),
            "cycles",
            each(ours),
        )
    }
    .note("a multiplication that waits for another taken as 3")
}

fn speed(name: &str, [ours, beside, _]: [Duration; 3]) -> Figure {
    let each = |time: Duration| time.as_secs_f64() * 1e9 / FRAMES;
    let per_second = |time: Duration| FRAMES / time.as_secs_f64();
    Figure {
        figure: format!("scripted ring, {name}: packets per second"),
        unit: "packets/s",
        ours: per_second(ours),
        beside: Some(per_second(beside)),
        limit: None,
        at_least: Some(LEAST),
        note: format!(
            "{:.2} ns a packet beside {:.2} of a loop over the same cache lines",
            each(ours),
            each(beside)
        ),
    }
}

/// The best round of ours and of the roofline, and the best chain.
fn measure(path: Path) -> Result<[Duration; 3], Failed> {
    let script = Script::open()?;
    let config = PortConfig {
        rx_entries: ENTRIES as u32,
        tx_entries: ENTRIES as u32,
        ..PortConfig::default()
    };
    let mut ours = Ours {
        port: Port::open(&script.device, &config)?,
        frames: Vec::new(),
        script: &script,
        at: 0,
    };
    ours.frames = ours.port.take_frames(BURST).ok_or("no frames")?;
    for frame in &mut ours.frames {
        frame.set_len(BYTES)?;
    }
    let mut roofline = Roofline::new();
    let mut best = [Duration::MAX; 3];
    for _ in 0..ROUNDS {
        let mut times = [Duration::ZERO, Duration::ZERO, chain()];
        for _ in 0..BATCHES {
            times[0] += ours.batch(path)?;
            times[1] += roofline.batch(path);
        }
        for (best, time) in best.iter_mut().zip(times) {
            *best = time.min(*best);
        }
    }
    drop(ours);
    ensure_eq(script.device.close().broken, None, "broken")?;
    Ok(best)
}

/// How long [`CHAIN`] multiplications take, each of which waits for the one before.
fn chain() -> Duration {
    let mut value = black_box(3u64);
    let start = Instant::now();
    for _ in 0..CHAIN {
        value = value.wrapping_mul(value);
    }
    let time = start.elapsed();
    black_box(value);
    time
}

struct Ours<'a> {
    port: Port,
    frames: Vec<Frame>,
    script: &'a Script,
    /// The next descriptor of either ring, counted on.
    at: usize,
}

impl Ours<'_> {
    fn batch(&mut self, path: Path) -> Result<Duration, Failed> {
        let index = |at: usize| (at % ENTRIES) as u32;
        let end = self.at + BATCH * BURST;
        if !matches!(path, Path::Tx) {
            for at in self.at..end {
                self.script.done(RX, index(at), received(BYTES))?;
            }
        }
        let start = Instant::now();
        let mut passed = 0;
        for _ in 0..BATCH {
            passed += match path {
                Path::Rx => self.port.rx_burst(&mut self.frames),
                Path::Tx => self.port.tx_burst(&mut self.frames),
                Path::Io => {
                    let received = self.port.rx_burst(&mut self.frames);
                    let frames = self.frames.get_mut(..received).unwrap_or_default();
                    self.port.tx_burst(frames)
                }
            };
        }
        let time = start.elapsed();
        if !matches!(path, Path::Rx) {
            self.script.done(TX, index(end - 1), sent())?;
        }
        self.at = end;
        ensure_eq(passed, BATCH * BURST, "frames")?;
        Ok(time)
    }
}

type Descriptor = [AtomicU64; 2];

/// A ring's memory.
struct Ring {
    descriptors: Vec<Descriptor>,
    slots: Vec<u32>,
}

impl Ring {
    fn new() -> Self {
        Self {
            descriptors: (0..ENTRIES).map(|_| Descriptor::default()).collect(),
            slots: (0..ENTRIES as u32).map(|slot| slot * 2048).collect(),
        }
    }

    /// The rows of a burst that begins at this descriptor, a multiple of [`BURST`].
    #[inline(always)]
    fn rows(&mut self, at: usize) -> impl Iterator<Item = (&Descriptor, &mut u32)> {
        let first = at % ENTRIES;
        let descriptors = self.descriptors[first..first + BURST].iter();
        descriptors.zip(&mut self.slots[first..first + BURST])
    }
}

/// A caller's frame: as large as [`Frame`].
struct Handle {
    _region: u64,
    offset: u32,
    len: u32,
}

struct Roofline {
    rx: Ring,
    tx: Ring,
    frames: Vec<Handle>,
    at: usize,
}

impl Roofline {
    fn new() -> Self {
        let handle = |slot| Handle {
            _region: 0,
            offset: slot,
            len: BYTES,
        };
        Self {
            rx: Ring::new(),
            tx: Ring::new(),
            frames: (0..BURST as u32).map(handle).collect(),
            at: 0,
        }
    }

    fn batch(&mut self, path: Path) -> Duration {
        let end = self.at + BATCH * BURST;
        if !matches!(path, Path::Tx) {
            for at in self.at..end {
                let word = &self.rx.descriptors[at % ENTRIES][1];
                word.store(received(BYTES), Ordering::Relaxed);
            }
        }
        let start = Instant::now();
        for burst in 0..BATCH {
            let at = self.at + burst * BURST;
            match path {
                Path::Rx => self.receive(at),
                Path::Tx => self.send(at),
                Path::Io => {
                    self.receive(at);
                    self.send(at);
                }
            }
        }
        let time = start.elapsed();
        self.at = end;
        black_box(&self.frames);
        time
    }

    #[inline(never)]
    fn receive(&mut self, at: usize) {
        for ((descriptor, slot), frame) in self.rx.rows(at).zip(&mut self.frames) {
            frame.len = (descriptor[1].load(Ordering::Relaxed) >> 32) as u32;
            mem::swap(slot, &mut frame.offset);
            descriptor[0].store((*slot).into(), Ordering::Relaxed);
            descriptor[1].store(0, Ordering::Relaxed);
        }
    }

    #[inline(never)]
    fn send(&mut self, at: usize) {
        for ((descriptor, slot), frame) in self.tx.rows(at).zip(&mut self.frames) {
            mem::swap(slot, &mut frame.offset);
            descriptor[0].store((*slot).into(), Ordering::Relaxed);
            descriptor[1].store(frame.len.into(), Ordering::Relaxed);
        }
    }
}
