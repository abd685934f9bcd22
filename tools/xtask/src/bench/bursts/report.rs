//! Bursts as figures, as lines of plots, and as the table of README.md.

use std::fmt::Write as _;

use anyhow::Result;

use super::counts::{self, Counts, key};
use super::{FAMILIES, Family, Sides};
use crate::bench::Figure;
use crate::bench::figure::{Block, File, Measured, Series};

/// What is done with frames, as in keys and for people.
const PATHS: [(&str, &str); 4] = [
    ("rx", "rx_burst with refill"),
    ("tx", "tx_burst with reclaim"),
    ("io", "io forward (rx + tx)"),
    ("macswap", "macswap forward"),
];
/// Frames of a burst: for tables, and all.
const BURST: u32 = 32;
const BURSTS: [u32; 4] = [1, 8, 32, 64];

/// What ours may be at most, by key: for the 82576 about a quarter of what DPDK's was when this was set.
const LIMITS: &[(&str, f64)] = &[
    ("igb_rx_b32", 36.0),
    ("igb_tx_b32", 32.0),
    ("igb_io_b32", 68.0),
    ("igb_macswap_b32", 86.0),
    ("igb_empty_poll", 16.0),
    ("e1000e_io_b32", 70.0),
    ("e1000e_macswap_b32", 88.0),
];

pub(super) fn measured(sides: &Sides) -> Result<Measured> {
    let mut measured = Measured::default();
    for family in FAMILIES.iter().map(|family| family.name) {
        for (path, _) in PATHS {
            measured.figures.extend(
                BURSTS
                    .iter()
                    .filter_map(|&burst| figure(sides, family, path, burst)),
            );
            measured.series.extend(series(sides, family, path));
        }
        measured.figures.extend(figure(sides, family, "empty", 1));
    }
    if let Some(theirs) = &sides.theirs {
        measured.blocks.push(Block {
            name: "bursts",
            text: markdown(sides, theirs),
        });
        measured.files.push(File {
            path: counts::FILE.into(),
            text: counts::text(&sides.ours, theirs)?,
        });
    }
    Ok(measured)
}

fn figure(sides: &Sides, family: &str, path: &str, burst: u32) -> Option<Figure> {
    let key = key(family, path, burst);
    let limit = LIMITS.iter().find(|(name, _)| *name == key);
    let (name, unit) = match path {
        "empty" => (
            format!("bursts {family}: empty poll"),
            "instructions a poll",
        ),
        _ => (
            format!("bursts {family}: {path}, {burst} frames"),
            "instructions a packet",
        ),
    };
    Some(Figure {
        figure: name,
        unit: unit.into(),
        ours: *sides.ours.get(&key)?,
        beside: sides
            .theirs
            .as_ref()
            .and_then(|theirs| theirs.get(&key))
            .copied(),
        limit: limit.map(|(_, limit)| *limit),
        at_least: None,
        absolute: true,
        note: "in a guest, beside DPDK's".into(),
    })
}

/// Instructions of each packet over the frames of a burst: ours, and the peer's.
fn series(sides: &Sides, family: &str, path: &str) -> Vec<Series> {
    let line = |who: &str, counts: &Counts| Series {
        name: format!("bursts {family} {path}/{who}"),
        x_label: "frames of a burst".into(),
        y_label: "instructions a packet".into(),
        points: BURSTS
            .iter()
            .filter_map(|&burst| {
                let count = counts.get(&key(family, path, burst))?;
                Some((f64::from(burst), *count))
            })
            .collect(),
    };
    let theirs = sides.theirs.as_ref().map(|theirs| line("DPDK", theirs));
    [line("failstop", &sides.ours)]
        .into_iter()
        .chain(theirs)
        .collect()
}

/// The table, with what it was measured on.
fn markdown(sides: &Sides, theirs: &Counts) -> String {
    let mut head = vec!["path".to_owned()];
    for Family { name, .. } in &FAMILIES {
        head.extend([
            format!("failstop {name}"),
            format!("DPDK {name}"),
            "ratio".to_owned(),
        ]);
    }
    let mut text = format!(
        "| {} |\n|{}\n",
        head.join(" | "),
        " --- |".repeat(head.len())
    );
    let mut row = |name: String, path: &str, burst| {
        let _ = write!(text, "| {name} |");
        for Family { name, .. } in &FAMILIES {
            let key = key(name, path, burst);
            let (ours, theirs) = (sides.ours.get(&key), theirs.get(&key));
            for cell in [
                ours.map(|ours| format!("{ours:.1}")),
                theirs.map(|theirs| format!("{theirs:.1}")),
                ours.zip(theirs)
                    .map(|(ours, theirs)| format!("{:.2}", ours / theirs)),
            ] {
                let _ = write!(text, " {} |", cell.as_deref().unwrap_or("–"));
            }
        }
        text.push('\n');
    };
    for (path, name) in PATHS {
        row(name.to_owned(), path, BURST);
    }
    row("empty poll (per call)".to_owned(), "empty", 1);
    for burst in BURSTS.into_iter().filter(|burst| *burst != BURST) {
        row(format!("io forward, bursts of {burst}"), "io", burst);
    }
    let _ = writeln!(
        text,
        "\nMeasured on {} by `cargo xtask bench --only bursts`: DPDK {}, {}, guest kernel {}.",
        sides.date, sides.dpdk, sides.qemu, sides.kernel
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sides(rx: f64) -> Sides {
        let counts =
            |rx| Counts::from([("igb_rx_b32".into(), rx), ("igb_empty_poll".into(), 16.0)]);
        Sides {
            ours: counts(rx),
            theirs: Some(counts(130.0)),
            date: "2026-01-01".into(),
            dpdk: "24.11".into(),
            qemu: "QEMU 11".into(),
            kernel: "6.12".into(),
        }
    }

    #[test]
    fn the_limits_are_for_instructions_and_not_for_the_ratio() {
        let figure = |rx| figure(&sides(rx), "igb", "rx", 32).unwrap();
        assert!(figure(36.0).is_ok());
        assert_eq!(figure(36.0).limit, Some(36.0));
        assert!(!figure(36.1).is_ok());
    }

    #[test]
    fn every_limit_is_of_a_figure() {
        let keys: Vec<_> = FAMILIES
            .iter()
            .flat_map(|family| {
                let bursts = PATHS.iter().map(|(path, _)| key(family.name, path, BURST));
                bursts.chain([key(family.name, "empty", 1)])
            })
            .collect();
        assert!(
            LIMITS
                .iter()
                .all(|(name, _)| keys.iter().any(|key| key == name))
        );
    }

    #[test]
    fn the_table_has_both_sides_and_their_ratio() {
        let sides = sides(26.0);
        let text = markdown(&sides, sides.theirs.as_ref().unwrap());
        let line = "| rx_burst with refill | 26.0 | 130.0 | 0.20 | – | – | – |\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn without_the_peer_nothing_is_kept() {
        let alone = Sides {
            theirs: None,
            ..sides(36.0)
        };
        let measured = measured(&alone).unwrap();
        assert_eq!(measured.figures.len(), 2);
        assert!(measured.blocks.is_empty() && measured.files.is_empty());
    }
}
