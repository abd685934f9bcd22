//! `cargo xtask soak`: random traffic, faults, breaks and recoveries, until time is up.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

/// The program, of the suite's package.
const PROGRAM: &str = "failstop-soak";
/// Minutes, unless told otherwise, and of `cargo xtask test --full`.
pub(crate) const MINUTES: f64 = 10.0;
/// Breaks that a landing's soak recovers from: some 20 s of them.
const SHORT: u64 = 500;
/// Where a landing's soak begins: every landing's at the same.
const SEED: u64 = 1;

/// Soaks, optimised, for so many minutes.
///
/// # Errors
///
/// When the program cannot be built or run.
pub(crate) fn main(minutes: f64, seed: Option<u64>) -> Result<ExitCode> {
    let program = build("release")?;
    let mut command = long(&program, minutes);
    if let Some(seed) = seed {
        command.arg("--seed").arg(seed.to_string());
    }
    let ended = command.status().context("cannot run the soak")?;
    Ok(match ended.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// The command of a soak of [`MINUTES`].
pub(crate) fn full() -> Result<Command> {
    Ok(long(&build("release")?, MINUTES))
}

/// The command of a landing's soak.
pub(crate) fn short() -> Result<Command> {
    let mut command = soak(&build("test")?);
    command.arg("--cycles").arg(SHORT.to_string());
    command.arg("--seed").arg(SEED.to_string());
    Ok(command)
}

fn long(program: &Path, minutes: f64) -> Command {
    let mut command = soak(program);
    command.arg("--minutes").arg(minutes.to_string());
    command
}

fn soak(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        // Each thread would keep a heap of its own, and how much of it is a matter of chance.
        .env("MALLOC_ARENA_MAX", "1")
        // What is broken is said by the thousand.
        .env("RUST_LOG", "off");
    command
}

/// Builds the program as the profile has it. The whole workspace is selected, so that what its tests
/// have built already is not built again.
fn build(profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--workspace", "--quiet", "--profile", profile])
        .args(["--bin", PROGRAM])
        .status()
        .context("cannot run cargo")?;
    ensure!(built.success(), "{PROGRAM} could not be built");
    let folder = match profile {
        "test" => "debug",
        other => other,
    };
    Ok(Path::new("target").join(folder).join(PROGRAM))
}
