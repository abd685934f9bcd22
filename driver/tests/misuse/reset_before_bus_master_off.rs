//! No reset is issued without the witness that bus mastering is off (R4.2).

use failstop::pci::reset;
use failstop::pci::transport::{ResetMethod, Transport};

fn at_once(transport: &dyn Transport) {
    let _ = reset::issue(transport, ResetMethod::Flr);
}

fn main() {}
