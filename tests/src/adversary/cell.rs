//! One cell: a fault in one phase of a device's life, played and judged.
//!
//! What is judged, whatever the fault: the process lives and nothing hangs beyond what is stated;
//! every request ends once (R7); the accounts balance (C13); what came home is not written any more
//! (C11), and what was released is not reached; bus mastering is off at the end; and who reads the
//! report is told what happened (R13).

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{CloseReport, Device, Options};
use failstop::events::DeviceEvent;
use failstop::ladder::{Deadlines, RevocationReport};
use failstop::pci::transport::vfio_user::{Client, Options as ClientOptions};
use failstop::pci::transport::{ResetMethod, Transport};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop::supervisor::{Policy, Supervisor};
use failstop_emulator::control::{Client as Control, ControlError};
use failstop_emulator::{Emulator, Notice, Running};
use libtest_mimic::Failed;

use super::demand::{Answers, By, Evidence, Reset, Server, Stop};
use super::host::{Host, HostFault};
use super::plays::Play;
use super::table::{Phase, Row, Tier, Word, faults};
use super::traffic::{self, Traffic};
use crate::fixture::{Fixture, Outcome, ensure, ensure_eq};

/// What a provider may wait for a queue's stop and its settle, once for each direction, and the
/// patience of a destroy that is told to come again.
const STOP: Duration = Duration::from_millis(2 * (100 + 100) + 1000);
/// When a cell is taken to hang: everything that it waits for, with its attempts at a recovery.
const HANGS: Duration = Duration::from_secs(90);
/// Fast enough for many cells; attempts go on for about 0.7 s.
const POLICY: Policy = Policy {
    attempts: 4,
    within: Duration::from_secs(600),
    backoff: Duration::from_millis(100),
    longest_backoff: Duration::from_millis(400),
    watchdog: Some(Duration::from_millis(250)),
    interval: Duration::from_millis(10),
};
/// Several looks of the supervisor.
const LOOKS: Duration = Duration::from_millis(60);
/// Frames that came home are watched for so long: many turns of a device that goes on.
const WATCH: Duration = Duration::from_millis(20);

/// How long calls and steps may take.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// The client's calls.
    call: Duration,
    /// Its reset.
    reset: Duration,
    /// The ladder's steps: each longer than a call, the reset shorter than the client's.
    ladder: Deadlines,
}

impl Patience {
    /// What a person has, by default.
    const LONG: Self = Self {
        call: Duration::from_secs(3),
        reset: Duration::from_secs(12),
        ladder: Deadlines {
            config: Duration::from_secs(4),
            answer: Duration::from_millis(10),
            detach: Duration::from_secs(4),
            drain: Duration::from_millis(100),
            reset: Duration::from_secs(10),
            unmap: Duration::from_secs(10),
            close: Duration::from_secs(2),
            bring_up: Duration::from_secs(10),
        },
    };
    /// Where calls do not return, and many are waited for.
    const SHORT: Self = Self {
        call: Duration::from_millis(500),
        reset: Duration::from_millis(1500),
        ladder: Deadlines {
            config: Duration::from_millis(700),
            answer: Duration::from_millis(10),
            detach: Duration::from_millis(700),
            drain: Duration::from_millis(20),
            reset: Duration::from_millis(800),
            unmap: Duration::from_millis(1500),
            close: Duration::from_millis(1500),
            bring_up: Duration::from_secs(5),
        },
    };

    /// Where the kernel waits in a reset for a function that does not answer, and has everybody wait who
    /// wants something of it: it looks again after twice the time, each time, so that what is left behind
    /// sooner returns sooner, too.
    const KERNEL: Self = Self {
        ladder: Deadlines {
            config: Duration::from_secs(1),
            detach: Duration::from_secs(1),
            reset: Duration::from_secs(2),
            unmap: Duration::from_secs(4),
            close: Duration::from_secs(2),
            ..Self::LONG.ladder
        },
        ..Self::LONG
    };

    fn of(row: &Row, tier: Tier) -> Self {
        let truth = &row.truth;
        let hangs = truth.server == Server::Silent || truth.reset == Reset::Hangs;
        match tier {
            Tier::T1 if hangs => Self::SHORT,
            Tier::T3 if hangs || truth.answers == Answers::Never => Self::KERNEL,
            _ => Self::LONG,
        }
    }

    /// All steps of a ladder, one after the other, with those that are taken twice; a fifth on top.
    fn whole_ladder(&self) -> Duration {
        let d = &self.ladder;
        let steps = d.config * 4 + d.answer + d.detach + d.drain + d.reset * 2 + d.unmap * 2;
        steps * 6 / 5
    }
}

/// What a cell came to.
#[derive(Clone, Debug)]
pub struct Seen {
    /// How the device ended.
    pub word: Word,
    /// What was told about it.
    pub told: String,
    /// Accesses that the translation blocked.
    pub blocked: u64,
    /// How long the act of the phase took: a destroy, a close, an open.
    pub act: Duration,
}

/// Why a cell has no result.
#[derive(Debug)]
pub enum NotSeen {
    /// This emulator does not have the fault.
    NotOffered(String),
    /// Something did not hold.
    Failed(Failed),
}

impl<E: Into<Failed>> From<E> for NotSeen {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Where a cell's device is.
#[derive(Debug)]
pub enum Place {
    /// Behind a socket: an emulator that is the cell's own.
    Own(Running),
    /// A function of this machine's, which an emulator elsewhere serves.
    Function(Fixture),
}

impl Place {
    const fn tier(&self) -> Tier {
        match self {
            Self::Own(_) => Tier::T1,
            Self::Function(_) => Tier::T3,
        }
    }
}

/// Plays a cell on an emulator of its own, and judges it.
///
/// # Errors
///
/// [`NotSeen`].
pub fn judge(play: &Play) -> Result<Seen, NotSeen> {
    let mut options = failstop_emulator::Options::default();
    options.faults.clear();
    let emulator = Emulator::on_threads(&options)?;
    let control = Control::connect(&emulator.control_path())?;
    judge_at(Place::Own(emulator), control, play)
}

/// Plays a cell on a function of this machine's, and judges it; `control` leads to the emulator that
/// serves it.
///
/// # Errors
///
/// [`NotSeen`].
pub fn judge_function(
    function: Fixture,
    mut control: Control,
    play: &Play,
) -> Result<Seen, NotSeen> {
    // Whatever was left behind.
    control.clear_faults()?;
    control.power_cycle()?;
    control.reset_counters()?;
    judge_at(Place::Function(function), control, play)
}

fn judge_at(place: Place, mut control: Control, play: &Play) -> Result<Seen, NotSeen> {
    let tier = place.tier();
    let mapped = control.stats()?.server.mappings;
    let scene = Scene {
        name: play.fault.clone(),
        row: play.row.clone(),
        phase: play.phase,
        moment: play.moment.to_owned(),
        place,
        control,
        mapped,
        host: None,
    };
    let (tell, told) = channel();
    let player = thread::Builder::new().name(play.title());
    let playing = player.spawn(move || {
        // Whoever waits for us may have given up.
        let _ = tell.send(scene.play());
    })?;
    let seen = match told.recv_timeout(HANGS) {
        Ok(seen) => seen?,
        // What it holds is left to it.
        Err(RecvTimeoutError::Timeout) => {
            let hangs = format!("it hangs: not over after {HANGS:?}\n{}", threads());
            return Err(hangs.into_failed());
        }
        Err(RecvTimeoutError::Disconnected) => return Err("it panicked".into_failed()),
    };
    playing.join().map_err(|_| "it panicked")?;
    check(&play.row, play.phase, tier, &seen)?;
    Ok(seen)
}

trait IntoFailed {
    fn into_failed(self) -> NotSeen;
}

impl<T: Into<Failed>> IntoFailed for T {
    fn into_failed(self) -> NotSeen {
        NotSeen::Failed(self.into())
    }
}

/// Whether it came to what is demanded, and says so.
fn check(row: &Row, phase: Phase, tier: Tier, seen: &Seen) -> Outcome {
    let demanded = row.cell(phase, tier);
    ensure(demanded.allows(seen.word), || {
        format!(
            "`{}` is demanded, and it is `{}`:\n{}",
            demanded, seen.word, seen.told
        )
    })?;
    if !matches!(
        seen.word,
        Word::Ok | Word::RevokedRecovered | Word::RevokedClosed
    ) {
        row.is_told(&seen.told)?;
    }
    if row.blocked.contains(&phase) {
        ensure(seen.blocked > 0, || {
            "the translation blocked nothing".into()
        })?;
    }
    let stated = match phase {
        Phase::Init => Duration::from_secs(30),
        _ => Patience::of(row, tier).whole_ladder() + STOP,
    };
    ensure(seen.act <= stated, || {
        format!("it took {:?}, and {stated:?} is stated", seen.act)
    })
}

/// A fault about to happen.
struct Scene {
    name: String,
    row: Row,
    phase: Phase,
    moment: String,
    place: Place,
    control: Control,
    /// Mappings of the server's that are not ours.
    mapped: u64,
    host: Option<Arc<Host>>,
}

/// What became of a device after an act.
enum After {
    Unbroken,
    Recovered,
    Fenced,
    Removed,
}

impl Scene {
    fn play(mut self) -> Result<Seen, NotSeen> {
        let seen = match self.phase {
            Phase::Init => self.opened(),
            Phase::Close => self.closed(),
            _ => self.lived(),
        }?;
        self.ended()?;
        Ok(seen)
    }

    /// The fault begins.
    fn begin(&mut self) -> Result<(), NotSeen> {
        if self.row.truth.by == By::Host {
            if let Some(host) = &self.host {
                host.set(HostFault::named(&self.name));
            }
            match self.row.truth.evidence {
                Evidence::Error => self.control.notice(Notice::Error)?,
                Evidence::Request => self.control.notice(Notice::Request)?,
                _ => {}
            }
            return Ok(());
        }
        for fault in faults(&self.name, &self.row) {
            let spec = match &*self.moment {
                "now" => fault,
                moment => format!("{fault}@{moment}"),
            };
            self.control.fault(&spec).map_err(|error| match error {
                ControlError::Refused { reason, .. } => NotSeen::NotOffered(reason),
                other => other.into_failed(),
            })?;
        }
        Ok(())
    }

    /// The fault is taken back, where there is somebody to take it back.
    fn end(&mut self) -> Outcome {
        if let Some(host) = &self.host {
            host.set(None);
        }
        if self.row.truth.server == Server::Dies {
            return Ok(());
        }
        Ok(self.control.clear_faults()?)
    }

    fn patience(&self) -> Patience {
        Patience::of(&self.row, self.place.tier())
    }

    fn transport(&mut self) -> Result<Arc<dyn Transport>, Failed> {
        let emulator = match &self.place {
            Place::Function(function) => return function.transport(),
            Place::Own(emulator) => emulator,
        };
        let patience = self.patience();
        let options = ClientOptions {
            deadline: patience.call,
            reset_deadline: patience.reset,
            ..ClientOptions::default()
        };
        let client: Arc<dyn Transport> = Client::connect(emulator.socket_path(), options)?;
        let host = Host::new(client);
        self.host = Some(host.clone());
        Ok(host)
    }

    fn open(&self, transport: Arc<dyn Transport>) -> Result<Device, failstop::device::DeviceError> {
        let config = Config {
            loopback: true,
            ..Config::default()
        };
        let options = Options {
            deadlines: self.patience().ladder,
            look: Some(POLICY.interval),
            ..Options::default()
        };
        Device::open_with(transport, &config, options)
    }

    /// The fault is there from the first message on.
    fn opened(&mut self) -> Result<Seen, NotSeen> {
        // An event has nobody to go to yet.
        let after_open = self.row.truth.by == By::Host;
        if !after_open {
            self.begin()?;
        }
        let start = Instant::now();
        let transport = self.transport();
        // With its last file the kernel resets the function, and waits for one that does not answer (R12):
        // that comes when the fault is over.
        let file = transport.as_ref().ok().cloned();
        let opened = match transport {
            Ok(transport) => self.open(transport).map_err(words),
            Err(failed) => Err(failed.message().unwrap_or_default().to_owned()),
        };
        let act = start.elapsed();
        let device = match opened {
            Ok(device) => {
                drop(file);
                device
            }
            Err(told) => {
                self.end()?;
                return Ok(Seen {
                    word: Word::Refused,
                    told,
                    blocked: self.blocked(),
                    act,
                });
            }
        };
        if after_open {
            self.begin()?;
        }
        self.follow(device, None, act)
    }

    /// A device in use, to which the fault happens; then whatever comes of it.
    fn lived(&mut self) -> Result<Seen, NotSeen> {
        let transport = self.transport()?;
        let device = self.open(transport)?;
        let supervisor = Supervisor::new(&device, POLICY)?;
        let mut port = match self.phase {
            Phase::Idle => None,
            _ => {
                let mut port = Port::open(&device, &PortConfig::default())?;
                traffic::good(&mut port, &device)?;
                Some(port)
            }
        };
        let mut lost = None;
        let start;
        match self.phase {
            Phase::Traffic => {
                self.begin()?;
                start = Instant::now();
                let port = port.as_mut().ok_or("no port")?;
                let moved = traffic::bad(port, &device, self.traffic_time(), self.pause());
                self.judge_traffic(&moved, &device)?;
            }
            Phase::DestroyRq | Phase::DestroySq | Phase::DestroyMr => {
                let parts = port.take().ok_or("no port")?.into_parts();
                start = self.destroy(parts, &mut lost)?;
            }
            Phase::Ladder => {
                self.begin()?;
                start = Instant::now();
                device.break_now(Cause::User);
                // Waits for the verdict.
                let _ = device.revocation();
            }
            Phase::Recovery => {
                drop(supervisor);
                device.break_now(Cause::User);
                let _ = device.revocation();
                self.begin()?;
                start = Instant::now();
                let act = start.elapsed();
                let supervisor = Supervisor::new(&device, POLICY)?;
                return self.follow_supervised(device, Some(supervisor), port, act);
            }
            _ => {
                self.begin()?;
                start = Instant::now();
            }
        }
        let act = start.elapsed();
        ensure_eq(lost.take(), None, "frames that came home and were written")?;
        self.follow_supervised(device, Some(supervisor), port, act)
    }

    /// How long frames pass under the fault: for hangs until the watchdog must have seen it.
    fn traffic_time(&self) -> Duration {
        let truth = &self.row.truth;
        if truth.evidence == Evidence::Stall || truth.server == Server::Silent {
            Duration::from_secs(3)
        } else {
            Duration::from_millis(150)
        }
    }

    /// Between two turns: a server that takes its time does not get more than it can take.
    fn pause(&self) -> Duration {
        match self.row.truth.server {
            Server::Answers => Duration::from_millis(10),
            _ => Duration::ZERO,
        }
    }

    /// What came back of what was sent: other bytes only from who spoils them.
    fn judge_traffic(&self, moved: &Traffic, device: &Device) -> Outcome {
        let spoils = self.row.truth.completions.may_spoil();
        if device.broken().is_none() && !spoils {
            ensure_eq(moved.wrong, 0, "frames with other bytes")?;
        }
        Ok(())
    }

    /// Destroys the phase's object under the fault, and those before and after it; says when.
    fn destroy(
        &mut self,
        mut parts: failstop::port::Parts,
        written: &mut Option<usize>,
    ) -> Result<Instant, NotSeen> {
        let start;
        match self.phase {
            Phase::DestroyRq => {
                parts.sq.destroy();
                self.begin()?;
                start = Instant::now();
                parts.rq.destroy();
            }
            Phase::DestroySq => {
                parts.rq.destroy();
                self.begin()?;
                start = Instant::now();
                parts.sq.destroy();
            }
            _ => {
                parts.sq.destroy();
                parts.rq.destroy();
                self.begin()?;
                start = Instant::now();
            }
        }
        if let Some(census) = parts.mr.census() {
            let counted = census.home + census.out;
            ensure_eq(counted, census.total, "home + out = total")?;
        }
        // From a liar only the translation protects what is mapped; nobody else goes on.
        if self.row.truth.stop != Stop::Lies {
            *written = traffic::watched(&mut parts.pool, WATCH);
        }
        drop(parts.pool);
        parts.mr.destroy();
        parts.tx_cq.destroy();
        parts.rx_cq.destroy();
        parts.pd.destroy();
        Ok(start)
    }

    fn follow(
        &mut self,
        device: Device,
        port: Option<Port>,
        act: Duration,
    ) -> Result<Seen, NotSeen> {
        let supervisor = Supervisor::new(&device, POLICY)?;
        self.follow_supervised(device, Some(supervisor), port, act)
    }

    /// Waits for what the supervisor makes of it, takes the fault back when it is done, and closes.
    fn follow_supervised(
        &mut self,
        device: Device,
        supervisor: Option<Supervisor>,
        mut port: Option<Port>,
        act: Duration,
    ) -> Result<Seen, NotSeen> {
        let (mut after, mut told) = settle(&device)?;
        match after {
            After::Recovered => {
                if let (Phase::Recovery, Some(port)) = (self.phase, &mut port) {
                    traffic::carry(port, Duration::from_millis(50));
                    // A map that was not answered breaks the next life, too.
                    let (again, more) = settle(&device)?;
                    told += &more;
                    if !matches!(again, After::Unbroken) {
                        after = again;
                    }
                }
                self.end()?;
            }
            After::Unbroken if matches!(self.phase, Phase::Traffic | Phase::Init) => self.end()?,
            _ => {}
        }
        if matches!(after, After::Recovered) {
            // What is under way in a device that misbehaved until now may break it once more.
            let (again, more) = settle(&device)?;
            told += &more;
            if matches!(again, After::Fenced | After::Removed) {
                after = again;
            }
        }
        let works = matches!(after, After::Recovered)
            || (matches!(after, After::Unbroken) && self.phase == Phase::Init);
        // A port whose memory is kept back stays with the life that ended.
        let kept = device.ledger().totals().quarantined_bytes > 0;
        let mut port = match (port, works) {
            (Some(port), true) if kept => {
                drop(port);
                Some(Port::open(&device, &PortConfig::default())?)
            }
            (None, true) => Some(Port::open(&device, &PortConfig::default())?),
            (port, _) => port,
        };
        if let (Some(port), true) = (&mut port, works) {
            traffic::good(port, &device)?;
        }
        drop(supervisor);
        drop(port);
        let report = device.close();
        told += &words_of(&report);
        self.account(&report)?;
        let quarantined = report.totals.quarantined_bytes > 0;
        let word = match (&after, quarantined) {
            (After::Unbroken, false) if report.broken.is_none() => Word::Ok,
            (After::Removed, false) => Word::RevokedClosed,
            (After::Recovered, false) if report.broken.is_none() => Word::RevokedRecovered,
            (After::Recovered, true) if report.broken.is_none() => Word::QuarantinedRecovered,
            (_, false) => Word::RevokedFenced,
            (_, true) => Word::QuarantinedFenced,
        };
        self.master_is_off(word)?;
        Ok(Seen {
            word,
            told,
            blocked: self.blocked(),
            act,
        })
    }

    /// Closed with a port in use.
    fn closed(&mut self) -> Result<Seen, NotSeen> {
        let transport = self.transport()?;
        let device = self.open(transport)?;
        let mut port = Port::open(&device, &PortConfig::default())?;
        traffic::good(&mut port, &device)?;
        self.begin()?;
        let start = Instant::now();
        let report = device.close();
        let act = start.elapsed();
        drop(port);
        self.account(&report)?;
        let lives = report.revocation.as_ref().is_some_and(is_stopped);
        let word = match (report.totals.quarantined_bytes > 0, lives) {
            (true, _) => Word::QuarantinedFenced,
            (false, true) => Word::RevokedClosed,
            (false, false) => Word::RevokedFenced,
        };
        self.master_is_off(word)?;
        Ok(Seen {
            word,
            told: words_of(&report),
            blocked: self.blocked(),
            act,
        })
    }

    /// Every request ended once, nothing is live, and what is kept is said.
    fn account(&self, report: &CloseReport) -> Outcome {
        let c = report.completions;
        ensure_eq(
            c.posted,
            c.success + c.error + c.flushed,
            "posted = success + error + flushed",
        )?;
        ensure_eq(report.totals.live_bytes, 0, "live bytes")?;
        let lines: u64 = report.left.iter().map(|line| line.len).sum();
        ensure_eq(
            lines,
            report.totals.quarantined_bytes,
            "bytes of the ledger's lines",
        )
    }

    /// Accesses that the translation blocked, if somebody says so.
    fn blocked(&mut self) -> u64 {
        self.control.stats().map_or(0, |stats| stats.rogue.blocked)
    }

    /// The function issues nothing any more, while we still hold on to it (R4.2, C47).
    fn master_is_off(&mut self, word: Word) -> Outcome {
        let truth = &self.row.truth;
        let reachable = matches!(truth.server, Server::Good | Server::Answers)
            && truth.answers != Answers::Never
            && word != Word::QuarantinedFenced;
        if !reachable {
            return Ok(());
        }
        let end = Instant::now() + Duration::from_secs(3);
        while self.control.stats()?.bus_master {
            ensure(Instant::now() < end, || "bus mastering is on".into())?;
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// We have gone: nothing is mapped, and nothing that was released was ever reached.
    fn ended(&mut self) -> Outcome {
        self.host = None;
        if self.row.truth.server == Server::Dies {
            return Ok(());
        }
        self.end()?;
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let stats = self.control.stats()?;
            ensure_eq(
                stats.rogue.reached,
                0,
                "accesses that reached somebody else's memory",
            )?;
            if stats.server.mappings <= self.mapped {
                return Ok(());
            }
            ensure(Instant::now() < end, || "mappings are left".into())?;
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where the threads of this process are, as far as the kernel says.
fn threads() -> String {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let describe = |task: io::Result<fs::DirEntry>| {
        let task = task.ok()?.path();
        // Only root may see where in the kernel it is.
        let read = |file| fs::read_to_string(task.join(file)).unwrap_or_default();
        Some(format!("thread {}{}", read("comm"), read("stack")))
    };
    tasks.filter_map(describe).collect()
}

/// Whether a new life could begin: by a proven reset, or by the provider's own with nothing mapped.
fn is_stopped(report: &RevocationReport) -> bool {
    report.is_stopped() || report.reset_method == Some(ResetMethod::Software)
}

fn words(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// What a report tells.
fn words_of(report: &CloseReport) -> String {
    let mut text = format!("{report}\n");
    if let Some(cause) = &report.broken {
        text += &format!("broken: {cause}\n");
    }
    for line in &report.left {
        text += &format!(
            "kept: {}: {}\n",
            line.owner,
            line.reason.unwrap_or("in use")
        );
    }
    if let Some(revocation) = &report.revocation {
        text += &format!("{revocation}\n");
    }
    text
}

/// Waits until nothing more comes of a break, if there is one. Of links that come and go nothing
/// does.
fn settle(device: &Device) -> Result<(After, String), Failed> {
    let mut told = String::new();
    let mut after = After::Unbroken;
    let mut is_open = device.broken().is_some();
    let mut quiet = Instant::now() + LOOKS;
    let end = Instant::now() + HANGS / 3;
    loop {
        let now = Instant::now();
        if now >= quiet && !is_open {
            return Ok((after, told));
        }
        if now >= end {
            return Err(format!("neither recovered nor given up:\n{told}").into());
        }
        let Some(event) = device.events().next(LOOKS / 3)? else {
            continue;
        };
        if matches!(event, DeviceEvent::Link(_)) {
            continue;
        }
        told += &format!("{event:?}\n");
        quiet = now + LOOKS;
        match event {
            DeviceEvent::Broken { .. } | DeviceEvent::RemovalRequested => is_open = true,
            DeviceEvent::Recovered { .. } => (after, is_open) = (After::Recovered, false),
            DeviceEvent::GivenUp { .. } => return Ok((After::Fenced, told)),
            DeviceEvent::Removed => return Ok((After::Removed, told)),
            _ => {}
        }
    }
}
