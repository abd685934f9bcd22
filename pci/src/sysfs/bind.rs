//! Binding a function to vfio-pci by `driver_override`, and giving it back.
//!
//! No state is kept anywhere: clearing the override and probing again lets the kernel choose the
//! driver that it would have chosen at boot, and the result is looked at, not assumed.

use std::fmt;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Function, Sysfs, SysfsError, VFIO_PCI, link_name};
use crate::address::Address;

/// What clears a `driver_override`.
const NO_OVERRIDE: &str = "\n";

/// A function that is bound to vfio-pci now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// The driver that had it before; vfio-pci when there was nothing to do.
    pub former: Option<String>,
}

/// A function that was given back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GivenBack {
    /// The kernel driver that took it; none when no loaded driver knows the function.
    pub driver: Option<String>,
}

/// Why taking a function away would hurt somebody.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum InUse {
    /// An interface is up and has addresses.
    Addresses {
        /// The interface's name.
        interface: String,
        /// Its addresses, link-local ones left out.
        addresses: Vec<IpAddr>,
    },
    /// An interface belongs to a bridge, a bond or the like.
    Member {
        /// The interface's name.
        interface: String,
        /// What it belongs to.
        master: String,
    },
    /// The function's virtual functions would vanish.
    VirtualFunctions {
        /// How many there are.
        count: usize,
    },
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addresses {
                interface,
                addresses,
            } => {
                write!(f, "interface {interface} is up with")?;
                addresses.iter().try_for_each(|ip| write!(f, " {ip}"))
            }
            Self::Member { interface, master } => {
                write!(f, "interface {interface} belongs to {master}")
            }
            Self::VirtualFunctions { count: 1 } => f.write_str("it has a virtual function"),
            Self::VirtualFunctions { count } => write!(f, "it has {count} virtual functions"),
        }
    }
}

/// Use cases, separated by commas.
struct Uses<'a>(&'a [InUse]);

impl fmt::Display for Uses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, using) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{using}")?;
        }
        Ok(())
    }
}

/// A driver in an error message.
fn or_none(driver: &Option<String>) -> &str {
    driver.as_deref().unwrap_or("no driver")
}

/// A function that was not bound, or not given back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// Nothing is there.
    #[error("{address}: no such device; `failstop list` shows the network functions")]
    NoSuchDevice {
        /// Which function.
        address: Address,
    },
    /// It is something else. Binding a disk would take it away from its file systems.
    #[error("{address} is not a network function (its class is {class:#08x}); nothing was changed")]
    NotNetwork {
        /// Which function.
        address: Address,
        /// Its class code.
        class: u32,
    },
    /// The kernel has no vfio-pci.
    #[error(
        "vfio-pci is not loaded: `modprobe vfio-pci`, or boot a kernel that has CONFIG_VFIO_PCI"
    )]
    NoVfioPci,
    /// No IOMMU translates for it.
    #[error(
        "{address} has no IOMMU group: bound to vfio-pci it would be of no use. Turn the IOMMU on in \
         the firmware (VT-d, AMD-Vi, SMMU) and on the kernel's command line (intel_iommu=on)"
    )]
    NoIommu {
        /// Which function.
        address: Address,
    },
    /// Somebody needs it.
    #[error(
        "{address} is in use: {}; `--force` takes it away all the same",
        Uses(uses)
    )]
    InUse {
        /// Which function.
        address: Address,
        /// By what.
        uses: Vec<InUse>,
    },
    /// A process has it open; the kernel would wait for it.
    #[error(
        "{address} is open in process {}; end it first (`--force` asks it to give the device back, \
         and waits)",
        processes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    Open {
        /// Which function.
        address: Address,
        /// Process IDs.
        processes: Vec<u32>,
    },
    /// It cannot be given back, since vfio-pci does not have it.
    #[error(
        "{address} is bound to {}, not to vfio-pci; there is nothing to give back",
        or_none(driver)
    )]
    NotBound {
        /// Which function.
        address: Address,
        /// The kernel driver that has it.
        driver: Option<String>,
    },
    /// The user may not change bindings.
    #[error("no permission to write {}: binding drivers needs root (`sudo failstop ...`)", path.display())]
    Permission {
        /// Which file.
        path: PathBuf,
    },
    /// A step failed, and the binding was put back as far as it went.
    #[error("{address} could not be bound; it is with {} now", or_none(now))]
    Step {
        /// Which function.
        address: Address,
        /// The driver that has it after the clean-up.
        now: Option<String>,
        /// Which file could not be written, and why.
        #[source]
        source: SysfsError,
    },
    /// Every step went well, and yet another driver has it.
    #[error(
        "{address} should be with {wanted}, and is with {} now; see dmesg for why",
        or_none(now)
    )]
    NotTaken {
        /// Which function.
        address: Address,
        /// The driver that should have taken it.
        wanted: &'static str,
        /// The driver that has it after the clean-up.
        now: Option<String>,
    },
}

impl Sysfs {
    /// Binds a network function to vfio-pci. `force` takes one away that is in use.
    ///
    /// # Errors
    ///
    /// [`BindError`]; the former driver has the function again, or the error says what has it.
    pub fn bind(&self, address: Address, force: bool) -> Result<Bound, BindError> {
        let function = self.network_function(address)?;
        if function.is_bound_to_vfio() {
            return Ok(Bound {
                former: function.driver,
            });
        }
        if !self.driver_path(VFIO_PCI).exists() {
            return Err(BindError::NoVfioPci);
        }
        if function.group.is_none() {
            return Err(BindError::NoIommu { address });
        }
        let uses = self.uses(&function);
        if !uses.is_empty() && !force {
            return Err(BindError::InUse { address, uses });
        }
        let steps = self.rebind(address, VFIO_PCI, function.driver.as_deref());
        let now = self.driver(address);
        if steps.is_ok() && now.as_deref() == Some(VFIO_PCI) {
            return Ok(Bound {
                former: function.driver,
            });
        }
        let now = self.put_back(address);
        Err(match steps {
            Err(error) => refused(address, now, error),
            Ok(()) => BindError::NotTaken {
                address,
                wanted: VFIO_PCI,
                now,
            },
        })
    }

    /// Gives a function that is bound to vfio-pci back to the driver that the kernel chooses for
    /// it. `force` does not refuse when a process has it open; the call then blocks until that
    /// process closes it.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn unbind(&self, address: Address, force: bool) -> Result<GivenBack, BindError> {
        let function = self.network_function(address)?;
        if !function.is_bound_to_vfio() {
            return Err(BindError::NotBound {
                address,
                driver: function.driver,
            });
        }
        let processes = self.holders(&function);
        if !processes.is_empty() && !force {
            return Err(BindError::Open { address, processes });
        }
        self.rebind(address, NO_OVERRIDE, Some(VFIO_PCI))
            .map_err(|error| refused(address, self.driver(address), error))?;
        match self.driver(address) {
            // Its ID was written to vfio-pci's new_id, so that probing prefers vfio-pci.
            Some(driver) if driver == VFIO_PCI => Err(BindError::NotTaken {
                address,
                wanted: "its kernel driver",
                now: Some(driver),
            }),
            driver => Ok(GivenBack { driver }),
        }
    }

    fn network_function(&self, address: Address) -> Result<Function, BindError> {
        let function = self
            .function(address)
            .map_err(|_| BindError::NoSuchDevice { address })?;
        if !function.is_network() {
            return Err(BindError::NotNetwork {
                address,
                class: function.identity.class,
            });
        }
        Ok(function)
    }

    /// Says which driver a function is for, takes it away from `from`, and lets the kernel probe.
    fn rebind(
        &self,
        address: Address,
        driver_override: &str,
        from: Option<&str>,
    ) -> Result<(), SysfsError> {
        let name = address.to_string();
        self.write(
            &self.device_path(address).join("driver_override"),
            driver_override,
        )?;
        if let Some(from) = from {
            self.write(&self.driver_path(from).join("unbind"), &name)?;
        }
        self.write(&self.sys.join("bus/pci/drivers_probe"), &name)
    }

    /// Clears the override and lets the kernel find the former driver again; says what has it then.
    fn put_back(&self, address: Address) -> Option<String> {
        if let Err(error) = self.rebind(address, NO_OVERRIDE, None) {
            log::warn!("{address}: {error}: {}", error.source);
        }
        self.driver(address)
    }

    fn driver(&self, address: Address) -> Option<String> {
        link_name(&self.device_path(address).join("driver"))
    }

    fn write(&self, path: &Path, text: &str) -> Result<(), SysfsError> {
        (self.write)(path, text).map_err(|source| SysfsError {
            path: path.to_owned(),
            action: "write",
            source,
        })
    }

    fn uses(&self, function: &Function) -> Vec<InUse> {
        let all = (self.addresses)();
        let mut uses = Vec::new();
        for interface in &function.interfaces {
            if let Some(master) = &interface.master {
                uses.push(InUse::Member {
                    interface: interface.name.clone(),
                    master: master.clone(),
                });
            }
            let addresses: Vec<IpAddr> = all
                .iter()
                .filter(|(name, ip)| *name == interface.name && !is_link_local(ip))
                .map(|(_, ip)| *ip)
                .collect();
            if interface.up && !addresses.is_empty() {
                uses.push(InUse::Addresses {
                    interface: interface.name.clone(),
                    addresses,
                });
            }
        }
        if !function.virtual_functions.is_empty() {
            uses.push(InUse::VirtualFunctions {
                count: function.virtual_functions.len(),
            });
        }
        uses
    }

    /// The processes that have a function's group or character device open, as far as this user
    /// may see.
    fn holders(&self, function: &Function) -> Vec<u32> {
        let mut files: Vec<PathBuf> = self.cdev_path(function.address).into_iter().collect();
        if let Some(group) = &function.group {
            files.push(self.group_path(group.number));
        }
        let Ok(processes) = fs::read_dir(&self.proc) else {
            return Vec::new();
        };
        let mut holders: Vec<u32> = processes
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|process: &u32| {
                let descriptors = fs::read_dir(self.proc.join(format!("{process}/fd")));
                descriptors.into_iter().flatten().flatten().any(|entry| {
                    fs::read_link(entry.path()).is_ok_and(|file| files.contains(&file))
                })
            })
            .collect();
        holders.sort_unstable();
        holders
    }
}

/// An address that the kernel gives to every interface that is up says nothing of its use.
fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn refused(address: Address, now: Option<String>, error: SysfsError) -> BindError {
    if error.source.kind() == io::ErrorKind::PermissionDenied {
        BindError::Permission { path: error.path }
    } else {
        BindError::Step {
            address,
            now,
            source: error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::*;

    const ETHERNET: u32 = 0x02_0000;

    /// An 82576 that igb has, in group 6, on a machine with vfio-pci loaded.
    fn igb() -> (Tree, Address) {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some("igb"), Some(6));
        tree.driver(VFIO_PCI);
        tree.file("0000:01:00.0", "default_driver", "igb");
        (tree, address)
    }

    #[test]
    fn bind_and_unbind_are_a_round_trip() {
        let (tree, address) = igb();
        let sysfs = tree.sysfs();
        let bound = sysfs.bind(address, false).unwrap();
        assert_eq!(bound.former.as_deref(), Some("igb"));
        assert!(sysfs.function(address).unwrap().is_bound_to_vfio());
        let back = sysfs.unbind(address, false).unwrap();
        assert_eq!(back.driver.as_deref(), Some("igb"));
    }

    #[test]
    fn binding_twice_changes_nothing() {
        let (tree, address) = igb();
        tree.sysfs().bind(address, false).unwrap();
        let again = tree.sysfs().bind(address, false).unwrap();
        assert_eq!(again.former.as_deref(), Some(VFIO_PCI));
    }

    #[test]
    fn function_without_driver_can_be_bound() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, None, Some(6));
        tree.driver(VFIO_PCI);
        assert_eq!(tree.sysfs().bind(address, false).unwrap().former, None);
        assert_eq!(tree.sysfs().unbind(address, false).unwrap().driver, None);
    }

    #[test]
    fn missing_device_is_refused() {
        let (tree, _) = igb();
        assert!(matches!(
            tree.sysfs().bind("0000:09:00.0".parse().unwrap(), false),
            Err(BindError::NoSuchDevice { .. })
        ));
    }

    #[test]
    fn disk_is_refused_even_by_force() {
        let (tree, _) = igb();
        let disk = tree.function("0000:00:1f.2", 0x01_0601, Some("ahci"), Some(5));
        let error = tree.sysfs().bind(disk, true).unwrap_err();
        assert!(matches!(
            error,
            BindError::NotNetwork {
                class: 0x01_0601,
                ..
            }
        ));
        let function = tree.sysfs().function(disk).unwrap();
        assert_eq!(function.driver.as_deref(), Some("ahci"));
    }

    #[test]
    fn vfio_pci_that_is_not_loaded_is_said() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some("igb"), Some(6));
        let error = tree.sysfs().bind(address, false).unwrap_err();
        assert!(error.to_string().contains("modprobe vfio-pci"));
    }

    #[test]
    fn function_without_iommu_is_left_alone() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some("igb"), None);
        tree.driver(VFIO_PCI);
        assert!(matches!(
            tree.sysfs().bind(address, false),
            Err(BindError::NoIommu { .. })
        ));
    }

    #[test]
    fn interface_with_an_address_is_refused_by_name() {
        let (tree, address) = igb();
        tree.interface("0000:01:00.0", "eth0", true);
        let mut sysfs = tree.sysfs();
        sysfs.addresses = || {
            vec![
                ("eth0".to_owned(), "fe80::1".parse().unwrap()),
                ("eth0".to_owned(), "192.0.2.7".parse().unwrap()),
                ("lo".to_owned(), "127.0.0.1".parse().unwrap()),
            ]
        };
        let error = sysfs.bind(address, false).unwrap_err().to_string();
        assert!(error.contains("eth0 is up with 192.0.2.7;"), "{error}");
        assert!(sysfs.bind(address, true).is_ok());
    }

    #[test]
    fn interface_with_only_a_link_local_address_is_not_in_use() {
        let (tree, address) = igb();
        tree.interface("0000:01:00.0", "eth0", true);
        let mut sysfs = tree.sysfs();
        sysfs.addresses = || vec![("eth0".to_owned(), "fe80::1".parse().unwrap())];
        assert!(sysfs.bind(address, false).is_ok());
    }

    #[test]
    fn member_of_a_bridge_is_refused() {
        let (tree, address) = igb();
        tree.interface("0000:01:00.0", "eth0", false);
        tree.link("0000:01:00.0", "net/eth0/master", "../br0");
        let error = tree.sysfs().bind(address, false).unwrap_err().to_string();
        assert!(error.contains("eth0 belongs to br0"), "{error}");
    }

    #[test]
    fn an_interface_that_a_vlan_is_stacked_on_is_refused() {
        let (tree, address) = igb();
        tree.interface("0000:01:00.0", "eth0", true);
        tree.link("0000:01:00.0", "net/eth0/upper_eth0.10", "../eth0.10");
        let error = tree.sysfs().bind(address, false).unwrap_err().to_string();
        assert!(error.contains("eth0 belongs to eth0.10"), "{error}");
    }

    #[test]
    fn physical_function_with_virtual_functions_is_refused() {
        let (tree, address) = igb();
        tree.link("0000:01:00.0", "virtfn0", "../0000:01:10.0");
        let error = tree.sysfs().bind(address, false).unwrap_err().to_string();
        assert!(error.contains("a virtual function"), "{error}");
    }

    #[test]
    fn failed_probe_gives_the_function_back() {
        let (tree, address) = igb();
        tree.file("0000:01:00.0", "refuses", VFIO_PCI);
        let error = tree.sysfs().bind(address, false).unwrap_err();
        assert!(
            matches!(&error, BindError::NotTaken { now: Some(now), .. } if now == "igb"),
            "{error}"
        );
    }

    #[test]
    fn failed_step_gives_the_function_back() {
        let (tree, address) = igb();
        fs::remove_file(tree.path("sys/bus/pci/drivers/igb/unbind")).unwrap();
        let error = tree.sysfs().bind(address, false).unwrap_err();
        assert!(
            matches!(&error, BindError::Step { now: Some(now), .. } if now == "igb"),
            "{error}"
        );
        let text = tree.path("sys/bus/pci/devices/0000:01:00.0/driver_override");
        assert_eq!(fs::read_to_string(text).unwrap(), "\n");
    }

    #[test]
    fn ordinary_user_is_told_that_root_is_needed() {
        let (tree, address) = igb();
        let mut sysfs = tree.sysfs();
        sysfs.write = |_, _| Err(io::ErrorKind::PermissionDenied.into());
        let error = sysfs.bind(address, false).unwrap_err();
        assert!(matches!(&error, BindError::Permission { .. }));
        assert!(error.to_string().contains("driver_override"));
    }

    #[test]
    fn giving_back_what_a_kernel_driver_has_is_refused() {
        let (tree, address) = igb();
        let error = tree.sysfs().unbind(address, false).unwrap_err();
        assert!(error.to_string().contains("bound to igb"));
    }

    #[test]
    fn giving_back_an_open_function_names_the_process() {
        let (tree, address) = igb();
        let sysfs = tree.sysfs();
        sysfs.bind(address, false).unwrap();
        let descriptors = tree.path("proc/4711/fd");
        fs::create_dir_all(&descriptors).unwrap();
        std::os::unix::fs::symlink(tree.path("dev/vfio/6"), descriptors.join("3")).unwrap();
        let error = sysfs.unbind(address, false).unwrap_err();
        assert!(error.to_string().contains("process 4711"), "{error}");
        assert!(sysfs.unbind(address, true).is_ok());
    }

    #[test]
    fn vfio_pci_that_takes_it_again_is_an_error() {
        let (tree, address) = igb();
        tree.sysfs().bind(address, false).unwrap();
        tree.file("0000:01:00.0", "default_driver", VFIO_PCI);
        assert!(matches!(
            tree.sysfs().unbind(address, false),
            Err(BindError::NotTaken { .. })
        ));
    }
}
