//! Registers of BAR 0, one line each. The counters are the igb family's
//! ([`crate::intel::statistics`]).
//!
//! The 82574 has two receive and two transmit queues; the driver uses the first of each.

use super::bits::{
    ExtendedConfiguration, InterruptCause, PcieControl, PcieControl2, QueueControl, ReceiveFilter,
};
use crate::intel::bits::{
    AddressHigh, Control, ControlExtended, EepromControl, EepromRead, Mdi, ReceiveChecksum,
    ReceiveControl, Status, TransmitControl,
};

/// Pairs of [`RAL`] and [`RAH`].
pub const RECEIVE_ADDRESSES: u32 = 16;
/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 128 * 1024;

failstop_pci::registers! {
    /// Every register of the family that this workspace uses.
    pub REGISTERS {
        /// Device control. §10.2.2.1
        CTRL: Reg<Control> = 0x0000;
        /// Device status; writes clear PHYRA and nothing else. §10.2.2.2
        STATUS: Reg<Status> = 0x0008;
        /// EEPROM control. §10.2.2
        EECD: Reg<EepromControl> = 0x0010;
        /// EEPROM read: one word by address. §10.2.2
        EERD: Reg<EepromRead> = 0x0014;
        /// Extended device control. §10.2.2
        CTRL_EXT: Reg<ControlExtended> = 0x0018;
        /// MDI control: the way to the PHY's registers. §10.2.2.7
        MDIC: Reg<Mdi> = 0x0020;
        /// Interrupt causes; a read clears them unless EIAC does. §10.2.4
        ICR: ReadClear<InterruptCause> = 0x00C0;
        /// Interrupt cause set. §10.2.4
        ICS: Reg<InterruptCause> = 0x00C8;
        /// Interrupt mask set and read. §10.2.4
        IMS: Reg<InterruptCause> = 0x00D0;
        /// Interrupt mask clear. §10.2.4
        IMC: Reg<InterruptCause> = 0x00D8;
        /// Interrupt auto clear: causes that an MSI-X message clears from ICR. §10.2.4
        EIAC: Reg<InterruptCause> = 0x00DC;
        /// Interrupt acknowledge auto mask: with CTRL_EXT.EIAME, causes that an MSI-X message masks. §10.2.4
        IAM: Reg<InterruptCause> = 0x00E0;
        /// Vector allocation, four bits a cause, [`ivar`](super::bits::ivar). §10.2.4.9
        IVAR: Reg<u32> = 0x00E4;
        /// Receive control. §10.2.5.1
        RCTL: Reg<ReceiveControl> = 0x0100;
        /// Transmit control. §10.2.6.1
        TCTL: Reg<TransmitControl> = 0x0400;
        /// Extended configuration: who may use the MDI bus. §10.2.2
        EXTCNF_CTRL: Reg<ExtendedConfiguration> = 0x0F00;
        /// Flow control receive threshold, low; 0: no XON is sent. §10.2.2
        FCRTL: Reg<u32> = 0x2160;
        /// Flow control receive threshold, high; 0: no XOFF is sent. §10.2.2
        FCRTH: Reg<u32> = 0x2168;
        /// Receive queue 0: descriptor base, low 32 bits, 16-byte aligned. §10.2.5
        RDBAL: Reg<u32> = 0x2800;
        /// Receive queue 0: descriptor base, high 32 bits. §10.2.5
        RDBAH: Reg<u32> = 0x2804;
        /// Receive queue 0: ring length in bytes, a multiple of 128. §10.2.5
        RDLEN: Reg<u32> = 0x2808;
        /// Receive queue 0: head, in descriptors: the next to be written back; written only after a reset. §10.2.5
        RDH: Reg<u32> = 0x2810;
        /// Receive queue 0: tail, in descriptors; the driver's. §10.2.5
        RDT: Reg<u32> = 0x2818;
        /// Receive queue 0: thresholds. §10.2.5.11
        RXDCTL: Reg<QueueControl> = 0x2828;
        /// Transmit queue 0: descriptor base, low 32 bits, 16-byte aligned. §10.2.6
        TDBAL: Reg<u32> = 0x3800;
        /// Transmit queue 0: descriptor base, high 32 bits. §10.2.6
        TDBAH: Reg<u32> = 0x3804;
        /// Transmit queue 0: ring length in bytes, a multiple of 128. §10.2.6
        TDLEN: Reg<u32> = 0x3808;
        /// Transmit queue 0: head, in descriptors; written only after a reset. §10.2.6
        TDH: Reg<u32> = 0x3810;
        /// Transmit queue 0: tail, in descriptors; the driver's. §10.2.6
        TDT: Reg<u32> = 0x3818;
        /// Transmit queue 0: thresholds. §10.2.6.10
        TXDCTL: Reg<QueueControl> = 0x3828;
        /// Receive checksum control: bits 7:0 where the packet checksum starts, IPOFLD and TUOFLD set by every reset. §10.2.5
        RXCSUM: Reg<ReceiveChecksum> = 0x5000;
        /// Receive filter control: descriptor format, header parsing. §10.2.5
        RFCTL: Reg<ReceiveFilter> = 0x5008;
        /// Multicast table, first of 128 words; stride 4. §10.2.5
        MTA: Reg<u32> = 0x5200;
        /// Receive address 0, low 32 bits; stride 8, 16 entries. Entry 0 is loaded from the NVM by reset. §10.2.5
        RAL: Reg<u32> = 0x5400;
        /// Receive address 0, high 16 bits, and whether the entry is valid; stride 8. §10.2.5
        RAH: Reg<AddressHigh> = 0x5404;
        /// Multiple receive queues: 0 sends everything to queue 0. §10.2.5
        MRQC: Reg<u32> = 0x5818;
        /// PCIe control. §10.2.3
        GCR: Reg<PcieControl> = 0x5B00;
        /// PCIe control 2. §10.2.3
        GCR2: Reg<PcieControl2> = 0x5B64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Literal offsets, from Linux's e1000e and QEMU's model.
    #[test]
    fn tails_are_where_linux_finds_them() {
        assert_eq!((RDT.offset(), TDT.offset()), (0x2818, 0x3818));
    }

    #[test]
    fn every_register_is_inside_the_bar() {
        assert!(REGISTERS.iter().all(|r| u64::from(r.offset) < BAR_SIZE));
    }

    #[test]
    fn no_two_registers_share_an_offset() {
        let mut offsets: Vec<u32> = REGISTERS.iter().map(|r| r.offset).collect();
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), REGISTERS.len());
    }
}
