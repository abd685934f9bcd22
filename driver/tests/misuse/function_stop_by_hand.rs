//! That a function is stopped is proven by a reset that was verified (R4.5).

use failstop::pci::id::{DeviceId, Generation};
use failstop::pci::reset::FunctionStopped;

fn forge(device: DeviceId, generation: Generation) -> FunctionStopped {
    FunctionStopped {
        device,
        generation,
        method: None,
    }
}

fn main() {}
