//! `failstop run`: opens a device, moves frames in loopback, tears everything down object by
//! object, and says what the accounts say.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use failstop::device::{Device, RecoveryReport};
use failstop::ladder::RevocationReport;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::rss::Rss;

use crate::breaking::Broken;
use crate::emulated::Emulated;
use crate::ending::{self, Ending};
use crate::exit::Exit;
use crate::flow::{Moved, move_frames};
use crate::supervised::Watched;
use console::{Console, headline, ledger_line, say_broken, say_end};

mod console;
mod options;
mod report;

pub(crate) use options::{RunArgs, Target};
pub(crate) use report::{Known, Report};

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
    let (report, told) = match drive(options, &ending, &mut console) {
        Ok((report, told)) => (report, told.map_err(Into::into)),
        Err(error) => (Report::refused(options, &error), Err(error)),
    };
    let exit = Exit::of(report.exit);
    ending.over(exit);
    let written = if options.json {
        print(&report, out)
    } else {
        Ok(())
    };
    match told.and(written) {
        Ok(()) => Ok(exit),
        // What is kept outranks that it could not be said.
        Err(error) if matches!(exit, Exit::Quarantined | Exit::Fenced) => {
            crate::complain(crate::explain(&error));
            Ok(exit)
        }
        Err(error) => Err(error),
    }
}

fn print(report: &Report, out: &mut dyn Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, report)?;
    Ok(writeln!(out)?)
}

/// Runs, and says what came of it: what is reported, and whether that could be said.
fn drive(
    options: &RunArgs,
    ending: &Ending,
    console: &mut Console<'_>,
) -> anyhow::Result<(Report, io::Result<()>)> {
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
    let (moved, broken) = match outcome {
        Ok(outcome) => outcome,
        Err(error) if closed.left.is_empty() && closed.broken.is_none() => {
            ending.over(Exit::NotUsable);
            return Err(error);
        }
        Err(error) => {
            report.error = Some(crate::explain(&error));
            (Vec::new(), None)
        }
    };
    let by_itself = broken.is_none();
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
    }
    // What is left is to say so.
    ending.over(report.judge(&closed, went_on));
    if let Some(error) = &report.error {
        crate::complain(error);
    }
    report.stray_dma = emulated.and_then(Emulated::stop);
    let told = say_end(&report, &closed, by_itself, console);
    Ok((report, told))
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
        crate::complain(format_args!("not recovered: {}", headline(&error)));
    }
    Survived {
        revocation: watched.take(),
        recovery: device.recovery(),
    }
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
