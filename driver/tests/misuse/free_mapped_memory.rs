//! What is mapped cannot be taken out of its mapping and freed (R3) (C4).

use failstop::dma::space::Mapping;

fn free(mapping: Mapping) {
    let Mapping { memory, .. } = mapping;
    drop(memory);
}

fn main() {}
