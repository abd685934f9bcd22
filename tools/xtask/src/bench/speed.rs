//! Frames a second at the machine's own speed, beside a loop over the same cache lines.

use std::process::Command;

use super::Part;
use super::figure::Measured;
use super::program::here;

pub(super) const PART: Part = Part {
    name: "speed",
    measure: |bench| {
        let figures = here(bench.program()?, &["speed"])?;
        Ok(Measured {
            skipped: no_cycles().into_iter().collect(),
            ..figures.into()
        })
    },
};

/// Why there are no cycles beside the times, where the processor's counters cannot be had.
fn no_cycles() -> Option<String> {
    let why = match Command::new("perf")
        .args(["stat", "-x,", "-e", "cycles:u", "true"])
        .output()
    {
        Err(error) => format!("perf cannot be run ({error})"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() && !said.contains("<not ") {
                return None;
            }
            "perf counts none on this machine".to_owned()
        }
    };
    Some(format!(
        "speed: cycles by the processor's own counters: {why}; they are those of a chain of multiplications, and instructions \
         are counted by part data-path"
    ))
}
