//! Which cases run on which machines of the QEMU tier.

use std::fmt;

use crate::cases::{CASES, Case, Needs};

/// A machine of the QEMU tier, by the names that `cargo xtask vm list` shows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Machine {
    /// The guest kernel: small or debian.
    pub kernel: &'static str,
    /// The topology.
    pub topology: &'static str,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kernel, self.topology)
    }
}

/// The cases of one machine.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The machine.
    pub machine: Machine,
    /// The ways to its IOMMU that each case takes.
    pub iommu: &'static [&'static str],
    /// What its devices offer.
    pub offers: &'static [Needs],
}

impl Plan {
    /// The cases that its devices can run.
    pub fn cases(&self) -> impl Iterator<Item = &'static Case> {
        let offers = self.offers;
        CASES
            .iter()
            .filter(move |case| offers.contains(&case.needs))
    }
}

const fn machine(kernel: &'static str, topology: &'static str) -> Machine {
    Machine { kernel, topology }
}

/// Everything that the QEMU tier runs.
pub const PLANS: &[Plan] = &[
    Plan {
        machine: machine("small", "two-igb"),
        iommu: &["container", "iommufd"],
        offers: &[Needs::Loopback, Needs::KernelVfio],
    },
    Plan {
        machine: machine("debian", "two-igb"),
        iommu: &["container"],
        offers: &[Needs::Loopback, Needs::KernelVfio],
    },
    Plan {
        machine: machine("small", "aw39"),
        iommu: &["container", "iommufd"],
        offers: &[Needs::Loopback],
    },
    Plan {
        machine: machine("small", "igb-kernel-nic"),
        iommu: &["iommufd"],
        offers: &[Needs::KernelPeer],
    },
    Plan {
        machine: machine("debian", "igb-kernel-nic"),
        iommu: &["container"],
        offers: &[Needs::KernelPeer],
    },
];
