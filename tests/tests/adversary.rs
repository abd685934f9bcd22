//! The matrix on T1: each fault in each phase, on an emulator of its own; and a whole `failstop run`
//! under each fault. What came of it is written to `target/adversary`.
//!
//! A landing plays one cell of each row, the one that bites first; all are played with
//! `FAILSTOP_FULL` set, as `cargo xtask matrix` does.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use failstop_tests::adversary::plays::{Play, plays};
use failstop_tests::adversary::print::{self, Results};
use failstop_tests::adversary::table::{Phase, Table, Tier};
use failstop_tests::adversary::{cell, run};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let table = match Table::read() {
        Ok(table) => table,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let full = std::env::var_os("FAILSTOP_FULL").is_some();
    let results = Arc::new(Mutex::new(Results::new()));
    let trials = plays(&table, Tier::T1)
        .into_iter()
        .filter(|play| full || play.bites)
        .map(|one| {
            let results = results.clone();
            Trial::test(one.title(), move || play(&one, &results))
        });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    print::keep(env!("CARGO_TARGET_TMPDIR"), &table, &results, Tier::T1);
    conclusion.exit_code()
}

fn play(play: &Play, results: &Mutex<Results>) -> Result<(), Failed> {
    let played = match play.phase {
        Phase::Run | Phase::Start => run::judge(play),
        _ => cell::judge(play).map(|seen| seen.word.to_string()),
    };
    play.end(played, results)
}
