//! An emulated Intel 82576, served over vfio-user: for tests without hardware, for guests under
//! QEMU, and as the device that `failstop run` starts by itself.

pub mod cli;
pub mod control;
pub mod device;
pub mod emulator;
pub mod faults;
pub mod host;
pub mod server;
pub mod stats;
#[cfg(test)]
mod testing;

pub use emulator::{Cable, Emulator, EmulatorError, Options, Running};
