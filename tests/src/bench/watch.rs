//! The watchdog of `cargo xtask bench --faults`: runs a program that says which call it is in, and
//! ends it when a call does not return in time. The same for every driver, so that its clock is too.
//!
//! | the program says | the watchdog adds |
//! | --- | --- |
//! | `call NAME` | `never NAME MS` when the time is up; the program is killed then |
//! | `return NAME ...` | `took NAME MS` |
//! | anything | the line itself |
//!
//! Last comes `exit MS`, or `exit never` when the program did not go away within `FAREWELL`: the
//! kernel still gives up the device for it.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

/// How long the program may say nothing while it is in no call.
const SILENCE: Duration = Duration::from_secs(90);
/// How long it may take to end once it is done or killed.
const FAREWELL: Duration = Duration::from_secs(3);

/// Runs `words`, and prints what it says and how long its calls took.
///
/// # Errors
///
/// When it cannot be started, or says nothing for too long.
pub fn run(limit: Duration, words: &[&str]) -> Result<(), Failed> {
    let (program, arguments) = words.split_first().ok_or("no program to watch")?;
    // Both into one pipe of ours: whoever reads our output must not wait for a program that the
    // kernel keeps.
    let (reader, writer) = io::pipe()?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(writer.try_clone()?)
        .stdout(writer)
        .spawn()?;
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(reader).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut out = io::stdout();
    let ended = follow(limit, &lines, &mut out);
    let asked = Instant::now();
    if !matches!(ended, Ok(End::Done)) {
        // It may have ended by itself.
        let _gone = child.kill();
    }
    match left(&mut child, asked + FAREWELL)? {
        true => say(&mut out, &format!("exit {}", asked.elapsed().as_millis()))?,
        false => say(&mut out, "exit never")?,
    }
    ended.map(drop)
}

/// Why the program is not followed any more.
enum End {
    /// It closed its output, or said `done`.
    Done,
    /// A call did not return.
    Late,
}

fn follow(limit: Duration, lines: &Receiver<String>, out: &mut impl Write) -> Result<End, Failed> {
    let mut call: Option<(String, Instant)> = None;
    loop {
        let wait = match &call {
            Some((_, since)) => limit.saturating_sub(since.elapsed()),
            None => SILENCE,
        };
        let line = match (lines.recv_timeout(wait), &call) {
            (Ok(line), _) => line,
            (Err(RecvTimeoutError::Disconnected), _) => return Ok(End::Done),
            (Err(RecvTimeoutError::Timeout), Some((name, since))) => {
                say(
                    out,
                    &format!("never {name} {}", since.elapsed().as_millis()),
                )?;
                return Ok(End::Late);
            }
            (Err(RecvTimeoutError::Timeout), None) => {
                return Err("the program says nothing".into());
            }
        };
        say(out, &line)?;
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("call"), Some(name)) => call = Some((name.to_owned(), Instant::now())),
            (Some("return"), Some(name)) => {
                if let Some((_, since)) = call.take_if(|(called, _)| called == name) {
                    say(out, &format!("took {name} {}", since.elapsed().as_millis()))?;
                }
            }
            (Some("done"), _) => return Ok(End::Done),
            _ => {}
        }
    }
}

/// Whether the program has gone by then.
fn left(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}

fn say(out: &mut impl Write, line: &str) -> io::Result<()> {
    writeln!(out, "{line}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of a program that says these lines, and then nothing.
    fn said(limit: Duration, program: &[&str]) -> (bool, String) {
        let (sender, lines) = channel();
        for line in program {
            sender.send((*line).to_owned()).unwrap();
        }
        let mut out = Vec::new();
        let end = follow(limit, &lines, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        (matches!(end, End::Done), text)
    }

    #[test]
    fn a_call_that_returns_is_timed() {
        let limit = Duration::from_secs(60);
        let (done, text) = said(limit, &["call stop", "return stop 0", "done"]);
        assert!(done);
        assert!(text.contains("return stop 0\ntook stop "), "{text}");
    }

    #[test]
    fn a_call_that_does_not_return_in_time_is_late() {
        let (done, text) = said(Duration::ZERO, &["call close"]);
        assert!(!done);
        assert!(text.starts_with("call close\nnever close "), "{text}");
    }

    #[test]
    fn a_program_that_ends_is_followed_no_more() {
        let (sender, lines) = channel();
        drop(sender);
        let end = follow(Duration::ZERO, &lines, &mut Vec::new()).unwrap();
        assert!(matches!(end, End::Done));
    }
}
