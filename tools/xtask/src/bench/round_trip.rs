//! Frames that come back, on an emulated device: how many, and how late.

use super::Part;
use super::figure::Measured;
use super::plots::{Who, lines};
use super::program::here;

/// Shares of the load, as the program has them.
const LOADS: [u32; 3] = [1, 50, 90];
const BY_HAND: &[(&str, Who)] = &[("failstop", Who::Ours), ("by hand", Who::Beside)];

pub(super) const PART: Part = Part {
    name: "round-trip",
    measure: |bench| {
        let figures = here(bench.program()?, &["round-trip"])?;
        let mut series = lines(
            &figures,
            ("emulator: round trips, frames of ", " bytes"),
            ("round trips", BY_HAND),
            ("bytes of a frame", "frames a second"),
        );
        for load in LOADS {
            series.extend(lines(
                &figures,
                (&format!("emulator: round trip at {load} % load, p"), ""),
                (&format!("latency at {load} percent load"), BY_HAND),
                ("percentile", "microseconds"),
            ));
        }
        Ok(Measured {
            series,
            ..figures.into()
        })
    },
};
