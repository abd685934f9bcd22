//! `cargo xtask bench`: what failstop costs, as ratios measured side by side in one run.
//!
//! | part | where | what |
//! | --- | --- | --- |
//! | data path | under callgrind, on this machine | instructions of bursts, and of the checks in them |
//! | speed | on this machine | packets a second on a scripted ring, beside a loop over the same cache lines |
//! | ladder | an emulated device, and QEMU's 82576 | broken to bus master off, beside two bare accesses |
//! | growth | under callgrind, on this machine | instructions of bursts with longer frames, larger rings, more queues |
//! | round trip | an emulated device | frames that come back in a second, and how late, beside a loop by hand |
//! | life | an emulated device | open to first packet, close, resident memory |
//! | ledger | a guest that counts instructions | map and release, beside the bare ioctls |
//! | bursts | two ports in a guest that counts instructions | bursts, beside DPDK's |
//! | faults | an emulated device in a guest | freed memory that a device writes, beside DPDK's |
//!
//! The figures go to `target/bench/` as JSON and Markdown. A part is a file here and a line of [`PARTS`].

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;

use crate::vm::Dpdk;

mod bursts;
mod callgrind;
mod data_path;
mod emulated;
mod faults;
mod figure;
mod growth;
mod ladder;
mod ledger;
mod life;
mod plots;
mod program;
mod readme;
mod round_trip;
mod speed;
mod table;

pub(crate) use bursts::Comparison;
pub(crate) use figure::{Figure, Measured};

/// The parts, in the order in which they run.
const PARTS: &[Part] = &[
    data_path::PART,
    speed::PART,
    growth::PART,
    life::PART,
    round_trip::PART,
    ladder::HERE,
    ladder::IN_GUEST,
    ledger::PART,
    faults::PART,
    bursts::PART,
];

/// A part of the benchmarks.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// What `--only` calls it.
    name: &'static str,
    measure: fn(&Bench) -> Result<Measured>,
}

/// What the parts share.
#[derive(Debug)]
struct Bench {
    /// Where results go.
    folder: PathBuf,
    program: OnceCell<PathBuf>,
}

impl Bench {
    fn new() -> Result<Self> {
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
        let folder = target.join("bench");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self {
            folder: folder.canonicalize()?,
            program: OnceCell::new(),
        })
    }

    /// The program that measures, built when it is first asked for.
    fn program(&self) -> Result<&Path> {
        if self.program.get().is_none() {
            let _first = self.program.set(program::build()?);
        }
        self.program
            .get()
            .map(PathBuf::as_path)
            .context("no program")
    }
}

/// What `--only` takes.
pub(crate) fn names() -> PossibleValuesParser {
    PARTS.iter().map(|part| part.name).into()
}

/// Measures these parts, all without any, and prints tables. With `write`, those that README.md has are put there, and the
/// files that are kept are written. Fails when a limit is passed.
///
/// # Errors
///
/// When something cannot be measured.
pub(crate) fn main(parts: &[String], write: bool) -> Result<ExitCode> {
    let measured = measure(&Bench::new()?, parts)?;
    print!("{}", table::text(&measured.figures));
    for block in &measured.blocks {
        print!("\n{}", block.text);
        if write {
            readme::put(&root().join("README.md"), block.name, &block.text)?;
        }
    }
    for file in measured.files.iter().filter(|_| write) {
        let path = root().join(&file.path);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        fs::write(&path, &file.text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    for what in &measured.skipped {
        println!("skipped: {what}");
    }
    Ok(match measured.figures.iter().all(Figure::is_ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Prints what a burst executes, instruction by instruction.
///
/// # Errors
///
/// When it cannot be counted.
pub(crate) fn asm() -> Result<ExitCode> {
    let bench = Bench::new()?;
    print!("{}", callgrind::listing(bench.program()?, &bench.folder)?);
    Ok(ExitCode::SUCCESS)
}

/// Counts the instructions of bursts again, and prints them beside those that are kept. Fails when one is more than 3 % above.
///
/// # Errors
///
/// When they cannot be counted.
pub(crate) fn check() -> Result<ExitCode> {
    let comparisons = comparisons()?;
    for comparison in &comparisons {
        println!(
            "{comparison}{}",
            if comparison.is_ok() { "" } else { ": NOT OK" }
        );
    }
    if comparisons.iter().all(Comparison::is_ok) {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("what is meant to be so is written by `cargo xtask bench --only bursts --write`");
    Ok(ExitCode::FAILURE)
}

/// The same, for the tier that it is part of.
///
/// # Errors
///
/// As [`check`].
pub(crate) fn comparisons() -> Result<Vec<Comparison>> {
    bursts::check(&Bench::new()?)
}

/// Measures everything, for the tier of that name.
///
/// # Errors
///
/// When something cannot be measured.
pub(crate) fn all() -> Result<Measured> {
    let measured = measure(&Bench::new()?, &[])?;
    eprint!("{}", table::text(&measured.figures));
    Ok(measured)
}

fn measure(bench: &Bench, only: &[String]) -> Result<Measured> {
    let mut measured = Measured::default();
    for part in PARTS {
        if only.is_empty() || only.iter().any(|name| name == part.name) {
            eprintln!("-- {}", part.name);
            measured.add((part.measure)(bench)?);
        }
    }
    let plots = plots::draw(&measured.series, &bench.folder)?;
    measured.files.extend(plots);
    fs::write(
        bench.folder.join("bench.json"),
        serde_json::to_string_pretty(&measured)?,
    )?;
    fs::write(
        bench.folder.join("bench.md"),
        table::markdown(&measured.figures),
    )?;
    Ok(measured)
}

/// DPDK; none where its packages are not to be had, unless everything must be.
fn dpdk() -> Result<Result<Dpdk, String>> {
    match Dpdk::ensure() {
        Ok(dpdk) => Ok(Ok(dpdk)),
        Err(error) if env::var_os("CI").is_some() => Err(error),
        Err(error) => {
            let why = format!("{error:#}");
            Ok(Err(why.lines().next().unwrap_or_default().to_owned()))
        }
    }
}

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The day, for tables that people keep.
fn today() -> Result<String> {
    let output = Command::new("date").args(["-u", "+%F"]).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_names_of_their_own() {
        let mut names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PARTS.len());
    }
}
