//! Which cases run on which machines of the QEMU tier.

use std::fmt;

use crate::cases::{CASES, Case, Needs};
use crate::kernel::{self, Abilities, Machine};

/// A guest of the QEMU tier and the cases that run in it. It boots once.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The guest kernel: small or debian.
    pub kernel: &'static str,
    /// The topology, by the name that `cargo xtask vm list` shows.
    pub topology: &'static str,
    /// The role of the function under test in it.
    pub device: &'static str,
    /// The kernel cases of this machine run too.
    pub machine: Option<Machine>,
    /// The ways to the IOMMU that each case of the suite takes.
    pub iommu: &'static [&'static str],
    /// What the devices offer to cases of the suite.
    pub offers: &'static [Needs],
    /// What the ladder must make of a break in mid-traffic.
    pub resets: &'static [Reset],
}

/// A break in mid-traffic, and the reset that must prove that the function is stopped (R4.5).
#[derive(Clone, Copy, Debug)]
pub struct Reset {
    /// The role of the function that breaks.
    pub role: &'static str,
    /// The only method that its kernel may use; what it offers by itself without one.
    pub only: Option<&'static str>,
    /// The method that is believed.
    pub proven: &'static str,
    /// The method that returns success and resets nothing (C43).
    pub not_believed: Option<&'static str>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kernel, self.topology)?;
        self.words().map_or(Ok(()), |words| write!(f, "/{words}"))
    }
}

impl Plan {
    /// The suite's cases that its devices can run.
    pub fn cases(&self) -> impl Iterator<Item = &'static Case> {
        let offers = self.offers;
        CASES
            .iter()
            .filter(move |case| offers.contains(&case.needs))
    }

    /// Whether the tool's main job runs here: where a device can loop back.
    #[must_use]
    pub fn runs_tool(&self) -> bool {
        self.offers.contains(&Needs::Loopback)
    }

    /// The names of the kernel cases that its machine and its kernel can run.
    #[must_use]
    pub fn kernel_cases(&self) -> Vec<String> {
        let abilities = match self.kernel {
            "small" => Abilities::SMALL,
            _ => Abilities::DEBIAN,
        };
        let cases = kernel::CASES
            .iter()
            .filter(|case| Some(case.machine) == self.machine);
        cases.flat_map(|case| case.names(abilities)).collect()
    }

    /// The variable of the guest that has the address of the function under test.
    #[must_use]
    pub fn device_variable(&self) -> String {
        variable(self.device)
    }

    /// A word that its kernel's command line needs.
    #[must_use]
    pub fn words(&self) -> Option<&'static str> {
        self.machine.and_then(Machine::words)
    }
}

/// The variable of a guest that has the address of the function with that role.
#[must_use]
pub fn variable(role: &str) -> String {
    format!("FAILSTOP_{}", role.to_uppercase().replace('-', "_"))
}

const fn kernel_only(kernel: &'static str, machine: Machine) -> Plan {
    Plan {
        kernel,
        topology: machine.topology(),
        device: "igb",
        machine: Some(machine),
        iommu: &[],
        offers: &[],
        resets: &[],
    }
}

const BOTH: &[&str] = &["container", "iommufd"];
const CONTAINER: &[&str] = &["container"];
const DEVICE: &[Needs] = &[
    Needs::Loopback,
    Needs::KernelVfio,
    Needs::OwnMachine,
    Needs::LinkDown,
];
/// An 82576.
const IGB: &[Needs] = &[
    Needs::Loopback,
    Needs::Rss,
    Needs::KernelVfio,
    Needs::OwnMachine,
    Needs::LinkDown,
];

const FLR: &[Reset] = &[Reset {
    role: "igb",
    only: None,
    proven: "flr",
    not_believed: None,
}];
/// QEMU's 82574 has no FLR, and its reset by power management resets nothing.
const NO_FLR: &[Reset] = &[
    Reset {
        role: "e1000e",
        only: None,
        proven: "bus",
        not_believed: Some("pm"),
    },
    Reset {
        role: "e1000e-peer",
        only: Some("pm"),
        proven: "hot",
        not_believed: Some("pm"),
    },
];
/// A hot reset would wipe the sibling too: what remains is the device's own reset, and the IOMMU.
const NO_RESET: &[Reset] = &[Reset {
    role: "sibling",
    only: None,
    proven: "software",
    not_believed: Some("pm"),
}];

/// Everything that the QEMU tier runs.
pub const PLANS: &[Plan] = &[
    Plan {
        kernel: "small",
        topology: "two-igb",
        device: "igb",
        machine: Some(Machine::TwoIgb),
        iommu: BOTH,
        offers: IGB,
        resets: FLR,
    },
    Plan {
        kernel: "debian",
        topology: "two-igb",
        device: "igb",
        machine: Some(Machine::TwoIgb),
        iommu: CONTAINER,
        offers: IGB,
        resets: FLR,
    },
    Plan {
        kernel: "small",
        topology: "igb-kernel-nic",
        device: "igb",
        machine: None,
        iommu: &["iommufd"],
        offers: &[Needs::KernelPeer],
        resets: &[],
    },
    Plan {
        kernel: "debian",
        topology: "igb-kernel-nic",
        device: "igb",
        machine: None,
        iommu: CONTAINER,
        offers: &[Needs::KernelPeer],
        resets: &[],
    },
    Plan {
        kernel: "small",
        topology: "two-e1000e",
        device: "e1000e",
        machine: None,
        iommu: &["iommufd"],
        offers: DEVICE,
        resets: NO_FLR,
    },
    Plan {
        kernel: "debian",
        topology: "two-e1000e",
        device: "e1000e",
        machine: None,
        iommu: CONTAINER,
        offers: DEVICE,
        resets: NO_FLR,
    },
    Plan {
        kernel: "small",
        topology: "aw39",
        device: "igb",
        machine: Some(Machine::Narrow),
        iommu: BOTH,
        offers: &[],
        resets: &[],
    },
    Plan {
        iommu: &["iommufd"],
        resets: NO_RESET,
        ..kernel_only("small", Machine::SharedGroup)
    },
    kernel_only("small", Machine::KernelNic),
    kernel_only("small", Machine::NoIommu),
    kernel_only("small", Machine::NoRemapping),
    kernel_only("small", Machine::BadHost),
    kernel_only("small", Machine::Hardware),
];
