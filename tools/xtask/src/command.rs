//! The command line.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use serde_json::json;

use crate::protocol::Run;
use crate::tiers::MatrixTier;
use crate::vm::{Boot, Kernel, Setup, topologies};
use crate::{bench, fuzz, mutate, rules, soak, tiers};

/// Set-up, tests and virtual machines of failstop.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Cli {
    /// Guests: QEMU with an IOMMU and network functions, and a kernel with VFIO.
    #[command(subcommand)]
    Vm(Vm),
    /// Every check and every tier of tests, with a count at the end. With CI set, what cannot run is a failure.
    Test {
        /// Also what takes long.
        #[arg(long)]
        full: bool,
    },
    /// The suite on a real function: the one that FAILSTOP_HIL names.
    Hil,
    /// Which code keeps each rule of the contract, and which test shows it. Fails when one has neither.
    Rules {
        /// Shows every place, not only the first few.
        #[arg(long)]
        all: bool,
    },
    /// Breaks the contract on purpose, in a copy, and wants a test that goes red for each way of it.
    Mutate {
        /// Only mutations whose name contains this.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
        /// Lists them instead.
        #[arg(long)]
        list: bool,
        /// Writes into each patch which test noticed it: that one is tried first from then on.
        #[arg(long)]
        record: bool,
        /// Only compile them, many at once, and name those that do not.
        #[arg(long, conflicts_with_all = ["only", "list", "record"])]
        check: bool,
    },
    /// Plays every fault in every phase of a device's life, and writes tables of what came of it.
    Matrix {
        /// Where: t1 (over vfio-user), t3 (by a guest's kernel VFIO); both without.
        #[arg(long)]
        tier: Option<MatrixTier>,
        /// Renews tests/adversary/MATRIX.md from verdicts.toml first.
        #[arg(long)]
        write: bool,
    },
    /// Feeds everything that a device, a peer, a file or a person can write with what nobody would. Fails when something gives way.
    Fuzz {
        /// How long each target is run.
        #[arg(long, default_value_t = fuzz::SECONDS)]
        seconds: u32,
        /// Only these targets.
        #[arg(long, value_name = "TARGET")]
        only: Vec<String>,
    },
    /// Random traffic, faults, breaks, recoveries, opens and closes on an emulated device. Fails when something of it is left.
    Soak {
        /// For how long.
        #[arg(long, default_value_t = soak::MINUTES)]
        minutes: f64,
        /// Where everything random begins: as an earlier one printed it.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Measures what failstop costs, beside what it is held against, and prints a table. Fails when a limit is passed.
    Bench {
        /// Only these parts.
        #[arg(long, value_name = "PART", value_parser = bench::names())]
        only: Vec<String>,
        /// Prints the instructions of the data path instead, each with how often a burst executes it.
        #[arg(long, conflicts_with_all = ["only", "write"])]
        asm: bool,
        /// Short for `--only faults`: what a device that does not stop does to failstop and to DPDK.
        #[arg(long, conflicts_with_all = ["only", "asm"])]
        faults: bool,
        /// Counts the instructions of bursts again, and fails when more are needed than tests/bench/counts.json has.
        #[arg(long, conflicts_with_all = ["only", "asm", "faults", "write"])]
        check: bool,
        /// Puts the tables that README.md has there, too, and renews the files of tests/bench.
        #[arg(long)]
        write: bool,
    },
}

#[derive(Subcommand)]
enum Vm {
    /// Gets QEMU and both guest kernels, unless they are there.
    Fetch {
        /// Gets the newest versions.
        #[arg(long)]
        refresh: bool,
    },
    /// Lists topologies and their functions.
    List,
    /// Runs a command in a guest and exits as it does.
    Run(RunArguments),
    /// Boots a guest with a shell on this terminal.
    Shell(Machine),
}

#[derive(Args)]
struct Machine {
    /// The machine: see `cargo xtask vm list`.
    #[arg(long, default_value = "two-igb")]
    topology: String,
    /// The guest's kernel: small or debian.
    #[arg(long, default_value = "small")]
    kernel: Kernel,
    /// A file for the guest, into /failstop or to an absolute path after a colon; programs bring their libraries.
    #[arg(long, value_name = "PATH[:GUEST]")]
    file: Vec<String>,
    /// An environment variable for the guest's commands.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Where the process listens that emulates a function.
    #[arg(long, value_name = "ROLE=PATH")]
    socket: Vec<String>,
    /// Datagram sockets for a function: the one that QEMU binds, the one that it sends to.
    #[arg(long, value_name = "ROLE=OURS,THEIRS")]
    wire: Vec<String>,
    /// A word for the kernel's command line.
    #[arg(long)]
    append: Vec<String>,
    /// The guest's memory in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
}

#[derive(Args)]
struct RunArguments {
    #[command(flatten)]
    machine: Machine,
    /// The command's time limit in seconds.
    #[arg(long, default_value_t = 120)]
    timeout: u64,
    /// Runs the command as this user id instead of root.
    #[arg(long)]
    user: Option<u32>,
    /// The command's limit on locked memory, in bytes.
    #[arg(long)]
    memlock: Option<u64>,
    /// Prints one JSON object with the output, the exit and the kernel's log instead of the output.
    #[arg(long)]
    json: bool,
    /// Prints the kernel's log afterwards.
    #[arg(long)]
    dmesg: bool,
    /// The command. A program given by a path of the host is sent along.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The entry point of `cargo xtask`.
pub fn main() -> ExitCode {
    let result = match Cli::parse() {
        Cli::Vm(Vm::Fetch { refresh }) => fetch(refresh),
        Cli::Vm(Vm::List) => Ok(list()),
        Cli::Vm(Vm::Run(arguments)) => run(&arguments),
        Cli::Vm(Vm::Shell(machine)) => shell(&machine),
        Cli::Test { full } => tiers::test(full),
        Cli::Hil => tiers::hardware_in_the_loop(),
        Cli::Rules { all } => rules::main(all),
        Cli::Mutate { check: true, .. } => mutate::check(),
        Cli::Mutate {
            only, list, record, ..
        } => mutate::main(&only, list, record),
        Cli::Matrix { tier, write } => tiers::matrix(tier, write),
        Cli::Fuzz { seconds, only } => fuzz::main(seconds, &only),
        Cli::Soak { minutes, seed } => soak::main(minutes, seed),
        Cli::Bench { asm: true, .. } => bench::asm(),
        Cli::Bench { check: true, .. } => bench::check(),
        Cli::Bench {
            faults: true,
            write,
            ..
        } => bench::main(&["faults".to_owned()], write),
        Cli::Bench { only, write, .. } => bench::main(&only, write),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn fetch(refresh: bool) -> Result<ExitCode> {
    let started = Instant::now();
    let setup = if refresh {
        Setup::refresh()?
    } else {
        Setup::ensure()?
    };
    for line in setup.describe() {
        println!("{line}");
    }
    println!("ready after {:.1} s", started.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

fn list() -> ExitCode {
    for topology in topologies::ALL {
        println!("{:<16} {}", topology.name, topology.summary);
        for place in topology.places() {
            println!(
                "{:<16} {} {:<11} {:?}",
                "",
                place.address(),
                place.function.role,
                place.function.model
            );
        }
    }
    ExitCode::SUCCESS
}

fn run(arguments: &RunArguments) -> Result<ExitCode> {
    let mut command = arguments.command.clone();
    let mut boot = arguments
        .machine
        .boot()?
        .lifetime(Duration::from_secs(arguments.timeout + 180));
    // A program of the host, unless it is one of the guest's.
    let program = Path::new(&command[0]);
    if command[0].contains('/') && program.is_file() {
        boot = boot.file(program)?;
        command[0] = program
            .file_name()
            .context("the program has no name")?
            .to_string_lossy()
            .into_owned();
    }
    let setup = Setup::ensure_for(&[arguments.machine.kernel])?;
    let guest = boot.start(&setup)?;
    for complaint in &guest.greeting().complaints {
        eprintln!("guest: {complaint}");
    }
    let mut run = Run::new(command).timeout(Duration::from_secs(arguments.timeout));
    (run.user, run.memlock) = (arguments.user, arguments.memlock);
    let finished = guest.spawn(&run)?.wait_with(|is_error, bytes| {
        let written = match (arguments.json, is_error) {
            (true, _) => Ok(()),
            (false, true) => std::io::stderr().write_all(bytes),
            (false, false) => std::io::stdout().write_all(bytes),
        };
        drop(written);
    })?;
    let (boot_time, accelerator, kernel) = (
        guest.boot_time(),
        guest.accelerator(),
        guest.greeting().kernel.clone(),
    );
    let ended = guest.shut_down()?;
    let faults: Vec<_> = ended
        .kernel_log
        .iommu_faults()
        .iter()
        .map(|record| record.text.clone())
        .collect();
    if arguments.json {
        println!(
            "{}",
            json!({
                "exit": finished.exit, "stdout": String::from_utf8_lossy(&finished.stdout),
                "stderr": String::from_utf8_lossy(&finished.stderr), "kernel": kernel, "accelerator": accelerator.to_string(),
                "boot_seconds": boot_time.as_secs_f64(), "iommu_faults": faults, "kernel_log": ended.kernel_log.text(),
            })
        );
    } else {
        if arguments.dmesg {
            eprint!("{}", ended.kernel_log.text());
        }
        for fault in &faults {
            eprintln!("IOMMU fault: {fault}");
        }
        if !finished.success() {
            eprintln!("in the guest: {}", finished.exit.describe());
        }
    }
    Ok(exit_code(finished.exit.code))
}

/// The code of a command in a guest as ours; one that did not exit is a failure.
fn exit_code(code: Option<i32>) -> ExitCode {
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn shell(machine: &Machine) -> Result<ExitCode> {
    let boot = machine.boot()?;
    let setup = Setup::ensure_for(&[machine.kernel])?;
    boot.shell(&setup)?;
    Ok(ExitCode::SUCCESS)
}

impl Machine {
    fn boot(&self) -> Result<Boot> {
        let mut boot =
            Boot::new(self.kernel, topologies::find(&self.topology)?).memory_mib(self.memory);
        for file in &self.file {
            boot = match file.rsplit_once(':') {
                Some((host, guest)) if guest.starts_with('/') => boot.file_as(host, guest),
                _ => boot.file(file)?,
            };
        }
        for pair in &self.env {
            let (name, value) = split(pair, "--env NAME=VALUE")?;
            boot = boot.env(name, value);
        }
        for pair in &self.socket {
            let (role, path) = split(pair, "--socket ROLE=PATH")?;
            boot = boot.socket(role, path);
        }
        for pair in &self.wire {
            let (role, paths) = split(pair, "--wire ROLE=OURS,THEIRS")?;
            let Some((ours, theirs)) = paths.split_once(',') else {
                bail!("{pair} is not ROLE=OURS,THEIRS")
            };
            boot = boot.wire(role, PathBuf::from(ours), PathBuf::from(theirs));
        }
        for word in &self.append {
            boot = boot.append(word);
        }
        Ok(boot)
    }
}

fn split<'a>(pair: &'a str, form: &str) -> Result<(&'a str, &'a str)> {
    pair.split_once('=')
        .with_context(|| format!("{pair} does not have the form {form}"))
}
