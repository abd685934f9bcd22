//! The ledger beside the kernel.

use super::Part;
use super::figure::Measured;
use super::plots::{Who, lines};
use super::program::in_guest;
use crate::vm::{Accelerator, Boot, Kernel, topologies};

pub(super) const PART: Part = Part {
    name: "ledger",
    measure: |bench| {
        let boot = Boot::new(Kernel::Small, topologies::find("two-igb")?)
            .accelerator(Accelerator::Counted)
            .cpus(1);
        let figures = in_guest(boot, bench.program()?, "ledger")?;
        let who = [("failstop", Who::Ours), ("the ioctls in it", Who::Beside)];
        let series = lines(
            &figures,
            ("ledger: map and release a page (", " mappings)"),
            ("ledger", &who),
            ("live mappings", "instructions, map and release"),
        );
        Ok(Measured {
            series,
            ..figures.into()
        })
    },
};
