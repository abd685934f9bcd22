//! The figures that are kept in `tests/bench/counts.json`, and what is measured against them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;

use anyhow::{Context, Result};

use super::ticks::Ticks;

/// Where they are kept: a flat object.
pub(super) const FILE: &str = "tests/bench/counts.json";
/// What the keys of the peer's begin with.
const PEER: &str = "dpdk_";
/// How far above what is kept a figure may be.
const ROOM: f64 = 1.03;

/// Instructions by key: `igb_rx_b32`, of each packet in a burst of 32; `igb_empty_poll`, of each call.
pub(super) type Counts = BTreeMap<String, f64>;

/// The key of a figure.
pub(super) fn key(family: &str, path: &str, burst: u32) -> String {
    match path {
        "empty" => format!("{family}_empty_poll"),
        _ => format!("{family}_{path}_b{burst}"),
    }
}

/// Of each packet, by key.
pub(super) fn named(family: &str, ticks: &Ticks) -> Counts {
    let each = |((path, burst), mean): (&(String, u32), &f64)| {
        (key(family, path, *burst), mean / f64::from(*burst))
    };
    ticks.iter().map(each).collect()
}

/// The file's text: the peer's figures beside ours, with two digits after the point.
pub(super) fn text(ours: &Counts, theirs: &Counts) -> Result<String> {
    let round = |value: &f64| (value * 100.0).round() / 100.0;
    let ours = ours.iter().map(|(key, value)| (key.clone(), round(value)));
    let theirs = theirs
        .iter()
        .map(|(key, value)| (format!("{PEER}{key}"), round(value)));
    let all: Counts = ours.chain(theirs).collect();
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// What is kept.
pub(super) fn kept() -> Result<Counts> {
    let text = fs::read_to_string(super::super::root().join(FILE))
        .with_context(|| format!("cannot read {FILE}"))?;
    serde_json::from_str(&text).with_context(|| format!("{FILE} is no flat object of numbers"))
}

/// A figure of ours, as it is kept and as it was measured.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Comparison {
    key: String,
    kept: Option<f64>,
    measured: Option<f64>,
}

impl Comparison {
    /// Whether it is on both sides, and not worse than it was.
    pub(crate) fn is_ok(&self) -> bool {
        match (self.kept, self.measured) {
            (Some(kept), Some(measured)) => measured <= kept * ROOM,
            _ => false,
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        match (self.kept, self.measured) {
            (Some(kept), Some(measured)) => {
                let change = (measured / kept - 1.0) * 100.0;
                write!(
                    formatter,
                    "{key}: {measured:.2} instructions, kept are {kept:.2} ({change:+.1} %)"
                )
            }
            (Some(_), None) => write!(formatter, "{key}: kept, and not measured"),
            (None, _) => write!(formatter, "{key}: not kept in {FILE}"),
        }
    }
}

/// Ours, key by key; the peer's do not matter.
pub(super) fn compare(kept: &Counts, measured: &Counts) -> Vec<Comparison> {
    let keys: BTreeSet<&String> = kept.keys().chain(measured.keys()).collect();
    keys.into_iter()
        .filter(|key| !key.starts_with(PEER))
        .map(|key| Comparison {
            key: key.clone(),
            kept: kept.get(key).copied(),
            measured: measured.get(key).copied(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(value: f64) -> Counts {
        [("igb_rx_b32".to_owned(), value)].into()
    }

    fn is_ok(kept: &Counts, measured: &Counts) -> bool {
        compare(kept, measured).iter().all(Comparison::is_ok)
    }

    #[test]
    fn more_than_three_percent_above_what_is_kept_is_red() {
        assert!(!is_ok(&counts(100.0), &counts(103.1)));
    }

    #[test]
    fn less_than_three_percent_above_is_green_and_so_is_anything_below() {
        assert!(is_ok(&counts(100.0), &counts(102.9)));
        assert!(is_ok(&counts(100.0), &counts(50.0)));
    }

    #[test]
    fn a_figure_that_is_missing_on_either_side_is_red() {
        assert!(!is_ok(&counts(100.0), &Counts::new()));
        assert!(!is_ok(&Counts::new(), &counts(100.0)));
    }

    #[test]
    fn what_cannot_be_computed_is_red() {
        assert!(!is_ok(&counts(100.0), &counts(f64::NAN)));
    }

    #[test]
    fn the_peers_figures_are_not_held_against_us() {
        let kept: Counts = [("dpdk_igb_rx_b32".to_owned(), 130.0)].into();
        assert_eq!(compare(&kept, &Counts::new()), []);
    }

    #[test]
    fn the_file_has_both_sides_and_reads_as_it_was_written() {
        let text = text(&counts(36.314), &counts(129.626)).unwrap();
        assert!(text.contains("\"dpdk_igb_rx_b32\": 129.63"), "{text}");
        let read: Counts = serde_json::from_str(&text).unwrap();
        assert_eq!(read["igb_rx_b32"], 36.31);
    }

    #[test]
    fn keys_name_family_path_and_burst() {
        let ticks: Ticks = [(("rx".into(), 32), 1152.0), (("empty".into(), 1), 16.0)].into();
        let expected = [("igb_empty_poll".into(), 16.0), ("igb_rx_b32".into(), 36.0)];
        assert_eq!(named("igb", &ticks), Counts::from(expected));
    }

    #[test]
    fn what_is_kept_can_be_read() {
        assert!(kept().unwrap().contains_key("igb_rx_b32"));
    }
}
