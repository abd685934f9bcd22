//! Random lives of a device against a reference model of the contract.
//!
//! After each step: what the backend holds mapped is in the ledger (R2); nothing that was released is
//! reachable (R3); no address is handed out again before it is unmapped and the device forgot it
//! (R4.6); every posted request ends in exactly one completion, received frames in order (R7); a
//! destroy of a broken device touches nothing (R6); a device that nobody broke stays well (C41, C45).
//! A watchdog ends the run when a step does not (R11).
//!
//! The address space by itself, with faults of map and unmap, has a model of its own in `dma`.

mod scripted;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;
use std::{process, thread};

use failstop::device::Device;
use failstop::ladder::Word;
use failstop::objects::{Cq, CreateError, Mr, Pd, Rq, Sq};
use failstop::owned::{Object, Owned};
use failstop::queues::completions::Completions;
use failstop::queues::lifecycle::Cause;
use failstop_dma::frame::Frame;
use failstop_dma::ledger::State;
use failstop_dma::region::Pool;
use failstop_pci::config::Command;
use failstop_pci::id::Generation;
use failstop_pci::testing::{Call, Happened, Hold, Reading, ResetScript};
use failstop_pci::transport::{Kind, RegionIndex, Strength, Unmapped};
use nix::errno::Errno;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{TestCaseError, TestRunner};
use scripted::{Bench, FRAME, FRAMES, QUEUES, RX, Software, Stop, TX, WAYS, Way};

type Checked = Result<(), TestCaseError>;

/// What frames in the caller's hands are filled with: whoever finds other bytes there was written to
/// by a device that had no business with it.
const POISON: u8 = 0xa5;
/// Steps of one life of the process.
const STEPS: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    Pd,
    Mr,
    Cq,
    Rq,
    Sq,
}

#[derive(Clone, Debug)]
enum Step {
    Create(usize, Of),
    TryDestroy(usize, Of),
    Destroy(usize, Of),
    /// Sends so many frames.
    Post(usize, usize),
    /// Asks for so many frames.
    Poll(usize, usize),
    Reap(usize),
    DeviceReceives(usize, u32),
    DeviceSends(usize, u32),
    /// Into every buffer that it was given.
    DeviceWrites,
    /// Wherever it can.
    DeviceWritesEverywhere,
    /// A word that it should not write, into a descriptor.
    DeviceLies(usize, u32, u64),
    Break,
    /// Breaks it, and holds the ladder up in its first act, until something waits for it.
    BreakAndHold,
    Recover,
    Close,
    Fault(Fault),
    /// No more faults.
    Heal,
}

#[derive(Clone, Debug)]
enum Fault {
    Stop(Way, u32, Stop),
    Start(Way),
    Map(Errno),
    Unmap(Unmapped),
    Reset(ResetScript),
    Software(Software),
    Gone(Reading, u64),
    ReadsAsMaster,
    BringUp,
}

fn faults() -> impl Strategy<Value = Fault> {
    let way = prop_oneof![Just(Way::Receive), Just(Way::Send)];
    let stop = prop_oneof![
        3 => (1u32..4).prop_map(Stop::Busy),
        1 => Just(Stop::Busy(u32::MAX)),
        3 => (1u32..50).prop_map(Stop::Slow),
        1 => Just(Stop::Never),
        1 => Just(Stop::AllOnes),
        1 => Just(Stop::Zero),
    ];
    let map = prop_oneof![
        Just(Errno::ENOMEM),
        Just(Errno::EEXIST),
        Just(Errno::ETIMEDOUT)
    ];
    let unmap = prop_oneof![
        Just(Unmapped::Busy),
        Just(Unmapped::Partial { bytes: 0 }),
        Just(Unmapped::Failed(Errno::EIO)),
    ];
    let reset = prop_oneof![
        Just(ResetScript::ResetsNothing),
        Just(ResetScript::RestoresMaster),
        Just(ResetScript::Fails(Errno::EIO)),
        Just(ResetScript::Fails(Errno::EAGAIN)),
    ];
    let software = prop_oneof![
        Just(Software::ResetsNothing),
        Just(Software::NoAnswer),
        Just(Software::Panics),
    ];
    let reading = prop_oneof![Just(Reading::AllOnes), Just(Reading::Zero)];
    prop_oneof![
        4 => (way.clone(), 0..QUEUES, stop).prop_map(|(way, n, stop)| Fault::Stop(way, n, stop)),
        1 => way.prop_map(Fault::Start),
        2 => map.prop_map(Fault::Map),
        3 => unmap.prop_map(Fault::Unmap),
        4 => reset.prop_map(Fault::Reset),
        1 => software.prop_map(Fault::Software),
        2 => (reading, prop_oneof![1u64..20, Just(u64::MAX)]).prop_map(|(r, n)| Fault::Gone(r, n)),
        1 => Just(Fault::ReadsAsMaster),
        1 => Just(Fault::BringUp),
    ]
}

/// What goes wrong, and ends.
fn trouble() -> impl Strategy<Value = Step> {
    let kit = 0..QUEUES as usize;
    let word = prop_oneof![
        Just(u64::MAX),
        Just(0x3),
        Just(0xffff << 32 | 3),
        any::<u64>()
    ];
    let lie = (kit, 0..RX, word);
    prop_oneof![
        12 => faults().prop_map(Step::Fault),
        6 => Just(Step::Heal),
        2 => Just(Step::DeviceWritesEverywhere),
        2 => lie.prop_map(|(kit, at, word)| Step::DeviceLies(kit, at, word)),
    ]
}

/// What a program and its device do.
fn ordinary() -> impl Strategy<Value = Step> {
    let kit = 0..QUEUES as usize;
    let of = prop_oneof![
        2 => Just(Of::Pd),
        2 => Just(Of::Mr),
        2 => Just(Of::Cq),
        3 => Just(Of::Rq),
        3 => Just(Of::Sq),
    ];
    let object = (kit.clone(), of);
    let some = |most: u32| (kit.clone(), 0..most);
    prop_oneof![
        60 => object.clone().prop_map(|(kit, of)| Step::Create(kit, of)),
        6 => object.clone().prop_map(|(kit, of)| Step::TryDestroy(kit, of)),
        6 => object.prop_map(|(kit, of)| Step::Destroy(kit, of)),
        25 => some(9).prop_map(|(kit, n)| Step::Post(kit, n as usize)),
        35 => some(9).prop_map(|(kit, n)| Step::Poll(kit, n as usize)),
        10 => kit.clone().prop_map(Step::Reap),
        35 => some(10).prop_map(|(kit, n)| Step::DeviceReceives(kit, n)),
        20 => some(20).prop_map(|(kit, n)| Step::DeviceSends(kit, n)),
        3 => Just(Step::DeviceWrites),
        3 => Just(Step::Break),
        1 => Just(Step::BreakAndHold),
        8 => Just(Step::Recover),
        1 => Just(Step::Close),
    ]
}

fn steps(with_faults: bool) -> BoxedStrategy<Step> {
    if with_faults {
        prop_oneof![10 => ordinary(), 1 => trouble()].boxed()
    } else {
        ordinary().boxed()
    }
}

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
    enforcing: bool,
}

/// How the function is reached, and what that is worth.
#[derive(Clone, Copy, Debug)]
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
            enforcing: !matches!(behind, Behind::Nothing),
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

    /// Takes note of a break, and what was mapped then; where nothing holds the ladder up, waits for
    /// the verdict.
    fn note_break(&mut self) -> Checked {
        let Some(cause) = self.device.broken() else {
            return Ok(());
        };
        if !self.broken {
            self.broken = true;
            self.settled = false;
            let mapped = std::mem::take(&mut self.mapped).into_iter();
            let burned = mapped.map(|(start, len)| Burned { start, len });
            self.burned.extend(burned);
            let asked = matches!(cause, Cause::User | Cause::Closed);
            prop_assert!(asked || self.faulty, "broken without a reason: {cause}");
        }
        if self.hold.is_some() || self.settled {
            return Ok(());
        }
        self.settled = true;
        let report = self.device.revocation();
        let Some(report) = report else {
            return Err(TestCaseError::fail("a ladder without a report"));
        };
        let mapped = self.bench.function.mapped();
        if report.verdict == Word::Revoked {
            prop_assert_eq!(&mapped, &vec![], "revoked, and still mapped: {}", report);
        }
        if !self.faulty {
            prop_assert_eq!(report.verdict, Word::Revoked, "{}", report);
            prop_assert!(report.is_stopped(), "{report}");
        }
        // What an earlier life left behind goes on the stop that ended that one.
        if !self.enforcing && !report.is_stopped() && report.generation == 1 {
            prop_assert_eq!(report.released_bytes, 0, "{}", report);
        }
        self.check_hands()
    }

    /// Whether that life of the device is over, or ending.
    fn is_broken(&self, life: Generation) -> bool {
        self.broken || life != self.device.generation()
    }

    /// Whether the verdict on that life is in.
    fn is_settled(&self, life: Generation) -> bool {
        self.broken && self.settled || life != self.device.generation()
    }

    fn expect_created<T>(
        &mut self,
        life: Generation,
        made: Result<T, CreateError>,
    ) -> Result<Option<T>, TestCaseError> {
        match made {
            Ok(made) => {
                prop_assert!(!self.is_broken(life), "made on a broken device");
                Ok(Some(made))
            }
            Err(error) => {
                prop_assert!(
                    self.is_broken(life) || self.faulty,
                    "refused without a reason: {error}"
                );
                Ok(None)
            }
        }
    }

    fn create(&mut self, at: usize, of: Of) -> Checked {
        let now = self.device.generation();
        match of {
            Of::Pd if self.kits[at].pd.is_none() => {
                let made = self.device.alloc_pd();
                if let Some(object) = self.expect_created(now, made)? {
                    let (life, id) = (now, self.fresh());
                    self.kits[at].pd = Some(Handle { life, id, object });
                }
            }
            Of::Cq if self.kits[at].cq.is_none() => {
                let made = self.device.create_cq(RX + TX);
                if let Some(object) = self.expect_created(now, made)? {
                    let (life, id) = (now, self.fresh());
                    self.kits[at].cq = Some(Handle { life, id, object });
                }
            }
            Of::Mr
                if self.kits[at]
                    .region
                    .as_ref()
                    .is_none_or(|region| region.mr.is_none()) =>
            {
                let Some(pd) = &self.kits[at].pd else {
                    return Ok(());
                };
                let (life, made) = (pd.life, pd.object.register(FRAMES, FRAME));
                let pd = pd.id;
                if let Some((mr, pool)) = self.expect_created(life, made)? {
                    self.orphan(at);
                    let lines = self.device.ledger().lines();
                    let serials = lines.iter().filter(|line| line.owner.kind == "MR");
                    let serial = serials.map(|line| line.owner.serial).max().unwrap_or(0);
                    let id = self.fresh();
                    self.regions.push((id, pd));
                    let mut region = Region {
                        life,
                        id,
                        pd,
                        serial,
                        mr: Some(mr),
                        pool,
                        hand: Vec::new(),
                    };
                    region.hand = region.pool.take_many(8).unwrap_or_default();
                    region.hand.iter_mut().for_each(poison);
                    self.kits[at].region = Some(region);
                }
            }
            Of::Rq | Of::Sq => self.create_queue(at, of)?,
            _ => {}
        }
        Ok(())
    }

    fn create_queue(&mut self, at: usize, of: Of) -> Checked {
        let now = self.device.generation();
        let kit = &mut self.kits[at];
        let taken = match of {
            Of::Rq => kit.rx.is_some(),
            _ => kit.tx.is_some(),
        };
        let (Some(pd), Some(region), Some(cq), false) = (&kit.pd, &mut kit.region, &kit.cq, taken)
        else {
            return Ok(());
        };
        let Some(mr) = &region.mr else { return Ok(()) };
        let entries = if of == Of::Rq { RX } else { TX };
        // A ring that was quarantined keeps its frames.
        let short = (region.pool.available() as u32) < entries;
        let wrong = short || region.pd != pd.id || cq.life != now;
        let (life, mr_id, cq_id) = (pd.life, region.id, cq.id);
        let pool = &mut region.pool;
        let init = scripted::init(&pd.object, &cq.object, mr, pool, entries, at as u32);
        let (mr, cq) = (mr_id, cq_id);
        let refused = match of {
            Of::Rq => match pd.object.create_rq(init) {
                Ok(rq) => {
                    kit.rx = Some(Receiver {
                        life,
                        rq,
                        mr,
                        cq,
                        written: VecDeque::new(),
                        posted: u64::from(RX) - 1,
                        delivered: 0,
                        lied: false,
                        ended: false,
                    });
                    None
                }
                Err(error) => Some(error),
            },
            _ => match pd.object.create_sq(init) {
                Ok(sq) => {
                    kit.tx = Some(Sender {
                        life,
                        sq,
                        mr,
                        cq,
                        posted: 0,
                        sent: 0,
                        lied: false,
                    });
                    None
                }
                Err(error) => Some(error),
            },
        };
        match refused {
            None => prop_assert!(!self.is_broken(life) && !wrong, "made of what is not there"),
            Some(error) => {
                let reason = self.is_broken(life) || self.faulty || wrong;
                prop_assert!(reason, "refused without a reason: {error}");
            }
        }
        Ok(())
    }

    /// The region's handle is gone: what is held of it stays.
    fn orphan(&mut self, at: usize) {
        if let Some(region) = self.kits[at].region.take() {
            self.orphans.push((region.serial, region.hand));
            self.orphans.truncate(64);
        }
    }

    fn queues(&self) -> impl Iterator<Item = (u64, u64)> {
        let rx = self
            .kits
            .iter()
            .flat_map(|kit| &kit.rx)
            .map(|rx| (rx.mr, rx.cq));
        let tx = self
            .kits
            .iter()
            .flat_map(|kit| &kit.tx)
            .map(|tx| (tx.mr, tx.cq));
        rx.chain(tx)
    }

    fn is_region_alive(&self, id: u64) -> bool {
        let mut regions = self.kits.iter().flat_map(|kit| &kit.region);
        regions.any(|region| region.id == id && region.mr.is_some())
            || self.queues().any(|(mr, _)| mr == id)
    }

    /// Which life an object is of, if it is there.
    fn life_of(&self, at: usize, of: Of) -> Option<Generation> {
        let kit = &self.kits[at];
        match of {
            Of::Pd => kit.pd.as_ref().map(|handle| handle.life),
            Of::Mr => kit.region.as_ref().map(|region| region.life),
            Of::Cq => kit.cq.as_ref().map(|handle| handle.life),
            Of::Rq => kit.rx.as_ref().map(|rx| rx.life),
            Of::Sq => kit.tx.as_ref().map(|tx| tx.life),
        }
    }

    /// Whether something of ours uses the object.
    fn in_use(&self, at: usize, of: Of) -> bool {
        let kit = &self.kits[at];
        match of {
            Of::Pd => kit.pd.as_ref().is_some_and(|handle| {
                let mut regions = self.regions.iter().filter(|(_, pd)| *pd == handle.id);
                regions.any(|(mr, _)| self.is_region_alive(*mr))
            }),
            Of::Mr => kit
                .region
                .as_ref()
                .is_some_and(|region| self.queues().any(|(mr, _)| mr == region.id)),
            Of::Cq => kit
                .cq
                .as_ref()
                .is_some_and(|handle| self.queues().any(|(_, cq)| cq == handle.id)),
            Of::Rq | Of::Sq => false,
        }
    }

    fn destroy(&mut self, at: usize, of: Of, may_fail: bool) -> Checked {
        self.let_go();
        self.note_break()?;
        let in_use = self.in_use(at, of);
        let life = self.life_of(at, of);
        let broken = life.is_some_and(|life| self.is_broken(life));
        self.watch_log()?;
        let calls = self.bench.script.calls();
        let kit = &mut self.kits[at];
        let (mut busy, mut gone) = (None, None);
        match of {
            Of::Pd => {
                if let Some(Handle { life, id, object }) = kit.pd.take() {
                    let back = end(object, may_fail);
                    busy = Some(back.is_some());
                    kit.pd = back.map(|object| Handle { life, id, object });
                }
            }
            Of::Cq => {
                if let Some(Handle { life, id, object }) = kit.cq.take() {
                    let back = end(object, may_fail);
                    busy = Some(back.is_some());
                    kit.cq = back.map(|object| Handle { life, id, object });
                }
            }
            Of::Mr => {
                if let Some(region) = &mut kit.region
                    && let Some(mr) = region.mr.take()
                {
                    region.mr = end(mr, may_fail);
                    busy = Some(region.mr.is_some());
                    if region.mr.is_none() {
                        self.orphan(at);
                    }
                }
            }
            Of::Rq => {
                if let Some(mut rx) = kit.rx.take() {
                    let before = rx.rq.completions();
                    match end(rx.rq, may_fail) {
                        Some(rq) => {
                            rx.rq = rq;
                            kit.rx = Some(rx);
                            busy = Some(true);
                        }
                        None => {
                            prop_assert!(rx.lied || before.posted == rx.posted);
                            gone = Some(before);
                            busy = Some(false);
                        }
                    }
                }
            }
            Of::Sq => {
                if let Some(mut tx) = kit.tx.take() {
                    tx.sq.reap();
                    let before = tx.sq.completions();
                    match end(tx.sq, may_fail) {
                        Some(sq) => {
                            tx.sq = sq;
                            kit.tx = Some(tx);
                            busy = Some(true);
                        }
                        None => {
                            prop_assert_eq!(before.posted, tx.posted);
                            gone = Some(before);
                            busy = Some(false);
                        }
                    }
                }
            }
        }
        if let Some(before) = gone {
            let tally = self.device.completions();
            self.finished += before.flush();
            prop_assert_eq!(tally.posted, self.finished.posted);
            prop_assert_eq!(tally.outstanding(), 0);
            self.finished = tally;
        }
        let Some(busy) = busy else { return Ok(()) };
        if broken {
            prop_assert!(!busy || in_use, "busy on a broken device");
            prop_assert_eq!(self.bench.script.calls(), calls, "a provider's command");
            prop_assert_eq!(
                self.bench.function.log(),
                vec![],
                "a broken device was touched"
            );
        } else if may_fail {
            prop_assert!(
                busy == in_use || self.faulty,
                "busy {}, in use {}",
                busy,
                in_use
            );
        }
        self.note_break()?;
        self.check_hands()
    }

    fn post(&mut self, at: usize, frames: usize) -> Checked {
        let life = self.life_of(at, Of::Sq);
        let broken = life.is_some_and(|life| self.is_broken(life));
        let kit = &mut self.kits[at];
        let (Some(tx), Some(region)) = (&mut kit.tx, &mut kit.region) else {
            return Ok(());
        };
        if tx.mr != region.id {
            return Ok(());
        }
        let frames = frames.min(region.hand.len());
        let sent = tx.sq.burst(&mut region.hand[..frames]);
        prop_assert!(!broken || sent == 0, "posted on a broken device");
        prop_assert_eq!(tx.sq.refused(), 0);
        tx.posted += sent as u64;
        region.hand[..sent].iter_mut().for_each(poison);
        Ok(())
    }

    fn reap(&mut self, at: usize) -> Checked {
        let life = self.life_of(at, Of::Sq);
        let settled = life.is_some_and(|life| self.is_settled(life));
        let Some(tx) = &mut self.kits[at].tx else {
            return Ok(());
        };
        tx.sq.reap();
        let now = tx.sq.completions();
        prop_assert_eq!(now.posted, tx.posted);
        prop_assert!(
            tx.lied || now.success <= tx.sent,
            "{:?}, sent {}",
            now,
            tx.sent
        );
        if !tx.lied && tx.sent == tx.posted {
            prop_assert_eq!(now.outstanding(), 0);
        }
        prop_assert!(settled || now.flushed == 0, "flushed before the verdict");
        prop_assert!(!settled || now.outstanding() == 0, "not flushed: {:?}", now);
        Ok(())
    }

    fn poll(&mut self, at: usize, frames: usize) -> Checked {
        let life = self.life_of(at, Of::Rq);
        let broken = life.is_some_and(|life| self.is_broken(life));
        let settled = life.is_some_and(|life| self.is_settled(life));
        let kit = &mut self.kits[at];
        let (Some(rx), Some(region)) = (&mut kit.rx, &mut kit.region) else {
            return Ok(());
        };
        if rx.mr != region.id {
            return Ok(());
        }
        let frames = frames.min(region.hand.len());
        let got = rx.rq.burst(&mut region.hand[..frames]);
        rx.delivered += got as u64;
        if !broken {
            rx.posted += got as u64;
        }
        let now = rx.rq.completions();
        if !rx.lied {
            let expected = if rx.ended {
                0
            } else {
                frames.min(rx.written.len())
            };
            prop_assert_eq!(got, expected, "delivered of {:?}", rx.written);
            for frame in &region.hand[..got] {
                let mut bytes = [0; 60];
                prop_assert_eq!((frame.copy_to(&mut bytes), frame.len()), (60, 60));
                let payload = rx.written.pop_front();
                prop_assert!(
                    bytes.iter().all(|byte| Some(*byte) == payload),
                    "{:?}",
                    payload
                );
            }
            prop_assert_eq!((now.posted, now.success), (rx.posted, rx.delivered));
            prop_assert!(settled || now.flushed == 0, "flushed before the verdict");
            rx.ended |= settled && got == 0 && rx.written.is_empty();
            prop_assert!(
                !rx.ended || now.outstanding() == 0,
                "not flushed: {:?}",
                now
            );
        } else {
            rx.posted = now.posted;
        }
        region.hand[..got].iter_mut().for_each(poison);
        Ok(())
    }

    fn device_receives(&mut self, at: usize, frames: u32) {
        for _ in 0..frames {
            let payload = self.next_payload;
            if self.bench.receive_one(at as u32, 60, payload).is_none() {
                return;
            }
            self.next_payload = self.next_payload.wrapping_add(1);
            if let Some(rx) = &mut self.kits[at].rx
                && !rx.ended
            {
                rx.written.push_back(payload);
            }
        }
    }

    fn device_lies(&mut self, at: usize, index: u32, word: u64) {
        self.faulty = true;
        let Some(queue) = self.bench.queue(Way::Receive, at as u32) else {
            return;
        };
        if self
            .bench
            .write_back(queue.ring + u64::from(index) * 16, word)
            && let Some(rx) = &mut self.kits[at].rx
        {
            rx.lied = true;
        }
    }

    fn device_writes_everywhere(&mut self) -> Checked {
        self.faulty = true;
        if self.bench.write_everywhere(0xee) == 0 {
            return self.check_hands();
        }
        let reachable: Vec<u64> = self.reachable();
        for kit in &mut self.kits {
            kit.rx.iter_mut().for_each(|rx| rx.lied = true);
            kit.tx.iter_mut().for_each(|tx| tx.lied = true);
            for region in kit
                .region
                .iter_mut()
                .filter(|region| reachable.contains(&region.serial))
            {
                region.hand.iter_mut().for_each(poison);
            }
        }
        for (_, frames) in self
            .orphans
            .iter_mut()
            .filter(|(serial, _)| reachable.contains(serial))
        {
            frames.iter_mut().for_each(poison);
        }
        // What left the ledger was not reached.
        self.check_hands()
    }

    /// Regions that are in the ledger, by the serial of their lines.
    fn reachable(&self) -> Vec<u64> {
        self.device
            .ledger()
            .lines()
            .iter()
            .map(|line| line.owner.serial)
            .collect()
    }

    /// No device wrote into what is in the caller's hands.
    fn check_hands(&self) -> Checked {
        let regions = self
            .kits
            .iter()
            .flat_map(|kit| &kit.region)
            .map(|region| &region.hand);
        for frame in regions
            .chain(self.orphans.iter().map(|(_, frames)| frames))
            .flatten()
        {
            let mut bytes = [0; FRAME as usize];
            frame.copy_to(&mut bytes);
            prop_assert!(
                bytes.iter().all(|byte| *byte == POISON),
                "{frame:?}: {bytes:x?}"
            );
        }
        Ok(())
    }

    fn recover(&mut self) -> Checked {
        self.let_go();
        self.note_break()?;
        let before = self.device.generation();
        let recovered = self.device.recover();
        self.watch_log()?;
        match recovered {
            Ok(generation) => {
                prop_assert!(self.broken);
                prop_assert_eq!(generation, before.next());
                prop_assert!(
                    !self.bench.function.is_master(),
                    "master before the first queue"
                );
                for (way, queue) in WAYS
                    .into_iter()
                    .flat_map(|way| (0..QUEUES).map(move |q| (way, q)))
                {
                    prop_assert_eq!(self.bench.queue(way, queue), None);
                }
                self.broken = false;
                self.settled = false;
            }
            Err(error) => {
                prop_assert_eq!(self.device.generation(), before);
                prop_assert!(!self.broken || self.faulty, "not recovered: {error}");
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Checked {
        self.let_go();
        self.note_break()?;
        let behind = (self.bench.function.clone(), self.enforcing);
        let fresh = World::new(if behind.1 {
            Behind::Server
        } else {
            Behind::Nothing
        });
        let old = std::mem::replace(self, fresh);
        let World {
            device,
            kits,
            orphans,
            faulty,
            finished,
            ..
        } = old;
        let report = device.close();
        let mapped = behind.0.mapped();
        for (start, len) in &mapped {
            let listed = report
                .left
                .iter()
                .any(|line| (line.iova.0, line.len) == (*start, *len));
            prop_assert!(
                listed,
                "{start:#x} is mapped after the close, and not in its report"
            );
        }
        if !faulty {
            prop_assert_eq!(report.left, vec![]);
            prop_assert!(!behind.0.is_master());
        }
        prop_assert_eq!(report.completions.posted, finished.posted);
        let mut kits = kits;
        for kit in &mut kits {
            let mut hand = Vec::new();
            if let Some(rx) = &mut kit.rx {
                prop_assert_eq!(rx.rq.burst(&mut hand), 0);
            }
            if let Some(tx) = &mut kit.tx {
                tx.sq.reap();
                prop_assert_eq!(tx.sq.completions().outstanding(), 0);
            }
        }
        drop((kits, orphans));
        Ok(())
    }

    /// Takes the function's log, and checks each map in it against what was handed out before.
    fn watch_log(&mut self) -> Result<Vec<Happened>, TestCaseError> {
        let log = self.bench.function.take_log();
        for happened in &log {
            match *happened {
                Happened::Command(word) if word & Command::BUS_MASTER.bits() != 0 => {
                    self.mastered = true
                }
                Happened::Map { iova, len } => {
                    let clash = self
                        .burned
                        .iter()
                        .find(|old| iova < old.start + old.len && old.start < iova + len);
                    prop_assert!(
                        clash.is_none(),
                        "{iova:#x} is handed out again before proof"
                    );
                }
                _ => {}
            }
        }
        Ok(log)
    }

    fn check(&mut self) -> Checked {
        self.watch_log()?;
        let function = &self.bench.function;
        let (mapped, lines) = (function.mapped(), self.device.ledger().lines());
        for (start, len) in &mapped {
            let listed = lines
                .iter()
                .any(|line| (line.iova.0, line.len) == (*start, *len));
            prop_assert!(listed, "{start:#x} is mapped and not in the ledger");
        }
        for line in lines.iter().filter(|line| line.state == State::Live) {
            prop_assert!(
                mapped.contains(&(line.iova.0, line.len)),
                "{line:?} is not mapped"
            );
        }
        let totals = self.device.ledger().totals();
        if !self.faulty {
            prop_assert_eq!(totals.quarantined_mappings, 0);
        }
        if self.broken && self.settled {
            prop_assert_eq!(totals.live_mappings, 0);
        }
        // What the device may still be aimed at.
        let knows = WAYS
            .into_iter()
            .any(|way| (0..QUEUES).any(|queue| self.bench.queue(way, queue).is_some()));
        if !knows {
            self.mastered = function.is_master();
        }
        let aimed = knows && self.mastered;
        let is_mapped = |old: &Burned| mapped.iter().any(|(start, _)| *start == old.start);
        self.burned.retain(|old| aimed || is_mapped(old));
        if !self.broken {
            self.mapped = mapped;
        }
        Ok(())
    }
}

/// Fills a frame with what nobody but its holder may change.
fn poison(frame: &mut Frame) {
    assert!(frame.fill(&[POISON; FRAME as usize]).is_ok());
}

/// Either destroy; the object, when it was handed back.
fn end<T: Object>(object: Owned<T>, may_fail: bool) -> Option<Owned<T>> {
    if may_fail {
        return object.try_destroy().err().map(|busy| busy.object);
    }
    object.destroy();
    None
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
