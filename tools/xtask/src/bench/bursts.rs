//! `cargo xtask bench --only bursts`: guest instructions of bursts between two ports, ours beside DPDK's.
//!
//! One guest has two 82576 on one hub and two 82574 on another. In it, one after the other, our program and DPDK's send,
//! receive and forward the same frames on the same functions, and read the time-stamp counter before and after each burst.
//! QEMU advances that by one for each instruction, however busy the host is.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::figure::Measured;
use super::program::{build_of, take};
use super::{Bench, Part};
use crate::protocol::Run;
use crate::vm::{Accelerator, Boot, Dpdk, Guest, Kernel, Setup, topologies};

mod counts;
mod report;
mod ticks;

pub(crate) use counts::Comparison;
use counts::Counts;
use ticks::Ticks;

/// Our program, and its package.
const PROGRAM: &str = "failstop-bursts";
/// The other side's.
const SOURCE: &str = "tests/peers/dpdk_burst.c";
/// Bursts of each size and kind: with one frame each, a ring is gone round once.
const ROUNDS: u32 = 512;
/// How long a program may run.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) const PART: Part = Part {
    name: "bursts",
    measure: compare,
};

/// A family of devices, by two of them.
struct Family {
    /// As in keys and tables.
    name: &'static str,
    /// The guest's variables.
    near: &'static str,
    far: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        name: "igb",
        near: "$FAILSTOP_IGB",
        far: "$FAILSTOP_IGB_PEER",
    },
    Family {
        name: "e1000e",
        near: "$FAILSTOP_E1000E",
        far: "$FAILSTOP_E1000E_PEER",
    },
];

/// Both sides, and what they were measured with.
#[derive(Debug)]
struct Sides {
    ours: Counts,
    /// None without DPDK.
    theirs: Option<Counts>,
    date: String,
    dpdk: String,
    qemu: String,
    kernel: String,
}

fn compare(bench: &Bench) -> Result<Measured> {
    let (dpdk, skipped) = match super::dpdk()? {
        Ok(dpdk) => (Some(dpdk), Vec::new()),
        Err(why) => {
            let what = format!("bursts: what is beside ours, for want of DPDK: {why}");
            (None, vec![what])
        }
    };
    let sides = measure(&bench.folder, dpdk.as_ref())?;
    Ok(Measured {
        skipped,
        ..report::measured(&sides)?
    })
}

/// Counts ours again, and holds it against the figures that are kept.
pub(super) fn check(bench: &Bench) -> Result<Vec<Comparison>> {
    let kept = counts::kept()?;
    Ok(counts::compare(&kept, &measure(&bench.folder, None)?.ours))
}

fn measure(folder: &Path, dpdk: Option<&Dpdk>) -> Result<Sides> {
    let program = build_of(PROGRAM, PROGRAM)?;
    let setup = Setup::ensure_for(&[Kernel::Small])?;
    let mut boot = Boot::new(Kernel::Small, topologies::find("two-pairs")?)
        .accelerator(Accelerator::Counted)
        .cpus(1)
        .file(&program)?
        .env("RUST_BACKTRACE", "1")
        .memory_mib(2048)
        .lifetime(4 * PATIENCE + Duration::from_secs(120));
    let mut peer = None;
    if let Some(dpdk) = dpdk {
        let program = folder.join("dpdk_burst");
        dpdk.compile(&super::root().join(SOURCE), &program)?;
        let command;
        (boot, command) = dpdk.send(boot, &program)?;
        peer = Some(command);
    }
    let guest = boot.start(&setup)?;
    prepare(&guest)?;
    let mut sides = Sides {
        ours: Counts::default(),
        theirs: peer.is_some().then(Counts::default),
        date: super::today()?,
        dpdk: dpdk.map_or_else(String::new, |dpdk| dpdk.version().to_owned()),
        qemu: setup.qemu_version()?,
        kernel: guest.greeting().kernel.clone(),
    };
    for family in &FAMILIES {
        let Family { name, near, far } = family;
        let ours = format!("{PROGRAM} {near} {far} {ROUNDS}");
        sides
            .ours
            .extend(counts::named(name, &count(&guest, &ours)?));
        if let (Some(peer), Some(counts)) = (&peer, &mut sides.theirs) {
            let theirs = format!(
                "{peer} -l 0 -m 256 --in-memory --no-telemetry --log-level=lib.eal:warning \
                 -a {near} -a {far} -- {ROUNDS}"
            );
            counts.extend(counts::named(name, &count(&guest, &theirs)?));
        }
    }
    drop(guest.shut_down());
    Ok(sides)
}

/// Gives the functions to vfio-pci, and reserves the large pages that DPDK wants, whoever is measured.
fn prepare(guest: &Guest) -> Result<()> {
    let functions = FAMILIES.iter().flat_map(|family| [family.near, family.far]);
    let mut line: String = functions.map(|function| take(function) + " && ").collect();
    line += "echo 200 >/proc/sys/vm/nr_hugepages && mkdir -p /var/run";
    let finished = guest.run(&Run::shell(&line).timeout(PATIENCE))?;
    ensure!(finished.success(), "in the guest: {}", finished.text());
    Ok(())
}

/// Runs a program that prints ticks.
fn count(guest: &Guest, line: &str) -> Result<Ticks> {
    let finished = guest.run(&Run::shell(line).timeout(PATIENCE))?;
    ensure!(finished.success(), "{line}: {}", finished.text());
    let text = String::from_utf8_lossy(&finished.stdout);
    ticks::parse(&text, ROUNDS).with_context(|| format!("{line} said:\n{text}"))
}
