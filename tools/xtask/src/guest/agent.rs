//! The agent: runs commands for the host, several at a time, and sends back what they write and how they end.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::{AGENT, exec};
use crate::protocol::{Exit, Frame, Function, Kind, PORT, Put, Ready, Run};

/// How long a killed command may take to go away.
const GRACE: Duration = Duration::from_secs(5);
/// How long to wait for the rest of the output once a command is over: a daemon that it left may hold the pipe.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Serves the host until it says power off.
pub(super) fn serve() -> ExitCode {
    match open_port().and_then(|port| Agent::new(port)?.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failstop: agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Opens the virtio-serial port, which appears some time after its driver.
fn open_port() -> io::Result<File> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(path) = find_port() {
            return OpenOptions::new().read(true).write(true).open(path);
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!(
                "no virtio-serial port named {PORT}"
            )));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn find_port() -> Option<PathBuf> {
    fs::read_dir("/sys/class/virtio-ports")
        .ok()?
        .flatten()
        .find_map(|entry| {
            let name = fs::read_to_string(entry.path().join("name")).ok()?;
            (name.trim() == PORT).then(|| Path::new("/dev").join(entry.file_name()))
        })
}

/// A thread that panicked left nothing half done that others could not live with.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The writing half, shared by the threads that answer.
#[derive(Clone)]
struct Answers(Arc<Mutex<File>>);

impl Answers {
    /// Sends a frame. A host that is gone is no reason to stop: the machine is about to be switched off.
    fn send(&self, frame: &Frame) {
        let mut port = lock(&self.0);
        if let Err(error) = frame.write(&mut *port) {
            eprintln!("failstop: agent: cannot answer: {error}");
        }
    }
}

struct Agent {
    requests: File,
    answers: Answers,
    /// The process group of each command that runs.
    groups: Arc<Mutex<HashMap<u32, Pid>>>,
}

impl Agent {
    fn new(port: File) -> io::Result<Self> {
        let answers = Answers(Arc::new(Mutex::new(port.try_clone()?)));
        Ok(Self {
            requests: port,
            answers,
            groups: Arc::default(),
        })
    }

    fn run(mut self) -> io::Result<()> {
        self.answers.send(&Frame::json(Kind::Ready, 0, &greeting()));
        while let Some(frame) = Frame::read(&mut self.requests)? {
            let id = frame.id;
            match frame.kind {
                Kind::Run => self.start(id, frame.parse()?),
                Kind::Kill => self.kill(id),
                Kind::Put => self.finish(id, put(&frame.payload)),
                Kind::KernelLog => {
                    let log = kernel_log().map(|payload| {
                        self.answers.send(&Frame {
                            kind: Kind::Stdout,
                            id,
                            payload,
                        })
                    });
                    self.finish(id, log);
                }
                Kind::PowerOff => power_off(),
                kind @ (Kind::Ready | Kind::Stdout | Kind::Stderr | Kind::Exit) => {
                    return Err(io::Error::other(format!("the host sent a {kind:?} frame")));
                }
            }
        }
        Ok(())
    }

    fn finish(&self, id: u32, result: io::Result<()>) {
        let exit = match result {
            Ok(()) => Exit {
                code: Some(0),
                ..Exit::default()
            },
            Err(error) => Exit {
                error: Some(error.to_string()),
                ..Exit::default()
            },
        };
        self.answers.send(&Frame::json(Kind::Exit, id, &exit));
    }

    /// Starts a command, and waits for it on a thread of its own. It is known before the next frame is read, so that an
    /// order to kill it finds it.
    fn start(&self, id: u32, run: Run) {
        let (answers, groups) = (self.answers.clone(), Arc::clone(&self.groups));
        let child = match spawn(&run) {
            Ok(child) => child,
            Err(error) => {
                return self.finish(
                    id,
                    Err(io::Error::other(format!("{}: {error}", run.argv.join(" ")))),
                );
            }
        };
        let group = Pid::from_raw(child.id().cast_signed());
        lock(&groups).insert(id, group);
        thread::spawn(move || {
            let exit = attend(id, &run, child, group, &answers);
            lock(&groups).remove(&id);
            answers.send(&Frame::json(Kind::Exit, id, &exit));
        });
    }

    fn kill(&self, id: u32) {
        if let Some(group) = lock(&self.groups).get(&id) {
            let _ = killpg(*group, Signal::SIGKILL);
        }
    }
}

fn greeting() -> Ready {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .into();
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime = uptime
        .split(' ')
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or_default();
    Ready {
        kernel,
        uptime,
        complaints: std::env::args().skip(2).collect(),
        functions: functions(),
    }
}

/// Every PCI function, as sysfs has it.
fn functions() -> Vec<Function> {
    names("/sys/bus/pci/devices".as_ref())
        .into_iter()
        .map(|address| {
            let folder = Path::new("/sys/bus/pci/devices").join(&address);
            let read = |name| {
                fs::read_to_string(folder.join(name))
                    .unwrap_or_default()
                    .trim()
                    .to_owned()
            };
            Function {
                vendor: read("vendor"),
                device: read("device"),
                group: names(&folder.join("iommu_group/devices")),
                address,
            }
        })
        .collect()
}

/// The names in a folder, sorted; none where there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Sends a command's output and waits for its end.
fn attend(id: u32, run: &Run, mut child: Child, group: Pid, answers: &Answers) -> Exit {
    let started = Instant::now();
    let stdout = forward(child.stdout.take(), Kind::Stdout, id, answers);
    let stderr = forward(child.stderr.take(), Kind::Stderr, id, answers);
    let limit = if run.timeout_ms == 0 {
        Duration::MAX
    } else {
        Duration::from_millis(run.timeout_ms)
    };
    let (status, timed_out) = wait(child, group, limit);
    for output in [stdout, stderr] {
        let _: Result<(), RecvTimeoutError> = output.recv_timeout(LAST_OUTPUT);
    }

    let milliseconds = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let code = status.and_then(|status| status.code());
    let signal = status.and_then(|status| status.signal());
    Exit {
        code,
        signal,
        timed_out,
        stuck: status.is_none(),
        error: None,
        milliseconds,
    }
}

fn spawn(run: &Run) -> io::Result<Child> {
    let (program, arguments) = run
        .argv
        .split_first()
        .ok_or_else(|| io::Error::other("a command needs words"))?;
    let mut command = if run.user.is_some() || run.memlock.is_some() {
        let mut command = Command::new(AGENT);
        command
            .args(exec::words(run.user, run.memlock))
            .arg(program);
        command
    } else {
        Command::new(program)
    };
    command
        .args(arguments)
        .envs(&run.env)
        .current_dir("/tmp")
        .process_group(0);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// Sends what comes out of `pipe`; the receiver is disconnected when it ends.
fn forward(
    pipe: Option<impl Read + Send + 'static>,
    kind: Kind,
    id: u32,
    answers: &Answers,
) -> Receiver<()> {
    let (done, closed) = channel();
    let answers = answers.clone();
    thread::spawn(move || {
        let Some(mut pipe) = pipe else { return };
        let mut buffer = [0; 32 << 10];
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            answers.send(&Frame {
                kind,
                id,
                payload: buffer[..length].to_vec(),
            });
        }
        // Dropping the sender is the message.
        drop(done);
    });
    closed
}

/// Waits up to `limit`, then kills the process group and waits for [`GRACE`] more; `None` when it is still there.
fn wait(mut child: Child, group: Pid, limit: Duration) -> (Option<ExitStatus>, bool) {
    let (done, ended) = channel();
    thread::spawn(move || done.send(child.wait()));
    match ended.recv_timeout(limit) {
        Ok(status) => (status.ok(), false),
        Err(_) => {
            let _ = killpg(group, Signal::SIGKILL);
            (ended.recv_timeout(GRACE).ok().and_then(Result::ok), true)
        }
    }
}

fn put(payload: &[u8]) -> io::Result<()> {
    let end = payload
        .iter()
        .position(|&byte| byte == b'\n')
        .ok_or_else(|| io::Error::other("no header line"))?;
    let header: Put = serde_json::from_slice(&payload[..end])?;
    let path = Path::new(&header.path);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, &payload[end + 1..])?;
    fs::set_permissions(path, fs::Permissions::from_mode(header.mode))
}

/// Every record that the kernel's log holds now, as /dev/kmsg gives them.
fn kernel_log() -> io::Result<Vec<u8>> {
    let mut device = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open("/dev/kmsg")?;
    let mut log = Vec::new();
    let mut record = [0; 8 << 10];
    loop {
        match device.read(&mut record) {
            Ok(0) => return Ok(log),
            Ok(length) => log.extend(&record[..length]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(log),
            // The record was overwritten before we came to it; the next read gives the next one.
            Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => {}
            Err(error) => return Err(error),
        }
    }
}

fn power_off() {
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("failstop: agent: cannot power off: {error}");
}
