//! What the slot around a function provides: memory by DMA, interrupts, the wire, time.

use std::time::Duration;

/// A read request that nothing completed: what PCIe calls an unsupported request or a completer
/// abort (PCIe 2.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort;

/// What a client is told of beside interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// The bus reported an uncorrectable error of the function.
    Error,
    /// The function is wanted back.
    Request,
}

/// What the model asks of the world around it. The model has no I/O of its own, so tests give it
/// a world of plain memory and a clock that they move.
///
/// Writes are posted, as on PCIe: a device does not learn that one was lost.
pub trait Host {
    /// Reads memory.
    ///
    /// # Errors
    ///
    /// [`Abort`] when any byte is outside what the client mapped; `data` is then unspecified.
    fn dma_read(&mut self, iova: u64, data: &mut [u8]) -> Result<(), Abort>;

    /// Writes memory; a write outside what the client mapped is lost, whole.
    fn dma_write(&mut self, iova: u64, data: &[u8]);

    /// Reads one naturally aligned 64-bit word, in one access.
    ///
    /// # Errors
    ///
    /// [`Abort`], as [`Host::dma_read`].
    fn dma_load(&mut self, iova: u64) -> Result<u64, Abort>;

    /// Writes one naturally aligned 64-bit word, in one access, after every earlier write.
    fn dma_store(&mut self, iova: u64, value: u64);

    /// Which mapping holds this address now: a number that no other mapping ever has.
    fn mapping(&self, iova: u64) -> Option<u64>;

    /// Tells the client of something beside interrupts, if it listens.
    fn notice(&mut self, notice: Notice);

    /// Sends message-signalled interrupt `vector` (MSI-X; with plain MSI there is only 0), or, when
    /// the client uses neither, pulses the interrupt line.
    fn interrupt(&mut self, vector: u32);

    /// Sends a frame, without frame check sequence, out of the port.
    fn transmit(&mut self, frame: &[u8]);

    /// Time since some fixed moment.
    fn now(&self) -> Duration;
}
