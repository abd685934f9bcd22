//! How a run ends: in order, when its time is up or by a first signal; at once, by a second signal or
//! when the orderly end has taken its limit.
//!
//! Who ends at once releases nothing. Memory that the device may still reach is reported as kept
//! (exit code 4), and stays what it is until the process is gone: then the kernel, which stops a
//! function with its last descriptor before it lets go of any page (R12), or the server, which has
//! files of its own, are the last to hold it.

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

use crate::run::Report;

/// How long the end of a run may take in all, from when its time is up, or from a signal: what is on
/// its way, attempts at a recovery, and the ladders, each with its deadlines. `--help` and the README
/// say it.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
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
    /// When it has to be over.
    end: Option<Instant>,
    /// Its report is being written: there is nothing to end any more.
    over: bool,
    json: bool,
}

impl Ending {
    /// Watches for signals, and for the end of a run that prints JSON or not.
    ///
    /// # Errors
    ///
    /// When signals cannot be watched.
    pub(crate) fn watch(json: bool) -> anyhow::Result<Arc<Self>> {
        let signals = Signals::new([SIGHUP, SIGINT, SIGTERM]);
        let mut signals = signals.context("could not watch for signals")?;
        let ending = Arc::new(Self::default());
        ending.run().json = json;
        let watched = Arc::downgrade(&ending);
        let watch = move || {
            while let Some(ending) = watched.upgrade() {
                for _ in signals.pending() {
                    ending.asked();
                }
                ending.look(Instant::now());
                drop(ending);
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

    /// The run came to its end by itself.
    pub(crate) fn over(&self) {
        self.run().over = true;
    }

    fn asked(&self) {
        if self.stop.swap(true, Ordering::AcqRel) {
            self.end("a second signal");
        }
        let limit = Instant::now() + LIMIT;
        let mut run = self.run();
        run.end = Some(run.end.map_or(limit, |end| end.min(limit)));
    }

    fn look(&self, now: Instant) {
        let late = self.run().end.is_some_and(|end| now >= end);
        if late {
            self.end(&format!("its end took more than {} s", LIMIT.as_secs()));
        }
    }

    /// Says what state things are in, and ends the process.
    fn end(&self, why: &str) {
        let mut run = self.run();
        if run.over {
            return;
        }
        let json = run.json;
        let (glance, report) = run.device.take().unzip();
        let mut report = report.unwrap_or_default();
        let exit = report.cut_short(glance.as_ref(), why);
        // A pipe that nobody reads does not keep it.
        let (said, wait) = mpsc::channel();
        let words = move || {
            let _ = said.send(last_words(&report, json));
        };
        if thread::Builder::new().spawn(words).is_ok() {
            let _ = wait.recv_timeout(LAST_WORDS);
        }
        process::exit((exit as u8).into());
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
