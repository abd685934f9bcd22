//! Emulated devices that the tool starts itself: `emu:82576[,fault=NAME[:ARGS][@WHEN]]...`.

use std::ffi::OsString;
use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context;
use failstop::pci::peer::Peer;
use failstop::pci::transport::Transport;
use failstop::pci::transport::vfio_user::{Client, Options};
use failstop_emulator::faults::Spec;
use failstop_emulator::{Emulator, Options as EmulatorOptions, Running};

/// The subcommand by which the tool becomes the emulator.
pub(crate) const SUBCOMMAND: &str = "emulate";

/// An emulated device, as it is written on the command line.
#[derive(Clone, Debug)]
pub(crate) struct EmulatedName {
    text: String,
    faults: Vec<Spec>,
}

impl FromStr for EmulatedName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        if parts.next() != Some("emu:82576") {
            return Err(format!(
                "`{text}` is no device that is emulated here; there is emu:82576"
            ));
        }
        let fault = |part: &str| match part.strip_prefix("fault=") {
            Some(fault) => fault.parse::<Spec>().map_err(|error| error.to_string()),
            None => Err(format!(
                "`{part}` is no option of an emulated device; write fault=NAME[:ARGS][@WHEN]"
            )),
        };
        let faults = parts.map(fault).collect::<Result<_, _>>()?;
        Ok(Self {
            text: text.to_owned(),
            faults,
        })
    }
}

impl fmt::Display for EmulatedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A running emulated device, in a process of its own.
pub(crate) struct Emulated {
    running: Running,
}

impl Emulated {
    /// Starts it.
    pub(crate) fn start(name: &EmulatedName) -> anyhow::Result<Self> {
        let options = EmulatorOptions {
            faults: name.faults.clone(),
            ..EmulatorOptions::default()
        };
        let running = Emulator::spawn(&[OsString::from(SUBCOMMAND)], &options)
            .context("the emulated device did not start")?;
        Ok(Self { running })
    }

    /// Reaches it; since we started its process, its end releases what it had (R3).
    pub(crate) fn transport(&mut self) -> anyhow::Result<Arc<dyn Transport>> {
        let peer = self.running.child().map(Peer::of).transpose();
        let options = Options {
            peer: peer
                .context("the emulated device's process cannot be watched")?
                .map(Arc::new),
            ..Options::default()
        };
        Ok(Client::connect(self.running.socket_path(), options)?)
    }

    /// Ends it; how many accesses outside its mappings it tried, if it still says.
    pub(crate) fn stop(mut self) -> Option<u64> {
        let stats = self.running.stats();
        self.running.stop();
        match stats {
            Ok(stats) => Some(stats.stray.total()),
            Err(error) => {
                crate::complain(format_args!(
                    "the emulated device does not say what it did: {error}"
                ));
                None
            }
        }
    }
}

/// Becomes the emulator.
pub(crate) fn emulate(arguments: &[OsString]) -> ExitCode {
    failstop_emulator::cli::main_with(
        std::iter::once(OsString::from("failstop emulate")).chain(arguments.iter().cloned()),
    )
}
