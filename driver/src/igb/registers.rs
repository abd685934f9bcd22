//! Registers of BAR 0, one line each. Statistics have a list of their own
//! ([`statistics`](super::statistics)).
//!
//! A row of registers is declared by its first, and reached by [`Reg::of`] with the stride that its
//! line names: `RDT.of(queue, QUEUE_STRIDE)`. Queues 0 to 3 can also be reached at the older
//! parts' addresses, 0x2800 (receive) and 0x3800 (transmit) + 0x100 * queue; both name the same
//! register. Likewise 0x00C0 to 0x00E0 are the older addresses of ICR, ICS, IMS, IMC and IAM.
//!
//! [`Reg::of`]: failstop_pci::register::Reg::of

use super::bits::{
    AddressHigh, Control, ControlExtended, EepromControl, EepromRead, GeneralInterrupt,
    InterruptCause, Mdi, MultipleReceive, PcieControl, PoolOffload, ReceiveChecksum,
    ReceiveControl, ReceiveQueueControl, SoftwareFirmwareSync, SoftwareSemaphore, SplitReceive,
    Status, TransmitControl, TransmitQueueControl,
};

/// Bytes between the registers of one queue and those of the next.
pub const QUEUE_STRIDE: u32 = 0x40;
/// Bytes between the older addresses of queues 0 to 3.
pub const QUEUE_ALIAS_STRIDE: u32 = 0x100;
/// Where the older addresses of the receive queues start.
pub const RECEIVE_ALIAS: u32 = 0x2800;
/// Where the older addresses of the transmit queues start.
pub const TRANSMIT_ALIAS: u32 = 0x3800;
/// How many queues have an older address.
pub const QUEUE_ALIASES: u32 = 4;
/// Bytes between one receive address pair and the next.
pub const ADDRESS_STRIDE: u32 = 8;
/// Bytes from one 32-bit table entry to the next.
pub const WORD_STRIDE: u32 = 4;
/// Entries of [`MTA`] and of [`VFTA`].
pub const TABLE_ENTRIES: u32 = 128;
/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 128 * 1024;

failstop_pci::registers! {
    /// Every register of the family that this workspace uses.
    pub REGISTERS {
        /// Device control. §8.2.1
        CTRL: Reg<Control> = 0x0000;
        /// Device status; writes are ignored. §8.2.2
        STATUS: Reg<Status> = 0x0008;
        /// EEPROM and flash control (EEC). §8.4.1
        EECD: Reg<EepromControl> = 0x0010;
        /// EEPROM read: one word by address. §8.4.2
        EERD: Reg<EepromRead> = 0x0014;
        /// Extended device control. §8.2.3
        CTRL_EXT: Reg<ControlExtended> = 0x0018;
        /// MDI control: the way to the PHY's registers. §8.2.4
        MDIC: Reg<Mdi> = 0x0020;
        /// Flow control address, low half. §8.5
        FCAL: Reg<u32> = 0x0028;
        /// Flow control address, high half: 16 bits. §8.5
        FCAH: Reg<u32> = 0x002C;
        /// Flow control type: 16 bits. §8.5
        FCT: Reg<u32> = 0x0030;
        /// Copper and fiber switch. §8.2
        CONNSW: Reg<u32> = 0x0034;
        /// VLAN EtherType. §8.2
        VET: Reg<u32> = 0x0038;
        /// Flow control transmit timer: 16 bits. §8.5
        FCTTV: Reg<u32> = 0x0170;
        /// LED control. §8.2
        LEDCTL: Reg<u32> = 0x0E00;
        /// Flow control receive threshold, low. §8.5
        FCRTL: Reg<u32> = 0x2160;
        /// Flow control receive threshold, high. §8.5
        FCRTH: Reg<u32> = 0x2168;
        /// Flow control refresh threshold. §8.5
        FCRTV: Reg<u32> = 0x2460;
        /// Receive packet buffer size, in KiB. §8.3
        RXPBS: Reg<u32> = 0x2404;
        /// Transmit packet buffer size, in KiB. §8.3
        TXPBS: Reg<u32> = 0x3404;
        /// PCIe control. §8.6.1
        GCR: Reg<PcieControl> = 0x5B00;
        /// Function active and power state to manageability. §8.6
        FACTPS: Reg<u32> = 0x5B30;
        /// Software semaphore; a read sets SMBI when it was clear. §8.7
        SWSM: Reg<SoftwareSemaphore> = 0x5B50;
        /// Firmware semaphore. §8.7
        FWSM: Reg<u32> = 0x5B54;
        /// Software-firmware synchronisation. §8.7
        SW_FW_SYNC: Reg<SoftwareFirmwareSync> = 0x5B5C;

        /// Interrupt causes; a read clears them. Older address 0x00C0. §8.8.7
        ICR: ReadClear<InterruptCause> = 0x1500;
        /// Interrupt cause set. Older address 0x00C8. §8.8.8
        ICS: Reg<InterruptCause> = 0x1504;
        /// Interrupt mask set and read. Older address 0x00D0. §8.8.9
        IMS: Reg<InterruptCause> = 0x1508;
        /// Interrupt mask clear. Older address 0x00D8. §8.8.10
        IMC: Reg<InterruptCause> = 0x150C;
        /// Interrupt acknowledge auto-mask. Older address 0x00E0. §8.8.11
        IAM: Reg<InterruptCause> = 0x1510;
        /// General purpose interrupt enable: which interrupt mode. §8.8.15, §7.3.2.11
        GPIE: Reg<GeneralInterrupt> = 0x1514;
        /// Extended interrupt cause set, a bit per vector. §8.8.2
        EICS: Reg<u32> = 0x1520;
        /// Extended interrupt mask set and read, a bit per vector. §8.8.3
        EIMS: Reg<u32> = 0x1524;
        /// Extended interrupt mask clear, a bit per vector. §8.8.4
        EIMC: Reg<u32> = 0x1528;
        /// Extended interrupt auto clear, a bit per vector. §8.8.5
        EIAC: Reg<u32> = 0x152C;
        /// Extended interrupt auto mask, a bit per vector. §8.8.6
        EIAM: Reg<u32> = 0x1530;
        /// Extended interrupt causes, a bit per vector; clear by writing ones, do not read while EIAC is set (§7.3.4.2). §8.8.1
        EICR: ReadClear<u32> = 0x1580;
        /// Interrupt throttle of vector 0; stride 4, 25 vectors; the interval stands in bits 14:2, in microseconds. §8.8.12
        EITR: Reg<u32> = 0x1680;
        /// Vector allocation of queues 0 and 8; stride 4, 8 registers, [`ivar`](super::bits::ivar). §8.8.13
        IVAR: Reg<u32> = 0x1700;
        /// Vector allocation of the other causes in bits 15:8, of the TCP timer in 7:0. §8.8.14
        IVAR_MISC: Reg<u32> = 0x1740;

        /// Receive control. §8.10.1
        RCTL: Reg<ReceiveControl> = 0x0100;
        /// Receive checksum control. §8.10
        RXCSUM: Reg<ReceiveChecksum> = 0x5000;
        /// Longest packet received with long packets enabled, in bytes, VLAN tag and CRC included. §8.10
        RLPML: Reg<u32> = 0x5004;
        /// Receive filter control. §8.10
        RFCTL: Reg<u32> = 0x5008;
        /// Multicast table, first of 128 words; stride 4. §8.10
        MTA: Reg<u32> = 0x5200;
        /// Receive address 0, low 32 bits; stride 8, entries 0 to 15. Entry 0 is loaded from the NVM by reset. §8.10
        RAL: Reg<u32> = 0x5400;
        /// Receive address 0, high 16 bits, and whether the entry is valid; stride 8. §8.10
        RAH: Reg<AddressHigh> = 0x5404;
        /// Receive address 16, low 32 bits; stride 8, entries from 16 on. §8.10
        RAL16: Reg<u32> = 0x54E0;
        /// Receive address 16, high 16 bits; stride 8. §8.10
        RAH16: Reg<AddressHigh> = 0x54E4;
        /// VLAN filter table, first of 128 words; stride 4. §8.10
        VFTA: Reg<u32> = 0x5600;
        /// Multiple receive queues: RSS. §8.10
        MRQC: Reg<MultipleReceive> = 0x5818;
        /// RSS redirection table, first of 32 words; stride 4. §8.10
        RETA: Reg<u32> = 0x5C00;
        /// RSS random key, first of 10 words; stride 4. §8.10
        RSSRK: Reg<u32> = 0x5C80;
        /// Pool 0's offloads: stride 4, 8 pools. With virtualisation off pool 0 rules. §8.14
        VMOLR: Reg<PoolOffload> = 0x5AD0;
        /// Receive queue 0: descriptor base, low 32 bits, 128-byte aligned; stride 0x40. §8.10.5
        RDBAL: Reg<u32> = 0xC000;
        /// Receive queue 0: descriptor base, high 32 bits; stride 0x40. §8.10.6
        RDBAH: Reg<u32> = 0xC004;
        /// Receive queue 0: ring length in bytes, a multiple of 128; stride 0x40. §8.10.7
        RDLEN: Reg<u32> = 0xC008;
        /// Receive queue 0: buffer sizes and descriptor type; stride 0x40. §8.10.2
        SRRCTL: Reg<SplitReceive> = 0xC00C;
        /// Receive queue 0: head, in descriptors; the device's; stride 0x40. §8.10.8
        RDH: Reg<u32> = 0xC010;
        /// Receive queue 0: tail, in descriptors; the driver's; stride 0x40. §8.10.9
        RDT: Reg<u32> = 0xC018;
        /// Receive queue 0: enable, flush and thresholds; stride 0x40. ENABLE reads 0 until RCTL.RXEN is set. §8.10.10
        RXDCTL: Reg<ReceiveQueueControl> = 0xC028;
        /// Receive queue 0: packets dropped for want of descriptors; a read clears; stride 0x40. The
        /// statistics block counts none of them. §8.10
        RQDPC: ReadClear<u32> = 0xC030;

        /// Transmit control. §8.12.1
        TCTL: Reg<TransmitControl> = 0x0400;
        /// Extended transmit control. §8.12.2
        TCTL_EXT: Reg<u32> = 0x0404;
        /// Transmit inter-packet gap: IPGT 9:0, IPGR1 19:10, IPGR2 29:20. §8.12.3
        TIPG: Reg<u32> = 0x0410;
        /// DMA transmit control. §8.12
        DTXCTL: Reg<u32> = 0x3590;
        /// Transmit queue 0: descriptor base, low 32 bits, 128-byte aligned; stride 0x40. §8.12
        TDBAL: Reg<u32> = 0xE000;
        /// Transmit queue 0: descriptor base, high 32 bits; stride 0x40. §8.12
        TDBAH: Reg<u32> = 0xE004;
        /// Transmit queue 0: ring length in bytes, a multiple of 128; stride 0x40. §8.12
        TDLEN: Reg<u32> = 0xE008;
        /// Transmit queue 0: head, in descriptors; the device's; stride 0x40. §8.12
        TDH: Reg<u32> = 0xE010;
        /// Transmit queue 0: tail, in descriptors; the driver's; stride 0x40. §8.12
        TDT: Reg<u32> = 0xE018;
        /// Transmit queue 0: enable, flush and thresholds; stride 0x40. ENABLE reads 0 until TCTL.TXEN is set. §8.12.13
        TXDCTL: Reg<TransmitQueueControl> = 0xE028;
        /// Transmit queue 0: head write-back address, low bits; bit 0 enables; stride 0x40. §8.12
        TDWBAL: Reg<u32> = 0xE038;
        /// Transmit queue 0: head write-back address, high 32 bits; stride 0x40. §8.12
        TDWBAH: Reg<u32> = 0xE03C;

        /// Wake-up control. §8.20
        WUC: Reg<u32> = 0x5800;
        /// Wake-up filter control. §8.20
        WUFC: Reg<u32> = 0x5808;
        /// Wake-up status; ones clear. §8.20
        WUS: Reg<u32> = 0x5810;
        /// Management control. §8.21
        MANC: Reg<u32> = 0x5820;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Literal offsets, from the datasheet's register summary and Linux's igb: a shared mistake in
    // the list above would otherwise be seen by neither driver nor emulator.
    #[test]
    fn queue_registers_of_the_last_queue_are_where_linux_finds_them() {
        assert_eq!(RDT.of(15, QUEUE_STRIDE).offset(), 0xC3D8);
        assert_eq!(TXDCTL.of(15, QUEUE_STRIDE).offset(), 0xE3E8);
    }

    #[test]
    fn the_last_low_receive_address_ends_where_psrtype_begins() {
        assert_eq!(RAH.of(15, ADDRESS_STRIDE).offset() + 4, 0x5480);
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
