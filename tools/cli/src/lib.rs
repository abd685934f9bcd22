//! The `failstop` command: its `main`, and what can be asked of its command line from outside.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use failstop::pci::sysfs::Sysfs;

use exit::Exit;

mod bind;
mod breaking;
mod emulated;
mod ending;
mod exit;
mod flow;
mod info;
mod list;
mod replay;
mod run;
mod served;
mod supervised;
#[cfg(test)]
mod testing;
mod traffic;

/// A userspace driver for PCI network functions: whatever the device does, memory that it could
/// reach is never given back until it provably cannot reach it any more.
#[derive(Parser, Debug)]
#[command(
    name = "failstop",
    version,
    after_help = Exit::table()
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Opens a device, moves frames in loopback, tears all down and says what the accounts say
    Run(run::RunArgs),
    /// Lists the machine's network functions
    List(list::ListArgs),
    /// Shows everything about one function, and whether it can be used
    Info(info::InfoArgs),
    /// Binds a function to vfio-pci, so that failstop can use it
    Bind(bind::BindArgs),
    /// Gives a function back to the kernel's driver
    Unbind(bind::BindArgs),
    /// Plays a written scenario, as a test that fails leaves one, and ends as it does
    Replay(replay::ReplayArgs),
    /// Serves an emulated device on a socket; `failstop emulate --help` lists its faults
    #[command(name = emulated::SUBCOMMAND, disable_help_flag = true)]
    Emulate {
        /// The emulator's own arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

/// The command: does what the process's arguments say, and returns what it should exit with.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Run(args) = &cli.command
        && let Some(why) = args.contradiction()
    {
        Cli::command().error(ErrorKind::ValueValidation, why).exit();
    }
    if let Command::Emulate { arguments } = &cli.command {
        return emulated::emulate(arguments);
    }
    // Not locked: a run that ends at once has a thread of its own to say so.
    let mut out = Output(io::stdout());
    match run(&cli.command, &Sysfs::system(), &mut out) {
        Ok(exit) => exit.into(),
        Err(error) => {
            complain(explain(&error));
            match error.downcast_ref::<Usage>() {
                Some(_) => Exit::Usage.into(),
                None => Exit::NotUsable.into(),
            }
        }
    }
}

/// What was named makes no sense, whatever state devices are in.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Whether these arguments, the program's name first, make sense.
pub fn understands<I, T>(arguments: I) -> bool
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    Cli::try_parse_from(arguments).is_ok_and(|cli| match &cli.command {
        Command::Run(args) => args.contradiction().is_none(),
        _ => true,
    })
}

fn run(command: &Command, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    match command {
        Command::List(args) => list::list(args, sysfs, out),
        Command::Info(args) => info::info(args, sysfs, out),
        Command::Bind(args) => bind::bind(args, sysfs, out),
        Command::Unbind(args) => bind::unbind(args, sysfs, out),
        Command::Run(args) => run::run(args, out),
        Command::Replay(args) => replay::replay(args, out),
        Command::Emulate { .. } => Ok(Exit::Clean),
    }
}

/// An error and its causes, each said once: some errors repeat their cause in their own text, so
/// that they are whole where nobody asks for it.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Says something beside the output; whoever should read it may be gone.
fn complain(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "failstop: {text}");
}

/// Where a command's output goes. A reader that has seen enough changes nothing of what the command
/// does, nor of its exit code.
struct Output<W>(W);

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        readable(self.0.write(bytes)).map(|written| written.unwrap_or(bytes.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        readable(self.0.flush()).map(drop)
    }
}

/// What was done, none without a reader.
fn readable<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
        // Tried again by the caller.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
        Err(error) => Err(io::Error::other(format!(
            "standard output cannot be written: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_lists_every_command_and_every_exit_code() {
        let help = Cli::command().render_long_help().to_string();
        for command in Cli::command().get_subcommands() {
            let line = format!("\n  {} ", command.get_name());
            assert!(help.contains(&line), "{line}: {help}");
        }
        assert!(help.contains(&Exit::table()), "{help}");
    }

    #[test]
    fn nonsense_is_a_usage_error_that_says_what_is_expected() {
        let error = Cli::try_parse_from(["failstop", "bind", "eth0"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("like 0000:01:00.0"), "{error}");
    }

    #[test]
    fn a_cause_that_the_error_names_itself_is_said_once() {
        let cause = anyhow::anyhow!("no room");
        let error = cause.context("RQ 3: no room").context("port 0");
        assert_eq!(explain(&error), "port 0: RQ 3: no room");
    }

    /// A stream whose every use fails like this.
    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_reader_that_left_is_no_error_and_a_full_disk_is_named() {
        let mut out = Output(Failing(io::ErrorKind::BrokenPipe));
        writeln!(out, "{}", "long ".repeat(1000)).unwrap();
        out.flush().unwrap();
        let mut out = Output(Failing(io::ErrorKind::StorageFull));
        let error = writeln!(out, "text").unwrap_err().to_string();
        assert!(error.contains("standard output"), "{error}");
    }

    #[test]
    fn unknown_command_is_a_usage_error() {
        let error = Cli::try_parse_from(["failstop", "frobnicate"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
