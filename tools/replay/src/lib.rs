//! Plays scenarios ([`failstop_scenario`]).
//!
//! On a device that is there, emulated or real ([`live`]), each step is taken, what is expected is
//! compared, and the end is that of `failstop run`: a verdict and an exit code. On a scripted device
//! the model of the contract looks on, and says after which step it does not hold. That model is
//! T0's: the same files, which stay with the driver's tests, where mutations find them.

mod frames;
pub mod live;
mod model;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use failstop::dma::ledger::Line;
use failstop::name::{DeviceName, NotADevice};
use failstop::queues::completions::Completions;
use failstop_emulator::control::ControlError;
use failstop_emulator::{EmulatorError, Options, Running};
use failstop_scenario::step::Verdict;
use failstop_scenario::{On, Scenario, Step};
use thiserror::Error;

use live::{Live, Patience};

/// How all went.
#[derive(Clone, Debug)]
pub struct Ending {
    /// What became of memory and device.
    pub verdict: Verdict,
    /// The exit code of `failstop run`.
    pub exit: u8,
    /// Frames that ports sent.
    pub sent: u64,
    /// Frames that came back.
    pub received: u64,
    /// Of these, with other bytes than were sent, or again.
    pub wrong: u64,
    /// Every request, and how it ended.
    pub completions: Completions,
    /// What is kept.
    pub kept: Vec<Line>,
    /// What happened on the way, for people.
    pub told: String,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told)?;
        writeln!(
            f,
            "sent {} frames, received {}, {} with errors",
            self.sent, self.received, self.wrong
        )?;
        let c = &self.completions;
        writeln!(
            f,
            "requests: {} posted = {} successful + {} in error + {} flushed",
            c.posted, c.success, c.error, c.flushed
        )?;
        for line in &self.kept {
            let (owner, reason) = (&line.owner, line.reason.unwrap_or("still in use"));
            writeln!(
                f,
                "  kept: {} bytes at {} of {owner}: {reason}",
                line.len, line.iova
            )?;
        }
        write!(f, "ended: {}", Step::Expect(self.verdict, self.exit))
    }
}

/// Why a step cannot be taken, or does not hold.
#[derive(Debug, Error)]
pub enum Why {
    /// It means nothing on this device.
    #[error("this is nothing for such a device")]
    NotHere,
    /// No device is open.
    #[error("no device is open: 'open' comes first")]
    NotOpen,
    /// One is.
    #[error("a device is open already: 'close' comes first")]
    Open,
    /// The emulator does not do what it is told.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The contract does not hold after it.
    #[error("the contract is broken: {0}")]
    Breach(String),
    /// It ends in another way.
    #[error("it is '{found}'{}", after(told))]
    Unexpected {
        /// What it is.
        found: String,
        /// What happened on the way.
        told: String,
    },
}

/// What happened on the way, below what it led to.
fn after(told: &str) -> String {
    match told.trim() {
        "" => String::new(),
        told => format!(":\n{told}"),
    }
}

/// A scenario that did not hold, or could not be played.
#[derive(Debug, Error)]
pub enum Failure {
    /// A step of it.
    #[error("step {number}, '{step}'")]
    Step {
        /// Which, from 1 on.
        number: usize,
        /// The step, as it is written.
        step: String,
        /// Why.
        #[source]
        why: Why,
    },
    /// The emulated device did not start.
    #[error("the emulated device did not start")]
    Emulator(#[from] EmulatorError),
    /// There is no such emulated device.
    #[error("'{0}' is not emulated; there is 82576")]
    NotEmulated(String),
    /// The name is no device's.
    #[error(transparent)]
    Name(#[from] NotADevice),
}

/// Starts an emulator: a tool does so in a process of its own, a test on threads.
pub type Start<'a> = &'a dyn Fn(&Options) -> Result<Running, EmulatorError>;

/// How a scenario was played.
#[derive(Clone, Debug)]
pub enum Played {
    /// On a device that is there.
    Ended(Ending),
    /// On a scripted device, beside the model of the contract, which found nothing.
    Held {
        /// How many steps were taken.
        steps: usize,
    },
}

/// Plays a scenario to its end.
///
/// # Errors
///
/// [`Failure`].
pub fn replay(scenario: &Scenario, start: Start<'_>) -> Result<Played, Failure> {
    let mut live = match &scenario.on {
        On::Emulated(part) if part == "82576" => {
            Live::emulated(start(&Options::default())?, Patience::default())
        }
        On::Emulated(part) => return Err(Failure::NotEmulated(part.clone())),
        On::Device(name) => Live::named(DeviceName::from_str(name)?, Patience::default()),
        On::Scripted(behind) => {
            let steps = model::play(*behind, &scenario.steps)?;
            return Ok(Played::Held { steps });
        }
    };
    play(&mut live, &scenario.steps)?;
    Ok(Played::Ended(live.end()))
}

/// Takes steps, one after the other.
///
/// # Errors
///
/// [`Failure::Step`].
pub fn play(live: &mut Live, steps: &[Step]) -> Result<(), Failure> {
    for (number, step) in (1..).zip(steps) {
        live.step(step).map_err(|why| Failure::Step {
            number,
            step: step.to_string(),
            why,
        })?;
    }
    Ok(())
}

/// Writes a scenario to `failures/NAME.scenario` in the folder of builds, for `failstop replay`.
///
/// # Errors
///
/// When it cannot be written.
pub fn keep(scenario: &Scenario, name: &str, target: &Path) -> std::io::Result<PathBuf> {
    let folder = target.join("failures");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{name}.scenario"));
    std::fs::write(&path, scenario.to_string())?;
    Ok(path)
}
