//! `failstop info`: everything about one device.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use failstop::name::DeviceName;
use failstop::open::IommuChoice;
use failstop::pci::address::Address;
use failstop::pci::capabilities::{Capabilities, LinkSpeed, List};
use failstop::pci::sysfs::{Function, Sysfs};
use failstop::pci::transport::Transport;
use nix::unistd::{AccessFlags, access};
use serde::Serialize;

use crate::emulated::Emulated;
use crate::exit::Exit;
use crate::run::Target;
use crate::served::Served;

/// Options of `failstop info`.
#[derive(Args, Debug)]
pub(crate) struct InfoArgs {
    /// The device: a PCI address (0000:01:00.0), vfio-user:PATH, or emu:82576
    device: Target,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

/// What is printed, in its order.
#[derive(Serialize)]
struct Info {
    address: String,
    id: String,
    class: String,
    vendor: Option<&'static str>,
    name: Option<&'static str>,
    subsystem: String,
    revision: u8,
    driver: Option<String>,
    interfaces: Vec<String>,
    iommu_group: Option<u32>,
    group_members: Vec<MemberInfo>,
    reset_methods: Vec<String>,
    numa_node: Option<u32>,
    link: Option<LinkInfo>,
    physical_function: Option<String>,
    virtual_functions: Vec<String>,
    total_virtual_functions: u32,
    /// None when configuration space may not be read.
    capabilities: Option<Vec<CapabilityInfo>>,
    /// Why there are no capabilities.
    capabilities_error: Option<String>,
    flr: Option<bool>,
    power_state: Option<String>,
    transactions_pending: Option<bool>,
    msix_vectors: Option<u16>,
    ats_enabled: Option<bool>,
    strength: Strength,
    transports: Vec<TransportInfo>,
}

#[derive(Serialize)]
struct MemberInfo {
    address: String,
    driver: Option<String>,
    bridge: bool,
    bus_master: Option<bool>,
}

#[derive(Serialize)]
struct LinkInfo {
    speed: String,
    width: u32,
    max_speed: String,
    max_width: u32,
}

#[derive(Serialize)]
pub(crate) struct CapabilityInfo {
    offset: u16,
    id: u16,
    extended: bool,
    name: &'static str,
    detail: Option<String>,
}

/// How strongly unmapping would revoke the function's DMA.
#[derive(Serialize)]
pub(crate) struct Strength {
    pub(crate) verdict: &'static str,
    pub(crate) reason: &'static str,
}

#[derive(Serialize)]
struct TransportInfo {
    name: &'static str,
    usable: bool,
    /// What is missing.
    reason: Option<String>,
}

/// Prints everything about a function.
pub(crate) fn info(args: &InfoArgs, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    let address = match &args.device {
        Target::Device(DeviceName::Pci(address)) => *address,
        Target::Device(name) => {
            let transport = failstop::open::transport(name, IommuChoice::default(), &[])?;
            return served(args, name.to_string(), &*transport, out);
        }
        Target::Emulated(name) => {
            let mut emulated = Emulated::start(name)?;
            let transport = emulated.transport()?;
            return served(args, name.to_string(), &*transport, out);
        }
    };
    let function = sysfs.function(address).with_context(|| {
        format!("{address}: no such device; `failstop list` shows the network functions")
    })?;
    let info = Info::new(sysfs, &function);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &info)?;
        writeln!(out)?;
    } else {
        info.print(out)?;
    }
    Ok(Exit::Clean)
}

fn served(
    args: &InfoArgs,
    name: String,
    transport: &dyn Transport,
    out: &mut dyn Write,
) -> Result<Exit> {
    let served = Served::new(name, transport)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &served)?;
        writeln!(out)?;
    } else {
        served.print(out)?;
    }
    Ok(Exit::Clean)
}

impl Info {
    fn new(sysfs: &Sysfs, function: &Function) -> Self {
        let identity = function.identity;
        let group = function.group.as_ref();
        let parsed = capabilities(sysfs, function.address);
        let known = parsed.as_ref().ok();
        Self {
            address: function.address.to_string(),
            id: format!("{:04x}:{:04x}", identity.vendor, identity.device),
            class: format!("{:06x}", identity.class),
            vendor: function.vendor_name(),
            name: function.device_name(),
            subsystem: format!(
                "{:04x}:{:04x}",
                identity.subsystem_vendor, identity.subsystem_device
            ),
            revision: identity.revision,
            driver: function.driver.clone(),
            interfaces: function
                .interfaces
                .iter()
                .map(|interface| interface.name.clone())
                .collect(),
            iommu_group: group.map(|group| group.number),
            group_members: group.map_or_else(Vec::new, |group| {
                let members = group.members.iter();
                members
                    .map(|member| MemberInfo {
                        address: member.address.to_string(),
                        driver: member.driver.clone(),
                        bridge: member.bridge,
                        bus_master: member.bus_master,
                    })
                    .collect()
            }),
            reset_methods: function.reset_methods.clone(),
            numa_node: function.numa_node,
            link: function.link.as_ref().map(|link| LinkInfo {
                speed: link.speed.clone(),
                width: link.width,
                max_speed: link.max_speed.clone(),
                max_width: link.max_width,
            }),
            physical_function: function
                .physical_function
                .map(|address| address.to_string()),
            virtual_functions: function
                .virtual_functions
                .iter()
                .map(Address::to_string)
                .collect(),
            total_virtual_functions: function.total_virtual_functions,
            capabilities: known.map(lines),
            capabilities_error: parsed.as_ref().err().cloned(),
            flr: known.map(Capabilities::has_flr),
            power_state: known
                .and_then(|known| known.power)
                .map(|power| format!("{:?}", power.state)),
            transactions_pending: known.and_then(|known| known.pcie).map(|pcie| {
                use failstop::pci::capabilities::DeviceStatus;
                pcie.status.contains(DeviceStatus::TRANSACTIONS_PENDING)
            }),
            msix_vectors: known.and_then(|known| known.msix).map(|msix| msix.vectors),
            ats_enabled: known.map(Capabilities::ats_enabled),
            strength: strength(function, known),
            transports: transports(sysfs, function),
        }
    }

    fn print(&self, out: &mut dyn Write) -> Result<()> {
        let mut line = |label: &str, text: &str| writeln!(out, "{label:14}{text}");
        line(
            &self.address,
            &format!(
                "{} {} [{}]",
                self.vendor.unwrap_or("unknown vendor"),
                self.name.unwrap_or("unknown device"),
                self.id
            ),
        )?;
        line(
            "class",
            &format!(
                "{}, revision {:02x}, subsystem {}",
                self.class, self.revision, self.subsystem
            ),
        )?;
        line("driver", self.driver.as_deref().unwrap_or("none"))?;
        if !self.interfaces.is_empty() {
            line("interfaces", &self.interfaces.join(", "))?;
        }
        match self.iommu_group {
            Some(group) => line("IOMMU group", &group.to_string())?,
            None => line("IOMMU group", "none")?,
        }
        for member in &self.group_members {
            line("", &member.text())?;
        }
        match self.reset_methods.as_slice() {
            [] => line("reset", "the kernel knows no way")?,
            methods => line("reset", &methods.join(", "))?,
        }
        if let Some(node) = self.numa_node {
            line("NUMA node", &node.to_string())?;
        }
        if let Some(link) = &self.link {
            let (width, max_width) = (link.width, link.max_width);
            line(
                "link",
                &format!(
                    "{} x{width} (of {} x{max_width})",
                    link.speed, link.max_speed
                ),
            )?;
        }
        if let Some(address) = &self.physical_function {
            line("virtual", &format!("function of {address}"))?;
        }
        if self.total_virtual_functions > 0 {
            let count = self.virtual_functions.len();
            line(
                "SR-IOV",
                &format!(
                    "{count} of {} virtual functions",
                    self.total_virtual_functions
                ),
            )?;
        }
        if let Some(state) = &self.power_state {
            line("power", state)?;
        }
        match (&self.capabilities, &self.capabilities_error) {
            (Some(capabilities), _) => {
                for (index, capability) in capabilities.iter().enumerate() {
                    let label = if index == 0 { "capabilities" } else { "" };
                    line(label, &capability.text())?;
                }
            }
            (None, Some(error)) => line("capabilities", error)?,
            (None, None) => {}
        }
        line(
            "revocation",
            &format!("{}: {}", self.strength.verdict, self.strength.reason),
        )?;
        for transport in &self.transports {
            let text = match &transport.reason {
                None => "usable",
                Some(reason) => reason,
            };
            line(transport.name, text)?;
        }
        Ok(())
    }
}

impl MemberInfo {
    fn text(&self) -> String {
        let driver = self.driver.as_deref().unwrap_or("no driver");
        let bus_master = match self.bus_master {
            Some(true) => "bus master on",
            Some(false) => "bus master off",
            None => "does not answer",
        };
        let bridge = if self.bridge { ", bridge" } else { "" };
        format!("{} {driver}, {bus_master}{bridge}", self.address)
    }
}

impl CapabilityInfo {
    pub(crate) fn text(&self) -> String {
        let detail = self.detail.as_ref().map(|text| format!(": {text}"));
        format!(
            "{:03x} {}{}",
            self.offset,
            self.name,
            detail.unwrap_or_default()
        )
    }
}

/// The function's capabilities, or why they are not known.
fn capabilities(sysfs: &Sysfs, address: Address) -> std::result::Result<Capabilities, String> {
    let config = sysfs.config(address).map_err(|error| error.to_string())?;
    // The kernel shows an ordinary user the header only.
    if config.len() <= 64 {
        return Err("only root may read them".to_owned());
    }
    Capabilities::parse(&config).map_err(|error| error.to_string())
}

pub(crate) fn lines(capabilities: &Capabilities) -> Vec<CapabilityInfo> {
    let entries = capabilities.entries.iter();
    entries
        .map(|entry| CapabilityInfo {
            offset: entry.offset,
            id: entry.id,
            extended: entry.list == List::Extended,
            name: name(entry.list, entry.id),
            detail: detail(capabilities, entry.offset),
        })
        .collect()
}

/// What a capability is called in the PCI specifications.
fn name(list: List, id: u16) -> &'static str {
    match (list, id) {
        (List::Standard, 0x01) => "Power Management",
        (List::Standard, 0x03) => "Vital Product Data",
        (List::Standard, 0x05) => "MSI",
        (List::Standard, 0x09) => "Vendor-specific",
        (List::Standard, 0x10) => "PCI Express",
        (List::Standard, 0x11) => "MSI-X",
        (List::Standard, 0x13) => "Advanced Features",
        (List::Extended, 0x01) => "Advanced Error Reporting",
        (List::Extended, 0x02 | 0x09) => "Virtual Channel",
        (List::Extended, 0x03) => "Device Serial Number",
        (List::Extended, 0x0b) => "Vendor-specific (extended)",
        (List::Extended, 0x0d) => "Access Control Services",
        (List::Extended, 0x0e) => "Alternative Routing-ID",
        (List::Extended, 0x0f) => "Address Translation Services",
        (List::Extended, 0x10) => "SR-IOV",
        (List::Extended, 0x13) => "Page Request Interface",
        (List::Extended, 0x17) => "TPH Requester",
        (List::Extended, 0x18) => "Latency Tolerance Reporting",
        (List::Extended, 0x1b) => "Process Address Space ID",
        (List::Extended, 0x1e) => "L1 PM Substates",
        _ => "other",
    }
}

/// A few words about the capability at `offset`, where there is something to say.
fn detail(capabilities: &Capabilities, offset: u16) -> Option<String> {
    let on = |enabled| if enabled { "on" } else { "off" };
    if let Some(pcie) = capabilities.pcie.filter(|pcie| pcie.offset == offset) {
        let flr = if pcie.flr { "FLR" } else { "no FLR" };
        let speed: LinkSpeed = pcie.link.speed;
        return Some(format!(
            "version {}, {flr}, payload {} of {} bytes, link {speed} x{}",
            pcie.version, pcie.max_payload, pcie.max_payload_supported, pcie.link.width
        ));
    }
    if let Some(power) = capabilities.power.filter(|power| power.offset == offset) {
        let reset = if power.no_soft_reset {
            "no soft reset"
        } else {
            "resets on D3hot to D0"
        };
        return Some(format!("{:?}, {reset}", power.state));
    }
    if let Some(msi) = capabilities.msi.filter(|msi| msi.offset == offset) {
        return Some(format!("{} vectors, {}", msi.vectors, on(msi.enabled)));
    }
    if let Some(msix) = capabilities.msix.filter(|msix| msix.offset == offset) {
        return Some(format!(
            "{} vectors, table in BAR {} at {:#x}, {}",
            msix.vectors,
            msix.table.bar,
            msix.table.offset,
            on(msix.enabled)
        ));
    }
    if let Some(af) = capabilities
        .advanced_features
        .filter(|af| af.offset == offset)
    {
        return Some(if af.flr { "FLR" } else { "no FLR" }.to_owned());
    }
    if let Some(aer) = capabilities
        .advanced_errors
        .filter(|aer| aer.offset == offset)
    {
        return Some(format!(
            "uncorrectable {:#x}, correctable {:#x}",
            aer.uncorrectable, aer.correctable
        ));
    }
    if let Some(ats) = capabilities.ats.filter(|ats| ats.offset == offset) {
        return Some(on(ats.enabled).to_owned());
    }
    if let Some(sr_iov) = capabilities.sr_iov.filter(|sr_iov| sr_iov.offset == offset) {
        return Some(format!(
            "{} of {} virtual functions",
            sr_iov.num_vfs, sr_iov.total_vfs
        ));
    }
    None
}

/// How strongly unmapping would revoke the function's DMA, before it is opened (R1, C44).
fn strength(function: &Function, capabilities: Option<&Capabilities>) -> Strength {
    let (verdict, reason) = match (&function.group, capabilities) {
        (None, _) => ("none", "no IOMMU"),
        (Some(group), _) if group.noiommu => ("none", "no-IOMMU mode"),
        (Some(_), None) => ("unknown", "whether ATS is on cannot be read"),
        (Some(_), Some(known)) if known.ats_enabled() => (
            "none",
            "ATS is on: the device may hold translations of its own",
        ),
        (Some(_), Some(known)) if known.ats.is_some() => (
            "enforcing",
            "the IOMMU translates and ATS is off (looked at again at every open)",
        ),
        (Some(_), Some(_)) => ("enforcing", "the IOMMU translates, and there is no ATS"),
    };
    Strength { verdict, reason }
}

/// Which transports would work for this user now.
fn transports(sysfs: &Sysfs, function: &Function) -> Vec<TransportInfo> {
    let address = function.address;
    let ready = sysfs.preflight(address, &[]);
    let check = |name, files: &[&Path]| {
        let reason = match &ready {
            Err(error) => Some(error.to_string()),
            Ok(_) => files.iter().find_map(|path| missing(path)),
        };
        TransportInfo {
            name,
            usable: reason.is_none(),
            reason,
        }
    };
    let group = function.group.as_ref().map_or(0, |group| group.number);
    let container = check(
        "container",
        &[&sysfs.container_path(), &sysfs.group_path(group)],
    );
    let iommufd = match sysfs.cdev_path(address) {
        Some(cdev) => check("iommufd", &[&sysfs.iommufd_path(), &cdev]),
        None if ready.is_ok() => TransportInfo {
            name: "iommufd",
            usable: false,
            reason: Some("this kernel has no VFIO character devices".to_owned()),
        },
        None => check("iommufd", &[]),
    };
    vec![container, iommufd]
}

/// Why a device file cannot be opened, if so.
fn missing(path: &Path) -> Option<String> {
    if !path.exists() {
        return Some(format!("{} does not exist", path.display()));
    }
    match access(path, AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => None,
        Err(errno) => Some(format!("{}: {}", path.display(), errno.desc())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Tree;

    fn run(tree: &Tree, json: bool) -> String {
        let args = InfoArgs {
            device: "0000:01:00.0".parse().unwrap(),
            json,
        };
        let mut out = Vec::new();
        info(&args, &tree.sysfs(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn missing_device_is_said() {
        let args = InfoArgs {
            device: "0000:09:00.0".parse().unwrap(),
            json: false,
        };
        let error = info(&args, &Tree::with_82576().sysfs(), &mut Vec::new()).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("0000:09:00.0: no such device")
        );
    }

    #[test]
    fn text_names_group_members_and_what_is_in_the_way() {
        let text = run(&Tree::with_82576(), false);
        assert!(
            text.contains("0000:01:00.1 e1000e, bus master on"),
            "{text}"
        );
        assert!(text.contains("only root may read them"), "{text}");
        assert!(
            text.contains("container     0000:01:00.0 is bound to igb"),
            "{text}"
        );
    }

    #[test]
    fn json_has_a_verdict_and_transports() {
        let value: serde_json::Value =
            serde_json::from_str(&run(&Tree::with_82576(), true)).unwrap();
        assert_eq!(value["strength"]["verdict"], "unknown");
        assert_eq!(value["transports"][0]["name"], "container");
        assert_eq!(value["transports"][0]["usable"], false);
        assert_eq!(value["reset_methods"][0], "flr");
    }

    #[test]
    fn damaged_capability_list_is_said() {
        let tree = Tree::with_82576();
        let mut config = vec![0u8; 256];
        config[0..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
        config[6] = 0x10;
        config[0x34] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x0d, 0x40]);
        tree.config("0000:01:00.0", &config);
        assert!(run(&tree, false).contains("list is cyclic"));
    }
}
