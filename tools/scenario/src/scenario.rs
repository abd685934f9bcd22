//! A whole scenario: the device that it runs on, and its steps.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::step::{Step, StepError};

/// The first line.
const HEAD: &str = "failstop scenario 1";

/// What a scenario runs on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum On {
    /// An emulated device: its part number.
    Emulated(String),
    /// A device of tests, in memory, behind something.
    Scripted(Behind),
    /// A device by its name, as `failstop run` takes it.
    Device(String),
}

crate::words::words! {
    /// What a scripted device is behind.
    Behind {
        /// A server that translates.
        Server = "server",
        /// A kernel with an IOMMU.
        Kernel = "kernel",
        /// Nothing that translates.
        Nothing = "nothing",
    }
}

/// A scenario.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Scenario {
    /// What it runs on.
    pub on: On,
    /// From which everything random derives that names no seed of its own.
    pub seed: Option<u64>,
    /// What is done, in order.
    pub steps: Vec<Step>,
}

/// Text that is no scenario.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("line {line}")]
pub struct ScenarioError {
    /// Where, from 1 on.
    pub line: usize,
    /// Why.
    #[source]
    pub reason: Reason,
}

/// Why a line does not belong in a scenario.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Reason {
    /// The first line is another one.
    #[error("a scenario begins with '{HEAD}'")]
    Head,
    /// The second line does not say on what it runs.
    #[error(
        "'on emulated PART', 'on scripted server|kernel|nothing' or 'on device NAME' is due here"
    )]
    On,
    /// The seed is no number.
    #[error("a seed is a number")]
    Seed,
    /// It is no step.
    #[error(transparent)]
    Step(#[from] StepError),
}

fn on(line: &str) -> Option<On> {
    let words: Vec<&str> = line.split_whitespace().collect();
    Some(match words[..] {
        ["on", "emulated", part] => On::Emulated(part.to_owned()),
        ["on", "scripted", behind] => On::Scripted(behind.parse().ok()?),
        ["on", "device", name] => On::Device(name.to_owned()),
        _ => return None,
    })
}

impl FromStr for Scenario {
    type Err = ScenarioError;

    fn from_str(text: &str) -> Result<Self, ScenarioError> {
        let mut last = 1;
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(n, line)| {
                last = n + 1;
                (n + 1, line.split('#').next().unwrap_or_default().trim())
            })
            .filter(|(_, line)| !line.is_empty());
        let head = lines.next();
        if head.is_none_or(|(_, line)| line != HEAD) {
            let line = head.map_or(1, |(line, _)| line);
            let reason = Reason::Head;
            return Err(ScenarioError { line, reason });
        }
        let second = lines.next();
        let on = second.and_then(|(_, line)| on(line));
        let mut seed = None;
        let mut steps = Vec::new();
        let on = match on {
            Some(on) => on,
            None => {
                let line = second.map(|(line, _)| line);
                drop(lines);
                let line = line.unwrap_or(last);
                let reason = Reason::On;
                return Err(ScenarioError { line, reason });
            }
        };
        for (line, text) in lines {
            match text.strip_prefix("seed ") {
                Some(number) => {
                    let number = number.trim().parse().ok();
                    // Given twice it would be unclear which counts.
                    let number = number.filter(|_| seed.is_none());
                    let reason = Reason::Seed;
                    seed = Some(number.ok_or(ScenarioError { line, reason })?);
                }
                None => steps.push(Step::parse(text).map_err(|error| ScenarioError {
                    line,
                    reason: error.into(),
                })?),
            }
        }
        Ok(Self { on, seed, steps })
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}")?;
        writeln!(f, "on {}", self.on)?;
        if let Some(seed) = self.seed {
            writeln!(f, "seed {seed}")?;
        }
        for step in &self.steps {
            writeln!(f, "{step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulated(part) => write!(f, "emulated {part}"),
            Self::Scripted(behind) => write!(f, "scripted {behind}"),
            Self::Device(name) => write!(f, "device {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_say_nothing() {
        let text = "# why\nfailstop scenario 1 # head\n\non emulated 82576\n  break # it\n";
        let scenario: Scenario = text.parse().unwrap();
        assert_eq!(scenario.steps, [Step::Break]);
    }

    #[test]
    fn an_error_names_its_line() {
        let head = "failstop scenario 1\non emulated 82576\n\n";
        for (text, line) in [
            ("", 1),
            ("failstop scenario 2\n", 1),
            ("failstop scenario 1\nbreak\n", 2),
            ("failstop scenario 1\n", 1),
            (&format!("{head}break\nbrake\n"), 5),
            (&format!("{head}seed x\n"), 4),
            (&format!("{head}seed 1\nseed 2\n"), 5),
            (&format!("{head}fault gone@soon\n"), 4),
            (&format!("{head}break now\n"), 4),
            (&format!("{head}device lies 0 1 12\n"), 4),
        ] {
            let error = text.parse::<Scenario>().unwrap_err();
            assert_eq!(error.line, line, "{text}: {error:?}");
        }
    }
}
