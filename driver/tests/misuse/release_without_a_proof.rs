//! Memory that a device can reach is not released without a proof (R3) (C4).

use failstop::dma::space::Mapping;

fn free(mapping: Mapping) {
    let _ = mapping.release();
}

fn main() {}
