//! The statistics block: 64 registers from 0x4000 on, and a few host counters behind them. Every
//! one is cleared by a read and sticks at all-ones instead of wrapping. §8.18
//!
//! Sections are the 82576 datasheet's, and offsets that it reserves are left out. What is read by
//! `count` the 82574 counts at the same offsets (its §10.2.7).

use failstop_pci::register::ReadClear;
use failstop_pci::window::Registers;

use crate::provider::Statistics;

/// Where the block starts, in bytes from the start of BAR 0.
pub const START: u32 = 0x4000;
/// Registers of the block, reserved ones included; all are read-to-clear.
pub const COUNT: u32 = 64;

/// What was counted since the last reading.
pub(crate) fn count(registers: &mut Registers) -> Statistics {
    let mut take = |register: ReadClear<u32>| match registers.take(register) {
        // A device that is gone counted nothing.
        u32::MAX => 0,
        count => u64::from(count),
    };
    Statistics {
        rx_frames: take(GPRC),
        rx_bytes: take(GORCL) | take(GORCH) << 32,
        tx_frames: take(GPTC),
        tx_bytes: take(GOTCL) | take(GOTCH) << 32,
        rx_missed: take(MPC),
        rx_no_buffer: take(RNBC),
        rx_crc_errors: take(CRCERRS),
        rx_length_errors: take(RLEC) + take(RUC) + take(ROC) + take(RFC) + take(RJC),
        rx_pause: take(XOFFRXC) + take(XONRXC),
        rx_management: take(MGTPRC),
    }
}

failstop_pci::registers! {
    /// Every statistics register.
    pub STATISTICS {
        /// CRC errors. §8.18
        CRCERRS: ReadClear<u32> = 0x4000;
        /// Alignment errors. §8.18
        ALGNERRC: ReadClear<u32> = 0x4004;
        /// Symbol errors. §8.18
        SYMERRS: ReadClear<u32> = 0x4008;
        /// Receive errors. §8.18
        RXERRC: ReadClear<u32> = 0x400C;
        /// Missed packets: no room in the packet buffer. §8.18
        MPC: ReadClear<u32> = 0x4010;
        /// Single collisions. §8.18
        SCC: ReadClear<u32> = 0x4014;
        /// Excessive collisions. §8.18
        ECOL: ReadClear<u32> = 0x4018;
        /// Multiple collisions. §8.18
        MCC: ReadClear<u32> = 0x401C;
        /// Late collisions. §8.18
        LATECOL: ReadClear<u32> = 0x4020;
        /// Collisions. §8.18
        COLC: ReadClear<u32> = 0x4028;
        /// Deferred transmissions. §8.18
        DC: ReadClear<u32> = 0x4030;
        /// Transmissions without carrier sense. §8.18
        TNCRS: ReadClear<u32> = 0x4034;
        /// Host transmit packets discarded by the MAC. §8.18
        HTDPMC: ReadClear<u32> = 0x403C;
        /// Receive length errors. §8.18
        RLEC: ReadClear<u32> = 0x4040;
        /// XON frames received. §8.18
        XONRXC: ReadClear<u32> = 0x4048;
        /// XON frames sent. §8.18
        XONTXC: ReadClear<u32> = 0x404C;
        /// XOFF frames received. §8.18
        XOFFRXC: ReadClear<u32> = 0x4050;
        /// XOFF frames sent. §8.18
        XOFFTXC: ReadClear<u32> = 0x4054;
        /// Unsupported flow control frames received. §8.18
        FCRUC: ReadClear<u32> = 0x4058;
        /// Packets received of 64 bytes, CRC included. §8.18
        PRC64: ReadClear<u32> = 0x405C;
        /// Packets received of 65 to 127 bytes. §8.18
        PRC127: ReadClear<u32> = 0x4060;
        /// Packets received of 128 to 255 bytes. §8.18
        PRC255: ReadClear<u32> = 0x4064;
        /// Packets received of 256 to 511 bytes. §8.18
        PRC511: ReadClear<u32> = 0x4068;
        /// Packets received of 512 to 1023 bytes. §8.18
        PRC1023: ReadClear<u32> = 0x406C;
        /// Packets received of 1024 bytes and more. §8.18
        PRC1522: ReadClear<u32> = 0x4070;
        /// Good packets received: passed the address filter, without error. §8.18
        GPRC: ReadClear<u32> = 0x4074;
        /// Broadcast packets received. §8.18
        BPRC: ReadClear<u32> = 0x4078;
        /// Multicast packets received. §8.18
        MPRC: ReadClear<u32> = 0x407C;
        /// Good packets sent. §8.18
        GPTC: ReadClear<u32> = 0x4080;
        /// Good octets received, low 32 bits, CRC included. §8.18
        GORCL: ReadClear<u32> = 0x4088;
        /// Good octets received, high 32 bits. §8.18
        GORCH: ReadClear<u32> = 0x408C;
        /// Good octets sent, low 32 bits, CRC included. §8.18
        GOTCL: ReadClear<u32> = 0x4090;
        /// Good octets sent, high 32 bits. §8.18
        GOTCH: ReadClear<u32> = 0x4094;
        /// Receptions without a free buffer. §8.18
        RNBC: ReadClear<u32> = 0x40A0;
        /// Undersized packets received. §8.18
        RUC: ReadClear<u32> = 0x40A4;
        /// Fragments received. §8.18
        RFC: ReadClear<u32> = 0x40A8;
        /// Oversized packets received. §8.18
        ROC: ReadClear<u32> = 0x40AC;
        /// Jabbers received. §8.18
        RJC: ReadClear<u32> = 0x40B0;
        /// Management packets received. §8.18
        MGTPRC: ReadClear<u32> = 0x40B4;
        /// Management packets dropped. §8.18
        MGTPDC: ReadClear<u32> = 0x40B8;
        /// Management packets sent. §8.18
        MGTPTC: ReadClear<u32> = 0x40BC;
        /// Total octets received, low 32 bits. §8.18
        TORL: ReadClear<u32> = 0x40C0;
        /// Total octets received, high 32 bits. §8.18
        TORH: ReadClear<u32> = 0x40C4;
        /// Total octets sent, low 32 bits. §8.18
        TOTL: ReadClear<u32> = 0x40C8;
        /// Total octets sent, high 32 bits. §8.18
        TOTH: ReadClear<u32> = 0x40CC;
        /// Total packets received, filtered ones included. §8.18
        TPR: ReadClear<u32> = 0x40D0;
        /// Total packets sent. §8.18
        TPT: ReadClear<u32> = 0x40D4;
        /// Packets sent of 64 bytes, CRC included. §8.18
        PTC64: ReadClear<u32> = 0x40D8;
        /// Packets sent of 65 to 127 bytes. §8.18
        PTC127: ReadClear<u32> = 0x40DC;
        /// Packets sent of 128 to 255 bytes. §8.18
        PTC255: ReadClear<u32> = 0x40E0;
        /// Packets sent of 256 to 511 bytes. §8.18
        PTC511: ReadClear<u32> = 0x40E4;
        /// Packets sent of 512 to 1023 bytes. §8.18
        PTC1023: ReadClear<u32> = 0x40E8;
        /// Packets sent of 1024 bytes and more. §8.18
        PTC1522: ReadClear<u32> = 0x40EC;
        /// Multicast packets sent. §8.18
        MPTC: ReadClear<u32> = 0x40F0;
        /// Broadcast packets sent. §8.18
        BPTC: ReadClear<u32> = 0x40F4;
        /// TCP segmentation contexts. §8.18
        TSCTC: ReadClear<u32> = 0x40F8;
        /// Interrupt assertions. §8.18
        IAC: ReadClear<u32> = 0x4100;
        /// Packets to the host. §8.18
        RPTHC: ReadClear<u32> = 0x4104;
        /// Good packets sent by the host. §8.18
        HGPTC: ReadClear<u32> = 0x4118;
        /// Receive descriptor minimum threshold interrupts. §8.18
        ICRXDMTC: ReadClear<u32> = 0x4120;
        /// Good octets received by the host, low 32 bits. §8.18
        HGORCL: ReadClear<u32> = 0x4128;
        /// Good octets received by the host, high 32 bits. §8.18
        HGORCH: ReadClear<u32> = 0x412C;
        /// Good octets sent by the host, low 32 bits. §8.18
        HGOTCL: ReadClear<u32> = 0x4130;
        /// Good octets sent by the host, high 32 bits. §8.18
        HGOTCH: ReadClear<u32> = 0x4134;
        /// Length errors. §8.18
        LENERRS: ReadClear<u32> = 0x4138;
    }
}
