//! `cargo xtask test`: every check and every tier of tests, in order, and a count at the end.
//!
//! Nothing stops at the first failure: the summary lists all of them. With `CI` set, a tier that cannot run is a failure.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::vm::Setup;
use crate::{bench, fuzz, mutate, rules, soak};

/// The package whose test targets are the tiers above T0.
pub(crate) const SUITE: &str = "failstop-tests";
/// The test targets of [`SUITE`] that are tiers of their own; all others belong to T0.
pub(crate) const TIERS: &[&str] = &["t1", "adversary", "t2", "t3"];
/// The tier that needs nothing: what mutations are tried on.
const T0: &str = "T0";
/// A second architecture whose barriers differ; the code must at least compile for it.
const OTHER_ARCHITECTURE: &str = "aarch64-unknown-linux-gnu";

/// What came of one tier.
#[derive(Debug, Default)]
struct Tier {
    name: String,
    passed: usize,
    /// What failed, by name.
    failed: Vec<String>,
    /// What was left out, and why.
    skipped: Vec<String>,
    time: Duration,
}

impl Tier {
    fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Counts something that cannot run here: a failure where everything must.
    fn cannot(&mut self, strict: bool, why: String) {
        if strict {
            self.failed.push(why)
        } else {
            self.skipped.push(why)
        }
    }

    fn check(&mut self, name: &str, command: Command) -> Result<()> {
        let (success, _) = run(command)?;
        if success {
            self.passed += 1
        } else {
            self.failed.push(name.into())
        }
        Ok(())
    }

    /// Whether each rule of the contract has code and a test, and each case a test.
    fn rules(&mut self) -> Result<()> {
        let (table, complete) = rules::table(false)?;
        if complete {
            self.passed += 1;
        } else {
            eprint!("{table}");
            self.failed.push("rules (cargo xtask rules)".into());
        }
        Ok(())
    }

    /// Whether each mutation compiles still: whether a test notices it is for the long runs.
    fn mutations(&mut self) -> Result<()> {
        eprintln!("-- mutations, compiled");
        let bad = mutate::that_do_not_compile()?;
        if bad.is_empty() {
            self.passed += 1;
        }
        let named = |name| format!("mutation {name} does not compile (target/mutate)");
        self.failed.extend(bad.into_iter().map(named));
        Ok(())
    }

    /// As [`tests`](Self::tests), where no test at all is a failure too.
    fn some_tests(&mut self, name: &str, command: Command) -> Result<()> {
        let before = self.ran();
        self.tests(name, command)?;
        if self.ran() == before {
            self.failed.push(format!("{name}: no test ran"));
        }
        Ok(())
    }

    fn ran(&self) -> usize {
        self.passed + self.failed.len()
    }

    /// Runs test programs, and counts what they say.
    fn tests(&mut self, name: &str, command: Command) -> Result<()> {
        let (success, output) = run(command)?;
        let before = self.failed.len();
        self.count(&output);
        if !success && self.failed.len() == before {
            // It did not even compile, or a test process died.
            self.failed
                .push(format!("{name}: the command failed without naming a test"));
        }
        Ok(())
    }

    /// Reads the lines that Rust's test programs print: `test NAME ... ok` and the like.
    fn count(&mut self, output: &str) {
        for line in output.lines() {
            let Some((name, result)) = line
                .strip_prefix("test ")
                .and_then(|line| line.rsplit_once(" ... "))
            else {
                continue;
            };
            let name = name.trim_end();
            match result.trim() {
                "ok" => self.passed += 1,
                "FAILED" | "failed" => self.failed.push(name.into()),
                result if result.starts_with("ignored") => self.skipped.push(name.into()),
                _ => {}
            }
        }
    }
}

/// Runs all that a landing must pass. `full` also runs what takes long.
///
/// # Errors
///
/// When cargo itself cannot be run. Failures of tests are in the exit code and the summary.
pub fn test(full: bool) -> Result<ExitCode> {
    let strict = std::env::var_os("CI").is_some();
    let (suite, others) = test_targets()?;
    let mut tiers = vec![
        timed(Tier::new("checks"), checks)?,
        timed(Tier::new(T0), |tier| t0(tier, &others))?,
    ];
    tiers.push(timed(Tier::new("T1"), |tier| {
        suite_tests(tier, "t1", &suite, full, strict)?;
        suite_tests(tier, "adversary", &suite, full, strict)?;
        tier.check("soak", soak::short()?)
    })?);
    tiers.push(timed(Tier::new("T2"), |tier| {
        if let Err(error) = Setup::ensure() {
            tier.cannot(strict, format!("set-up of guests: {error:#}"));
            return Ok(());
        }
        let guests = [
            "test",
            "--workspace",
            "--features",
            "xtask/guests",
            "--test",
            "guests",
            "--quiet",
        ];
        let mut guests = pretty(cargo(&guests));
        // Each test boots a guest with two processors.
        guests.arg("--test-threads=2");
        tier.some_tests("guests", guests)?;
        suite_tests(tier, "t2", &suite, full, strict)?;
        counts(tier, strict);
        Ok(())
    })?);
    tiers.push(timed(Tier::new("T3"), |tier| {
        if let Err(error) = Setup::ensure() {
            tier.cannot(strict, format!("set-up of guests: {error:#}"));
            return Ok(());
        }
        suite_tests(tier, "t3", &suite, full, strict)
    })?);
    if full {
        // Those of T0 were run on this tree a while ago.
        let green = tiers
            .iter()
            .any(|tier| tier.name == T0 && tier.failed.is_empty());
        let unmutated = match green {
            true => mutate::Unmutated::Green,
            false => mutate::Unmutated::Unknown,
        };
        tiers.push(timed(Tier::new("mutants"), |tier| {
            mutants(tier, unmutated)
        })?);
        // A soak takes the minutes that it is told to, whatever else runs.
        let (soaked, fuzzed) = thread::scope(|scope| {
            let soak = scope.spawn(|| timed(Tier::new("soak"), soaking));
            let fuzzed = timed(Tier::new("fuzz"), fuzzing);
            let soaked = soak
                .join()
                .unwrap_or_else(|_| bail!("the thread that waited for the soak panicked"));
            (soaked, fuzzed)
        });
        tiers.extend([fuzzed?, soaked?]);
        tiers.push(timed(Tier::new("bench"), |tier| {
            benchmarks(tier, strict);
            Ok(())
        })?);
    }
    Ok(summary(&tiers))
}

/// Whether the tests of T0 notice when the contract is broken on purpose.
fn mutants(tier: &mut Tier, unmutated: mutate::Unmutated) -> Result<()> {
    for mutation in mutate::try_all(&[], unmutated)? {
        if mutation.is_killed() {
            tier.passed += 1;
        } else {
            tier.failed.push(mutation.to_string());
        }
    }
    Ok(())
}

/// Whether nothing is left over after minutes of random faults.
fn soaking(tier: &mut Tier) -> Result<()> {
    tier.check("soak (cargo xtask soak)", soak::full()?)
}

/// Whether no target gives way within a minute.
fn fuzzing(tier: &mut Tier) -> Result<()> {
    for outcome in fuzz::run(fuzz::SECONDS, &[])? {
        eprintln!("{outcome}");
        if outcome.is_clean() {
            tier.passed += 1;
        } else {
            tier.failed.push(outcome.to_string());
        }
    }
    Ok(())
}

/// Whether bursts need no more instructions than they did.
fn counts(tier: &mut Tier, strict: bool) {
    match bench::comparisons() {
        Ok(comparisons) => {
            for comparison in comparisons {
                if comparison.is_ok() {
                    tier.passed += 1;
                } else {
                    tier.failed
                        .push(format!("{comparison} (cargo xtask bench --check)"));
                }
            }
        }
        Err(error) => tier.cannot(strict, format!("instructions of bursts: {error:#}")),
    }
}

/// Whether everything stays within its limit.
fn benchmarks(tier: &mut Tier, strict: bool) {
    match bench::all() {
        Ok(measured) => {
            tier.skipped.extend(measured.skipped);
            for figure in measured.figures {
                if figure.is_ok() {
                    tier.passed += usize::from(figure.has_limit());
                } else {
                    tier.failed.push(figure.to_string());
                }
            }
        }
        Err(error) => tier.cannot(strict, format!("{error:#}")),
    }
}

/// Runs one test target of the suite.
fn suite_tests(
    tier: &mut Tier,
    target: &str,
    suite: &[String],
    full: bool,
    strict: bool,
) -> Result<()> {
    if suite.iter().any(|present| present == target) {
        return tier.some_tests(target, suite_command(target, full));
    }
    tier.cannot(strict, format!("{SUITE} has no test target {target}"));
    Ok(())
}

/// Runs the suite on a real function, named by its address in `FAILSTOP_HIL`.
///
/// # Errors
///
/// When the variable is not set, or cargo cannot be run.
pub fn hardware_in_the_loop() -> Result<ExitCode> {
    let device = std::env::var("FAILSTOP_HIL")
        .ok()
        .filter(|device| !device.is_empty());
    let device = device.context(
        "FAILSTOP_HIL names no function: set it to an address such as 0000:01:00.0. The function must be bound to vfio-pci \
         (`failstop bind`), and nothing else may need it; no cable is needed, the suite uses its loopback",
    )?;
    eprintln!("running the suite on {device}");
    let tier = timed(Tier::new("T4"), |tier| {
        let mut suite = cargo(&[
            "run",
            "--quiet",
            "--package",
            SUITE,
            "--bin",
            "failstop-suite",
        ]);
        suite.env("FAILSTOP_DEVICE", &device);
        tier.some_tests("the suite", pretty(suite))?;
        // What ends a device from outside: an unbind, the death of its process. As root, since it binds.
        let mut departures = cargo(&[
            "run",
            "--quiet",
            "--package",
            SUITE,
            "--bin",
            "failstop-kernel-suite",
        ]);
        departures
            .env("FAILSTOP_IGB", &device)
            .env("FAILSTOP_TOPOLOGY", "hardware");
        tier.some_tests("departures", pretty(departures))
    })?;
    Ok(summary(&[tier]))
}

fn timed(mut tier: Tier, fill: impl FnOnce(&mut Tier) -> Result<()>) -> Result<Tier> {
    let started = Instant::now();
    eprintln!("== {}", tier.name);
    fill(&mut tier)?;
    tier.time = started.elapsed();
    Ok(tier)
}

fn checks(tier: &mut Tier) -> Result<()> {
    tier.check(
        "formatting (cargo fmt)",
        cargo(&["fmt", "--all", "--check"]),
    )?;
    tier.check(
        "clippy",
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--features",
            "xtask/guests",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]),
    )?;
    let mut documentation = cargo(&["doc", "--workspace", "--lib", "--no-deps", "--quiet"]);
    documentation.env("RUSTDOCFLAGS", "-D warnings");
    tier.check("documentation (cargo doc)", documentation)?;
    tier.rules()?;
    tier.mutations()?;
    if target_is_installed(OTHER_ARCHITECTURE) {
        // The libraries: what only runs on a developer's machine need not build for others.
        let packages = [
            "-p",
            "failstop-pci",
            "-p",
            "failstop-dma",
            "-p",
            "failstop-queues",
            "-p",
            "failstop",
        ];
        let mut command = cargo(&["check", "--quiet", "--target", OTHER_ARCHITECTURE]);
        command.args(packages);
        tier.check("other architecture (cargo check)", command)?;
    } else {
        // Not held against CI: no landing depends on which targets its machine has.
        tier.skipped.push(format!("cargo check for {OTHER_ARCHITECTURE}: not installed (rustup target add {OTHER_ARCHITECTURE})"));
    }
    Ok(())
}

/// Unit tests, integration tests of the libraries, examples in the documentation.
///
/// Every command selects the whole workspace and then its targets, so that all of them build the
/// same dependencies with the same features: once.
fn t0(tier: &mut Tier, others: &[String]) -> Result<()> {
    let mut tests = cargo(&[
        "test",
        "--workspace",
        "--lib",
        "--bins",
        "--no-fail-fast",
        "--quiet",
    ]);
    for target in others {
        tests.args(["--test", target]);
    }
    tier.tests("unit tests", pretty(tests))?;
    let documentation = cargo(&["test", "--workspace", "--doc", "--no-fail-fast", "--quiet"]);
    tier.tests("documentation tests", pretty(documentation))
}

/// Where the matrix of faults is played.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum MatrixTier {
    /// The emulator over vfio-user.
    T1,
    /// The emulator as a function of a guest, by kernel VFIO.
    T3,
}

/// Plays every cell of the matrix of faults, on one tier or on both, and prints where the tables are.
/// With `write` the page of what is demanded is renewed first.
///
/// # Errors
///
/// When cargo cannot be run.
pub fn matrix(only: Option<MatrixTier>, write: bool) -> Result<ExitCode> {
    let tier = timed(Tier::new("matrix"), |tier| {
        if write {
            let mut page = cargo(&[
                "test",
                "--package",
                SUITE,
                "--lib",
                "the_page_is_the_tables",
            ]);
            page.env("FAILSTOP_WRITE", "1");
            tier.some_tests("MATRIX.md", pretty(page))?;
        }
        if only != Some(MatrixTier::T3) {
            tier.some_tests("matrix on T1", suite_command("adversary", true))?;
        }
        if only != Some(MatrixTier::T1) {
            let mut command = suite_command("t3", true);
            command.arg("matrix/");
            tier.some_tests("matrix on T3", command)?;
        }
        Ok(())
    })?;
    eprintln!("the tables are target/adversary/matrix-TIER.md and matrix-TIER.json");
    Ok(summary(&[tier]))
}

fn suite_command(target: &str, full: bool) -> Command {
    let mut command = cargo(&["test", "--workspace", "--test", target]);
    if full {
        command.env("FAILSTOP_FULL", "1");
    }
    pretty(command)
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Has test programs print a line for each test.
fn pretty(mut command: Command) -> Command {
    command.args(["--", "--format", "pretty", "--color", "never"]);
    command
}

/// The test targets of [`SUITE`], and those of all other packages that need no feature.
fn test_targets() -> Result<(Vec<String>, Vec<String>)> {
    let output = cargo(&["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("cannot run cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")?;
    Ok(split_targets(&metadata, SUITE))
}

fn split_targets(metadata: &serde_json::Value, suite: &str) -> (Vec<String>, Vec<String>) {
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let targets = package["targets"].as_array().into_iter().flatten();
        let tests = targets.filter(|target| {
            let needs = target["required-features"].as_array();
            target["kind"][0] == "test" && needs.is_none_or(Vec::is_empty)
        });
        let names = tests.filter_map(|target| target["name"].as_str().map(str::to_owned));
        for name in names {
            // What is no tier of the suite runs with the unit tests.
            let tier = package["name"] == suite && TIERS.contains(&name.as_str());
            if tier {
                ours.push(name)
            } else {
                others.push(name)
            }
        }
    }
    (ours, others)
}

fn target_is_installed(target: &str) -> bool {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output();
    output.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

/// Runs a command, shows what it prints as it comes, and returns it.
fn run(mut command: Command) -> Result<(bool, String)> {
    eprintln!("-- {}", describe(&command));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let (sender, lines) = channel();
    let stdout = child
        .stdout
        .take()
        .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    let stderr = child
        .stderr
        .take()
        .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
    for pipe in [stdout, stderr].into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || {
            // Bytes, since a test may print what is no text.
            for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                drop(sender.send(String::from_utf8_lossy(&line).into_owned()));
            }
        });
    }
    drop(sender);
    let mut output = String::new();
    for line in lines {
        eprintln!("{line}");
        output += &line;
        output.push('\n');
    }
    Ok((
        child.wait().context("cannot wait for cargo")?.success(),
        output,
    ))
}

fn describe(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    let program = Path::new(command.get_program()).file_name();
    let program = program.unwrap_or_default().to_string_lossy();
    format!("{program} {}", words.join(" "))
}

/// Prints the count of each tier and what failed; the last line is for programs.
fn summary(tiers: &[Tier]) -> ExitCode {
    print!("{}", report(tiers));
    if tiers.iter().all(|tier| tier.failed.is_empty()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(tiers: &[Tier]) -> String {
    let mut text = String::from("\ntier     passed  failed  skipped    time\n");
    for tier in tiers {
        let (passed, failed, skipped) = (tier.passed, tier.failed.len(), tier.skipped.len());
        let _ = writeln!(
            text,
            "{:<7} {passed:>7} {failed:>7} {skipped:>8} {:>6.0}s",
            tier.name,
            tier.time.as_secs_f64()
        );
    }
    for (word, list) in [
        (
            "skipped",
            tiers.iter().map(|tier| &tier.skipped).collect::<Vec<_>>(),
        ),
        ("FAILED", tiers.iter().map(|tier| &tier.failed).collect()),
    ] {
        for (tier, names) in tiers.iter().zip(list) {
            for name in names {
                let _ = writeln!(text, "{word}: {}: {name}", tier.name);
            }
        }
    }
    let sum = |count: fn(&Tier) -> usize| tiers.iter().map(count).sum::<usize>();
    let skipped = sum(|tier| tier.skipped.len());
    let _ = write!(
        text,
        "{} passed, {} failed",
        sum(|tier| tier.passed),
        sum(|tier| tier.failed.len())
    );
    if skipped > 0 {
        let _ = write!(text, ", {skipped} skipped");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted_by_name() {
        let mut tier = Tier::new("T1");
        tier.count(
            "running 3 tests\ntest rx::wraps ... ok\ntest tx::stops (line 12) ... FAILED\n\
             test slow ... ignored, takes an hour\ntest result: FAILED. 1 passed; 1 failed; 1 ignored\n",
        );
        assert_eq!(
            (tier.passed, tier.failed, tier.skipped),
            (1, vec!["tx::stops (line 12)".into()], vec!["slow".into()])
        );
    }

    #[test]
    fn the_last_line_has_the_sums() {
        let mut first = Tier::new("T0");
        first.passed = 3;
        let mut second = Tier::new("T1");
        second.failed.push("rx".into());
        assert!(report(&[first, second]).ends_with("FAILED: T1: rx\n3 passed, 1 failed\n"));
    }

    #[test]
    fn what_cannot_run_fails_only_where_everything_must() {
        let (mut here, mut ci) = (Tier::new("T2"), Tier::new("T2"));
        here.cannot(false, "no QEMU".into());
        ci.cannot(true, "no QEMU".into());
        assert_eq!((here.failed.len(), here.skipped.len()), (0, 1));
        assert_eq!((ci.failed.len(), ci.skipped.len()), (1, 0));
    }

    #[test]
    fn tiers_are_told_from_what_runs_with_the_unit_tests() {
        let metadata = serde_json::json!({"packages": [
            {"name": "other", "targets": [
                {"kind": ["test"], "name": "x"},
                {"kind": ["test"], "name": "guests", "required-features": ["guests"]},
            ]},
            {"name": "suite", "targets": [
                {"kind": ["lib"], "name": "suite"},
                {"kind": ["test"], "name": "t1"},
                {"kind": ["test"], "name": "own"},
            ]},
        ]});
        let (ours, others) = split_targets(&metadata, "suite");
        assert_eq!(ours, ["t1"]);
        assert_eq!(others, ["x", "own"]);
    }
}
