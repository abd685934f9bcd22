//! What the ladder did, for people and for machines.

use std::fmt;
use std::time::Duration;

use failstop_dma::ledger::Line;
use failstop_pci::transport::ResetMethod;
use serde::{Serialize, Serializer};

use crate::flight::FlightEvent;

/// A step of the ladder (R4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The device is marked broken, the ledger closed, every sleeper woken.
    MarkBroken,
    /// The known command word is written without Bus Master Enable, and read back.
    BusMasterOff,
    /// The data path's windows show private memory, its vectors are disabled.
    Detached,
    /// Transactions Pending was seen clear, or not.
    PendingDrained,
    /// A reset, verified by what it has to undo.
    Reset,
    /// Every mapping is taken out of the device's reach.
    Unmapped,
}

impl Step {
    /// The word that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MarkBroken => "mark_broken",
            Self::BusMasterOff => "bus_master_off",
            Self::Detached => "detached",
            Self::PendingDrained => "pending_drained",
            Self::Reset => "reset",
            Self::Unmapped => "unmapped",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it should.
    Done,
    /// It was tried, and what it is for was not shown.
    NotProven,
    /// It failed.
    Failed,
    /// It had not ended by its deadline, and was left behind.
    TimedOut,
    /// It was not taken: the device is not there, or has nothing of the kind.
    Skipped,
}

impl Outcome {
    /// The word that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::NotProven => "not_proven",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Skipped => "skipped",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One step that was taken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct StepReport {
    /// Which.
    pub step: Step,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took, in microseconds.
    #[serde(rename = "us", serialize_with = "micros")]
    pub took: Duration,
    /// What there is to say of it, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

pub(crate) fn micros<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// What the ladder's end means for memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// The device provably cannot reach any of it: everything was released.
    Revoked,
    /// It could not be shown for some of it, which is kept.
    Quarantined,
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Revoked => "revoked",
            Self::Quarantined => "quarantined",
        })
    }
}

/// What a verdict rests on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ground {
    /// The function is stopped: bus mastering read back clear and a reset was proven.
    Stopped,
    /// Every mapping was taken away by an IOMMU that enforces it, or a server that said so.
    Unmapped,
    /// Both.
    StoppedAndUnmapped,
    /// Neither.
    Nothing,
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stopped => "the function is stopped",
            Self::Unmapped => "every mapping is gone",
            Self::StoppedAndUnmapped => "the function is stopped and every mapping is gone",
            Self::Nothing => "nothing was proven",
        })
    }
}

/// One break of a device, from the mark to the verdict.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RevocationReport {
    /// The function's name.
    pub device: String,
    /// Which of its lives ended: 1 for the first.
    pub generation: u64,
    /// Why.
    pub cause: String,
    /// What the ladder did at the break, where this is a later attempt to stop the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<Box<RevocationReport>>,
    /// From the mark to the ladder's first action, in microseconds.
    #[serde(rename = "wake_us", serialize_with = "micros")]
    pub wake: Duration,
    /// What was done, in the order taken.
    pub steps: Vec<StepReport>,
    /// The reset that was proven; none where none was.
    #[serde(serialize_with = "method")]
    pub reset_method: Option<ResetMethod>,
    /// What it means for memory.
    pub verdict: Word,
    /// What that rests on.
    pub ground: Ground,
    /// Bytes that were released.
    pub released_bytes: u64,
    /// Bytes that are kept.
    pub quarantined_bytes: u64,
    /// What is kept, and why.
    #[serde(skip)]
    pub quarantined: Vec<Line>,
    /// The last control events of the device, up to the verdict, oldest first.
    pub flight: Vec<FlightEvent>,
    /// How many events are missing there, because the recorder was taken when they happened.
    pub flight_missed: u64,
}

/// How many of the last events people are shown.
const SHOWN: usize = 16;

fn method<S: Serializer>(method: &Option<ResetMethod>, serializer: S) -> Result<S::Ok, S::Error> {
    match method {
        Some(method) => serializer.serialize_some(method.name()),
        None => serializer.serialize_none(),
    }
}

impl RevocationReport {
    /// The report of one step, if it was taken.
    #[must_use]
    pub fn step(&self, step: Step) -> Option<&StepReport> {
        self.steps.iter().find(|report| report.step == step)
    }

    /// Whether a recovery can follow (R10).
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.ground, Ground::Stopped | Ground::StoppedAndUnmapped)
    }
}

impl fmt::Display for RevocationReport {
    /// What broke it comes first, and the last attempt, whose verdict holds, last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.first {
            Some(first) => {
                first.write_cause(f)?;
                first.write_climb(f)?;
                writeln!(f, "{}: another attempt to stop it", self.device)?;
            }
            None => self.write_cause(f)?,
        }
        self.write_climb(f)?;
        for line in &self.quarantined {
            writeln!(
                f,
                "  kept: {} bytes at {} of {}: {}",
                line.len,
                line.iova,
                line.owner,
                line.reason.unwrap_or("still in use")
            )?;
        }
        let shown = &self.flight[self.flight.len().saturating_sub(SHOWN)..];
        if !shown.is_empty() {
            writeln!(f, "  the last control events, since it was opened:")?;
        }
        for event in shown {
            writeln!(f, "  {}", self.unnamed(&event.to_string()))?;
        }
        if self.flight_missed > 0 {
            writeln!(f, "  {} events were not recorded", self.flight_missed)?;
        }
        Ok(())
    }
}

impl RevocationReport {
    /// Without the device's name, which stands above.
    fn unnamed(&self, text: &str) -> String {
        text.replace(&format!("{}: ", self.device), "")
    }

    fn write_cause(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, generation {}: broken, because {}",
            self.device, self.generation, self.cause
        )
    }

    /// Its steps, and what they come to.
    fn write_climb(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  {:>9} us  ladder awake", self.wake.as_micros())?;
        for step in &self.steps {
            let us = step.took.as_micros();
            write!(f, "  {us:>9} us  {:<16}{}", step.step, step.outcome)?;
            match &step.note {
                Some(note) => writeln!(f, ": {}", self.unnamed(note))?,
                None => writeln!(f)?,
            }
        }
        let reset = self.reset_method.map_or("none", ResetMethod::name);
        writeln!(
            f,
            "  {}: {}; proven reset: {reset}; {} bytes released, {} kept",
            self.verdict, self.ground, self.released_bytes, self.quarantined_bytes
        )
    }
}
