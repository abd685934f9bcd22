//! A transport that counts what is spent in another's calls.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use failstop::pci::id::{DeviceId, Generation};
use failstop::pci::transport::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, ResetMethod, Strength, Transport, Unmapped,
};

/// Counts something that only grows: nanoseconds, instructions.
pub(super) type Count = fn() -> u64;

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

impl Transport for Timed {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn strength(&self) -> Strength {
        self.timed(|inner| inner.strength())
    }

    fn region(&self, index: RegionIndex) -> Region {
        self.inner.region(index)
    }

    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        self.timed(|inner| inner.read(generation, index, offset, data))
    }

    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.timed(|inner| inner.write(generation, index, offset, data))
    }

    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.timed(|inner| inner.post(generation, index, offset, data))
    }

    fn expire(&self, generation: Generation) {
        self.inner.expire(generation);
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        self.inner.region_file(index, offset)
    }

    fn dma_limits(&self) -> io::Result<DmaLimits> {
        self.timed(|inner| inner.dma_limits())
    }

    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        self.timed(|inner| inner.dma_map(iova, memory))
    }

    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        self.timed(|inner| inner.dma_unmap(iova, len))
    }

    fn irq_count(&self, index: IrqIndex) -> u32 {
        self.inner.irq_count(index)
    }

    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        self.timed(|inner| inner.set_irqs(index, first, eventfds))
    }

    fn reset(&self) -> Result<(), ResetFailed> {
        self.timed(|inner| inner.reset())
    }

    fn reset_methods(&self) -> Vec<ResetMethod> {
        self.timed(|inner| inner.reset_methods())
    }

    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        self.timed(|inner| inner.reset_by(method))
    }

    fn shares_space(&self) -> bool {
        self.inner.shares_space()
    }

    fn detach_space(&self) -> io::Result<()> {
        self.timed(|inner| inner.detach_space())
    }

    fn hang_up(&self) {
        self.inner.hang_up();
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner.deadline()
    }
}
