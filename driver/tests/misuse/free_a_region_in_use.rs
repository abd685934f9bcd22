//! A region that is registered with a device stays inside its handle (R3.3) (C4).

use failstop::objects::Mr;
use failstop::owned::Owned;

fn free(region: Owned<Mr>) {
    let Mr(shared) = *region;
    drop(shared);
}

fn main() {}
