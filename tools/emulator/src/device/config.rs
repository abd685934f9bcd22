//! PCI configuration space of the 82576's function 0: header, BAR sizing, power management, MSI,
//! MSI-X, PCIe with FLR, AER. Sections of PCI Local Bus 3.0 and PCIe Base 3.0.

use crate::faults::Moment;

/// Bytes of configuration space.
pub(crate) const SIZE: usize = 4096;

const PM: usize = 0x40;
const MSI: usize = 0x50;
const MSI_X: usize = 0x70;
const PCIE: usize = 0xa0;
const AER: usize = 0x100;

pub(super) const COMMAND: usize = 0x04;
const MEMORY_SPACE: u16 = 1 << 1;
pub(super) const BUS_MASTER: u16 = 1 << 2;

pub(super) const PM_CONTROL: usize = PM + 4;
/// No_Soft_Reset (PCI PM 1.2, 3.2.4).
pub(super) const NO_SOFT_RESET: u8 = 1 << 3;
const MSI_CONTROL: usize = MSI + 2;
const MSI_X_CONTROL: usize = MSI_X + 2;
pub(super) const DEVICE_CAPABILITIES: usize = PCIE + 4;
/// Function Level Reset Capability, in the last byte of Device Capabilities (PCIe 7.8.3).
pub(super) const FLR_CAPABLE: u8 = 1 << 4;
const DEVICE_CONTROL: usize = PCIE + 8;
pub(super) const DEVICE_STATUS: usize = PCIE + 10;
/// Transactions Pending, in Device Status (PCIe 7.8.5).
pub(super) const PENDING: u8 = 1 << 5;
const INITIATE_FLR: u16 = 1 << 15;
/// Unsupported request detected, non-fatal error detected (PCIe 7.8.5).
const DEVICE_ERRORS: u16 = 1 << 3 | 1 << 1;

/// AER uncorrectable error status: unsupported request (PCIe 7.10.2).
const UNSUPPORTED_REQUEST: u32 = 1 << 20;

/// MSI-X vectors.
pub(crate) const VECTORS: u32 = 10;

/// BARs by number: the flags in their low bits, and their size in bytes. A size of 0 is the upper
/// half of the BAR before it, or nothing.
const BARS: [(u32, u32); 6] = [
    (0x0, 128 * 1024), // registers, 32-bit memory
    (0x0, 128 * 1024), // flash, 32-bit memory
    (0x1, 32),         // I/O
    (0x4, 16 * 1024),  // MSI-X, 64-bit memory
    (0x0, 0),          // its upper half
    (0x0, 0),
];

/// Size of a BAR in bytes, 0 where there is none.
#[must_use]
pub(crate) const fn bar_size(number: usize) -> u64 {
    BARS[number].1 as u64
}

/// What a write to configuration space makes the function do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// Nothing beyond the bits that changed.
    None,
    /// Function level reset (PCIe 6.6.2).
    FunctionLevelReset,
    /// The function came from D3hot to D0 without No_Soft_Reset (PCI PM 1.2, 5.4.1).
    PoweredUp,
}

/// The bytes, and which of their bits can be written.
#[derive(Debug)]
pub(super) struct Space {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    write_one_to_clear: Vec<u8>,
}

impl Default for Space {
    fn default() -> Self {
        let mut space = Self {
            bytes: vec![0; SIZE],
            writable: vec![0; SIZE],
            write_one_to_clear: vec![0; SIZE],
        };
        space.header();
        space.capabilities();
        space
    }
}

impl Space {
    fn header(&mut self) {
        self.set16(0x00, failstop::igb::VENDOR);
        self.set16(0x02, 0x10c9);
        self.allow16(COMMAND, 0x0547);
        self.set16(0x06, 1 << 4); // status: capability list
        self.write_one_to_clear[0x07] = 0xf9;
        self.set32(0x08, 0x0200_0001); // Ethernet controller, revision 1
        self.writable[0x0c] = 0xff; // cache line size
        for (number, (flags, size)) in BARS.into_iter().enumerate() {
            self.set32(0x10 + 4 * number, flags);
            let upper = number > 0 && BARS[number - 1].0 & 0x4 != 0;
            let mask = match size {
                0 if upper => u32::MAX,
                0 => 0,
                size => !(size - 1),
            };
            self.allow32(0x10 + 4 * number, mask);
        }
        self.set16(0x2c, failstop::igb::VENDOR);
        self.set16(0x2e, 0xa03c); // gigabit ET dual port server adapter
        self.bytes[0x34] = PM as u8;
        self.writable[0x3c] = 0xff; // interrupt line
        self.bytes[0x3d] = 1; // INTA
    }

    fn capabilities(&mut self) {
        self.set16(PM, 0x01 | (MSI as u16) << 8);
        self.set16(PM + 2, 0x0023); // version 3, device specific initialisation
        self.allow16(PM_CONTROL, 0x0103); // power state, PME enable
        self.write_one_to_clear[PM_CONTROL + 1] = 0x80; // PME status

        self.set16(MSI, 0x05 | (MSI_X as u16) << 8);
        self.set16(MSI_CONTROL, 1 << 8 | 1 << 7); // per-vector masking, 64-bit, one vector
        self.allow16(MSI_CONTROL, 0x0071);
        self.allow32(MSI + 4, 0xffff_fffc);
        self.allow32(MSI + 8, u32::MAX);
        self.allow16(MSI + 12, 0xffff);
        self.allow32(MSI + 16, 1);

        self.set16(MSI_X, 0x11 | (PCIE as u16) << 8);
        self.set16(MSI_X_CONTROL, VECTORS as u16 - 1);
        self.allow16(MSI_X_CONTROL, 0xc000);
        self.set32(MSI_X + 4, 3); // table in BAR 3, from 0
        self.set32(MSI_X + 8, 0x2000 | 3); // pending bits in BAR 3

        self.set16(PCIE, 0x10); // last of the list
        self.set16(PCIE + 2, 0x0002); // version 2, endpoint
        self.set32(DEVICE_CAPABILITIES, 1 << 28 | 1 << 15 | 2); // FLR, role-based errors, 512-byte payload
        self.set16(DEVICE_CONTROL, 0x2810);
        self.allow16(DEVICE_CONTROL, 0x7fff);
        self.write_one_to_clear[DEVICE_STATUS] = 0x0f;
        self.set32(PCIE + 12, 4 << 4 | 1); // link: x4, 2.5 GT/s
        self.allow16(PCIE + 16, 0x01fb);
        self.set16(PCIE + 18, 4 << 4 | 1);
        self.set32(PCIE + 36, 0x1f); // completion timeout: all ranges, may be disabled
        self.allow16(PCIE + 40, 0x001f);

        self.set32(AER, 0x0001 | 1 << 16);
        self.write_one_to_clear[AER + 4..AER + 8].fill(0xff);
        self.allow32(AER + 8, u32::MAX);
        self.set32(AER + 12, 0x0006_2030);
        self.allow32(AER + 12, u32::MAX);
        self.write_one_to_clear[AER + 16..AER + 20].fill(0xff);
        self.set32(AER + 20, 0x2000);
        self.allow32(AER + 20, u32::MAX);
    }

    /// Reads bytes; those beyond the end read 0.
    pub(super) fn read(&self, offset: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = self
                .bytes
                .get(offset.saturating_add(i))
                .copied()
                .unwrap_or(0);
        }
    }

    /// Writes bytes, as far as they are writable.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) -> Effect {
        let before = self.power_state();
        let mut flr = false;
        for (i, &value) in data.iter().enumerate() {
            let at = offset.saturating_add(i);
            let Some(byte) = self.bytes.get_mut(at) else {
                break;
            };
            *byte &= !(value & self.write_one_to_clear[at]);
            *byte = *byte & !self.writable[at] | value & self.writable[at];
            flr |= at == DEVICE_CONTROL + 1 && value & (INITIATE_FLR >> 8) as u8 != 0;
        }
        if flr {
            Effect::FunctionLevelReset
        } else if before == 3 && self.power_state() == 0 {
            Effect::PoweredUp
        } else {
            Effect::None
        }
    }

    /// What a write is, as triggers of faults know it, before it happens.
    pub(super) fn moments(&self, offset: usize, data: &[u8]) -> Vec<Moment> {
        let written = |at: usize| at.checked_sub(offset).and_then(|at| data.get(at));
        let mut moments = Vec::new();
        if let Some(command) = written(COMMAND) {
            let was = self.get16(COMMAND) & BUS_MASTER != 0;
            let is = u16::from(*command) & BUS_MASTER != 0;
            match (was, is) {
                (false, true) => moments.push(Moment::MasterOn),
                (true, false) => moments.push(Moment::MasterOff),
                _ => {}
            }
        }
        if written(DEVICE_CONTROL + 1).is_some_and(|high| high & (INITIATE_FLR >> 8) as u8 != 0) {
            moments.push(Moment::Reset);
        }
        moments
    }

    /// Bus Master Enable off, as a machine leaves it when a driver is gone.
    pub(super) fn clear_master(&mut self) {
        self.set16(COMMAND, self.get16(COMMAND) & !BUS_MASTER);
    }

    /// Every writable bit to its default, as a reset of the function leaves it. Errors logged in
    /// the sticky AER registers stay (PCIe 7.10).
    pub(super) fn reset(&mut self) {
        let sticky = self.bytes[AER..AER + 0x2c].to_vec();
        *self = Self::default();
        self.bytes[AER..AER + 0x2c].copy_from_slice(&sticky);
    }

    /// Whether the function may issue requests: bus master set and in D0.
    #[must_use]
    pub(super) fn is_bus_master(&self) -> bool {
        self.get16(COMMAND) & BUS_MASTER != 0 && self.power_state() == 0
    }

    /// Whether the function answers memory requests: memory space on and in D0.
    #[must_use]
    pub(super) fn decodes_memory(&self) -> bool {
        self.get16(COMMAND) & MEMORY_SPACE != 0 && self.power_state() == 0
    }

    /// 0 for D0, 3 for D3hot.
    #[must_use]
    pub(super) fn power_state(&self) -> u8 {
        self.bytes[PM_CONTROL] & 3
    }

    /// Notes a read request that nobody completed.
    pub(super) fn log_unsupported_request(&mut self) {
        self.set16(DEVICE_STATUS, self.get16(DEVICE_STATUS) | DEVICE_ERRORS);
        self.set32(AER + 4, self.get32(AER + 4) | UNSUPPORTED_REQUEST);
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn get32(&self, at: usize) -> u32 {
        u32::from(self.get16(at)) | u32::from(self.get16(at + 2)) << 16
    }

    fn set16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn allow16(&mut self, at: usize, mask: u16) {
        self.writable[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn allow32(&mut self, at: usize, mask: u32) {
        self.writable[at..at + 4].copy_from_slice(&mask.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use failstop_pci::capabilities::Capabilities;

    fn word(space: &Space, at: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn the_capability_lists_parse() {
        let space = Space::default();
        let mut bytes = vec![0; SIZE];
        space.read(0, &mut bytes);
        let found = Capabilities::parse(&bytes).unwrap();
        assert!(found.pcie.is_some());
    }

    #[test]
    fn sizing_bar_0_finds_128_kib() {
        let mut space = Space::default();
        space.write(0x10, &u32::MAX.to_le_bytes());
        assert_eq!(word(&space, 0x10), 0xfffe_0000);
    }

    #[test]
    fn sizing_bar_3_finds_a_64_bit_bar_of_16_kib() {
        let mut space = Space::default();
        space.write(0x1c, &[0xff; 8]);
        assert_eq!(
            (word(&space, 0x1c), word(&space, 0x20)),
            (0xffff_c004, u32::MAX)
        );
    }

    #[test]
    fn ids_cannot_be_written() {
        let mut space = Space::default();
        space.write(0, &[0; 4]);
        assert_eq!(word(&space, 0), 0x10c9_8086);
    }

    #[test]
    fn the_flr_bit_starts_a_reset_and_reads_back_zero() {
        let mut space = Space::default();
        let effect = space.write(DEVICE_CONTROL, &0xa810u16.to_le_bytes());
        assert_eq!(effect, Effect::FunctionLevelReset);
        assert_eq!(word(&space, DEVICE_CONTROL) & 0x8000, 0);
    }

    #[test]
    fn leaving_d3hot_is_reported_and_d3hot_is_no_bus_master() {
        let mut space = Space::default();
        space.write(COMMAND, &[6, 0]);
        space.write(PM_CONTROL, &[3, 0]);
        assert!(!space.is_bus_master() && !space.decodes_memory());
        assert_eq!(space.write(PM_CONTROL, &[0, 0]), Effect::PoweredUp);
    }

    #[test]
    fn a_reset_clears_command_and_keeps_logged_errors() {
        let mut space = Space::default();
        space.write(COMMAND, &[6, 0]);
        space.log_unsupported_request();
        space.reset();
        assert!(!space.is_bus_master());
        assert_eq!(word(&space, AER + 4), UNSUPPORTED_REQUEST);
    }

    #[test]
    fn a_write_past_the_end_changes_nothing_and_does_not_panic() {
        let mut space = Space::default();
        assert_eq!(space.write(usize::MAX, &[1, 2, 3]), Effect::None);
    }
}
