//! Becomes a command, as an ordinary user.
//!
//! A process of its own does this, and not a hook between fork and exec, because such hooks are unsafe.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Gid, Uid, setgroups};

/// The words that make this binary run `argv` as `user` (root when `None`) with `memlock` bytes of locked memory.
pub(super) fn words(user: Option<u32>, memlock: Option<u64>) -> Vec<String> {
    let word = |value: Option<u64>| value.map_or("-".into(), |value| value.to_string());
    vec!["exec".into(), word(user.map(u64::from)), word(memlock)]
}

/// `exec USER MEMLOCK PROGRAM ARGUMENTS...`, with `-` for "as it is".
pub(super) fn become_command(words: &[String]) -> ExitCode {
    let [user, memlock, program, arguments @ ..] = words else {
        eprintln!("exec: too few words");
        return ExitCode::from(2);
    };
    if let Ok(bytes) = memlock.parse()
        && let Err(error) = setrlimit(Resource::RLIMIT_MEMLOCK, bytes, bytes)
    {
        eprintln!("exec: cannot set the limit on locked memory to {bytes}: {error}");
        return ExitCode::from(126);
    }
    let mut command = Command::new(program);
    command.args(arguments);
    if let Ok(id) = user.parse() {
        // Root's supplementary groups would otherwise stay.
        if let Err(error) = setgroups(&[Gid::from_raw(id)]) {
            eprintln!("exec: cannot drop groups: {error}");
            return ExitCode::from(126);
        }
        command
            .uid(Uid::from_raw(id).as_raw())
            .gid(id)
            .env("HOME", "/home/user")
            .env("USER", "user");
    }
    eprintln!("exec: {program}: {}", command.exec());
    ExitCode::from(127)
}
