//! Starting emulated devices: in this process, on threads, or in a process of their own.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;

use crate::control::{self, Client, ControlError, Reply};
use crate::faults::Spec;
use crate::server::handler::Service;
use crate::server::irqs::Notice;
use crate::server::port::{End, Handle, Port};
use crate::server::wire::Wire;
use crate::stats::{LogEntry, Stats};

/// The MAC address of a first port where nobody chooses one: locally administered.
pub const DEFAULT_MAC: [u8; 6] = [0x02, 0x00, 0x00, 0x82, 0x57, 0x60];
/// How long an emulator may take to end after it was told to.
const FAREWELL: Duration = Duration::from_secs(2);

/// What to emulate.
#[derive(Clone, Default, Debug)]
pub struct Options {
    /// The first port's MAC address; the second's ends in one more. [`DEFAULT_MAC`] when none.
    pub mac: Option<[u8; 6]>,
    /// What the first port is cabled to.
    pub cable: Cable,
    /// What goes wrong from the start, on the first port.
    pub faults: Vec<Spec>,
}

/// What a port is cabled to.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub enum Cable {
    /// Nothing: link only in PHY loopback.
    #[default]
    Nothing,
    /// A second port, served too.
    Pair,
    /// A Unix datagram socket, as QEMU's `-netdev dgram` speaks.
    Datagram {
        /// Where we listen.
        local: PathBuf,
        /// Where the other end does.
        remote: PathBuf,
    },
}

/// What keeps an emulator from starting or ending.
#[derive(Debug, Error)]
pub enum EmulatorError {
    /// A directory, socket, thread or process could not be made.
    #[error("the emulated device could not be started: {what}")]
    Start {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ControlError),
}

fn start(what: &'static str) -> impl FnOnce(io::Error) -> EmulatorError {
    move |source| EmulatorError::Start { what, source }
}

/// The MAC address of the port after one with this.
fn next_mac(mut mac: [u8; 6]) -> [u8; 6] {
    mac[5] = mac[5].wrapping_add(1);
    mac
}

/// Makes the ports that `options` describe, on these listeners: one, or two for a pair.
///
/// # Errors
///
/// [`EmulatorError::Start`].
pub fn ports(
    options: &Options,
    first: UnixListener,
    second: Option<UnixListener>,
) -> Result<Vec<(Port, Handle)>, EmulatorError> {
    let mac = options.mac.unwrap_or(DEFAULT_MAC);
    let (wire, other) = match &options.cable {
        Cable::Nothing => (Wire::none(), None),
        Cable::Pair => {
            let (a, b) = Wire::pair().map_err(start("the wire between two ports"))?;
            (a, Some(b))
        }
        Cable::Datagram { local, remote } => {
            let wire = Wire::datagram(local, remote).map_err(start("the datagram socket"))?;
            (wire, None)
        }
    };
    let mut service = Service::new(mac, wire).map_err(start("the first port"))?;
    for fault in &options.faults {
        let spec = fault.clone();
        service.device.add_fault(spec, &mut service.world);
    }
    let mut ports = vec![Port::new(service, first).map_err(start("the first port"))?];
    if let (Some(wire), Some(listener)) = (other, second) {
        let service = Service::new(next_mac(mac), wire).map_err(start("the second port"))?;
        ports.push(Port::new(service, listener).map_err(start("the second port"))?);
    }
    Ok(ports)
}

/// Serves ports until all of them were stopped, each on a thread of its own; `leash` is as in
/// [`control::serve`].
///
/// # Errors
///
/// [`EmulatorError::Start`] when a thread cannot be started.
pub fn serve(
    ports: Vec<(Port, Handle)>,
    control: Option<UnixListener>,
    leash: Option<Duration>,
) -> Result<Vec<JoinHandle<End>>, EmulatorError> {
    let handles: Vec<Handle> = ports.iter().map(|(_, handle)| handle.clone()).collect();
    if let Some(listener) = control {
        control::serve(listener, handles, leash).map_err(start("the control socket"))?;
    }
    ports
        .into_iter()
        .enumerate()
        .map(|(number, (port, handle))| {
            std::thread::Builder::new()
                .name(format!("port {number}"))
                .spawn(move || {
                    // A port whose handles are all gone ends; without a control socket this is the
                    // only one.
                    let _kept = handle;
                    port.serve().unwrap_or_else(|error| {
                        log::error!("port {number} cannot go on: {error}");
                        End::Died
                    })
                })
                .map_err(start("a port's thread"))
        })
        .collect()
}

/// Where the emulator runs.
#[derive(Debug)]
enum Place {
    Threads(Vec<JoinHandle<End>>),
    Process(Child),
}

/// A running emulator. Dropping it stops it and removes its directory.
#[derive(Debug)]
pub struct Running {
    place: Place,
    directory: TempDir,
    control: Client,
}

/// A directory that only we can enter, and the listeners in it.
struct Sockets {
    directory: TempDir,
    first: UnixListener,
    second: Option<UnixListener>,
    control: UnixListener,
}

const FIRST: &str = "port0";
const SECOND: &str = "port1";
const CONTROL: &str = "control";

impl Sockets {
    fn new(options: &Options) -> Result<Self, EmulatorError> {
        let directory = tempfile::Builder::new()
            .prefix("failstop-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(start("a directory for its sockets, where TMPDIR says"))?;
        let bind = |name: &str| {
            UnixListener::bind(directory.path().join(name)).map_err(start("its sockets"))
        };
        let second = match options.cable {
            Cable::Pair => Some(bind(SECOND)?),
            _ => None,
        };
        Ok(Self {
            first: bind(FIRST)?,
            second,
            control: bind(CONTROL)?,
            directory,
        })
    }
}

/// The emulator, as something to start.
#[derive(Debug)]
pub struct Emulator;

impl Emulator {
    /// Starts it on threads of this process. For tests: a fault that ends a server ends only its
    /// threads, and its death is no proof of anything.
    ///
    /// # Errors
    ///
    /// [`EmulatorError`].
    pub fn on_threads(options: &Options) -> Result<Running, EmulatorError> {
        let sockets = Sockets::new(options)?;
        let ports = ports(options, sockets.first, sockets.second)?;
        let threads = serve(ports, Some(sockets.control), None)?;
        let control = Client::connect(&sockets.directory.path().join(CONTROL))?;
        Ok(Running {
            place: Place::Threads(threads),
            directory: sockets.directory,
            control,
        })
    }

    /// Starts it in a process of its own: `program` with `arguments`, which must end in
    /// [`main_with`](crate::cli::main_with). The listening sockets are handed over as standard
    /// input and output, so that a client can connect as soon as this returns. The process ends when
    /// ours does, however that happens: it watches the control connection that we hold.
    ///
    /// # Errors
    ///
    /// [`EmulatorError`].
    pub fn in_process(
        program: &Path,
        arguments: &[OsString],
        options: &Options,
    ) -> Result<Running, EmulatorError> {
        let sockets = Sockets::new(options)?;
        let mut command = Command::new(program);
        command.args(arguments).arg("--inherited");
        command.arg("--remove").arg(sockets.directory.path());
        if let Some(mac) = options.mac {
            command.arg("--mac").arg(crate::cli::format_mac(mac));
        }
        match &options.cable {
            Cable::Nothing => {}
            Cable::Pair => {
                command
                    .arg("--pair")
                    .arg(sockets.directory.path().join(SECOND));
            }
            Cable::Datagram { local, remote } => {
                let mut wire = OsString::from("dgram:");
                wire.push(local);
                wire.push(":");
                wire.push(remote);
                command.arg("--wire").arg(wire);
            }
        }
        for fault in &options.faults {
            command.arg("--fault").arg(fault.to_string());
        }
        // The second listener is bound again by the other process.
        drop(sockets.second);
        let child = command
            .stdin(Stdio::from(OwnedFd::from(sockets.first)))
            .stdout(Stdio::from(OwnedFd::from(sockets.control)))
            // Ctrl-C at a terminal is for us, who end the device in order, not for the device.
            .process_group(0)
            .spawn()
            .map_err(start("its process"))?;
        // From here on a failure must not leave the process behind.
        let mut place = Place::Process(child);
        let leash = || -> Result<Client, ControlError> {
            let mut control = Client::connect(&sockets.directory.path().join(CONTROL))?;
            control.request("leash")?;
            Ok(control)
        };
        match leash() {
            Ok(control) => Ok(Running {
                place,
                directory: sockets.directory,
                control,
            }),
            Err(error) => {
                place.end();
                Err(error.into())
            }
        }
    }

    /// Starts it in a process of its own, from this program's own executable: `arguments` lead it
    /// to [`main_with`](crate::cli::main_with) (`["emulate"]` in `failstop`).
    ///
    /// # Errors
    ///
    /// [`EmulatorError`].
    pub fn spawn(arguments: &[OsString], options: &Options) -> Result<Running, EmulatorError> {
        // By this name the program is found even when its file was replaced meanwhile.
        Self::in_process(Path::new("/proc/self/exe"), arguments, options)
    }
}

impl Running {
    /// The socket of the first port.
    #[must_use]
    pub fn socket_path(&self) -> PathBuf {
        self.directory.path().join(FIRST)
    }

    /// The socket of the second port of a pair.
    #[must_use]
    pub fn second_socket_path(&self) -> PathBuf {
        self.directory.path().join(SECOND)
    }

    /// The control socket, for others.
    #[must_use]
    pub fn control_path(&self) -> PathBuf {
        self.directory.path().join(CONTROL)
    }

    /// The process that the emulator runs in, unless that is ours.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        match &self.place {
            Place::Threads(_) => None,
            Place::Process(child) => Some(child.id()),
        }
    }

    /// That process, as who started it has it.
    pub fn child(&mut self) -> Option<&mut Child> {
        match &mut self.place {
            Place::Threads(_) => None,
            Place::Process(child) => Some(child),
        }
    }

    /// Sends a request to the control socket.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn request(&mut self, request: &str) -> Result<Reply, ControlError> {
        self.control.request(request)
    }

    /// Everything that the first port counts.
    ///
    /// # Errors
    ///
    /// [`ControlError`], also when the emulator has ended.
    pub fn stats(&mut self) -> Result<Stats, ControlError> {
        self.control.stats()
    }

    /// Everything that the second port of a pair counts.
    ///
    /// # Errors
    ///
    /// [`ControlError`], also when there is none or the emulator has ended.
    pub fn second_stats(&mut self) -> Result<Stats, ControlError> {
        self.control.stats_of("port 1 stats")
    }

    /// Makes the first port misbehave, as [`crate::faults::TABLE`] lists.
    ///
    /// # Errors
    ///
    /// [`ControlError`]; `Refused` for a fault that does not exist.
    pub fn fault(&mut self, spec: &str) -> Result<(), ControlError> {
        self.control.fault(spec)
    }

    /// The latest accesses that faults of the first port made, oldest first.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn log(&mut self, lines: usize) -> Result<Vec<LogEntry>, ControlError> {
        let request = format!("log {lines}");
        match self.request(&request)? {
            Reply::Log(log) => Ok(log),
            other => Err(ControlError::Refused {
                reason: format!("it answered {other:?}"),
                request,
            }),
        }
    }

    /// Puts a mark into the first port's log; `word` is one word.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn phase(&mut self, word: &str) -> Result<(), ControlError> {
        self.request(&format!("phase {word}")).map(drop)
    }

    /// Switches the first port's device off and on. Its faults stay, and so do its counters.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn power_cycle(&mut self) -> Result<(), ControlError> {
        self.control.power_cycle()
    }

    /// Ends all misbehaviour of the first port.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn clear_faults(&mut self) -> Result<(), ControlError> {
        self.control.clear_faults()
    }

    /// Sets every counter of the first port to 0.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn reset_counters(&mut self) -> Result<(), ControlError> {
        self.control.reset_counters()
    }

    /// Tells the first port's client of an error on the bus, or asks it for the function.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn notice(&mut self, notice: Notice) -> Result<(), ControlError> {
        self.control.notice(notice)
    }

    /// Plugs or pulls the first port's cable.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn set_link(&mut self, up: bool) -> Result<(), ControlError> {
        self.request(if up { "link up" } else { "link down" })
            .map(drop)
    }

    /// Ends the emulator and removes its directory.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.control.request("quit");
        self.place.end();
    }
}

impl Place {
    fn end(&mut self) {
        match self {
            Self::Threads(threads) => {
                for thread in threads.drain(..) {
                    if thread.join().is_err() {
                        log::error!("a port's thread panicked");
                    }
                }
            }
            Self::Process(child) => {
                let patience = Instant::now() + FAREWELL;
                while Instant::now() < patience {
                    if !matches!(child.try_wait(), Ok(None)) {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                log::warn!("the emulator did not end in time and is killed");
                let _ended = child.kill();
                let _ended = child.wait();
            }
        }
    }
}
