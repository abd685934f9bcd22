//! The ledger beside the kernel.

use super::Part;
use super::program::in_guest;
use crate::vm::{Accelerator, Boot, Kernel, topologies};

pub(super) const PART: Part = Part {
    name: "ledger",
    measure: |bench| {
        let boot = Boot::new(Kernel::Small, topologies::find("two-igb")?)
            .accelerator(Accelerator::Counted)
            .cpus(1);
        Ok(in_guest(boot, bench.program()?, "ledger")?.into())
    },
};
