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
use failstop_pci::register::Reg;
use failstop_pci::reset::Canary;
use failstop_pci::window::{Doorbell, NoAnswer, QueueName, StopBit, Stopped, Window};

use super::Part;
use super::bits::{
    Control, GeneralInterrupt, InterruptCause, MultipleReceive, PcieControl, PoolOffload,
    ReceiveChecksum, ReceiveControl, ReceiveQueueControl, SplitReceive, Thresholds,
    TransmitControl, TransmitQueueControl, ivar, ivar_shift,
};
use super::descriptors;
use super::phy::{self, PhyControl};
use super::registers as reg;
use super::registers::{QUEUE_STRIDE, WORD_STRIDE};
use crate::intel::mac::{self, FCS, Mac, POLL};
use crate::intel::statistics;
use crate::provider::{
    Config, Formats, Limits, Link, MacAddress, NotStopped, Position, Provider, ProviderError,
    RingSpec, SoftwareReset, Statistics,
};
use crate::rss::{Rss, TABLE_ENTRIES, Table};

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
/// How long a queue may take to start or stop. Linux and DPDK give siblings 10 ms.
const QUEUE: Duration = Duration::from_millis(100);
/// How long a transmit queue may take to send what was posted.
const DRAIN: Duration = Duration::from_millis(200);
/// How long writes that were under way may take to land.
const SETTLE: Duration = Duration::from_micros(100);
/// How long a PHY that loops back may take to raise the link.
const LOOPBACK_LINK: Duration = Duration::from_millis(200);
/// How long autonegotiation may take.
const AUTONEG: Duration = Duration::from_millis(1500);

/// Drives one function of the family.
#[derive(Debug)]
pub(crate) struct Igb {
    part: Part,
    mac: Mac,
    address: MacAddress,
    longest_packet: u32,
    counted: Statistics,
    /// One bit for each receive queue that was started since the device was brought up.
    receiving: u16,
    /// What the indirection table holds; nothing before the first bring-up.
    table: Option<Table>,
}

impl Igb {
    pub(crate) fn new(part: Part, window: Arc<Window>, clock: Arc<dyn Clock>) -> Self {
        Self {
            part,
            mac: Mac::new(window, clock),
            address: MacAddress::default(),
            longest_packet: 0,
            counted: Statistics::default(),
            receiving: 0,
            table: None,
        }
    }

    fn mask_interrupts(&mut self) {
        self.mac.registers.write(reg::IMC, InterruptCause::all());
        self.mac.registers.write(reg::EIMC, u32::MAX);
        self.mac.registers.take(reg::ICR);
    }

    /// The family's own reset, from a device in use to one at rest.
    fn reset(&mut self) -> Result<(), ProviderError> {
        self.mask_interrupts();
        software_reset(&self.mac.registers, &*self.mac.clock)
            .map_err(self.mac.init_failed("loading the NVM after a reset"))?;
        self.mask_interrupts();
        self.mac
            .registers
            .update(reg::GCR, |gcr| gcr - PcieControl::COMPLETION_TIMEOUT_RESEND);
        Ok(())
    }

    /// Lets PHY and MAC find the link; with `loopback`, makes the PHY the other end (§3.5.6.3.1:
    /// MAC loopback is not used on this family).
    fn start_link(&mut self, loopback: bool) -> Result<(), ProviderError> {
        self.mac.registers.update(reg::CTRL, |ctrl| {
            (ctrl | Control::SLU) - Control::FRCSPD - Control::FRCDPLX - Control::RST
        });
        let restart = PhyControl::AUTONEG | PhyControl::RESTART_AUTONEG;
        if !loopback {
            return self.mac.write_phy(phy::CONTROL, restart.bits());
        }
        if self.mac.force_loopback(LOOPBACK_LINK).is_err() {
            // Some models raise the link by autonegotiation only; silicon without a cable never does.
            self.mac.write_phy(phy::CONTROL, restart.bits())?;
            self.wait_link(AUTONEG);
            self.mac.force_loopback(AUTONEG)?;
        }
        Ok(())
    }

    fn set_filters(&mut self, config: &Config) {
        let registers = &self.mac.registers;
        self.mac
            .set_address(self.address, self.part.receive_addresses().min(16));
        let checked = ReceiveChecksum::IPOFLD | ReceiveChecksum::TUOFLD;
        if config.rss.is_none() {
            registers.write(reg::MRQC, MultipleReceive::empty());
            registers.write(reg::RXCSUM, checked);
        } else {
            // Hash and packet checksum share a field of the descriptor. §7.1.2.8
            registers.write(reg::RXCSUM, checked | ReceiveChecksum::PCSD);
        }
        self.longest_packet = config.longest_frame + FCS;
        registers.write(reg::RLPML, self.longest_packet);
        let mut pool =
            PoolOffload::LPE | PoolOffload::AUPE | PoolOffload::BAM | PoolOffload::STRCRC;
        pool.set(PoolOffload::RSSE, config.rss.is_some());
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
    mac::software_reset(window, clock)
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

    fn has_rss(&self) -> bool {
        true
    }

    fn bring_up(&mut self, config: &Config) -> Result<(), ProviderError> {
        let limits = self.limits();
        if !(60..=limits.longest_frame).contains(&config.longest_frame) {
            return Err(ProviderError::OutOfRange {
                device: self.mac.device(),
                what: "the longest frame",
                value: config.longest_frame.into(),
                least: 60,
                most: limits.longest_frame.into(),
            });
        }
        self.mac.check_alive()?;
        self.reset()?;
        self.mac.check_alive()?;
        self.address = self.mac.load_address()?;
        self.start_link(config.loopback)?;
        self.set_filters(config);
        // Before the receiver is enabled: RSS is not turned on under it.
        if let Some(rss) = &config.rss {
            self.table = None;
            self.set_rss_table(&Table([0; TABLE_ENTRIES]));
            self.set_rss(rss);
        }
        self.statistics();
        self.counted = Statistics::default();
        self.receiving = 0;
        let receive = ReceiveControl::RXEN
            | ReceiveControl::LPE
            | ReceiveControl::BAM
            | ReceiveControl::SECRC;
        self.mac.registers.write(reg::RCTL, receive);
        self.set_promiscuous(config.promiscuous);
        // Collision threshold 15, as the datasheet recommends. §8.12.1
        let threshold = TransmitControl::from_bits_retain(15 << 4);
        let transmit = TransmitControl::TXEN | TransmitControl::PSP | TransmitControl::RTLC;
        self.mac.registers.write(reg::TCTL, transmit | threshold);
        Ok(())
    }

    fn longest_received(&self) -> u32 {
        self.longest_packet.saturating_sub(FCS)
    }

    fn mac(&self) -> MacAddress {
        self.address
    }

    fn link(&mut self) -> Link {
        self.mac.link()
    }

    fn wait_link(&mut self, deadline: Duration) -> Link {
        self.mac.wait_link(deadline)
    }

    fn set_promiscuous(&mut self, on: bool) {
        let both = ReceiveControl::UPE | ReceiveControl::MPE;
        self.mac
            .registers
            .update(reg::RCTL, |rctl| if on { rctl | both } else { rctl - both });
    }

    fn set_rss(&mut self, rss: &Rss) {
        let registers = &self.mac.registers;
        for (word, bytes) in (0..).zip(rss.key.as_chunks::<4>().0) {
            registers.write(reg::RSSRK.of(word, WORD_STRIDE), u32::from_le_bytes(*bytes));
        }
        registers.write(reg::MRQC, MultipleReceive::rss(rss.types));
    }

    fn set_rss_table(&mut self, table: &Table) {
        let registers = &self.mac.registers;
        let words = |table: &Table| table.0.as_chunks::<4>().0.to_vec();
        let written = self.table.as_ref().map(words).unwrap_or_default();
        for (word, entries) in words(table).into_iter().enumerate() {
            // In traffic, and each write may be a message: only what changes.
            if written.get(word) != Some(&entries) {
                let register = reg::RETA.of(word as u32, WORD_STRIDE);
                registers.write(register, u32::from_le_bytes(entries));
            }
        }
        self.table = Some(*table);
    }

    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        let split = SplitReceive::one_buffer(ring.buffer) | SplitReceive::DROP_EN;
        self.mac
            .registers
            .write(reg::SRRCTL.of(queue, QUEUE_STRIDE), split);
        self.receiving |= 1u16.checked_shl(queue).unwrap_or_default();
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
        let tail = self.mac.registers.read(reg::TDT.of(queue, QUEUE_STRIDE));
        let drained = |head: u32| head == tail;
        // With the link down nothing drains. What was not sent is flushed, so that the result of the
        // wait is not needed. A function that is gone shows in the reading below.
        if self.mac.link().up {
            let _ = self.mac.wait(head, DRAIN, POLL, drained);
        }
        Ok(self.stop_queue(&TRANSMIT, queue)?)
    }

    fn canary(&self) -> Canary {
        CANARY
    }

    fn software_reset(&self) -> SoftwareReset {
        software_reset
    }

    fn statistics(&mut self) -> Statistics {
        let mut now = statistics::count(&mut self.mac.registers);
        // A queue drops what finds no descriptor (SRRCTL.DROP_EN), and counts it by itself.
        let started = (0..u16::BITS).filter(|queue| self.receiving >> queue & 1 != 0);
        now.rx_no_buffer += started
            .map(|queue| reg::RQDPC.of(queue, QUEUE_STRIDE))
            .map(|drops| match self.mac.registers.take(drops) {
                u32::MAX => 0,
                drops => u64::from(drops),
            })
            .sum::<u64>();
        self.counted = self.counted + now;
        self.counted
    }

    fn check_alive(&mut self) -> Result<(), NoAnswer> {
        self.mac.look_alive()
    }

    fn is_paused(&mut self) -> bool {
        self.mac.is_paused()
    }

    fn rx_position(&mut self, queue: u32) -> Option<Position> {
        self.position(&RECEIVE, queue)
    }

    fn tx_position(&mut self, queue: u32) -> Option<Position> {
        self.position(&TRANSMIT, queue)
    }

    fn route_rx_interrupt(&mut self, queue: u32, vector: u32) -> Option<(Doorbell, u32)> {
        let registers = &self.mac.registers;
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
        self.mac.registers.write(reg::RCTL, ReceiveControl::empty());
        self.mac.registers.write(reg::TCTL, TransmitControl::PSP);
    }
}

/// What the two directions' rows of queue registers have in common. §8.10, §8.12
struct Row {
    name: &'static str,
    queue: fn(u32) -> QueueName,
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
    queue: QueueName::Receive,
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
    queue: QueueName::Send,
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
    fn position(&self, row: &Row, queue: u32) -> Option<Position> {
        let of = |register: Reg| register.of(queue, QUEUE_STRIDE);
        self.mac
            .position(of(row.head), of(row.tail), of(row.length))
    }

    /// Gives a queue its ring, enables it, and waits until it says so.
    fn start_queue(
        &self,
        row: &Row,
        queue: u32,
        ring: &RingSpec,
    ) -> Result<Doorbell, ProviderError> {
        let registers = &self.mac.registers;
        let of = |register: Reg| register.of(queue, QUEUE_STRIDE);
        registers.write(of(row.control), 0);
        registers.write(of(row.base_low), ring.iova.0 as u32);
        registers.write(of(row.base_high), (ring.iova.0 >> 32) as u32);
        registers.write(of(row.length), ring.entries * descriptors::BYTES as u32);
        registers.write(of(row.head), 0);
        registers.write(of(row.tail), 0);
        registers.write(of(row.control), row.thresholds.bits() | row.enable);
        let failed = |source| ProviderError::Queue {
            device: self.mac.device(),
            queue: row.name,
            number: queue,
            source,
        };
        let enabled = |control: u32| control & row.enable != 0;
        self.mac
            .wait(of(row.control), QUEUE, POLL, enabled)
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
        self.mac.registers.write(control, row.thresholds.bits());
        let stop = StopBit {
            queue: Some((row.queue)(queue)),
            register: control.offset(),
            stop: NonZeroU32::new(row.enable).unwrap_or(NonZeroU32::MAX),
            alive: NonZeroU32::new(row.thresholds.bits()).unwrap_or(NonZeroU32::MAX),
            deadline: QUEUE,
            interval: POLL,
            settle: SETTLE,
        };
        self.mac.registers.wait_stopped(&*self.mac.clock, &stop)
    }
}
