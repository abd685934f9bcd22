//! A transport that counts what is spent in another's calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use failstop::pci::testing::Delegate;
use failstop::pci::transport::Transport;

/// Counts something that only grows: nanoseconds, instructions.
pub(super) type Count = fn() -> u64;

/// Nanoseconds since somebody first asked.
pub(super) fn nanos() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Passes every call on, and counts what those spent that can reach the kernel or the device.
#[derive(Debug)]
pub(super) struct Timed {
    inner: Arc<dyn Transport>,
    count: Count,
    spent: AtomicU64,
}

impl Timed {
    pub(super) fn new(inner: Arc<dyn Transport>, count: Count) -> Self {
        let spent = AtomicU64::new(0);
        Self {
            inner,
            count,
            spent,
        }
    }

    /// What was spent since the last look.
    pub(super) fn take(&self) -> u64 {
        self.spent.swap(0, Ordering::Relaxed)
    }

    #[inline(always)]
    fn timed<T>(&self, call: impl FnOnce(&dyn Transport) -> T) -> T {
        let start = (self.count)();
        let result = call(&*self.inner);
        let spent = (self.count)().saturating_sub(start);
        self.spent.fetch_add(spent, Ordering::Relaxed);
        result
    }
}

impl Delegate for Timed {
    fn inner(&self) -> &dyn Transport {
        &*self.inner
    }

    #[inline(always)]
    fn around<T>(&self, call: impl FnOnce(&dyn Transport) -> T) -> T {
        self.timed(call)
    }
}
