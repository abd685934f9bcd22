//! `cargo xtask bench --faults`: what a device that does not stop does to the memory of whoever drives it, with failstop
//! and with DPDK.
//!
//! Each fault is tried with each driver in a guest of its own: the emulated 82576 is a PCI function of it, by QEMU's
//! `vfio-user-pci`, and the driver has it by the guest's kernel VFIO, behind an IOMMU. Frames arrive all the time. The
//! device begins to misbehave, the port is stopped and closed, and the program poisons what the driver gave back and looks
//! at it again. Both programs say the same lines; one watchdog times and ends both; the emulator counts the accesses.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::emulated::{Emulated, Rogue};
use super::figure::{Block, Measured};
use super::program::{PROGRAM, take};
use super::{Bench, Part};
use crate::protocol::Run;
use crate::vm::{Boot, Dpdk, Guest, Kernel, Setup, topologies};

mod report;

use report::{figures, markdown};

pub(super) const PART: Part = Part {
    name: "faults",
    measure: compare,
};

/// How long a call may take. Our longest is bounded by the deadlines of a close and of a reset, 14 s.
const LIMIT: Duration = Duration::from_secs(30);
/// How long a program may run.
const PATIENCE: Duration = Duration::from_secs(240);
/// In the guest: the device misbehaves when this file is there.
const GO: &str = "/run/go";
/// The other side's program.
const SOURCE: &str = "tests/peers/dpdk_faults.c";

/// What is wrong with the device.
#[derive(Clone, Copy, Debug)]
struct Fault {
    name: &'static str,
    /// What it does, for people.
    text: &'static str,
    /// The emulator's faults that it is made of.
    specs: &'static [&'static str],
}

/// The faults; first none, for what is counted without one.
const FAULTS: &[Fault] = &[
    Fault {
        name: "none",
        text: "nothing is wrong",
        specs: &[],
    },
    Fault {
        name: "rxq-stuck",
        text: "the receive queue goes on writing, also after CTRL.RST",
        specs: &["rxq-stuck"],
    },
    Fault {
        name: "lie",
        text: "the queue reads as stopped and goes on writing",
        specs: &["lie"],
    },
    Fault {
        name: "bme-ignored",
        text: "as rxq-stuck, also with bus mastering off, and no function-level reset helps",
        specs: &["rxq-stuck", "bme-ignored", "flr-noop"],
    },
    Fault {
        name: "gone",
        text: "the function fell off the bus: every read is all-ones",
        specs: &["gone"],
    },
];

/// Who drives the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Driver {
    Failstop,
    Dpdk,
}

/// What was written into memory that had been given back.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Written {
    buffers: u64,
    bytes: u64,
    /// Buffers that were watched; of the heap, their bytes.
    of: u64,
}

/// How a call ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Call {
    /// It returned this, after so many milliseconds.
    Returned { code: i64, milliseconds: u64 },
    /// It had not returned after so many milliseconds, and was killed.
    Never { milliseconds: u64 },
    /// It was never made.
    NotMade,
}

/// What one driver made of one fault.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    fault: &'static str,
    driver: Driver,
    stop: Call,
    close: Call,
    /// Buffers that were given back by stop, and written after it returned.
    after_stop: Option<Written>,
    /// The same after close.
    after_close: Option<Written>,
    /// The ring's memory, used for something else after close.
    heap: Option<Written>,
    /// From the fault on, until the process had ended or was killed.
    rogue: Rogue,
    /// How long the process took to end, after its last call; none when the kernel still held it after three seconds.
    exit_milliseconds: Option<u64>,
    notes: Vec<String>,
}

/// Everything, and what it was measured with.
#[derive(Clone, Debug, Serialize)]
struct Comparison {
    date: String,
    dpdk: String,
    qemu: String,
    kernel: String,
    limit_seconds: u64,
    cells: Vec<Cell>,
}

fn compare(bench: &Bench) -> Result<Measured> {
    let dpdk = match super::dpdk()? {
        Ok(dpdk) => dpdk,
        Err(why) => {
            return Ok(Measured {
                skipped: vec![format!("faults, for want of DPDK: {why}")],
                ..Measured::default()
            });
        }
    };
    let comparison = measure(bench.program()?, &dpdk, &bench.folder)?;
    Ok(Measured {
        blocks: vec![Block {
            name: "faults",
            text: markdown(&comparison),
        }],
        ..figures(&comparison).into()
    })
}

/// Tries every fault with both drivers.
fn measure(program: &Path, dpdk: &Dpdk, folder: &Path) -> Result<Comparison> {
    let setup = Setup::ensure_for(&[Kernel::Small])?;
    let peer = folder.join("dpdk_faults");
    dpdk.compile(&super::root().join(SOURCE), &peer)?;
    let mut comparison = Comparison {
        date: super::today()?,
        dpdk: dpdk.version().to_owned(),
        qemu: setup.qemu_version()?,
        kernel: String::new(),
        limit_seconds: LIMIT.as_secs(),
        cells: Vec::new(),
    };
    for fault in FAULTS {
        for driver in [Driver::Failstop, Driver::Dpdk] {
            let device = Emulated::start(program)?;
            let boot = Boot::new(Kernel::Small, topologies::find("vfio-user")?)
                .file(program)?
                .env("FAILSTOP_IOMMU", "container")
                .env("RUST_BACKTRACE", "1")
                .socket("emulated", device.socket())
                .lifetime(PATIENCE + Duration::from_secs(120));
            let (boot, line) = match driver {
                Driver::Failstop => (boot, ours()),
                Driver::Dpdk => {
                    let (boot, command) = dpdk.send(boot, &peer)?;
                    (boot, theirs(&command))
                }
            };
            let guest = boot.start(&setup)?;
            comparison.kernel = guest.greeting().kernel.clone();
            let cell = try_one(&guest, device, *fault, driver, &line)
                .with_context(|| format!("{driver:?} with {}", fault.name))?;
            eprintln!("   {}", report::line(&cell));
            comparison.cells.push(cell);
        }
    }
    let json = serde_json::to_string_pretty(&comparison)?;
    fs::write(folder.join("faults.json"), json)?;
    fs::write(folder.join("faults.md"), markdown(&comparison))?;
    Ok(comparison)
}

/// The guest's command for our side.
fn ours() -> String {
    let (limit, take) = (LIMIT.as_secs(), take("$FAILSTOP_EMULATED"));
    format!(
        "{take} && FAILSTOP_DEVICE=$FAILSTOP_EMULATED {PROGRAM} watch {limit} {PROGRAM} faults {GO}"
    )
}

/// The guest's command for DPDK's, which wants large pages.
fn theirs(program: &str) -> String {
    let (limit, take) = (LIMIT.as_secs(), take("$FAILSTOP_EMULATED"));
    format!(
        "{take} && echo 64 >/proc/sys/vm/nr_hugepages && mkdir -p /var/run && {PROGRAM} watch {limit} \
         {program} -l 0 -m 64 --in-memory --no-telemetry --log-level=lib.eal:warning -a $FAILSTOP_EMULATED -- {GO}"
    )
}

/// Runs one driver's program to its end, or to that of its time.
fn try_one(
    guest: &Guest,
    mut device: Emulated,
    fault: Fault,
    driver: Driver,
    line: &str,
) -> Result<Cell> {
    let mut cell = Cell::new(fault, driver);
    let mut lines = Lines::default();
    let mut trouble = Ok(());
    let running = guest.spawn(&Run::shell(line).timeout(PATIENCE))?;
    let finished = running.wait_with(|_, bytes| {
        for line in lines.take(bytes) {
            if line.starts_with("ready ") && trouble.is_ok() {
                trouble = begin(guest, &mut device, fault);
            }
            cell.read(&line);
        }
    })?;
    trouble?;
    cell.rogue = device.rogue()?;
    let dead = matches!(cell.stop, Call::Never { .. }) || matches!(cell.close, Call::Never { .. });
    ensure!(
        finished.success() && (dead || cell.heap.is_some()),
        "{}",
        finished.text()
    );
    Ok(cell)
}

/// Has the device misbehave, and the program go on.
fn begin(guest: &Guest, device: &mut Emulated, fault: Fault) -> Result<()> {
    for spec in fault.specs {
        device.fault(spec)?;
    }
    device.reset_counters()?;
    guest.put(GO, 0o644, b"")
}

impl Cell {
    fn new(fault: Fault, driver: Driver) -> Self {
        Self {
            fault: fault.name,
            driver,
            stop: Call::NotMade,
            close: Call::NotMade,
            after_stop: None,
            after_close: None,
            heap: None,
            rogue: Rogue::default(),
            exit_milliseconds: None,
            notes: Vec::new(),
        }
    }

    /// Takes a line into account that the program or its watchdog said.
    fn read(&mut self, line: &str) {
        if self.understand(line).is_err() {
            self.notes.push(line.to_owned());
        }
    }

    fn understand(&mut self, line: &str) -> Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["ready" | "call" | "done", ..] | ["exit", "never"] => {}
            ["exit", time] => self.exit_milliseconds = Some(time.parse()?),
            ["return", name, code, ..] => {
                *self.call(name)? = Call::Returned {
                    code: code.parse()?,
                    milliseconds: 0,
                };
            }
            ["took", name, time] => {
                let time = time.parse()?;
                if let Call::Returned { milliseconds, .. } = self.call(name)? {
                    *milliseconds = time;
                }
            }
            ["never", name, time] => {
                let milliseconds = time.parse()?;
                *self.call(name)? = Call::Never { milliseconds };
            }
            ["written", name, buffers, bytes, of] => {
                let written = Written {
                    buffers: buffers.parse()?,
                    bytes: bytes.parse()?,
                    of: of.parse()?,
                };
                match name {
                    "stop" => self.after_stop = Some(written),
                    "close" => self.after_close = Some(written),
                    "heap" => self.heap = Some(written),
                    _ => bail!("written where?"),
                }
            }
            _ => bail!("something else"),
        }
        Ok(())
    }

    fn call(&mut self, name: &str) -> Result<&mut Call> {
        match name {
            "stop" => Ok(&mut self.stop),
            "close" => Ok(&mut self.close),
            _ => bail!("there is no such call"),
        }
    }
}

/// Lines of a stream that comes in pieces.
#[derive(Debug, Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that are whole now.
    fn take(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend(bytes);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else {
            return Vec::new();
        };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        let text = String::from_utf8_lossy(&whole);
        text.lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(lines: &[&str]) -> Cell {
        let mut cell = Cell::new(FAULTS[1], Driver::Dpdk);
        lines.iter().for_each(|line| cell.read(line));
        cell
    }

    #[test]
    fn a_call_that_returned_has_its_code_and_its_time() {
        let cell = cell(&["call stop", "return stop 0 0 0", "took stop 31"]);
        let returned = Call::Returned {
            code: 0,
            milliseconds: 31,
        };
        assert_eq!((cell.stop, cell.close), (returned, Call::NotMade));
    }

    #[test]
    fn a_call_that_was_cut_short_never_returned() {
        let cell = cell(&["call close", "never close 40001"]);
        assert_eq!(
            cell.close,
            Call::Never {
                milliseconds: 40_001
            }
        );
    }

    #[test]
    fn what_was_written_is_counted_where_it_was() {
        let cell = cell(&["written stop 24 1440 1280", "written heap 1 320 8192"]);
        let written = |buffers, bytes, of| Some(Written { buffers, bytes, of });
        assert_eq!(cell.after_stop, written(24, 1440, 1280));
        assert_eq!(cell.after_close, None);
        assert_eq!(cell.heap, written(1, 320, 8192));
    }

    #[test]
    fn other_lines_are_kept() {
        let cell = cell(&["EAL: No free hugepages", "written where 1 2 3"]);
        assert_eq!(cell.notes.len(), 2);
    }

    #[test]
    fn lines_are_whole_however_they_come() {
        let mut lines = Lines::default();
        assert_eq!(lines.take(b"call st"), [""; 0]);
        assert_eq!(
            lines.take(b"op\nreturn stop 0\nto"),
            ["call stop", "return stop 0"]
        );
        assert_eq!(lines.take(b"ok stop 1\n"), ["took stop 1"]);
    }
}
