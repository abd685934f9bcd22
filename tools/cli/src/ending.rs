//! How a run ends: in order, when its time is up or by a first signal; at once, by a second signal or
//! when the orderly end has taken its limit.
//!
//! Who ends at once releases nothing. Memory that the device may still reach is reported as kept
//! (exit code 4), and stays what it is until the process is gone: then the kernel, which stops a
//! function with its last descriptor before it lets go of any page (R12), or the server, which has
//! files of its own, are the last to hold it.
//!
//! Once the device is closed, a second signal ends a report that nobody reads.

use std::fs;
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use failstop::device::{Device, Glance};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::exit::Exit;
use crate::run::{Known, Report};

/// How long the end of a run may take in all, from when its time is up, or from a signal: what is on
/// its way, attempts at a recovery, and the ladders, each with its deadlines. `--help` and the README
/// say it.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Signals so soon after the first are the first: a service manager sends two at once (`SIGTERM` and
/// `SIGHUP`), and `timeout` one to its child and one to the group. `--help` and the README say it.
pub(crate) const GRACE: Duration = Duration::from_millis(500);
/// How often it is looked for signals, and at the time.
const LOOK: Duration = Duration::from_millis(20);
/// How long the last words may take to be written, where nobody reads them.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Between who runs and who watches for its end.
#[derive(Default)]
pub(crate) struct Ending {
    stop: AtomicBool,
    run: Mutex<Run>,
}

/// What is known of a run.
#[derive(Default)]
struct Run {
    /// What is reported if it ends at once, and of what.
    device: Option<(Glance, Report)>,
    /// When it was first asked to end.
    asked: Option<Instant>,
    /// When it has to be over.
    end: Option<Instant>,
    /// Its device is closed and its report is being written: with this code it ends.
    over: Option<Exit>,
    json: bool,
}

impl Run {
    /// It is asked to end; whether at once.
    fn ask(&mut self, now: Instant) -> bool {
        if let Some(first) = self.asked {
            return now.saturating_duration_since(first) >= GRACE;
        }
        self.asked = Some(now);
        let limit = now + LIMIT;
        self.end = Some(self.end.map_or(limit, |end| end.min(limit)));
        false
    }

    /// Whether its end takes too long. To be read has no limit: a pager waits for its reader.
    fn is_late(&self, now: Instant) -> bool {
        self.over.is_none() && self.end.is_some_and(|end| now >= end)
    }
}

impl Ending {
    /// Watches for signals, and for the end of a run that prints JSON or not, as long as the process
    /// lives.
    ///
    /// # Errors
    ///
    /// When signals cannot be watched.
    pub(crate) fn watch(json: bool) -> anyhow::Result<Arc<Self>> {
        let mut watched = vec![SIGINT, SIGTERM];
        // The others are caught anyhow: a script's background has SIGINT ignored, and whoever sends
        // it to a run that is there means it.
        if !is_ignored(SIGHUP) {
            watched.push(SIGHUP);
        }
        let mut signals = Signals::new(watched).context("could not watch for signals")?;
        let ending = Arc::new(Self::default());
        ending.run().json = json;
        let watching = ending.clone();
        let watch = move || {
            loop {
                let now = Instant::now();
                for _ in signals.pending() {
                    watching.asked(now);
                }
                watching.look(now);
                thread::sleep(LOOK);
            }
        };
        let thread = thread::Builder::new().name("ending".to_owned());
        thread.spawn(watch).context("no thread for signals")?;
        Ok(ending)
    }

    /// Set when it is asked to end.
    pub(crate) fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// A device was opened, of which there is so much to report, and whose time is up `after` so long.
    pub(crate) fn opened(&self, device: &Device, report: Report, after: Duration) {
        let mut run = self.run();
        run.device = Some((device.glance(), report));
        let end = Instant::now().checked_add(after.saturating_add(LIMIT));
        run.end = run.end.or(end);
    }

    /// The run came to its end by itself: its device, if there was one, is closed, and what is left is
    /// to say so and to exit like this.
    pub(crate) fn over(&self, exit: Exit) {
        self.run().over = Some(exit);
    }

    fn asked(&self, now: Instant) {
        let mut run = self.run();
        let at_once = run.ask(now);
        self.stop.store(true, Ordering::Release);
        if at_once {
            end(run, "a second signal");
        }
    }

    fn look(&self, now: Instant) {
        let run = self.run();
        if run.is_late(now) {
            end(
                run,
                &format!("its end took more than {} s", LIMIT.as_secs()),
            );
        }
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says what state things are in, and ends the process. Whoever would say that the run is over
/// meanwhile waits.
fn end(mut run: MutexGuard<'_, Run>, why: &str) -> ! {
    let json = run.json;
    if let Some(exit) = run.over {
        let text =
            format!("ended by {why} while its report was being written; the device is closed");
        leave(exit, move || {
            crate::complain(text);
            Ok(())
        });
    }
    let (glance, report) = run.device.take().unzip();
    let mut report = report.unwrap_or_default();
    let exit = report.cut_short(Known::of(glance.as_ref()), why);
    leave(exit, move || last_words(&report, json));
}

/// Ends the process when `words` are said; a pipe that nobody reads does not keep it.
fn leave(exit: Exit, words: impl FnOnce() -> io::Result<()> + Send + 'static) -> ! {
    let (said, wait) = mpsc::channel();
    let words = move || {
        let _ = said.send(words());
    };
    if thread::Builder::new().spawn(words).is_ok() {
        let _ = wait.recv_timeout(LAST_WORDS);
    }
    process::exit((exit as u8).into());
}

fn last_words(report: &Report, json: bool) -> io::Result<()> {
    if json {
        let mut out = io::stdout();
        serde_json::to_writer(&mut out, report)?;
        writeln!(out)?;
    }
    crate::complain(report.why_cut_short());
    Ok(())
}

/// Whether this process was started with `signal` ignored, as `nohup` does it.
fn is_ignored(signal: i32) -> bool {
    // Where it cannot be read, it is caught.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores(&status, signal)
}

/// The same of a process with this status (proc_pid_status(5)): bit n - 1 of `SigIgn` is signal n.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_within_the_grace_of_the_first_are_the_first() {
        let (mut run, first) = (Run::default(), Instant::now());
        assert!(!run.ask(first));
        assert!(!run.ask(first));
        assert!(!run.ask(first + GRACE - Duration::from_millis(1)));
        assert!(run.ask(first + GRACE));
    }

    #[test]
    fn an_end_has_its_limit_from_the_first_signal_and_none_once_it_is_over() {
        let (mut run, first) = (Run::default(), Instant::now());
        let _first = run.ask(first);
        let _same = run.ask(first + GRACE / 2);
        assert!(!run.is_late(first + LIMIT - Duration::from_millis(1)));
        assert!(run.is_late(first + LIMIT));
        run.over = Some(Exit::Clean);
        assert!(!run.is_late(first + LIMIT));
    }

    #[test]
    fn a_status_says_which_signals_are_ignored() {
        let status = "Name:\tfailstop\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, SIGHUP));
        assert!(!ignores(status, SIGINT));
        assert!(!ignores("", SIGHUP));
    }
}
