//! Bursts with longer frames, larger rings and more queues: instructions, by callgrind. Nothing of that may cost a packet
//! anything, which the limits say.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::figure::{Figure, Measured, Series};
use super::{Bench, Part};

/// Bursts of each direction and shape: the largest ring once.
const BURSTS: u32 = 128;
/// Frames of a burst, as the program has them.
const BURST: u32 = 32;
/// What the most may cost, in what the least does.
const CONSTANT: f64 = 1.03;

pub(super) const PART: Part = Part {
    name: "growth",
    measure: |bench: &Bench| {
        let points = count(bench.program()?, &bench.folder)?;
        Ok(measured(&points))
    },
};

/// What a packet cost: which way, what grew, and how much of it.
#[derive(Clone, PartialEq, Debug)]
struct Point {
    direction: String,
    what: String,
    x: f64,
    instructions: f64,
}

/// Runs the program under callgrind, which writes a file for each phase of it.
fn count(program: &Path, folder: &Path) -> Result<Vec<Point>> {
    let scratch = tempfile::tempdir_in(folder)?;
    let out = scratch.path().join("phase");
    let result = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*collect_growth_*"])
        .arg("--dump-before=*growth_phase_over*")
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["growth", &BURSTS.to_string()])
        .output()
        .context("cannot run valgrind: install it (`apt install valgrind`)")?;
    ensure!(
        result.status.success(),
        "under valgrind: {}",
        String::from_utf8_lossy(&result.stderr)
    );
    String::from_utf8_lossy(&result.stdout)
        .lines()
        .enumerate()
        .map(|(phase, line)| {
            let file = out.with_extension((phase + 1).to_string());
            let text = fs::read_to_string(&file)
                .with_context(|| format!("callgrind wrote nothing of `{line}`"))?;
            point(line, &text)
        })
        .collect()
}

/// A phase, by what the program said of it and what callgrind wrote.
fn point(line: &str, text: &str) -> Result<Point> {
    let mut words = line.split_whitespace();
    let mut word = || words.next().with_context(|| format!("no phase: {line}"));
    let (direction, what, x) = (word()?.to_owned(), word()?.to_owned(), word()?.parse()?);
    let sum = text.lines().find_map(|line| {
        let sum = line
            .strip_prefix("summary:")
            .or_else(|| line.strip_prefix("totals:"))?;
        sum.trim().parse::<u64>().ok()
    });
    let sum = sum.filter(|&sum| sum > 0);
    let sum = sum.with_context(|| format!("callgrind counted nothing in `{line}`"))?;
    Ok(Point {
        direction,
        what,
        x,
        instructions: sum as f64 / f64::from(BURSTS * BURST),
    })
}

/// Each direction and each thing that grows: a figure, and a line of the plot.
fn measured(points: &[Point]) -> Measured {
    let mut lines: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for point in points {
        let line = lines.entry((&point.what, &point.direction)).or_default();
        line.push((point.x, point.instructions));
    }
    let mut measured = Measured::default();
    for ((what, direction), points) in lines {
        measured.figures.push(figure(what, direction, &points));
        measured.series.push(Series {
            name: format!("growth/{direction}, {what}"),
            x_label: "bytes of a frame, descriptors of a ring, queues, threads".into(),
            y_label: "instructions a packet".into(),
            points,
        });
    }
    measured
}

/// The most beside the least.
fn figure(what: &str, direction: &str, points: &[(f64, f64)]) -> Figure {
    let of = |by: fn(f64, f64) -> f64, least: f64, axis: fn(&(f64, f64)) -> f64| {
        points.iter().map(axis).fold(least, by)
    };
    let (from, to) = (
        of(f64::min, f64::INFINITY, |point| point.0),
        of(f64::max, 0.0, |point| point.0),
    );
    Figure {
        figure: format!("growth: {direction}, {from} to {to} {what}"),
        unit: "instructions a packet".into(),
        ours: of(f64::max, 0.0, |point| point.1),
        beside: Some(of(f64::min, f64::INFINITY, |point| point.1)),
        limit: Some(CONSTANT),
        at_least: None,
        absolute: false,
        note: format!("the most beside the least; bursts of {BURST}, callgrind"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(direction: &str, x: f64, instructions: f64) -> Point {
        Point {
            direction: direction.into(),
            what: "queues".into(),
            x,
            instructions,
        }
    }

    #[test]
    fn a_phase_is_what_callgrind_summed_up_for_each_packet() {
        let packets = BURSTS * BURST;
        let text = format!("events: Ir\nfn=a\n1 2\nsummary: {}\n", 36 * packets);
        assert_eq!(point("rx queues 4", &text).unwrap(), of("rx", 4.0, 36.0));
    }

    #[test]
    fn a_phase_in_which_nothing_was_counted_is_an_error() {
        assert!(point("rx queues 4", "events: Ir\nsummary: 0\n").is_err());
        assert!(point("rx queues 4", "events: Ir\n").is_err());
        assert!(point("nonsense", "summary: 5\n").is_err());
    }

    #[test]
    fn what_costs_more_the_more_there_is_of_it_is_above_the_limit() {
        let flat = [of("rx", 1.0, 36.0), of("rx", 16.0, 36.5)];
        assert!(measured(&flat).figures.iter().all(Figure::is_ok));
        let grows = [
            of("rx", 1.0, 36.0),
            of("tx", 1.0, 30.0),
            of("rx", 16.0, 37.5),
        ];
        let grows = measured(&grows);
        assert_eq!(grows.series.len(), 2);
        assert_eq!(grows.figures[0].figure, "growth: rx, 1 to 16 queues");
        assert!(!grows.figures[0].is_ok() && grows.figures[1].is_ok());
    }
}
