//! `cargo xtask bench`: what failstop costs, as ratios measured side by side in one run.
//!
//! | part | where | what |
//! | --- | --- | --- |
//! | data path | under callgrind, on this machine | instructions of bursts, and of the checks in them |
//! | ladder | an emulated device, and QEMU's 82576 | broken to bus master off, beside two bare accesses |
//! | ledger | a guest that counts instructions | map and release, beside the bare ioctls |
//! | faults | an emulated device in a guest | freed memory that a device writes, beside DPDK's |
//!
//! The figures go to `target/bench/` as JSON and Markdown.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fmt, fs};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::protocol::Run;
use crate::tiers::SUITE;
use crate::vm::{Accelerator, Boot, Dpdk, Kernel, Setup, topologies};

mod callgrind;
mod emulated;
mod faults;
mod readme;

/// The program that measures.
const PROGRAM: &str = "failstop-bench";
/// How long a guest may measure: ten thousand mappings are made and undone fifty times, emulated.
const PATIENCE: Duration = Duration::from_secs(2400);

/// One measurement, as [`PROGRAM`] prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) figure: String,
    pub(crate) unit: String,
    pub(crate) ours: f64,
    pub(crate) beside: Option<f64>,
    pub(crate) limit: Option<f64>,
    #[serde(default)]
    pub(crate) note: String,
}

impl Figure {
    fn ratio(&self) -> Option<f64> {
        self.beside.map(|beside| self.ours / beside)
    }

    /// Within its limit, if it has one. What cannot be computed is not.
    pub(crate) fn is_ok(&self) -> bool {
        let value = self.ratio().unwrap_or(self.ours);
        self.limit.is_none_or(|limit| value <= limit)
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [name, ours, beside, ratio, limit, _] = cells(self);
        write!(
            formatter,
            "{name}: {ours} beside {beside}, ratio {ratio}, limit {limit}"
        )
    }
}

/// A part of the benchmarks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Part {
    /// Bursts.
    DataPath,
    /// The ladder on an emulated device.
    Ladder,
    /// The ladder on QEMU's 82576.
    LadderQemu,
    /// The ledger beside the kernel.
    Ledger,
    /// A device that does not stop, beside DPDK.
    Faults,
}

const ALL: [Part; 5] = [
    Part::DataPath,
    Part::Ladder,
    Part::LadderQemu,
    Part::Ledger,
    Part::Faults,
];

/// What was measured.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) figures: Vec<Figure>,
    /// What could not be measured here, and why.
    pub(crate) skipped: Vec<String>,
}

/// Measures these parts, all without any, and prints a table. Fails when a limit is passed.
///
/// # Errors
///
/// When something cannot be measured.
pub(crate) fn main(parts: &[Part], asm: bool) -> Result<ExitCode> {
    let program = build()?;
    if asm {
        print!("{}", callgrind::listing(&program, &folder()?)?);
        return Ok(ExitCode::SUCCESS);
    }
    let measured = measure(&program, parts)?;
    print!("{}", table(&measured.figures));
    measured
        .skipped
        .iter()
        .for_each(|what| println!("skipped: {what}"));
    Ok(if measured.figures.iter().all(Figure::is_ok) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Measures everything, for the tier of that name.
///
/// # Errors
///
/// When something cannot be measured.
pub(crate) fn all() -> Result<Measured> {
    let measured = measure(&build()?, &[])?;
    eprint!("{}", table(&measured.figures));
    Ok(measured)
}

/// Compares what faults do to failstop and to DPDK, and prints the table; with `write`, also puts it into README.md.
/// Fails when one of ours is not 0.
///
/// # Errors
///
/// When it cannot be measured.
pub(crate) fn compare_faults(write: bool) -> Result<ExitCode> {
    let table = folder()?.join("faults.md");
    // That of another day is none of this one.
    if table.exists() {
        fs::remove_file(&table)?;
    }
    let code = main(&[Part::Faults], false)?;
    if let Ok(text) = fs::read_to_string(&table) {
        print!("\n{text}");
        if write {
            readme::put(&root().join("README.md"), "faults", &text)?;
        }
    }
    Ok(code)
}

fn measure(program: &Path, parts: &[Part]) -> Result<Measured> {
    let parts = if parts.is_empty() { &ALL } else { parts };
    let mut measured = Measured::default();
    for part in parts {
        eprintln!("-- {part:?}");
        measured.figures.extend(match part {
            Part::DataPath => callgrind::figures(program, &folder()?)?,
            Part::Ladder => here(program, &["ladder"])?,
            Part::LadderQemu => ladder_in_guest(program)?,
            Part::Ledger => ledger_in_guest(program)?,
            Part::Faults => match Dpdk::ensure() {
                Ok(dpdk) => faults::figures(&faults::measure(program, &dpdk, &folder()?)?),
                Err(error) if is_strict() => return Err(error),
                Err(error) => {
                    let why = format!("{error:#}");
                    let why = why.lines().next().unwrap_or_default();
                    measured
                        .skipped
                        .push(format!("{part:?}, for want of DPDK: {why}"));
                    Vec::new()
                }
            },
        });
    }
    write(&measured.figures)?;
    Ok(measured)
}

/// Whether what cannot run is a failure.
fn is_strict() -> bool {
    env::var_os("CI").is_some()
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

/// Where results go.
fn folder() -> Result<PathBuf> {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"),
        PathBuf::from,
    );
    let folder = target.join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder.canonicalize()?)
}

fn write(figures: &[Figure]) -> Result<()> {
    let folder = folder()?;
    fs::write(
        folder.join("bench.json"),
        serde_json::to_string_pretty(figures)?,
    )?;
    fs::write(folder.join("bench.md"), markdown(figures))?;
    Ok(())
}

/// Builds the program as people build what they run.
fn build() -> Result<PathBuf> {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--release", "--package", SUITE])
        .args(["--bin", PROGRAM, "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "cannot build {PROGRAM}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .find(|path| path.ends_with(PROGRAM))
        .with_context(|| format!("cargo built no {PROGRAM}"))
}

fn here(program: &Path, words: &[&str]) -> Result<Vec<Figure>> {
    let output = Command::new(program)
        .args(words)
        .env("RUST_LOG", "off")
        .env_remove("FAILSTOP_DEVICE")
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{PROGRAM} {words:?} failed");
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(lines: &str) -> Result<Vec<Figure>> {
    lines
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("no figure: {line}")))
        .collect()
}

fn ladder_in_guest(program: &Path) -> Result<Vec<Figure>> {
    let boot = Boot::new(Kernel::Small, topologies::find("two-igb")?);
    in_guest(boot, program, "ladder igb,container 12")
}

fn ledger_in_guest(program: &Path) -> Result<Vec<Figure>> {
    let boot = Boot::new(Kernel::Small, topologies::find("two-igb")?)
        .accelerator(Accelerator::Counted)
        .cpus(1);
    in_guest(boot, program, "ledger")
}

/// Runs the program on the machine's 82576, through the container transport.
fn in_guest(boot: Boot, program: &Path, words: &str) -> Result<Vec<Figure>> {
    let setup = Setup::ensure_for(&[Kernel::Small])?;
    let guest = boot
        .file(program)?
        .env("RUST_BACKTRACE", "1")
        .env("FAILSTOP_IOMMU", "container")
        .memory_mib(2048)
        .lifetime(PATIENCE + Duration::from_secs(180))
        .start(&setup)?;
    let line = format!(
        "cd /sys/bus/pci/devices/$FAILSTOP_IGB && \
         if [ -e driver ]; then echo $FAILSTOP_IGB > driver/unbind; fi && \
         echo vfio-pci > driver_override && echo $FAILSTOP_IGB > /sys/bus/pci/drivers_probe && \
         ulimit -n 65536 && FAILSTOP_DEVICE=$FAILSTOP_IGB {PROGRAM} {words}"
    );
    let finished = guest.run(&Run::shell(line).timeout(PATIENCE))?;
    drop(guest.shut_down());
    if !finished.success() {
        bail!("{PROGRAM} {words} in the guest: {}", finished.text());
    }
    parse(&String::from_utf8_lossy(&finished.stdout))
}

fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// The cells of a line: figure, ours, beside it, ratio, limit, ok.
fn cells(figure: &Figure) -> [String; 6] {
    let optional = |value: Option<f64>| value.map_or_else(String::new, number);
    let ok = match (figure.limit, figure.is_ok()) {
        (None, _) => "",
        (Some(_), true) => "ok",
        (Some(_), false) => "ABOVE",
    };
    [
        figure.figure.clone(),
        format!("{} {}", number(figure.ours), figure.unit),
        optional(figure.beside),
        optional(figure.ratio()),
        optional(figure.limit),
        ok.to_owned(),
    ]
}

const HEAD: [&str; 6] = ["figure", "ours", "beside it", "ratio", "limit", "ok"];

fn table(figures: &[Figure]) -> String {
    let lines: Vec<_> = figures.iter().map(cells).collect();
    let mut widths = HEAD.map(str::len);
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = String::from("\n");
    let mut row = |cells: [&str; 6]| {
        for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
            let _ = match at {
                0 => write!(text, "{cell:<width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.push('\n');
    };
    row(HEAD);
    for line in &lines {
        row(line.each_ref().map(String::as_str));
    }
    text
}

fn markdown(figures: &[Figure]) -> String {
    let mut text = format!("| {} | note |\n|{}\n", HEAD.join(" | "), " --- |".repeat(7));
    for figure in figures {
        let _ = writeln!(text, "| {} | {} |", cells(figure).join(" | "), figure.note);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(ours: f64, beside: Option<f64>, limit: Option<f64>) -> Figure {
        Figure {
            figure: "a thing".into(),
            unit: "us".into(),
            ours,
            beside,
            limit,
            note: "n".into(),
        }
    }

    #[test]
    fn the_ratio_is_held_against_the_limit_and_without_one_the_figure_itself() {
        assert!(figure(12.0, Some(10.0), Some(1.2)).is_ok());
        assert!(!figure(12.1, Some(10.0), Some(1.2)).is_ok());
        assert!(figure(4.0, None, Some(4.0)).is_ok());
        assert!(!figure(4.1, None, Some(4.0)).is_ok());
        assert!(figure(1e9, Some(1.0), None).is_ok());
    }

    #[test]
    fn what_was_not_measured_is_not_within_its_limit() {
        assert!(!figure(f64::NAN, Some(1.0), Some(1.2)).is_ok());
        assert!(!figure(1.0, Some(0.0), Some(1.2)).is_ok());
    }

    #[test]
    fn the_table_names_what_is_above() {
        let text = table(&[figure(13.0, Some(10.0), Some(1.2))]);
        assert!(
            text.contains("a thing  13.00 us      10.00   1.30   1.20  ABOVE"),
            "{text}"
        );
        let text = markdown(&[figure(1.0, None, None)]);
        assert!(
            text.ends_with("| a thing | 1.00 us |  |  |  |  | n |\n"),
            "{text}"
        );
    }

    #[test]
    fn figures_are_read_among_other_lines() {
        let line = r#"{"figure":"f","unit":"us","ours":1.5,"beside":null,"limit":2.0,"note":""}"#;
        let figures = parse(&format!("hello\n{line}\n")).unwrap();
        assert_eq!(figures.len(), 1);
        assert_eq!(figures[0].limit, Some(2.0));
        assert!(parse("{nonsense").is_err());
    }
}
