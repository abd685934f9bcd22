//! A transport that passes every call on to another one, and does something besides.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::id::{DeviceId, Generation};
use crate::left::SpaceLeft;
use crate::peer::PeerEnded;
use crate::transport::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, ResetMethod, Strength, Transport, Unmapped,
};

/// What a transport does besides passing every call on: [`Transport`] comes with it.
pub trait Delegate: Send + Sync + fmt::Debug {
    /// Whom calls are passed on to.
    fn inner(&self) -> &dyn Transport;

    /// Makes a call that can reach the kernel or the function.
    #[inline]
    fn around<T>(&self, call: impl FnOnce(&dyn Transport) -> T) -> T {
        call(self.inner())
    }

    /// A region is about to be read at `offset`, in bytes from its start.
    #[inline]
    fn before_read(&self, _index: RegionIndex, _offset: u64) {}

    /// `data` was written to a region at `offset`, in bytes from its start: posted or not.
    #[inline]
    fn after_write(&self, _index: RegionIndex, _offset: u64, _data: &[u8]) {}

    /// Memory is to be mapped.
    #[inline]
    fn map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        self.around(|inner| inner.dma_map(iova, memory))
    }

    /// A range, `len` bytes from `iova` on, is to be unmapped.
    #[inline]
    fn unmap(&self, iova: Iova, len: u64) -> Unmapped {
        self.around(|inner| inner.dma_unmap(iova, len))
    }
}

// A method that the trait provides must be passed on, too.
#[deny(clippy::missing_trait_methods)]
impl<D: Delegate> Transport for D {
    fn id(&self) -> DeviceId {
        self.inner().id()
    }

    fn name(&self) -> &str {
        self.inner().name()
    }

    fn kind(&self) -> Kind {
        self.inner().kind()
    }

    fn strength(&self) -> Strength {
        self.around(|inner| inner.strength())
    }

    fn region(&self, index: RegionIndex) -> Region {
        self.inner().region(index)
    }

    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        self.before_read(index, offset);
        self.around(|inner| inner.read(generation, index, offset, data))
    }

    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.around(|inner| inner.write(generation, index, offset, data))?;
        self.after_write(index, offset, data);
        Ok(())
    }

    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.around(|inner| inner.post(generation, index, offset, data))?;
        self.after_write(index, offset, data);
        Ok(())
    }

    fn expire(&self, generation: Generation) {
        self.inner().expire(generation);
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        self.inner().region_file(index, offset)
    }

    fn dma_limits(&self) -> io::Result<DmaLimits> {
        self.around(|inner| inner.dma_limits())
    }

    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        self.map(iova, memory)
    }

    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        self.unmap(iova, len)
    }

    fn irq_count(&self, index: IrqIndex) -> u32 {
        self.inner().irq_count(index)
    }

    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        self.around(|inner| inner.set_irqs(index, first, eventfds))
    }

    fn reset(&self) -> Result<(), ResetFailed> {
        self.around(|inner| inner.reset())
    }

    fn reset_methods(&self) -> Vec<ResetMethod> {
        self.around(|inner| inner.reset_methods())
    }

    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        self.around(|inner| inner.reset_by(method))
    }

    fn shares_space(&self) -> bool {
        self.inner().shares_space()
    }

    fn detach_space(&self) -> io::Result<()> {
        self.around(|inner| inner.detach_space())
    }

    fn hang_up(&self) -> Option<SpaceLeft> {
        self.inner().hang_up()
    }

    fn is_lost(&self) -> bool {
        self.inner().is_lost()
    }

    fn why_lost(&self) -> Option<String> {
        self.inner().why_lost()
    }

    fn is_reset_outstanding(&self) -> bool {
        self.inner().is_reset_outstanding()
    }

    fn peer_ended(&self) -> Option<PeerEnded> {
        self.inner().peer_ended()
    }

    fn bound(&self, total: Option<Duration>) {
        self.inner().bound(total);
    }

    fn lifeline(&self) -> Option<Arc<dyn AsFd + Send + Sync>> {
        self.inner().lifeline()
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner().deadline()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::testing::{FakeFunction, limits_39_bits};

    #[derive(Debug)]
    struct Noting {
        function: FakeFunction,
        noted: Mutex<Vec<String>>,
    }

    impl Noting {
        fn new(kind: Kind) -> Self {
            let function = FakeFunction::new(limits_39_bits()).unwrap();
            Self {
                function: function.with_kind(kind).with_decoding(),
                noted: Mutex::default(),
            }
        }

        fn note(&self, what: impl Into<String>) {
            self.noted.lock().unwrap().push(what.into());
        }

        fn noted(&self) -> Vec<String> {
            std::mem::take(&mut *self.noted.lock().unwrap())
        }
    }

    impl Delegate for Noting {
        fn inner(&self) -> &dyn Transport {
            &self.function
        }

        fn around<T>(&self, call: impl FnOnce(&dyn Transport) -> T) -> T {
            self.note("call");
            call(self.inner())
        }

        fn before_read(&self, index: RegionIndex, offset: u64) {
            self.note(format!("read {index} {offset}"));
        }

        fn after_write(&self, index: RegionIndex, offset: u64, data: &[u8]) {
            self.note(format!("wrote {index} {offset} {data:?}"));
        }
    }

    const BAR0: RegionIndex = RegionIndex::Bar(0);
    const NOW: Generation = Generation::FIRST;

    #[test]
    fn what_the_trait_provides_is_the_inner_transports_too() {
        let iommufd = Noting::new(Kind::Iommufd);
        iommufd.function.set_shares_space(true);
        assert!(iommufd.shares_space());
        iommufd.detach_space().unwrap();
        let server = Noting::new(Kind::VfioUser);
        assert!(!server.is_lost());
        assert!(server.hang_up().is_none());
        assert!(server.is_lost());
    }

    #[test]
    fn accesses_are_told_in_order_and_reach_the_function() {
        let noting = Noting::new(Kind::VfioUser);
        noting.write(NOW, BAR0, 8, &[1, 2, 3, 4]).unwrap();
        noting.post(NOW, BAR0, 12, &[5, 6, 7, 8]).unwrap();
        let mut data = [0; 8];
        noting.read(NOW, BAR0, 8, &mut data).unwrap();
        assert_eq!(data, [1, 2, 3, 4, 5, 6, 7, 8]);
        let told = [
            "call",
            "wrote BAR 0 8 [1, 2, 3, 4]",
            "call",
            "wrote BAR 0 12 [5, 6, 7, 8]",
            "read BAR 0 8",
            "call",
        ];
        assert_eq!(noting.noted(), told);
    }

    #[test]
    fn a_write_that_failed_is_not_told() {
        let noting = Noting::new(Kind::VfioUser);
        noting.expire(NOW);
        noting.write(NOW, BAR0, 8, &[0; 4]).unwrap_err();
        noting.post(NOW, BAR0, 8, &[0; 4]).unwrap_err();
        assert_eq!(noting.noted(), ["call", "call"]);
    }
}
