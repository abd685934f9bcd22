//! The family's descriptors, as the rings see them.

use failstop_dma::iova::Iova;
use failstop_queues::format::{RxFormat, TxFormat};

use super::descriptors::{RxDone, RxErrors, RxRead, RxStatus, TxData, TxDone};

/// Advanced one-buffer receive descriptors, advanced transmit data descriptors.
#[derive(Debug)]
pub struct Advanced;

const DONE: u64 = RxStatus::DD.bits() as u64;
const WHOLE: u64 = RxStatus::EOP.bits() as u64;
const ERROR: u64 = RxErrors::RXE.bits() as u64;

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
    fn is_clean(word: u64) -> bool {
        word & (DONE | WHOLE | ERROR) == DONE | WHOLE
    }

    #[inline(always)]
    fn is_error(word: u64) -> bool {
        word & (WHOLE | ERROR) == WHOLE | ERROR
    }

    #[inline(always)]
    fn len(word: u64) -> u32 {
        RxDone(word).length().into()
    }
}

impl TxFormat for Advanced {
    // The MAC pads to 64 bytes (TCTL.PSP), but takes no packet under 17. §8.12.1
    const SHORTEST: u32 = 17;

    #[inline(always)]
    fn post(iova: Iova, len: u32, report: bool) -> [u64; 2] {
        // At most `longest_frame` by the ring's own check, so that 16 bits hold it.
        TxData::whole(iova.0, len as u16, report).words()
    }

    #[inline(always)]
    fn is_done(word: u64) -> bool {
        TxDone(word).is_done()
    }
}
