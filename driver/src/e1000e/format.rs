//! The family's descriptors, as the rings see them.

use failstop_dma::iova::Iova;
use failstop_queues::format::{RxFormat, TxFormat, clean_len};

use super::descriptors::{RxDone, RxErrors, RxRead, RxStatus, TxDone, TxLegacy};

/// Extended receive descriptors.
#[derive(Debug)]
pub struct Extended;

/// Legacy transmit descriptors.
#[derive(Debug)]
pub struct Legacy;

const DONE: u32 = RxStatus::DD.bits();
const WHOLE: u32 = RxStatus::EOP.bits();
const ERRORS: u32 = RxErrors::FRAME.bits();

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
    fn clean_len(word: u64) -> u64 {
        clean_len(word, DONE | WHOLE | ERRORS, DONE | WHOLE)
    }

    #[inline(always)]
    fn is_error(word: u64) -> bool {
        word as u32 & WHOLE != 0 && word as u32 & ERRORS != 0
    }
}

impl TxFormat for Legacy {
    // The MAC pads to 64 bytes (TCTL.PSP), but takes no packet under 17. §10.2.6.1
    const SHORTEST: u32 = 17;

    #[inline(always)]
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2] {
        TxLegacy::whole_words(iova.0, len, report)
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        TxDone(word).is_done()
    }
}

#[cfg(test)]
mod tests {
    use failstop_queues::format::NOT_CLEAN;

    use super::*;

    const FRAME: u64 = 0x0000_003C_0000_0003;

    #[test]
    fn a_whole_frame_is_clean() {
        assert_eq!(Extended::clean_len(FRAME), 60);
        assert!(!Extended::is_error(FRAME));
    }

    #[test]
    fn a_wrong_tcp_checksum_leaves_the_frame_clean() {
        assert_eq!(Extended::clean_len(FRAME | 1 << 29), 60);
    }

    #[test]
    fn each_error_of_the_frame_makes_it_an_error() {
        for bit in [24, 25, 26, 28, 31] {
            let word = FRAME | 1 << bit;
            assert!(
                Extended::is_error(word) && Extended::clean_len(word) >= NOT_CLEAN,
                "{bit}"
            );
        }
    }

    #[test]
    fn a_part_of_a_frame_is_neither_clean_nor_an_error() {
        let part = 0x0000_0800_0000_0001;
        assert!(Extended::clean_len(part) >= NOT_CLEAN && !Extended::is_error(part));
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
