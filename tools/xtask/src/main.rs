//! `cargo xtask`: set-up, tests and virtual machines.

fn main() -> std::process::ExitCode {
    xtask::command::main()
}
