//! The program that measures: built, and run here or in a guest.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::Figure;
use crate::protocol::Run;
use crate::tiers::SUITE;
use crate::vm::{Boot, Kernel, Setup};

/// Its name.
pub(super) const PROGRAM: &str = "failstop-bench";
/// How long a guest may measure: ten thousand mappings are made and undone fifty times, emulated.
const PATIENCE: Duration = Duration::from_secs(2400);

/// Builds the program as people build what they run.
pub(super) fn build() -> Result<PathBuf> {
    build_of(SUITE, PROGRAM)
}

/// Builds a program of a package so.
pub(super) fn build_of(package: &str, program: &str) -> Result<PathBuf> {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--release", "--package", package])
        .args(["--bin", program, "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "cannot build {program}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .find(|path| path.ends_with(program))
        .with_context(|| format!("cargo built no {program}"))
}

/// Runs it on this machine, without a device.
pub(super) fn here(program: &Path, words: &[&str]) -> Result<Vec<Figure>> {
    let output = Command::new(program)
        .args(words)
        .env("RUST_LOG", "off")
        .env_remove("FAILSTOP_DEVICE")
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{PROGRAM} {words:?} failed");
    figures(&String::from_utf8_lossy(&output.stdout))
}

/// Runs it on a guest's 82576, through the container transport.
pub(super) fn in_guest(boot: Boot, program: &Path, words: &str) -> Result<Vec<Figure>> {
    let setup = Setup::ensure_for(&[Kernel::Small])?;
    let guest = boot
        .file(program)?
        .env("RUST_BACKTRACE", "1")
        .env("FAILSTOP_IOMMU", "container")
        .memory_mib(2048)
        .lifetime(PATIENCE + Duration::from_secs(180))
        .start(&setup)?;
    let take = take("$FAILSTOP_IGB");
    let line =
        format!("{take} && ulimit -n 65536 && FAILSTOP_DEVICE=$FAILSTOP_IGB {PROGRAM} {words}");
    let finished = guest.run(&Run::shell(line).timeout(PATIENCE))?;
    drop(guest.shut_down());
    if !finished.success() {
        bail!("{PROGRAM} {words} in the guest: {}", finished.text());
    }
    figures(&String::from_utf8_lossy(&finished.stdout))
}

/// The guest's command that gives this function to vfio-pci.
pub(super) fn take(function: &str) -> String {
    format!(
        "cd /sys/bus/pci/devices/{function} && \
         if [ -e driver ]; then echo {function} >driver/unbind; fi && \
         echo vfio-pci >driver_override && echo {function} >/sys/bus/pci/drivers_probe"
    )
}

/// The figures among the lines that it printed.
fn figures(lines: &str) -> Result<Vec<Figure>> {
    lines
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("no figure: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_among_other_lines() {
        let line = r#"{"figure":"f","unit":"us","ours":1.5,"beside":null,"limit":2.0,"note":""}"#;
        let figures = figures(&format!("hello\n{line}\n")).unwrap();
        assert_eq!(figures.len(), 1);
        assert_eq!(figures[0].limit, Some(2.0));
        assert!(super::figures("{nonsense").is_err());
    }
}
