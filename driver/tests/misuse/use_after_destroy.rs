//! A handle is gone once its object was destroyed (R5).

use failstop::objects::Mr;
use failstop::owned::Owned;

fn after(region: Owned<Mr>) {
    if region.try_destroy().is_ok() {
        region.census();
    }
}

fn main() {}
