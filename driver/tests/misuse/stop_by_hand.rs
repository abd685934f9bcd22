//! That a queue stopped is said by a register that was read, not by the program (R3.1).

use failstop::pci::id::{DeviceId, Generation};
use failstop::pci::window::Stopped;

fn forge(device: DeviceId, generation: Generation) -> Stopped {
    Stopped { device, generation, register: 0, queue: None }
}

fn main() {}
