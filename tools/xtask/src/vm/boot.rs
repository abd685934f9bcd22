//! Which guest to start.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::accelerator::Accelerator;
use super::guest::Guest;
use super::initramfs::Initramfs;
use super::qemu::{Console, Machine};
use super::setup::Setup;
use super::topologies::Topology;
use super::{apt, debian_kernel, small_kernel};
use crate::guest::{AGENT, BUSYBOX, ENVIRONMENT, FILES, MODULES, SHELL};

/// The name of the guest's first file system in its folder on the host.
pub(super) const INITRAMFS: &str = "initramfs";

/// A guest kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Our own: iommufd, VFIO's device files and its no-IOMMU mode, no modules.
    Small,
    /// Debian's: what people run; VFIO by containers and groups only.
    Debian,
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Self; 2] = [Self::Small, Self::Debian];

    pub(super) fn cache_prefix(self) -> String {
        match self {
            Self::Small => small_kernel::prefix(),
            Self::Debian => debian_kernel::prefix(),
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Small => "small",
            Self::Debian => "debian",
        })
    }
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "small" => Ok(Self::Small),
            "debian" => Ok(Self::Debian),
            _ => bail!("no guest kernel is called {name}; there are small and debian"),
        }
    }
}

/// A guest to start: its kernel, its machine, and what goes into its file system.
#[derive(Clone, Debug)]
pub struct Boot {
    pub(super) kernel: Kernel,
    pub(super) topology: &'static Topology,
    files: BTreeMap<String, PathBuf>,
    plain_files: BTreeMap<String, PathBuf>,
    env: BTreeMap<String, String>,
    sockets: BTreeMap<String, PathBuf>,
    wires: BTreeMap<String, (PathBuf, PathBuf)>,
    append: Vec<String>,
    qemu: Vec<String>,
    accelerator: Option<Accelerator>,
    memory_mib: u32,
    cpus: u32,
    boot_limit: Option<Duration>,
    pub(super) lifetime: Duration,
}

impl Boot {
    /// A guest with 1 GiB, two processors, and ten minutes to live.
    pub fn new(kernel: Kernel, topology: &'static Topology) -> Self {
        Self {
            kernel,
            topology,
            files: BTreeMap::new(),
            plain_files: BTreeMap::new(),
            env: BTreeMap::new(),
            sockets: BTreeMap::new(),
            wires: BTreeMap::new(),
            append: Vec::new(),
            qemu: Vec::new(),
            accelerator: None,
            memory_mib: 1024,
            cpus: 2,
            boot_limit: None,
            lifetime: Duration::from_secs(600),
        }
    }

    /// Sends a file along, under its own name, into the guest's folder `/failstop`, which is first in `PATH`. A program is
    /// sent with its libraries.
    ///
    /// # Errors
    ///
    /// When the path has no file name.
    pub fn file(self, host: impl AsRef<Path>) -> Result<Self> {
        let host = host.as_ref();
        let name = host
            .file_name()
            .and_then(OsStr::to_str)
            .with_context(|| format!("{} has no file name", host.display()))?;
        let guest = format!("{FILES}/{name}");
        Ok(self.file_as(host, guest))
    }

    /// Sends a file along, to an absolute path in the guest.
    pub fn file_as(mut self, host: impl AsRef<Path>, guest: impl Into<String>) -> Self {
        self.files.insert(guest.into(), host.as_ref().to_path_buf());
        self
    }

    /// Sends a file along as it is, to an absolute path in the guest: a program without its libraries, a library.
    pub(super) fn plain_file(mut self, host: impl AsRef<Path>, guest: impl Into<String>) -> Self {
        self.plain_files
            .insert(guest.into(), host.as_ref().to_path_buf());
        self
    }

    /// Sets an environment variable for all commands.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Says where the process listens that emulates the function with this role.
    pub fn socket(mut self, role: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.sockets.insert(role.into(), path.into());
        self
    }

    /// Connects the function with this role to a pair of Unix datagram sockets: QEMU binds `ours` and sends to `theirs`.
    pub fn wire(
        mut self,
        role: impl Into<String>,
        ours: impl Into<PathBuf>,
        theirs: impl Into<PathBuf>,
    ) -> Self {
        self.wires.insert(role.into(), (ours.into(), theirs.into()));
        self
    }

    /// Adds a word to the kernel's command line.
    pub fn append(mut self, word: impl Into<String>) -> Self {
        self.append.push(word.into());
        self
    }

    /// Adds words to QEMU's command line.
    pub fn qemu<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.qemu.extend(words.into_iter().map(Into::into));
        self
    }

    /// Decides what executes the guest, instead of finding out what works.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// The guest's memory.
    pub fn memory_mib(mut self, size: u32) -> Self {
        self.memory_mib = size;
        self
    }

    /// Its processors.
    pub fn cpus(mut self, count: u32) -> Self {
        self.cpus = count;
        self
    }

    /// How long the guest may take until its agent answers.
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = Some(limit);
        self
    }

    /// How long the guest may live: past that it is killed, whatever it does.
    pub fn lifetime(mut self, limit: Duration) -> Self {
        self.lifetime = limit;
        self
    }

    /// Starts the guest and waits until it takes commands.
    ///
    /// # Errors
    ///
    /// When a file cannot be sent, QEMU does not start, or the guest does not come up in time; the message has the end of
    /// its console.
    pub fn start(&self, setup: &Setup) -> Result<Guest> {
        let accelerator = match self.accelerator {
            Some(accelerator) => accelerator,
            None => Accelerator::choose(setup, self.kernel)?,
        };
        let folder = tempfile::Builder::new()
            .prefix("failstop-vm-")
            .tempdir()
            .context("cannot create a temporary folder")?;
        let (command, agent) = self.command(setup, accelerator, folder.path(), false)?;
        let limit = self
            .boot_limit
            .unwrap_or(Duration::from_secs(30) * accelerator.patience());
        Guest::start(self, command, agent, folder, limit, accelerator)
    }

    /// Runs the guest with its console on this terminal, and a shell there, until the shell ends.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn shell(&self, setup: &Setup) -> Result<()> {
        let accelerator = self
            .accelerator
            .map_or_else(|| Accelerator::choose(setup, self.kernel), Ok)?;
        let folder = tempfile::Builder::new()
            .prefix("failstop-vm-")
            .tempdir()
            .context("cannot create a temporary folder")?;
        let boot = self.clone().append(SHELL);
        let (mut command, _agent) = boot.command(setup, accelerator, folder.path(), true)?;
        let status = command.status().context("cannot start QEMU")?;
        ensure!(status.success(), "QEMU ended with {status}");
        Ok(())
    }

    /// QEMU's command, and the socket on which the guest's agent will call.
    fn command(
        &self,
        setup: &Setup,
        accelerator: Accelerator,
        folder: &Path,
        terminal: bool,
    ) -> Result<(Command, std::os::unix::net::UnixListener)> {
        let initramfs = folder.join(INITRAMFS);
        let file = fs::File::create(&initramfs).context("cannot create the initramfs")?;
        self.initramfs(setup)?.write(BufWriter::new(file))?;

        let (agent, qmp, console) = (
            folder.join("agent"),
            folder.join("qmp"),
            folder.join("console"),
        );
        let listener = std::os::unix::net::UnixListener::bind(&agent)
            .context("cannot listen for the guest's agent")?;
        let mut append = self.append.clone();
        if self.topology.iommu == super::topologies::Iommu::None {
            append.push("vfio.enable_unsafe_noiommu_mode=1".into());
        }
        let machine = Machine {
            accelerator,
            topology: self.topology,
            kernel: &setup.kernel(self.kernel)?.image,
            initramfs: &initramfs,
            append: &append,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            sockets: &self.sockets,
            wires: &self.wires,
            agent: &agent,
            qmp: &qmp,
            console: if terminal {
                Console::Terminal
            } else {
                Console::File(&console)
            },
            extra: &self.qemu,
        };
        let mut command = setup.tree.command("qemu-system-x86_64")?;
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(setup.tree.path(firmware));
        }
        command.args(machine.arguments()?);
        Ok((command, listener))
    }

    fn initramfs(&self, setup: &Setup) -> Result<Initramfs> {
        let mut root = Initramfs::default();
        for folder in [
            "/proc", "/sys", "/dev", "/run", "/root", "/mnt", "/var/tmp", FILES,
        ] {
            root.folder(folder, 0o755);
        }
        root.folder("/tmp", 0o1777);
        root.folder("/home/user", 0o777);
        self.add_busybox(setup, &mut root)?;
        root.program(AGENT, agent_program()?)?;
        self.add_modules(setup, &mut root)?;
        root.bytes(
            "/etc/passwd",
            0o644,
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
        );
        root.bytes("/etc/group", 0o644, "root:x:0:\nuser:x:1000:\n");
        root.bytes(ENVIRONMENT, 0o644, self.environment());
        for (guest, host) in &self.files {
            ensure!(
                guest.starts_with('/'),
                "the place for {} in the guest is {guest}, which is not absolute",
                host.display()
            );
            root.program(guest, host)?;
        }
        for (guest, host) in &self.plain_files {
            root.file(guest, host)?;
        }
        Ok(root)
    }

    fn add_busybox(&self, setup: &Setup, root: &mut Initramfs) -> Result<()> {
        let busybox = setup.tree.path("usr/bin/busybox");
        root.file("/bin/busybox", &busybox)?;
        // It is static: the host can ask it.
        let applets = apt::run(Command::new(&busybox).arg("--list"), "busybox does not run")?;
        for applet in applets.lines() {
            root.link(&format!("{BUSYBOX}/{applet}"), "/bin/busybox");
        }
        for shell in ["/bin/sh", "/usr/bin/env"] {
            root.link(shell, "/bin/busybox");
        }
        Ok(())
    }

    fn add_modules(&self, setup: &Setup, root: &mut Initramfs) -> Result<()> {
        let mut list = String::new();
        for module in &setup.kernel(self.kernel)?.modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            let path = format!("/lib/failstop/{name}");
            root.file(&path, module)?;
            list += &format!("{path}\n");
        }
        root.bytes(MODULES, 0o644, list);
        Ok(())
    }

    /// The environment of the guest's commands: where each function is, and which guest this is.
    fn environment(&self) -> String {
        let mut variables = self.env.clone();
        variables.extend(
            self.topology
                .places()
                .map(|place| (place.variable(), place.address())),
        );
        variables.insert("FAILSTOP_TOPOLOGY".into(), self.topology.name.into());
        variables.insert("FAILSTOP_KERNEL".into(), self.kernel.to_string());
        variables
            .into_iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect()
    }
}

/// The program that runs in the guest, built if need be: whoever uses this library as a library has not built it.
fn agent_program() -> Result<&'static Path> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = BUILT.get() {
        return Ok(path);
    }
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--quiet", "--bin", "failstop-guest"]);
    command
        .args([
            "--message-format=json-render-diagnostics",
            "--manifest-path",
        ])
        .arg(manifest);
    let messages = apt::run(&mut command, "cannot build the guest's agent")?;
    let executable = messages.lines().rev().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    let path = executable.context("cargo did not say where it put the guest's agent")?;
    Ok(BUILT.get_or_init(|| path))
}

#[cfg(test)]
mod tests {
    use super::super::topologies;
    use super::*;

    #[test]
    fn the_environment_names_functions_by_role() {
        let boot = Boot::new(Kernel::Small, topologies::find("two-igb").unwrap())
            .env("RUST_BACKTRACE", "1");
        let expected = "FAILSTOP_IGB=0000:01:00.0\nFAILSTOP_IGB_PEER=0000:02:00.0\nFAILSTOP_KERNEL=small\n\
                        FAILSTOP_TOPOLOGY=two-igb\nRUST_BACKTRACE=1\n";
        assert_eq!(boot.environment(), expected);
    }

    #[test]
    fn kernels_are_found_by_the_names_that_they_print() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse::<Kernel>().unwrap(), kernel);
        }
        assert!(
            "ubuntu"
                .parse::<Kernel>()
                .unwrap_err()
                .to_string()
                .contains("debian")
        );
    }
}
