//! Captures, as any program writes them.

/// The depth is how many frames there are.
pub(crate) fn pcap(data: &[u8]) -> u64 {
    failstop_tests::captured_frames(data).map_or(0, |frames| frames.len() as u64)
}
