//! Runs one benchmark, and prints its figures as lines of JSON. `cargo xtask bench` runs all.
//!
//! ```text
//! failstop-bench ladder [ON ROUNDS]     FAILSTOP_DEVICE, or an emulated device without it
//! failstop-bench round-trip            two emulated devices
//! failstop-bench life [ROUNDS]         an emulated device
//! failstop-bench ledger [PAIRS]         FAILSTOP_DEVICE, in a guest that counts instructions
//! failstop-bench data-path FAMILY [TURNS]  for callgrind
//! failstop-bench speed                  here
//! failstop-bench growth [BURSTS]        for callgrind
//! failstop-bench faults GO-FILE         FAILSTOP_DEVICE, whose faults begin when the file is there
//! failstop-bench watch SECONDS WORDS    runs that, or what is compared with it, and ends it in time
//! ```

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use failstop::name::DeviceName;
use failstop_emulator::{Emulator, Options, Running};
use failstop_pci::testing::Counting;
use failstop_tests::bench::{
    Figure, data_path, faults, growth, ladder, ledger, life, round_trip, speed, watch,
};
use failstop_tests::fixture::Fixture;
use libtest_mimic::Failed;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// By which the program becomes the emulated device.
const EMULATE: &str = "emulate";
/// Live mappings of the ladder's rounds: one port's, and many.
const LADDER: &[usize] = &[1, 10_000];
/// Live mappings of the ledger's. Linux lets a container have 65,535 (`dma_entry_limit`).
const LEDGER: &[usize] = &[1, 1000, 60_000];

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        [EMULATE, ..] => return failstop_emulator::cli::main_with(env::args_os().skip(1)),
        ["ladder", rest @ ..] => on_ladder(rest),
        ["round-trip"] => on_round_trip(),
        ["life", rest @ ..] => on_life(rest),
        ["ledger", rest @ ..] => number(rest.first(), 400)
            .and_then(|pairs| ledger::run(&Fixture::from_environment()?, LEDGER, pairs)),
        ["data-path", family, rest @ ..] => number(rest.first(), 512)
            .and_then(|turns| data_path::run(family, turns))
            .map(|()| Vec::new()),
        ["speed"] => speed::run(),
        ["growth", rest @ ..] => {
            number(rest.first(), 128).and_then(|bursts| growth::run(bursts).map(|()| Vec::new()))
        }
        ["faults", go] => Fixture::from_environment()
            .and_then(|fixture| faults::run(&fixture, Path::new(go)))
            .map(|()| Vec::new()),
        ["watch", seconds, rest @ ..] => number(Some(seconds), 0)
            .and_then(|seconds| watch::run(Duration::from_secs(seconds), rest))
            .map(|()| Vec::new()),
        _ => Err(
            "say ladder, round-trip, life, ledger, data-path, speed, growth, faults or watch"
                .into(),
        ),
    };
    match result {
        Ok(figures) => {
            figures.iter().for_each(Figure::print);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("failstop-bench: {}", error.message().unwrap_or("failed"));
            ExitCode::FAILURE
        }
    }
}

fn number<T: std::str::FromStr>(word: Option<&&str>, otherwise: T) -> Result<T, Failed> {
    match word {
        None => Ok(otherwise),
        Some(word) => word
            .parse()
            .map_err(|_| format!("{word} is no number").into()),
    }
}

fn on_ladder(words: &[&str]) -> Result<Vec<Figure>, Failed> {
    let rounds = number(words.get(1), 50)?;
    // Each mapping is a file.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    if env::var_os("FAILSTOP_DEVICE").is_some() {
        let on = words.first().unwrap_or(&"device");
        return ladder::run(&Fixture::from_environment()?, on, LADDER, rounds);
    }
    let (_emulator, fixture) = emulated()?;
    ladder::run(&fixture, "vfio-user", LADDER, rounds)
}

/// An emulated device, in a process of its own.
fn emulated() -> Result<(Running, Fixture), Failed> {
    let emulator = Emulator::spawn(&[OsString::from(EMULATE)], &Options::default())?;
    let fixture = Fixture {
        device: DeviceName::VfioUser(emulator.socket_path()),
        iommu: Default::default(),
    };
    Ok((emulator, fixture))
}

fn on_round_trip() -> Result<Vec<Figure>, Failed> {
    let (_near, ours) = emulated()?;
    let (_far, by_hand) = emulated()?;
    round_trip::run(&ours, &by_hand)
}

fn on_life(words: &[&str]) -> Result<Vec<Figure>, Failed> {
    let rounds = number(words.first(), 50)?;
    let (_emulator, fixture) = emulated()?;
    life::run(&fixture, "vfio-user", rounds)
}
