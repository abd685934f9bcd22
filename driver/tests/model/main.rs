//! Random lives of a device against a reference model of the contract.
//!
//! After each step: what the backend holds mapped is in the ledger (R2); nothing that was released is
//! reachable (R3); no address is handed out again before it is unmapped and the device forgot it
//! (R4.6); every posted request ends in exactly one completion, received frames in order (R7); a
//! destroy of a broken device touches nothing (R6); a device that nobody broke stays well (C41, C45).
//! A watchdog ends the run when a step does not (R11).
//!
//! The address space by itself, with faults of map and unmap, has a model of its own in `dma`.

mod graph;
mod life;
#[path = "../scripted/mod.rs"]
mod scripted;
mod steps;
mod traffic;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;
use std::{process, thread};

use failstop::device::Device;
use failstop::objects::{Cq, Mr, Pd, Rq, Sq};
use failstop::owned::{Object, Owned};
use failstop::queues::completions::Completions;
use failstop::queues::lifecycle::Cause;
use failstop_dma::frame::Frame;
use failstop_dma::region::Pool;
use failstop_pci::id::Generation;
use failstop_pci::testing::{Call, Hold};
use failstop_pci::transport::{Kind, RegionIndex, Strength};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{TestCaseError, TestRunner};
use scripted::{Bench, FRAME, QUEUES, Software};
use steps::{Fault, Step, steps};

type Checked = Result<(), TestCaseError>;

/// What frames in the caller's hands are filled with: whoever finds other bytes there was written to
/// by a device that had no business with it.
const POISON: u8 = 0xa5;
/// Steps of one life of the process.
const STEPS: usize = 200;

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

struct World {
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

/// How the function is reached, and what that is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Behind {
    Server,
    Kernel,
    Nothing,
}

impl World {
    fn new(behind: Behind) -> Self {
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
            device: bench.open(),
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

    fn step(&mut self, step: &Step) -> Checked {
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

/// Steps taken so far, and the sequences that are under way: for the watchdog.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static UNDER_WAY: Mutex<BTreeMap<String, Vec<Step>>> = Mutex::new(BTreeMap::new());

/// Ends the process when no step ended for minutes, and says in which sequences.
fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        thread::spawn(|| {
            let mut last = u64::MAX;
            loop {
                thread::sleep(Duration::from_secs(120));
                let now = TAKEN.load(Ordering::Relaxed);
                if now == last
                    && let Ok(sequences) = UNDER_WAY.lock()
                    && !sequences.is_empty()
                {
                    eprintln!("a step does not end: {sequences:?}");
                    process::abort();
                }
                last = now;
            }
        });
    });
}

/// Takes the steps; when one finds the contract broken, which it was.
fn run(behind: Behind, steps: &[Step]) -> Result<(), (usize, String)> {
    let name = thread::current().name().unwrap_or("model").to_owned();
    if let Ok(mut sequences) = UNDER_WAY.lock() {
        sequences.insert(name.clone(), steps.to_vec());
    }
    let mut world = World::new(behind);
    for (at, step) in steps.iter().enumerate() {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        world.step(step).map_err(|error| (at, error.to_string()))?;
    }
    let end = |error: TestCaseError| (steps.len(), error.to_string());
    world.close().map_err(end)?;
    if let Ok(mut sequences) = UNDER_WAY.lock() {
        sequences.remove(&name);
    }
    Ok(())
}

/// As few of the steps as still break the contract, and what they break.
fn shrink(behind: Behind, mut steps: Vec<Step>, (at, mut error): (usize, String)) -> String {
    steps.truncate(at + 1);
    for _ in 0..3 {
        for at in (0..steps.len()).rev() {
            let mut fewer = steps.clone();
            fewer.remove(at);
            if let Err((at, why)) = run(behind, &fewer) {
                (steps, error) = (fewer, why);
                steps.truncate(at + 1);
            }
        }
    }
    let mut text = format!("{behind:?}: {error}\n");
    for step in steps {
        text += &format!("    Step::{step:?},\n");
    }
    text
}

/// Sequences of each of the four runs below: 10,000 in all.
const SEQUENCES: u32 = 2500;

fn model(behind: Behind, with_faults: bool) {
    watch();
    let asked = std::env::var("FAILSTOP_MODEL_SEQUENCES").ok();
    let sequences = asked
        .and_then(|text| text.parse().ok())
        .unwrap_or(SEQUENCES);
    let mut runner = TestRunner::default();
    let strategy = proptest::collection::vec(steps(with_faults), STEPS);
    for _ in 0..sequences {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        if let Err(found) = run(behind, &steps) {
            panic!("{}", shrink(behind, steps, found));
        }
    }
}

#[test]
fn a_device_behind_a_server_that_nothing_goes_wrong_with() {
    model(Behind::Server, false);
}

#[test]
fn a_device_behind_a_server_with_faults() {
    model(Behind::Server, true);
}

#[test]
fn a_device_behind_an_iommu_with_faults() {
    model(Behind::Kernel, true);
}

#[test]
fn a_device_that_nothing_is_enforced_against_with_faults() {
    model(Behind::Nothing, true);
}
