//! A reading is consumed by the one acknowledgement that it is for (R3.1).

use failstop::dma::proof::{Acknowledged, ObjectId};
use failstop::pci::window::Stopped;

fn twice(one: ObjectId, other: ObjectId, stopped: Stopped) {
    let _ = Acknowledged::by_register(one, stopped);
    let _ = Acknowledged::by_register(other, stopped);
}

fn main() {}
