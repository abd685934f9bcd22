//! `failstop run`: opens a device, moves frames in loopback, tears everything down object by
//! object, and says what the accounts say.

use std::fmt;
use std::io::{self, Write};
use std::ops::Add;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use failstop::device::{CloseReport, Device, Glance, RecoveryReport};
use failstop::dma::ledger::{Ledger, Line, Totals};
use failstop::ladder::RevocationReport;
use failstop::name::{DeviceName, NotADevice};
use failstop::open::IommuChoice;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::completions::Completions;
use failstop::rss::Rss;
use serde::Serialize;

use crate::breaking::Broken;
use crate::emulated::{Emulated, EmulatedName};
use crate::ending::{self, Ending};
use crate::exit::Exit;
use crate::flow::{Moved, move_frames};
use crate::supervised::Watched;
use crate::traffic::SHORTEST;

/// Options of `failstop run`.
#[derive(Args, Debug)]
#[command(after_help = after_help())]
pub(crate) struct RunArgs {
    /// The device: a PCI address (0000:01:00.0), vfio-user:PATH, or `emu:82576[,fault=NAME[:ARGS][@WHEN]]...`
    #[arg(default_value = "emu:82576")]
    device: Target,
    /// How long to move frames, in seconds: 0 to 86400
    #[arg(long, default_value_t = 5.0, value_parser = seconds)]
    seconds: f64,
    /// Break the device after so many seconds, recover it, and go on: the gap does not count as time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    break_after: Option<f64>,
    /// Bytes of each frame, 60 to 9724, without the frame check sequence: 1514 is a full standard frame
    #[arg(long, default_value_t = SHORTEST, value_parser = clap::value_parser!(u32).range(i64::from(SHORTEST)..=9724))]
    size: u32,
    /// Queue pairs, 1 to 16, each moved by a thread of its own: what comes is spread over them by RSS
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    queues: u32,
    /// How to reach the IOMMU of a PCI function: auto, container or iommufd
    #[arg(long, default_value = "auto")]
    iommu: IommuChoice,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    /// What the options ask for together and cannot have.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let is_pci = matches!(self.device, Target::Device(DeviceName::Pci(_)));
        if !is_pci && self.iommu != IommuChoice::default() {
            return Some(format!(
                "--iommu {} is for a PCI function: behind a vfio-user server there is no IOMMU to reach",
                self.iommu
            ));
        }
        let after = self.break_after.filter(|after| *after >= self.seconds)?;
        Some(format!(
            "--break-after {after} is not before the end of the run: --seconds is {}",
            self.seconds
        ))
    }

    /// How long frames are moved.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// When the device is broken, if it is to be.
    pub(crate) fn break_after(&self) -> Option<Duration> {
        self.break_after.map(Duration::from_secs_f64)
    }

    /// How long frames are moved after a break.
    pub(crate) fn time_after_break(&self) -> Duration {
        self.time()
            .saturating_sub(self.break_after().unwrap_or_default())
    }

    /// Bytes of each frame.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Queue pairs.
    pub(crate) fn queues(&self) -> u32 {
        self.queues
    }

    /// Whether a person looks on.
    pub(crate) fn is_watched(&self) -> bool {
        !self.json
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "`{text}` is not a number of seconds between 0 and 86400"
        )),
    }
}

/// A device, as the command line names it.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Emulated(EmulatedName),
    Device(DeviceName),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulated(name) => name.fmt(f),
            Self::Device(name) => name.fmt(f),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("emu:") {
            return text.parse().map(Self::Emulated);
        }
        text.parse()
            .map(Self::Device)
            .map_err(|error: NotADevice| format!("{error} or emu:82576"))
    }
}

/// The end of a run, as `--help` says it.
fn after_help() -> String {
    format!(
        "A run ends in order when its time is up, or by a first SIGINT, SIGTERM or SIGHUP, and takes at most {} s for that. \
         Past it, or by a second signal, it ends at once, says what state the device is in, and reports memory that the device \
         may still reach as kept (exit code 4).",
        ending::LIMIT.as_secs()
    )
}

/// What a run comes to: the object that `--json` prints, whatever happens.
#[derive(Serialize, Default, Clone)]
pub(crate) struct Report {
    device: String,
    provider: String,
    transport: String,
    rx_packets: u64,
    tx_packets: u64,
    rx_bytes: u64,
    tx_bytes: u64,
    /// Frames that were on their way when the device was broken.
    lost_packets: u64,
    payload_errors: u64,
    /// What each queue pair moved, in the order of their numbers; absent where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    queues: Vec<QueueReport>,
    completions: CompletionsReport,
    ledger: LedgerReport,
    /// Memory that is not released, and why.
    kept: Vec<Kept>,
    /// The revocation ladder's report, of the last life if it ran twice; null when nothing was revoked.
    revocation: Option<RevocationReport>,
    recovered: bool,
    /// What the recovery did, the port's part included; null when there was none.
    recovery: Option<RecoveryReport>,
    stray_dma: Option<u64>,
    /// Why there was no run, or no orderly end of it.
    error: Option<String>,
    exit: u8,
}

#[derive(Serialize, Clone)]
struct Kept {
    bytes: u64,
    iova: u64,
    owner: String,
    reason: String,
}

impl From<&Line> for Kept {
    fn from(line: &Line) -> Self {
        Self {
            bytes: line.len,
            iova: line.iova.0,
            owner: line.owner.to_string(),
            reason: line.reason.unwrap_or("still in use").to_owned(),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  kept: {} bytes at {:#x} of {}: {}",
            self.bytes, self.iova, self.owner, self.reason
        )
    }
}

/// One queue pair's part.
#[derive(Serialize, Default, Clone)]
struct QueueReport {
    queue: u32,
    rx_packets: u64,
    tx_packets: u64,
    rx_bytes: u64,
    tx_bytes: u64,
    lost_packets: u64,
    payload_errors: u64,
}

#[derive(Serialize, Default, Clone)]
struct CompletionsReport {
    posted: u64,
    success: u64,
    error: u64,
    flushed: u64,
}

#[derive(Serialize, Default, Clone)]
struct LedgerReport {
    peak_bytes: u64,
    peak_mappings: u64,
    live_bytes: u64,
    quarantined_bytes: u64,
}

impl Report {
    fn count(&mut self, each: &[Moved], size: u32) {
        let queue = |(queue, moved): (u32, &Moved)| QueueReport {
            queue,
            rx_packets: moved.received,
            tx_packets: moved.sent,
            rx_bytes: moved.received_bytes,
            tx_bytes: moved.sent * u64::from(size),
            lost_packets: moved.lost,
            payload_errors: moved.errors,
        };
        if each.len() > 1 {
            self.queues = (0..).zip(each).map(queue).collect();
        }
        let moved = each.iter().copied().fold(Moved::default(), Moved::add);
        self.tx_packets = moved.sent;
        self.rx_packets = moved.received;
        self.tx_bytes = moved.sent * u64::from(size);
        self.rx_bytes = moved.received_bytes;
        self.lost_packets = moved.lost;
        self.payload_errors = moved.errors;
    }

    /// There was no run.
    fn refused(options: &RunArgs, error: &anyhow::Error) -> Self {
        Self {
            device: options.device.to_string(),
            error: Some(crate::explain(error)),
            exit: Exit::NotUsable as u8,
            ..Self::default()
        }
    }

    /// The run ends here and now, because of `why`: what was counted is what is known without it.
    pub(crate) fn cut_short(&mut self, glance: Option<&Glance>, why: &str) -> Exit {
        let exit = match glance.map(Glance::look) {
            None => {
                self.error = Some(format!("ended at once by {why}: no device was in use"));
                Exit::NotUsable
            }
            Some(None) => {
                // What its accounts were at last is not known here.
                self.error = Some(format!(
                    "ended at once by {why}, while the device was being closed: memory that it may reach is kept until this process is gone"
                ));
                Exit::Quarantined
            }
            Some(Some(seen)) => {
                let mapped = seen.totals.live_bytes + seen.totals.quarantined_bytes;
                let broken = match &seen.broken {
                    Some(cause) => format!("broken ({cause})"),
                    None => "not broken".to_owned(),
                };
                self.error = Some(format!(
                    "ended at once by {why}: the device is {broken} and was not closed; {} bytes in {} mappings and {} bytes \
                     in quarantine have no ground to be released, and are kept until this process is gone",
                    seen.totals.live_bytes,
                    seen.totals.live_mappings,
                    seen.totals.quarantined_bytes
                ));
                self.completions = seen.completions.into();
                self.ledger = seen.totals.into();
                self.kept = seen.left.iter().map(Kept::from).collect();
                match (mapped > 0, seen.broken.is_some()) {
                    (true, _) => Exit::Quarantined,
                    (false, true) => Exit::Fenced,
                    (false, false) => Exit::Wrong,
                }
            }
        };
        self.exit = exit as u8;
        exit
    }

    /// What a person is told of that.
    pub(crate) fn why_cut_short(&self) -> String {
        let mut text = self.error.clone().unwrap_or_default();
        for kept in &self.kept {
            text = format!("{text}\n{kept}");
        }
        text
    }
}

impl From<Completions> for CompletionsReport {
    fn from(c: Completions) -> Self {
        Self {
            posted: c.posted,
            success: c.success,
            error: c.error,
            flushed: c.flushed,
        }
    }
}

impl From<Totals> for LedgerReport {
    fn from(t: Totals) -> Self {
        Self {
            peak_bytes: t.peak_bytes,
            peak_mappings: t.peak_mappings,
            live_bytes: t.live_bytes,
            quarantined_bytes: t.quarantined_bytes,
        }
    }
}

/// Where text goes, unless one JSON object is asked for.
struct Console<'a> {
    out: &'a mut dyn Write,
    quiet: bool,
}

impl Console<'_> {
    fn say(&mut self, text: &str) -> io::Result<()> {
        if self.quiet {
            Ok(())
        } else {
            writeln!(self.out, "{text}")
        }
    }
}

/// Runs, prints, and says how the process should end.
///
/// # Errors
///
/// What made the device unusable.
pub(crate) fn run(options: &RunArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut console = Console {
        out,
        quiet: options.json,
    };
    let ending = Ending::watch(options.json)?;
    let driven = drive(options, &ending, &mut console);
    ending.over();
    let (report, refused) = match driven {
        Ok(report) => (report, None),
        Err(error) => (Report::refused(options, &error), Some(error)),
    };
    if options.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    }
    match refused {
        None => Ok(Exit::of(report.exit)),
        Some(error) => Err(error),
    }
}

fn drive(
    options: &RunArgs,
    ending: &Arc<Ending>,
    console: &mut Console<'_>,
) -> anyhow::Result<Report> {
    let stop = ending.stop();
    let (emulated, transport) = match &options.device {
        Target::Emulated(name) => {
            let mut emulated = Emulated::start(name)?;
            let transport = emulated.transport()?;
            (Some(emulated), transport)
        }
        Target::Device(name) => (None, failstop::open::transport(name, options.iommu, &[])?),
    };
    let config = Config {
        promiscuous: false,
        loopback: true,
        longest_frame: options.size.max(Config::default().longest_frame),
        rss: (options.queues > 1).then(Rss::default),
    };
    let device = Device::open(transport, &config)?;
    let shown = options.device.to_string();
    console.say(&format!(
        "{shown}: {} {} by {}, {}, link {}",
        device.provider(),
        device.part(),
        device.transport().kind(),
        device.mac(),
        device.link()
    ))?;
    let mut report = Report {
        device: shown,
        provider: device.provider().to_owned(),
        transport: device.transport().kind().to_string(),
        ..Report::default()
    };
    // A gap is no time of the run, and has as long as its end has.
    let gap = options
        .break_after()
        .map_or(Duration::ZERO, |_| ending::LIMIT);
    ending.opened(&device, report.clone(), options.time() + gap);
    let port_config = PortConfig {
        frame_size: config.longest_frame.next_multiple_of(1024).max(2048),
        ..PortConfig::default()
    };
    let watched = Watched::default();
    let outcome = thread::scope(|scope| {
        if options.break_after().is_none() {
            scope.spawn(|| watched.watch(&device));
        } else {
            // Who breaks it recovers it.
            watched.nobody();
        }
        let outcome = use_port(options, &device, &port_config, (stop, &watched), console);
        watched.end(&device, stop);
        outcome
    });
    let survived = survive(&device, &watched);
    // Whatever happened in between, the device is closed and its accounts are read.
    let closed = device.close();
    // What is left is to say so.
    ending.over();
    report.stray_dma = emulated.and_then(Emulated::stop);
    let (moved, broken) = match outcome {
        Ok(outcome) => outcome,
        Err(error) if closed.left.is_empty() && closed.broken.is_none() => return Err(error),
        Err(error) => {
            crate::complain(format_args!("{error:#}"));
            report.error = Some(crate::explain(&error));
            (Vec::new(), None)
        }
    };
    report.count(&moved, options.size);
    let mut went_on = true;
    report.recovered = survived.recovery.is_some() && closed.broken.is_none();
    report.recovery = survived.recovery;
    report.revocation = survived.revocation;
    if let Some(broken) = broken {
        let in_time = broken.recovered.is_ok();
        report.recovered |= in_time;
        // With what the port's part took.
        report.recovery = broken.recovery.or(report.recovery);
        report.revocation = broken.revocation.or(report.revocation);
        // Whoever was told to stop in the gap owes no frames after it, nor does a device that came
        // back when its port was gone.
        let all_went_on = moved.iter().all(|moved| moved.received_after > 0);
        went_on = all_went_on || stop.load(Ordering::Relaxed) || !in_time;
    } else if report.recovered {
        // Nobody has heard of it yet.
        if let Some(revocation) = &report.revocation {
            console.say(revocation.to_string().trim_end())?;
        }
        if let Some(recovery) = &report.recovery {
            console.say(recovery.to_string().trim_end())?;
        }
    }
    finish(&mut report, &closed, went_on, console)?;
    Ok(report)
}

/// Opens the ports, moves frames, and destroys their objects one by one.
fn use_port(
    options: &RunArgs,
    device: &Device,
    config: &PortConfig,
    (stop, watched): (&AtomicBool, &Watched),
    console: &mut Console<'_>,
) -> anyhow::Result<(Vec<Moved>, Option<Broken>)> {
    let mut ports = open_ports(device, config, options.queues, (stop, watched))?;
    console.say(&format!("before: {}", ledger_line(device.ledger())))?;
    let (moved, mut broken) = move_frames(options, device, &mut ports, config, (stop, watched))?;
    if let Some(broken) = &mut broken {
        if let Some(recovery) = &mut broken.recovery {
            // The one that took longest.
            let carried = ports.iter().map(Port::carried);
            if let Some(carried) = carried.max_by_key(|one| one.remapped + one.requeued) {
                recovery.add_port(&carried);
            }
        }
        say_broken(broken, console)?;
    }
    for port in ports {
        if options.queues > 1 {
            console.say(&format!("queue pair {}", port.number()))?;
        }
        tear_down(port, device, console)?;
    }
    Ok((moved, broken))
}

/// Opens the ports, again on a device that broke meanwhile and was recovered.
fn open_ports(
    device: &Device,
    config: &PortConfig,
    count: u32,
    (stop, watched): (&AtomicBool, &Watched),
) -> anyhow::Result<Vec<Port>> {
    loop {
        let generation = device.generation();
        match Port::open_many(device, config, count) {
            Ok(ports) => return Ok(ports),
            Err(error) => {
                let lives = watched.wait(device, stop) && device.generation() != generation;
                if !lives {
                    return Err(error.into());
                }
            }
        }
    }
}

/// What became of a device that broke by itself, if it did.
struct Survived {
    revocation: Option<RevocationReport>,
    recovery: Option<RecoveryReport>,
}

/// Recovers a device that is broken still, once more: what broke it may have been its queues, which
/// are gone by now.
fn survive(device: &Device, watched: &Watched) -> Survived {
    watched.note(device);
    if device.broken().is_some()
        && let Err(error) = device.recover()
    {
        crate::complain(format_args!("not recovered: {error}"));
    }
    Survived {
        revocation: watched.take(),
        recovery: device.recovery(),
    }
}

/// What the ladder did, and what came after it.
fn say_broken(broken: &Broken, console: &mut Console<'_>) -> io::Result<()> {
    if let Some(report) = &broken.revocation {
        console.say(report.to_string().trim_end())?;
    }
    match &broken.recovered {
        Ok(generation) => {
            if let Some(report) = &broken.recovery {
                console.say(report.to_string().trim_end())?;
            }
            console.say(&format!(
                "recovered: {generation} began {} ms after the break",
                broken.gap.as_millis()
            ))
        }
        Err(error) => console.say(&format!("not recovered: {error}")),
    }
}

fn ledger_line(ledger: &Ledger) -> String {
    let totals = ledger.totals();
    format!(
        "{} bytes live in {} mappings, {} bytes quarantined",
        totals.live_bytes, totals.live_mappings, totals.quarantined_bytes
    )
}

/// Destroys a port's objects one by one, children first.
fn tear_down(port: Port, device: &Device, console: &mut Console<'_>) -> io::Result<()> {
    let parts = port.into_parts();
    let mut step =
        |what: &str| console.say(&format!("  {what:<24}{}", ledger_line(device.ledger())));
    parts.sq.destroy();
    step("send queue gone")?;
    parts.rq.destroy();
    step("receive queue gone")?;
    drop(parts.pool);
    parts.mr.destroy();
    step("memory region gone")?;
    parts.tx_cq.destroy();
    parts.rx_cq.destroy();
    parts.pd.destroy();
    step("protection domain gone")
}

/// Fills in what is known at the end, says it, and judges.
fn finish(
    report: &mut Report,
    closed: &CloseReport,
    went_on: bool,
    console: &mut Console<'_>,
) -> io::Result<()> {
    report.completions = closed.completions.into();
    report.ledger = closed.totals.into();
    report.kept = closed.left.iter().map(Kept::from).collect();
    if closed.revocation.is_some() {
        report.revocation.clone_from(&closed.revocation);
    }
    let all_there = report.rx_packets + report.lost_packets == report.tx_packets;
    let exit = if closed.totals.quarantined_bytes > 0 || closed.totals.live_bytes > 0 {
        Exit::Quarantined
    } else if closed.broken.is_some() {
        Exit::Fenced
    } else if report.payload_errors > 0 || !all_there || !went_on {
        Exit::Wrong
    } else {
        Exit::Clean
    };
    report.exit = exit as u8;
    console.say(&format!(
        "sent {} frames, received {}, {} with errors",
        report.tx_packets, report.rx_packets, report.payload_errors
    ))?;
    for queue in &report.queues {
        console.say(&format!(
            "  queue pair {}: sent {}, received {}, {} with errors",
            queue.queue, queue.tx_packets, queue.rx_packets, queue.payload_errors
        ))?;
    }
    if report.recovered {
        console.say(&format!(
            "  {} were on their way when the device was broken",
            report.lost_packets
        ))?;
    }
    let c = &closed.completions;
    console.say(&format!(
        "requests: {} posted = {} successful + {} in error + {} flushed",
        c.posted, c.success, c.error, c.flushed
    ))?;
    let t = &closed.totals;
    console.say(&format!(
        "after: {} bytes live, {} bytes quarantined; at most {} bytes in {} mappings",
        t.live_bytes, t.quarantined_bytes, t.peak_bytes, t.peak_mappings
    ))?;
    if let Some(stray) = report.stray_dma {
        console.say(&format!(
            "the device tried {stray} accesses outside its mappings"
        ))?;
    }
    if let Some(cause) = &closed.broken {
        console.say(&format!("the device was broken: {cause}"))?;
    }
    let mut told = &[][..];
    if let Some(report) = &closed.revocation {
        console.say(report.to_string().trim_end())?;
        told = &report.quarantined;
    }
    // The ladder has told of what it kept.
    let same = |line: &Line, other: &Line| {
        (line.iova, line.len, line.owner) == (other.iova, other.len, other.owner)
    };
    let untold = |line: &&Line| !told.iter().any(|other| same(line, other));
    for line in closed.left.iter().filter(untold) {
        console.say(&Kept::from(line).to_string())?;
    }
    Ok(())
}
