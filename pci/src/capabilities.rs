//! Capability lists of a configuration space, parsed from bytes.
//!
//! The bytes come from a device, which is not trusted (R8): lists that are cyclic, cut short or
//! lie over each other are typed errors. [`Capabilities::parse`] walks both lists once and keeps
//! what a driver asks about as plain values.
//!
//! ```
//! use failstop_pci::capabilities::Capabilities;
//!
//! // A header whose status register says that there is no capability list.
//! let mut config = [0u8; 256];
//! config[..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
//! assert!(Capabilities::parse(&config)?.pcie.is_none());
//! # Ok::<(), failstop_pci::capabilities::CapabilityError>(())
//! ```

use thiserror::Error;

use crate::config::{STANDARD_SIZE, Status, offset};

mod list;
mod views;

pub use list::{Entry, List};
pub use views::{
    AdvancedErrors, AdvancedFeatures, Ari, Ats, DeviceControl, DeviceStatus, Link, LinkSpeed, Msi,
    MsiX, Part, PciExpress, PortType, PowerManagement, PowerState, SrIov, Vendor,
};

/// Standard capability IDs (PCI Code and ID Assignment specification, §2).
pub mod id {
    /// PCI power management.
    pub const POWER_MANAGEMENT: u16 = 0x01;
    /// Vital product data.
    pub const VITAL_PRODUCT_DATA: u16 = 0x03;
    /// Message signalled interrupts.
    pub const MSI: u16 = 0x05;
    /// Vendor-specific; virtio uses it.
    pub const VENDOR: u16 = 0x09;
    /// PCI Express.
    pub const PCI_EXPRESS: u16 = 0x10;
    /// MSI-X.
    pub const MSI_X: u16 = 0x11;
    /// Advanced features: function-level reset on conventional PCI.
    pub const ADVANCED_FEATURES: u16 = 0x13;
}

/// Extended capability IDs (PCI Code and ID Assignment specification, §3).
pub mod extended_id {
    /// Advanced error reporting.
    pub const ADVANCED_ERRORS: u16 = 0x01;
    /// Device serial number.
    pub const SERIAL_NUMBER: u16 = 0x03;
    /// Vendor-specific.
    pub const VENDOR: u16 = 0x0b;
    /// Alternative routing-ID interpretation.
    pub const ARI: u16 = 0x0e;
    /// Address translation services.
    pub const ATS: u16 = 0x0f;
    /// Single-root I/O virtualisation.
    pub const SR_IOV: u16 = 0x10;
}

/// A configuration space whose capability lists cannot be followed. All offsets in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CapabilityError {
    /// There are fewer bytes than a configuration space has.
    #[error("a configuration space has at least 256 bytes, this one has {bytes}")]
    Short {
        /// How many there are.
        bytes: usize,
    },
    /// The header reads all-ones: the function is gone, or was never there.
    #[error("configuration space reads all-ones: the function does not answer")]
    AllOnes,
    /// A list leads to a capability for the second time.
    #[error("the {list} capability list is cyclic: {from:#x} leads back to {to:#x}")]
    Cyclic {
        /// Which list.
        list: List,
        /// The capability whose next pointer it is; 0x34 or 0x100 for the list's head.
        from: u16,
        /// Where it points.
        to: u16,
    },
    /// A list leads out of the part of the space where its capabilities are.
    #[error(
        "the {list} capability list leads from {from:#x} to {to:#x}, where no capability can be"
    )]
    OutOfRange {
        /// Which list.
        list: List,
        /// The capability whose next pointer it is; 0x34 or 0x100 for the list's head.
        from: u16,
        /// Where it points.
        to: u16,
    },
    /// A capability does not fit between its start and the end of its part of the space.
    #[error("the {list} capability {id:#04x} at {offset:#x} is cut off: it needs {needed} bytes")]
    Truncated {
        /// Which list.
        list: List,
        /// Its ID.
        id: u16,
        /// Where it starts.
        offset: u16,
        /// Bytes that it needs.
        needed: u16,
    },
    /// Two capabilities claim the same bytes.
    #[error("the {list} capabilities at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// Which list.
        list: List,
        /// Where the lower one starts.
        first: u16,
        /// Where the upper one starts.
        second: u16,
    },
}

/// What a function can do, as its capability lists say.
///
/// Where a list has the same capability twice, the first counts, as in the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Capabilities {
    /// Both lists, in the order of the lists, standard first.
    pub entries: Vec<Entry>,
    /// PCI Express.
    pub pcie: Option<PciExpress>,
    /// Power management.
    pub power: Option<PowerManagement>,
    /// MSI.
    pub msi: Option<Msi>,
    /// MSI-X.
    pub msix: Option<MsiX>,
    /// Advanced features.
    pub advanced_features: Option<AdvancedFeatures>,
    /// Advanced error reporting.
    pub advanced_errors: Option<AdvancedErrors>,
    /// Address translation services.
    pub ats: Option<Ats>,
    /// Single-root I/O virtualisation.
    pub sr_iov: Option<SrIov>,
    /// Alternative routing-ID interpretation.
    pub ari: Option<Ari>,
    /// Every vendor-specific capability of either list.
    pub vendor: Vec<Vendor>,
}

impl Capabilities {
    /// Parses a configuration space of 256 bytes (standard list only) or 4096.
    ///
    /// # Errors
    ///
    /// [`CapabilityError`] at the first thing that is wrong with a list.
    pub fn parse(config: &[u8]) -> Result<Self, CapabilityError> {
        if config.len() < STANDARD_SIZE {
            return Err(CapabilityError::Short {
                bytes: config.len(),
            });
        }
        let space = views::Space::new(config);
        if space.u32(offset::VENDOR) == u32::MAX {
            return Err(CapabilityError::AllOnes);
        }
        let mut capabilities = Self::default();
        let status = Status::from_bits_retain(space.u16(offset::STATUS));
        if status.contains(Status::CAPABILITIES) {
            list::walk(&space, List::Standard, &mut capabilities.entries)?;
        }
        // Without a PCIe capability there is no extended space: some bridges answer there with
        // a ghost of the first 256 bytes.
        let is_pcie = capabilities
            .entries
            .iter()
            .any(|entry| entry.id == id::PCI_EXPRESS);
        if is_pcie {
            list::walk(&space, List::Extended, &mut capabilities.entries)?;
        }
        for index in 0..capabilities.entries.len() {
            let entry = capabilities.entries[index];
            capabilities.view(&space, entry);
        }
        Ok(capabilities)
    }

    /// Whether the function says that it can do a function-level reset, by PCIe or by advanced
    /// features. What the kernel will use stands in sysfs `reset_method`.
    #[must_use]
    pub fn has_flr(&self) -> bool {
        self.pcie.is_some_and(|pcie| pcie.flr) || self.advanced_features.is_some_and(|af| af.flr)
    }

    /// Whether the function may hold address translations of its own, so that an unmap alone does
    /// not revoke them (C44).
    #[must_use]
    pub fn ats_enabled(&self) -> bool {
        self.ats.is_some_and(|ats| ats.enabled)
    }

    fn view(&mut self, space: &views::Space<'_>, entry: Entry) {
        let at = entry.offset;
        match (entry.list, entry.id) {
            (List::Standard, id::POWER_MANAGEMENT) => {
                self.power
                    .get_or_insert_with(|| PowerManagement::parse(space, at));
            }
            (List::Standard, id::MSI) => {
                self.msi.get_or_insert_with(|| Msi::parse(space, at));
            }
            (List::Standard, id::PCI_EXPRESS) => {
                self.pcie
                    .get_or_insert_with(|| PciExpress::parse(space, at));
            }
            (List::Standard, id::MSI_X) => {
                self.msix.get_or_insert_with(|| MsiX::parse(space, at));
            }
            (List::Standard, id::ADVANCED_FEATURES) => {
                self.advanced_features
                    .get_or_insert_with(|| AdvancedFeatures::parse(space, at));
            }
            (List::Extended, extended_id::ADVANCED_ERRORS) => {
                self.advanced_errors
                    .get_or_insert_with(|| AdvancedErrors::parse(space, at));
            }
            (List::Extended, extended_id::ATS) => {
                self.ats.get_or_insert_with(|| Ats::parse(space, at));
            }
            (List::Extended, extended_id::SR_IOV) => {
                self.sr_iov.get_or_insert_with(|| SrIov::parse(space, at));
            }
            (List::Extended, extended_id::ARI) => {
                self.ari.get_or_insert_with(|| Ari::parse(space, at));
            }
            (List::Standard, id::VENDOR) | (List::Extended, extended_id::VENDOR) => {
                self.vendor.push(Vendor {
                    list: entry.list,
                    offset: at,
                    len: entry.len,
                });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
