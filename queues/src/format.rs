//! How a family of devices writes descriptors: values to and from whole words.

use failstop_dma::iova::Iova;

/// A receive descriptor of two 64-bit words, of which the device writes the second last.
pub trait RxFormat: Send + 'static {
    /// The shortest frame that a device can report, in bytes, without the frame check sequence: an
    /// Ethernet header. What is shorter is no frame (R8).
    const SHORTEST: u32 = 14;
    /// A descriptor that offers the buffer at `iova`, its done bit clear.
    fn post(iova: Iova) -> [u64; 2];
    /// Whether the second word says that the device is finished with the buffer.
    fn is_done(word: u64) -> bool;
    /// Whether the second word is done and reports one whole frame without error: the only case that
    /// the fast path takes.
    fn is_clean(word: u64) -> bool;
    /// Whether the second word reports a whole frame with an error, to be dropped.
    fn is_error(word: u64) -> bool;
    /// Bytes received.
    fn len(word: u64) -> u32;
}

/// A transmit descriptor of two 64-bit words, of which the device writes the second back.
pub trait TxFormat: Send + 'static {
    /// The shortest frame that the device takes, in bytes, without the frame check sequence.
    const SHORTEST: u32;
    /// A descriptor that sends `len` bytes at `iova`; with `report` the device says when it is done.
    /// Only the first word depends on `iova`.
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2];
    /// Whether the second word says that the device is done with this descriptor and every one
    /// before it.
    fn is_done(word: u64) -> bool;
}
