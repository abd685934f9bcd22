//! Bursts on a ring whose device is this process, for an instruction counter around it: `cargo xtask
//! bench` runs this under callgrind, which collects inside the `counted_` functions only, and puts down what it has
//! after each case.

use failstop::dma::frame::Frame;
use failstop::port::{Port, PortConfig};
use failstop::provider::Formats;
use libtest_mimic::Failed;

use super::scripted::{RX, Script, TX, received, sent};
use crate::fixture::ensure_eq;

/// Frames of a burst.
const BURSTS: [u32; 4] = [1, 8, 32, 64];
/// Of a poll that finds nothing.
const POLL: u32 = 32;
/// Bytes of a frame.
const BYTES: u32 = 60;

/// What is done with a burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Path {
    /// A poll that finds nothing.
    Empty,
    /// Received.
    Rx,
    /// Sent.
    Tx,
    /// Received and sent.
    Io,
    /// Received, and sent with its addresses exchanged.
    Macswap,
}

impl Path {
    fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Rx => "rx",
            Self::Tx => "tx",
            Self::Io => "io",
            Self::Macswap => "macswap",
        }
    }

    fn receives(self) -> bool {
        matches!(self, Self::Rx | Self::Io | Self::Macswap)
    }

    fn sends(self) -> bool {
        matches!(self, Self::Tx | Self::Io | Self::Macswap)
    }

    /// Its burst; frames that passed.
    fn burst(self, port: &mut Port, frames: &mut [Frame]) -> usize {
        match self {
            // One function for both: of two that are alike the compiler makes one that calls the other.
            Self::Empty | Self::Rx => counted_rx(port, frames),
            Self::Tx => counted_tx(port, frames),
            Self::Io => counted_io(port, frames),
            Self::Macswap => counted_macswap(port, frames),
        }
    }
}

/// Every path in bursts of every size, `turns` times, with the descriptors of `family`. Says on standard output which case was
/// the last, just before it ends.
///
/// # Errors
///
/// When a burst does not do what it should.
pub fn run(family: &str, turns: u32) -> Result<(), Failed> {
    let formats = match family {
        "igb" => Formats::Advanced,
        "e1000e" => Formats::Extended,
        _ => return Err(format!("{family} is neither igb nor e1000e").into()),
    };
    let mut cases = vec![(Path::Empty, POLL)];
    for path in [Path::Rx, Path::Tx, Path::Io, Path::Macswap] {
        cases.extend(BURSTS.map(|burst| (path, burst)));
    }
    for (path, burst) in cases {
        case(formats, path, burst, turns)?;
        println!("case {} {burst}", path.name());
        case_is_over(burst);
    }
    Ok(())
}

fn case(formats: Formats, path: Path, burst: u32, turns: u32) -> Result<(), Failed> {
    let script = Script::with(formats)?;
    let config = PortConfig::default();
    let mut port = Port::open(&script.device, &config)?;
    let mut frames = port.take_frames(burst as usize).ok_or("no frames")?;
    for frame in &mut frames {
        frame.set_len(BYTES)?;
    }
    for turn in 0..turns {
        let turn = turn * burst..(turn + 1) * burst;
        if path.receives() {
            for index in turn.clone() {
                script.done(RX, index % config.rx_entries, received(BYTES))?;
            }
        }
        let passed = path.burst(&mut port, &mut frames);
        let whole = path != Path::Empty;
        ensure_eq(passed, if whole { burst as usize } else { 0 }, "frames")?;
        if path.sends() {
            script.done(TX, (turn.end - 1) % config.tx_entries, sent())?;
        }
    }
    drop(frames);
    drop(port);
    ensure_eq(script.device.close().broken, None, "broken")
}

/// Where callgrind puts down what it has. Takes what nobody needs, so that the compiler makes it one function with no other.
#[inline(never)]
fn case_is_over(burst: u32) {
    std::hint::black_box(burst);
}

#[inline(never)]
fn counted_rx(port: &mut Port, frames: &mut [Frame]) -> usize {
    port.rx_burst(frames)
}

#[inline(never)]
fn counted_tx(port: &mut Port, frames: &mut [Frame]) -> usize {
    port.tx_burst(frames)
}

#[inline(never)]
fn counted_io(port: &mut Port, frames: &mut [Frame]) -> usize {
    forward(port, frames)
}

#[inline(never)]
fn counted_macswap(port: &mut Port, frames: &mut [Frame]) -> usize {
    let received = port.rx_burst(frames);
    let frames = frames.get_mut(..received).unwrap_or_default();
    frames.iter_mut().for_each(swap_addresses);
    port.tx_burst(frames)
}

/// Receives a burst and sends it.
#[inline(always)]
pub(super) fn forward(port: &mut Port, frames: &mut [Frame]) -> usize {
    let received = port.rx_burst(frames);
    port.tx_burst(frames.get_mut(..received).unwrap_or_default())
}

/// Exchanges destination and source, 6 bytes each.
#[inline(always)]
fn swap_addresses(frame: &mut Frame) {
    if let Some(mut head) = frame.head::<12>() {
        let (a, b, c) = (head.word::<0>(), head.word::<4>(), head.word::<8>());
        head.set_word::<0>(b >> 16 | c << 16);
        head.set_word::<4>(c >> 16 | a << 16);
        head.set_word::<8>(a >> 16 | b << 16);
    }
}
