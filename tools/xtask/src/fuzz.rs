//! `cargo xtask fuzz`: every target of `tests/fuzz` under libFuzzer, for a while each.
//!
//! There is no nightly toolchain to be had everywhere, and none is needed: `RUSTC_BOOTSTRAP` lets the
//! pinned one instrument the program, as `cargo fuzz` lets a nightly do it.

use std::fmt;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

/// The package, and its program.
const PACKAGE: &str = "failstop-fuzz";
/// Coverage for libFuzzer (edges, comparisons), the address sanitiser, and every check of a debug build.
const FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
    "-Cdebug-assertions",
    "-Coverflow-checks",
];
/// How long a target is run, unless told otherwise.
pub(crate) const SECONDS: u32 = 60;
/// An input may take no longer, in seconds: what takes longer hangs.
const SLOWEST: u32 = 10;
/// Nor more memory, in MiB.
const MOST_MEMORY: u32 = 2048;

/// What came of one target.
#[derive(Debug)]
pub(crate) struct Outcome {
    target: String,
    executions: u64,
    /// Edges of the program that were taken.
    coverage: u64,
    /// Inputs that each reach something that no other does.
    corpus: u64,
    /// What went wrong, and which input shows it.
    crash: Option<String>,
}

impl Outcome {
    pub(crate) const fn is_clean(&self) -> bool {
        self.crash.is_none()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            target,
            executions,
            coverage,
            corpus,
            crash,
        } = self;
        write!(
            f,
            "{target:<18} {executions:>11} {coverage:>9} {corpus:>7}  {}",
            crash.as_deref().unwrap_or("clean")
        )
    }
}

/// Runs each target, or those named, and prints a table; fails when one is not clean.
///
/// # Errors
///
/// When the program cannot be built or run.
pub(crate) fn main(seconds: u32, only: &[String]) -> Result<ExitCode> {
    let outcomes = run(seconds, only)?;
    println!("target              executions  coverage  inputs  outcome");
    for outcome in &outcomes {
        println!("{outcome}");
    }
    let lines = outcomes.iter().map(|outcome| {
        json!({"target": outcome.target, "executions": outcome.executions, "coverage": outcome.coverage,
            "inputs": outcome.corpus, "crash": outcome.crash})
    });
    let report = json!({"seconds": seconds, "targets": lines.collect::<Vec<_>>()});
    let path = Path::new("target/fuzz/report.json");
    fs::write(path, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(match outcomes.iter().all(Outcome::is_clean) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// As [`main`], without printing a table.
pub(crate) fn run(seconds: u32, only: &[String]) -> Result<Vec<Outcome>> {
    let mut targets = targets()?;
    for name in only {
        ensure!(
            targets.contains(name),
            "there is no target {name}: {targets:?}"
        );
    }
    targets.retain(|target| only.is_empty() || only.contains(target));
    let program = build()?;
    // Each runs on one processor.
    let together = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut outcomes = Vec::new();
    for some in targets.chunks(together) {
        eprintln!("-- fuzzing {} for {seconds} s", some.join(", "));
        let fuzzed: Vec<Result<Outcome>> = thread::scope(|scope| {
            let runs: Vec<_> = some
                .iter()
                .map(|target| scope.spawn(|| fuzz(&program, target, seconds)))
                .collect();
            runs.into_iter()
                .map(|run| {
                    run.join()
                        .unwrap_or_else(|_| bail!("a thread that waited for a fuzzer panicked"))
                })
                .collect()
        });
        for outcome in fuzzed {
            outcomes.push(outcome?);
        }
    }
    Ok(outcomes)
}

/// The targets: each has a folder in the corpus, which a test of the package sees to.
fn targets() -> Result<Vec<String>> {
    let corpus = Path::new("tests/fuzz/corpus");
    let entries = fs::read_dir(corpus).with_context(|| {
        format!(
            "{} is not here: run this at the top of the repository",
            corpus.display()
        )
    })?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn build() -> Result<PathBuf> {
    let host = host()?;
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args([
            "build",
            "--release",
            "--package",
            PACKAGE,
            "--features",
            "libfuzzer",
        ])
        // With it, build scripts and macros are built without these flags.
        .args(["--target", &host, "--target-dir", "target/fuzz"])
        // One program, run for a minute: linking it twice over is not worth it.
        .args(["--config", "profile.release.lto=\"off\""])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"));
    let built = command.status().context("cannot run cargo")?;
    ensure!(
        built.success(),
        "{PACKAGE} could not be built with the flags of a fuzzer"
    );
    Ok(Path::new("target/fuzz")
        .join(host)
        .join("release")
        .join(PACKAGE))
}

fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output();
    let output = output.context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match text.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_owned()),
        None => bail!("rustc does not say what this machine is"),
    }
}

fn fuzz(program: &Path, target: &str, seconds: u32) -> Result<Outcome> {
    // What is found goes here; what is in the repository is only read.
    let found = Path::new("target/fuzz/corpus").join(target);
    let crashes = Path::new("tests/fuzz/crashes").join(target);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&crashes)?;
    let mut command = Command::new(program);
    command
        .arg(&found)
        .arg(Path::new("tests/fuzz/corpus").join(target))
        .arg(&crashes)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={SLOWEST}"))
        .arg(format!("-rss_limit_mb={MOST_MEMORY}"))
        .arg(format!("-artifact_prefix={}/", crashes.display()))
        // Our own guard is for SIGBUS, and processes of tests may end by a signal.
        .args(["-handle_bus=0", "-print_final_stats=1", "-close_fd_mask=1"])
        .env("FAILSTOP_FUZZ_TARGET", target)
        .env(
            "ASAN_OPTIONS",
            "handle_sigbus=0:allocator_may_return_null=1:detect_leaks=0",
        )
        .env("RUST_LOG", "off")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stderr);
    // A folder that nothing was written to is not kept.
    let _ = fs::remove_dir(&crashes);
    let mut outcome = read(target, &text);
    if !output.status.success() && outcome.crash.is_none() {
        outcome.crash = Some(output.status.to_string());
    }
    if !outcome.is_clean() {
        let last: Vec<&str> = text.lines().rev().take(60).collect();
        for line in last.iter().rev() {
            eprintln!("{line}");
        }
    }
    Ok(outcome)
}

/// What libFuzzer says of itself (`llvm.org/docs/LibFuzzer.html`, "Output").
fn read(target: &str, text: &str) -> Outcome {
    let after = |line: &str, word: &str| -> Option<u64> {
        let rest = line.split_once(word)?.1.trim_start();
        rest.split([' ', '/']).next()?.parse().ok()
    };
    let last = |word: &str| text.lines().rev().find_map(|line| after(line, word));
    let crash = text
        .lines()
        .find_map(|line| line.split_once("Test unit written to "))
        .map(|(_, path)| format!("see {path}"));
    Outcome {
        target: target.to_owned(),
        executions: last("stat::number_of_executed_units:").unwrap_or(0),
        coverage: last(" cov: ").unwrap_or(0),
        corpus: last(" corp: ").unwrap_or(0),
        crash,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "\
INFO: seed corpus: files: 5 min: 11b max: 90b total: 200b rss: 40Mb
#6\tINITED cov: 312 ft: 500 corp: 5/200b exec/s: 0 rss: 41Mb
#100\tNEW    cov: 390 ft: 600 corp: 9/412b lim: 90 exec/s: 0 rss: 41Mb L: 60/90 MS: 1 CopyPart-
Done 90123 runs in 61 second(s)
stat::number_of_executed_units: 90123
";

    #[test]
    fn what_libfuzzer_says_at_the_end_is_read() {
        let outcome = read("names", CLEAN);
        assert!(outcome.is_clean());
        assert_eq!(
            (outcome.executions, outcome.coverage, outcome.corpus),
            (90_123, 390, 9)
        );
    }

    #[test]
    fn an_input_that_was_written_down_is_a_crash() {
        let text =
            format!("{CLEAN}artifact_prefix='crashes/'; Test unit written to crashes/crash-12ab\n");
        let outcome = read("names", &text);
        assert_eq!(outcome.crash.as_deref(), Some("see crashes/crash-12ab"));
    }
}
