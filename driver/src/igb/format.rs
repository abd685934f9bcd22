//! The family's descriptors, as the rings see them.

use failstop_dma::iova::Iova;
use failstop_queues::format::{RxFormat, TxFormat, clean_len};

use super::descriptors::{RxDone, RxErrors, RxRead, RxStatus, TxData, TxDone};

/// Advanced one-buffer receive descriptors, advanced transmit data descriptors.
#[derive(Debug)]
pub struct Advanced;

const DONE: u32 = RxStatus::DD.bits();
const WHOLE: u32 = RxStatus::EOP.bits();
const ERROR: u32 = RxErrors::RXE.bits();

impl RxFormat for Advanced {
    #[inline(always)]
    fn post(iova: Iova) -> [u64; 2] {
        RxRead::one_buffer(iova.0).words()
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        RxDone(word).is_done()
    }

    #[inline(always)]
    fn clean_len(word: u64) -> u64 {
        clean_len(word, DONE | WHOLE | ERROR, DONE | WHOLE)
    }

    #[inline(always)]
    fn is_error(word: u64) -> bool {
        word as u32 & (WHOLE | ERROR) == WHOLE | ERROR
    }
}

impl TxFormat for Advanced {
    // The MAC pads to 64 bytes (TCTL.PSP), but takes no packet under 17. §8.12.1
    const SHORTEST: u32 = 17;

    #[inline(always)]
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2] {
        TxData::whole_words(iova.0, len, report)
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        TxDone(word).is_done()
    }
}
