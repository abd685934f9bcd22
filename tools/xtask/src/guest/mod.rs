//! What runs inside a guest: the first process, the agent that serves the host, and the step that drops privileges.
//!
//! One binary does all three, by how it is called: as process 1 it sets the machine up, starts itself as the agent and
//! collects orphans; as the agent it runs commands for the host; as `exec` it limits itself and becomes the command.
//! The first two are separate so that an agent that dies ends in an orderly power-off, not in a kernel panic.

mod agent;
mod exec;
mod init;

use std::process::ExitCode;

/// The environment of every command: `NAME=value` lines.
pub const ENVIRONMENT: &str = "/etc/failstop.env";
/// The modules to load, in order: one path a line.
pub const MODULES: &str = "/lib/failstop.modules";
/// Where the files go that the host sends along.
pub const FILES: &str = "/failstop";
/// Where this binary is in the guest.
pub const AGENT: &str = "/init";
/// The folder of busybox's applets. It comes last in `PATH`, so that real tools win.
pub const BUSYBOX: &str = "/busybox";

/// A word on the kernel's command line that asks for a shell on the console in the agent's place.
pub const SHELL: &str = "failstop.shell";

/// The entry point of the guest's binary.
pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("agent") => agent::serve(),
        Some("exec") => exec::become_command(&arguments[2..]),
        _ if std::process::id() == 1 => init::run(),
        _ => {
            eprintln!(
                "this program is the first process of a test guest; `cargo xtask vm run` starts it"
            );
            ExitCode::from(2)
        }
    }
}
