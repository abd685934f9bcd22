//! A guest that runs.

use std::collections::HashMap;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;

use super::accelerator::Accelerator;
use super::boot::{Boot, INITRAMFS};
use super::kernel_log::KernelLog;
use super::qmp::Qmp;
use crate::protocol::{Exit, Frame, Kind, Put, Ready, Run};

/// How long after a command's own limit the guest may take to say so, before it counts as hung.
const GRACE: Duration = Duration::from_secs(30);

/// A virtual machine that takes commands. Dropping it kills it.
///
/// Several threads may use it at once; their commands run side by side.
#[derive(Debug)]
pub struct Guest {
    greeting: Ready,
    accelerator: Accelerator,
    boot_time: Duration,
    requests: Mutex<UnixStream>,
    answers: Routes,
    next: AtomicU32,
    keeper: Keeper,
    folder: TempDir,
}

/// Where the frames of each command go.
type Routes = Arc<Mutex<HashMap<u32, Sender<Frame>>>>;

/// How a guest's life ended.
#[derive(Debug)]
pub struct Ended {
    /// What its kernel logged.
    pub kernel_log: KernelLog,
    /// What came out of its serial console.
    pub console: String,
}

/// A command that runs in a guest.
#[derive(Debug)]
pub struct Running<'a> {
    guest: &'a Guest,
    id: u32,
    frames: Receiver<Frame>,
    /// When to stop believing that the guest is alive.
    deadline: Option<Instant>,
    what: String,
}

/// A command that ended.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// How.
    pub exit: Exit,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Both, in the order in which they arrived.
    pub output: Vec<u8>,
}

impl Finished {
    /// Whether it exited with 0.
    pub fn success(&self) -> bool {
        self.exit.code == Some(0)
    }

    /// Its output and how it ended, for a person.
    pub fn text(&self) -> String {
        format!(
            "{}[{}]",
            String::from_utf8_lossy(&self.output),
            self.exit.describe()
        )
    }
}

impl Exit {
    /// How it ended, in words.
    pub fn describe(&self) -> String {
        let mut text = match (self.code, self.signal, &self.error) {
            (_, _, Some(error)) => format!("not started: {error}"),
            (Some(code), ..) => format!("exit code {code}"),
            (_, Some(signal), _) => format!("killed by signal {signal}"),
            _ => "did not end".into(),
        };
        if self.timed_out {
            text = format!("timed out after {} ms; {text}", self.milliseconds);
        }
        text
    }
}

impl Guest {
    /// Starts QEMU by `command` and waits up to `limit` for the agent to call on `listener`.
    pub(super) fn start(
        boot: &Boot,
        command: Command,
        listener: UnixListener,
        folder: TempDir,
        limit: Duration,
        accelerator: Accelerator,
    ) -> Result<Self> {
        let started = Instant::now();
        let log = fs::File::create(folder.path().join("qemu.log"))?;
        let keeper = Keeper::start(command, log, boot.lifetime)?;
        let result = greet(&listener, &keeper, started + limit).and_then(|(port, greeting)| {
            boot.topology.verify(&greeting.functions)?;
            Ok((port, greeting))
        });
        let (port, greeting) = result.with_context(|| {
            let (kernel, topology) = (boot.kernel, boot.topology.name);
            format!("the guest ({kernel} kernel, topology {topology}, {accelerator}) did not come up\n{}", story(folder.path()))
        })?;
        let boot_time = started.elapsed();
        // QEMU has read it. What else is in the folder is small, should this process be killed and leave it behind.
        fs::remove_file(folder.path().join(INITRAMFS)).context("cannot remove the initramfs")?;
        let answers = Routes::default();
        let mut reader = port.try_clone()?;
        let routes = Arc::clone(&answers);
        thread::spawn(move || {
            while let Ok(Some(frame)) = Frame::read(&mut reader) {
                deliver(&routes, frame);
            }
            // Dropping the senders tells everyone who waits.
            routes
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
        });
        let (requests, next) = (Mutex::new(port), AtomicU32::new(1));
        Ok(Self {
            greeting,
            accelerator,
            boot_time,
            requests,
            answers,
            next,
            keeper,
            folder,
        })
    }

    /// What the guest said of itself.
    pub fn greeting(&self) -> &Ready {
        &self.greeting
    }

    /// What executes it.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// How long it took from starting QEMU to the agent's greeting.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    ///
    /// When the guest is gone or hangs. A command that fails is no error: see [`Finished`].
    pub fn run(&self, run: &Run) -> Result<Finished> {
        self.spawn(run)?.wait()
    }

    /// Starts a command.
    ///
    /// # Errors
    ///
    /// When the guest is gone.
    pub fn spawn(&self, run: &Run) -> Result<Running<'_>> {
        let limit = (run.timeout_ms > 0).then(|| Duration::from_millis(run.timeout_ms));
        self.request(run.argv.join(" "), limit, |id| {
            Frame::json(Kind::Run, id, run)
        })
    }

    /// Creates a file in the guest.
    ///
    /// # Errors
    ///
    /// When the guest is gone or cannot write there.
    pub fn put(&self, path: &str, mode: u32, contents: &[u8]) -> Result<()> {
        let mut payload = serde_json::to_vec(&Put {
            path: path.into(),
            mode,
        })?;
        payload.push(b'\n');
        payload.extend(contents);
        let request = self.request(format!("put {path}"), Some(GRACE), |id| Frame {
            kind: Kind::Put,
            id,
            payload,
        })?;
        request.wait()?.exit.error.map_or(Ok(()), |error| {
            Err(anyhow!("cannot write {path} in the guest: {error}"))
        })
    }

    /// What the guest's kernel logged so far.
    ///
    /// # Errors
    ///
    /// When the guest is gone.
    pub fn kernel_log(&self) -> Result<KernelLog> {
        let request = |id| Frame {
            kind: Kind::KernelLog,
            id,
            payload: Vec::new(),
        };
        Ok(KernelLog::parse(
            &self
                .request("kernel log".into(), Some(GRACE), request)?
                .wait()?
                .stdout,
        ))
    }

    /// Connects to QEMU's control socket. QEMU serves one connection at a time.
    ///
    /// # Errors
    ///
    /// When QEMU is gone.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.folder.path().join("qmp"))
    }

    /// The guest's folder on the host: its sockets and logs. It goes with the guest.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What came out of the serial console so far.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join("console")).unwrap_or_default())
            .into_owned()
    }

    /// Takes the kernel's log, switches the machine off and waits until it is.
    ///
    /// # Errors
    ///
    /// When it is gone already, or does not go.
    pub fn shut_down(mut self) -> Result<Ended> {
        let kernel_log = self.kernel_log()?;
        self.send(&Frame {
            kind: Kind::PowerOff,
            id: 0,
            payload: Vec::new(),
        })?;
        match self.keeper.wait(GRACE) {
            Some(status) if status.success() => Ok(Ended {
                kernel_log,
                console: self.console(),
            }),
            Some(status) => bail!("QEMU ended with {status}\n{}", story(self.folder.path())),
            None => bail!(
                "the guest did not switch itself off\n{}",
                story(self.folder.path())
            ),
        }
    }

    fn request(
        &self,
        what: String,
        limit: Option<Duration>,
        frame: impl FnOnce(u32) -> Frame,
    ) -> Result<Running<'_>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, frames) = channel();
        self.answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, sender);
        self.send(&frame(id))?;
        Ok(Running {
            guest: self,
            id,
            frames,
            deadline: limit.map(|limit| Instant::now() + limit + GRACE),
            what,
        })
    }

    fn send(&self, frame: &Frame) -> Result<()> {
        let mut port = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        frame
            .write(&mut *port)
            .with_context(|| format!("the guest is gone\n{}", story(self.folder.path())))
    }
}

impl Running<'_> {
    /// Kills the command and all that it started in its process group. It still ends, with a signal.
    ///
    /// # Errors
    ///
    /// When the guest is gone.
    pub fn kill(&self) -> Result<()> {
        self.guest.send(&Frame {
            kind: Kind::Kill,
            id: self.id,
            payload: Vec::new(),
        })
    }

    /// Waits for the end.
    ///
    /// # Errors
    ///
    /// When the guest is gone or hangs.
    pub fn wait(self) -> Result<Finished> {
        self.wait_with(|_, _| ())
    }

    /// Waits for the end, and shows each piece of output as it comes: standard error when the first argument is `true`.
    ///
    /// # Errors
    ///
    /// When the guest is gone or hangs.
    pub fn wait_with(self, mut show: impl FnMut(bool, &[u8])) -> Result<Finished> {
        let mut finished = Finished::default();
        loop {
            let frame = self.next(&finished)?;
            match frame.kind {
                Kind::Stdout => finished.stdout.extend(&frame.payload),
                Kind::Stderr => finished.stderr.extend(&frame.payload),
                Kind::Exit => {
                    finished.exit = frame.parse()?;
                    return Ok(finished);
                }
                kind => bail!("the guest answered {} with a {kind:?} frame", self.what),
            }
            show(frame.kind == Kind::Stderr, &frame.payload);
            finished.output.extend(&frame.payload);
        }
    }

    fn next(&self, so_far: &Finished) -> Result<Frame> {
        let frame = match self.deadline {
            Some(deadline) => self
                .frames
                .recv_timeout(deadline.saturating_duration_since(Instant::now())),
            None => self
                .frames
                .recv()
                .map_err(|_| RecvTimeoutError::Disconnected),
        };
        frame.map_err(|error| {
            let problem = match error {
                RecvTimeoutError::Timeout => "the guest hangs",
                RecvTimeoutError::Disconnected => "the guest is gone",
            };
            let output = String::from_utf8_lossy(&so_far.output);
            anyhow!(
                "{problem}; it ran: {}\nits output:\n{output}\n{}",
                self.what,
                story(self.guest.folder.path())
            )
        })
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.guest
            .answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.id);
    }
}

/// Hands a frame to whoever waits for it; an end also ends the route.
fn deliver(routes: &Routes, frame: Frame) {
    let mut routes = routes.lock().unwrap_or_else(PoisonError::into_inner);
    let (id, last) = (frame.id, frame.kind == Kind::Exit);
    // A command that nobody waits for any more has no receiver.
    let _ = routes.get(&id).map(|sender| sender.send(frame));
    if last {
        routes.remove(&id);
    }
}

/// Waits for QEMU to connect, and then for the agent behind it.
fn greet(
    listener: &UnixListener,
    keeper: &Keeper,
    deadline: Instant,
) -> Result<(UnixStream, Ready)> {
    listener.set_nonblocking(true)?;
    let mut port = loop {
        match listener.accept() {
            Ok((port, _)) => break port,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot accept the guest's connection"),
        }
        if let Some(status) = keeper.ended() {
            bail!("QEMU ended with {status}");
        }
        anyhow::ensure!(Instant::now() < deadline, "QEMU did not start in time");
        thread::sleep(Duration::from_millis(10));
    };
    port.set_nonblocking(false)?;
    port.set_read_timeout(Some(
        deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1)),
    ))?;
    let frame = Frame::read(&mut port).context("no greeting from the guest's agent in time")?;
    let frame = frame.context("the guest ended before its agent greeted")?;
    let greeting = frame.parse()?;
    port.set_read_timeout(None)?;
    Ok((port, greeting))
}

/// The ends of QEMU's and the console's output, for error messages.
fn story(folder: &Path) -> String {
    let tail = |name: &str| {
        let bytes = fs::read(folder.join(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    };
    format!(
        "--- QEMU:\n{}\n--- console:\n{}\n---",
        tail("qemu.log"),
        tail("console")
    )
}

/// The thread that starts QEMU, waits for it and kills it.
///
/// QEMU asks the kernel to be killed with its parent (`exit-with-parent`), and that is the *thread* that started it. So that
/// thread must live as long as the machine.
#[derive(Debug)]
struct Keeper {
    kill: Sender<()>,
    status: Arc<Mutex<Option<ExitStatus>>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    fn start(mut command: Command, log: fs::File, lifetime: Duration) -> Result<Self> {
        let (kill, killed) = channel();
        let (started, start) = channel();
        let status = Arc::new(Mutex::new(None));
        let result = Arc::clone(&status);
        let thread = thread::spawn(move || {
            command
                .stdin(Stdio::null())
                .stderr(log.try_clone().map_or_else(|_| Stdio::null(), Stdio::from))
                .stdout(log);
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            let deadline = Instant::now() + lifetime;
            let status = loop {
                if let Ok(Some(status)) = child.try_wait() {
                    break Some(status);
                }
                let stop = !matches!(
                    killed.recv_timeout(Duration::from_millis(20)),
                    Err(RecvTimeoutError::Timeout)
                );
                if stop || Instant::now() > deadline {
                    let _ = child.kill();
                    break child.wait().ok();
                }
            };
            *result.lock().unwrap_or_else(PoisonError::into_inner) = status;
        });
        start
            .recv()
            .context("the thread that starts QEMU died")?
            .context("cannot start QEMU")?;
        Ok(Self {
            kill,
            status,
            thread: Some(thread),
        })
    }

    fn ended(&self) -> Option<ExitStatus> {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        while self.ended().is_none() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        self.ended()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.kill.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
