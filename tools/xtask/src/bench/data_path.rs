//! Bursts under callgrind.

use super::{Part, callgrind};

pub(super) const PART: Part = Part {
    name: "data-path",
    measure: |bench| Ok(callgrind::figures(bench.program()?, &bench.folder)?.into()),
};
