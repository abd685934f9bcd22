//! The ladder: on an emulated device, and on QEMU's 82576.

use super::Part;
use super::program::{here, in_guest};
use crate::vm::{Boot, Kernel, topologies};

pub(super) const HERE: Part = Part {
    name: "ladder",
    measure: |bench| Ok(here(bench.program()?, &["ladder"])?.into()),
};

pub(super) const IN_GUEST: Part = Part {
    name: "ladder-qemu",
    measure: |bench| {
        let boot = Boot::new(Kernel::Small, topologies::find("two-igb")?);
        Ok(in_guest(boot, bench.program()?, "ladder igb,container 12")?.into())
    },
};
