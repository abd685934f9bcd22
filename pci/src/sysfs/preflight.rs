//! What can be known before a function is opened, so that a refusal names its cause (R13).

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

use super::{Group, Sysfs, VFIO_PCI};
use crate::address::Address;

/// A function that can be opened, as far as sysfs shows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// Which function.
    pub address: Address,
    /// Its IOMMU group.
    pub group: u32,
    /// Its character device, where the kernel has those.
    pub cdev: Option<PathBuf>,
}

/// A function of somebody's group, and what stands against it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sibling {
    /// Where it is.
    pub address: Address,
    /// The kernel driver that it is bound to.
    pub driver: Option<String>,
}

impl fmt::Display for Sibling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Some(driver) => write!(f, "{} ({driver})", self.address),
            None => write!(f, "{} (no driver)", self.address),
        }
    }
}

/// Siblings, separated by commas.
struct Names<'a>(&'a [Sibling]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, sibling) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{sibling}")?;
        }
        Ok(())
    }
}

/// A function that cannot be used, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum NotUsable {
    /// Nothing is there.
    #[error("{address}: no such device; `failstop list` shows the network functions")]
    NoSuchDevice {
        /// Which function.
        address: Address,
    },
    /// A kernel driver has it, or none.
    #[error(
        "{address} is bound to {}, not to vfio-pci; bind it with `failstop bind {address}`",
        driver.as_deref().unwrap_or("no driver")
    )]
    NotBound {
        /// Which function.
        address: Address,
        /// The kernel driver that has it.
        driver: Option<String>,
    },
    /// No IOMMU translates for it.
    #[error(
        "{address} has no IOMMU group: without an IOMMU nothing keeps it from other memory. Turn the \
         IOMMU on in the firmware (VT-d, AMD-Vi, SMMU) and on the kernel's command line (intel_iommu=on)"
    )]
    NoIommu {
        /// Which function.
        address: Address,
    },
    /// It is in no-IOMMU mode.
    #[error(
        "{address} is in no-IOMMU mode ({}): nothing revokes its DMA. This comes later; boot with an \
         IOMMU instead",
        path.display()
    )]
    NoIommuMode {
        /// Which function.
        address: Address,
        /// Its group's file.
        path: PathBuf,
    },
    /// Other functions of its group are bound to kernel drivers that issue DMA (C23).
    #[error(
        "{address}: IOMMU group {group} is not viable: the IOMMU cannot tell {address} from {}. Bind \
         these to vfio-pci too, or leave them without a driver",
        Names(siblings)
    )]
    GroupNotViable {
        /// Which function.
        address: Address,
        /// Its group's number.
        group: u32,
        /// Every function in the way.
        siblings: Vec<Sibling>,
    },
    /// Other functions of its group, not driven by this process, may issue DMA (C37).
    #[error(
        "{address}: bus mastering is on in {} of IOMMU group {group}, which this process does not \
         drive: it could reach the memory of {address}. Stop whoever drives it, or reset it",
        Names(siblings)
    )]
    ForeignBusMaster {
        /// Which function.
        address: Address,
        /// Its group's number.
        group: u32,
        /// Every function in the way.
        siblings: Vec<Sibling>,
    },
    /// The kernel has no character device for it.
    #[error(
        "{address} has no character device in /dev/vfio/devices: this kernel was built without \
         VFIO_DEVICE_CDEV; use `--iommu container`"
    )]
    NoCharacterDevice {
        /// Which function.
        address: Address,
    },
}

/// Drivers that the kernel lets share a group with user space: they issue no DMA of their own.
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

impl Sysfs {
    /// Checks that a function can be opened, as far as sysfs shows.
    ///
    /// `ours` names the functions that this process drives: their bus mastering is no obstacle.
    ///
    /// # Errors
    ///
    /// [`NotUsable`].
    pub fn preflight(&self, address: Address, ours: &[Address]) -> Result<Ready, NotUsable> {
        let function = self
            .function(address)
            .map_err(|_| NotUsable::NoSuchDevice { address })?;
        if !function.is_bound_to_vfio() {
            // Without an IOMMU binding does not help, so that comes first.
            return Err(match function.group {
                None => NotUsable::NoIommu { address },
                Some(_) => NotUsable::NotBound {
                    address,
                    driver: function.driver,
                },
            });
        }
        let group = function.group.ok_or(NotUsable::NoIommu { address })?;
        if group.noiommu {
            return Err(NotUsable::NoIommuMode {
                address,
                path: self.noiommu_path(group.number),
            });
        }
        check_members(address, &group, ours)?;
        Ok(Ready {
            address,
            group: group.number,
            cdev: self.cdev_path(address),
        })
    }
}

fn check_members(address: Address, group: &Group, ours: &[Address]) -> Result<(), NotUsable> {
    let siblings = |against: &dyn Fn(&super::Member) -> bool| -> Vec<Sibling> {
        group
            .members
            .iter()
            .filter(|member| member.address != address && against(member))
            .map(|member| Sibling {
                address: member.address,
                driver: member.driver.clone(),
            })
            .collect()
    };
    let bound = siblings(&|member| {
        member
            .driver
            .as_deref()
            .is_some_and(|driver| !HARMLESS.contains(&driver))
    });
    if !bound.is_empty() {
        return Err(NotUsable::GroupNotViable {
            address,
            group: group.number,
            siblings: bound,
        });
    }
    // A bridge must be a bus master to carry what is behind it; it issues nothing by itself.
    let masters = siblings(&|member| {
        !member.bridge && member.bus_master == Some(true) && !ours.contains(&member.address)
    });
    if !masters.is_empty() {
        return Err(NotUsable::ForeignBusMaster {
            address,
            group: group.number,
            siblings: masters,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::fake::Tree;
    use super::*;

    const ETHERNET: u32 = 0x02_0000;

    /// Two functions of one slot in one group; the first is ours to open.
    fn shared_group(driver: Option<&str>) -> (Tree, Address) {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some(VFIO_PCI), Some(6));
        tree.function("0000:01:00.1", ETHERNET, driver, Some(6));
        (tree, address)
    }

    #[test]
    fn bound_function_alone_in_its_group_is_ready() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some(VFIO_PCI), Some(6));
        fs::create_dir_all(tree.device("0000:01:00.0").join("vfio-dev/vfio3")).unwrap();
        let ready = tree.sysfs().preflight(address, &[]).unwrap();
        assert_eq!(ready.group, 6);
        assert_eq!(ready.cdev, Some(tree.path("dev/vfio/devices/vfio3")));
    }

    #[test]
    fn missing_device_is_named() {
        let error = Tree::new()
            .sysfs()
            .preflight("0000:09:00.0".parse().unwrap(), &[])
            .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("0000:09:00.0: no such device")
        );
    }

    /// (R13)
    #[test]
    fn kernel_driver_is_named_with_what_to_do() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some("igb"), Some(6));
        let error = tree
            .sysfs()
            .preflight(address, &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("bound to igb") && error.contains("failstop bind 0000:01:00.0"));
    }

    #[test]
    fn function_without_iommu_is_refused() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some(VFIO_PCI), None);
        assert_eq!(
            tree.sysfs().preflight(address, &[]),
            Err(NotUsable::NoIommu { address })
        );
    }

    #[test]
    fn noiommu_mode_is_refused_by_its_file() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some(VFIO_PCI), Some(0));
        fs::write(
            tree.path("sys/kernel/iommu_groups/0/name"),
            "vfio-noiommu\n",
        )
        .unwrap();
        let error = tree
            .sysfs()
            .preflight(address, &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("dev/vfio/noiommu-0"), "{error}");
    }

    #[test]
    fn c23_every_sibling_and_its_driver_is_named() {
        let (tree, address) = shared_group(Some("e1000e"));
        tree.function("0000:01:00.2", ETHERNET, Some("igb"), Some(6));
        let error = tree
            .sysfs()
            .preflight(address, &[])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("0000:01:00.1 (e1000e), 0000:01:00.2 (igb)"),
            "{error}"
        );
    }

    #[test]
    fn c23_harmless_drivers_do_not_spoil_a_group() {
        let (tree, address) = shared_group(Some("pci-stub"));
        assert!(tree.sysfs().preflight(address, &[]).is_ok());
    }

    /// The domain is the unit of protection (R1) (R13).
    #[test]
    fn c37_foreign_bus_master_is_refused_by_name() {
        let (tree, address) = shared_group(None);
        tree.command("0000:01:00.1", 0x0106);
        let error = tree.sysfs().preflight(address, &[]).unwrap_err();
        assert!(matches!(
            &error,
            NotUsable::ForeignBusMaster { group: 6, .. }
        ));
        assert!(
            error.to_string().contains("0000:01:00.1 (no driver)"),
            "{error}"
        );
    }

    #[test]
    fn c37_bus_master_of_our_own_is_no_obstacle() {
        let (tree, address) = shared_group(Some(VFIO_PCI));
        tree.command("0000:01:00.1", 0x0106);
        let ours = ["0000:01:00.1".parse().unwrap()];
        assert!(tree.sysfs().preflight(address, &ours).is_ok());
    }

    #[test]
    fn c37_bridge_may_be_a_bus_master() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", ETHERNET, Some(VFIO_PCI), Some(6));
        tree.function("0000:00:1c.0", 0x06_0400, Some("pcieport"), Some(6));
        tree.command("0000:00:1c.0", 0x0107);
        assert!(tree.sysfs().preflight(address, &[]).is_ok());
    }
}
