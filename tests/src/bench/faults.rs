//! Our side of `cargo xtask bench --faults`: receives, stops and closes a port whose device may not
//! stop, and counts what the device writes into memory that was given back. The other side, with
//! the same lines on standard output, the same poison and the same waits, is
//! `tests/peers/dpdk_faults.c`.
//!
//! *Stop* is the end of the port, with its memory regions: what DPDK's `rte_eth_dev_stop` is, after
//! which an application may use every buffer for something else. Where only the receive queue is
//! destroyed, frames are handed out again inside the same mapping when the device says that the
//! queue stopped (R3), and a device that lies about that writes into them.
//!
//! *Close* is `Device::give_back`, the close with a deadline. `Device::close` ends as soon as the
//! kernel has reset the function, which can take minutes with one that is gone (R12).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use libtest_mimic::Failed;

use crate::fixture::{Fixture, Outcome, ensure};

const BURST: usize = 32;
/// Frames that are received before anything is stopped.
const FRAMES: usize = 64;
const POISON: u8 = 0xA5;
const PATIENCE: Duration = Duration::from_secs(30);
/// How long freed memory is watched.
const WATCHED: Duration = Duration::from_millis(300);
/// What the driver calls its DMA memory.
const MEMORY: &str = "/memfd:failstop-dma";

/// Runs it on the fixture's device, and goes on to the stop when `go` is there.
///
/// # Errors
///
/// When the device cannot be opened, or no frames come.
pub fn run(fixture: &Fixture, go: &Path) -> Outcome {
    let device = fixture.open_with(&Config::default())?;
    let config = PortConfig::default();
    let mut port = Port::open(&device, &config)?;
    // Opened while it is in use, and held: what is written into it later is seen.
    let (frames, rings) = memory()?;
    // As what is received now is, or all that follows would mean nothing.
    let frames = Watched::poison(vec![frames], config.frame_size, false)?;
    let end = Instant::now() + PATIENCE;
    let mut received = 0;
    while received < FRAMES {
        received += receive(&mut port)?;
        ensure(Instant::now() < end, || {
            format!("{received} of {FRAMES} frames came")
        })?;
    }
    ensure(frames.written()?.buffers > 0, || {
        "frames were received, and no change is seen in their memory".into()
    })?;

    say(&format!("ready {}", env!("CARGO_PKG_VERSION")))?;
    while !go.exists() {
        receive(&mut port)?;
    }

    say("call stop")?;
    drop(port);
    say("return stop 0")?;
    // What is kept back was not given to anybody.
    let kept = device.ledger().totals().quarantined_bytes > 0;
    let frames = Watched::poison(frames.files, config.frame_size, kept)?;
    thread::sleep(WATCHED);
    let frames = frames.count("stop")?;

    say("call close")?;
    let report = device.give_back();
    say("return close 0")?;
    let kept = report.totals.quarantined_bytes;
    if kept > 0 {
        say(&format!("{kept} bytes are quarantined"))?;
    }
    let rings = Watched::poison(rings, config.rx_entries * 16, kept > 0)?;
    let frames = Watched::poison(frames, config.frame_size, kept > 0)?;
    thread::sleep(WATCHED);
    frames.count("close")?;
    rings.count("heap")?;
    say("done")
}

/// Receives a burst, gives it back at once, and waits a moment.
fn receive(port: &mut Port) -> Result<usize, Failed> {
    let mut frames = port.take_frames(BURST).ok_or("no frames")?;
    let received = port.rx_burst(&mut frames);
    thread::sleep(Duration::from_millis(1));
    Ok(received)
}

/// The driver's DMA memory, as files: the largest, which has the frames, and the rings.
fn memory() -> Result<(File, Vec<File>), Failed> {
    let mut files = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let link: PathBuf = entry?.path();
        let is_ours = |target: PathBuf| target.to_string_lossy().starts_with(MEMORY);
        if fs::read_link(&link).is_ok_and(is_ours) {
            let file = OpenOptions::new().read(true).write(true).open(link)?;
            files.push((file.metadata()?.len(), file));
        }
    }
    files.sort_by_key(|(len, _)| *len);
    let (_, frames) = files.pop().ok_or("the driver has no DMA memory")?;
    ensure(!files.is_empty(), || "the driver has no rings".into())?;
    Ok((frames, files.into_iter().map(|(_, file)| file).collect()))
}

/// Memory that is watched: every byte of it was poison.
struct Watched {
    files: Vec<File>,
    /// Bytes of a buffer.
    size: usize,
}

/// What was written since.
#[derive(Default)]
struct Written {
    buffers: usize,
    bytes: usize,
    /// Buffers that were watched.
    of: usize,
}

impl Watched {
    /// Nothing is poisoned, or watched, of what is `kept`.
    fn poison(mut files: Vec<File>, size: u32, kept: bool) -> io::Result<Self> {
        if kept {
            files.clear();
        }
        for file in &files {
            let len = file.metadata()?.len();
            file.write_all_at(&vec![POISON; len as usize], 0)?;
        }
        Ok(Self {
            files,
            size: size as usize,
        })
    }

    fn written(&self) -> io::Result<Written> {
        let mut written = Written::default();
        for file in &self.files {
            let mut content = vec![0; file.metadata()?.len() as usize];
            file.read_exact_at(&mut content, 0)?;
            for buffer in content.chunks(self.size) {
                let changed = buffer.iter().filter(|&&byte| byte != POISON).count();
                written.buffers += usize::from(changed > 0);
                written.bytes += changed;
                written.of += 1;
            }
        }
        Ok(written)
    }

    /// Says what was written, and gives the memory back.
    fn count(self, name: &str) -> Result<Vec<File>, Failed> {
        let Written { buffers, bytes, of } = self.written()?;
        say(&format!("written {name} {buffers} {bytes} {of}"))?;
        Ok(self.files)
    }
}

/// Lines are read while we run, so each goes out at once.
fn say(line: &str) -> Outcome {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    Ok(stdout.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(kept: bool) -> Watched {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Watched::poison(vec![file], 2048, kept).unwrap()
    }

    #[test]
    fn a_byte_that_changed_is_seen_in_its_buffer() {
        let watched = watched(false);
        watched.files[0].write_all_at(&[0], 4095).unwrap();
        let written = watched.written().unwrap();
        assert_eq!((written.buffers, written.bytes, written.of), (1, 1, 2));
    }

    #[test]
    fn what_nobody_wrote_is_as_it_was() {
        let written = watched(false).written().unwrap();
        assert_eq!((written.buffers, written.bytes, written.of), (0, 0, 2));
    }

    #[test]
    fn what_is_kept_is_not_touched() {
        assert!(watched(true).files.is_empty());
    }
}
