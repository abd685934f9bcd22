//! Which cells are played, and what came of them.

use std::sync::{Mutex, PoisonError};

use libtest_mimic::Failed;

use super::cell::NotSeen;
use super::demand::{Answers, Reset, Server};
use super::print::{Result as Shown, Results};
use super::table::{Cell, Phase, Row, Table, Tier, Word};

/// Moments of an open at which a function that goes away is tried, beside the first.
const STEPS: [&str; 5] = [
    "init-reset",
    "init-nvm",
    "init-address",
    "init-phy",
    "init-enable",
];
/// Moments of a ladder, after the first two steps.
const RUNGS: [&str; 3] = ["bme-off", "reset", "unmap"];

/// A cell at one moment.
#[derive(Clone, Debug)]
pub struct Play {
    /// The row.
    pub fault: String,
    /// What it says.
    pub row: Row,
    /// The phase.
    pub phase: Phase,
    /// When within the phase the fault begins, as a trigger of the emulator's.
    pub moment: &'static str,
    /// The first moment of the first phase in which the fault does something: played at each landing.
    pub bites: bool,
    /// Why it is known to be red, if it is.
    pub known_red: Option<String>,
}

impl Play {
    /// What a test of it is called.
    #[must_use]
    pub fn title(&self) -> String {
        match self.moment {
            "now" => format!("{}/{}", self.fault, self.phase),
            moment => format!("{}/{}@{moment}", self.fault, self.phase),
        }
    }

    /// Whether it may end with a call of ours still in a kernel that waits for the function: such a call
    /// has a file of it, so that whoever opens the function next does so in a process of his own.
    #[must_use]
    pub fn leaves_calls(&self) -> bool {
        self.row.truth.answers != Answers::Always || self.row.truth.reset == Reset::Hangs
    }

    /// Keeps what came of it for the tables, and says how a test of it ends.
    ///
    /// # Errors
    ///
    /// When it did not come to what is demanded, or did although it is known to be red.
    pub fn end(
        &self,
        played: Result<String, NotSeen>,
        results: &Mutex<Results>,
    ) -> Result<(), Failed> {
        let (shown, ended) = match (played, &self.known_red) {
            (Ok(word), None) => (Shown::Passed(word), Ok(())),
            (Ok(word), Some(_)) => {
                let why = "it is right now: take it out of the table's [known-red]";
                (Shown::Passed(word), Err(why.into()))
            }
            (Err(NotSeen::NotOffered(_)), _) => (Shown::NotOffered, Ok(())),
            (Err(NotSeen::Failed(failed)), known_red) => {
                let what = failed.message().unwrap_or("it failed").to_owned();
                match known_red {
                    Some(_) => (Shown::KnownRed(what), Ok(())),
                    None => (Shown::Failed(what), Err(failed)),
                }
            }
        };
        let mut all = results.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = all.entry(self.fault.clone()).or_default();
        let cell = cell.entry(self.phase);
        // Of several moments the worst is shown.
        let worse = |before: &mut Shown| {
            if matches!(before, Shown::Passed(_)) {
                *before = shown.clone();
            }
        };
        cell.and_modify(worse).or_insert_with(|| shown.clone());
        ended
    }
}

/// Every cell of a tier that demands something, at each of its moments.
#[must_use]
pub fn plays(table: &Table, tier: Tier) -> Vec<Play> {
    let mut plays = Vec::new();
    for (name, row) in &table.rows {
        let bites = bites(row, tier);
        for phase in Phase::ALL {
            if matches!(row.cell(*phase, tier), Cell::NotApplicable(_)) {
                continue;
            }
            for (number, moment) in moments(row, *phase, tier).into_iter().enumerate() {
                plays.push(Play {
                    fault: name.clone(),
                    row: row.clone(),
                    phase: *phase,
                    moment,
                    bites: Some(*phase) == bites && number == 0,
                    known_red: table.known_red(name, *phase).map(str::to_owned),
                });
            }
        }
    }
    plays
}

/// The phase that is played at each landing: the first in which the fault does something.
fn bites(row: &Row, tier: Tier) -> Option<Phase> {
    let order = [
        Phase::DestroyRq,
        Phase::DestroySq,
        Phase::Traffic,
        Phase::Init,
        Phase::DestroyMr,
        Phase::Recovery,
        Phase::Ladder,
        Phase::Idle,
        Phase::Close,
    ];
    let bitten = |phase: &Phase| match row.cell(*phase, tier) {
        Cell::OneOf(verdicts) => verdicts.iter().any(|verdict| verdict.word != Word::Ok),
        Cell::NotApplicable(_) => false,
    };
    order.into_iter().find(bitten)
}

/// When, within a phase, the fault begins.
fn moments(row: &Row, phase: Phase, tier: Tier) -> Vec<&'static str> {
    match phase {
        // Between the steps: before the first of them has its effect, and before later ones.
        Phase::Ladder
            if row.truth.answers == Answers::Never || row.truth.server == Server::Dies =>
        {
            RUNGS.to_vec()
        }
        Phase::Ladder => vec!["bme-off"],
        // The kernel resets it before it gives anybody its file, and would wait there for minutes: it
        // goes away once we have that.
        Phase::Init if row.truth.answers == Answers::Never && tier == Tier::T3 => STEPS.to_vec(),
        Phase::Init if row.truth.answers != Answers::Always => {
            std::iter::once("now").chain(STEPS).collect()
        }
        _ => vec!["now"],
    }
}
