//! A small device with several queues over a function made of memory, its provider, and a schedule
//! of what they get wrong: T0's device under test.
//!
//! All that the device was told is in its registers, so that a reset makes it forget; it moves frames
//! only when [`Bench::receive`] or [`Bench::send`] says so, by DMA, where it is mapped and master.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test target uses a part of it"
)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use failstop::device::{Device, DeviceError, Options};
use failstop::families::Driver;
use failstop::igb::descriptors::{RxDone, RxErrors, RxStatus, TxData, TxDone};
use failstop::objects::{Cq, CreateError, Mr, Pd, QueueInit, Rq, Sq};
use failstop::owned::Owned;
use failstop::port::PortConfig;
use failstop::provider::Config;
use failstop::rss::Rss;
use failstop_dma::region::Pool;
use failstop_pci::clock::Clock;
use failstop_pci::reset::Canary;
use failstop_pci::testing::{FakeFunction, Happened, ResetScript, limits_39_bits};
use failstop_pci::transport::{DmaLimits, ResetMethod, Unmapped};
use nix::errno::Errno;

mod provider;

use provider::Scripted;
use provider::queue_registers;
pub use provider::{Script, Software, Stop, Time};

/// Queues of each direction.
pub const QUEUES: u32 = 2;
/// Bytes of a frame, and the longest that the device moves.
pub const FRAME: u32 = 64;
/// Descriptors of a receive ring.
pub const RX: u32 = 8;
/// Descriptors of a send ring.
pub const TX: u32 = 64;
/// Frames of a region that feeds one queue of each direction, with some to spare.
pub const FRAMES: u32 = RX + TX + 8;
/// What the device fills a received frame with, unless told otherwise.
pub const PAYLOAD: u8 = 0xab;

const BAR_BYTES: u64 = 0x4000;
const STATUS: u32 = 0x0000;
const ALIVE: u32 = 0x0000_0301;
const CANARY: Canary = Canary {
    register: 0x0010,
    planted: 0x5a,
    reset: 0,
    mask: 0xff,
};
/// What the software reset does: one of [`Software`].
const SOFTWARE: u32 = 0x0014;
const IRQ_MASK: u32 = 0x0018;
/// What is hashed.
const HASH: u32 = 0x001c;
const ENABLE: u32 = 1 << 25;
const THRESHOLDS: u32 = 0x0004_0408;

/// Registers of one queue, from [`base`].
const CONTROL: u32 = 0x00;
/// Whether the device works at the queue, whatever [`CONTROL`] reads.
const RUNS: u32 = 0x04;
const RING: u32 = 0x08;
const ENTRIES: u32 = 0x0c;
const HEAD: u32 = 0x10;
const TAIL: u32 = 0x14;

const STOP_DEADLINE: Duration = Duration::from_millis(10);
const STOP_INTERVAL: Duration = Duration::from_micros(100);

/// A direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Way {
    Receive,
    Send,
}

pub const WAYS: [Way; 2] = [Way::Receive, Way::Send];

fn base(way: Way, queue: u32) -> u32 {
    let way = match way {
        Way::Receive => 0x1000,
        Way::Send => 0x2000,
    };
    way + queue * 0x40
}

/// A device and what may be done to it.
#[derive(Debug)]
pub struct Bench {
    pub function: Arc<FakeFunction>,
    pub time: Arc<Time>,
    pub script: Arc<Script>,
}

/// A function with ids, which is no family of ours.
fn header() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[0..4].copy_from_slice(&[0x11, 0x11, 0x22, 0x22]);
    bytes[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]); // Ethernet.
    bytes
}

/// Limits with so many pages of addresses, from the second on.
pub fn pages(pages: u64) -> DmaLimits {
    DmaLimits {
        ranges: vec![0x1000..=0xfff + pages * 0x1000],
        ..limits_39_bits()
    }
}

impl Bench {
    /// Behind a server, whose every access is a message.
    pub fn new() -> Self {
        Self::of(|function| function.by_messages())
    }

    /// With a function as `make` has it.
    pub fn of(make: impl FnOnce(FakeFunction) -> FakeFunction) -> Self {
        Self::with_limits(limits_39_bits(), make)
    }

    /// The same with other limits.
    pub fn with_limits(limits: DmaLimits, make: impl FnOnce(FakeFunction) -> FakeFunction) -> Self {
        let function = FakeFunction::new(limits)
            .unwrap()
            .with_config(&header())
            .with_bar_size(BAR_BYTES);
        Self {
            function: Arc::new(make(function)),
            time: Arc::default(),
            script: Arc::default(),
        }
    }

    /// Opens the device.
    pub fn open(&self) -> Device {
        self.try_open().unwrap()
    }

    /// As [`Bench::open`].
    pub fn try_open(&self) -> Result<Device, DeviceError> {
        self.try_open_with(None)
    }

    /// As [`Bench::open`], with what is received spread over the queues.
    pub fn try_open_with(&self, rss: Option<Rss>) -> Result<Device, DeviceError> {
        let (function, time, script) = (
            self.function.clone(),
            self.time.clone(),
            self.script.clone(),
        );
        let make = move |window, _| Scripted {
            window,
            function: function.clone(),
            time: time.clone(),
            script: script.clone(),
        };
        let options = Options {
            clock: self.time.clone(),
            driver: Some(Driver::new(BAR_BYTES, make)),
            ..Options::default()
        };
        let config = Config {
            longest_frame: FRAME,
            rss,
            ..Config::default()
        };
        Device::open_with(self.function.clone(), &config, options)
    }

    /// What its own reset does, until another reset.
    pub fn software(&self, how: Software) {
        self.function.set_register(SOFTWARE.into(), how as u32);
    }

    fn register(&self, register: u32) -> u32 {
        self.function.register(register.into())
    }

    fn set(&self, register: u32, value: u32) {
        self.function.set_register(register.into(), value);
    }

    /// Every register of the device.
    pub fn registers(&self) -> Vec<u32> {
        let all = [STATUS, CANARY.register, SOFTWARE, IRQ_MASK];
        let all = all.into_iter().chain(queue_registers());
        all.map(|register| self.register(register)).collect()
    }

    /// From now on nothing takes anything away from the device: bus mastering stays on, resets fail
    /// and so does every unmap for a while.
    pub fn never_revoked(&self) {
        self.function.ignore_config_writes();
        for method in [ResetMethod::Server, ResetMethod::Flr, ResetMethod::Bus] {
            self.function
                .script_reset(method, ResetScript::Fails(Errno::EIO));
        }
        for _ in 0..32 {
            self.function
                .answer_next_unmap(Unmapped::Failed(Errno::EIO));
        }
    }

    /// Where the descriptors are, how many, and what the device has of them: none of a queue that
    /// it does not know, or knows no more.
    pub fn queue(&self, way: Way, queue: u32) -> Option<Posted> {
        let at = base(way, queue);
        let (ring, entries) = (self.register(at + RING), self.register(at + ENTRIES));
        let runs = self.register(at + RUNS) == 1 && entries.is_power_of_two();
        runs.then(|| Posted {
            ring: ring.into(),
            entries,
            head: self.register(at + HEAD),
            tail: self.register(at + TAIL),
        })
    }

    fn descriptor(&self, at: u64) -> Option<[u64; 2]> {
        let mut bytes = [0; 16];
        let read = self.function.dma_read(at, &mut bytes);
        let (low, high) = bytes.split_at(8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        read.then(|| [word(low), word(high)])
    }

    /// The device writes the second word of the descriptor at `at`.
    pub fn write_back(&self, at: u64, word: u64) -> bool {
        self.function.dma_write(at + 8, &word.to_le_bytes())
    }

    /// The device receives up to `frames` frames of `len` bytes; how many it could.
    pub fn receive(&self, queue: u32, frames: u32, len: u16) -> u32 {
        let mut received = 0;
        while received < frames && self.receive_one(queue, len, PAYLOAD).is_some() {
            received += 1;
        }
        received
    }

    /// The device receives one frame of `payload` bytes; none when it cannot.
    pub fn receive_one(&self, queue: u32, len: u16, payload: u8) -> Option<()> {
        let posted = self.queue(Way::Receive, queue)?;
        let at = posted.next()?;
        let [buffer, _] = self.descriptor(at)?;
        let bytes = [payload; FRAME as usize];
        let bytes = &bytes[..usize::from(len).min(FRAME as usize)];
        let status = RxStatus::DD | RxStatus::EOP;
        let done = RxDone::new(status, RxErrors::empty(), len, 0);
        let written = self.function.dma_write(buffer, bytes) && self.write_back(at, done.0);
        written.then(|| self.advance(Way::Receive, queue, posted))
    }

    /// The device sends up to `frames` of what it was given; how many it could.
    pub fn send(&self, queue: u32, frames: u32) -> u32 {
        let mut sent = 0;
        while sent < frames && self.send_one(queue).is_some() {
            sent += 1;
        }
        sent
    }

    fn send_one(&self, queue: u32) -> Option<()> {
        let posted = self.queue(Way::Send, queue)?;
        let at = posted.next()?;
        let data = TxData::from_words(self.descriptor(at)?);
        let mut frame = vec![0; data.length.into()];
        let read = self.function.dma_read(data.address, &mut frame);
        let report = failstop::igb::descriptors::TxCommand::RS;
        let told = !data.command.contains(report) || self.write_back(at, TxDone::DONE.0);
        (read && told).then(|| self.advance(Way::Send, queue, posted))
    }

    fn advance(&self, way: Way, queue: u32, posted: Posted) {
        let head = (posted.head + 1) & (posted.entries - 1);
        self.set(base(way, queue) + HEAD, head);
    }

    /// The device writes into every buffer that it was given and has not returned, as it may at any
    /// time; how many it reached.
    pub fn write_posted(&self, byte: u8) -> u32 {
        let mut reached = 0;
        for queue in 0..QUEUES {
            let Some(mut posted) = self.queue(Way::Receive, queue) else {
                continue;
            };
            while let Some(at) = posted.next() {
                let buffer = self.descriptor(at).map(|[buffer, _]| buffer);
                let write = |buffer| self.function.dma_write(buffer, &[byte; FRAME as usize]);
                reached += u32::from(buffer.is_some_and(write));
                posted.head = (posted.head + 1) & (posted.entries - 1);
            }
        }
        reached
    }

    /// The device writes wherever it can, told so or not; how many bytes it reached.
    pub fn write_everywhere(&self, byte: u8) -> u64 {
        let mapped = self.function.mapped();
        let reached = mapped.into_iter().filter(|&(start, len)| {
            let bytes = vec![byte; usize::try_from(len).unwrap()];
            self.function.dma_write(start, &bytes)
        });
        reached.map(|(_, len)| len).sum()
    }

    /// Lets time pass, step by step, until `done` says so.
    pub fn pass_until(&self, mut done: impl FnMut() -> bool) {
        while !done() {
            self.time.sleep(Duration::from_secs(1));
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until something is in the function's log.
    pub fn wait_logged(&self, mut is: impl FnMut(&Happened) -> bool) {
        while !self.function.log().iter().any(&mut is) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What a device knows of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Posted {
    /// Where the descriptors are.
    pub ring: u64,
    /// How many.
    pub entries: u32,
    /// The next that it works at.
    pub head: u32,
    /// The first that it was not given.
    pub tail: u32,
}

impl Posted {
    /// Where the next descriptor is, if it has one.
    fn next(&self) -> Option<u64> {
        let at = self.ring + u64::from(self.head & (self.entries - 1)) * 16;
        (self.head != self.tail).then_some(at)
    }
}

/// A port's sizes, as small as they go.
pub fn small() -> PortConfig {
    PortConfig {
        rx_entries: RX,
        tx_entries: TX,
        frame_size: FRAME,
        spare_frames: FRAMES - RX - TX,
    }
}

/// A queue's parents and size.
pub fn init<'a>(
    pd: &'a Owned<Pd>,
    cq: &'a Owned<Cq>,
    mr: &'a Owned<Mr>,
    pool: &'a mut Pool,
    entries: u32,
    number: u32,
) -> QueueInit<'a> {
    QueueInit {
        pd,
        cq,
        mr,
        pool,
        entries,
        number,
    }
}

/// One of each object, as a program that uses them one by one has them.
#[derive(Debug)]
pub struct Objects {
    pub rq: Owned<Rq>,
    pub sq: Owned<Sq>,
    pub pool: Pool,
    pub mr: Owned<Mr>,
    pub cq: Owned<Cq>,
    pub pd: Owned<Pd>,
}

impl Objects {
    /// On queues `number`.
    pub fn new(device: &Device, number: u32) -> Result<Self, CreateError> {
        let pd = device.alloc_pd()?;
        let (mr, mut pool) = pd.register(FRAMES, FRAME)?;
        let cq = device.create_cq(RX + TX)?;
        let rq = pd.create_rq(init(&pd, &cq, &mr, &mut pool, RX, number))?;
        let sq = pd.create_sq(init(&pd, &cq, &mr, &mut pool, TX, number))?;
        Ok(Self {
            rq,
            sq,
            pool,
            mr,
            cq,
            pd,
        })
    }
}
