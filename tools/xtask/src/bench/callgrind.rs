//! Instructions of bursts, counted by valgrind's callgrind: exact, and the same on a busy machine.
//!
//! The program's `counted_` functions are what is counted: from where an application calls to where that returns. Callgrind says how often each instruction
//! was executed, and the debug information by way of which lines of source it came there, and so
//! which of the contract's checks it belongs to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::figure::{Figure, Measured, Series};

/// Bursts of each kind: a ring is gone round a whole number of times.
const TURNS: u32 = 512;
/// Whose descriptors.
const FAMILIES: [&str; 2] = ["igb", "e1000e"];
/// Frames of the bursts that have limits, and whose instructions are listed.
const USUAL: u32 = 32;
/// What such a burst may cost: instructions a packet, of an empty poll a call.
const REACH: [(&str, &str, f64); 7] = [
    ("igb", "empty", 16.0),
    ("igb", "rx", 36.0),
    ("igb", "tx", 32.0),
    ("igb", "io", 68.0),
    ("igb", "macswap", 86.0),
    ("e1000e", "io", 70.0),
    ("e1000e", "macswap", 88.0),
];

/// A kind of burst that was counted.
struct Case {
    family: &'static str,
    /// As the program calls it.
    path: String,
    burst: u32,
    instructions: Vec<Instruction>,
}

impl Case {
    fn is_poll(&self) -> bool {
        self.path == "empty"
    }

    fn name(&self) -> String {
        match self.is_poll() {
            true => format!("{}: empty rx poll", self.family),
            false => format!("{}: {} burst of {}", self.family, self.path, self.burst),
        }
    }

    /// Of what its instructions are counted.
    fn unit(&self) -> &'static str {
        match self.is_poll() {
            true => "instructions a poll",
            false => "instructions a packet",
        }
    }

    fn packets(&self) -> f64 {
        match self.is_poll() {
            true => 1.0,
            false => self.burst.into(),
        }
    }

    /// Instructions a packet.
    fn each(&self) -> f64 {
        let whole: f64 = self.instructions.iter().map(|found| found.times).sum();
        whole / self.packets()
    }

    fn limit(&self) -> Option<f64> {
        let ours = |&&(family, path, _): &&(&str, &str, f64)| {
            (family, path, USUAL) == (self.family, self.path.as_str(), self.burst)
        };
        REACH.iter().find(ours).map(|&(_, _, limit)| limit)
    }
}

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
        // Whether it is done, which a poll asks anyway, comes with the same compare.
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
pub(super) fn measured(program: &Path, folder: &Path) -> Result<Measured> {
    let mut sources = Sources::default();
    let mut measured = Measured::default();
    for family in FAMILIES {
        for case in count(program, folder, family)? {
            let name = format!("data path, {}", case.name());
            let figures = &mut measured.figures;
            figures.push(figure(name, case.unit(), case.each(), case.limit()));
            if case.burst == USUAL {
                figures.extend(checks(&case, &mut sources));
            }
            if !case.is_poll() {
                grow(&mut measured.series, &case);
            }
        }
    }
    for check in &CHECKS {
        ensure!(
            measured
                .figures
                .iter()
                .any(|figure| figure.figure.contains(check.name)),
            "no instruction of the check `{}` was found: do its lines still read {:?}?",
            check.name,
            check.lines
        );
    }
    Ok(measured)
}

/// What the checks in one burst cost.
fn checks(case: &Case, sources: &mut Sources) -> Vec<Figure> {
    let mut figures = Vec::new();
    // Of both directions at once, nothing new is learnt.
    if !["empty", "rx", "tx"].contains(&case.path.as_str()) {
        return figures;
    }
    for check in &CHECKS {
        let found = case
            .instructions
            .iter()
            .filter(|found| found.belongs_to(check, sources));
        let cost: f64 = found.map(|found| found.times).sum();
        // What a path does not look at, it does not check: nothing comes from the device there.
        if cost == 0.0 {
            continue;
        }
        let (unit, cost) = match check.per_burst {
            true => ("instructions a burst", cost),
            false => ("instructions a packet", cost / case.packets()),
        };
        let name = format!("data path, {}: {}", case.name(), check.name);
        figures.push(figure(name, unit, cost, Some(check.limit)));
    }
    figures
}

/// Adds a point to the line of its path.
fn grow(series: &mut Vec<Series>, case: &Case) {
    let name = format!("bursts of {}, counted/{}", case.family, case.path);
    let point = (case.burst.into(), case.each());
    match series.iter_mut().find(|line| line.name == name) {
        Some(line) => line.points.push(point),
        None => series.push(Series {
            name,
            x_label: "frames of a burst".into(),
            y_label: "instructions a packet".into(),
            points: vec![point],
        }),
    }
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

/// Every instruction of bursts of [`USUAL`], with how often it was executed per burst, where it is from, and the check that it
/// belongs to.
pub(super) fn listing(program: &Path, folder: &Path) -> Result<String> {
    let mut sources = Sources::default();
    let mut text = String::new();
    for family in FAMILIES {
        let cases = count(program, folder, family)?;
        for case in cases.iter().filter(|case| case.burst == USUAL) {
            let name = case.name();
            let _ = writeln!(text, "\n{name}: times per burst, instruction, source");
            for found in &case.instructions {
                let check = CHECKS
                    .iter()
                    .find(|check| found.belongs_to(check, &mut sources));
                let mark = check.map_or_else(String::new, |check| format!("  <- {}", check.name));
                // The innermost that is ours, not the standard library's.
                let ours = |place: &&String| !place.contains("/library/");
                let place = found.places.iter().find(ours).or(found.places.last());
                let place = place.map_or("", String::as_str);
                let place = place.rsplit('/').next().unwrap_or(place);
                let _ = writeln!(
                    text,
                    "{:>6.2}  {:<40} {place}{mark}",
                    found.times, found.text
                );
            }
        }
    }
    Ok(text)
}

/// Runs the program under callgrind, which collects inside its `counted_` functions and writes a file after each case.
fn count(program: &Path, folder: &Path, family: &'static str) -> Result<Vec<Case>> {
    let scratch = tempfile::tempdir_in(folder)?;
    let out = scratch.path().join("case");
    let result = Command::new("valgrind")
        .args(["--tool=callgrind", "--dump-instr=yes"])
        .args(["--compress-strings=no", "--compress-pos=no"])
        .args(["--toggle-collect=*counted_*", "--dump-after=*case_is_over*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["data-path", family, &TURNS.to_string()])
        .output()
        .context("cannot run valgrind: install it (`apt install valgrind`)")?;
    if !result.status.success() {
        bail!(
            "under valgrind: {}",
            String::from_utf8_lossy(&result.stderr)
        );
    }
    let said = String::from_utf8_lossy(&result.stdout);
    let mut counted = Vec::new();
    for (number, line) in said.lines().enumerate() {
        let mut words = line.split_whitespace();
        let (Some("case"), Some(path), Some(burst)) = (words.next(), words.next(), words.next())
        else {
            bail!("no case: {line}");
        };
        let file = out.with_extension((number + 1).to_string());
        let text = fs::read_to_string(&file)
            .with_context(|| format!("callgrind wrote nothing of `{line}`"))?;
        let counts = parse(&text);
        ensure!(!counts.is_empty(), "callgrind saw nothing in `{line}`");
        counted.push((path.to_owned(), burst.parse()?, counts));
    }
    let addresses: BTreeSet<u64> = counted
        .iter()
        .flat_map(|(_, _, counts)| counts.keys().copied())
        .collect();
    let addresses: Vec<u64> = addresses.into_iter().collect();
    let places = places(program, &addresses)?;
    let code = disassemble(program, &addresses)?;
    let instruction = |(address, times): (u64, u64)| Instruction {
        times: times as f64 / f64::from(TURNS),
        places: places.get(&address).cloned().unwrap_or_default(),
        text: code.get(&address).cloned().unwrap_or_default(),
    };
    let case = |(path, burst, counts): (String, u32, BTreeMap<u64, u64>)| Case {
        family,
        path,
        burst,
        instructions: counts.into_iter().map(instruction).collect(),
    };
    Ok(counted.into_iter().map(case).collect())
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
