//! `failstop info` of a device that a vfio-user server serves, an emulated one included.

use std::io::Write;

use anyhow::{Context, Result};
use failstop::pci::capabilities::Capabilities;
use failstop::pci::config::ConfigSpace;
use failstop::pci::transport::{IrqIndex, RegionIndex, Transport};
use serde::Serialize;

use crate::info::{CapabilityInfo, Strength, lines};

/// Where ids, class and revision stand in configuration space (PCI 3.0, 6.1).
const VENDOR: usize = 0x00;
const DEVICE: usize = 0x02;
const REVISION: usize = 0x08;

/// What is printed, in its order.
#[derive(Serialize)]
pub(crate) struct Served {
    device: String,
    id: String,
    class: String,
    revision: u8,
    /// Ways in which the server says that it resets the device; the provider's own is not among them.
    reset_methods: Vec<&'static str>,
    regions: Vec<RegionInfo>,
    msix_vectors: u32,
    /// Whether errors on the bus are told.
    error_event: bool,
    /// Whether the device can be asked back.
    request_event: bool,
    capabilities: Vec<CapabilityInfo>,
    strength: Strength,
}

#[derive(Serialize)]
struct RegionInfo {
    name: String,
    /// In bytes.
    size: u64,
    /// Whether some of it is reached without a message.
    mapped: bool,
}

impl Served {
    /// Asks the server.
    ///
    /// # Errors
    ///
    /// When it does not answer, or what it answers is no configuration space.
    pub(crate) fn new(name: String, transport: &dyn Transport) -> Result<Self> {
        let config = ConfigSpace::new(transport).read_all()?;
        let word = |at: usize| {
            let bytes = config.get(at..at + 2).unwrap_or(&[0xFF, 0xFF]);
            u16::from(bytes[1]) << 8 | u16::from(bytes[0])
        };
        let known = Capabilities::parse(&config)
            .with_context(|| format!("{name}: its capabilities cannot be read"))?;
        let regions = (0..6).map(RegionIndex::Bar).filter_map(|index| {
            let region = transport.region(index);
            (region.size > 0).then(|| RegionInfo {
                name: index.to_string(),
                size: region.size,
                mapped: !region.mappable.is_empty(),
            })
        });
        let revision = word(REVISION);
        Ok(Self {
            device: name,
            id: format!("{:04x}:{:04x}", word(VENDOR), word(DEVICE)),
            class: format!("{:04x}{:02x}", word(REVISION + 2), revision >> 8),
            revision: revision.to_le_bytes()[0],
            reset_methods: transport
                .reset_methods()
                .iter()
                .map(|method| method.name())
                .collect(),
            regions: regions.collect(),
            msix_vectors: transport.irq_count(IrqIndex::Msix),
            error_event: transport.irq_count(IrqIndex::Error) > 0,
            request_event: transport.irq_count(IrqIndex::Request) > 0,
            capabilities: lines(&known),
            strength: Strength {
                verdict: "server's word",
                reason: "an unmap that it acknowledges is believed, one that it does not is none; it keeps the files \
                         that it was given, and reaches no other memory",
            },
        })
    }

    /// Prints it for people.
    ///
    /// # Errors
    ///
    /// When `out` cannot be written to.
    pub(crate) fn print(&self, out: &mut dyn Write) -> Result<()> {
        let mut line = |label: &str, text: &str| writeln!(out, "{label:14}{text}");
        line("device", &format!("{} [{}]", self.device, self.id))?;
        line(
            "class",
            &format!("{}, revision {:02x}", self.class, self.revision),
        )?;
        let reset = match self.reset_methods.as_slice() {
            [] => "the server offers none".to_owned(),
            methods => methods.join(", "),
        };
        line("reset", &reset)?;
        for (index, region) in self.regions.iter().enumerate() {
            let how = if region.mapped { ", mapped" } else { "" };
            let label = if index == 0 { "regions" } else { "" };
            line(
                label,
                &format!("{}: {} bytes{how}", region.name, region.size),
            )?;
        }
        let event = |there: bool| if there { "yes" } else { "no" };
        line(
            "interrupts",
            &format!(
                "{} MSI-X vectors; errors told: {}, asks for the device: {}",
                self.msix_vectors,
                event(self.error_event),
                event(self.request_event)
            ),
        )?;
        for (index, capability) in self.capabilities.iter().enumerate() {
            let label = if index == 0 { "capabilities" } else { "" };
            line(label, &capability.text())?;
        }
        line(
            "revocation",
            &format!("{}: {}", self.strength.verdict, self.strength.reason),
        )?;
        Ok(())
    }
}
