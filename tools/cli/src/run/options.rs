//! What can be asked of a run.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use failstop::name::{DeviceName, NotADevice};
use failstop::open::IommuChoice;

use crate::emulated::EmulatedName;
use crate::ending;
use crate::traffic::SHORTEST;

/// Options of `failstop run`.
#[derive(Args, Debug)]
#[command(after_help = after_help())]
pub(crate) struct RunArgs {
    /// The device: a PCI address (0000:01:00.0), vfio-user:PATH, or `emu:82576[,fault=NAME[:ARGS][@WHEN]]...`
    #[arg(default_value = "emu:82576")]
    pub(super) device: Target,
    /// How long to move frames, in seconds: 0 to 86400
    #[arg(long, default_value_t = 5.0, value_parser = seconds)]
    seconds: f64,
    /// Break the device after so many seconds, recover it, and go on: the gap does not count as time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    break_after: Option<f64>,
    /// Bytes of each frame, 60 to 9724, without the frame check sequence: 1514 is a full standard frame
    #[arg(long, default_value_t = SHORTEST, value_parser = clap::value_parser!(u32).range(i64::from(SHORTEST)..=9724))]
    pub(super) size: u32,
    /// Queue pairs, 1 to 16, each moved by a thread of its own: what comes is spread over them by RSS
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(super) queues: u32,
    /// How to reach the IOMMU of a PCI function: auto, container or iommufd
    #[arg(long, default_value = "auto")]
    pub(super) iommu: IommuChoice,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(super) json: bool,
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
         Past it, or by a second signal that comes {} s after the first or later, it ends at once, says what state the device \
         is in, and reports memory that the device may still reach as kept (exit code 4). Once the device is closed, such a \
         second signal ends what is left to be written, with the exit code of the report. A SIGHUP that was ignored when the \
         run began, as by nohup, stays ignored.",
        ending::LIMIT.as_secs(),
        ending::GRACE.as_secs_f64()
    )
}
