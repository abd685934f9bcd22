//! A device that this process plays: its registers are memory, its rings are written by us.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use failstop::device::{Device, Options};
use failstop::dma::iova::Iova;
use failstop::families::Driver;
use failstop::pci::clock::{Clock, ManualClock};
use failstop::pci::register::Reg;
use failstop::pci::reset::Canary;
use failstop::pci::testing::{BAR_SIZE, FakeFunction, limits_39_bits};
use failstop::pci::window::{Doorbell, NoAnswer, StopBit, Stopped, Window};
use failstop::provider::{
    Config, Formats, Limits, Link, MacAddress, NotStopped, Provider, ProviderError, RingSpec,
    SoftwareReset, Statistics,
};
use libtest_mimic::Failed;

const RX_TAIL: Reg = Reg::at(0x18);
const TX_TAIL: Reg = Reg::at(0x28);
const CONTROL: Reg = Reg::at(0x38);
/// Bits of [`CONTROL`]: the queue runs, and a sign of life.
const RUNS: u32 = 1;
const ALIVE: u32 = 2;
/// Bytes between the tail registers of two queues.
const STRIDE: u32 = 0x40;
/// Queues of each direction.
const QUEUES: usize = 16;
const FRAME: u32 = 2048;

/// The rings of a direction: receive, send.
pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;

/// Where the rings are: receive, send.
pub(super) type Rings = Arc<Mutex<[[Iova; QUEUES]; 2]>>;

/// What a device writes that received a frame of so many bytes: done, end of packet (82576 datasheet,
/// §7.1.5.2; 82574 datasheet, §7.1.5).
pub(super) const fn received(bytes: u32) -> u64 {
    3 | (bytes as u64) << 32
}

/// What a device writes that sent a frame: done (82576 datasheet, §7.2.2.3.3; 82574 datasheet,
/// §7.2.10.1).
pub(super) const fn sent() -> u64 {
    1 << 32
}

/// A device with a family's descriptors, igb's where nothing else is said, and no life of its own.
pub(super) struct Script {
    pub(super) function: Arc<FakeFunction>,
    pub(super) device: Device,
    rings: Rings,
}

impl Script {
    pub(super) fn open() -> Result<Self, Failed> {
        Self::of(FRAME)
    }

    /// A device that receives frames of up to so many bytes.
    pub(super) fn of(longest: u32) -> Result<Self, Failed> {
        Self::new(longest, Formats::Advanced)
    }

    /// A device with these descriptors.
    pub(super) fn with(formats: Formats) -> Result<Self, Failed> {
        Self::new(FRAME, formats)
    }

    fn new(longest: u32, formats: Formats) -> Result<Self, Failed> {
        let mut header = vec![0; 64];
        header[..4].copy_from_slice(&[0x11, 0x11, 0x22, 0x22]);
        let function = FakeFunction::new(limits_39_bits())?.with_config(&header);
        let function = Arc::new(function);
        let rings = Rings::default();
        let places = rings.clone();
        let driver = Driver::new(BAR_SIZE, move |window, clock| Scripted {
            window,
            clock,
            rings: places.clone(),
            longest,
            formats,
        });
        let options = Options {
            clock: Arc::new(ManualClock::default()),
            driver: Some(driver),
            ..Options::default()
        };
        let device = Device::open_with(function.clone(), &Config::default(), options)?;
        Ok(Self {
            function,
            device,
            rings,
        })
    }

    /// Writes the second word of a descriptor, as a device does that is done with it.
    pub(super) fn done(&self, ring: usize, index: u32, word: u64) -> Result<(), Failed> {
        self.done_of(0, ring, index, word)
    }

    /// As [`Script::done`], of a queue of that number.
    pub(super) fn done_of(
        &self,
        queue: u32,
        ring: usize,
        index: u32,
        word: u64,
    ) -> Result<(), Failed> {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = rings[ring][queue as usize].0 + 16 * u64::from(index) + 8;
        match self.function.dma_write(at, &word.to_le_bytes()) {
            true => Ok(()),
            false => Err("the scripted device cannot write its ring".into()),
        }
    }
}

#[derive(Debug)]
struct Scripted {
    window: Arc<Window>,
    clock: Arc<dyn Clock>,
    rings: Rings,
    longest: u32,
    formats: Formats,
}

impl Scripted {
    fn start(
        &self,
        queue: u32,
        ring: usize,
        spec: &RingSpec,
        tail: Reg,
    ) -> Result<Doorbell, ProviderError> {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings[ring][queue as usize] = spec.iova;
        let gone = || ProviderError::Gone {
            device: "scripted".into(),
            register: "tail",
            value: 0,
        };
        self.window
            .doorbell(tail.of(queue, STRIDE))
            .ok_or_else(gone)
    }

    fn stop(&self) -> Result<Stopped, NotStopped> {
        self.window.write(CONTROL, ALIVE);
        let bit = StopBit {
            queue: None,
            register: CONTROL.offset(),
            stop: NonZeroU32::new(RUNS).unwrap_or(NonZeroU32::MIN),
            alive: NonZeroU32::new(ALIVE).unwrap_or(NonZeroU32::MIN),
            deadline: Duration::from_millis(1),
            interval: Duration::from_micros(1),
            settle: Duration::from_micros(1),
        };
        Ok(self.window.wait_stopped(&*self.clock, &bit)?)
    }
}

impl Provider for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn part(&self) -> &'static str {
        "none"
    }

    fn limits(&self) -> Limits {
        Limits {
            queues: QUEUES as u32,
            longest_frame: self.longest,
            ring_entries: 4096,
            address_mask: u64::MAX,
            buffer_step: 1024,
        }
    }

    fn formats(&self) -> Formats {
        self.formats
    }

    fn bring_up(&mut self, _: &Config) -> Result<(), ProviderError> {
        Ok(())
    }

    fn longest_received(&self) -> u32 {
        self.longest
    }

    fn mac(&self) -> MacAddress {
        MacAddress([2, 0, 0, 0, 0, 1])
    }

    fn link(&mut self) -> Link {
        Link {
            up: true,
            speed: 1000,
            full_duplex: true,
        }
    }

    fn wait_link(&mut self, _: Duration) -> Link {
        self.link()
    }

    fn set_promiscuous(&mut self, _: bool) {}

    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.start(queue, RX, ring, RX_TAIL)
    }

    fn stop_rx(&mut self, _: u32) -> Result<Stopped, NotStopped> {
        self.stop()
    }

    fn start_tx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.start(queue, TX, ring, TX_TAIL)
    }

    fn stop_tx(&mut self, _: u32) -> Result<Stopped, NotStopped> {
        self.stop()
    }

    fn canary(&self) -> Canary {
        Canary {
            register: 0x48,
            planted: 0x1234_5678,
            reset: 0,
            mask: u32::MAX,
        }
    }

    fn software_reset(&self) -> SoftwareReset {
        |_: &Window, _: &dyn Clock| -> Result<(), NoAnswer> { Ok(()) }
    }

    fn statistics(&mut self) -> Statistics {
        Statistics::default()
    }

    fn route_rx_interrupt(&mut self, _: u32, _: u32) -> Option<(Doorbell, u32)> {
        None
    }

    fn quiesce(&mut self) {}
}
