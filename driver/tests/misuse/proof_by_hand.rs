//! A proof is made of a reading, by the library; nobody else can make one (R3).

use failstop::dma::iova::Iova;
use failstop::dma::proof::{ObjectId, ReleaseProof, Unreferenced};

fn forge(object: ObjectId) -> ReleaseProof {
    Unreferenced::new(object, Iova(0x1000)).into()
}

fn main() {}
