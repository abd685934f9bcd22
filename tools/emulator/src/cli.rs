//! The command line of `failstop-emulator`, and of `failstop`'s subcommand `emulate`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use env_logger::Env;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use thiserror::Error;

use crate::emulator::{self, Cable, Options};
use crate::faults::Spec;
use crate::server::port::End;

/// How long whoever hands us its sockets may take to take the leash.
const LEASH: Duration = Duration::from_secs(30);

/// Exit code of a command line that makes no sense, as clap's.
const USAGE: u8 = 2;
/// Exit code where the device could not be served.
const NOT_SERVED: u8 = 3;

/// A place where no socket can be made.
#[derive(Debug, Error)]
#[error("no socket can be made at {}: {why}", path.display())]
struct NoSocket {
    path: PathBuf,
    why: String,
}

/// An emulated Intel 82576 on a vfio-user socket.
///
/// Attach it to QEMU 10.1 or newer with
/// -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"PATH"}}'
/// and -object memory-backend-memfd,share=on for the guest's memory.
#[derive(Debug, Parser)]
#[command(name = "failstop-emulator", version, after_long_help = crate::faults::help())]
struct Arguments {
    /// Serve the device on this Unix socket.
    #[arg(long, value_name = "PATH", required_unless_present = "inherited")]
    socket: Option<PathBuf>,
    /// Take requests (stats, log N, fault NAME, link up|down, quit ...) on this Unix socket.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// The MAC address.
    #[arg(long, value_name = "xx:xx:xx:xx:xx:xx", value_parser = parse_mac)]
    mac: Option<[u8; 6]>,
    /// Cable the port to a Unix datagram socket, as QEMU's -netdev dgram speaks.
    #[arg(long, value_name = "dgram:LOCAL:REMOTE", value_parser = parse_wire, conflicts_with = "pair")]
    wire: Option<Cable>,
    /// Serve a second device on this socket, cabled to the first.
    #[arg(long, value_name = "PATH")]
    pair: Option<PathBuf>,
    /// Misbehave: NAME[:ARG...][@TRIGGER], as listed below.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<Spec>,
    /// Standard input is the listening socket, standard output the control socket.
    #[arg(long, hide = true, conflicts_with_all = ["socket", "control"])]
    inherited: bool,
    /// Remove this directory of sockets at the end.
    #[arg(long, hide = true, value_name = "PATH", requires = "inherited")]
    remove: Option<PathBuf>,
}

/// Runs the emulator as `arguments` say, the program's name first, until it is told to stop.
/// Returns what the process should exit with: 0 when it was stopped, 1 when it died by the fault
/// `server-dies`, 2 for a command line that makes no sense, or names a place where no socket can be
/// made, and 3 when the device could not be served.
pub fn main_with<I, T>(arguments: I) -> ExitCode
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // There is nobody to tell when standard error is closed.
            let _closed = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    // A second logger of the same process is no reason to fail.
    let _already =
        env_logger::Builder::from_env(Env::default().default_filter_or("warn")).try_init();
    let remove = arguments.remove.clone();
    let result = run(arguments);
    if let Some(directory) = remove {
        remove_sockets(&directory);
    }
    match result {
        Ok(End::Stopped) => ExitCode::SUCCESS,
        Ok(End::Died) => ExitCode::FAILURE,
        Err(error) => {
            // Whoever should read it may be gone.
            let _ = writeln!(io::stderr(), "failstop-emulator: {error:#}");
            ExitCode::from(if error.is::<NoSocket>() {
                USAGE
            } else {
                NOT_SERVED
            })
        }
    }
}

/// Whether these arguments, the program's name first, make sense.
pub fn understands<I, T>(arguments: I) -> bool
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    Arguments::try_parse_from(arguments).is_ok()
}

/// Sockets that were made here, and go with whoever made them, however it ends.
#[derive(Default)]
struct Bound(Vec<PathBuf>);

impl Bound {
    fn bind(&mut self, path: &Path) -> Result<UnixListener, NoSocket> {
        if self.0.iter().any(|bound| bound == path) {
            return Err(NoSocket {
                path: path.to_owned(),
                why: "this command makes another one of that name; each needs its own".into(),
            });
        }
        let listener = listen(path)?;
        self.0.push(path.to_owned());
        Ok(listener)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        for path in &self.0 {
            // Somebody else may have removed it already.
            let _gone = std::fs::remove_file(path);
        }
    }
}

/// Becomes true at a signal that asks for the end. Who is started by another program is ended by that one.
fn asked_to_end(inherited: bool) -> anyhow::Result<Arc<AtomicBool>> {
    let asked = Arc::new(AtomicBool::new(false));
    let signals: &[i32] = if inherited {
        &[]
    } else {
        &[SIGINT, SIGTERM, SIGHUP]
    };
    for &signal in signals {
        flag::register(signal, asked.clone()).context("signals cannot be waited for")?;
    }
    Ok(asked)
}

fn run(arguments: Arguments) -> anyhow::Result<End> {
    let mut bound = Bound::default();
    let asked = asked_to_end(arguments.inherited)?;
    let (first, control) = if arguments.inherited {
        (
            inherited(io::stdin().as_fd()).context("standard input is no socket")?,
            Some(inherited(io::stdout().as_fd()).context("standard output is no socket")?),
        )
    } else {
        let socket = arguments.socket.context("no socket was named")?;
        (
            bound.bind(&socket)?,
            arguments
                .control
                .as_deref()
                .map(|path| bound.bind(path))
                .transpose()?,
        )
    };
    let second = arguments
        .pair
        .as_deref()
        .map(|path| bound.bind(path))
        .transpose()?;
    let options = Options {
        mac: arguments.mac,
        cable: if second.is_some() {
            Cable::Pair
        } else {
            arguments.wire.unwrap_or_default()
        },
        faults: arguments.fault,
    };
    let mut ports = emulator::ports(&options, first, second)?;
    for (port, _) in &mut ports {
        port.allow_fork();
    }
    let leash = arguments.inherited.then_some(LEASH);
    let threads = emulator::serve(ports, control, leash)?;
    // The first port that dies takes the process with it; else all are waited for.
    let mut end = End::Stopped;
    let mut threads = threads;
    while !threads.is_empty() && end == End::Stopped && !asked.load(Ordering::Relaxed) {
        let (ended, running) = threads
            .into_iter()
            .partition::<Vec<_>, _>(|t| t.is_finished());
        for thread in ended {
            end = match thread.join() {
                Ok(End::Stopped) => end,
                Ok(End::Died) | Err(_) => End::Died,
            };
        }
        threads = running;
        if !threads.is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(end)
}

/// Binds a socket; a file that nobody listens on any more is replaced.
fn listen(path: &Path) -> Result<UnixListener, NoSocket> {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixStream;

    let refused = |why: String| NoSocket {
        path: path.to_owned(),
        why,
    };
    match std::fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => {
            return Err(refused("a directory is there; name a file in it".into()));
        }
        Ok(there) if !there.file_type().is_socket() => {
            return Err(refused(
                "a file that is no socket is there, and stays; remove it, or name another".into(),
            ));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(refused("somebody listens there; name another".into()));
        }
        Ok(_) => std::fs::remove_file(path)
            .map_err(|why| refused(format!("nobody listens there, and it stays: {why}")))?,
        // Not there, or not to be looked at: the kernel says.
        Err(_) => {}
    }
    UnixListener::bind(path).map_err(|why| {
        refused(match why.kind() {
            io::ErrorKind::NotFound => format!("{why}; is the directory there?"),
            _ => why.to_string(),
        })
    })
}

fn inherited(fd: std::os::fd::BorrowedFd<'_>) -> io::Result<UnixListener> {
    let fd: OwnedFd = fd.try_clone_to_owned()?;
    let kind = rustix::net::sockopt::socket_type(&fd)?;
    if kind != rustix::net::SocketType::STREAM {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(UnixListener::from(fd))
}

fn remove_sockets(directory: &Path) {
    // Our parent removes them too; whoever is first, the other finds nothing.
    let _gone = std::fs::remove_dir_all(directory);
}

/// Writes a MAC address as [`main_with`] reads it.
#[must_use]
pub fn format_mac(mac: [u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = parts
            .next()
            .filter(|part| part.len() == 2)
            .and_then(|part| u8::from_str_radix(part, 16).ok())
            .ok_or_else(|| "a MAC address is six hexadecimal bytes with colons".to_owned())?;
    }
    if parts.next().is_some() {
        return Err("a MAC address has six bytes".to_owned());
    }
    if mac[0] & 1 != 0 || mac == [0; 6] {
        return Err("this is no address of a single station".to_owned());
    }
    Ok(mac)
}

fn parse_wire(text: &str) -> Result<Cable, String> {
    let paths = text
        .strip_prefix("dgram:")
        .and_then(|rest| rest.split_once(':'))
        .filter(|(local, remote)| !local.is_empty() && !remote.is_empty());
    let (local, remote) = paths.ok_or("a wire is of the form dgram:LOCAL:REMOTE")?;
    Ok(Cable::Datagram {
        local: local.into(),
        remote: remote.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_long_help_lists_every_fault() {
        use clap::CommandFactory;
        let help = Arguments::command().render_long_help().to_string();
        for entry in crate::faults::TABLE {
            assert!(help.contains(entry.text), "{}", entry.name);
        }
    }

    #[test]
    fn a_file_in_the_way_of_a_socket_stays_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes");
        std::fs::write(&path, "kept").unwrap();
        let said = listen(&path).unwrap_err().to_string();
        assert!(said.contains("notes: a file that is no socket"), "{said}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
    }

    #[test]
    fn a_socket_that_nobody_listens_on_is_replaced_and_one_in_use_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(listen(&path).unwrap());
        let listener = listen(&path).unwrap();
        let said = listen(&path).unwrap_err().to_string();
        assert!(said.contains("somebody listens"), "{said}");
        drop(listener);
    }

    #[test]
    fn two_sockets_of_one_name_are_refused_and_none_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut bound = Bound::default();
        bound.bind(&path).unwrap();
        let said = bound.bind(&path).unwrap_err().to_string();
        assert!(said.contains("each needs its own"), "{said}");
        drop(bound);
        assert!(!path.exists());
    }

    #[test]
    fn a_mac_survives_being_written_and_read() {
        let mac = [0x02, 0xAB, 0, 1, 2, 3];
        assert_eq!(parse_mac(&format_mac(mac)), Ok(mac));
    }

    #[test]
    fn mac_addresses_that_are_none_are_refused() {
        for text in [
            "",
            "1:2:3:4:5:6",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "02:00:00:00:00:00:00:00",
        ] {
            assert!(parse_mac(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wire_needs_both_ends() {
        assert!(parse_wire("dgram:/a:/b").is_ok());
        assert!(parse_wire("dgram:/a").is_err());
        assert!(parse_wire("dgram:/a:").is_err());
        assert!(parse_wire("tap0").is_err());
    }
}
