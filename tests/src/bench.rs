//! What a benchmark says is a ratio of two measurements of one run, side by side; where there is
//! nothing to put beside it, a count of instructions or bytes. `cargo xtask bench` runs these,
//! wherever each belongs, and holds them against their limits.

use std::time::Duration;

use serde::Serialize;

mod by_hand;
pub mod data_path;
pub mod faults;
pub mod growth;
pub mod ladder;
pub mod ledger;
pub mod life;
pub mod round_trip;
mod scripted;
pub mod speed;
mod timed;
pub mod watch;

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What was measured, and on what.
    pub figure: String,
    /// Of what `ours` and `beside` are counts.
    pub unit: &'static str,
    /// Ours.
    pub ours: f64,
    /// What it is held against, measured in the same run.
    pub beside: Option<f64>,
    /// What the ratio of both may be at most, or `ours` where there is nothing beside it.
    pub limit: Option<f64>,
    /// What the same must be at least.
    pub at_least: Option<f64>,
    /// What there is to say of it.
    pub note: String,
}

impl Figure {
    fn ratio(figure: String, unit: &'static str, ours: f64, beside: f64, limit: f64) -> Self {
        Self {
            figure,
            unit,
            ours,
            beside: Some(beside),
            limit: Some(limit),
            at_least: None,
            note: String::new(),
        }
    }

    fn plain(figure: String, unit: &'static str, ours: f64) -> Self {
        Self {
            figure,
            unit,
            ours,
            beside: None,
            limit: None,
            at_least: None,
            note: String::new(),
        }
    }

    fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    /// Prints it as a line of JSON, for `cargo xtask bench`.
    pub fn print(&self) {
        match serde_json::to_string(self) {
            Ok(line) => println!("{line}"),
            Err(error) => eprintln!("{self:?}: {error}"),
        }
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len => (values[(len - 1) / 2] + values[len / 2]) / 2.0,
    }
}
