//! The first process: file systems, modules, the loopback interface, then the agent.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::wait::{WaitStatus, wait};

use super::{AGENT, BUSYBOX, ENVIRONMENT, FILES, MODULES, SHELL};

/// Sets the machine up, runs the agent, and switches off when it ends.
pub(super) fn run() -> ExitCode {
    let mut complaints = Vec::new();
    mount_all(&mut complaints);
    load_modules(&mut complaints);
    if let Err(error) = fs::write("/proc/sys/kernel/hostname", "failstop") {
        complaints.push(format!("host name: {error}"));
    }
    let interface = Command::new(format!("{BUSYBOX}/ip"))
        .args(["link", "set", "lo", "up"])
        .status();
    if !interface.is_ok_and(|status| status.success()) {
        complaints.push("the loopback interface did not come up".into());
    }
    match start_agent(&complaints) {
        Ok(agent) => collect_orphans(agent),
        Err(error) => eprintln!("failstop: the agent did not start: {error}"),
    }
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("failstop: cannot power off: {error}");
    ExitCode::FAILURE
}

fn mount_all(complaints: &mut Vec<String>) {
    let plain = MsFlags::empty();
    let file_systems = [
        ("proc", "/proc", "proc", None),
        ("sysfs", "/sys", "sysfs", None),
        ("devtmpfs", "/dev", "devtmpfs", None),
        ("devpts", "/dev/pts", "devpts", None),
        ("tmpfs", "/dev/shm", "tmpfs", None),
        ("tmpfs", "/tmp", "tmpfs", Some("mode=1777")),
        ("tmpfs", "/run", "tmpfs", None),
        ("debugfs", "/sys/kernel/debug", "debugfs", None),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2", None),
    ];
    for (source, target, kind, options) in file_systems {
        let _ = fs::create_dir_all(target);
        match mount(Some(source), target, Some(kind), plain, options) {
            // The kernel mounts /dev itself where it is told to.
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(error) => complaints.push(format!("{kind} on {target}: {error}")),
        }
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
}

fn load_modules(complaints: &mut Vec<String>) {
    let Ok(list) = fs::read_to_string(MODULES) else {
        return;
    };
    for path in list.lines() {
        if let Err(error) = load_module(Path::new(path)) {
            complaints.push(format!("module {path}: {error}"));
        }
    }
}

fn load_module(path: &Path) -> io::Result<()> {
    let parameters = CString::default();
    match finit_module(File::open(path)?, &parameters, ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Starts the agent, or a shell where one was asked for, with the guest's environment, and returns its process id.
fn start_agent(complaints: &[String]) -> io::Result<u32> {
    let shell = fs::read_to_string("/proc/cmdline")?
        .split_whitespace()
        .any(|word| word == SHELL);
    let mut command = Command::new(if shell {
        format!("{BUSYBOX}/setsid")
    } else {
        AGENT.into()
    });
    if shell {
        complaints
            .iter()
            .for_each(|complaint| eprintln!("failstop: {complaint}"));
        command
            .args([&format!("{BUSYBOX}/cttyhack"), "sh"])
            .current_dir(FILES);
    } else {
        command.arg("agent").args(complaints).stdin(Stdio::null());
    }
    command.env(
        "PATH",
        format!("{FILES}:/usr/sbin:/usr/bin:/sbin:/bin:{BUSYBOX}"),
    );
    command
        .env("HOME", "/root")
        .env("TERM", "vt100")
        .env("TMPDIR", "/tmp");
    let environment = fs::read_to_string(ENVIRONMENT).unwrap_or_default();
    command.envs(environment.lines().filter_map(|line| line.split_once('=')));
    command.spawn().map(|agent| agent.id())
}

/// Waits for every process that ends, until the agent does.
fn collect_orphans(agent: u32) {
    loop {
        match wait() {
            Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _))
                if pid.as_raw().cast_unsigned() == agent =>
            {
                return;
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}
