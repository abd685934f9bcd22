//! Signals to a run.

use std::fs;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::{ToolCase, path, text};
use crate::fixture::{Outcome, ensure, ensure_eq};
use crate::report::Report;

pub(super) const CASES: &[ToolCase] = &[
    ("ctrl_c_ends_in_an_orderly_close", interrupted),
    ("sigterm_ends_in_an_orderly_close", terminated),
    (
        "two_signals_at_once_end_in_an_orderly_close",
        asked_by_two_at_once,
    ),
    (
        "a_second_signal_ends_at_once_and_says_what_is_kept",
        interrupted_twice,
    ),
    (
        "a_second_signal_ends_a_report_that_nobody_reads_with_its_code",
        unread_and_interrupted_twice,
    ),
    (
        "ctrl_c_before_a_break_ends_in_an_orderly_close",
        interrupted_before_a_break,
    ),
    ("a_run_under_nohup_survives_a_hang_up", hung_up),
    (
        "an_emulator_that_is_asked_to_end_leaves_no_socket",
        emulator_terminated,
    ),
];

/// Between two signals that are two.
const LATER: Duration = Duration::from_millis(700);

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

/// Waits for the end of a process that must end by itself; one that does not is killed.
fn end_of(child: &mut Child) -> Outcome {
    let end = Instant::now() + Duration::from_secs(20);
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs until these signals, one at once after the other, which must end it in order.
fn ended_by(signals: &[Signal], arguments: &[&str]) -> Outcome {
    let mut child = Command::new(path()?)
        .args(["run", "--seconds", "600"])
        .args(arguments)
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    // The port is there; frames follow at once.
    let began = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("before:")));
    thread::sleep(Duration::from_millis(500));
    let pid = pid_of(&child);
    // As a terminal does: to every process of the group.
    for &signal in signals {
        killpg(pid, signal)?;
    }
    let rest: Vec<String> = lines.collect::<Result<_, _>>()?;
    let status = child.wait()?;
    let said = rest.join("\n");
    ensure(began.is_some(), || format!("no port was opened: {said}"))?;
    ensure_eq(status.code(), Some(0), &said)?;
    ensure(
        said.contains("after: 0 bytes live, 0 bytes quarantined"),
        || said.clone(),
    )?;
    ensure(!said.contains("sent 0 frames"), || said.clone())
}

fn interrupted() -> Outcome {
    ended_by(&[Signal::SIGINT], &[])
}

fn terminated() -> Outcome {
    ended_by(&[Signal::SIGTERM], &[])
}

/// Nothing answers any more, so that an orderly end would take long. (R3) (R12)
fn interrupted_twice() -> Outcome {
    let device = "emu:82576,fault=server-hangs@1000";
    let mut child = Command::new(path()?)
        .args(["run", device, "--seconds", "600", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = pid_of(&child);
    // Once it hangs, and while the run still waits for what is on its way.
    for pause in [Duration::from_millis(1500), LATER] {
        thread::sleep(pause);
        kill(pid, Signal::SIGINT)?;
    }
    end_of(&mut child)?;
    let output = child.wait_with_output()?;
    ensure_eq(output.status.code(), Some(4), &text(&output))?;
    let report: Report = serde_json::from_slice(&output.stdout)?;
    let said = text(&output);
    ensure(
        report
            .error
            .is_some_and(|error| error.contains("a second signal")),
        || said.clone(),
    )?;
    ensure(!report.kept.is_empty(), || said.clone())?;
    ensure(said.contains("kept until this process is gone"), || said)
}

/// As a service manager does that says that the terminal is gone, too.
fn asked_by_two_at_once() -> Outcome {
    ended_by(&[Signal::SIGTERM, Signal::SIGINT], &[])
}

fn interrupted_before_a_break() -> Outcome {
    let arguments = ["--break-after", "500"];
    ended_by(&[Signal::SIGINT], &arguments)
}

/// A pipe that is full: who writes to it waits for ever.
fn full_pipe() -> Result<(PipeReader, PipeWriter), Failed> {
    let (reader, mut writer) = std::io::pipe()?;
    let size = fcntl(&writer, FcntlArg::F_GETPIPE_SZ)?;
    writer.write_all(&vec![b' '; usize::try_from(size)?])?;
    Ok((reader, writer))
}

/// The processes that the run's main thread started and that are there: its emulator.
fn children(child: &Child) -> Result<bool, Failed> {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()))?;
    Ok(!children.trim().is_empty())
}

fn unread_and_interrupted_twice() -> Outcome {
    let (_reader, writer) = full_pipe()?;
    let mut child = Command::new(path()?)
        .args(["run", "emu:82576,fault=bme-readback@1000"])
        .args(["--seconds", "0.3", "--json"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()?;
    // The emulator goes when the device is closed.
    let end = Instant::now() + Duration::from_secs(60);
    for there in [true, false] {
        while children(&child)? != there && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
    kill(pid_of(&child), Signal::SIGINT)?;
    thread::sleep(LATER);
    kill(pid_of(&child), Signal::SIGINT)?;
    end_of(&mut child)?;
    let output = child.wait_with_output()?;
    let said = text(&output);
    ensure_eq(output.status.code(), Some(5), &said)?;
    ensure(
        said.contains("a second signal while its report was being written"),
        || said.clone(),
    )
}

/// It runs as long as it was to, whatever becomes of the terminal.
fn hung_up() -> Outcome {
    let run = "trap '' HUP; exec \"$0\" run --seconds 1.5";
    let mut child = Command::new("sh")
        .args(["-c", run])
        .arg(path()?)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let began = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("before:")));
    let start = Instant::now();
    kill(pid_of(&child), Signal::SIGHUP)?;
    let rest: Vec<String> = lines.collect::<Result<_, _>>()?;
    let (status, took) = (child.wait()?, start.elapsed());
    let said = rest.join("\n");
    ensure(began.is_some(), || format!("no port was opened: {said}"))?;
    ensure_eq(status.code(), Some(0), &said)?;
    ensure(took > Duration::from_millis(1400), || {
        format!("ended after {took:?}: {said}")
    })
}

fn emulator_terminated() -> Outcome {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let folder = tempfile::tempdir()?;
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        let mut child = Command::new(path()?)
            .arg("emulate")
            .args(["--socket".as_ref(), one.as_os_str()])
            .args(["--pair".as_ref(), two.as_os_str()])
            .spawn()?;
        let end = Instant::now() + Duration::from_secs(20);
        while !(one.exists() && two.exists()) {
            ensure(Instant::now() < end, || "no socket".into())?;
            thread::sleep(Duration::from_millis(10));
        }
        kill(pid_of(&child), signal)?;
        end_of(&mut child)?;
        ensure_eq(child.wait()?.code(), Some(0), "exit code")?;
        ensure_eq(fs::read_dir(folder.path())?.count(), 0, "sockets left")?;
    }
    Ok(())
}
