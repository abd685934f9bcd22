//! A device with everything that a program makes of it, and beside it what the contract says of that.
//!
//! Included by the model's tests, and by `failstop replay`, which plays written sequences on it.

use std::collections::VecDeque;
use std::fmt;

use failstop::device::Device;
use failstop::objects::{Cq, Mr, Pd, Rq, Sq};
use failstop::owned::{Object, Owned};
use failstop::queues::completions::Completions;
use failstop::queues::lifecycle::Cause;
use failstop::rss::Rss;
use failstop_dma::frame::Frame;
use failstop_dma::region::Pool;
use failstop_pci::id::Generation;
use failstop_pci::testing::{Call, Hold};
use failstop_pci::transport::{Kind, RegionIndex, Strength};
pub(crate) use failstop_scenario::scenario::Behind;

use scripted::{Bench, FRAME, QUEUES, Software};
use steps::{Fault, Step};

/// Returns that the contract is broken, unless this holds.
macro_rules! ensure {
    ($holds:expr) => {
        ensure!($holds, "{}", stringify!($holds))
    };
    ($holds:expr, $($words:tt)+) => {
        if !($holds) {
            return Err(format!($($words)+).into());
        }
    };
}

/// Returns that the contract is broken, unless both are equal.
macro_rules! ensure_eq {
    ($left:expr, $right:expr) => {
        ensure_eq!($left, $right, "{}", stringify!($left))
    };
    ($left:expr, $right:expr, $($words:tt)+) => {
        match (&$left, &$right) {
            (left, right) => {
                let why = || format!($($words)+);
                ensure!(*left == *right, "{}: {left:?} is not {right:?}", why());
            }
        }
    };
}

#[path = "graph.rs"]
mod graph;
#[path = "life.rs"]
mod life;
#[path = "../scripted/mod.rs"]
pub(crate) mod scripted;
#[path = "steps.rs"]
pub(crate) mod steps;
#[path = "traffic.rs"]
mod traffic;

/// Where the contract was broken: what was seen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Breach(String);

impl From<String> for Breach {
    fn from(seen: String) -> Self {
        Self(seen)
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

type Checked = Result<(), Breach>;

/// What frames in the caller's hands are filled with: whoever finds other bytes there was written to
/// by a device that had no business with it.
const POISON: u8 = 0xa5;
/// A memory region as the model has it.
struct Region {
    life: Generation,
    id: u64,
    pd: u64,
    /// Which line of the ledger is its.
    serial: u64,
    mr: Option<Owned<Mr>>,
    pool: Pool,
    hand: Vec<Frame>,
}

/// A receive queue, and what was received for it.
struct Receiver {
    life: Generation,
    rq: Owned<Rq>,
    mr: u64,
    cq: u64,
    /// What the device wrote and nobody asked for yet, in order.
    written: VecDeque<u8>,
    /// Requests that the device was given.
    posted: u64,
    delivered: u64,
    lied: bool,
    ended: bool,
}

/// A send queue.
struct Sender {
    life: Generation,
    sq: Owned<Sq>,
    mr: u64,
    cq: u64,
    posted: u64,
    sent: u64,
    lied: bool,
}

/// An object with its number.
struct Handle<T: Object> {
    life: Generation,
    id: u64,
    object: Owned<T>,
}

/// One set of objects, on one queue of each direction. Parents are named by number, since their
/// handles may be gone before their children.
#[derive(Default)]
struct Kit {
    pd: Option<Handle<Pd>>,
    region: Option<Region>,
    cq: Option<Handle<Cq>>,
    rx: Option<Receiver>,
    tx: Option<Sender>,
}

/// An address that was mapped when its life ended.
struct Burned {
    start: u64,
    len: u64,
}

pub(crate) struct World {
    bench: Bench,
    device: Device,
    hold: Option<Hold>,
    kits: [Kit; QUEUES as usize],
    /// Which protection domain a region is of, for as long as it may be in use.
    regions: Vec<(u64, u64)>,
    /// Regions whose handle is gone and whose frames somebody holds: the serial, and the frames.
    orphans: Vec<(u64, Vec<Frame>)>,
    next_id: u64,
    next_payload: u8,
    burned: Vec<Burned>,
    /// What was mapped after the last step of a device that is well.
    mapped: Vec<(u64, u64)>,
    /// Bus mastering was on since the last reset that worked.
    mastered: bool,
    /// Something was told to go wrong, in this life of the process.
    faulty: bool,
    /// Somebody broke it, or the device did.
    broken: bool,
    settled: bool,
    finished: Completions,
    behind: Behind,
}

impl World {
    pub(crate) fn new(behind: Behind) -> Self {
        // So little room that addresses come back soon.
        let bench = Bench::with_limits(scripted::pages(40), |function| {
            let function = function.by_messages();
            match behind {
                Behind::Server => function,
                Behind::Kernel | Behind::Nothing => function.with_kind(Kind::Container),
            }
        });
        if matches!(behind, Behind::Nothing) {
            bench.function.set_strength(Strength::None);
        }
        Self {
            device: bench.try_open_with(Some(Rss::default())).unwrap(),
            bench,
            hold: None,
            kits: Default::default(),
            regions: Vec::new(),
            orphans: Vec::new(),
            next_id: 1,
            next_payload: 0,
            burned: Vec::new(),
            mapped: Vec::new(),
            mastered: false,
            faulty: false,
            broken: false,
            settled: false,
            finished: Completions::default(),
            behind,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Lets the ladder go on, where it was held up.
    fn let_go(&mut self) {
        if let Some(hold) = self.hold.take() {
            hold.release();
        }
    }

    pub(crate) fn step(&mut self, step: &Step) -> Checked {
        match *step {
            Step::Create(kit, of) => self.create(kit, of)?,
            Step::TryDestroy(kit, of) => self.destroy(kit, of, true)?,
            Step::Destroy(kit, of) => self.destroy(kit, of, false)?,
            Step::Post(kit, frames) => self.post(kit, frames)?,
            Step::Poll(kit, frames) => self.poll(kit, frames)?,
            Step::Reap(kit) => self.reap(kit)?,
            Step::DeviceReceives(kit, frames) => self.device_receives(kit, frames),
            Step::DeviceSends(kit, frames) => {
                let sent = self.bench.send(kit as u32, frames);
                if let Some(tx) = &mut self.kits[kit].tx {
                    tx.sent += u64::from(sent);
                }
            }
            Step::DeviceWrites => {
                let _ = self.bench.write_posted(0xdd);
                self.check_hands()?;
            }
            Step::DeviceWritesEverywhere => self.device_writes_everywhere()?,
            Step::DeviceLies(kit, at, word) => self.device_lies(kit, at, word),
            Step::Break => {
                self.device.break_now(Cause::User);
            }
            Step::BreakAndHold => {
                if self.device.broken().is_none() && self.hold.is_none() {
                    let hold = self.bench.function.hold(Call::Write(RegionIndex::Config));
                    self.device.break_now(Cause::User);
                    hold.wait_entered();
                    self.hold = Some(hold);
                }
            }
            Step::Recover => self.recover()?,
            Step::Close => self.close()?,
            Step::Fault(ref fault) => self.fault(fault),
            Step::Heal => {
                self.bench.script.stops_work();
                self.bench.function.read_config_again();
                self.bench.function.set_reads_as_master(false);
                self.bench.software(Software::Works);
            }
        }
        self.note_break()?;
        self.check()
    }

    fn fault(&mut self, fault: &Fault) {
        self.faulty = true;
        let function = &self.bench.function;
        match *fault {
            Fault::Stop(way, queue, stop) => self.bench.script.stop(way, queue, stop),
            Fault::Start(way) => self.bench.script.fail_starts(way, 1),
            Fault::Map(errno) => function.fail_next_map(errno),
            Fault::Unmap(outcome) => function.answer_next_unmap(outcome),
            Fault::Reset(script) => function.script_next_reset(script),
            Fault::Software(how) => self.bench.software(how),
            Fault::Gone(reading, reads) => function.misread_config(reading, reads),
            Fault::ReadsAsMaster => function.set_reads_as_master(true),
            Fault::BringUp => self.bench.script.fail_bring_ups(1),
        }
    }

    /// Whether the device is broken now.
    pub(crate) fn is_down(&self) -> bool {
        self.device.broken().is_some()
    }

    /// Whether that life of the device is over, or ending.
    fn is_broken(&self, life: Generation) -> bool {
        self.broken || life != self.device.generation()
    }

    /// Whether the verdict on that life is in.
    fn is_settled(&self, life: Generation) -> bool {
        self.broken && self.settled || life != self.device.generation()
    }
}

/// Fills a frame with what nobody but its holder may change.
fn poison(frame: &mut Frame) {
    assert!(frame.fill(&[POISON; FRAME as usize]).is_ok());
}
