//! What an ordinary user meets.

use std::os::unix::fs::chown;

use failstop_pci::transport::vfio::Iommu;

use super::{bound, inner};
use crate::fixture::Outcome;

pub(super) fn c21_an_ordinary_user_is_told_the_limit(iommu: Iommu) -> Outcome {
    with_files_of(inner::USER, iommu, || inner::part("memlock", iommu))
}

pub(super) fn c21_a_limit_that_sinks_in_life_leaves_the_device_as_it_was(iommu: Iommu) -> Outcome {
    with_files_of(inner::USER, iommu, || inner::part("sunken", iommu))
}

pub(super) fn no_permission_names_the_file(iommu: Iommu) -> Outcome {
    // The file that all functions share may be opened; that of the group or device may not.
    let address = bound("igb")?;
    let files = inner::files(address, iommu)?;
    let shared = files.first().ok_or("no files")?;
    chown(shared, Some(inner::USER), None)?;
    let outcome = inner::part("permission", iommu);
    chown(shared, Some(0), None)?;
    outcome
}

pub(super) fn descriptors_are_used_after_privileges_are_dropped(iommu: Iommu) -> Outcome {
    bound("igb")?;
    inner::part("passed", iommu)
}

/// Gives the files of the machine's 82576 to a user while `act` runs.
fn with_files_of(user: u32, iommu: Iommu, act: impl FnOnce() -> Outcome) -> Outcome {
    let files = inner::files(bound("igb")?, iommu)?;
    for file in &files {
        chown(file, Some(user), None)?;
    }
    let outcome = act();
    for file in &files {
        chown(file, Some(0), None)?;
    }
    outcome
}
