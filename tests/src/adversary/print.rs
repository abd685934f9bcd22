//! The matrix, as JSON and as Markdown.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::table::{Cell, Phase, Table, Tier};

/// What came of a cell.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Result {
    /// It came to what is demanded: to this.
    Passed(String),
    /// It did not.
    Failed(String),
    /// It does not, because of a bug that is known.
    KnownRed(String),
    /// The emulator does not have the fault.
    NotOffered,
}

/// Cells by row, then by phase; a phase with several moments is one cell.
pub type Results = BTreeMap<String, BTreeMap<Phase, Result>>;

/// How many cells came to what.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Counts {
    /// Demanded, played and right.
    pub passed: usize,
    /// Played and wrong.
    pub failed: usize,
    /// Wrong, and known to be.
    pub known_red: usize,
    /// The emulator does not have the fault.
    pub not_offered: usize,
    /// Demanded and not played this time.
    pub not_played: usize,
    /// Empty, with a reason.
    pub not_applicable: usize,
}

/// Counts the cells of a tier.
#[must_use]
pub fn count(table: &Table, results: &Results, tier: Tier) -> Counts {
    let mut counts = Counts::default();
    for (name, row) in &table.rows {
        for phase in Phase::ALL {
            let result = results.get(name).and_then(|cells| cells.get(phase));
            *match (row.cell(*phase, tier), result) {
                (Cell::NotApplicable(_), _) => &mut counts.not_applicable,
                (_, None) => &mut counts.not_played,
                (_, Some(Result::Passed(_))) => &mut counts.passed,
                (_, Some(Result::Failed(_))) => &mut counts.failed,
                (_, Some(Result::KnownRed(_))) => &mut counts.known_red,
                (_, Some(Result::NotOffered)) => &mut counts.not_offered,
            } += 1;
        }
    }
    counts
}

/// The demanded matrix, with results where there are some.
///
/// A cell that was played and came to what is demanded is as it is demanded; another one says so.
#[must_use]
pub fn markdown(table: &Table, results: &Results, tier: Tier) -> String {
    let mut text = String::from("| fault |");
    for phase in Phase::ALL {
        // Writing to a string does not fail.
        let _ = write!(text, " {phase} |");
    }
    text.push_str("\n| --- |");
    text.push_str(&" --- |".repeat(Phase::ALL.len()));
    text.push('\n');
    for (name, row) in &table.rows {
        let _ = write!(text, "| {name} |");
        for phase in Phase::ALL {
            let demanded = row.cell(*phase, tier);
            let result = results.get(name).and_then(|cells| cells.get(phase));
            let _ = match (demanded, result, table.known_red(name, *phase)) {
                (Cell::NotApplicable(why), ..) => write!(text, " n/a: {why} |"),
                (cell, Some(Result::Failed(_)), _) => write!(text, " {cell} (**failed**) |"),
                (cell, Some(Result::NotOffered), _) => write!(text, " {cell} (not offered) |"),
                (cell, _, Some(_)) => write!(text, " {cell} (*known red*) |"),
                (cell, ..) => write!(text, " {cell} |"),
            };
        }
        text.push('\n');
    }
    text
}

/// The page that the README links to: what is demanded, and why cells are empty, open or as they are.
#[must_use]
pub fn page(table: &Table) -> String {
    let mut text = String::from(
        "# The matrix of faults\n\nGenerated from `verdicts.toml` by `cargo xtask matrix --write`: what the contract \
         demands of the driver when a fault is there in a phase of a device's life, and the code by which `failstop run` \
         exits on it. The rules that a cell follows from are in `tests/src/adversary/demand.rs`. `cargo xtask matrix` plays \
         every cell.\n\n",
    );
    text.push_str("## T1: over vfio-user\n\n");
    text += &markdown(table, &Results::new(), Tier::T1);
    text.push_str("\n## T3: by a guest's kernel VFIO\n\n");
    text += &markdown(table, &Results::new(), Tier::T3);
    text.push_str("\n## Empty cells\n\n");
    for (why, sentence) in &table.na {
        let _ = writeln!(text, "- {why}: {sentence}");
    }
    text.push_str("\n## Why\n\n");
    for (name, row) in &table.rows {
        if let Some(why) = &row.why {
            let _ = writeln!(text, "- {name}: {why}");
        }
    }
    if !table.known_red.is_empty() {
        text.push_str(
            "\n## Known red\n\nThe driver is known to fail these cells; the demand stands.\n\n",
        );
    }
    for (name, known) in &table.known_red {
        let phases: Vec<&str> = known.phases.iter().map(|phase| phase.word()).collect();
        let _ = writeln!(text, "- {name} in {}: {}", phases.join(", "), known.reason);
    }
    text
}

#[derive(Serialize)]
struct Line<'a> {
    fault: &'a str,
    phase: &'a str,
    demanded: String,
    result: Option<&'a Result>,
    known_red: Option<&'a str>,
}

#[derive(Serialize)]
struct Whole<'a> {
    tier: &'a str,
    counts: Counts,
    cells: Vec<Line<'a>>,
}

/// Writes what came of a tier, if anything was played, into `adversary` of the target folder, whose
/// folder for tests' files is `tmp`, and says how many cells came to what.
pub fn keep(tmp: &str, table: &Table, results: &Mutex<Results>, tier: Tier) {
    let results = results.lock().unwrap_or_else(PoisonError::into_inner);
    if results.is_empty() {
        return;
    }
    match write(&Path::new(tmp).join("../adversary"), table, &results, tier) {
        Ok(()) => eprintln!("{tier}: {:?}", count(table, &results, tier)),
        Err(error) => eprintln!("the matrix was not written: {error}"),
    }
}

/// Writes `matrix-TIER.json` and `matrix-TIER.md` into a folder.
///
/// # Errors
///
/// When they cannot be written.
pub fn write(folder: &Path, table: &Table, results: &Results, tier: Tier) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut cells = Vec::new();
    for (name, row) in &table.rows {
        for phase in Phase::ALL {
            cells.push(Line {
                fault: name,
                phase: phase.word(),
                demanded: row.cell(*phase, tier).to_string(),
                result: results.get(name).and_then(|cells| cells.get(phase)),
                known_red: table.known_red(name, *phase),
            });
        }
    }
    let whole = Whole {
        tier: tier.word(),
        counts: count(table, results, tier),
        cells,
    };
    let json = serde_json::to_string_pretty(&whole)?;
    std::fs::write(folder.join(format!("matrix-{tier}.json")), json)?;
    let mut text = markdown(table, results, tier);
    let _ = writeln!(text, "\n{:?}", whole.counts);
    std::fs::write(folder.join(format!("matrix-{tier}.md")), text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_page_is_the_tables() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("adversary/MATRIX.md");
        let page = page(&Table::read().unwrap());
        if std::env::var_os("FAILSTOP_WRITE").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "run `cargo xtask matrix --write`");
    }
}
