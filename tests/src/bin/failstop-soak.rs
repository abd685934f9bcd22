//! The soak: random traffic, faults, breaks, recoveries, opens and closes against an emulated device in
//! a process of its own, for as long as is wanted, and then what of it is left: nothing.
//!
//! Every random decision comes from one seed, which is printed first. The device's life is told in
//! scenarios, so that one that goes wrong is written down and can be played again. `cargo xtask soak`
//! builds and runs this.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use failstop::ladder::Deadlines;
use failstop::pci::transport::vfio_user::Options as ClientOptions;
use failstop_emulator::stats::RogueDma;
use failstop_emulator::{Emulator, Options};
use failstop_replay::live::{Live, Patience};
use failstop_replay::{Ending, keep, play};
use failstop_scenario::step::{Memory, Object, Verdict};
use failstop_scenario::{Count, Fault, Moment, On, Scenario, Spec, Step, TABLE, Trigger};
use fastrand::Rng;
use libtest_mimic::Failed;
use nix::unistd::{SysconfVar, sysconf};
use serde_json::json;

/// The argument by which this program becomes the emulator.
const EMULATE: &str = "emulate";
/// Resident memory may grow by less, in bytes, once warm.
const GROWTH: u64 = 1 << 20;
/// How long frames are waited for: where none may be lost, and where some are.
const ALL_FRAMES: Duration = Duration::from_secs(20);
const SOME_FRAMES: Duration = Duration::from_millis(20);
/// Cycles of one session, from open to close, at most.
const LONGEST_SESSION: u32 = 12;

/// Soaks a driver in faults.
#[derive(Debug, Parser)]
#[command(name = "failstop-soak")]
struct Arguments {
    /// For so many minutes.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// For so many breaks that were recovered from, instead.
    #[arg(long)]
    cycles: Option<u64>,
    /// Where everything random begins; chosen when none.
    #[arg(long)]
    seed: Option<u64>,
    /// Where reports and failures go.
    #[arg(long, default_value = "target")]
    target: PathBuf,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    if arguments.nth(1).is_some_and(|word| word == EMULATE) {
        let name = OsString::from("failstop-emulator");
        return failstop_emulator::cli::main_with(std::iter::once(name).chain(arguments));
    }
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}");
    match Soak::new(seed).and_then(|soak| soak.run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!(
                "failstop-soak: {}\nagain with --seed {seed}",
                failed.message().unwrap_or("it failed")
            );
            ExitCode::FAILURE
        }
    }
}

/// What this process holds between two sessions.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Resident bytes, by `/proc/self/statm`.
    resident: u64,
    descriptors: usize,
    threads: usize,
}

impl Held {
    /// What is held once threads that have nothing left to do have ended, which nobody waits for.
    fn at_rest() -> Result<Self, Failed> {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let held = Self::now()?;
            if held.threads == 1 || Instant::now() > end {
                return Ok(held);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn now() -> Result<Self, Failed> {
        let statm = std::fs::read_to_string("/proc/self/statm")?;
        let pages: u64 = statm
            .split(' ')
            .nth(1)
            .ok_or("statm has no second word")?
            .parse()?;
        let page = sysconf(SysconfVar::PAGE_SIZE)?.ok_or("no page size")?;
        Ok(Self {
            resident: pages * u64::try_from(page)?,
            descriptors: std::fs::read_dir("/proc/self/fd")?.count(),
            threads: std::fs::read_dir("/proc/self/task")?.count(),
        })
    }
}

/// What was done so far.
#[derive(Default, Debug)]
struct Done {
    sessions: u64,
    recoveries: u64,
    sent: u64,
    received: u64,
    flushed: u64,
    /// How often each fault was asked for.
    faults: BTreeMap<&'static str, u64>,
}

struct Soak {
    seed: u64,
    random: Rng,
    live: Live,
    done: Done,
}

impl Soak {
    fn new(seed: u64) -> Result<Self, Failed> {
        let emulator = Emulator::spawn(&[OsString::from(EMULATE)], &Options::default())?;
        Ok(Self {
            seed,
            random: Rng::with_seed(seed),
            live: Live::emulated(emulator, patience()),
            done: Done::default(),
        })
    }

    fn run(mut self, arguments: &Arguments) -> Result<(), Failed> {
        let (start, time) = (
            Instant::now(),
            Duration::from_secs_f64(60.0 * arguments.minutes),
        );
        let is_over = |done: &Done, part: f64| match arguments.cycles {
            Some(cycles) => done.recoveries as f64 >= part * cycles as f64,
            None => start.elapsed() >= time.mul_f64(part),
        };
        // A third of a short one, a minute of a long one.
        let warm = match arguments.cycles {
            Some(_) => 1.0 / 3.0,
            None => (60.0 / time.as_secs_f64()).min(1.0 / 3.0),
        };
        while !is_over(&self.done, warm) {
            self.session(arguments)?;
        }
        let first = Held::at_rest()?;
        while !is_over(&self.done, 1.0) {
            self.session(arguments)?;
        }
        let last = Held::at_rest()?;
        self.report(arguments, start.elapsed(), first, last)?;
        let grown = last.resident.saturating_sub(first.resident);
        if grown >= GROWTH {
            return Err(format!("resident memory grew by {grown} bytes").into());
        }
        if (last.descriptors, last.threads) != (first.descriptors, first.threads) {
            return Err(format!("descriptors or threads leak: {first:?}, then {last:?}").into());
        }
        Ok(())
    }

    /// One life of the device, from open to close.
    fn session(&mut self, arguments: &Arguments) -> Result<(), Failed> {
        let scenario = Scenario {
            on: On::Emulated("82576".to_owned()),
            seed: Some(self.seed),
            steps: steps(&mut self.random),
        };
        let played = self.play(&scenario);
        self.done.sessions += 1;
        played.map_err(|failed| {
            let name = format!("soak-{}-{}", self.seed, self.done.sessions);
            let kept = match keep(&scenario, &name, &arguments.target) {
                Ok(path) => format!("failstop replay {}", path.display()),
                Err(error) => format!("it could not be written down ({error}):\n{scenario}"),
            };
            let why = failed.message().unwrap_or_default();
            format!("session {}: {why}\n{kept}", self.done.sessions).into()
        })
    }

    fn play(&mut self, scenario: &Scenario) -> Result<(), Failed> {
        let faults: Vec<Fault> = scenario.steps.iter().filter_map(fault).collect();
        self.live.wait_for_frames(match faults.is_empty() {
            true => ALL_FRAMES,
            false => SOME_FRAMES,
        });
        play(&mut self.live, &scenario.steps).map_err(|failure| {
            let source = std::error::Error::source(&failure).map(ToString::to_string);
            format!("{failure}: {}", source.unwrap_or_default())
        })?;
        self.done.recoveries += self.live.recoveries();
        let ending = self.live.end();
        for fault in &faults {
            *self.done.faults.entry(fault.name()).or_default() += 1;
        }
        self.done.sent += ending.sent;
        self.done.received += ending.received;
        self.done.flushed += ending.completions.flushed;
        judge(&ending, &faults)?;
        let emulator = self.live.emulator().ok_or("no emulator")?;
        let stats = emulator.stats()?;
        if stats.bus_master {
            return Err("bus mastering is on after the close".into());
        }
        if stats.server.mappings > 0 {
            return Err(format!("{} mappings are left", stats.server.mappings).into());
        }
        let RogueDma { reached, late, .. } = stats.rogue;
        if reached > 0 {
            return Err(format!("{reached} accesses met memory of somebody else").into());
        }
        if late > 0 && !faults.iter().any(goes_on) {
            return Err(format!("{late} accesses came late, and no fault is about that").into());
        }
        emulator.reset_counters()?;
        Ok(())
    }

    fn report(
        &self,
        arguments: &Arguments,
        time: Duration,
        first: Held,
        last: Held,
    ) -> Result<(), Failed> {
        let done = &self.done;
        println!(
            "{} breaks recovered from in {} sessions, {:.0} s; {} frames sent, {} received; {} requests flushed",
            done.recoveries,
            done.sessions,
            time.as_secs_f64(),
            done.sent,
            done.received,
            done.flushed,
        );
        for (name, times) in &done.faults {
            println!("  {name:<22} {times:>6}");
        }
        println!(
            "resident (statm): {} KiB warm, {} KiB at the end; descriptors {}, {}; threads {}, {}",
            first.resident >> 10,
            last.resident >> 10,
            first.descriptors,
            last.descriptors,
            first.threads,
            last.threads,
        );
        let held = |held: Held| json!({"resident_bytes": held.resident, "descriptors": held.descriptors, "threads": held.threads});
        let report = json!({
            "seed": self.seed, "seconds": time.as_secs_f64(), "recoveries": done.recoveries,
            "sessions": done.sessions, "frames_sent": done.sent, "frames_received": done.received,
            "flushed": done.flushed, "faults": done.faults, "warm": held(first), "end": held(last),
        });
        let path = arguments.target.join("soak.json");
        std::fs::create_dir_all(&arguments.target)?;
        std::fs::write(&path, serde_json::to_vec_pretty(&report)?)?;
        println!("also in {}", path.display());
        Ok(())
    }
}

/// Calls are waited for longer than any machine makes them wait: no fault that is chosen here leaves
/// one without an answer, and what has none is kept.
fn patience() -> Patience {
    let seconds = Duration::from_secs;
    Patience {
        frames: SOME_FRAMES,
        deadlines: Deadlines {
            config: seconds(20),
            detach: seconds(20),
            drain: Duration::from_millis(20),
            reset: seconds(30),
            unmap: seconds(60),
            bring_up: seconds(60),
            ..Deadlines::default()
        },
        client: ClientOptions {
            deadline: seconds(20),
            reset_deadline: seconds(30),
            ..ClientOptions::default()
        },
    }
}

/// Whatever went wrong: nothing is kept, and every request ended once.
fn judge(ending: &Ending, faults: &[Fault]) -> Result<(), Failed> {
    let told = &ending.told;
    if !ending.kept.is_empty() || matches!(ending.verdict, Verdict::Broke(Memory::Quarantined, _)) {
        return Err(format!("the ledger is not empty: {:?}\n{told}", ending.kept).into());
    }
    if ending.verdict == Verdict::Refused {
        return Err(format!("the device was refused\n{told}").into());
    }
    let c = &ending.completions;
    if c.posted != c.success + c.error + c.flushed {
        return Err(format!("the accounts do not add up: {c:?}\n{told}").into());
    }
    if faults.is_empty() && ending.exit != 0 {
        let expected = Step::Expect(ending.verdict, ending.exit);
        return Err(format!("without a fault: {expected}, {ending}").into());
    }
    Ok(())
}

fn fault(step: &Step) -> Option<Fault> {
    match step {
        Step::Fault(spec) => Some(spec.fault),
        _ => None,
    }
}

/// Whether what it makes a device do may come after its queue was told to stop.
fn goes_on(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::RxQueueStuck(_)
            | Fault::TxQueueStuck(_)
            | Fault::SlowStop(_)
            | Fault::Lie
            | Fault::BusMasterIgnored
            | Fault::LateDone(_)
            | Fault::DataAfterStop(_)
            | Fault::DmaOutside(_)
            | Fault::DmaRewrite
            | Fault::CompletionShuffled
            | Fault::FlrNoop
    )
}

/// Whether a device recovers from it once it is taken back, within the time of a cycle: what keeps
/// memory (a server that does not answer, or not as it should), what ends the server, and what
/// takes the whole deadline of a reset is for the matrix.
fn allows_recovery(fault: &Fault) -> bool {
    !matches!(
        fault,
        Fault::FlrHangs
            | Fault::ServerHangs(_)
            | Fault::ServerError(..)
            | Fault::ServerDies(_)
            | Fault::ServerShort(_)
            | Fault::ServerTwice
            | Fault::ServerDrip
            | Fault::ServerForks
            | Fault::TruncateBar
            | Fault::IrqStorm(failstop_scenario::fault::Storm::Request)
    )
}

/// The faults of the table, each with an argument where it needs one.
fn faults() -> Vec<Fault> {
    let forms = TABLE.iter().flat_map(|entry| {
        let forms = [
            "", ":quiet", ":rst", ":2", ":20", ":guard", ":notice", ":no-eop", ":error",
        ];
        forms.map(|arguments| format!("{}{arguments}", entry.name))
    });
    let parsed = forms.filter_map(|text| text.parse::<Spec>().ok());
    parsed
        .map(|spec| spec.fault)
        .filter(allows_recovery)
        .collect()
}

/// The steps of a session.
fn steps(random: &mut Rng) -> Vec<Step> {
    let faults = faults();
    let mut steps = vec![Step::Open, Step::Port];
    // Some sessions go well from beginning to end.
    let troubled = random.u8(..10) > 0;
    for _ in 0..random.u32(1..=LONGEST_SESSION) {
        cycle(random, if troubled { &faults } else { &[] }, &mut steps);
    }
    steps.push(Step::Close);
    steps
}

/// Traffic, something that goes wrong in it, and the way out.
fn cycle(random: &mut Rng, faults: &[Fault], steps: &mut Vec<Step>) {
    let how_many = [0, 1, 1, 1, 1, 2][random.usize(..6)];
    let mut of_the_server = false;
    for _ in 0..how_many {
        let Some(fault) = random.choice(faults) else {
            break;
        };
        // Two of the server at once, and it may answer too late: one that asks and is slow in taking the
        // answers is slow by seconds. What is not answered is kept.
        let server = fault.name().starts_with("server-");
        if server && of_the_server {
            continue;
        }
        of_the_server |= server;
        let at = [
            Moment::Frames,
            Moment::Frames,
            Moment::Destroy,
            Moment::MasterOff,
            Moment::Reset,
            Moment::Unmap,
        ];
        let trigger = match random.choice(at) {
            Some(Moment::Frames) | None => Trigger::after(Moment::Frames, random.u32(..200)),
            Some(at) => Trigger(vec![Count { at, n: 1 }]),
        };
        let fault = *fault;
        steps.push(Step::Fault(Spec { fault, trigger }));
    }
    let frames = random.u32(1..400);
    steps.extend([Step::Send(frames), Step::Receive(frames)]);
    if random.u8(..3) == 0 {
        objects(random, steps);
    }
    if random.u8(..8) > 0 {
        steps.push(Step::Break);
    }
    steps.extend([Step::ClearFaults, Step::Recover]);
    if random.bool() {
        let frames = random.u32(1..100);
        steps.extend([Step::Send(frames), Step::Receive(frames)]);
    }
}

/// Objects beside the port: made in order, used, and gone in any order, or at the close.
fn objects(random: &mut Rng, steps: &mut Vec<Step>) {
    let kit = random.u32(1..4);
    let mut kinds = [Object::Pd, Object::Mr, Object::Cq, Object::Rq, Object::Sq];
    steps.extend(kinds.map(|kind| Step::Create(kit, kind)));
    steps.extend([
        Step::Post(kit, random.u32(..32)),
        Step::Poll(kit, random.u32(..32)),
        Step::Reap(kit),
    ]);
    if random.bool() {
        random.shuffle(&mut kinds);
        for kind in kinds {
            steps.push(match random.bool() {
                true => Step::Destroy(kit, kind),
                false => Step::TryDestroy(kit, kind),
            });
        }
    }
}
