//! The igb family's control path: 82576, I350, I210.
//!
//! # What a destroy of a queue rests on
//!
//! RXDCTL.ENABLE and TXDCTL.ENABLE read back as the queue's state, not as what was written
//! (§8.10.10, §8.12.13). They speak of descriptor work, not of the last data write, so that the
//! sequence is that of the sibling 82598 (datasheet 3.2.3.2.6 and 3.2.3.2.8): for a receive queue,
//! clear ENABLE and poll it; for a transmit queue, stop posting, wait until TDH = TDT, clear ENABLE
//! and poll it; then let what is under way land (100 us) and read once more, which on PCIe pushes
//! posted writes ahead of it. The same reading must show the queue's thresholds, which are never
//! zero: all-ones or all-zero is no answer (C32).

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use failstop_pci::clock::Clock;
use failstop_pci::register::{ReadClear, Reg, Value};
use failstop_pci::reset::Canary;
use failstop_pci::window::{Doorbell, NoAnswer, Registers, StopBit, Stopped, Window};

use super::Part;
use super::bits::{
    AddressHigh, Control, EepromControl, EepromRead, GeneralInterrupt, InterruptCause, Mdi,
    MultipleReceive, PcieControl, PoolOffload, ReceiveChecksum, ReceiveControl,
    ReceiveQueueControl, SplitReceive, Status, Thresholds, TransmitControl, TransmitQueueControl,
    ivar, ivar_shift,
};
use super::descriptors;
use super::phy::{self, PhyControl};
use super::registers as reg;
use super::registers::{ADDRESS_STRIDE, QUEUE_STRIDE, TABLE_ENTRIES, WORD_STRIDE};
use super::statistics as stat;
use crate::provider::{
    Config, Formats, Limits, Link, MacAddress, NotStopped, Provider, ProviderError, RingSpec,
    SoftwareReset, Statistics,
};

/// Bytes of a frame check sequence.
const FCS: u32 = 4;
/// The longest packet that the family takes, in bytes, frame check sequence included. §8.10
const LONGEST_PACKET: u32 = 9728;
/// Receive thresholds: write back at once.
const RX_THRESHOLDS: Thresholds = Thresholds {
    prefetch: 8,
    host: 8,
    write_back: 1,
};
/// Transmit thresholds: write a report back at once.
const TX_THRESHOLDS: Thresholds = Thresholds {
    prefetch: 8,
    host: 1,
    write_back: 0,
};
/// After CTRL.RST nothing is accessed for so long. §4.2.1.6.1
const RESET_SETTLE: Duration = Duration::from_millis(1);
/// How long the NVM may take to load after a reset; Linux gives it 10 ms.
const AUTO_READ: Duration = Duration::from_millis(50);
/// How long an MDIC or NVM command may take.
const COMMAND: Duration = Duration::from_millis(100);
/// How long a queue may take to start or stop. Linux and DPDK give siblings 10 ms.
const QUEUE: Duration = Duration::from_millis(100);
/// How long a transmit queue may take to send what was posted.
const DRAIN: Duration = Duration::from_millis(200);
/// How long writes that were under way may take to land.
const SETTLE: Duration = Duration::from_micros(100);
const POLL: Duration = Duration::from_micros(20);
/// How long a PHY that loops back may take to raise the link.
const LOOPBACK_LINK: Duration = Duration::from_millis(200);
/// How long autonegotiation may take.
const AUTONEG: Duration = Duration::from_millis(1500);

/// Drives one function of the family.
#[derive(Debug)]
pub(crate) struct Igb {
    part: Part,
    registers: Registers,
    clock: Arc<dyn Clock>,
    mac: MacAddress,
    longest_packet: u32,
    counted: Statistics,
}

impl Igb {
    pub(crate) fn new(part: Part, window: Arc<Window>, clock: Arc<dyn Clock>) -> Self {
        Self {
            part,
            registers: Registers::new(window),
            clock,
            mac: MacAddress::default(),
            longest_packet: 0,
            counted: Statistics::default(),
        }
    }

    fn device(&self) -> String {
        self.registers.device_name().to_owned()
    }

    fn init_failed(&self, step: &'static str) -> impl FnOnce(NoAnswer) -> ProviderError {
        let device = self.device();
        move |source| ProviderError::Init {
            device,
            step,
            source,
        }
    }

    /// A living function of the family reads neither all-ones nor all-zero in STATUS after a reset.
    fn check_alive(&self) -> Result<(), ProviderError> {
        let value = self.registers.read(reg::STATUS).bits();
        match value {
            0 | u32::MAX => Err(ProviderError::Gone {
                device: self.device(),
                register: "STATUS",
                value,
            }),
            _ => Ok(()),
        }
    }

    fn mask_interrupts(&mut self) {
        self.registers.write(reg::IMC, InterruptCause::all());
        self.registers.write(reg::EIMC, u32::MAX);
        self.registers.take(reg::ICR);
    }

    /// The family's own reset, from a device in use to one at rest.
    fn reset(&mut self) -> Result<(), ProviderError> {
        self.mask_interrupts();
        software_reset(&self.registers, &*self.clock)
            .map_err(self.init_failed("loading the NVM after a reset"))?;
        self.mask_interrupts();
        self.registers
            .update(reg::GCR, |gcr| gcr - PcieControl::COMPLETION_TIMEOUT_RESEND);
        Ok(())
    }

    /// The station address: loaded into the first receive address by reset, or in the NVM's first
    /// three words.
    fn load_mac(&mut self) -> Result<(), ProviderError> {
        let low = self.registers.read(reg::RAL).to_le_bytes();
        let high = self.registers.read(reg::RAH).bits().to_le_bytes();
        let mut mac = MacAddress([low[0], low[1], low[2], low[3], high[0], high[1]]);
        if !mac.is_station() {
            for word in 0..3 {
                self.registers.write(reg::EERD, EepromRead::of(word));
                let read = self
                    .registers
                    .wait(&*self.clock, reg::EERD, COMMAND, POLL, |r: EepromRead| {
                        r.contains(EepromRead::DONE)
                    })
                    .map_err(self.init_failed("reading the NVM"))?;
                let at = usize::from(word) * 2;
                mac.0[at..at + 2].copy_from_slice(&read.data().to_le_bytes());
            }
        }
        if !mac.is_station() {
            return Err(ProviderError::NoAddress {
                device: self.device(),
                mac,
            });
        }
        self.mac = mac;
        Ok(())
    }

    /// Writes a PHY register. §8.2.4
    fn write_phy(&self, register: u32, value: u16) -> Result<(), ProviderError> {
        self.registers.write(reg::MDIC, Mdi::write(register, value));
        self.registers
            .wait(&*self.clock, reg::MDIC, COMMAND, POLL, |mdic: Mdi| {
                mdic.contains(Mdi::READY)
            })
            .map(drop)
            .map_err(self.init_failed("writing a PHY register"))
    }

    /// Lets PHY and MAC find the link; with `loopback`, makes the PHY the other end (§3.5.6.3.1:
    /// MAC loopback is not used on this family).
    fn start_link(&mut self, loopback: bool) -> Result<(), ProviderError> {
        self.registers.update(reg::CTRL, |ctrl| {
            (ctrl | Control::SLU) - Control::FRCSPD - Control::FRCDPLX - Control::RST
        });
        let restart = PhyControl::AUTONEG | PhyControl::RESTART_AUTONEG;
        if !loopback {
            return self.write_phy(phy::CONTROL, restart.bits());
        }
        if self.force_loopback(LOOPBACK_LINK).is_err() {
            // Some models raise the link by autonegotiation only; silicon without a cable never does.
            self.write_phy(phy::CONTROL, restart.bits())?;
            self.wait_link(AUTONEG);
            self.force_loopback(AUTONEG)?;
        }
        Ok(())
    }

    /// The PHY as the other end of the link, at a forced speed; waits until the link is up.
    fn force_loopback(&self, deadline: Duration) -> Result<(), ProviderError> {
        let forced = PhyControl::LOOPBACK | PhyControl::SPEED_1000 | PhyControl::FULL_DUPLEX;
        self.write_phy(phy::CONTROL, forced.bits())?;
        self.registers.update(reg::CTRL, |ctrl| {
            let cleared = ctrl - Control::SPEED_100 - Control::SPEED_1000;
            cleared
                | Control::FRCSPD
                | Control::FRCDPLX
                | Control::SPEED_1000
                | Control::FD
                | Control::SLU
        });
        let up = |status: Status| status.contains(Status::LU);
        self.registers
            .wait(
                &*self.clock,
                reg::STATUS,
                deadline,
                Duration::from_millis(1),
                up,
            )
            .map(drop)
            .map_err(self.init_failed("raising the link in PHY loopback"))
    }

    fn set_filters(&mut self, config: &Config) {
        let registers = &self.registers;
        let [a, b, c, d, _, _] = self.mac.0;
        registers.write(reg::RAL, u32::from_le_bytes([a, b, c, d]));
        registers.write(reg::RAH, AddressHigh::of(self.mac.0));
        for entry in 1..self.part.receive_addresses().min(16) {
            registers.write(reg::RAH.of(entry, ADDRESS_STRIDE), AddressHigh::empty());
            registers.write(reg::RAL.of(entry, ADDRESS_STRIDE), 0);
        }
        for entry in 0..TABLE_ENTRIES {
            registers.write(reg::MTA.of(entry, WORD_STRIDE), 0);
        }
        registers.write(reg::MRQC, MultipleReceive::empty());
        registers.write(
            reg::RXCSUM,
            ReceiveChecksum::IPOFLD | ReceiveChecksum::TUOFLD,
        );
        self.longest_packet = config.longest_frame + FCS;
        registers.write(reg::RLPML, self.longest_packet);
        let pool = PoolOffload::LPE | PoolOffload::AUPE | PoolOffload::BAM | PoolOffload::STRCRC;
        registers.write(
            reg::VMOLR,
            pool | PoolOffload::from_bits_retain(self.longest_packet),
        );
    }
}

/// Shows whether a reset happened: this driver sends no pause frames, so that nothing reads the
/// timer. 16 bits, 0 after every reset. §8.5
const CANARY: Canary = Canary {
    register: reg::FCTTV.offset(),
    planted: 0x5AFE,
    reset: 0,
    mask: 0xFFFF,
};

/// The family's own reset. §4.2.1.6
fn software_reset(window: &Window, clock: &dyn Clock) -> Result<(), NoAnswer> {
    window.write(reg::RCTL, ReceiveControl::empty());
    window.write(reg::TCTL, TransmitControl::PSP);
    // A read that gets no answer must not be sent again for ever.
    window.update(reg::GCR, |gcr| gcr - PcieControl::COMPLETION_TIMEOUT_RESEND);
    window.update(reg::CTRL, |ctrl| ctrl | Control::RST);
    clock.sleep(RESET_SETTLE);
    let loaded = |eecd: EepromControl| eecd.contains(EepromControl::AUTO_RD);
    match window.wait(clock, reg::EECD, AUTO_READ, RESET_SETTLE, loaded) {
        Err(slow @ NoAnswer::TimedOut { .. }) => {
            // A part without an NVM never says so, nor does every model; whether what the NVM holds
            // arrived shows in the station address.
            log::info!(
                "{}: the NVM did not report loading: {slow}",
                window.device_name()
            );
            Ok(())
        }
        other => other.map(drop),
    }
}

impl Provider for Igb {
    fn name(&self) -> &'static str {
        "igb"
    }

    fn part(&self) -> &'static str {
        self.part.name()
    }

    fn limits(&self) -> Limits {
        Limits {
            queues: self.part.queues(),
            longest_frame: LONGEST_PACKET - FCS,
            // RDLEN and TDLEN: 20 bits of bytes, 16 a descriptor. §8.10
            ring_entries: 32_768,
            address_mask: u64::MAX,
            buffer_step: 1024,
        }
    }

    fn formats(&self) -> Formats {
        Formats::Advanced
    }

    fn bring_up(&mut self, config: &Config) -> Result<(), ProviderError> {
        let limits = self.limits();
        if !(60..=limits.longest_frame).contains(&config.longest_frame) {
            return Err(ProviderError::OutOfRange {
                device: self.device(),
                what: "the longest frame",
                value: config.longest_frame.into(),
                least: 60,
                most: limits.longest_frame.into(),
            });
        }
        self.check_alive()?;
        self.reset()?;
        self.check_alive()?;
        self.load_mac()?;
        self.start_link(config.loopback)?;
        self.set_filters(config);
        self.statistics();
        self.counted = Statistics::default();
        let receive = ReceiveControl::RXEN
            | ReceiveControl::LPE
            | ReceiveControl::BAM
            | ReceiveControl::SECRC;
        self.registers.write(reg::RCTL, receive);
        self.set_promiscuous(config.promiscuous);
        // Collision threshold 15, as the datasheet recommends. §8.12.1
        let threshold = TransmitControl::from_bits_retain(15 << 4);
        let transmit = TransmitControl::TXEN | TransmitControl::PSP | TransmitControl::RTLC;
        self.registers.write(reg::TCTL, transmit | threshold);
        Ok(())
    }

    fn mac(&self) -> MacAddress {
        self.mac
    }

    fn link(&mut self) -> Link {
        let status = self.registers.read(reg::STATUS);
        let up = status.contains(Status::LU) && status.bits() != u32::MAX;
        let speed = match (
            status.contains(Status::SPEED_1000),
            status.contains(Status::SPEED_100),
        ) {
            (true, _) => 1000,
            (false, true) => 100,
            (false, false) => 10,
        };
        Link {
            up,
            speed,
            full_duplex: status.contains(Status::FD),
        }
    }

    fn wait_link(&mut self, deadline: Duration) -> Link {
        let up = |status: Status| status.contains(Status::LU);
        let interval = Duration::from_millis(1);
        // Down at the deadline is an answer, which the reading below gives.
        let _ = self
            .registers
            .wait(&*self.clock, reg::STATUS, deadline, interval, up);
        self.link()
    }

    fn set_promiscuous(&mut self, on: bool) {
        let both = ReceiveControl::UPE | ReceiveControl::MPE;
        self.registers
            .update(reg::RCTL, |rctl| if on { rctl | both } else { rctl - both });
    }

    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        let split = SplitReceive::one_buffer(ring.buffer) | SplitReceive::DROP_EN;
        self.registers
            .write(reg::SRRCTL.of(queue, QUEUE_STRIDE), split);
        self.start_queue(&RECEIVE, queue, ring)
    }

    fn stop_rx(&mut self, queue: u32) -> Result<Stopped, NotStopped> {
        Ok(self.stop_queue(&RECEIVE, queue)?)
    }

    fn start_tx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.start_queue(&TRANSMIT, queue, ring)
    }

    fn stop_tx(&mut self, queue: u32) -> Result<Stopped, NotStopped> {
        let head = reg::TDH.of(queue, QUEUE_STRIDE);
        let tail = self.registers.read(reg::TDT.of(queue, QUEUE_STRIDE));
        let drained = |head: u32| head == tail;
        // With the link down nothing drains; what was not sent is flushed then, so that the result
        // of the wait is not needed. A function that is gone shows in the reading below.
        let _ = self
            .registers
            .wait(&*self.clock, head, DRAIN, POLL, drained);
        Ok(self.stop_queue(&TRANSMIT, queue)?)
    }

    fn canary(&self) -> Canary {
        CANARY
    }

    fn software_reset(&self) -> SoftwareReset {
        software_reset
    }

    fn statistics(&mut self) -> Statistics {
        let mut take = |register: ReadClear<u32>| match self.registers.take(register) {
            // A device that is gone counted nothing.
            u32::MAX => 0,
            count => u64::from(count),
        };
        let now = Statistics {
            rx_frames: take(stat::GPRC),
            rx_bytes: take(stat::GORCL) | take(stat::GORCH) << 32,
            tx_frames: take(stat::GPTC),
            tx_bytes: take(stat::GOTCL) | take(stat::GOTCH) << 32,
            rx_missed: take(stat::MPC),
            rx_no_buffer: take(stat::RNBC),
            rx_crc_errors: take(stat::CRCERRS),
            rx_length_errors: take(stat::RLEC)
                + take(stat::RUC)
                + take(stat::ROC)
                + take(stat::RFC)
                + take(stat::RJC),
            rx_pause: take(stat::XOFFRXC) + take(stat::XONRXC),
        };
        self.counted = self.counted + now;
        self.counted
    }

    fn route_rx_interrupt(&mut self, queue: u32, vector: u32) -> Option<(Doorbell, u32)> {
        let registers = &self.registers;
        let gpie = GeneralInterrupt::NSICR
            | GeneralInterrupt::MULTIPLE_MSIX
            | GeneralInterrupt::EIAME
            | GeneralInterrupt::PBA;
        registers.write(reg::GPIE, gpie);
        let shift = ivar_shift(queue, false);
        let entry = u32::from(ivar(vector as u8)) << shift;
        let row = reg::IVAR.of(queue & 7, WORD_STRIDE);
        registers.update(row, |ivar: u32| (ivar & !(0xFF << shift)) | entry);
        let bit = 1 << vector;
        registers.write(reg::EIMC, bit);
        registers.update(reg::EIAC, |eiac: u32| eiac | bit);
        registers.update(reg::EIAM, |eiam: u32| eiam | bit);
        registers
            .window()
            .doorbell(reg::EIMS)
            .map(|bell| (bell, bit))
    }

    fn quiesce(&mut self) {
        self.mask_interrupts();
        self.registers.write(reg::RCTL, ReceiveControl::empty());
        self.registers.write(reg::TCTL, TransmitControl::PSP);
    }
}

/// What the two directions' rows of queue registers have in common. §8.10, §8.12
struct Row {
    name: &'static str,
    base_low: Reg,
    base_high: Reg,
    length: Reg,
    head: Reg,
    tail: Reg,
    /// Thresholds and ENABLE.
    control: Reg,
    thresholds: Thresholds,
    enable: u32,
}

const RECEIVE: Row = Row {
    name: "receive queue",
    base_low: reg::RDBAL,
    base_high: reg::RDBAH,
    length: reg::RDLEN,
    head: reg::RDH,
    tail: reg::RDT,
    control: Reg::at(reg::RXDCTL.offset()),
    thresholds: RX_THRESHOLDS,
    enable: ReceiveQueueControl::bits(&ReceiveQueueControl::ENABLE),
};

const TRANSMIT: Row = Row {
    name: "transmit queue",
    base_low: reg::TDBAL,
    base_high: reg::TDBAH,
    length: reg::TDLEN,
    head: reg::TDH,
    tail: reg::TDT,
    control: Reg::at(reg::TXDCTL.offset()),
    thresholds: TX_THRESHOLDS,
    enable: TransmitQueueControl::bits(&TransmitQueueControl::ENABLE),
};

impl Igb {
    /// Gives a queue its ring, enables it, and waits until it says so.
    fn start_queue(
        &self,
        row: &Row,
        queue: u32,
        ring: &RingSpec,
    ) -> Result<Doorbell, ProviderError> {
        let registers = &self.registers;
        let of = |register: Reg| register.of(queue, QUEUE_STRIDE);
        registers.write(of(row.control), 0);
        registers.write(of(row.base_low), ring.iova.0 as u32);
        registers.write(of(row.base_high), (ring.iova.0 >> 32) as u32);
        registers.write(of(row.length), ring.entries * descriptors::BYTES as u32);
        registers.write(of(row.head), 0);
        registers.write(of(row.tail), 0);
        registers.write(of(row.control), row.thresholds.bits() | row.enable);
        let failed = |source| ProviderError::Queue {
            device: self.device(),
            queue: row.name,
            number: queue,
            source,
        };
        let enabled = |control: u32| control & row.enable != 0;
        registers
            .wait(&*self.clock, of(row.control), QUEUE, POLL, enabled)
            .map_err(failed)?;
        let outside = NoAnswer::Gone {
            register: of(row.tail).offset(),
            value: u32::MAX,
        };
        let bell = registers.window().doorbell(of(row.tail));
        bell.ok_or_else(|| failed(outside))
    }

    /// Clears ENABLE and waits for the reading that says that the queue stopped.
    fn stop_queue(&self, row: &Row, queue: u32) -> Result<Stopped, NoAnswer> {
        let control = row.control.of(queue, QUEUE_STRIDE);
        self.registers.write(control, row.thresholds.bits());
        let stop = StopBit {
            register: control.offset(),
            stop: NonZeroU32::new(row.enable).unwrap_or(NonZeroU32::MAX),
            alive: NonZeroU32::new(row.thresholds.bits()).unwrap_or(NonZeroU32::MAX),
            deadline: QUEUE,
            interval: POLL,
            settle: SETTLE,
        };
        self.registers.wait_stopped(&*self.clock, &stop)
    }
}
