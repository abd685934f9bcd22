//! One PCI function as sysfs shows it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pci_ids::{Device, FromId, Vendor};

use super::{Sysfs, SysfsError, VFIO_PCI, link_name, list, read};
use crate::address::Address;
use crate::config::{Command, Identity, offset};

/// A PCI function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Its identification.
    pub identity: Identity,
    /// The kernel driver that it is bound to.
    pub driver: Option<String>,
    /// Its IOMMU group; none without an IOMMU.
    pub group: Option<Group>,
    /// How the kernel can reset it, best first (`flr`, `pm`, `bus` ...).
    pub reset_methods: Vec<String>,
    /// The NUMA node that it is attached to, where the machine has several.
    pub numa_node: Option<u32>,
    /// Its PCIe link.
    pub link: Option<Link>,
    /// Its network interfaces, while a kernel driver has it.
    pub interfaces: Vec<Interface>,
    /// The physical function that it is a virtual function of.
    pub physical_function: Option<Address>,
    /// Its virtual functions.
    pub virtual_functions: Vec<Address>,
    /// How many virtual functions it can have.
    pub total_virtual_functions: u32,
}

/// An IOMMU group: functions that the IOMMU cannot tell apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Its number.
    pub number: u32,
    /// There is no IOMMU behind it (no-IOMMU mode).
    pub noiommu: bool,
    /// Every function in it, in the order of their addresses.
    pub members: Vec<Member>,
}

/// A function as a member of an IOMMU group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Where it is.
    pub address: Address,
    /// The kernel driver that it is bound to.
    pub driver: Option<String>,
    /// It is a PCI bridge: its bus-master bit is about what is behind it.
    pub bridge: bool,
    /// Its Bus Master Enable; none when the function does not answer.
    pub bus_master: Option<bool>,
}

/// A PCIe link in the kernel's words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Speed now, like `2.5 GT/s PCIe`.
    pub speed: String,
    /// Lanes in use.
    pub width: u32,
    /// The highest speed.
    pub max_speed: String,
    /// Lanes at the most.
    pub max_width: u32,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// It is administratively up.
    pub up: bool,
    /// The bridge, bond or other device that it belongs to.
    pub master: Option<String>,
}

impl Function {
    /// Whether it is a network controller: base class 0x02.
    #[must_use]
    pub fn is_network(&self) -> bool {
        self.identity.class >> 16 == 0x02
    }

    /// Whether it is bound to vfio-pci.
    #[must_use]
    pub fn is_bound_to_vfio(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_PCI)
    }

    /// Its vendor's name in the PCI ID database.
    #[must_use]
    pub fn vendor_name(&self) -> Option<&'static str> {
        Vendor::from_id(self.identity.vendor).map(Vendor::name)
    }

    /// Its name in the PCI ID database.
    #[must_use]
    pub fn device_name(&self) -> Option<&'static str> {
        Device::from_vid_pid(self.identity.vendor, self.identity.device).map(Device::name)
    }
}

impl Sysfs {
    /// Describes a function.
    ///
    /// # Errors
    ///
    /// [`SysfsError`] when there is none at `address`, or it goes away meanwhile.
    pub fn function(&self, address: Address) -> Result<Function, SysfsError> {
        let path = self.device_path(address);
        let identity = Identity {
            vendor: number(&path, "vendor")?,
            device: number(&path, "device")?,
            revision: number(&path, "revision").unwrap_or(0),
            class: number(&path, "class")?,
            subsystem_vendor: number(&path, "subsystem_vendor").unwrap_or(0),
            subsystem_device: number(&path, "subsystem_device").unwrap_or(0),
        };
        let names = list(&path)?;
        let mut virtual_functions: Vec<Address> = names
            .iter()
            .filter(|name| name.starts_with("virtfn"))
            .filter_map(|name| link_name(&path.join(name))?.parse().ok())
            .collect();
        virtual_functions.sort_unstable();
        Ok(Function {
            address,
            identity,
            driver: link_name(&path.join("driver")),
            group: self.group(&path),
            // The file is missing where the kernel knows no way to reset the function.
            reset_methods: read(&path.join("reset_method"))
                .map(|text| text.split_whitespace().map(str::to_owned).collect())
                .unwrap_or_default(),
            numa_node: number(&path, "numa_node").ok(),
            link: link(&path),
            interfaces: interfaces(&path),
            physical_function: link_name(&path.join("physfn")).and_then(|name| name.parse().ok()),
            virtual_functions,
            total_virtual_functions: number(&path, "sriov_totalvfs").unwrap_or(0),
        })
    }

    fn group(&self, device: &Path) -> Option<Group> {
        let group = device.join("iommu_group");
        let number = link_name(&group)?.parse().ok()?;
        let mut members: Vec<Member> = list(&group.join("devices"))
            .unwrap_or_default()
            .iter()
            .filter_map(|name| name.parse().ok())
            .map(|address| self.member(address))
            .collect();
        members.sort_unstable_by_key(|member| member.address);
        Some(Group {
            number,
            noiommu: read(&group.join("name")).is_ok_and(|name| name == "vfio-noiommu"),
            members,
        })
    }

    fn member(&self, address: Address) -> Member {
        let path = self.device_path(address);
        Member {
            address,
            driver: link_name(&path.join("driver")),
            bridge: number::<u32>(&path, "class").is_ok_and(|class| class >> 8 == 0x0604),
            bus_master: bus_master(&path),
        }
    }
}

fn interfaces(device: &Path) -> Vec<Interface> {
    // Directly below the function, or below a device that its driver made of it (virtio). Links
    // lead to other functions.
    let below = list(device).unwrap_or_default().into_iter();
    let children = below
        .map(|name| device.join(name))
        .filter(|path| path.symlink_metadata().is_ok_and(|entry| entry.is_dir()));
    let folders =
        std::iter::once(device.join("net")).chain(children.map(|child| child.join("net")));
    folders
        .flat_map(|net| {
            let names = list(&net).unwrap_or_default();
            names.into_iter().map(move |name| (net.join(&name), name))
        })
        .map(|(path, name)| Interface {
            // IFF_UP of linux/if.h.
            up: number::<u32>(&path, "flags").is_ok_and(|flags| flags & 1 != 0),
            master: link_name(&path.join("master")).or_else(|| upper(&path)),
            name,
        })
        .collect()
}

/// A VLAN, bridge or other interface that is stacked on this one.
fn upper(interface: &Path) -> Option<String> {
    let entries = list(interface).unwrap_or_default();
    let mut uppers = entries
        .iter()
        .filter_map(|entry| entry.strip_prefix("upper_"));
    uppers.next().map(str::to_owned)
}

/// Reads Bus Master Enable from a function's configuration space, whose first 64 bytes anybody may
/// read. Here nothing tells which bits must be set, so only all-ones counts as no answer.
fn bus_master(device: &Path) -> Option<bool> {
    let file = File::open(device.join("config")).ok()?;
    let mut word = [0; 2];
    file.read_exact_at(&mut word, offset::COMMAND.into()).ok()?;
    let word = u16::from_le_bytes(word);
    (word != u16::MAX).then(|| Command::from_bits_retain(word).contains(Command::BUS_MASTER))
}

/// A link's four files. The kernel says width 255 where there is no link.
fn link(device: &Path) -> Option<Link> {
    let width = |name| {
        let width: u32 = number(device, name).ok()?;
        (width < 255).then_some(width)
    };
    Some(Link {
        speed: read(&device.join("current_link_speed")).ok()?,
        width: width("current_link_width")?,
        max_speed: read(&device.join("max_link_speed")).ok()?,
        max_width: width("max_link_width")?,
    })
}

/// A number in a file: hexadecimal after 0x, decimal otherwise. One that does not fit, such as
/// NUMA node -1 for "none", is an error.
fn number<T: TryFrom<u64>>(device: &Path, name: &str) -> Result<T, SysfsError> {
    let path = device.join(name);
    let text = read(&path)?;
    let value = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    value
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| SysfsError {
            path,
            action: "read",
            source: std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                format!("'{text}' is not a number that fits"),
            ),
        })
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::*;

    #[test]
    fn network_functions_are_listed_in_order() {
        let tree = Tree::new();
        tree.function("0000:02:00.0", 0x02_0000, Some("e1000e"), Some(7));
        tree.function("0000:01:00.0", 0x02_0000, Some("igb"), Some(6));
        tree.function("0000:00:1f.2", 0x01_0601, Some("ahci"), Some(5));
        let functions = tree.sysfs().network_functions().unwrap();
        let seen: Vec<String> = functions.iter().map(|f| f.address.to_string()).collect();
        assert_eq!(seen, ["0000:01:00.0", "0000:02:00.0"]);
    }

    #[test]
    fn interfaces_below_a_virtio_device_are_seen_and_those_of_virtual_functions_are_not() {
        let tree = Tree::new();
        let address = tree.function("0000:00:03.0", 0x02_0000, Some("virtio-pci"), Some(3));
        tree.interface("0000:00:03.0/virtio2", "eth0", true);
        tree.function("0000:01:10.0", 0x02_0000, Some("igbvf"), Some(9));
        tree.interface("0000:01:10.0", "vf0", true);
        tree.link("0000:00:03.0", "virtfn0", "../0000:01:10.0");
        let function = tree.sysfs().function(address).unwrap();
        let names: Vec<&str> = function
            .interfaces
            .iter()
            .map(|i| i.name.as_str())
            .collect();
        assert_eq!(names, ["eth0"]);
    }

    #[test]
    fn everything_about_a_function_is_read() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", 0x02_0000, Some("igb"), Some(6));
        tree.file("0000:01:00.0", "reset_method", "flr pm bus\n");
        tree.file("0000:01:00.0", "numa_node", "1\n");
        tree.file("0000:01:00.0", "sriov_totalvfs", "7\n");
        tree.file("0000:01:00.0", "current_link_speed", "2.5 GT/s PCIe\n");
        tree.file("0000:01:00.0", "current_link_width", "2\n");
        tree.file("0000:01:00.0", "max_link_speed", "2.5 GT/s PCIe\n");
        tree.file("0000:01:00.0", "max_link_width", "4\n");
        tree.interface("0000:01:00.0", "eth0", true);
        let function = tree.sysfs().function(address).unwrap();
        assert_eq!(function.identity.vendor, 0x8086);
        assert_eq!(function.identity.device, 0x10c9);
        assert_eq!(function.driver.as_deref(), Some("igb"));
        assert_eq!(function.reset_methods, ["flr", "pm", "bus"]);
        assert_eq!(function.numa_node, Some(1));
        assert_eq!(function.total_virtual_functions, 7);
        let link = function.link.unwrap();
        assert_eq!((link.width, link.max_width), (2, 4));
        assert_eq!(function.interfaces[0].name, "eth0");
        assert!(function.interfaces[0].up);
    }

    #[test]
    fn group_members_show_driver_and_bus_master() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", 0x02_0000, Some(VFIO_PCI), Some(6));
        tree.function("0000:01:00.1", 0x02_0000, Some("e1000e"), Some(6));
        tree.command("0000:01:00.1", 0x0107);
        tree.function("0000:01:00.2", 0x02_0000, None, Some(6));
        tree.command("0000:01:00.2", 0xffff);
        let group = tree.sysfs().function(address).unwrap().group.unwrap();
        assert_eq!((group.number, group.noiommu), (6, false));
        let seen: Vec<_> = group
            .members
            .iter()
            .map(|member| (member.driver.as_deref(), member.bus_master))
            .collect();
        assert_eq!(
            seen,
            [
                (Some(VFIO_PCI), Some(false)),
                (Some("e1000e"), Some(true)),
                (None, None)
            ]
        );
    }

    #[test]
    fn names_come_from_the_database() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", 0x02_0000, None, None);
        let function = tree.sysfs().function(address).unwrap();
        assert_eq!(function.vendor_name(), Some("Intel Corporation"));
        assert_eq!(
            function.device_name(),
            Some("82576 Gigabit Network Connection")
        );
    }

    #[test]
    fn no_numa_node_link_or_group_are_none() {
        let tree = Tree::new();
        let address = tree.function("0000:01:00.0", 0x02_0000, None, None);
        tree.file("0000:01:00.0", "numa_node", "-1\n");
        tree.file("0000:01:00.0", "current_link_speed", "Unknown\n");
        tree.file("0000:01:00.0", "current_link_width", "255\n");
        let function = tree.sysfs().function(address).unwrap();
        assert_eq!(function.numa_node, None);
        assert_eq!(function.link, None);
        assert_eq!(function.group, None);
    }

    #[test]
    fn virtual_functions_are_linked_both_ways() {
        let tree = Tree::new();
        let pf = tree.function("0000:01:00.0", 0x02_0000, Some("igb"), Some(6));
        let vf = tree.function("0000:01:10.0", 0x02_0000, None, Some(8));
        tree.link("0000:01:00.0", "virtfn0", "../0000:01:10.0");
        tree.link("0000:01:10.0", "physfn", "../0000:01:00.0");
        let sysfs = tree.sysfs();
        assert_eq!(sysfs.function(pf).unwrap().virtual_functions, [vf]);
        assert_eq!(sysfs.function(vf).unwrap().physical_function, Some(pf));
    }
}
