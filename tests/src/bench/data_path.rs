//! Bursts on a ring whose device is this process, for an instruction counter around it: `cargo xtask
//! bench` runs this under callgrind, which collects inside the `collect_` functions only.

use std::hint::black_box;

use failstop::dma::frame::Frame;
use failstop::port::{Port, PortConfig};
use libtest_mimic::Failed;

use super::scripted::{RX, Script, TX, received, sent};
use crate::fixture::ensure_eq;

/// Frames of each burst.
pub const BURST: u32 = 32;
/// Bytes of each frame.
const BYTES: u32 = 60;

/// `turns` times: a poll that finds nothing, a full receive burst, a full send burst.
///
/// # Errors
///
/// When a burst does not do what it should.
pub fn run(turns: u32) -> Result<(), Failed> {
    let script = Script::open()?;
    let config = PortConfig::default();
    let mut port = Port::open(&script.device, &config)?;
    let mut frames = port.take_frames(BURST as usize).ok_or("no frames")?;
    let mut at = 0;
    for _ in 0..turns {
        ensure_eq(collect_empty(&mut port, &mut frames), true, "nothing there")?;
        for index in at..at + BURST {
            script.done(RX, index % config.rx_entries, received(BYTES))?;
        }
        let full = collect_rx(&mut port, &mut frames);
        ensure_eq(full, BURST as usize, "frames received")?;
        let gone = collect_tx(&mut port, &mut frames);
        ensure_eq(gone, BURST as usize, "frames sent")?;
        at += BURST;
        script.done(TX, (at - 1) % config.tx_entries, sent())?;
    }
    drop(frames);
    drop(port);
    ensure_eq(script.device.close().broken, None, "broken")
}

#[inline(never)]
fn collect_empty(port: &mut Port, frames: &mut [Frame]) -> bool {
    // Another result than below, or the compiler would make one function of both.
    black_box(port.rx_burst(frames)) == 0
}

#[inline(never)]
fn collect_rx(port: &mut Port, frames: &mut [Frame]) -> usize {
    black_box(port.rx_burst(frames))
}

#[inline(never)]
fn collect_tx(port: &mut Port, frames: &mut [Frame]) -> usize {
    black_box(port.tx_burst(frames))
}
