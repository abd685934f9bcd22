//! How soon a broken device's bus mastering is verified off, and how long the rest takes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{Device, Options};
use failstop::dma::region::Pool;
use failstop::ladder::{RevocationReport, Step, Word};
use failstop::objects::{Mr, Pd};
use failstop::owned::Owned;
use failstop::pci::config::{Command, offset};
use failstop::pci::id::Generation;
use failstop::pci::transport::{AccessError, Kind, RegionIndex, Transport};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::{Cause, Lifecycle};
use libtest_mimic::Failed;

use super::life::Waits;
use super::timed::{Timed, nanos};
use super::{Figure, median, micros};
use crate::fixture::{Fixture, ensure_eq, receive, self_addressed, send};

/// What the step may cost, in pairs of bare accesses.
const LIMIT: f64 = 1.2;
/// What a break may cost of our own time until traffic passes again, in microseconds.
const OWN: f64 = 5000.0;

/// Until everybody sleeps, the device's threads too.
const ASLEEP: Duration = Duration::from_millis(2);

/// Mappings of one port: the frames, and a ring for each direction.
const PORT: usize = 3;

/// Breaks and recovers the device `rounds` times with each number of live mappings.
///
/// # Errors
///
/// When the device cannot be opened, or a round does not end as it should.
pub fn run(
    fixture: &Fixture,
    on: &str,
    mappings: &[usize],
    rounds: usize,
) -> Result<Vec<Figure>, Failed> {
    let mut figures = Vec::new();
    for &mappings in mappings {
        // Mapping thousands of files takes seconds under an emulator of instructions, a round without them none.
        let rounds = if mappings <= PORT {
            16 * rounds
        } else {
            rounds
        };
        figures.extend(with(fixture, on, mappings.max(PORT), rounds)?);
    }
    Ok(figures)
}

fn with(
    fixture: &Fixture,
    on: &str,
    mappings: usize,
    rounds: usize,
) -> Result<Vec<Figure>, Failed> {
    let transport = Arc::new(Timed::new(fixture.transport()?, nanos));
    let config = Config {
        loopback: true,
        ..Config::default()
    };
    let clock = Arc::new(Waits::default());
    let options = Options {
        clock: clock.clone(),
        ..Options::default()
    };
    let device = Device::open_with(transport.clone(), &config, options)?;
    let mut port = Port::open(&device, &small())?;
    let mut measured = Measured::default();
    for _ in 0..rounds {
        let pd = device.alloc_pd()?;
        let regions = fill(&device, &pd, mappings)?;
        measured.bare.push(bare(&transport)?);
        thread::sleep(ASLEEP);
        let _ = clock.take();
        measured.broken(&device, &transport)?;
        drop(regions);
        drop(pd);
        measured.recovered(&device, &transport)?;
        measured.goes_on(&device, &mut port, &transport)?;
        measured.add_up(clock.take());
        ensure_eq(port.carried().times, measured.rounds, "times carried")?;
    }
    drop(port);
    drop(device.close());
    let mut figures = measured.figures(&format!("{on}, {mappings} mappings"));
    // What more than a port's mappings take is in proportion to them; in a guest, an emulated processor takes its time.
    let limited = mappings <= PORT && transport.kind() == Kind::VfioUser;
    if let (Some(own), true) = (figures.last_mut(), limited) {
        own.limit = Some(OWN);
    }
    Ok(figures)
}

/// A port of few frames: its memory is one mapping, however large.
fn small() -> PortConfig {
    PortConfig {
        rx_entries: 64,
        tx_entries: 64,
        spare_frames: 64,
        ..PortConfig::default()
    }
}

/// Registers regions of one page until so many mappings are live.
fn fill(
    device: &Device,
    pd: &Owned<Pd>,
    mappings: usize,
) -> Result<Vec<(Owned<Mr>, Pool)>, Failed> {
    let mut regions = Vec::new();
    while (device.ledger().totals().live_mappings as usize) < mappings {
        regions.push(pd.register(2, 2048)?);
    }
    Ok(regions)
}

/// Two bare accesses: the command word written without Bus Master Enable, and read back. Made as the
/// ladder's are, by a thread that slept until then, on a function that was bus master: turning it
/// off costs QEMU two milliseconds, writing the same word again a tenth of that.
fn bare(transport: &Arc<Timed>) -> Result<f64, Failed> {
    let (index, at) = (RegionIndex::Config, u64::from(offset::COMMAND));
    let mut word = [0; 2];
    transport.read(Generation::LADDER, index, at, &mut word)?;
    let sleeping = Arc::new(Lifecycle::default());
    let (lifecycle, transport) = (sleeping.clone(), transport.clone());
    let on = word;
    let mut off = (u16::from_le_bytes(word) & !Command::BUS_MASTER.bits()).to_le_bytes();
    let sleeper = thread::spawn(move || -> Result<f64, AccessError> {
        let _ = lifecycle.wait_for_break();
        let start = Instant::now();
        transport.write(Generation::LADDER, index, at, &off)?;
        transport.read(Generation::LADDER, index, at, &mut off)?;
        let took = start.elapsed();
        // No queue had anything to do meanwhile.
        transport.write(Generation::LADDER, index, at, &on)?;
        Ok(micros(took))
    });
    thread::sleep(ASLEEP);
    sleeping.mark_broken(Cause::User);
    Ok(sleeper.join().map_err(|_| "the sleeper panicked")??)
}

#[derive(Default)]
struct Measured {
    rounds: u64,
    bare: Vec<f64>,
    wake: Vec<f64>,
    steps: BTreeMap<&'static str, Vec<f64>>,
    ladder: Vec<f64>,
    ladder_outside: Vec<f64>,
    recovery: Vec<f64>,
    recovery_outside: Vec<f64>,
    traffic: Vec<f64>,
    traffic_outside: Vec<f64>,
    waited: Vec<f64>,
    /// From the break to traffic.
    whole: Vec<f64>,
    own: Vec<f64>,
}

impl Measured {
    fn broken(&mut self, device: &Device, transport: &Timed) -> Result<(), Failed> {
        let _ = transport.take();
        let start = Instant::now();
        device.break_now(Cause::User);
        let report: RevocationReport = device.revocation().ok_or("no report")?;
        self.ladder.push(micros(start.elapsed()));
        self.ladder_outside.push(outside(transport));
        ensure_eq(report.verdict, Word::Revoked, &report.to_string())?;
        for step in &report.steps {
            let times = self.steps.entry(step.step.name()).or_default();
            times.push(micros(step.took));
        }
        self.wake.push(micros(report.wake));
        Ok(())
    }

    fn recovered(&mut self, device: &Device, transport: &Timed) -> Result<(), Failed> {
        let _ = transport.take();
        let start = Instant::now();
        device.recover()?;
        self.recovery.push(micros(start.elapsed()));
        self.recovery_outside.push(outside(transport));
        self.rounds += 1;
        Ok(())
    }

    /// The port goes on with the new life: until a frame that it sent has come back.
    fn goes_on(
        &mut self,
        device: &Device,
        port: &mut Port,
        transport: &Timed,
    ) -> Result<(), Failed> {
        let bytes = self_addressed(device, 60, 1);
        let _ = transport.take();
        let start = Instant::now();
        send(port, &bytes)?;
        ensure_eq(receive(port)?, bytes, "the frame")?;
        self.traffic.push(micros(start.elapsed()));
        self.traffic_outside.push(outside(transport));
        Ok(())
    }

    /// The round as a whole, in which the device was waited for so many microseconds.
    fn add_up(&mut self, waited: f64) {
        let latest = |times: &[f64]| times.last().copied().unwrap_or(f64::NAN);
        let parts = [&self.ladder, &self.recovery, &self.traffic];
        let whole: f64 = parts.map(|times| latest(times)).iter().sum();
        let outside = [
            &self.ladder_outside,
            &self.recovery_outside,
            &self.traffic_outside,
        ];
        let outside: f64 = outside.map(|times| latest(times)).iter().sum();
        self.waited.push(waited);
        self.whole.push(whole);
        self.own.push(whole - outside - waited);
    }

    /// Our own time in a recovery comes last.
    fn figures(mut self, on: &str) -> Vec<Figure> {
        let rounds = format!("medians of {} rounds", self.rounds);
        let off = self
            .steps
            .remove(Step::BusMasterOff.name())
            .unwrap_or_default();
        let name = format!("ladder: broken to bus master verified off ({on})");
        let (off, bare) = (median(off), median(self.bare));
        let mut figures = vec![
            Figure::ratio(name, "us", off, bare, LIMIT)
                .note(format!("beside two bare config accesses; {rounds}")),
            Figure::plain(
                format!("ladder: its thread wakes up ({on})"),
                "us",
                median(self.wake),
            ),
        ];
        for (step, times) in self.steps {
            figures.push(Figure::plain(
                format!("ladder: {step} ({on})"),
                "us",
                median(times),
            ));
        }
        let share = |whole: f64, outside: f64| {
            format!(
                "{:.0} % of it in calls of the kernel or the device",
                100.0 * outside / whole
            )
        };
        for (what, whole, outside) in [
            ("ladder: break to verdict", self.ladder, self.ladder_outside),
            ("recovery", self.recovery, self.recovery_outside),
            (
                "recovery: to traffic again",
                self.traffic,
                self.traffic_outside,
            ),
        ] {
            let (whole, outside) = (median(whole), median(outside));
            figures.push(
                Figure::plain(format!("{what} ({on})"), "us", whole).note(share(whole, outside)),
            );
        }
        let name = format!("recovery: our own time, break to traffic again ({on})");
        let own = Figure::plain(name, "us", median(self.own)).note(format!(
            "of {:.0} us: without calls of the kernel or the device, and {:.0} us of waits for the device",
            median(self.whole),
            median(self.waited)
        ));
        figures.push(own);
        figures
    }
}

/// Microseconds spent in the transport's calls.
fn outside(transport: &Timed) -> f64 {
    transport.take() as f64 / 1e3
}
