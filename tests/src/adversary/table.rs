//! The table of verdicts: `tests/adversary/verdicts.toml`, read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use failstop_scenario::Spec;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use thiserror::Error;

use super::demand::Truth;

/// The file, as it was when this was built.
const TEXT: &str = include_str!("../../adversary/verdicts.toml");

/// [`failstop_scenario::words`] that the file is written in, too.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($body:tt)* }) => {
        failstop_scenario::words! { $(#[$meta])* $name { $($body)* } }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let word = String::deserialize(from)?;
                let parsed = word.parse();
                parsed.map_err(|_| serde::de::Error::custom($crate::adversary::table::NotInTable(word)))
            }
        }
    };
}

pub(super) use words;

/// A word that the table does not have.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("'{0}' is no word of the table of verdicts")]
pub struct NotInTable(pub String);

words! {
    /// When in a device's life a fault is there. In all but [`Phase::Run`] the device is supervised,
    /// and the fault is taken back once it is recovered, before what follows the phase.
    Phase {
        /// While it is opened, from the first message on.
        Init = "init",
        /// Open, without objects; then closed under the fault.
        Idle = "idle",
        /// While frames pass. Taken back before the teardown.
        Traffic = "traffic",
        /// From before the receive queue's destroy, the send queue being gone, to the close.
        DestroyRq = "destroy-rq",
        /// From before the send queue's destroy, the receive queue being gone, to the close.
        DestroySq = "destroy-sq",
        /// From before the region's destroy, the queues being gone, to the close.
        DestroyMr = "destroy-mr",
        /// The destroy of a completion queue.
        DestroyCq = "destroy-cq",
        /// The destroy of a protection domain.
        DestroyPd = "destroy-pd",
        /// From between the first two steps of a ladder that somebody's break began.
        Ladder = "ladder",
        /// From after a clean ladder until the port was carried to the new life.
        Recovery = "recovery",
        /// `Device::close` under live objects.
        Close = "close",
        /// A whole `failstop run`, its teardown included, from soon after its first frames.
        Run = "run",
        /// The same with the fault there before the device is opened, as `emu:82576,fault=NAME` has it.
        Start = "start",
    }
}

words! {
    /// How a device ends, in the contract's words.
    Word {
        /// Nothing is broken, or what is broken is told by completions in error.
        Ok = "ok",
        /// The open fails; bus mastering is off, and nothing is mapped.
        Refused = "refused",
        /// Broken; all memory was released, and a new life works.
        RevokedRecovered = "revoked recovered",
        /// Broken; all memory was released, and no new life began.
        RevokedFenced = "revoked fenced",
        /// Broken by who closes it; all memory was released, and it is stopped.
        RevokedClosed = "revoked closed",
        /// Broken; memory is kept back, and a new life works.
        QuarantinedRecovered = "quarantined recovered",
        /// Broken; memory is kept back, and no new life began.
        QuarantinedFenced = "quarantined fenced",
    }
}

words! {
    /// Where a cell is judged.
    Tier {
        /// The emulator over vfio-user.
        T1 = "t1",
        /// The emulator as a function of a guest, by kernel VFIO.
        T3 = "t3",
    }
}

words! {
    /// Why a cell is empty. The file has a sentence for each.
    NotApplicable {
        /// There is no queue.
        NoQueue = "no-queue",
        /// No frame passes.
        NoFrame = "no-frame",
        /// Bus mastering is off.
        NotMaster = "not-master",
        /// Nothing of the kind is asked in this phase.
        NotAsked = "not-asked",
        /// The device never hears of the object.
        Software = "software",
        /// The tool makes no such phase.
        NotByTool = "not-by-tool",
        /// QEMU is the client of the server, and its processors wait with it.
        QemuWaits = "qemu-waits",
        /// The kernel waits for minutes for a function that does not answer, before it gives us its file.
        KernelWaits = "kernel-waits",
        /// QEMU takes the notice for itself: it stops the machine, or takes the function out of it.
        QemuTakes = "qemu-takes",
        /// It is a fault of the host's, which is made on T2.
        OnT2 = "on-t2",
        /// It needs a server in a process of its own.
        OwnProcess = "own-process",
    }
}

/// One demanded end, with the code by which `failstop run` would exit on it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Verdict {
    /// The end.
    pub word: Word,
    /// The code.
    pub exit: u8,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.word, self.exit)
    }
}

impl FromStr for Verdict {
    type Err = NotInTable;

    fn from_str(text: &str) -> Result<Self, NotInTable> {
        let not = || NotInTable(text.to_owned());
        let (word, exit) = text.rsplit_once(' ').ok_or_else(not)?;
        Ok(Self {
            word: word.parse().map_err(|_| not())?,
            exit: exit.parse().map_err(|_| not())?,
        })
    }
}

/// What a cell of the table demands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cell {
    /// Nothing, and why.
    NotApplicable(NotApplicable),
    /// One of these: more than one only where the contract leaves it open.
    OneOf(BTreeSet<Verdict>),
}

impl Cell {
    /// Whether a device may end so.
    #[must_use]
    pub fn allows(&self, word: Word) -> bool {
        matches!(self, Self::OneOf(verdicts) if verdicts.iter().any(|v| v.word == word))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotApplicable(why) => write!(f, "na: {why}"),
            Self::OneOf(verdicts) => {
                let texts: Vec<String> = verdicts.iter().map(Verdict::to_string).collect();
                f.write_str(&texts.join(" / "))
            }
        }
    }
}

impl FromStr for Cell {
    type Err = NotInTable;

    fn from_str(text: &str) -> Result<Self, NotInTable> {
        if let Some(why) = text.strip_prefix("na: ") {
            let why = why.parse().map_err(|_| NotInTable(text.to_owned()))?;
            return Ok(Self::NotApplicable(why));
        }
        let verdicts = text.split(" / ").map(str::parse);
        verdicts.collect::<Result<_, _>>().map(Self::OneOf)
    }
}

impl<'de> Deserialize<'de> for Cell {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A fault's line of the table.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Row {
    /// What the faulty device is, never what the driver does.
    #[serde(default)]
    pub truth: Truth,
    /// The faults as the emulator takes them, when the row's name does not say it. Empty for faults
    /// of the host.
    pub faults: Option<Vec<String>>,
    /// What is demanded in each phase, on T1.
    pub cells: BTreeMap<String, Cell>,
    /// Why there is nothing of it on T3. What is not said otherwise is the same there.
    pub t3: Option<Cell>,
    /// What is demanded otherwise on T3, in some phases.
    #[serde(default)]
    pub t3_cells: BTreeMap<String, Cell>,
    /// Words that the report of a break, or a refusal, has to have (R13); one of each, where `|` is.
    #[serde(default)]
    pub message: Vec<String>,
    /// Phases in which the translation must have blocked something.
    #[serde(default)]
    pub blocked: BTreeSet<Phase>,
    /// Why it is as it is, where that is not obvious.
    pub why: Option<String>,
}

impl Row {
    /// Whether a person is told what happened (R13).
    ///
    /// # Errors
    ///
    /// Names the word that is missing.
    pub fn is_told(&self, text: &str) -> Result<(), String> {
        let told = text.to_lowercase();
        let is_missing = |part: &&String| {
            !part
                .split('|')
                .any(|word| told.contains(&word.to_lowercase()))
        };
        match self.message.iter().find(is_missing) {
            Some(part) => Err(format!("nobody is told of `{part}`:\n{text}")),
            None => Ok(()),
        }
    }

    /// What is demanded in a phase.
    ///
    /// # Panics
    ///
    /// Never of a row of [`Table::read`], which looked.
    #[must_use]
    pub fn cell(&self, phase: Phase, tier: Tier) -> &Cell {
        // The tool runs on T1.
        const NO_RUN: &Cell = &Cell::NotApplicable(NotApplicable::NotByTool);
        let cell = &self.cells[phase.word()];
        if let (Tier::T3, Some(other)) = (tier, self.t3_cells.get(phase.word())) {
            return other;
        }
        match (&self.t3, tier, cell) {
            (_, Tier::T1, cell) => cell,
            (_, _, Cell::NotApplicable(NotApplicable::Software)) => cell,
            (Some(all), ..) => all,
            (None, ..) if matches!(phase, Phase::Run | Phase::Start) => NO_RUN,
            (None, _, cell) => cell,
        }
    }
}

/// The table.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// A sentence for each reason why a cell is empty.
    pub na: BTreeMap<String, String>,
    /// The rows by name: the emulator's form of a fault, several with `+`, or `host-...`.
    #[serde(rename = "fault")]
    pub rows: BTreeMap<String, Row>,
    /// Cells that are red because of a bug that is known, by row. The demand stands.
    #[serde(rename = "known-red", default)]
    pub known_red: BTreeMap<String, KnownRed>,
}

/// Cells of a row that the driver is known to fail.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct KnownRed {
    /// In which phases.
    pub phases: BTreeSet<Phase>,
    /// What is seen, and why.
    pub reason: String,
    /// From this day on they are red like any other.
    pub expires: Day,
}

/// A day, `YYYY-MM-DD`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Day {
    /// Since 1970-01-01.
    days: u64,
}

impl Day {
    /// Today, by the machine's clock.
    #[must_use]
    pub fn today() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let days = since.unwrap_or_default().as_secs() / 86_400;
        Self { days }
    }
}

impl FromStr for Day {
    type Err = NotInTable;

    fn from_str(text: &str) -> Result<Self, NotInTable> {
        let not = || NotInTable(text.to_owned());
        let mut parts = text.splitn(3, '-').map(|part| part.parse::<u64>().ok());
        let mut part = || parts.next().flatten().ok_or_else(not);
        let (year, month, day) = (part()?, part()?, part()?);
        if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day)
        {
            return Err(not());
        }
        // Years that begin in March, so that a leap day is the last of its year.
        let (year, month) = if month > 2 {
            (year, month - 3)
        } else {
            (year - 1, month + 9)
        };
        let leaps = year / 4 - year / 100 + year / 400;
        // To the first of March of the year 0, and from there to 1970.
        let days = 365 * year + leaps + (153 * month + 2) / 5 + day - 1 - 719_468;
        Ok(Self { days })
    }
}

impl<'de> Deserialize<'de> for Day {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A table that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum TableError {
    /// It is no TOML of the form.
    #[error("verdicts.toml: {0}")]
    Form(#[from] toml::de::Error),
    /// A row lacks a phase.
    #[error("verdicts.toml: {row} says nothing of {phase}")]
    Missing {
        /// The row.
        row: String,
        /// The phase.
        phase: Phase,
    },
    /// A row has a phase that there is not.
    #[error("verdicts.toml: {row}: {source}")]
    Phase {
        /// The row.
        row: String,
        /// The word.
        source: NotInTable,
    },
    /// Cells are known to be red of a row that there is not.
    #[error("verdicts.toml: [known-red] names {row}, which is no fault")]
    NoRow {
        /// The row.
        row: String,
    },
    /// No emulator could have that fault.
    #[error("verdicts.toml: {row}: {reason}")]
    Fault {
        /// The row.
        row: String,
        /// Why not.
        reason: String,
    },
    /// A reason has no sentence.
    #[error("verdicts.toml: [na] does not explain {0}")]
    Unexplained(NotApplicable),
}

impl Table {
    /// The table of this repository.
    ///
    /// # Errors
    ///
    /// [`TableError`].
    pub fn read() -> Result<Self, TableError> {
        Self::parse(TEXT)
    }

    /// A table's text, looked through.
    ///
    /// # Errors
    ///
    /// [`TableError`].
    pub fn parse(text: &str) -> Result<Self, TableError> {
        let table: Self = toml::from_str(text)?;
        if let Some(row) = table
            .known_red
            .keys()
            .find(|row| !table.rows.contains_key(*row))
        {
            return Err(TableError::NoRow { row: row.clone() });
        }
        for why in NotApplicable::ALL {
            if !table.na.contains_key(why.word()) {
                return Err(TableError::Unexplained(*why));
            }
        }
        for (name, row) in &table.rows {
            let missing = |phase: &&Phase| !row.cells.contains_key(phase.word());
            if let Some(phase) = Phase::ALL.iter().find(missing) {
                return Err(TableError::Missing {
                    row: name.clone(),
                    phase: *phase,
                });
            }
            for phase in row.cells.keys().chain(row.t3_cells.keys()) {
                let parsed = phase.parse::<Phase>();
                parsed.map_err(|_| TableError::Phase {
                    row: name.clone(),
                    source: NotInTable(phase.clone()),
                })?;
            }
            for fault in faults(name, row) {
                fault.parse::<Spec>().map_err(|error| TableError::Fault {
                    row: name.clone(),
                    reason: error.to_string(),
                })?;
            }
        }
        Ok(table)
    }

    /// Why a cell is known to be red, if it is, and still may be.
    #[must_use]
    pub fn known_red(&self, row: &str, phase: Phase) -> Option<&str> {
        let known = self.known_red.get(row)?;
        let holds = known.phases.contains(&phase) && Day::today() < known.expires;
        holds.then_some(&*known.reason)
    }
}

/// The faults of a row, as the emulator takes them, without a trigger.
#[must_use]
pub fn faults(name: &str, row: &Row) -> Vec<String> {
    match &row.faults {
        Some(faults) => faults.clone(),
        None => name.split('+').map(str::to_owned).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adversary::demand::demanded;

    #[test]
    fn every_cell_says_what_the_rules_demand() {
        let table = Table::read().unwrap();
        let mut different = Vec::new();
        for (name, row) in &table.rows {
            for phase in Phase::ALL {
                for tier in Tier::ALL {
                    let (said, demanded) =
                        (row.cell(*phase, *tier), demanded(&row.truth, *phase, *tier));
                    if *said != demanded {
                        different.push(format!(
                            "{name} in {phase} on {tier}: the table says `{said}`, the rules `{demanded}`"
                        ));
                    }
                }
            }
        }
        assert!(different.is_empty(), "{}", different.join("\n"));
    }

    #[test]
    fn a_row_with_a_cell_of_two_verdicts_says_why_both_are_right() {
        let table = Table::read().unwrap();
        let is_open = |row: &Row| {
            let mut cells = Phase::ALL
                .iter()
                .flat_map(|phase| Tier::ALL.iter().map(|tier| row.cell(*phase, *tier)));
            cells.any(|cell| matches!(cell, Cell::OneOf(verdicts) if verdicts.len() > 1))
        };
        let mute = table
            .rows
            .iter()
            .filter(|(_, row)| is_open(row) && row.why.is_none());
        let mute: Vec<&String> = mute.map(|(name, _)| name).collect();
        assert!(mute.is_empty(), "{mute:?}");
    }

    #[test]
    fn every_fault_of_the_emulator_has_a_row() {
        let table = Table::read().unwrap();
        let named: BTreeSet<&str> = table
            .rows
            .iter()
            .flat_map(|(name, row)| faults(name, row))
            .filter_map(|fault| {
                failstop_scenario::TABLE
                    .iter()
                    .find(|entry| fault.split(':').next() == Some(entry.name))
            })
            .map(|entry| entry.name)
            .collect();
        let all: BTreeSet<&str> = failstop_scenario::TABLE
            .iter()
            .map(|entry| entry.name)
            .collect();
        assert_eq!(named, all);
    }

    #[test]
    fn a_broken_device_has_words() {
        let table = Table::read().unwrap();
        for (name, row) in &table.rows {
            let breaks = |cell: &Cell| matches!(cell, Cell::OneOf(verdicts) if verdicts.iter().any(|v| !matches!(v.word, Word::Ok | Word::RevokedClosed | Word::RevokedRecovered)));
            let silent = row.message.is_empty() && row.cells.values().any(breaks);
            assert!(!silent, "{name} says nothing of how its end is told");
        }
    }

    #[test]
    fn a_row_without_a_phase_is_no_row() {
        let text = "[na]\n[fault.gone]\ncells = { init = \"ok 0\" }\n";
        assert!(matches!(
            Table::parse(text),
            Err(TableError::Unexplained(_))
        ));
    }

    #[test]
    fn days_are_counted_as_calendars_do() {
        let days = |text: &str| text.parse::<Day>().map(|day| day.days).ok();
        assert_eq!(days("1970-01-01"), Some(0));
        assert_eq!(days("2000-03-01"), Some(11_017));
        assert_eq!(days("2026-12-31"), Some(20_818));
        for text in ["2026-13-01", "2026-12", "1969-12-31", "tomorrow", ""] {
            assert_eq!(days(text), None, "{text}");
        }
    }

    #[test]
    fn cells_are_written_as_they_are_read() {
        for text in [
            "ok 0",
            "ok 0 / revoked recovered 0",
            "na: no-queue",
            "quarantined fenced 4",
        ] {
            assert_eq!(text.parse::<Cell>().unwrap().to_string(), text);
        }
        for text in ["ok", "fine 0", "na: because", "revoked 0", "ok zero"] {
            assert!(text.parse::<Cell>().is_err(), "{text}");
        }
    }
}
