//! The e1000e family's control path: 82574.
//!
//! # What a destroy of a queue rests on
//!
//! The 82574 has no bit that enables or stops a queue: RXDCTL and TXDCTL hold thresholds
//! (§10.2.5.11, §10.2.6.10), and RCTL.EN and TCTL.EN speak of packets, not of DMA: a packet that the
//! device has taken in is still delivered. What its datasheet defines as a stop is for the whole
//! device: with CTRL.GIO Master Disable set the device issues no new request, finishes those that are
//! pending, and then clears STATUS.GIO Master Enable Status (§10.2.2.1, §10.2.2.2). Lifting it again
//! would let packets in the device's memory and descriptors that it has fetched go on, so that it is
//! lifted only by a software reset, which forgets both. To stop a queue therefore means:
//!
//! 1. its direction's enable off; a send queue gets time to send what was posted, if there is a link;
//! 2. both enables off, master disable, and wait for the status: in order, nothing is under way;
//! 3. where the other direction is in use, note how far it got;
//! 4. software reset; a register that held another value must be back at what resets leave in it: a
//!    reset that succeeds may have reset nothing (C43);
//! 5. master disable again, and the reading that the destroy rests on: STATUS.GIO Master Enable Status
//!    is 0 in a device that has no queue, no descriptor and no packet left. The same reading must show
//!    STATUS.FD, which the driver has just forced: all-ones or all-zero is no answer (C32);
//! 6. lift master disable, set the device up again, and let the other direction go on where it was.
//!
//! Step 2 may fail: on siblings the status stays set with the link down or when a request is never
//! answered. Their documented answer (82599 datasheet, 5.2.5.3.2) is the software reset, twice, at
//! least 1 us apart, so that steps 4 and 5 are then taken once more before the stop counts as failed.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use failstop_pci::clock::Clock;
use failstop_pci::register::Reg;
use failstop_pci::reset::Canary;
use failstop_pci::window::{Doorbell, NoAnswer, StopBit, Stopped, Window};

use super::Part;
use super::bits::{
    BUFFER_SIZE, ExtendedConfiguration, InterruptCause, LARGEST_BUFFER, PcieControl, PcieControl2,
    QueueControl, ReceiveFilter, buffer_size, ivar,
};
use super::descriptors;
use super::phy::{self, PhyControl};
use super::registers as reg;
use crate::intel::bits::{Control, ControlExtended, ReceiveControl, Status, TransmitControl};
use crate::intel::mac::{self, FCS, Mac, POLL};
use crate::intel::statistics;
use crate::provider::{
    Config, Formats, Limits, Link, MacAddress, NotStopped, Position, Provider, ProviderError,
    RingSpec, SoftwareReset, Statistics,
};

/// The longest packet that the family sends, in bytes, frame check sequence included: 'supports 9 KB
/// jumbo frames'; Linux and DPDK give it so many.
const LONGEST_PACKET: u32 = 9234;
/// The longest packet without RCTL.LPE, in bytes, frame check sequence included. §10.2.5.1
const LONGEST_STANDARD: u32 = 1522;
/// Write each receive descriptor back at once.
const RX_THRESHOLDS: QueueControl = QueueControl::thresholds(32, 4, 1);
/// Write each report back at once.
const TX_THRESHOLDS: QueueControl =
    QueueControl::thresholds(31, 1, 1).union(QueueControl::MUST_BE_ONE);
/// After the NVM is loaded the PHY is configured from it; Linux waits so long.
const PHY_CONFIGURATION: Duration = Duration::from_millis(25);
/// How long firmware may keep the MDI bus.
const OWNERSHIP: Duration = Duration::from_millis(100);
/// How long a queue may take to start.
const QUEUE: Duration = Duration::from_millis(100);
/// How long a transmit queue may take to send what was posted.
const DRAIN: Duration = Duration::from_millis(200);
/// How long requests that are pending may take: Linux polls 800 times, 100 us apart.
const MASTER_DISABLE: Duration = Duration::from_millis(80);
/// How long writes that were under way may take to land.
const SETTLE: Duration = Duration::from_micros(100);
/// How long a PHY that loops back may take to raise the link; Linux waits 250 ms.
const LOOPBACK_LINK: Duration = Duration::from_millis(500);
/// RXCSUM's checksum start, of a packet checksum that nobody reads, beside IPOFLD and TUOFLD: every
/// reset leaves those two set and the start at 0. §10.2.5
const CANARY: Canary = Canary {
    register: reg::RXCSUM.offset(),
    planted: 0x030E,
    reset: 0x0300,
    mask: 0x03FF,
};

/// What the two directions' registers have in common. §10.2.5, §10.2.6
#[derive(Debug)]
struct Row {
    name: &'static str,
    base_low: Reg,
    base_high: Reg,
    length: Reg,
    head: Reg,
    tail: Reg,
    control: Reg<QueueControl>,
    thresholds: QueueControl,
    /// RCTL or TCTL, whose bit 1 is the direction's enable.
    enable: Reg,
}

/// RCTL.EN and TCTL.EN. §10.2.5.1, §10.2.6.1
const ENABLE: u32 = ReceiveControl::RXEN.bits();
const _: () = assert!(ENABLE == TransmitControl::TXEN.bits());

const RECEIVE: Row = Row {
    name: "receive queue",
    base_low: reg::RDBAL,
    base_high: reg::RDBAH,
    length: reg::RDLEN,
    head: reg::RDH,
    tail: reg::RDT,
    control: reg::RXDCTL,
    thresholds: RX_THRESHOLDS,
    enable: Reg::at(reg::RCTL.offset()),
};

const TRANSMIT: Row = Row {
    name: "transmit queue",
    base_low: reg::TDBAL,
    base_high: reg::TDBAH,
    length: reg::TDLEN,
    head: reg::TDH,
    tail: reg::TDT,
    control: reg::TXDCTL,
    thresholds: TX_THRESHOLDS,
    enable: Reg::at(reg::TCTL.offset()),
};

/// How far a queue is: its registers' head and tail, in descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Progress {
    head: u32,
    tail: u32,
}

/// Drives one function of the family.
#[derive(Debug)]
pub(crate) struct E1000e {
    part: Part,
    mac: Mac,
    address: MacAddress,
    config: Config,
    counted: Statistics,
    /// The rings that run.
    receive: Option<RingSpec>,
    send: Option<RingSpec>,
    /// The vector of the receive queue's interrupt.
    vector: Option<u8>,
    /// Whether a reset left the link to be looked after, by whoever needs it next.
    unlinked: bool,
    restarts: Arc<AtomicU32>,
}

impl E1000e {
    pub(crate) fn new(part: Part, window: Arc<Window>, clock: Arc<dyn Clock>) -> Self {
        Self {
            part,
            mac: Mac::new(window, clock),
            address: MacAddress::default(),
            config: Config::default(),
            counted: Statistics::default(),
            receive: None,
            send: None,
            vector: None,
            unlinked: false,
            restarts: Arc::default(),
        }
    }

    fn mask_interrupts(&mut self) {
        self.mac.registers.write(reg::IMC, InterruptCause::all());
        self.mac.registers.take(reg::ICR);
    }

    /// Keeps firmware off the MDI bus while `act` runs, as well as it can be had.
    fn with_mdi<T>(&self, act: impl FnOnce(&Mac) -> T) -> T {
        let owned = ExtendedConfiguration::MDIO_SW_OWNERSHIP;
        let ours = |control: ExtendedConfiguration| {
            self.mac.registers.write(reg::EXTCNF_CTRL, control | owned);
            self.mac.registers.read(reg::EXTCNF_CTRL).contains(owned)
        };
        let interval = Duration::from_millis(2);
        if let Err(kept) = self.mac.wait(reg::EXTCNF_CTRL, OWNERSHIP, interval, ours) {
            log::warn!("{}: firmware keeps the MDI bus: {kept}", self.mac.device());
        }
        let result = act(&self.mac);
        self.mac
            .registers
            .update(reg::EXTCNF_CTRL, |control| control - owned);
        result
    }

    /// The family's own reset: everything but config space, so that no queue, descriptor or packet
    /// is left. §4, §10.2.2.1
    ///
    /// # Errors
    ///
    /// [`NoAnswer`] when a register does not show that it took place.
    fn reset(&mut self) -> Result<(), NoAnswer> {
        CANARY.plant(self.mac.registers.window())?;
        let clock = self.mac.clock.clone();
        self.with_mdi(|mac| mac::software_reset(&mac.registers, &*clock))?;
        let reset = |value: u32| value & CANARY.mask == CANARY.reset;
        let register = Reg::<u32>::at(CANARY.register);
        self.mac.wait(register, SETTLE, POLL, reset)?;
        self.mask_interrupts();
        Ok(())
    }

    /// Blocks new requests of the device and waits until none is pending: one reading, which shows
    /// the duplex mode that is forced meanwhile. §10.2.2.1, §10.2.2.2
    fn disable_master(&self) -> Result<Stopped, NoAnswer> {
        self.mac.registers.update(reg::CTRL, |ctrl| {
            ctrl | Control::GIO_MASTER_DISABLE | Control::FRCDPLX | Control::FD
        });
        let bit = |status: Status| NonZeroU32::new(status.bits()).unwrap_or(NonZeroU32::MAX);
        let stop = StopBit {
            // No new request of whatever queue.
            queue: None,
            register: reg::STATUS.offset(),
            stop: bit(Status::GIO_MASTER_ENABLE),
            alive: bit(Status::FD),
            deadline: MASTER_DISABLE,
            interval: POLL,
            settle: SETTLE,
        };
        self.mac.registers.wait_stopped(&*self.mac.clock, &stop)
    }

    /// Lets the device issue requests again, its duplex mode found by the PHY.
    fn enable_master(&self) {
        self.mac.registers.update(reg::CTRL, |ctrl| {
            ctrl - Control::GIO_MASTER_DISABLE - Control::FRCDPLX
        });
    }

    /// Everything that a reset forgets, but for the queues.
    fn set_up(&mut self) -> Result<(), NoAnswer> {
        let registers = &self.mac.registers;
        registers.update(reg::GCR, |gcr| gcr | PcieControl::LOST_COMPLETIONS);
        registers.update(reg::GCR2, |gcr| gcr | PcieControl2::LOST_COMPLETIONS);
        registers.write(reg::FCRTL, 0);
        registers.write(reg::FCRTH, 0);
        let filter =
            ReceiveFilter::EXSTEN | ReceiveFilter::IPV6_EX_DIS | ReceiveFilter::NEW_IPV6_EXT_DIS;
        registers.write(reg::RFCTL, filter);
        registers.write(reg::MRQC, 0);
        self.mac.set_address(self.address, reg::RECEIVE_ADDRESSES);
        let mut receive = ReceiveControl::BAM | ReceiveControl::SECRC;
        if self.config.longest_frame + FCS > LONGEST_STANDARD {
            receive |= ReceiveControl::LPE;
        }
        registers.write(reg::RCTL, receive);
        // Collision threshold 15 and distance 63, as for every part of the family. §10.2.6.1
        let threshold = TransmitControl::from_bits_retain(15 << 4 | 63 << 12);
        let transmit = TransmitControl::PSP | TransmitControl::RTLC | threshold;
        registers.write(reg::TCTL, transmit);
        self.set_promiscuous(self.config.promiscuous);
        self.route();
        // The next reset, whoever makes it, must be seen too.
        CANARY.plant(self.mac.registers.window())
    }

    /// Routes the receive queue's interrupt, masked. §10.2.4
    fn route(&self) {
        let Some(vector) = self.vector else {
            return;
        };
        let (registers, cause) = (&self.mac.registers, InterruptCause::RXQ0);
        registers.write(reg::IMC, cause);
        registers.write(reg::IVAR, ivar(vector));
        registers.write(reg::EIAC, cause);
        registers.write(reg::IAM, cause);
        let masks = |control| control | ControlExtended::EIAME;
        registers.update(reg::CTRL_EXT, masks);
    }

    /// Lets PHY and MAC find the link; with loopback, makes the PHY the other end.
    fn start_link(&mut self) -> Result<(), ProviderError> {
        self.mac.registers.update(reg::CTRL, |ctrl| {
            (ctrl | Control::SLU) - Control::FRCSPD - Control::FRCDPLX
        });
        if !self.config.loopback {
            let restart = PhyControl::AUTONEG | PhyControl::RESTART_AUTONEG;
            return self.with_mdi(|mac| mac.write_phy(phy::CONTROL, restart.bits()));
        }
        self.with_mdi(|mac| {
            // The interface to the MAC runs at 1000 Mb/s only after the next PHY reset.
            mac.write_phy(phy::PAGE_SELECT, phy::MAC_PAGE)?;
            let control = mac.read_phy(phy::MAC_CONTROL)?;
            let fast = control & !phy::MAC_SPEED | phy::MAC_SPEED_1000;
            mac.write_phy(phy::MAC_CONTROL, fast)?;
            mac.write_phy(phy::PAGE_SELECT, 0)?;
            let reset = PhyControl::RESET | PhyControl::AUTONEG;
            mac.write_phy(phy::CONTROL, reset.bits())?;
            mac.clock.sleep(Duration::from_millis(1));
            mac.force_loopback(LOOPBACK_LINK)
        })
    }

    /// After a reset by a stop: the link as it was.
    fn resume_link(&mut self) {
        if !std::mem::take(&mut self.unlinked) {
            return;
        }
        // A PHY that the reset left alone has its link still, or is finding it.
        let kept = match self.with_mdi(|mac| mac.read_phy(phy::CONTROL)) {
            Ok(control) => PhyControl::from_bits_retain(control),
            Err(error) => return log::warn!("the link after a reset: {error}"),
        };
        let resumed = if self.config.loopback && !kept.contains(PhyControl::LOOPBACK) {
            self.mac.clock.sleep(PHY_CONFIGURATION);
            self.start_link()
        } else if self.config.loopback {
            self.with_mdi(|mac| mac.force_loopback(LOOPBACK_LINK))
        } else {
            self.mac
                .registers
                .update(reg::CTRL, |ctrl| ctrl | Control::SLU);
            Ok(())
        };
        if let Err(error) = resumed {
            log::warn!("the link after a reset: {error}");
        }
    }

    /// Gives a queue its ring and enables its direction; reads back that it took (R10).
    fn enable(&self, row: &Row, ring: &RingSpec, at: Progress) -> Result<(), NoAnswer> {
        let registers = &self.mac.registers;
        registers.write(row.base_low, ring.iova.0 as u32);
        registers.write(row.base_high, (ring.iova.0 >> 32) as u32);
        registers.write(row.length, ring.entries * descriptors::BYTES as u32);
        registers.write(row.head, at.head);
        registers.write(row.tail, at.tail);
        registers.write(row.control, row.thresholds);
        registers.update(row.enable, |control| control | ENABLE);
        let enabled = |control: u32| control & ENABLE != 0;
        self.mac.wait(row.enable, QUEUE, POLL, enabled)?;
        let length = ring.entries * descriptors::BYTES as u32;
        let taken = |value: u32| value == length;
        self.mac.wait(row.length, QUEUE, POLL, taken).map(drop)
    }

    /// Enables the receive queue with buffers of the ring's size.
    fn enable_receive(&self, ring: &RingSpec, at: Progress) -> Result<(), NoAnswer> {
        let size = buffer_size(ring.buffer);
        self.mac
            .registers
            .update(reg::RCTL, |rctl| (rctl - BUFFER_SIZE) | size);
        self.enable(&RECEIVE, ring, at)
    }

    fn start(
        &self,
        row: &Row,
        enabled: Result<(), NoAnswer>,
        queue: u32,
    ) -> Result<Doorbell, ProviderError> {
        let outside = NoAnswer::Gone {
            register: row.tail.offset(),
            value: u32::MAX,
        };
        enabled
            .and_then(|()| {
                self.mac
                    .registers
                    .window()
                    .doorbell(row.tail)
                    .ok_or(outside)
            })
            .map_err(|source| ProviderError::Queue {
                device: self.mac.device(),
                queue: row.name,
                number: queue,
                source,
            })
    }

    fn disable(&self, row: &Row) {
        self.mac
            .registers
            .update(row.enable, |control| control & !ENABLE);
    }

    fn progress(&self, row: &Row) -> Progress {
        Progress {
            head: self.mac.registers.read(row.head) & 0xFFFF,
            tail: self.mac.registers.read(row.tail) & 0xFFFF,
        }
    }

    /// Stops every queue by the device's handshake and a reset, and lets those go on that are still
    /// in use: the module's sequence from step 2.
    fn stop(&mut self) -> Result<Stopped, NoAnswer> {
        self.disable(&RECEIVE);
        self.disable(&TRANSMIT);
        match self.disable_master() {
            Ok(_) => {}
            Err(gone @ NoAnswer::Gone { .. }) => return Err(gone),
            // What is under way for the queue that goes on may never be written back, and no register
            // says where it got to.
            Err(pending) if self.receive.is_some() || self.send.is_some() => return Err(pending),
            Err(pending) => log::warn!("{}: before its reset: {pending}", self.mac.device()),
        }
        let receive = self.receive.map(|ring| (ring, self.progress(&RECEIVE)));
        let send = self.send.map(|ring| (ring, self.progress(&TRANSMIT)));
        self.statistics();
        self.reset()?;
        let stopped = match self.disable_master() {
            Ok(stopped) => stopped,
            Err(gone @ NoAnswer::Gone { .. }) => return Err(gone),
            Err(_) => {
                self.reset()?;
                self.disable_master()?
            }
        };
        self.set_up()?;
        self.enable_master();
        self.unlinked = true;
        if receive.is_some() || send.is_some() {
            self.resume_link();
            if let Some((ring, at)) = send {
                self.enable(&TRANSMIT, &ring, at)?;
            }
            if let Some((ring, at)) = receive {
                self.enable_receive(&ring, at)?;
            }
            // What was rung meanwhile is lost: each ring rings again, and a sleeper wakes to do so.
            self.restarts.fetch_add(1, Ordering::Release);
            if self.vector.is_some() && receive.is_some() {
                self.mac.registers.write(reg::IMS, InterruptCause::RXQ0);
                self.mac.registers.write(reg::ICS, InterruptCause::RXQ0);
            }
        }
        Ok(stopped)
    }
}

impl Provider for E1000e {
    fn name(&self) -> &'static str {
        "e1000e"
    }

    fn part(&self) -> &'static str {
        self.part.name()
    }

    fn limits(&self) -> Limits {
        Limits {
            queues: 1,
            longest_frame: LONGEST_PACKET - FCS,
            // RDLEN and TDLEN: 20 bits of bytes, 16 a descriptor. §10.2.5
            ring_entries: 32_768,
            address_mask: u64::MAX,
            buffer_step: 1024,
        }
    }

    fn formats(&self) -> Formats {
        Formats::Extended
    }

    fn restarts(&self) -> Option<Arc<AtomicU32>> {
        Some(self.restarts.clone())
    }

    fn longest_received(&self) -> u32 {
        match self.config.longest_frame + FCS {
            ..=LONGEST_STANDARD => LONGEST_STANDARD - FCS,
            // No register limits long packets, and one that ends in a second buffer is no frame.
            _ => LARGEST_BUFFER,
        }
    }

    fn bring_up(&mut self, config: &Config) -> Result<(), ProviderError> {
        let most = self.limits().longest_frame;
        if !(60..=most).contains(&config.longest_frame) {
            return Err(ProviderError::OutOfRange {
                device: self.mac.device(),
                what: "the longest frame",
                value: config.longest_frame.into(),
                least: 60,
                most: most.into(),
            });
        }
        self.config = *config;
        self.mac.check_alive()?;
        self.mask_interrupts();
        self.disable(&RECEIVE);
        self.disable(&TRANSMIT);
        if let Err(pending) = self.disable_master() {
            log::warn!("{}: before its reset: {pending}", self.mac.device());
        }
        self.reset()
            .map_err(self.mac.init_failed("the software reset"))?;
        self.mac.check_alive()?;
        self.mac.clock.sleep(PHY_CONFIGURATION);
        self.address = self.mac.load_address()?;
        self.set_up()
            .map_err(self.mac.init_failed("setting the device up"))?;
        self.unlinked = false;
        self.start_link()?;
        self.statistics();
        self.counted = Statistics::default();
        Ok(())
    }

    fn mac(&self) -> MacAddress {
        self.address
    }

    fn link(&mut self) -> Link {
        self.resume_link();
        self.mac.link()
    }

    fn wait_link(&mut self, deadline: Duration) -> Link {
        self.resume_link();
        self.mac.wait_link(deadline)
    }

    fn set_promiscuous(&mut self, on: bool) {
        self.config.promiscuous = on;
        let both = ReceiveControl::UPE | ReceiveControl::MPE;
        self.mac
            .registers
            .update(reg::RCTL, |rctl| if on { rctl | both } else { rctl - both });
    }

    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.resume_link();
        self.receive = Some(*ring);
        let enabled = self.enable_receive(ring, Progress::default());
        self.start(&RECEIVE, enabled, queue)
    }

    fn stop_rx(&mut self, _: u32) -> Result<Stopped, NotStopped> {
        self.receive = None;
        Ok(self.stop()?)
    }

    fn start_tx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.resume_link();
        self.send = Some(*ring);
        let enabled = self.enable(&TRANSMIT, ring, Progress::default());
        self.start(&TRANSMIT, enabled, queue)
    }

    fn stop_tx(&mut self, _: u32) -> Result<Stopped, NotStopped> {
        self.send = None;
        if self.mac.link().up {
            let Progress { tail, .. } = self.progress(&TRANSMIT);
            let drained = |head: u32| head & 0xFFFF == tail;
            // What was not sent is flushed, so that the result of the wait is not needed. A
            // function that is gone shows in the reading below.
            let _ = self.mac.wait(reg::TDH, DRAIN, POLL, drained);
        }
        Ok(self.stop()?)
    }

    fn canary(&self) -> Canary {
        CANARY
    }

    fn software_reset(&self) -> SoftwareReset {
        |window, clock| {
            window.write(reg::RCTL, ReceiveControl::empty());
            window.write(reg::TCTL, TransmitControl::PSP);
            mac::software_reset(window, clock)
        }
    }

    fn statistics(&mut self) -> Statistics {
        self.counted = self.counted + statistics::count(&mut self.mac.registers);
        self.counted
    }

    fn check_alive(&mut self) -> Result<(), NoAnswer> {
        self.mac.look_alive()
    }

    fn is_paused(&mut self) -> bool {
        self.mac.is_paused()
    }

    fn rx_position(&mut self, _: u32) -> Option<Position> {
        self.mac
            .position(RECEIVE.head, RECEIVE.tail, RECEIVE.length)
    }

    fn tx_position(&mut self, _: u32) -> Option<Position> {
        self.mac
            .position(TRANSMIT.head, TRANSMIT.tail, TRANSMIT.length)
    }

    fn route_rx_interrupt(&mut self, _: u32, vector: u32) -> Option<(Doorbell, u32)> {
        self.vector = Some(u8::try_from(vector).ok()?);
        self.route();
        let bell = self.mac.registers.window().doorbell(reg::IMS)?;
        Some((bell, InterruptCause::RXQ0.bits()))
    }

    fn quiesce(&mut self) {
        self.mask_interrupts();
        self.disable(&RECEIVE);
        self.disable(&TRANSMIT);
    }
}
