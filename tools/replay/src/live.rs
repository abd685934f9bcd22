//! A device that is there, emulated or real, on which scenarios are played.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{CloseReport, Device, Options};
use failstop::dma::frame::Frame;
use failstop::dma::region::Pool;
use failstop::ladder::Deadlines;
use failstop::name::DeviceName;
use failstop::objects::{Cq, CreateError, Mr, Pd, QueueInit, Rq, Sq};
use failstop::open::{self, IommuChoice, OpenError};
use failstop::owned::{Object, Owned};
use failstop::pci::transport::vfio_user::{Client, Options as ClientOptions};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::completions::Completions;
use failstop::queues::lifecycle::Cause;
use failstop_emulator::Running;
use failstop_scenario::Step;
use failstop_scenario::step::{After, Memory, Object as Kind, Verdict};

use crate::frames::{Frames, LEN};
use crate::{Ending, Why};

/// Sizes of a kit's queues, in descriptors, and of its frames.
const ENTRIES: u32 = 64;
const FRAME: u32 = 2048;
const FRAMES: u32 = 256;
/// Frames of one burst.
const BURST: usize = 32;

/// How long this waits for what may not come.
#[derive(Clone, Debug)]
pub struct Patience {
    /// Frames may take so long; behind it, they are not waited for.
    pub frames: Duration,
    /// The ladder's steps.
    pub deadlines: Deadlines,
    /// The calls of a vfio-user client.
    pub client: ClientOptions,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            frames: Duration::from_secs(1),
            deadlines: Deadlines::default(),
            client: ClientOptions::default(),
        }
    }
}

/// A set of objects on one queue of each direction.
#[derive(Debug, Default)]
struct Kit {
    // In the order in which they go.
    sq: Option<Owned<Sq>>,
    rq: Option<Owned<Rq>>,
    pool: Option<Pool>,
    mr: Option<Owned<Mr>>,
    cq: Option<Owned<Cq>>,
    pd: Option<Owned<Pd>>,
}

/// What happened since the device was opened.
#[derive(Debug, Default)]
struct Seen {
    refused: Option<String>,
    /// Generations that broke.
    broke: BTreeSet<u64>,
    recoveries: u64,
    told: String,
    closed: Option<CloseReport>,
    /// It broke while it was closed.
    at_close: bool,
}

/// A device, and who uses it.
#[derive(Debug)]
pub struct Live {
    emulator: Option<Running>,
    name: DeviceName,
    patience: Patience,
    kits: BTreeMap<u32, Kit>,
    port: Option<Port>,
    device: Option<Device>,
    frames: Frames,
    seen: Seen,
}

impl Live {
    /// On an emulated device.
    #[must_use]
    pub fn emulated(emulator: Running, patience: Patience) -> Self {
        let name = DeviceName::VfioUser(emulator.socket_path());
        Self::new(Some(emulator), name, patience)
    }

    /// On a device that is there.
    #[must_use]
    pub fn named(name: DeviceName, patience: Patience) -> Self {
        Self::new(None, name, patience)
    }

    fn new(emulator: Option<Running>, name: DeviceName, patience: Patience) -> Self {
        Self {
            emulator,
            name,
            patience,
            kits: BTreeMap::new(),
            port: None,
            device: None,
            frames: Frames::default(),
            seen: Seen::default(),
        }
    }

    /// The emulator, where there is one.
    pub fn emulator(&mut self) -> Option<&mut Running> {
        self.emulator.as_mut()
    }

    /// From now on frames that may not come are waited for so long.
    pub fn wait_for_frames(&mut self, time: Duration) {
        self.patience.frames = time;
    }

    /// New lives of the device since it was opened.
    #[must_use]
    pub fn recoveries(&self) -> u64 {
        self.seen.recoveries
    }

    /// Takes a step. What a device refuses is no failure, but part of what is seen; steps for a
    /// device that could not be opened do nothing.
    ///
    /// # Errors
    ///
    /// [`Why`]: the step is none for this device, the emulator does not do what it is told, or what
    /// is seen is not what is expected.
    pub fn step(&mut self, step: &Step) -> Result<(), Why> {
        match step {
            Step::Fault(spec) => {
                let spec = spec.to_string();
                return self.control(|emulator| emulator.fault(&spec));
            }
            Step::ClearFaults => return self.control(Running::clear_faults),
            Step::Open => return self.open(),
            Step::Wait(time) => {
                thread::sleep(*time);
                return Ok(());
            }
            Step::Close => {
                self.close();
                return Ok(());
            }
            Step::Expect(verdict, exit) => return self.expect(*verdict, *exit),
            _ => {}
        }
        if self.seen.refused.is_some() {
            return Ok(());
        }
        let Some(device) = &self.device else {
            return Err(Why::NotOpen);
        };
        match step {
            Step::Port => match Port::open(device, &PortConfig::default()) {
                Ok(port) => self.port = Some(port),
                Err(error) => self.tell("no port", &error),
            },
            Step::Send(frames) => self.send(*frames),
            Step::Receive(frames) => self.receive(*frames),
            Step::Break => {
                device.break_now(Cause::User);
                self.note_break();
            }
            Step::Recover => self.recover(),
            Step::Create(kit, kind) => self.create(*kit, *kind),
            Step::Destroy(kit, kind) => self.destroy(*kit, *kind, false),
            Step::TryDestroy(kit, kind) => self.destroy(*kit, *kind, true),
            Step::Post(kit, frames) => self.post(*kit, *frames),
            Step::Poll(kit, frames) => self.poll(*kit, *frames),
            Step::Reap(kit) => {
                if let Some(sq) = self.kits.get_mut(kit).and_then(|kit| kit.sq.as_mut()) {
                    sq.reap();
                }
            }
            _ => return Err(Why::NotHere),
        }
        self.note_break();
        Ok(())
    }

    /// Closes what is open, and says how all went; the next step begins anew.
    pub fn end(&mut self) -> Ending {
        self.close();
        let ending = self.ending();
        self.seen = Seen::default();
        self.frames = Frames::default();
        ending
    }

    fn control<E: Into<Why>>(
        &mut self,
        ask: impl FnOnce(&mut Running) -> Result<(), E>,
    ) -> Result<(), Why> {
        let emulator = self.emulator.as_mut().ok_or(Why::NotHere)?;
        ask(emulator).map_err(Into::into)
    }

    fn tell(&mut self, what: &str, error: &dyn std::error::Error) {
        // Writing to a string does not fail.
        let _ = writeln!(self.seen.told, "{what}: {error}");
    }

    fn open(&mut self) -> Result<(), Why> {
        if self.device.is_some() {
            return Err(Why::Open);
        }
        let config = Config {
            loopback: true,
            ..Config::default()
        };
        let options = Options {
            deadlines: self.patience.deadlines,
            ..Options::default()
        };
        let transport = match &self.name {
            DeviceName::VfioUser(path) => Client::connect(path, self.patience.client.clone())
                .map(|client| client as _)
                .map_err(OpenError::from),
            name => open::transport(name, IommuChoice::default(), &[]),
        };
        let opened = match transport {
            Ok(transport) => {
                Device::open_with(transport, &config, options).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        match opened {
            Ok(device) => {
                self.frames = Frames::of(device.mac());
                self.device = Some(device);
            }
            Err(error) => {
                let _ = writeln!(self.seen.told, "refused: {error}");
                self.seen.refused = Some(error);
            }
        }
        Ok(())
    }

    /// Whether the device is broken now; takes note of it, and waits for the verdict.
    fn note_break(&mut self) {
        let Some(device) = &self.device else { return };
        if device.broken().is_none() {
            return;
        }
        if self.seen.broke.insert(device.generation().number()) {
            let report = device.revocation();
            self.frames.give_up();
            if let Some(report) = report {
                let _ = writeln!(self.seen.told, "{}", report.to_string().trim_end());
            }
        }
    }

    fn recover(&mut self) {
        self.note_break();
        let Some(device) = &self.device else { return };
        match device.recover() {
            Ok(generation) => {
                self.seen.recoveries += 1;
                let _ = writeln!(self.seen.told, "recovered: {generation}");
                self.carry();
            }
            Err(error) => {
                let _ = writeln!(self.seen.told, "not recovered: {error}");
            }
        }
    }

    /// Bursts until the port is carried to the new life.
    fn carry(&mut self) {
        let Some(port) = &mut self.port else { return };
        let (before, end) = (port.carried().times, Instant::now() + self.patience.frames);
        while port.carried().times == before && Instant::now() < end {
            self.frames.collect(port, BURST);
            port.tx_burst(&mut []);
        }
    }

    fn send(&mut self, frames: u32) {
        let (Some(device), Some(port)) = (&self.device, &mut self.port) else {
            return;
        };
        let mut left = frames as usize;
        let mut moved = Instant::now();
        while left > 0 && device.broken().is_none() && moved.elapsed() < self.patience.frames {
            let sent = self.frames.send(port, left.min(BURST));
            // What comes back meanwhile makes room for more.
            let received = self.frames.collect(port, BURST);
            left -= sent;
            if sent + received > 0 {
                moved = Instant::now();
            } else {
                thread::yield_now();
            }
        }
    }

    fn receive(&mut self, frames: u32) {
        let (Some(device), Some(port)) = (&self.device, &mut self.port) else {
            return;
        };
        let mut moved = Instant::now();
        while !self.frames.taken(frames)
            && device.broken().is_none()
            && moved.elapsed() < self.patience.frames
        {
            if self.frames.collect(port, BURST) > 0 {
                moved = Instant::now();
            } else {
                thread::yield_now();
            }
        }
        self.frames.take(frames);
    }

    fn create(&mut self, number: u32, kind: Kind) {
        let Some(device) = &self.device else { return };
        let kit = self.kits.entry(number).or_default();
        if let Err(error) = kit.create(device, number, kind) {
            self.tell("not created", &error);
        }
    }

    fn destroy(&mut self, number: u32, kind: Kind, may_fail: bool) {
        let Some(kit) = self.kits.get_mut(&number) else {
            return;
        };
        match kind {
            Kind::Pd => end(&mut kit.pd, may_fail),
            Kind::Mr => end(&mut kit.mr, may_fail),
            Kind::Cq => end(&mut kit.cq, may_fail),
            Kind::Rq => end(&mut kit.rq, may_fail),
            Kind::Sq => end(&mut kit.sq, may_fail),
        }
    }

    fn post(&mut self, number: u32, frames: u32) {
        let Some(Kit {
            sq: Some(sq),
            pool: Some(pool),
            ..
        }) = self.kits.get_mut(&number)
        else {
            return;
        };
        let mut frames: Vec<Frame> = pool.take_many(frames as usize).unwrap_or_default();
        for frame in &mut frames {
            // To nobody's address, so that no queue of the device receives it; shorter than any frame of
            // a pool.
            let _ = frame.fill(&[0x02; LEN]);
        }
        sq.burst(&mut frames);
    }

    fn poll(&mut self, number: u32, frames: u32) {
        let Some(Kit {
            rq: Some(rq),
            pool: Some(pool),
            ..
        }) = self.kits.get_mut(&number)
        else {
            return;
        };
        let mut frames: Vec<Frame> = pool.take_many(frames as usize).unwrap_or_default();
        rq.burst(&mut frames);
    }

    fn close(&mut self) {
        self.note_break();
        let Some(device) = self.device.take() else {
            return;
        };
        if let Some(port) = &mut self.port
            && device.broken().is_none()
        {
            // What is still on its way.
            let mut moved = Instant::now();
            while self.frames.owed() > 0 && moved.elapsed() < self.patience.frames {
                if self.frames.collect(port, BURST) > 0 {
                    moved = Instant::now();
                }
                thread::yield_now();
            }
        }
        self.kits.clear();
        self.port = None;
        let broken_before = device.broken().is_some();
        if broken_before && self.seen.broke.insert(device.generation().number()) {
            self.frames.give_up();
        }
        let report = device.close();
        self.seen.at_close = report.broken.is_some() && !broken_before;
        if let Some(revocation) = &report.revocation {
            let _ = writeln!(self.seen.told, "{}", revocation.to_string().trim_end());
        }
        self.seen.closed = Some(report);
    }

    fn expect(&mut self, verdict: Verdict, exit: u8) -> Result<(), Why> {
        self.close();
        let ending = self.ending();
        if (ending.verdict, ending.exit) == (verdict, exit) {
            return Ok(());
        }
        Err(Why::Unexpected {
            found: Step::Expect(ending.verdict, ending.exit).to_string(),
            told: ending.told,
        })
    }

    /// The verdict, and the exit code, as `failstop run` ends.
    fn ending(&self) -> Ending {
        let Seen {
            refused,
            broke,
            told,
            closed,
            at_close,
            ..
        } = &self.seen;
        let (kept, broken) = match closed {
            Some(report) => {
                let totals = report.totals;
                let kept = totals.quarantined_bytes > 0 || totals.live_bytes > 0;
                (kept, report.broken.is_some())
            }
            None => (false, false),
        };
        let memory = if kept {
            Memory::Quarantined
        } else {
            Memory::Revoked
        };
        let verdict = match (refused.is_some() && closed.is_none(), broken) {
            (true, _) => Verdict::Refused,
            (false, true) if *at_close => Verdict::Broke(memory, After::Closed),
            (false, true) => Verdict::Broke(memory, After::Fenced),
            (false, false) if !broke.is_empty() || kept => Verdict::Broke(memory, After::Recovered),
            (false, false) => Verdict::Ok,
        };
        let exit = match verdict {
            Verdict::Refused => 3,
            _ if kept => 4,
            _ if broken => 5,
            _ if self.frames.owed() > 0 || self.frames.wrong() > 0 => 1,
            _ => 0,
        };
        Ending {
            verdict,
            exit,
            sent: self.frames.sent(),
            received: self.frames.received(),
            wrong: self.frames.wrong(),
            completions: closed
                .as_ref()
                .map_or(Completions::default(), |r| r.completions),
            kept: closed.as_ref().map_or_else(Vec::new, |r| r.left.clone()),
            told: told.clone(),
        }
    }
}

impl Kit {
    fn create(&mut self, device: &Device, number: u32, kind: Kind) -> Result<(), CreateError> {
        match kind {
            Kind::Pd if self.pd.is_none() => self.pd = Some(device.alloc_pd()?),
            Kind::Cq if self.cq.is_none() => self.cq = Some(device.create_cq(2 * ENTRIES)?),
            Kind::Mr if self.mr.is_none() => {
                if let Some(pd) = &self.pd {
                    let (mr, pool) = pd.register(FRAMES, FRAME)?;
                    (self.mr, self.pool) = (Some(mr), Some(pool));
                }
            }
            Kind::Rq | Kind::Sq => {
                let (Some(pd), Some(mr), Some(cq), Some(pool)) =
                    (&self.pd, &self.mr, &self.cq, &mut self.pool)
                else {
                    return Ok(());
                };
                let init = QueueInit {
                    pd,
                    cq,
                    mr,
                    pool,
                    entries: ENTRIES,
                    number,
                };
                match kind {
                    Kind::Rq if self.rq.is_none() => self.rq = Some(pd.create_rq(init)?),
                    Kind::Sq if self.sq.is_none() => self.sq = Some(pd.create_sq(init)?),
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Destroys it; what was handed back stays.
fn end<T: Object>(object: &mut Option<Owned<T>>, may_fail: bool) {
    let Some(owned) = object.take() else { return };
    if may_fail {
        *object = owned.try_destroy().err().map(|busy| busy.object);
    } else {
        owned.destroy();
    }
}
