//! Open, close, and the memory of an idle port, on an emulated device.

use super::Part;
use super::program::here;

pub(super) const PART: Part = Part {
    name: "life",
    measure: |bench| Ok(here(bench.program()?, &["life"])?.into()),
};
