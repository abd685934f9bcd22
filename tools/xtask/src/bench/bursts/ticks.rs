//! What the programs of both sides print, and what it means.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// Instructions of a burst, on average: by what was done, and with how many frames.
pub(super) type Ticks = BTreeMap<(String, u32), f64>;

/// Instructions of a million turns of two.
const TURNS: f64 = 2_000_000.0;
/// How far the clock may be off.
const EXACT: f64 = 0.01;
/// What takes so many ticks more than the middle one was interrupted: the guest's kernel runs for some thousands each time. On
/// either side a burst has no work of its own that takes as many now and then.
const INTERRUPTED: u64 = 1000;

/// Reads the lines of a program: the mean of each burst's ticks, without those of the clock itself.
pub(super) fn parse(text: &str, rounds: u32) -> Result<Ticks> {
    let mut between = None;
    let mut ticks = Ticks::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["clock", nothing, turns] => between = Some(clock(nothing.parse()?, turns.parse()?)?),
            ["ticks", path, burst, ref samples @ ..] => {
                let between = between.context("there are ticks before the clock was looked at")?;
                let samples = samples
                    .iter()
                    .map(|word| sample(word))
                    .collect::<Result<Vec<_>>>()?;
                let mean =
                    mean(&samples, rounds).with_context(|| format!("{path}, bursts of {burst}"))?;
                ticks.insert((path.to_owned(), burst.parse()?), mean - between);
            }
            _ => {}
        }
    }
    ensure!(!ticks.is_empty(), "nothing was counted");
    Ok(ticks)
}

/// What the clock itself takes, if it counts instructions.
fn clock(nothing: f64, turns: f64) -> Result<f64> {
    ensure!(
        (turns - nothing - TURNS).abs() <= EXACT * TURNS,
        "the clock does not count instructions: {TURNS} of them took {turns} ticks"
    );
    Ok(nothing)
}

/// `TICKS:TIMES`.
fn sample(word: &str) -> Result<(u64, u64)> {
    let (ticks, times) = word.split_once(':').context("no ticks and times")?;
    Ok((ticks.parse()?, times.parse()?))
}

/// Of those that were not interrupted, if those are most of what there should be. `samples` are in ascending order.
fn mean(samples: &[(u64, u64)], rounds: u32) -> Result<f64> {
    let count = |samples: &[(u64, u64)]| samples.iter().map(|(_, times)| times).sum::<u64>();
    let half = count(samples).div_ceil(2);
    let mut before = 0;
    let middle = samples.iter().find(|(_, times)| {
        before += times;
        before >= half
    });
    let (middle, _) = middle.context("no burst was whole")?;
    let beyond = samples.partition_point(|(ticks, _)| *ticks <= middle + INTERRUPTED);
    let whole = &samples[..beyond];
    ensure!(
        count(whole) >= u64::from(rounds) * 3 / 4,
        "only {} bursts of {rounds} were whole and uninterrupted",
        count(whole)
    );
    let sum: u64 = whole.iter().map(|(ticks, times)| ticks * times).sum();
    Ok(sum as f64 / count(whole) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOCK: &str = "clock 3 2000004\n";

    fn one(line: &str) -> Result<f64> {
        let ticks = parse(&format!("{CLOCK}{line}\n"), 8)?;
        Ok(ticks[&("rx".to_owned(), 32)])
    }

    #[test]
    fn the_mean_is_that_of_all_bursts_without_the_clock() {
        assert_eq!(one("ticks rx 32 1003:6 1011:2").unwrap(), 1002.0);
    }

    #[test]
    fn an_interrupted_burst_does_not_count() {
        assert_eq!(one("ticks rx 32 1003:7 5203:1").unwrap(), 1000.0);
    }

    #[test]
    fn too_few_bursts_are_no_figure() {
        assert!(one("ticks rx 32 1003:5").is_err());
        assert!(one("ticks rx 32").is_err());
    }

    #[test]
    fn a_clock_that_counts_something_else_is_none() {
        let text = |turns| format!("clock 3 {turns}\nticks rx 32 1003:8\n");
        assert!(parse(&text(2_019_000), 8).is_ok());
        assert!(parse(&text(2_021_000), 8).is_err());
        assert!(parse(&text(1_979_000), 8).is_err());
    }

    #[test]
    fn ticks_of_no_known_clock_are_refused() {
        assert!(parse("ticks rx 32 1003:8\n", 8).is_err());
        assert!(parse(CLOCK, 8).is_err());
    }
}
