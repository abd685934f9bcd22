//! The model: an 82576, function 0, as its registers, its rings and its configuration space show
//! it. It has no I/O of its own: [`Host`] gives it memory, interrupts, a wire and time.
//!
//! Everything happens inside a call: when [`Device::write`], [`Device::receive`] or
//! [`Device::run`] returns, no request of the device is in flight. That is what lets the server
//! answer an unmap at once.

use std::time::Duration;

use failstop::igb::bits::{
    Control, ControlExtended, EepromControl, EepromRead, InterruptCause, Mdi, ReceiveControl,
    ReceiveQueueControl, SplitReceive, Status, TransmitControl, TransmitQueueControl,
};
use failstop::igb::phy::{CONTROL, PhyControl};
use failstop::igb::registers::{
    CTRL, CTRL_EXT, EECD, EERD, MDIC, RCTL, RXDCTL, SRRCTL, STATUS, SWSM, TCTL, TXDCTL,
};
use thiserror::Error;

use crate::faults::{Fault, Faults, Spec};
use crate::host::Host;
use crate::stats::DeviceCounters;

mod config;
mod filter;
mod interrupts;
mod nvm;
mod offload;
mod phy;
mod receive;
mod registers;
mod ring;
mod runaway;
mod statistics;
#[cfg(test)]
mod tests;
mod transmit;

pub(crate) use config::{SIZE as CONFIG_SIZE, VECTORS, bar_size};
use filter::Verdict;
use receive::{Arrival, PacketBuffer, Placed};
use ring::Ring;
use runaway::Runaway;
use statistics::{Cast, Statistics};

/// The time between CTRL.RST and EECD.AUTO_RD. §4.2.1.6.1
const NVM_READ: Duration = Duration::from_millis(1);
/// Descriptors that one [`Device::run`] processes at most, so that the caller's other work is
/// never far away.
const BUDGET: u32 = 1024;
/// Bytes of the I/O BAR: an address register and a data register. §8.1.1.3
const IO_DATA: u64 = 4;

/// A region of the function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Region {
    /// BAR 0: registers, 32 bits at a time.
    Registers,
    /// BAR 2: registers through an address and a data register.
    Io,
    /// BAR 3: MSI-X table and pending bits.
    MsiX,
    /// Configuration space.
    Config,
}

/// An access that no function of this kind answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{len} bytes at {offset:#x} of {region:?} are out of range, or not whole words")]
pub struct BadAccess {
    region: Region,
    offset: u64,
    len: usize,
}

/// An emulated 82576.
#[derive(Debug)]
pub struct Device {
    config: config::Space,
    file: registers::File,
    nvm: nvm::Nvm,
    phy: phy::Phy,
    interrupts: interrupts::Interrupts,
    statistics: Statistics,
    receive_queues: Vec<receive::Queue>,
    transmit_queues: Vec<transmit::Queue>,
    buffer: PacketBuffer,
    msix: Vec<u8>,
    io_address: u32,
    nvm_read_at: Duration,
    link: bool,
    faults: Faults,
    runaways: Vec<Runaway>,
    counters: DeviceCounters,
    out: Vec<Vec<u8>>,
}

impl Device {
    /// A device that is powered on at `now`.
    #[must_use]
    pub fn new(mac: [u8; 6], now: Duration) -> Self {
        let mut device = Self {
            config: config::Space::default(),
            file: registers::File::new(mac),
            nvm: nvm::Nvm::new(mac),
            phy: phy::Phy::new(now),
            interrupts: interrupts::Interrupts::default(),
            statistics: Statistics::default(),
            receive_queues: Vec::new(),
            transmit_queues: Vec::new(),
            buffer: PacketBuffer::default(),
            msix: vec![0; bar_size(3) as usize],
            io_address: 0,
            nvm_read_at: now,
            link: false,
            faults: Faults::default(),
            runaways: Vec::new(),
            counters: DeviceCounters::default(),
            out: Vec::new(),
        };
        for _ in 0..registers::QUEUES {
            device.receive_queues.push(receive::Queue::default());
            device.transmit_queues.push(transmit::Queue::default());
        }
        device.request_first_queues();
        device
    }

    /// Counters.
    #[must_use]
    pub const fn counters(&self) -> &DeviceCounters {
        &self.counters
    }

    /// Sets the counters to 0.
    pub fn reset_counters(&mut self) {
        self.counters = DeviceCounters::default();
    }

    /// Whether the function may issue requests.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        self.config.is_bus_master() && !self.is_gone()
    }

    /// Whether the link is up.
    #[must_use]
    pub const fn has_link(&self) -> bool {
        self.link
    }

    /// How many receive and transmit queues are enabled or cannot be stopped.
    #[must_use]
    pub fn running_queues(&self) -> (u32, u32) {
        let count = |on: &dyn Fn(usize) -> bool| {
            (0..self.receive_queues.len()).filter(|n| on(*n)).count() as u32
        };
        (
            count(&|n| self.receive_queues[n].enabled || self.is_runaway(n, false)),
            count(&|n| self.transmit_queues[n].enabled || self.is_runaway(n, true)),
        )
    }

    /// The faults that were asked for.
    #[must_use]
    pub const fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Makes the device misbehave.
    pub fn add_fault(&mut self, spec: Spec) {
        self.faults.add(spec, self.counters.tx_frames);
    }

    /// Ends all misbehaviour; queues that would not stop are stopped.
    pub fn clear_faults(&mut self) {
        self.faults.clear();
        for runaway in std::mem::take(&mut self.runaways) {
            if runaway.transmit {
                self.transmit_queues[runaway.queue].enabled = false;
            } else {
                self.receive_queues[runaway.queue].enabled = false;
            }
        }
    }

    /// Plugs or pulls the cable.
    pub fn set_carrier(&mut self, carrier: bool, host: &mut dyn Host) {
        self.phy.set_carrier(carrier, host.now());
        self.run(host);
    }

    fn is_gone(&self) -> bool {
        self.faults.has(Fault::Gone) || self.faults.has(Fault::GoneZero)
    }

    /// What reads return while the function is gone.
    fn gone_byte(&self) -> u8 {
        if self.faults.has(Fault::GoneZero) {
            0
        } else {
            0xFF
        }
    }

    /// Whether engines may issue requests: bus master, and master requests not disabled.
    fn may_request(&self) -> bool {
        self.is_bus_master() && !self.file.get(CTRL).contains(Control::GIO_MASTER_DISABLE)
    }

    /// Reads a region. A function that is gone, or does not decode memory, leaves all-ones.
    ///
    /// # Errors
    ///
    /// [`BadAccess`] when the region has no such bytes, or takes only whole words.
    pub fn read(
        &mut self,
        region: Region,
        offset: u64,
        data: &mut [u8],
        host: &mut dyn Host,
    ) -> Result<(), BadAccess> {
        check(region, offset, data.len())?;
        if self.is_gone() {
            data.fill(self.gone_byte());
            return Ok(());
        }
        if region == Region::Config {
            self.config.read(offset as usize, data);
            return Ok(());
        }
        if !self.config.decodes_memory() {
            data.fill(0xFF);
            return Ok(());
        }
        match region {
            Region::MsiX => data.copy_from_slice(&self.msix[offset as usize..][..data.len()]),
            Region::Io if offset < IO_DATA => {
                data.copy_from_slice(&self.io_address.to_le_bytes()[..data.len()]);
            }
            Region::Io => {
                let value = self.read_register(self.io_address, host);
                data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
            }
            Region::Registers | Region::Config => {
                for (n, word) in data.chunks_exact_mut(4).enumerate() {
                    let value = self.read_register(offset as u32 + 4 * n as u32, host);
                    word.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        self.settle(host);
        Ok(())
    }

    /// Writes a region, and does what that makes the device do; [`Device::run`] does the rest when
    /// there is much.
    ///
    /// # Errors
    ///
    /// As [`Device::read`].
    pub fn write(
        &mut self,
        region: Region,
        offset: u64,
        data: &[u8],
        host: &mut dyn Host,
    ) -> Result<(), BadAccess> {
        check(region, offset, data.len())?;
        if self.is_gone() {
            return Ok(());
        }
        if region == Region::Config {
            match self.config.write(offset as usize, data) {
                config::Effect::None => {}
                config::Effect::FunctionLevelReset => self.reset_function(host.now()),
                config::Effect::PoweredUp => self.power_up(host.now()),
            }
        } else if self.config.decodes_memory() {
            match region {
                Region::MsiX => self.msix[offset as usize..][..data.len()].copy_from_slice(data),
                Region::Io if offset < IO_DATA => self.io_address = word(data),
                Region::Io => self.write_register(self.io_address, word(data), host),
                Region::Registers | Region::Config => {
                    for (n, bytes) in data.chunks_exact(4).enumerate() {
                        self.write_register(offset as u32 + 4 * n as u32, word(bytes), host);
                    }
                }
            }
        }
        self.run(host);
        Ok(())
    }

    fn read_register(&mut self, offset: u32, host: &mut dyn Host) -> u32 {
        let offset = registers::canonical(offset & !3);
        if let Some(count) = self.statistics.take(offset) {
            return count;
        }
        if let Some(value) = self.interrupts.read(offset) {
            return value;
        }
        let stored = self.file.word(offset);
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RXDCTL.offset()
        {
            let enabled = self.receive_queues[queue].enabled || self.is_runaway(queue, false);
            return stored | flag(enabled, ReceiveQueueControl::ENABLE.bits());
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TXDCTL.offset()
        {
            let enabled = self.transmit_queues[queue].enabled || self.is_runaway(queue, true);
            return stored | flag(enabled, TransmitQueueControl::ENABLE.bits());
        }
        match offset {
            o if o == STATUS.offset() => self.status(host).bits(),
            o if o == EECD.offset() => {
                let read = host.now() >= self.nvm_read_at;
                stored & !EepromControl::AUTO_RD.bits() | flag(read, EepromControl::AUTO_RD.bits())
            }
            o if o == SWSM.offset() => {
                self.file.set_word(offset, stored | 1);
                stored
            }
            _ => stored,
        }
    }

    fn status(&mut self, host: &mut dyn Host) -> Status {
        self.update_link(host);
        let mut status = Status::FD | Status::SPEED_1000;
        status.set(Status::LU, self.link);
        // A queue that does not stop has requests outstanding.
        let disabled = self.file.get(CTRL).contains(Control::GIO_MASTER_DISABLE);
        status.set(
            Status::GIO_MASTER_ENABLE,
            !disabled || !self.runaways.is_empty(),
        );
        status
    }

    fn write_register(&mut self, offset: u32, value: u32, host: &mut dyn Host) {
        let offset = registers::canonical(offset & !3);
        if self.interrupts.write(offset, value) {
            return;
        }
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RXDCTL.offset()
        {
            self.file.write(offset, value);
            let enable = value & ReceiveQueueControl::ENABLE.bits() != 0;
            return self.enable_receive(queue, enable, host);
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TXDCTL.offset()
        {
            self.file.write(offset, value);
            let enable = value & TransmitQueueControl::ENABLE.bits() != 0;
            return self.enable_transmit(queue, enable, host);
        }
        match offset {
            o if o == CTRL.offset() => self.write_control(Control::from_bits_retain(value), host),
            o if o == CTRL_EXT.offset() => {
                let value = ControlExtended::from_bits_retain(value) - ControlExtended::EE_RST;
                self.file.set(CTRL_EXT, value);
            }
            o if o == EECD.offset() => self.write_eecd(EepromControl::from_bits_retain(value)),
            o if o == EERD.offset() => self.read_nvm(EepromRead::from_bits_retain(value)),
            o if o == MDIC.offset() => {
                let answer = self.phy.command(Mdi::from_bits_retain(value), host.now());
                self.file.set(MDIC, answer);
            }
            o if o == RCTL.offset() => {
                self.file.set_word(offset, value);
                self.receiver_switched();
            }
            o if o == TCTL.offset() => {
                self.file.set_word(offset, value);
                self.transmitter_switched();
            }
            _ => self.file.write(offset, value),
        }
    }

    fn write_control(&mut self, control: Control, host: &mut dyn Host) {
        if control.contains(Control::RST) {
            self.counters.software_resets += 1;
            return self.reset_mac(host);
        }
        if control.contains(Control::PHY_RST) {
            let reset = Mdi::write(CONTROL, PhyControl::RESET.bits());
            self.phy.command(reset, host.now());
        }
        self.file.set(CTRL, control - Control::PHY_RST);
    }

    /// Bit-bang access is granted when asked for; nothing is behind it. §8.4.1
    fn write_eecd(&mut self, value: EepromControl) {
        let asked = value & EepromControl::REQ;
        let mut eecd = self.file.get(EECD) - EepromControl::REQ - EepromControl::GNT;
        eecd |= asked;
        eecd.set(EepromControl::GNT, !asked.is_empty());
        self.file.set(EECD, eecd);
    }

    fn read_nvm(&mut self, command: EepromRead) {
        let mut answer = u32::from(command.address()) << 2;
        if command.contains(EepromRead::START) {
            let data = self.nvm.word(command.address());
            answer |= u32::from(data) << 16 | EepromRead::DONE.bits();
        }
        self.file.set_word(EERD.offset(), answer);
    }

    // Queues on and off. ENABLE takes effect when the receiver or transmitter is on (§8.10.10,
    // §8.12.13), and stays until it is written as 0.

    fn receiver_switched(&mut self) {
        if self.file.get(RCTL).contains(ReceiveControl::RXEN) {
            for queue in &mut self.receive_queues {
                queue.enabled |= queue.requested;
            }
        } else {
            self.buffer.clear();
        }
    }

    fn transmitter_switched(&mut self) {
        if self.file.get(TCTL).contains(TransmitControl::TXEN) {
            for queue in &mut self.transmit_queues {
                queue.enabled |= queue.requested;
            }
        }
    }

    fn enable_receive(&mut self, number: usize, enable: bool, host: &mut dyn Host) {
        let on = self.file.get(RCTL).contains(ReceiveControl::RXEN);
        let queue = &mut self.receive_queues[number];
        queue.requested = enable;
        if enable {
            queue.enabled |= on;
        } else if queue.enabled {
            queue.enabled = false;
            self.run_away(number, false, host);
        }
    }

    fn enable_transmit(&mut self, number: usize, enable: bool, host: &mut dyn Host) {
        let on = self.file.get(TCTL).contains(TransmitControl::TXEN);
        let queue = &mut self.transmit_queues[number];
        queue.requested = enable;
        if enable {
            queue.enabled |= on;
        } else if queue.enabled {
            queue.enabled = false;
            self.run_away(number, true, host);
        }
    }

    fn is_runaway(&self, queue: usize, transmit: bool) -> bool {
        self.runaways
            .iter()
            .any(|runaway| runaway.queue == queue && runaway.transmit == transmit)
    }

    /// Lets a queue that was told to stop go on, if a fault says so.
    fn run_away(&mut self, queue: usize, transmit: bool, host: &mut dyn Host) {
        let fault = if transmit {
            Fault::TxQueueStuck
        } else {
            Fault::RxQueueStuck
        };
        if self.faults.has(fault) && self.is_bus_master() && !self.is_runaway(queue, transmit) {
            let runaway = Runaway::start(queue, transmit, &self.file, host);
            self.runaways.push(runaway);
        }
    }

    // Resets. NIC §4.2; PCIe 6.6.2.

    /// What a reset of any kind leaves of the MAC: queue 0 asks to be enabled. §8.10.10
    fn request_first_queues(&mut self) {
        self.receive_queues[0].requested = true;
        self.transmit_queues[0].requested = true;
    }

    /// CTRL.RST. The PHY, configuration space and a wedged engine are left alone.
    fn reset_mac(&mut self, host: &mut dyn Host) {
        for number in 0..self.receive_queues.len() {
            if self.receive_queues[number].enabled {
                self.run_away(number, false, host);
            }
            if self.transmit_queues[number].enabled {
                self.run_away(number, true, host);
            }
        }
        self.file.reset(self.nvm.mac());
        self.forget(host.now());
    }

    fn forget(&mut self, now: Duration) {
        self.interrupts = interrupts::Interrupts::default();
        self.statistics = Statistics::default();
        self.buffer.clear();
        for queue in &mut self.receive_queues {
            queue.reset();
        }
        for queue in &mut self.transmit_queues {
            queue.reset();
        }
        self.request_first_queues();
        self.nvm_read_at = now + NVM_READ;
        self.link = false;
    }

    /// Function level reset: everything but the PHY and the sticky error registers; every queue
    /// stops, wedged and stuck ones too. Also what `VFIO_DEVICE_RESET` does.
    pub fn reset_function(&mut self, now: Duration) {
        self.counters.function_resets += 1;
        self.runaways.clear();
        for queue in &mut self.receive_queues {
            queue.wedged = false;
        }
        for queue in &mut self.transmit_queues {
            queue.wedged = false;
        }
        self.reinitialise(now);
    }

    fn power_up(&mut self, now: Duration) {
        self.counters.power_ups += 1;
        self.reinitialise(now);
    }

    fn reinitialise(&mut self, now: Duration) {
        self.config.reset();
        self.file = registers::File::new(self.nvm.mac());
        self.msix.fill(0);
        self.io_address = 0;
        self.forget(now);
    }

    // The data path.

    /// Whether a frame from the wire would find room now. A wire that can hold frames back asks
    /// first; a frame that nobody would receive anyway finds room.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.buffer.has_room()
    }

    /// Takes a frame, without frame check sequence, from the wire.
    pub fn receive(&mut self, frame: Vec<u8>, host: &mut dyn Host) {
        if self.phy.is_loopback() {
            self.counters.rx_dropped += 1;
        } else {
            self.arrive(frame, host);
        }
        self.settle(host);
    }

    /// Does what is due: link changes, frames that wait for descriptors, descriptors that wait to
    /// be sent. True when there is more to do at once.
    pub fn run(&mut self, host: &mut dyn Host) -> bool {
        self.faults.begin(self.counters.tx_frames);
        if self.is_gone() {
            return false;
        }
        self.update_link(host);
        if self.config.is_bus_master() {
            for runaway in &mut self.runaways {
                self.counters.runaway_accesses += u64::from(runaway.act(host));
            }
        }
        self.drain(host);
        let more = self.transmit(host);
        self.settle(host);
        more
    }

    /// When [`Device::run`] has something to do by itself, if ever.
    #[must_use]
    pub fn next_event(&self, now: Duration) -> Option<Duration> {
        let runaway = self.runaways.iter().map(Runaway::due).min();
        let runaway = runaway.filter(|_| self.is_bus_master());
        let link = self.phy.next_change(now);
        [runaway, link].into_iter().flatten().min()
    }

    fn update_link(&mut self, host: &mut dyn Host) {
        let control = self.file.get(CTRL);
        let link = self.phy.has_link(host.now()) && control.contains(Control::SLU);
        if link != self.link {
            self.link = link;
            self.interrupts.cause(InterruptCause::LSC);
        }
    }

    fn settle(&mut self, host: &mut dyn Host) {
        if self.is_bus_master() {
            let sent = self.interrupts.settle(host);
            if sent != 0 {
                self.statistics.interrupted(sent);
                self.counters.interrupts += u64::from(sent);
            }
        }
    }

    /// Sends what is ready, within the budget; true when the budget ran out.
    fn transmit(&mut self, host: &mut dyn Host) -> bool {
        let mut budget = BUDGET;
        for number in 0..self.transmit_queues.len() {
            while self.may_transmit(number) {
                let ring = Ring::transmit(&self.file, number);
                if ring.ready() == 0 {
                    break;
                }
                if budget == 0 {
                    return true;
                }
                budget -= 1;
                let queue = &mut self.transmit_queues[number];
                match transmit::step(queue, number, ring, &mut self.file, host, &mut self.out) {
                    Ok(step) if step.reported => self.interrupts.queue(number, true),
                    Ok(_) => {}
                    Err(_) => {
                        queue.wedged = true;
                        self.aborted();
                    }
                }
                self.emit(host);
            }
        }
        false
    }

    fn may_transmit(&self, number: usize) -> bool {
        let queue = &self.transmit_queues[number];
        queue.enabled
            && !queue.wedged
            && self.link
            && self.file.get(TCTL).contains(TransmitControl::TXEN)
            && self.may_request()
    }

    fn aborted(&mut self) {
        self.counters.aborts += 1;
        self.config.log_unsupported_request();
    }

    fn emit(&mut self, host: &mut dyn Host) {
        let loopback = self.phy.is_loopback();
        let mut out = std::mem::take(&mut self.out);
        for frame in out.drain(..) {
            self.counters.tx_frames += 1;
            self.counters.tx_bytes += frame.len() as u64;
            self.statistics.sent(frame.len(), Cast::of(&frame));
            if loopback {
                self.arrive(frame, host);
            } else {
                host.transmit(&frame);
            }
        }
        self.out = out;
        self.faults.begin(self.counters.tx_frames);
    }

    fn arrive(&mut self, frame: Vec<u8>, host: &mut dyn Host) {
        let on = self.file.get(RCTL).contains(ReceiveControl::RXEN);
        if !on || !self.link || self.is_gone() {
            self.counters.rx_dropped += 1;
            return;
        }
        self.statistics.seen(frame.len());
        match filter::judge(&self.file, &frame) {
            Verdict::Accept => {}
            verdict => {
                self.counters.rx_dropped += 1;
                if verdict == Verdict::TooLong {
                    self.statistics.oversized();
                }
                return;
            }
        }
        self.statistics.accepted(frame.len(), Cast::of(&frame));
        let arrival = Arrival::new(&self.file, frame);
        let waiting = if self.buffer.is_empty() {
            self.offer(arrival, host)
        } else {
            Some(arrival)
        };
        if let Some(arrival) = waiting {
            self.statistics.no_buffer();
            if self.buffer.push(arrival).is_err() {
                self.statistics.missed();
                self.counters.rx_dropped += 1;
            }
        }
    }

    /// Offers a frame to its queue; hands it back when it has to wait.
    fn offer(&mut self, arrival: Arrival, host: &mut dyn Host) -> Option<Arrival> {
        if !self.may_request() {
            return Some(arrival);
        }
        let number = arrival.queue;
        let queue = &mut self.receive_queues[number];
        match receive::place(queue, &arrival, &mut self.file, host) {
            Ok(Placed::Written) => {
                self.counters.rx_frames += 1;
                self.counters.rx_bytes += arrival.into_bytes().len() as u64;
                self.interrupts.queue(number, false);
                return None;
            }
            Ok(Placed::NoDescriptors) => {
                let split: SplitReceive = self.file.of_queue(SRRCTL, number);
                if !split.contains(SplitReceive::DROP_EN) {
                    return Some(arrival);
                }
                self.statistics.queue_dropped(number);
            }
            Ok(Placed::Never) => {}
            Err(_) => {
                queue.wedged = true;
                self.aborted();
            }
        }
        self.counters.rx_dropped += 1;
        None
    }

    /// Writes frames that wait, oldest first, until one has to wait on.
    fn drain(&mut self, host: &mut dyn Host) {
        while !self.buffer.is_empty() && self.may_request() {
            let Some(arrival) = self.buffer.pop() else {
                return;
            };
            if let Some(waiting) = self.offer(arrival, host) {
                return self.buffer.put_back(waiting);
            }
        }
    }
}

const fn flag(on: bool, bits: u32) -> u32 {
    if on { bits } else { 0 }
}

/// The first four bytes as a little-endian word; missing ones are 0.
fn word(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .take(4)
        .rev()
        .fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn check(region: Region, offset: u64, len: usize) -> Result<(), BadAccess> {
    let (size, whole_words) = match region {
        Region::Registers => (bar_size(0), true),
        Region::Io => (8, false),
        Region::MsiX => (bar_size(3), true),
        Region::Config => (config::SIZE as u64, false),
    };
    let inside = offset
        .checked_add(len as u64)
        .is_some_and(|end| end <= size);
    let aligned = !whole_words || offset.is_multiple_of(4) && len.is_multiple_of(4);
    let narrow = region != Region::Io || len <= 4 && offset % 4 + len as u64 <= 4;
    if inside && aligned && narrow {
        Ok(())
    } else {
        Err(BadAccess {
            region,
            offset,
            len,
        })
    }
}
