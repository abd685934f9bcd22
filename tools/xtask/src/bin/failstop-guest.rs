//! The first process of a test guest, and the agent that runs the host's commands in it.

fn main() -> std::process::ExitCode {
    xtask::guest::main()
}
