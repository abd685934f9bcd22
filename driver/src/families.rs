//! Which provider drives which function.

use std::fmt;
use std::sync::Arc;

use failstop_pci::clock::Clock;
use failstop_pci::window::Window;

use crate::e1000e;
use crate::igb;
use crate::provider::Provider;

/// Makes a provider for a window and the clock of its waits.
type Make = dyn Fn(Arc<Window>, Arc<dyn Clock>) -> Box<dyn Provider> + Send + Sync;

/// What drives a function: one of ours, or one's own
/// ([`Options::driver`](crate::device::Options::driver)).
pub struct Driver {
    /// Bytes of its BAR 0, where the registers are.
    pub(crate) bar_bytes: u64,
    make: Box<Make>,
}

impl Driver {
    /// A driver whose providers `make` makes, for a function with at least `bar_bytes` bytes in BAR 0.
    pub fn new<P: Provider + 'static>(
        bar_bytes: u64,
        make: impl Fn(Arc<Window>, Arc<dyn Clock>) -> P + Send + Sync + 'static,
    ) -> Self {
        Self {
            bar_bytes,
            make: Box::new(move |window, clock| Box::new(make(window, clock))),
        }
    }

    /// A provider over `window`: one for each life of the function.
    pub(crate) fn provider(&self, window: Arc<Window>, clock: Arc<dyn Clock>) -> Box<dyn Provider> {
        (self.make)(window, clock)
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("bar_bytes", &self.bar_bytes)
            .finish_non_exhaustive()
    }
}

/// Every family: it says whether a PCI id (vendor, device) is one of its parts.
const FAMILIES: &[fn(u16, u16) -> Option<Driver>] = &[igb::driver, e1000e::driver];

/// What drives the function of that PCI id, if anything does.
pub(crate) fn find(vendor: u16, device: u16) -> Option<Driver> {
    FAMILIES.iter().find_map(|of| of(vendor, device))
}
