//! Capabilities as values. Section numbers are of the PCIe base specification 6.0, all offsets are
//! in bytes from the start of configuration space unless they say otherwise.

use std::fmt;

use bitflags::bitflags;

use super::List;

/// A configuration space that answers every offset: what lies past its end reads zero.
pub(super) struct Space<'a> {
    bytes: &'a [u8],
}

impl<'a> Space<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn u8(&self, at: u16) -> u8 {
        self.bytes.get(usize::from(at)).copied().unwrap_or(0)
    }

    pub(super) fn u16(&self, at: u16) -> u16 {
        u16::from_le_bytes(self.array(at))
    }

    pub(super) fn u32(&self, at: u16) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    fn array<const N: usize>(&self, at: u16) -> [u8; N] {
        self.bytes
            .get(usize::from(at)..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .unwrap_or([0; N])
    }
}

bitflags! {
    /// Device Control (§7.5.3.4), without its two size fields.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct DeviceControl: u16 {
        /// Correctable errors are reported.
        const CORRECTABLE_ERRORS = 1 << 0;
        /// Non-fatal errors are reported.
        const NON_FATAL_ERRORS = 1 << 1;
        /// Fatal errors are reported.
        const FATAL_ERRORS = 1 << 2;
        /// Unsupported requests are reported.
        const UNSUPPORTED_REQUESTS = 1 << 3;
        /// Requests may be marked for relaxed ordering.
        const RELAXED_ORDERING = 1 << 4;
        /// Tags have 8 bits.
        const EXTENDED_TAGS = 1 << 8;
        /// Requests may say that caches need not be snooped.
        const NO_SNOOP = 1 << 11;
        /// Write 1: function-level reset; reads zero.
        const INITIATE_FLR = 1 << 15;
        // Other bits are kept as read.
        const _ = !0;
    }
}

bitflags! {
    /// Device Status (§7.5.3.5).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct DeviceStatus: u16 {
        /// A correctable error was detected.
        const CORRECTABLE_ERROR = 1 << 0;
        /// A non-fatal error was detected.
        const NON_FATAL_ERROR = 1 << 1;
        /// A fatal error was detected.
        const FATAL_ERROR = 1 << 2;
        /// An unsupported request was received.
        const UNSUPPORTED_REQUEST = 1 << 3;
        /// Auxiliary power is there.
        const AUX_POWER = 1 << 4;
        /// The function has issued requests that are not completed yet (R4.4).
        const TRANSACTIONS_PENDING = 1 << 5;
        // Other bits are kept as read.
        const _ = !0;
    }
}

/// What kind of PCIe function this is (§7.5.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PortType {
    /// A PCIe endpoint.
    Endpoint,
    /// A legacy endpoint.
    LegacyEndpoint,
    /// An endpoint inside the root complex.
    IntegratedEndpoint,
    /// Ports, bridges, and what later specifications add, as the 4-bit field says.
    Other(u8),
}

/// Speed of a PCIe link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkSpeed(u8);

impl LinkSpeed {
    /// The generation: 1 for 2.5 GT/s, 2 for 5 GT/s and so on; 0 when the field is empty.
    #[must_use]
    pub const fn generation(self) -> u8 {
        self.0
    }
}

impl fmt::Display for LinkSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            1 => "2.5 GT/s",
            2 => "5 GT/s",
            3 => "8 GT/s",
            4 => "16 GT/s",
            5 => "32 GT/s",
            6 => "64 GT/s",
            _ => "unknown speed",
        };
        f.write_str(text)
    }
}

/// A PCIe link: what it can do and what it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// The highest speed (§7.5.3.6).
    pub max_speed: LinkSpeed,
    /// Lanes at the most.
    pub max_width: u8,
    /// The speed now (§7.5.3.8).
    pub speed: LinkSpeed,
    /// Lanes in use.
    pub width: u8,
}

/// PCI Express (§7.5.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PciExpress {
    /// Where it starts.
    pub offset: u16,
    /// Version of the structure.
    pub version: u8,
    /// What kind of function this is.
    pub port_type: PortType,
    /// Function-level reset is supported.
    pub flr: bool,
    /// The largest payload that the function supports, in bytes.
    pub max_payload_supported: u16,
    /// The largest payload that it may use, in bytes.
    pub max_payload: u16,
    /// The largest read that it may request, in bytes.
    pub max_read_request: u16,
    /// Device Control when parsed.
    pub control: DeviceControl,
    /// Device Status when parsed.
    pub status: DeviceStatus,
    /// Its link.
    pub link: Link,
}

impl PciExpress {
    /// Where Device Control is, 16 bits.
    #[must_use]
    pub const fn device_control(&self) -> u16 {
        self.offset + 0x08
    }

    /// Where Device Status is, 16 bits.
    #[must_use]
    pub const fn device_status(&self) -> u16 {
        self.offset + 0x0a
    }

    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        let flags = space.u16(at + 0x02);
        let device = space.u32(at + 0x04);
        let control = space.u16(at + 0x08);
        let [link_low, link_high, ..] = space.u32(at + 0x0c).to_le_bytes();
        let link_capabilities = u16::from_le_bytes([link_low, link_high]);
        let link_status = space.u16(at + 0x12);
        Self {
            offset: at,
            version: (flags & 0xf) as u8,
            port_type: match flags >> 4 & 0xf {
                0 => PortType::Endpoint,
                1 => PortType::LegacyEndpoint,
                9 => PortType::IntegratedEndpoint,
                other => PortType::Other(other as u8),
            },
            flr: device & 1 << 28 != 0,
            max_payload_supported: 128 << (device & 7),
            max_payload: 128 << (control >> 5 & 7),
            max_read_request: 128 << (control >> 12 & 7),
            control: DeviceControl::from_bits_retain(control),
            status: DeviceStatus::from_bits_retain(space.u16(at + 0x0a)),
            link: Link {
                max_speed: LinkSpeed((link_capabilities & 0xf) as u8),
                max_width: (link_capabilities >> 4 & 0x3f) as u8,
                speed: LinkSpeed((link_status & 0xf) as u8),
                width: (link_status >> 4 & 0x3f) as u8,
            },
        }
    }
}

/// How much a function is awake (§5.3.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PowerState {
    /// Fully on.
    D0,
    /// Light sleep.
    D1,
    /// Deeper sleep.
    D2,
    /// Only configuration space answers.
    D3hot,
}

/// PCI power management (§7.5.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PowerManagement {
    /// Where it starts.
    pub offset: u16,
    /// The state when parsed.
    pub state: PowerState,
    /// Leaving D3hot does *not* reset the function, so that the kernel has no PM reset for it.
    pub no_soft_reset: bool,
}

impl PowerManagement {
    /// Bytes from the capability's start to its control and status register, 16 bits.
    pub const CONTROL: u16 = 4;

    /// Where the control and status register is, 16 bits; [`PowerManagement::state_of`] reads it.
    #[must_use]
    pub const fn control_status(&self) -> u16 {
        self.offset + Self::CONTROL
    }

    /// The power state in a value of the control and status register.
    #[must_use]
    pub const fn state_of(control_status: u16) -> PowerState {
        match control_status & 3 {
            0 => PowerState::D0,
            1 => PowerState::D1,
            2 => PowerState::D2,
            _ => PowerState::D3hot,
        }
    }

    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        let control_status = space.u16(at + 4);
        Self {
            offset: at,
            state: Self::state_of(control_status),
            no_soft_reset: control_status & 1 << 3 != 0,
        }
    }
}

/// MSI (§7.7.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Msi {
    /// Where it starts.
    pub offset: u16,
    /// Vectors that the function asks for: a power of two up to 32.
    pub vectors: u8,
    /// MSI is enabled.
    pub enabled: bool,
    /// Addresses may have 64 bits.
    pub address_64: bool,
    /// Vectors can be masked one by one.
    pub maskable: bool,
}

impl Msi {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        let control = space.u16(at + 2);
        Self {
            offset: at,
            // 6 and 7 are reserved.
            vectors: 1 << (control >> 1 & 7).min(5),
            enabled: control & 1 != 0,
            address_64: control & 1 << 7 != 0,
            maskable: control & 1 << 8 != 0,
        }
    }
}

/// A part of a BAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Which BAR: 0 to 5, or 6 and 7 where the device breaks the specification.
    pub bar: u8,
    /// Bytes from the start of the BAR, a multiple of 8.
    pub offset: u32,
}

/// MSI-X (§7.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MsiX {
    /// Where it starts.
    pub offset: u16,
    /// Vectors: 1 to 2048.
    pub vectors: u16,
    /// MSI-X is enabled.
    pub enabled: bool,
    /// Every vector is masked.
    pub masked: bool,
    /// Where the vector table is, 16 bytes a vector.
    pub table: Part,
    /// Where the pending bits are, one a vector.
    pub pending: Part,
}

impl MsiX {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        let control = space.u16(at + 2);
        let part = |word: u32| Part {
            bar: (word & 7) as u8,
            offset: word & !7,
        };
        Self {
            offset: at,
            vectors: (control & 0x7ff) + 1,
            enabled: control & 1 << 15 != 0,
            masked: control & 1 << 14 != 0,
            table: part(space.u32(at + 4)),
            pending: part(space.u32(at + 8)),
        }
    }
}

/// Advanced features (PCI Advanced Capabilities ECN; PCIe §7.9.21).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdvancedFeatures {
    /// Where it starts.
    pub offset: u16,
    /// Function-level reset is supported.
    pub flr: bool,
    /// Requests of the function are outstanding; false where it cannot tell.
    pub transactions_pending: bool,
}

impl AdvancedFeatures {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        let capabilities = space.u8(at + 3);
        Self {
            offset: at,
            flr: capabilities & 2 != 0,
            transactions_pending: capabilities & 1 != 0 && space.u8(at + 5) & 1 != 0,
        }
    }
}

/// Advanced error reporting (§7.8.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdvancedErrors {
    /// Where it starts.
    pub offset: u16,
    /// Uncorrectable Error Status when parsed.
    pub uncorrectable: u32,
    /// Correctable Error Status when parsed.
    pub correctable: u32,
}

impl AdvancedErrors {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        Self {
            offset: at,
            uncorrectable: space.u32(at + 0x04),
            correctable: space.u32(at + 0x10),
        }
    }
}

/// Address translation services (§10.5.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ats {
    /// Where it starts.
    pub offset: u16,
    /// The function may keep translations, and use them after an unmap (C44).
    pub enabled: bool,
}

impl Ats {
    /// Where the control register is, 16 bits; bit 15 is Enable.
    #[must_use]
    pub const fn control(&self) -> u16 {
        self.offset + 6
    }

    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        Self {
            offset: at,
            enabled: space.u16(at + 6) & 1 << 15 != 0,
        }
    }
}

/// Single-root I/O virtualisation (§9.3.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrIov {
    /// Where it starts.
    pub offset: u16,
    /// Virtual functions that there can be.
    pub total_vfs: u16,
    /// Virtual functions that there are.
    pub num_vfs: u16,
    /// Virtual functions are enabled.
    pub enabled: bool,
    /// Device ID of a virtual function.
    pub vf_device: u16,
}

impl SrIov {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        Self {
            offset: at,
            total_vfs: space.u16(at + 0x0e),
            num_vfs: space.u16(at + 0x10),
            enabled: space.u16(at + 0x08) & 1 != 0,
            vf_device: space.u16(at + 0x1a),
        }
    }
}

/// Alternative routing-ID interpretation (§7.8.8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ari {
    /// Where it starts.
    pub offset: u16,
    /// The next function of the device; 0 ends the chain.
    pub next_function: u8,
}

impl Ari {
    pub(super) fn parse(space: &Space<'_>, at: u16) -> Self {
        Self {
            offset: at,
            next_function: space.u8(at + 5),
        }
    }
}

/// A vendor-specific capability of either list (§7.9.4, §7.9.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vendor {
    /// The list that it is in.
    pub list: List,
    /// Where it starts.
    pub offset: u16,
    /// Its own length in bytes, header included.
    pub len: u16,
}
