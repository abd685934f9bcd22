//! The failstop command.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use failstop::pci::sysfs::Sysfs;

use exit::Exit;

mod bind;
mod exit;
mod info;
mod list;
#[cfg(test)]
mod testing;

/// A userspace driver for PCI network functions: whatever the device does, memory that it could
/// reach is never given back until it provably cannot reach it any more.
#[derive(Parser, Debug)]
#[command(
    version,
    after_help = "Exit codes: 0 clean, 2 usage, 3 device not usable."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Lists the machine's network functions
    List(list::ListArgs),
    /// Shows everything about one function, and whether it can be used
    Info(info::InfoArgs),
    /// Binds a function to vfio-pci, so that failstop can use it
    Bind(bind::BindArgs),
    /// Gives a function back to the kernel's driver
    Unbind(bind::BindArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.command, &Sysfs::system(), &mut io::stdout().lock()) {
        Ok(exit) => exit.into(),
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => Exit::Clean.into(),
        Err(error) => {
            eprintln!("failstop: {error:#}");
            Exit::NotUsable.into()
        }
    }
}

fn run(command: &Command, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    match command {
        Command::List(args) => list::list(args, sysfs, out),
        Command::Info(args) => info::info(args, sysfs, out),
        Command::Bind(args) => bind::bind(args, sysfs, out),
        Command::Unbind(args) => bind::unbind(args, sysfs, out),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let written = error.downcast_ref().map(io::Error::kind);
    let serialised = error
        .downcast_ref()
        .and_then(serde_json::Error::io_error_kind);
    written.or(serialised) == Some(io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nonsense_is_a_usage_error_that_says_what_is_expected() {
        let error = Cli::try_parse_from(["failstop", "bind", "eth0"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("like 0000:01:00.0"), "{error}");
    }

    #[test]
    fn unknown_command_is_a_usage_error() {
        let error = Cli::try_parse_from(["failstop", "frobnicate"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
