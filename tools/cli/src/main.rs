//! The `failstop` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    failstop_cli::main()
}
