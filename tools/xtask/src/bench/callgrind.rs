//! Instructions of bursts, counted by valgrind's callgrind: exact, and the same on a busy machine.
//!
//! The program's `collect_` functions are what is counted. Callgrind says how often each instruction
//! was executed, and the debug information by way of which lines of source it came there, and so
//! which of the contract's checks it belongs to.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::Figure;

/// Bursts of each kind.
const TURNS: u32 = 200;
/// Frames of a burst, as the program has them.
const BURST: u32 = 32;

/// A kind of burst: what is collected, what it is called, and the frames of one.
const BURSTS: [(&str, &str, u32); 3] = [
    ("collect_rx", "rx burst of 32", BURST),
    ("collect_tx", "tx burst of 32", BURST),
    ("collect_empty", "empty rx poll", 1),
];

/// A check that the contract asks for: the text of the source lines that make it, and what it may
/// cost.
struct Check {
    name: &'static str,
    lines: &'static [&'static str],
    /// Of a whole burst, or of each frame.
    per_burst: bool,
    limit: f64,
}

const CHECKS: [Check; 2] = [
    Check {
        name: "is the device broken",
        lines: &[
            "if self.lifecycle.is_broken()",
            "        !self.lifecycle.is_broken()",
        ],
        per_burst: true,
        limit: 4.0,
    },
    Check {
        name: "is the device's word done and possible",
        lines: &[
            "let len = F::clean_len(word);",
            "if len.wrapping_sub(shortest.into()) > span.into()",
        ],
        per_burst: false,
        // Six to validate it. Whether it is done, which a poll asks anyway, comes with the same compare.
        limit: 7.0,
    },
];

/// One instruction that was executed.
struct Instruction {
    /// How often, per burst.
    times: f64,
    /// Where it is from, innermost first: file and line.
    places: Vec<String>,
    /// What it is.
    text: String,
}

impl Instruction {
    /// A function's first instructions, which save registers, are said to be of its first line.
    fn is_prologue(&self) -> bool {
        self.text.starts_with("push ")
            || self.text.starts_with("sub ") && self.text.ends_with(",%rsp")
    }

    fn belongs_to(&self, check: &Check, sources: &mut Sources) -> bool {
        !self.is_prologue()
            && self.places.iter().any(|place| {
                let line = sources.line(place);
                check.lines.iter().any(|text| line.contains(text))
            })
    }
}

/// Counts bursts, and what the checks in them cost.
pub(super) fn figures(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    let mut sources = Sources::default();
    let mut figures = Vec::new();
    for (function, name, frames) in BURSTS {
        let instructions = count(program, folder, function)?;
        let whole: f64 = instructions.iter().map(|found| found.times).sum();
        let (unit, each) = match frames {
            1 => ("instructions a poll", whole),
            _ => ("instructions a packet", whole / f64::from(frames)),
        };
        figures.push(figure(format!("data path: {name}"), unit, each, None));
        for check in &CHECKS {
            let found = instructions
                .iter()
                .filter(|found| found.belongs_to(check, &mut sources));
            let cost: f64 = found.map(|found| found.times).sum();
            // What a path does not look at, it does not check: nothing comes from the device there.
            if cost == 0.0 {
                continue;
            }
            let (unit, cost) = match check.per_burst {
                true => ("instructions a burst", cost),
                false => ("instructions a packet", cost / f64::from(frames)),
            };
            let name = format!("data path: {}, in {name}", check.name);
            figures.push(figure(name, unit, cost, Some(check.limit)));
        }
    }
    for check in &CHECKS {
        ensure!(
            figures
                .iter()
                .any(|figure| figure.figure.contains(check.name)),
            "no instruction of the check `{}` was found: do its lines still read {:?}?",
            check.name,
            check.lines
        );
    }
    Ok(figures)
}

fn figure(figure: String, unit: &str, ours: f64, limit: Option<f64>) -> Figure {
    Figure {
        figure,
        unit: unit.into(),
        ours,
        beside: None,
        limit,
        at_least: None,
        absolute: false,
        note: "callgrind".into(),
    }
}

/// Every instruction of every burst, with how often it was executed per burst, where it is from, and
/// the check that it belongs to.
pub(super) fn listing(program: &Path, folder: &Path) -> Result<String> {
    let mut sources = Sources::default();
    let mut text = String::new();
    for (function, name, _) in BURSTS {
        let _ = writeln!(text, "\n{name}: times per burst, instruction, source");
        let instructions = count(program, folder, function)?;
        for found in &instructions {
            let check = CHECKS
                .iter()
                .find(|check| found.belongs_to(check, &mut sources));
            let mark = check.map_or_else(String::new, |check| format!("  <- {}", check.name));
            let place = found.places.last().map_or("", String::as_str);
            let place = place.rsplit('/').next().unwrap_or(place);
            let _ = writeln!(
                text,
                "{:>6.2}  {:<40} {place}{mark}",
                found.times, found.text
            );
        }
    }
    Ok(text)
}

/// Runs the program under callgrind, collecting inside this function.
fn count(program: &Path, folder: &Path, function: &str) -> Result<Vec<Instruction>> {
    let out = folder.join(format!("{function}.callgrind"));
    let result = Command::new("valgrind")
        .args(["--tool=callgrind", "--dump-instr=yes"])
        .args(["--compress-strings=no", "--compress-pos=no"])
        .arg(format!("--toggle-collect=*{function}*"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["data-path", &TURNS.to_string()])
        .output()
        .context("cannot run valgrind: install it (`apt install valgrind`)")?;
    if !result.status.success() {
        bail!(
            "under valgrind: {}",
            String::from_utf8_lossy(&result.stderr)
        );
    }
    let text = fs::read_to_string(&out).with_context(|| format!("no {}", out.display()))?;
    let counts = parse(&text);
    ensure!(!counts.is_empty(), "callgrind saw nothing in {function}");
    let addresses: Vec<u64> = counts.keys().copied().collect();
    let mut places = places(program, &addresses)?;
    let mut code = disassemble(program, &addresses)?;
    Ok(counts
        .into_iter()
        .map(|(address, times)| Instruction {
            times: times as f64 / f64::from(TURNS),
            places: places.remove(&address).unwrap_or_default(),
            text: code.remove(&address).unwrap_or_default(),
        })
        .collect())
}

/// How often each instruction was executed itself: `address line times`, but for the line after
/// `calls=`, which has what was executed in the function that was called.
fn parse(text: &str) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    let mut called = false;
    for line in text.lines() {
        if line.starts_with("calls=") {
            called = true;
        } else if line.starts_with("0x") {
            let mut words = line.split_whitespace();
            let address = words.next().and_then(|word| word.strip_prefix("0x"));
            let address = address.and_then(|word| u64::from_str_radix(word, 16).ok());
            let times = words.nth(1).and_then(|word| word.parse::<u64>().ok());
            if let (Some(address), Some(times), false) = (address, times, called) {
                *counts.entry(address).or_default() += times;
            }
            called = false;
        }
    }
    counts
}

/// By way of which lines each instruction came there, as `addr2line` says.
fn places(program: &Path, addresses: &[u64]) -> Result<BTreeMap<u64, Vec<String>>> {
    let addresses = addresses.iter().map(|address| format!("{address:#x}"));
    let output = Command::new("addr2line")
        .args(["--inlines", "--addresses", "--exe"])
        .arg(program)
        .args(addresses)
        .output()
        .context("cannot run addr2line: install binutils")?;
    ensure!(output.status.success(), "addr2line failed");
    let mut places: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut now = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines().rev() {
        match line.strip_prefix("0x") {
            Some(address) => {
                now.reverse();
                let address = u64::from_str_radix(address, 16)?;
                places.insert(address, std::mem::take(&mut now));
            }
            None => now.push(line.split(" (").next().unwrap_or(line).to_owned()),
        }
    }
    Ok(places)
}

/// The text of each instruction, as `objdump` says.
fn disassemble(program: &Path, addresses: &[u64]) -> Result<BTreeMap<u64, String>> {
    let mut code = BTreeMap::new();
    let mut rest = addresses;
    while let Some(first) = rest.first() {
        // Of a stretch without large gaps, so that not all of the program is taken apart.
        let gap = rest
            .windows(2)
            .position(|pair| pair[1] - pair[0] > 4096)
            .map_or(rest.len(), |at| at + 1);
        let (stretch, later) = rest.split_at(gap);
        rest = later;
        let last = stretch.last().unwrap_or(first);
        let output = Command::new("objdump")
            .args(["--disassemble", "--no-show-raw-insn"])
            .arg(format!("--start-address={first:#x}"))
            .arg(format!("--stop-address={:#x}", last + 16))
            .arg(program)
            .output()
            .context("cannot run objdump: install binutils")?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some((address, text)) = line.trim().split_once(":\t") else {
                continue;
            };
            if let Ok(address) = u64::from_str_radix(address, 16) {
                let text = text.split(" <").next().unwrap_or(text);
                code.insert(address, text.trim().replace('\t', " "));
            }
        }
    }
    Ok(code)
}

/// Source files, each read once.
#[derive(Default)]
struct Sources(BTreeMap<String, Vec<String>>);

impl Sources {
    /// The text at `file:line`; nothing where there is none.
    fn line(&mut self, place: &str) -> &str {
        let Some((file, line)) = place.rsplit_once(':') else {
            return "";
        };
        let lines = self.0.entry(file.to_owned()).or_insert_with(|| {
            let text = fs::read_to_string(file).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        });
        let line = line
            .parse::<usize>()
            .ok()
            .and_then(|line| line.checked_sub(1));
        line.and_then(|line| lines.get(line))
            .map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_called_function_executed_is_not_counted_twice() {
        let text = "fn=a\n0x10 5 400\n0x12 6 400\ncalls=400 0x20 128 \n0x12 6 258200\n0x14 7 2\n\
                    fn=b\n0x20 128 400\n0x10 5 1\nsummary: 9\n";
        let counts = parse(text);
        let expected = [(0x10, 401), (0x12, 400), (0x14, 2), (0x20, 400)];
        assert_eq!(counts, BTreeMap::from(expected));
    }
}
