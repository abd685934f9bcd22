//! Bursts with longer frames, larger rings and more queues, for an instruction counter around it: `cargo xtask bench`
//! runs this under callgrind, which collects inside the `collect_growth_` functions only, and puts aside what it
//! collected whenever `growth_phase_over` is called.

use std::hint::black_box;
use std::thread;

use failstop::dma::frame::Frame;
use failstop::objects::{QueueInit, Rq, Sq};
use failstop::owned::Owned;
use libtest_mimic::Failed;

use super::scripted::{RX, Script, TX, received, sent};
use crate::fixture::{Outcome, ensure_eq};

/// Frames of each burst.
const BURST: u32 = 32;
/// Bytes of a frame, without frame check sequence.
const LENGTHS: [u32; 8] = [64, 128, 256, 512, 1024, 1514, 4096, 9000];
/// Descriptors of a ring.
const RINGS: [u32; 7] = [64, 128, 256, 512, 1024, 2048, 4096];
/// Queues of each direction, used in turn.
const QUEUES: [u32; 5] = [1, 2, 4, 8, 16];

/// Queues of each direction, each owned by a thread of its own.
const THREADS: [u32; 2] = [1, 2];

/// What bursts are measured with.
#[derive(Clone, Copy)]
struct Shape {
    len: u32,
    entries: u32,
    queues: u32,
    /// Each queue pair has a thread, instead of its turn.
    threads: bool,
}

/// A port's.
const USUAL: Shape = Shape {
    len: 64,
    entries: 512,
    queues: 1,
    threads: false,
};

/// `bursts` of each direction with each shape. Prints what each was: direction, what grows, how much of it.
///
/// # Errors
///
/// When a burst does not do what it should.
pub fn run(bursts: u32) -> Outcome {
    for len in LENGTHS {
        measure("bytes", len, Shape { len, ..USUAL }, bursts)?;
    }
    for entries in RINGS {
        measure("descriptors", entries, Shape { entries, ..USUAL }, bursts)?;
    }
    for queues in QUEUES {
        measure("queues", queues, Shape { queues, ..USUAL }, bursts)?;
    }
    for queues in THREADS {
        let threads = true;
        let shape = Shape {
            queues,
            threads,
            ..USUAL
        };
        measure("threads", queues, shape, bursts)?;
    }
    Ok(())
}

/// A queue of each direction.
struct Pair {
    number: u32,
    rq: Owned<Rq>,
    sq: Owned<Sq>,
    frames: Vec<Frame>,
    /// The next descriptor of each, counted on.
    at: [u32; 2],
}

fn measure(what: &str, x: u32, shape: Shape, bursts: u32) -> Outcome {
    let frame = shape.len.next_multiple_of(1024).max(2048);
    let script = Script::of(frame)?;
    let device = &script.device;
    let pd = device.alloc_pd()?;
    let count = shape.queues * (2 * shape.entries + BURST);
    let (mr, mut pool) = pd.register(count, frame)?;
    let (rx_cq, tx_cq) = (
        device.create_cq(shape.queues * shape.entries)?,
        device.create_cq(shape.queues * shape.entries)?,
    );
    let mut pair = |number| -> Result<Pair, Failed> {
        let rq = pd.create_rq(QueueInit {
            pd: &pd,
            cq: &rx_cq,
            mr: &mr,
            pool: &mut pool,
            entries: shape.entries,
            number,
        })?;
        let sq = pd.create_sq(QueueInit {
            pd: &pd,
            cq: &tx_cq,
            mr: &mr,
            pool: &mut pool,
            entries: shape.entries,
            number,
        })?;
        Ok(Pair {
            number,
            rq,
            sq,
            frames: pool.take_many(BURST as usize).ok_or("no frames")?,
            at: [0; 2],
        })
    };
    let pairs: Result<Vec<Pair>, Failed> = (0..shape.queues).map(&mut pair).collect();
    let mut pairs = pairs?;
    pass(&mut pairs, bursts, shape, |pair| {
        pair.receive(&script, shape)
    })?;
    over("rx", what, x);
    pass(&mut pairs, bursts, shape, |pair| pair.send(&script, shape))?;
    over("tx", what, x);
    drop(pairs);
    drop(pool);
    drop((rx_cq, tx_cq, mr, pd));
    ensure_eq(script.device.close().broken, None, "broken")
}

/// So many bursts in all, by the pairs in turn or by a thread for each.
fn pass(
    pairs: &mut [Pair],
    bursts: u32,
    shape: Shape,
    burst: impl Fn(&mut Pair) -> Outcome + Sync,
) -> Outcome {
    if !shape.threads {
        return (0..bursts).try_for_each(|turn| burst(&mut pairs[(turn % shape.queues) as usize]));
    }
    let burst = &burst;
    thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .iter_mut()
            .map(|pair| {
                scope.spawn(move || (0..bursts / shape.queues).try_for_each(|_| burst(pair)))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a thread panicked".into()))
        })
    })
}

impl Pair {
    fn receive(&mut self, script: &Script, shape: Shape) -> Outcome {
        let first = self.at[RX];
        for index in first..first + BURST {
            let index = index % shape.entries;
            script.done_of(self.number, RX, index, received(shape.len))?;
        }
        self.at[RX] += BURST;
        let frames = collect_growth_rx(&mut self.rq, &mut self.frames);
        ensure_eq(frames, BURST as usize, "frames received")
    }

    fn send(&mut self, script: &Script, shape: Shape) -> Outcome {
        // What comes in exchange has the length with which it was sent, or none.
        for frame in &mut self.frames {
            frame.set_len(shape.len)?;
        }
        let frames = collect_growth_tx(&mut self.sq, &mut self.frames);
        ensure_eq(frames, BURST as usize, "frames sent")?;
        self.at[TX] += BURST;
        let last = (self.at[TX] - 1) % shape.entries;
        script.done_of(self.number, TX, last, sent())
    }
}

#[inline(never)]
fn collect_growth_rx(rq: &mut Rq, frames: &mut [Frame]) -> usize {
    black_box(rq.burst(frames))
}

#[inline(never)]
fn collect_growth_tx(sq: &mut Sq, frames: &mut [Frame]) -> usize {
    black_box(sq.burst(frames))
}

/// Ends what is counted together, and says what it was.
fn over(direction: &str, what: &str, x: u32) {
    growth_phase_over();
    println!("{direction} {what} {x}");
}

#[inline(never)]
fn growth_phase_over() {
    black_box(());
}
