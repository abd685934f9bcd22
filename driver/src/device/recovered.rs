//! What a recovery did, for people and for machines.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ladder::micros;
use crate::port::Carried;

/// A step of a recovery (R10).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryStep {
    /// It is proven stopped: at once where the ladder proved it, by another climb where not.
    Stopped,
    /// Bus mastering was seen to be off, memory decoding to be on, and new windows are open.
    Reopened,
    /// The provider reset it by its own register and set it up.
    BroughtUp,
    /// The next break is prepared: canary planted, vectors routed, ledger open, a ladder ready.
    Armed,
    /// A port took its old queues apart, and its memory is mapped anew.
    Remapped,
    /// It has new queues: rings mapped, registers written, and bus mastering on.
    Requeued,
}

impl RecoveryStep {
    /// The word that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Reopened => "reopened",
            Self::BroughtUp => "brought_up",
            Self::Armed => "armed",
            Self::Remapped => "remapped",
            Self::Requeued => "requeued",
        }
    }
}

impl fmt::Display for RecoveryStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How long a step took.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RecoveryTime {
    /// Which.
    pub step: RecoveryStep,
    /// How long it took, in microseconds.
    #[serde(rename = "us", serialize_with = "micros")]
    pub took: Duration,
}

/// One recovery of a device, from the verdict to its new life.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RecoveryReport {
    /// The function's name.
    pub device: String,
    /// Which of its lives began: 2 for the first recovery.
    pub generation: u64,
    /// What was done, in the order taken. The last two are a port's, and come with
    /// [`RecoveryReport::add_port`].
    pub steps: Vec<RecoveryTime>,
}

impl RecoveryReport {
    /// Adds how long it took to carry a port to the life that began; nothing for one that was not
    /// carried yet.
    pub fn add_port(&mut self, carried: &Carried) {
        if carried.times == 0 {
            return;
        }
        let steps = [
            (RecoveryStep::Remapped, carried.remapped),
            (RecoveryStep::Requeued, carried.requeued),
        ];
        let times = steps.map(|(step, took)| RecoveryTime { step, took });
        self.steps.extend(times);
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, generation {}: began", self.device, self.generation)?;
        for RecoveryTime { step, took } in &self.steps {
            writeln!(f, "  {:>9} us  {step}", took.as_micros())?;
        }
        Ok(())
    }
}

/// A stopwatch for the steps that follow each other.
#[derive(Debug)]
pub(super) struct Steps {
    last: Instant,
    steps: Vec<RecoveryTime>,
}

impl Steps {
    pub(super) fn begin() -> Self {
        Self {
            last: Instant::now(),
            steps: Vec::new(),
        }
    }

    /// The step ends now, which began with the end of the one before.
    pub(super) fn ended(&mut self, step: RecoveryStep) {
        let now = Instant::now();
        let took = now.saturating_duration_since(self.last);
        self.last = now;
        self.steps.push(RecoveryTime { step, took });
    }

    pub(super) fn report(self, device: String, generation: u64) -> RecoveryReport {
        RecoveryReport {
            device,
            generation,
            steps: self.steps,
        }
    }
}
