//! The machines that a guest can have, all in one place.
//!
//! Every function sits behind a root port of its own, or shares one on purpose. Root port `n` (from 1) is bus `n`, so a
//! function's address follows from its place in the list. Tests name a function by its *role*: the guest's environment
//! has `FAILSTOP_<ROLE>=<address>` for each, so that `igb` of any machine here is `$FAILSTOP_IGB`.

use anyhow::{Context, Result, ensure};

use crate::protocol;

/// A machine.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is for.
    pub summary: &'static str,
    /// The IOMMU in front of everything.
    pub iommu: Iommu,
    /// The root ports.
    pub ports: &'static [Port],
}

/// An IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iommu {
    /// None: VFIO works only in its no-IOMMU mode.
    None,
    /// Intel VT-d with interrupt remapping, and with this address width where it is not the default (48).
    Intel {
        /// The width in bits.
        address_bits: Option<u8>,
    },
}

/// A root port and the functions behind it.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// Whether it has access control services. Behind one that has not, all functions share the port's IOMMU group, since
    /// they could reach each other's memory behind the IOMMU's back. (Two 82576 functions in one slot alone do not share:
    /// Linux knows that silicon as isolating.)
    pub isolates: bool,
    /// The functions of its one slot, from function 0.
    pub functions: &'static [Function],
}

/// A PCI function.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// What tests call it.
    pub role: &'static str,
    /// What it is.
    pub model: Model,
    /// What its network side is connected to.
    pub wire: Wire,
}

/// A device model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// QEMU's 82576.
    Igb,
    /// QEMU's 82574.
    E1000e,
    /// QEMU's virtio-net, behind the IOMMU like real hardware.
    VirtioNet,
    /// A device that another process emulates; [`Boot::socket`](super::Boot::socket) says where it listens.
    VfioUser,
}

/// The network side of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Nothing of QEMU's.
    Nothing,
    /// The hub of this number: whatever one port sends, all others receive.
    Hub(u8),
    /// A pair of datagram sockets, if [`Boot::wire`](super::Boot::wire) names them; otherwise nothing.
    Datagrams,
}

impl Model {
    /// Vendor and device id as sysfs has them; `None` where the process that emulates it decides.
    pub fn ids(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Igb => Some(("0x8086", "0x10c9")),
            Self::E1000e => Some(("0x8086", "0x10d3")),
            Self::VirtioNet => Some(("0x1af4", "0x1041")),
            Self::VfioUser => None,
        }
    }
}

const VTD: Iommu = Iommu::Intel { address_bits: None };

const fn port(functions: &'static [Function]) -> Port {
    Port {
        isolates: true,
        functions,
    }
}

const fn function(role: &'static str, model: Model, wire: Wire) -> Function {
    Function { role, model, wire }
}

const TWO_IGB: &[Port] = &[
    port(&[function("igb", Model::Igb, Wire::Hub(0))]),
    port(&[function("igb-peer", Model::Igb, Wire::Hub(0))]),
];

/// All machines.
pub const ALL: &[Topology] = &[
    Topology {
        name: "two-igb",
        summary: "two 82576 on one hub, each in an IOMMU group of its own",
        iommu: VTD,
        ports: TWO_IGB,
    },
    Topology {
        name: "igb-kernel-nic",
        summary: "an 82576 for us and an 82574 for the guest kernel's driver, on one hub",
        iommu: VTD,
        ports: &[
            port(&[function("igb", Model::Igb, Wire::Hub(0))]),
            port(&[function("kernel-nic", Model::E1000e, Wire::Hub(0))]),
        ],
    },
    Topology {
        name: "two-e1000e",
        summary: "two 82574 on one hub, each in an IOMMU group of its own",
        iommu: VTD,
        ports: &[
            port(&[function("e1000e", Model::E1000e, Wire::Hub(0))]),
            port(&[function("e1000e-peer", Model::E1000e, Wire::Hub(0))]),
        ],
    },
    Topology {
        name: "two-pairs",
        summary: "two 82576 on one hub and two 82574 on another, each in an IOMMU group of its own",
        iommu: VTD,
        ports: &[
            port(&[function("igb", Model::Igb, Wire::Hub(0))]),
            port(&[function("igb-peer", Model::Igb, Wire::Hub(0))]),
            port(&[function("e1000e", Model::E1000e, Wire::Hub(1))]),
            port(&[function("e1000e-peer", Model::E1000e, Wire::Hub(1))]),
        ],
    },
    Topology {
        name: "aw39",
        summary: "as two-igb, behind an IOMMU with 39 address bits",
        iommu: Iommu::Intel {
            address_bits: Some(39),
        },
        ports: TWO_IGB,
    },
    Topology {
        name: "no-iommu",
        summary: "as two-igb, without an IOMMU",
        iommu: Iommu::None,
        ports: TWO_IGB,
    },
    Topology {
        name: "shared-group",
        summary: "two functions of one slot in one IOMMU group, and an 82576 in another",
        iommu: VTD,
        ports: &[
            Port {
                isolates: false,
                functions: &[
                    function("igb", Model::Igb, Wire::Hub(0)),
                    function("sibling", Model::E1000e, Wire::Hub(0)),
                ],
            },
            port(&[function("igb-peer", Model::Igb, Wire::Hub(0))]),
        ],
    },
    Topology {
        name: "vfio-user",
        summary: "a device that another process emulates, and an 82574 for the guest kernel's driver",
        iommu: VTD,
        ports: &[
            port(&[function("emulated", Model::VfioUser, Wire::Nothing)]),
            port(&[function("kernel-nic", Model::E1000e, Wire::Datagrams)]),
        ],
    },
];

/// The machine of that name.
///
/// # Errors
///
/// When there is none; the message lists those that there are.
pub fn find(name: &str) -> Result<&'static Topology> {
    ALL.iter()
        .find(|topology| topology.name == name)
        .with_context(|| {
            let names: Vec<_> = ALL.iter().map(|topology| topology.name).collect();
            format!(
                "no topology is called {name}; there are {}",
                names.join(", ")
            )
        })
}

/// A function and where it is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The root port that it is behind, from 1; also its bus.
    pub port: usize,
    /// Its function number.
    pub number: usize,
    /// Whether its slot has other functions.
    pub multifunction: bool,
    /// The function.
    pub function: &'static Function,
}

impl Place {
    /// Its address, `0000:01:00.0` for function 0 behind the first root port.
    pub fn address(&self) -> String {
        format!("0000:{:02x}:00.{}", self.port, self.number)
    }

    /// Its MAC address, where QEMU gives it one.
    pub fn mac(&self) -> String {
        format!("52:54:00:fa:11:{:x}{:x}", self.port, self.number)
    }

    /// The variable that holds its address in the guest: `FAILSTOP_IGB_PEER` for the role `igb-peer`.
    pub fn variable(&self) -> String {
        format!(
            "FAILSTOP_{}",
            self.function.role.to_uppercase().replace('-', "_")
        )
    }
}

impl Topology {
    /// All functions with their places.
    pub fn places(&self) -> impl Iterator<Item = Place> + use<> {
        self.ports.iter().enumerate().flat_map(|(index, port)| {
            let multifunction = port.functions.len() > 1;
            let place = move |(number, function)| Place {
                port: index + 1,
                number,
                multifunction,
                function,
            };
            port.functions.iter().enumerate().map(place)
        })
    }

    /// The address of the function with this role.
    ///
    /// # Errors
    ///
    /// When the machine has no such function.
    pub fn address(&self, role: &str) -> Result<String> {
        let place = self.places().find(|place| place.function.role == role);
        place
            .map(|place| place.address())
            .with_context(|| format!("topology {} has no function {role}", self.name))
    }

    /// Checks that the guest's kernel found the machine that this is: each function at its place, with a group of its own
    /// or a shared one.
    ///
    /// # Errors
    ///
    /// The first difference.
    pub(super) fn verify(&self, found: &[protocol::Function]) -> Result<()> {
        for place in self.places() {
            let (role, address) = (place.function.role, place.address());
            let function = found.iter().find(|function| function.address == address);
            let function = function
                .with_context(|| format!("the guest has no function {role} at {address}"))?;
            let ids = (function.vendor.as_str(), function.device.as_str());
            ensure!(
                place
                    .function
                    .model
                    .ids()
                    .is_none_or(|expected| expected == ids),
                "{role} at {address} has the ids {ids:?}"
            );
            let isolates = self.ports[place.port - 1].isolates;
            let as_expected = match self.iommu {
                Iommu::None => function.group.is_empty(),
                Iommu::Intel { .. } if isolates => function.group == [address.as_str()],
                Iommu::Intel { .. } => function.group.len() > 1,
            };
            ensure!(
                as_expected,
                "{role} at {address} is in an IOMMU group with {:?}",
                function.group
            );
        }
        Ok(())
    }

    /// Whether a process besides QEMU must see the guest's memory.
    pub fn shares_memory(&self) -> bool {
        self.places()
            .any(|place| place.function.model == Model::VfioUser)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_and_roles_are_unique() {
        let names: HashSet<_> = ALL.iter().map(|topology| topology.name).collect();
        assert_eq!(names.len(), ALL.len());
        for topology in ALL {
            let roles: HashSet<_> = topology.places().map(|place| place.function.role).collect();
            assert_eq!(roles.len(), topology.places().count(), "{}", topology.name);
        }
    }

    #[test]
    fn addresses_follow_from_the_place() {
        let topology = find("shared-group").unwrap();
        assert_eq!(topology.address("igb").unwrap(), "0000:01:00.0");
        assert_eq!(topology.address("sibling").unwrap(), "0000:01:00.1");
        assert_eq!(topology.address("igb-peer").unwrap(), "0000:02:00.0");
        assert!(topology.address("kernel-nic").is_err());
    }

    fn found(address: &str, device: &str, group: &[&str]) -> protocol::Function {
        let group = group.iter().map(|&member| member.to_owned()).collect();
        protocol::Function {
            address: address.into(),
            vendor: "0x8086".into(),
            device: device.into(),
            group,
        }
    }

    #[test]
    fn a_machine_whose_functions_have_their_own_groups_is_two_igb() {
        let (one, two) = ("0000:01:00.0", "0000:02:00.0");
        let machine = [found(one, "0x10c9", &[one]), found(two, "0x10c9", &[two])];
        find("two-igb").unwrap().verify(&machine).unwrap();
        find("no-iommu").unwrap().verify(&machine).unwrap_err();
        find("igb-kernel-nic")
            .unwrap()
            .verify(&machine)
            .unwrap_err();
        find("two-igb").unwrap().verify(&machine[..1]).unwrap_err();
    }

    #[test]
    fn a_group_of_one_is_not_shared() {
        let (igb, sibling, peer) = ("0000:01:00.0", "0000:01:00.1", "0000:02:00.0");
        let topology = find("shared-group").unwrap();
        let group = [igb, sibling];
        let shared = [
            found(igb, "0x10c9", &group),
            found(sibling, "0x10d3", &group),
            found(peer, "0x10c9", &[peer]),
        ];
        topology.verify(&shared).unwrap();
        let apart = [
            found(igb, "0x10c9", &[igb]),
            found(sibling, "0x10d3", &[sibling]),
            found(peer, "0x10c9", &[peer]),
        ];
        topology.verify(&apart).unwrap_err();
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        assert!(
            find("three-igb")
                .unwrap_err()
                .to_string()
                .contains("two-igb")
        );
    }
}
