//! What is measured: figures, series of them, and tables for people.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::table;

/// One measurement, as the programs that measure print it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) figure: String,
    pub(crate) unit: String,
    pub(crate) ours: f64,
    pub(crate) beside: Option<f64>,
    /// What the ratio of both may be at most, or `ours` where there is nothing beside it.
    pub(crate) limit: Option<f64>,
    /// What the same must be at least.
    #[serde(default)]
    pub(crate) at_least: Option<f64>,
    /// What may not be passed is `ours`, although there is something beside it.
    #[serde(default)]
    pub(crate) absolute: bool,
    #[serde(default)]
    pub(crate) note: String,
}

impl Figure {
    /// Ours beside it, if there is something.
    pub(super) fn ratio(&self) -> Option<f64> {
        self.beside.map(|beside| self.ours / beside)
    }

    /// Whether anything is demanded of it.
    pub(crate) fn has_limit(&self) -> bool {
        self.limit.is_some() || self.at_least.is_some()
    }

    /// Within its limits, if it has any. What cannot be computed is not.
    pub(crate) fn is_ok(&self) -> bool {
        let value = self.ratio().filter(|_| !self.absolute).unwrap_or(self.ours);
        self.limit.is_none_or(|limit| value <= limit)
            && self.at_least.is_none_or(|least| value >= least)
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [name, ours, beside, ratio, limit, _] = table::cells(self);
        write!(
            formatter,
            "{name}: {ours} beside {beside}, ratio {ratio}, limit {limit}"
        )
    }
}

/// How a figure grows with something: a line of a plot.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Series {
    /// The plot that it belongs to, a slash, and whose line it is: `igb rx/ours`.
    pub(crate) name: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A table of README.md, between the two comments of that name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    pub(crate) name: &'static str,
    pub(crate) text: String,
}

/// A file of the repository that a benchmark writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct File {
    /// From the repository's root.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// What was measured.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Measured {
    pub(crate) figures: Vec<Figure>,
    pub(crate) series: Vec<Series>,
    /// What could not be measured here, and why.
    pub(crate) skipped: Vec<String>,
    #[serde(skip)]
    pub(crate) blocks: Vec<Block>,
    #[serde(skip)]
    pub(crate) files: Vec<File>,
}

impl Measured {
    pub(super) fn add(&mut self, other: Self) {
        let Self {
            figures,
            series,
            skipped,
            blocks,
            files,
        } = other;
        self.figures.extend(figures);
        self.series.extend(series);
        self.skipped.extend(skipped);
        self.blocks.extend(blocks);
        self.files.extend(files);
    }
}

impl From<Vec<Figure>> for Measured {
    fn from(figures: Vec<Figure>) -> Self {
        Self {
            figures,
            ..Self::default()
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench) fn figure(ours: f64, beside: Option<f64>, limit: Option<f64>) -> Figure {
        Figure {
            figure: "a thing".into(),
            unit: "us".into(),
            ours,
            beside,
            limit,
            at_least: None,
            absolute: false,
            note: "n".into(),
        }
    }

    #[test]
    fn the_ratio_is_held_against_the_limit_and_without_one_the_figure_itself() {
        assert!(figure(12.0, Some(10.0), Some(1.2)).is_ok());
        assert!(!figure(12.1, Some(10.0), Some(1.2)).is_ok());
        assert!(figure(4.0, None, Some(4.0)).is_ok());
        assert!(!figure(4.1, None, Some(4.0)).is_ok());
        assert!(figure(1e9, Some(1.0), None).is_ok());
    }

    #[test]
    fn an_absolute_limit_is_for_ours_whatever_is_beside_it() {
        let absolute = |ours| Figure {
            absolute: true,
            ..figure(ours, Some(100.0), Some(36.0))
        };
        assert!(absolute(36.0).is_ok());
        assert!(!absolute(36.1).is_ok());
    }

    #[test]
    fn what_must_be_at_least_so_much_is_not_ok_below() {
        let speed = |ours| Figure {
            at_least: Some(0.8),
            ..figure(ours, Some(10.0), None)
        };
        assert!(speed(8.0).is_ok() && speed(8.0).has_limit());
        assert!(!speed(7.9).is_ok());
    }

    #[test]
    fn what_was_not_measured_is_not_within_its_limit() {
        assert!(!figure(f64::NAN, Some(1.0), Some(1.2)).is_ok());
        assert!(!figure(1.0, Some(0.0), Some(1.2)).is_ok());
        let least = Figure {
            at_least: Some(0.8),
            ..figure(f64::NAN, None, None)
        };
        assert!(!least.is_ok());
    }
}
