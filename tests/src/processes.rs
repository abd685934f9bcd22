//! Processes that die, fork, or come second (R12). Each case starts this program again for a part
//! that has the device.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use failstop::name::DeviceName;
use failstop::open::{self, OpenError};
use failstop::port::{Port, PortConfig};
use failstop_emulator::{Emulator, Options, Running};
use libtest_mimic::{Failed, Trial};
use nix::unistd::{ForkResult, fork};

use crate::fixture::{
    Fixture, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};

type ProcessCase = fn(&Fixture, &mut Running) -> Outcome;

const CASES: &[(&str, ProcessCase)] = &[
    (
        "a_thread_that_panics_with_queues_leaves_a_device_that_goes_on",
        panic_with_queues,
    ),
    ("a_process_that_is_killed_leaves_no_mapping", killed),
    ("a_process_that_aborts_leaves_no_mapping", aborts),
    (
        "c39_a_child_of_fork_does_not_keep_a_killed_parents_device",
        killed_beside_a_child,
    ),
    ("a_second_process_is_told_that_the_device_is_taken", second),
];

/// The cases, as tests.
pub fn trials() -> Vec<Trial> {
    let trial = |&(name, case): &(&str, ProcessCase)| {
        Trial::test(format!("process/{name}"), move || {
            let mut emulator = Emulator::on_threads(&Options::default())?;
            let device = DeviceName::VfioUser(emulator.socket_path());
            let fixture = Fixture {
                device,
                iommu: Default::default(),
            };
            case(&fixture, &mut emulator)?;
            let stats = emulator.stats()?;
            ensure_eq(stats.stray.total(), 0, "accesses outside the mappings")
        })
    };
    CASES.iter().map(trial).collect()
}

/// The variable that names a part: `live`, `abort` or `fork`, of the device in `FAILSTOP_DEVICE`.
const PART: &str = "FAILSTOP_PROCESS";
/// What a part says once frames pass.
const LIVE: &str = "live";

/// Runs the part that the environment names, if it names one.
#[must_use]
pub fn run() -> Option<ExitCode> {
    let part = env::var(PART).ok()?;
    let Err(failed) = live(&part);
    eprintln!("{}", failed.message().unwrap_or("failed"));
    Some(ExitCode::FAILURE)
}

/// Sends and receives until this process is killed.
fn live(part: &str) -> Result<std::convert::Infallible, Failed> {
    let device = Fixture::from_environment()?.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 3);
    let mut turn = || -> Outcome {
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes.clone(), "the frame")
    };
    turn()?;
    if part == "fork" {
        #[expect(unsafe_code, reason = "forks")]
        // SAFETY: the child makes system calls only, and ends.
        let forked = unsafe { fork() }?;
        if let ForkResult::Child = forked {
            // Lives until whoever started us closes its end of our standard input.
            let _ = nix::unistd::read(io::stdin(), &mut [0]);
            #[expect(unsafe_code, reason = "ends a forked child")]
            // SAFETY: ends the process without running what anybody registered.
            unsafe {
                libc::_exit(0)
            }
        }
        // The parent's device goes on.
        for _ in 0..100 {
            turn()?;
        }
    }
    let mut stdout = io::stdout();
    writeln!(stdout, "{LIVE}")?;
    stdout.flush()?;
    if part == "abort" {
        let mut word = String::new();
        io::stdin().read_line(&mut word)?;
        std::process::abort();
    }
    loop {
        turn()?;
    }
}

/// A part that runs; killed when dropped.
struct Part {
    child: Child,
}

impl Part {
    /// Starts a part, and waits until frames pass.
    fn start(name: &str, fixture: &Fixture) -> Result<Self, Failed> {
        let mut child = Command::new(env::current_exe()?)
            .env(PART, name)
            .env("FAILSTOP_DEVICE", fixture.device.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("no standard output")?;
        let part = Self { child };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure_eq(line.trim(), LIVE, "what the process says")?;
        Ok(part)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Nothing is mapped, and the device does nothing more, a moment from now.
fn ends(emulator: &mut Running) -> Outcome {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let stats = emulator.stats()?;
        if stats.server.mappings == 0 && !stats.bus_master && stats.queues == (0, 0) {
            return Ok(());
        }
        ensure(Instant::now() < end, || {
            format!("the device goes on: {stats:?}")
        })?;
        thread::yield_now();
    }
}

/// The device opens again, and works.
fn opens_again(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 9);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    drop(port);
    close_clean(device).map(drop)
}

fn panic_with_queues(fixture: &Fixture, _: &mut Running) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 1);
    let worker = thread::spawn(move || {
        let sent = send(&mut port, &bytes);
        // As a panic does, without the words.
        std::panic::resume_unwind(Box::new(sent.is_ok()));
    });
    let Err(panic) = worker.join();
    ensure_eq(panic.downcast_ref(), Some(&true), "sent before the panic")?;
    ensure_eq(device.broken(), None, "broken")?;
    ensure_eq(device.objects(), 0, "objects that are left")?;
    ensure_eq(device.ledger().lines(), Vec::new(), "ledger")?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let bytes = self_addressed(&device, 60, 2);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    drop(port);
    close_clean(device).map(drop)
}

fn killed(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let part = Part::start("live", fixture)?;
    ensure(emulator.stats()?.server.mappings > 0, || {
        "nothing is mapped".into()
    })?;
    // SIGKILL.
    drop(part);
    ends(emulator)?;
    opens_again(fixture)
}

fn aborts(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let mut part = Part::start("abort", fixture)?;
    let mut stdin = part.child.stdin.take().ok_or("no standard input")?;
    stdin.write_all(b"now\n")?;
    let status = part.child.wait()?;
    ensure(!status.success() && status.code().is_none(), || {
        format!("it ended by {status}")
    })?;
    ends(emulator)?;
    opens_again(fixture)
}

fn killed_beside_a_child(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let mut part = Part::start("fork", fixture)?;
    // Held, so that the child goes on reading.
    let stdin = part.child.stdin.take().ok_or("no standard input")?;
    drop(part);
    ends(emulator)?;
    opens_again(fixture)?;
    drop(stdin);
    Ok(())
}

fn second(fixture: &Fixture, emulator: &mut Running) -> Outcome {
    let part = Part::start("live", fixture)?;
    match open::transport(&fixture.device, fixture.iommu, &[]) {
        Err(OpenError::Connect(error)) => {
            let text = error.to_string();
            ensure(text.contains("serves another client"), || text)?;
        }
        other => return Err(format!("{other:?}").into()),
    }
    ensure(emulator.stats()?.server.mappings > 0, || {
        "the first client lost its device".into()
    })?;
    drop(part);
    Ok(())
}
