//! An emulated 82576 in a process of its own, for a guest: its control socket, and the other end of its cable.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::TempDir;

/// How long it may take to start, and to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two frames.
const PACE: Duration = Duration::from_millis(1);
const MAC: [u8; 6] = [0x02, 0, 0, 0x82, 0x57, 0x60];
/// Bytes of a frame, without frame check sequence.
const FRAME: usize = 60;

/// What became of the accesses that the device made by its faults.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rogue {
    /// They met no mapping, and were not performed.
    pub(super) blocked: u64,
    /// They met memory that the address was mapped to later.
    pub(super) reached: u64,
    /// They met the memory that they were meant for, which was mapped still.
    pub(super) late: u64,
}

/// The device. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Emulated {
    control: BufReader<UnixStream>,
    _traffic: Traffic,
    _process: Process,
    folder: TempDir,
}

/// A process, killed when dropped.
#[derive(Debug)]
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// The thread that sends, until dropped.
#[derive(Debug)]
struct Traffic {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

impl Emulated {
    /// Starts it from a program that becomes the emulator by the word `emulate`, with frames that arrive by its cable all
    /// the time.
    pub(super) fn start(program: &Path) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
        let path = |name: &str| folder.path().join(name);
        let (here, there) = (path("here"), path("there"));
        let wire = UnixDatagram::bind(&here).context("cannot make the cable")?;
        wire.set_nonblocking(true)?;
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        let process = Command::new(program)
            .args(["emulate", "--mac", &mac, "--socket"])
            .arg(path("device"))
            .arg("--control")
            .arg(path("control"))
            .arg("--wire")
            .arg(format!("dgram:{}:{}", there.display(), here.display()))
            // What it blocks is counted; a line for each is too many.
            .env("RUST_LOG", "error")
            .spawn()
            .map(Process)
            .with_context(|| format!("cannot start {}", program.display()))?;
        let control = BufReader::new(connect(&path("control"))?);
        let ends = Arc::new(AtomicBool::new(false));
        let stop = ends.clone();
        let thread = Some(thread::spawn(move || send(&wire, &there, &stop)));
        Ok(Self {
            control,
            _traffic: Traffic { ends, thread },
            _process: process,
            folder,
        })
    }

    /// Where it is served.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("device")
    }

    /// Has the device misbehave: `NAME[:ARG...][@TRIGGER]`.
    pub(super) fn fault(&mut self, spec: &str) -> Result<()> {
        self.request(&format!("fault {spec}")).map(drop)
    }

    /// Counts from 0 from here on.
    pub(super) fn reset_counters(&mut self) -> Result<()> {
        self.request("reset-counters").map(drop)
    }

    /// What its faults have done.
    pub(super) fn rogue(&mut self) -> Result<Rogue> {
        let mut reply = self.request("stats")?;
        serde_json::from_value(reply["stats"]["rogue"].take())
            .context("the emulator's counters are not what they were")
    }

    fn request(&mut self, request: &str) -> Result<Value> {
        writeln!(self.control.get_mut(), "{request}").context("the emulator has ended")?;
        let mut line = String::new();
        self.control
            .read_line(&mut line)
            .context("the emulator does not answer")?;
        let reply: Value = serde_json::from_str(&line).context("the emulator has ended")?;
        match reply.get("error") {
            Some(why) => bail!("the emulator refuses '{request}': {why}"),
            None => Ok(reply),
        }
    }
}

fn connect(control: &Path) -> Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    let stream = loop {
        match UnixStream::connect(control) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => {
                return Err(error).context("the emulator did not start in time");
            }
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends frames to the device until told to stop. What finds no room is lost, as on any cable.
fn send(wire: &UnixDatagram, to: &Path, stop: &AtomicBool) {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&MAC);
    frame[6..12].copy_from_slice(&[0x02, 0, 0, 0, 0, 1]);
    // A local experiment's type (IEEE Std 802).
    frame[12..14].copy_from_slice(&[0x88, 0xB5]);
    while !stop.load(Ordering::Relaxed) {
        let _lost = wire.send_to(&frame, to);
        thread::sleep(PACE);
    }
}
