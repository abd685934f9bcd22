//! Bursts under callgrind.

use super::{Part, callgrind};

pub(super) const PART: Part = Part {
    name: "data-path",
    measure: |bench| callgrind::measured(bench.program()?, &bench.folder),
};
