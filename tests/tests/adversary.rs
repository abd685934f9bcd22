//! The matrix on T1: each fault in each phase, on an emulator of its own; and a whole `failstop run`
//! under each fault. What came of it is written to `target/adversary`.
//!
//! A landing plays one cell of each row, the one that bites first; all are played with
//! `FAILSTOP_FULL` set, as `cargo xtask matrix` does.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use failstop_tests::adversary::cell::{self, NotSeen};
use failstop_tests::adversary::demand::{Answers, Server};
use failstop_tests::adversary::print::{self, Result as Shown, Results};
use failstop_tests::adversary::run;
use failstop_tests::adversary::table::{Cell, Phase, Row, Table, Tier, Word};
use libtest_mimic::{Arguments, Failed, Trial};

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

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let table = match Table::read() {
        Ok(table) => table,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let results = Arc::new(Mutex::new(Results::new()));
    let trials = trials(&table, &results);
    let conclusion = libtest_mimic::run(&arguments, trials);
    let results = results.lock().unwrap_or_else(PoisonError::into_inner);
    if !results.is_empty() {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("../adversary");
        match print::write(&folder, &table, &results, Tier::T1) {
            Ok(()) => eprintln!("{:?}", print::count(&table, &results, Tier::T1)),
            Err(error) => eprintln!("the matrix was not written: {error}"),
        }
    }
    conclusion.exit_code()
}

fn trials(table: &Table, results: &Arc<Mutex<Results>>) -> Vec<Trial> {
    let full = std::env::var_os("FAILSTOP_FULL").is_some();
    let mut trials = Vec::new();
    for (name, row) in &table.rows {
        let bites = bites(row);
        for phase in Phase::ALL {
            if matches!(row.cell(*phase, Tier::T1), Cell::NotApplicable(_)) {
                continue;
            }
            for moment in moments(row, *phase) {
                let title = match moment {
                    "now" => format!("{name}/{phase}"),
                    moment => format!("{name}/{phase}@{moment}"),
                };
                let first = moments(row, *phase)[0] == moment;
                let (row, results) = (row.clone(), results.clone());
                let (name, phase) = (name.clone(), *phase);
                let known_red = table.known_red(&name, phase).map(str::to_owned);
                let landing = Some(phase) == bites && first;
                if landing || full {
                    let play = move || play(&name, &row, phase, moment, known_red, &results);
                    trials.push(Trial::test(title, play));
                }
            }
        }
    }
    trials
}

/// The phase that is played at each landing: the first in which the fault does something.
fn bites(row: &Row) -> Option<Phase> {
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
    let bitten = |phase: &Phase| match row.cell(*phase, Tier::T1) {
        Cell::OneOf(verdicts) => verdicts.iter().any(|verdict| verdict.word != Word::Ok),
        Cell::NotApplicable(_) => false,
    };
    order.into_iter().find(bitten)
}

/// When, within a phase, the fault begins.
fn moments(row: &Row, phase: Phase) -> Vec<&'static str> {
    match phase {
        // Between the steps: before the first of them has its effect, and before later ones.
        Phase::Ladder
            if row.truth.answers == Answers::Never || row.truth.server == Server::Dies =>
        {
            RUNGS.to_vec()
        }
        Phase::Ladder => vec!["bme-off"],
        Phase::Init if row.truth.answers != Answers::Always => {
            std::iter::once("now").chain(STEPS).collect()
        }
        _ => vec!["now"],
    }
}

fn play(
    name: &str,
    row: &Row,
    phase: Phase,
    moment: &str,
    known_red: Option<String>,
    results: &Mutex<Results>,
) -> Result<(), Failed> {
    let played = match phase {
        Phase::Run | Phase::Start => run::judge(name, row, phase),
        _ => cell::judge(name, row, phase, moment).map(|seen| seen.word.to_string()),
    };
    let shown = match &played {
        Ok(word) => Shown::Passed(word.clone()),
        Err(NotSeen::NotOffered(_)) => Shown::NotOffered,
        Err(NotSeen::Failed(failed)) => {
            let what = failed.message().unwrap_or("it failed").to_owned();
            match known_red {
                Some(_) => Shown::KnownRed(what),
                None => Shown::Failed(what),
            }
        }
    };
    let mut all = results.lock().unwrap_or_else(PoisonError::into_inner);
    let cell = all.entry(name.to_owned()).or_default().entry(phase);
    // Of several moments the worst is shown.
    cell.and_modify(|before| {
        if matches!(before, Shown::Passed(_)) {
            *before = shown.clone();
        }
    })
    .or_insert(shown);
    drop(all);
    match played {
        Ok(_) if known_red.is_some() => {
            Err("it is right now: take it out of the table's [known-red]".into())
        }
        Ok(_) | Err(NotSeen::NotOffered(_)) => Ok(()),
        Err(NotSeen::Failed(_)) if known_red.is_some() => Ok(()),
        Err(NotSeen::Failed(failed)) => Err(failed),
    }
}
