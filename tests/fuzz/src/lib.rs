//! Fuzz targets: everything that a device, a peer, a file or a person can write.
//!
//! Each target takes bytes, does with them what the program does with what they stand for, and
//! panics when a promise is broken: accounts that do not add up, memory that stays mapped, a written
//! form that does not read back. It returns how deep it came, in a unit of its own, so that a test can
//! tell a corpus that reaches something from one that is refused at the door.
//!
//! `cargo xtask fuzz` runs them under libFuzzer; the corpus, and every input that ever made one panic,
//! run with the ordinary tests (`tests/corpus.rs`).

mod bytes;
mod capabilities;
mod client;
mod device;
mod emulator;
mod files;
mod rings;
pub mod seeds;
mod text;

/// One target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its folders of inputs.
    pub name: &'static str,
    /// What it does with bytes; how deep it came.
    pub run: fn(&[u8]) -> u64,
    /// How deep its deepest seed comes at least.
    pub depth: u64,
}

const fn target(name: &'static str, run: fn(&[u8]) -> u64, depth: u64) -> Target {
    Target { name, run, depth }
}

/// Every target.
pub const TARGETS: &[Target] = &[
    target("capabilities", capabilities::run, 8),
    target("igb-rings", rings::igb, 10),
    target("e1000e-rings", rings::e1000e, 10),
    target("igb-device", device::igb, 10),
    target("e1000e-device", device::e1000e, 10),
    target("vfio-user-client", client::run, 12),
    target("emulator", emulator::run, 20),
    target("pcap", files::pcap, 3),
    target("scenario", text::scenario, 20),
    target("names", text::names, 1),
    target("command-line", text::command_line, 1),
];
