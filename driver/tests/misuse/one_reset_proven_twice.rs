//! A reset that was issued is proven once: another proof needs another reset (R4.5).

use failstop::pci::config::{CommandRegister, ConfigSpace};
use failstop::pci::id::Generation;
use failstop::pci::reset::{self, Canary, Issued};
use failstop::pci::window::Window;

fn twice(
    issued: Issued,
    config: &ConfigSpace<'_>,
    command: &CommandRegister,
    window: &Window,
    canary: &Canary,
) {
    let _ = reset::verify(issued, config, command, window, canary, Generation::FIRST);
    let _ = reset::verify(issued, config, command, window, canary, Generation::FIRST);
}

fn main() {}
