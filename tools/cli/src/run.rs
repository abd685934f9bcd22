//! `failstop run`: opens a device, moves frames in loopback, tears everything down object by
//! object, and says what the accounts say.

use std::io::{self, IsTerminal, Write};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use failstop::device::{CloseReport, Device};
use failstop::dma::frame::Frame;
use failstop::dma::ledger::{Ledger, Totals};
use failstop::name::{DeviceName, NotADevice};
use failstop::open::IommuChoice;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::completions::Completions;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::emulated::{Emulated, EmulatedName};
use crate::exit::Exit;
use crate::traffic::{Generator, SHORTEST};

/// Frames of one burst.
const BURST: usize = 32;
/// How long the end of a run waits for frames that are still on their way.
const DRAIN: Duration = Duration::from_millis(500);
/// How long it takes at most, whatever the device goes on reporting.
const DRAIN_AT_MOST: Duration = Duration::from_secs(5);
/// How often the rates that are shown change.
const SHOW: Duration = Duration::from_millis(250);

/// Options of `failstop run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// The device: a PCI address (0000:01:00.0), vfio-user:PATH, or `emu:82576[,fault=NAME[:ARGS][@FRAMES]]`
    #[arg(default_value = "emu:82576")]
    device: Target,
    /// How long to move frames, in seconds: 0 to 86400
    #[arg(long, default_value_t = 5.0, value_parser = seconds)]
    seconds: f64,
    /// Bytes of each frame, 60 to 9724, without the frame check sequence: 1514 is a full standard frame
    #[arg(long, default_value_t = SHORTEST, value_parser = clap::value_parser!(u32).range(i64::from(SHORTEST)..=9724))]
    size: u32,
    /// How to reach the IOMMU of a PCI function: auto, container or iommufd
    #[arg(long, default_value = "auto")]
    iommu: IommuChoice,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "`{text}` is not a number of seconds between 0 and 86400"
        )),
    }
}

/// What `run` drives.
#[derive(Clone, Debug)]
enum Target {
    Emulated(EmulatedName),
    Device(DeviceName),
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

#[derive(Serialize, Default)]
struct Report {
    device: String,
    provider: String,
    transport: String,
    rx_packets: u64,
    tx_packets: u64,
    rx_bytes: u64,
    tx_bytes: u64,
    payload_errors: u64,
    completions: CompletionsReport,
    ledger: LedgerReport,
    /// The revocation ladder's report; null when nothing was revoked.
    revocation: Option<()>,
    recovered: bool,
    stray_dma: Option<u64>,
    exit: u8,
}

#[derive(Serialize, Default)]
struct CompletionsReport {
    posted: u64,
    success: u64,
    error: u64,
    flushed: u64,
}

#[derive(Serialize, Default)]
struct LedgerReport {
    peak_bytes: u64,
    peak_mappings: u64,
    live_bytes: u64,
    quarantined_bytes: u64,
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
    let (report, exit) = drive(options, &mut console)?;
    if options.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    }
    Ok(exit)
}

fn drive(options: &RunArgs, console: &mut Console<'_>) -> anyhow::Result<(Report, Exit)> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("could not watch for signals")?;
    }
    let (emulated, name) = match &options.device {
        Target::Emulated(name) => {
            let emulated = Emulated::start(name)?;
            let device = emulated.device();
            (Some(emulated), device)
        }
        Target::Device(name) => (None, name.clone()),
    };
    let transport = failstop::open::transport(&name, options.iommu, &[])?;
    let config = Config {
        promiscuous: false,
        loopback: true,
        longest_frame: options.size.max(Config::default().longest_frame),
    };
    let device = Device::open(transport, &config)?;
    let shown = match &options.device {
        Target::Emulated(name) => name.to_string(),
        Target::Device(name) => name.to_string(),
    };
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
    let port_config = PortConfig {
        frame_size: config.longest_frame.next_multiple_of(1024).max(2048),
        ..PortConfig::default()
    };
    let outcome = use_port(options, &device, &port_config, &stop, &mut report, console);
    // Whatever happened in between, the device is closed and its accounts are read.
    let closed = device.close();
    report.stray_dma = emulated.and_then(Emulated::stop);
    if let Err(error) = outcome {
        if closed.left.is_empty() {
            return Err(error);
        }
        eprintln!("failstop: {error:#}");
    }
    let exit = finish(&mut report, &closed, console)?;
    Ok((report, exit))
}

/// Opens a port, moves frames, and destroys its objects one by one.
fn use_port(
    options: &RunArgs,
    device: &Device,
    config: &PortConfig,
    stop: &AtomicBool,
    report: &mut Report,
    console: &mut Console<'_>,
) -> anyhow::Result<()> {
    let mut port = Port::open(device, config)?;
    console.say(&format!("before: {}", ledger_line(device.ledger())))?;
    move_frames(options, device, &mut port, config, stop, report)?;
    tear_down(port, device, console)?;
    Ok(())
}

fn ledger_line(ledger: &Ledger) -> String {
    let totals = ledger.totals();
    format!(
        "{} bytes live in {} mappings, {} bytes quarantined",
        totals.live_bytes, totals.live_mappings, totals.quarantined_bytes
    )
}

/// Sends and receives until time is up, then collects what is on its way.
fn move_frames(
    options: &RunArgs,
    device: &Device,
    port: &mut Port,
    config: &PortConfig,
    stop: &AtomicBool,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut generator = Generator::new(device.mac(), options.size);
    let mut outgoing = port.take_frames(BURST).context("no frames to send")?;
    let mut incoming = port
        .take_frames(BURST)
        .context("no frames to receive into")?;
    // What is on its way has a descriptor that waits for it, so that nothing is dropped.
    let window = u64::from(config.rx_entries) / 2;
    let show = Show::new(!options.json && io::stderr().is_terminal());
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let mut looked = Instant::now();
    let mut sending = true;
    let mut idle_since = None;
    let mut stopped = None;
    loop {
        let now = Instant::now();
        sending =
            sending && now < end && !stop.load(Ordering::Relaxed) && device.broken().is_none();
        if !sending && now - *stopped.get_or_insert(now) > DRAIN_AT_MOST {
            break;
        }
        // A device can report more frames than it was sent.
        let under_way = report.tx_packets.saturating_sub(report.rx_packets);
        if sending && under_way + BURST as u64 <= window {
            report.tx_packets += send(port, &mut generator, &mut outgoing) as u64;
        }
        let received = port.rx_burst(&mut incoming);
        incoming[..received]
            .iter()
            .for_each(|frame| generator.check(frame));
        report.rx_packets += received as u64;
        if received > 0 {
            idle_since = None;
        } else if !sending {
            let since = *idle_since.get_or_insert(now);
            if report.rx_packets == report.tx_packets || now - since > DRAIN {
                break;
            }
        } else {
            // The other side of the loop may need this core.
            std::thread::yield_now();
        }
        if now - looked > SHOW {
            looked = now;
            show.rates(report.rx_packets, report.tx_packets);
        }
    }
    report.payload_errors = generator.errors;
    report.rx_bytes = port.rq().bytes();
    report.tx_bytes = port.sq().bytes();
    Ok(())
}

/// Fills a burst and sends it; returns how many frames went.
fn send(port: &mut Port, generator: &mut Generator, frames: &mut [Frame]) -> usize {
    frames.iter_mut().for_each(|frame| generator.write(frame));
    let sent = port.tx_burst(frames);
    generator.unsent(frames.len() - sent);
    sent
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
    console: &mut Console<'_>,
) -> io::Result<Exit> {
    report.completions = closed.completions.into();
    report.ledger = closed.totals.into();
    let exit = if closed.totals.quarantined_bytes > 0 || closed.totals.live_bytes > 0 {
        Exit::Quarantined
    } else if closed.broken.is_some() {
        Exit::Fenced
    } else if report.payload_errors > 0 || report.rx_packets != report.tx_packets {
        Exit::Wrong
    } else {
        Exit::Clean
    };
    report.exit = exit as u8;
    console.say(&format!(
        "sent {} frames, received {}, {} with errors",
        report.tx_packets, report.rx_packets, report.payload_errors
    ))?;
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
    for line in &closed.left {
        console.say(&format!(
            "  kept: {} bytes at {} of {}: {}",
            line.len,
            line.iova,
            line.owner,
            line.reason.unwrap_or("still in use")
        ))?;
    }
    Ok(exit)
}

/// Live rates on a terminal.
struct Show(Option<(ProgressBar, Instant)>);

impl Show {
    fn new(on: bool) -> Self {
        Self(on.then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                bar.set_style(style);
            }
            (bar, Instant::now())
        }))
    }

    fn rates(&self, received: u64, sent: u64) {
        if let Some((bar, start)) = &self.0 {
            let seconds = start.elapsed().as_secs_f64();
            let rate = |n: u64| n as f64 / seconds / 1000.0;
            bar.set_message(format!(
                "received {:.0} k/s, sent {:.0} k/s",
                rate(received),
                rate(sent)
            ));
            bar.tick();
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        if let Some((bar, _)) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
