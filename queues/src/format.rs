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
    /// Bytes received, where the second word is done and reports one whole frame without error: the
    /// only case that the fast path takes. [`NOT_CLEAN`] or more otherwise, so that a burst learns by
    /// one comparison whether a frame is there and has a length that can be.
    fn clean_len(word: u64) -> u64;
    /// Whether the second word reports a whole frame with an error, to be dropped.
    fn is_error(word: u64) -> bool;
}

/// More bytes than any frame has: what [`RxFormat::clean_len`] says of a word that is not clean.
pub const NOT_CLEAN: u64 = 1 << 32;

/// [`RxFormat::clean_len`] of a word that has the length in bits 47:32 and whose other bits in `mask`, all
/// below, read `clean` for a whole frame without error.
#[inline(always)]
#[must_use]
pub const fn clean_len(word: u64, mask: u32, clean: u32) -> u64 {
    // Turned round, so that a bit that is wrong weighs more than any length.
    let reported = word & (0xFFFF << 32 | mask as u64);
    reported.rotate_left(32).wrapping_sub((clean as u64) << 32)
}

/// A transmit descriptor of two 64-bit words, of which the device writes the second back.
pub trait TxFormat: Send + 'static {
    /// The shortest frame that the device takes, in bytes, without the frame check sequence.
    const SHORTEST: u32;
    /// A descriptor that sends `len` bytes at `iova`, at most 65535 and at most the device's longest
    /// frame; with `report` the device says when it is done. Only the first word depends on `iova`.
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2];
    /// Whether the second word says that the device is done with this descriptor and every one
    /// before it.
    fn is_done(word: u64) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_word_is_its_length_whatever_else_is_in_it() {
        assert_eq!(clean_len(0xABCD_05DC_0000_0003, 0x8000_0003, 3), 1500);
        assert_eq!(clean_len(0x0000_003C_6000_0063, 0x8000_0003, 3), 60);
    }

    #[test]
    fn a_word_that_is_not_clean_is_longer_than_any_frame() {
        for bits in [0, 1, 2, 0x8000_0003, 0x8000_0000, 0xFFFF_FFFF] {
            let word = 60 << 32 | bits;
            assert!(clean_len(word, 0x8000_0003, 3) >= NOT_CLEAN, "{bits:#x}");
        }
    }
}
