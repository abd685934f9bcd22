//! The family's descriptors, as the rings see them.

use failstop_dma::iova::Iova;
use failstop_queues::format::{RxFormat, TxFormat};

use super::descriptors::{RxDone, RxErrors, RxRead, RxStatus, TxDone, TxLegacy};

/// Extended receive descriptors.
#[derive(Debug)]
pub struct Extended;

/// Legacy transmit descriptors.
#[derive(Debug)]
pub struct Legacy;

const DONE: u64 = RxStatus::DD.bits() as u64;
const WHOLE: u64 = RxStatus::EOP.bits() as u64;
const ERRORS: u64 = RxErrors::FRAME.bits() as u64;

impl RxFormat for Extended {
    #[inline(always)]
    fn post(iova: Iova) -> [u64; 2] {
        RxRead { buffer: iova.0 }.words()
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        RxDone(word).is_done()
    }

    #[inline(always)]
    fn is_clean(word: u64) -> bool {
        word & (DONE | WHOLE | ERRORS) == DONE | WHOLE
    }

    #[inline(always)]
    fn is_error(word: u64) -> bool {
        word & WHOLE != 0 && word & ERRORS != 0
    }

    #[inline(always)]
    fn len(word: u64) -> u32 {
        RxDone(word).length().into()
    }
}

impl TxFormat for Legacy {
    // The MAC pads to 64 bytes (TCTL.PSP), but takes no packet under 17. §10.2.6.1
    const SHORTEST: u32 = 17;

    #[inline(always)]
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2] {
        // At most `longest_frame` by the ring's own check, so that 16 bits hold it.
        TxLegacy::whole(iova.0, len as u16, report).words()
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        TxDone(word).is_done()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: u64 = 0x0000_003C_0000_0003;

    #[test]
    fn a_whole_frame_is_clean() {
        assert!(Extended::is_clean(FRAME) && !Extended::is_error(FRAME));
        assert_eq!(Extended::len(FRAME), 60);
    }

    #[test]
    fn a_wrong_tcp_checksum_leaves_the_frame_clean() {
        assert!(Extended::is_clean(FRAME | 1 << 29));
    }

    #[test]
    fn each_error_of_the_frame_makes_it_an_error() {
        for bit in [24, 25, 26, 28, 31] {
            let word = FRAME | 1 << bit;
            assert!(
                Extended::is_error(word) && !Extended::is_clean(word),
                "{bit}"
            );
        }
    }

    #[test]
    fn a_part_of_a_frame_is_neither_clean_nor_an_error() {
        let part = 0x0000_0800_0000_0001;
        assert!(!Extended::is_clean(part) && !Extended::is_error(part));
    }

    #[test]
    fn nothing_that_is_posted_looks_done() {
        assert!(!Extended::is_done(Extended::post(Iova(0xFFFF_F000))[1]));
        assert!(!Legacy::is_done(Legacy::post(Iova(0), 60, true)[1]));
    }

    #[test]
    fn a_transmit_write_back_is_done() {
        assert!(Legacy::is_done(0x0000_0001_0B00_003C));
    }
}
