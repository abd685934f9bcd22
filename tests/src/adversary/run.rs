//! A whole `failstop run` under a fault, as a person starts it: the process lives, and exits with
//! the demanded code.

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::cell::NotSeen;
use super::plays::Play;
use super::table::{Cell, Phase, Row, Tier, faults};
use crate::fixture::{Outcome, ensure, ensure_eq};
use crate::report::Report;
use crate::tool;

/// Frames after which the fault begins, unless it is there first.
const FRAMES: u32 = 300;
/// How long a run may take: the tool says two minutes past its time, and the machine may be loaded.
const LIMIT: Duration = Duration::from_secs(150);

/// Runs the tool under a row's faults, there from the first message on or after some frames, and says
/// in words how it ended.
///
/// # Errors
///
/// [`NotSeen`].
pub fn judge(play: &Play) -> Result<String, NotSeen> {
    let phase = play.phase;
    let mut device = "emu:82576".to_owned();
    for fault in faults(&play.fault, &play.row) {
        device += &match phase {
            Phase::Start => format!(",fault={fault}"),
            _ => format!(",fault={fault}@{FRAMES}"),
        };
    }
    let mut child = Command::new(tool::path()?)
        .args(["run", &device, "--seconds", "0.5", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let end = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Err(NotSeen::Failed(
                format!("it hangs: not over after {LIMIT:?}").into(),
            ));
        }
        thread::sleep(Duration::from_millis(20));
    };
    let (mut out, mut err) = (String::new(), String::new());
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut out)?;
    }
    if let Some(mut pipe) = child.stderr.take() {
        pipe.read_to_string(&mut err)?;
    }
    if status.code() == Some(2) {
        return Err(NotSeen::NotOffered(err));
    }
    check(&play.row, phase, status.code(), &out, &err)?;
    Ok(format!("exit {}", status.code().unwrap_or_default()))
}

fn check(row: &Row, phase: Phase, code: Option<i32>, out: &str, err: &str) -> Outcome {
    let said = || format!("{out}{err}");
    ensure(!err.contains("panicked"), said)?;
    let Cell::OneOf(verdicts) = row.cell(phase, Tier::T1) else {
        return Ok(());
    };
    let exits: Vec<i32> = verdicts.iter().map(|verdict| verdict.exit.into()).collect();
    ensure(code.is_some_and(|code| exits.contains(&code)), || {
        format!(
            "exits {exits:?} are demanded, and it is {code:?}: {}",
            said()
        )
    })?;
    let told = format!("{out}{err}");
    // Where nothing is left to wish, nobody needs to be told.
    if code.is_some_and(|code| code > 1) {
        row.is_told(&told)?;
    }
    let report: Report = serde_json::from_str(out)?;
    ensure_eq(Some(i32::from(report.exit)), code, "exit in the report")?;
    let at_once = report.error.as_deref().unwrap_or_default();
    ensure(!at_once.contains("ended at once"), || {
        format!("its end took longer than its limit: {}", said())
    })?;
    if code == Some(3) {
        return ensure(!at_once.is_empty(), || format!("no error: {}", said()));
    }
    let c = &report.completions;
    ensure(c.add_up(), || format!("requests do not add up: {c:?}"))?;
    ensure_eq(report.ledger.live_bytes, 0, "live bytes")?;
    ensure_eq(
        report.ledger.quarantined_bytes > 0,
        code == Some(4),
        "memory is kept",
    )?;
    if row.blocked.contains(&phase) {
        ensure(report.stray_dma.is_some_and(|stray| stray > 0), || {
            format!("the translation blocked nothing: {}", said())
        })?;
    }
    Ok(())
}
