//! `failstop-emulator`: an emulated 82576 on a vfio-user socket.

use std::process::ExitCode;

fn main() -> ExitCode {
    failstop_emulator::cli::main_with(std::env::args_os())
}
