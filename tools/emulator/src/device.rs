//! The model: an 82576, function 0, as its registers, its rings and its configuration space show
//! it. It has no I/O of its own: [`Host`] gives it memory, interrupts, a wire and time.
//!
//! Everything happens inside a call: when [`Device::write`], [`Device::receive`] or
//! [`Device::run`] returns, no request of the device is in flight. That is what lets the server
//! answer an unmap at once. What a fault does later, it does in a later call, and meets what is
//! mapped then.

use std::time::Duration;

use failstop::igb::bits::{Control, InterruptCause};
use failstop::igb::registers::CTRL;
use thiserror::Error;

use crate::faults::Faults;
use crate::host::Host;
use crate::stats::{DeviceCounters, LogEntry, RogueDma};

mod access;
mod accounts;
mod config;
mod filter;
mod interrupts;
mod late;
mod lies;
mod misbehaviour;
mod moments;
mod nvm;
mod offload;
mod phy;
mod queues;
mod receive;
mod registers;
mod resets;
mod ring;
mod rogue;
mod statistics;
#[cfg(test)]
mod tests;
mod traffic;
mod transmit;

pub(crate) use config::{SIZE as CONFIG_SIZE, VECTORS, bar_size};
use misbehaviour::Trouble;
use receive::PacketBuffer;
pub use resets::Reset;
use statistics::Statistics;

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
    trouble: Trouble,
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
            trouble: Trouble::default(),
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

    /// DMA that faults made.
    #[must_use]
    pub const fn rogue_dma(&self) -> &RogueDma {
        self.trouble.accounts.counts()
    }

    /// The latest accesses that faults made, oldest first; 4096 are kept.
    #[must_use]
    pub fn log(&self, lines: usize) -> Vec<LogEntry> {
        self.trouble.accounts.log(lines)
    }

    /// Puts a mark into the log.
    pub fn mark(&mut self, word: String, host: &dyn Host) {
        self.trouble.accounts.mark(word, host);
    }

    /// Sets the counters to 0. The log stays.
    pub fn reset_counters(&mut self) {
        self.counters = DeviceCounters::default();
        self.trouble.accounts.reset_counts();
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
            count(&|n| self.receive_queues[n].enabled || self.shows_enable(n, false)),
            count(&|n| self.transmit_queues[n].enabled || self.shows_enable(n, true)),
        )
    }

    /// The faults that were asked for.
    #[must_use]
    pub const fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Plugs or pulls the cable.
    pub fn set_carrier(&mut self, carrier: bool, host: &mut dyn Host) {
        self.phy.set_carrier(carrier, host.now());
        self.run(host);
    }

    /// Whether engines may issue requests: bus master, and master requests not disabled.
    fn may_request(&self) -> bool {
        self.is_master() && !self.file.get(CTRL).contains(Control::GIO_MASTER_DISABLE)
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
        self.note_read(region, offset, data.len(), host);
        self.apply_faults(host);
        if self.is_gone() {
            data.fill(self.gone_byte());
            return Ok(());
        }
        self.end_engines(host.now());
        if region == Region::Config {
            self.config.read(offset as usize, data);
            self.misread(offset as usize, data);
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
        self.note_write(region, offset, data, host);
        self.apply_faults(host);
        if self.is_gone() {
            return Ok(());
        }
        if region == Region::Config {
            let master = self.config.is_bus_master();
            let effect = self.config.write(offset as usize, data);
            if master && !self.config.is_bus_master() {
                self.mastering_ended(host);
            }
            match effect {
                config::Effect::None => {}
                config::Effect::FunctionLevelReset => {
                    // Whether it worked is for the driver to see.
                    let _reset = self.reset_function(host);
                }
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
        self.apply_faults(host);
        if self.is_gone() {
            return false;
        }
        self.update_link(host);
        self.misbehave(host);
        self.drain(host);
        let more = self.transmit(host);
        self.settle(host);
        more
    }

    /// When [`Device::run`] has something to do by itself, if ever.
    #[must_use]
    pub fn next_event(&self, now: Duration) -> Option<Duration> {
        let misbehaviour = self.next_misbehaviour(now);
        let link = self.phy.next_change(now);
        [misbehaviour, link].into_iter().flatten().min()
    }

    fn update_link(&mut self, host: &mut dyn Host) {
        let control = self.file.get(CTRL);
        let now = host.now();
        let link =
            self.phy.has_link(now) && control.contains(Control::SLU) && !self.is_flapped_down(now);
        if link != self.link {
            self.link = link;
            self.interrupts.cause(InterruptCause::LSC);
        }
    }

    fn settle(&mut self, host: &mut dyn Host) {
        if self.is_bus_master() {
            let due = self.interrupts.settle();
            if due == 0 {
                return;
            }
            let sent = self.routed(due);
            for vector in (0..u32::BITS).filter(|vector| sent & 1 << vector != 0) {
                host.interrupt(vector);
            }
            self.statistics.interrupted(sent.count_ones());
            self.counters.interrupts += u64::from(sent.count_ones());
        }
    }
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
