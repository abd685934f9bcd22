//! Configuration space, as a function shows it.

use failstop_pci::capabilities::{Capabilities, List};
use failstop_pci::config::STANDARD_SIZE;

/// Bytes of a whole configuration space of PCI Express.
const EXTENDED_SIZE: usize = 4096;

/// The bytes as they are, and filled up to both sizes; the depth is how many capabilities there are.
pub(crate) fn run(data: &[u8]) -> u64 {
    let mut deepest = parse(data);
    for size in [STANDARD_SIZE, EXTENDED_SIZE] {
        let mut space = data.to_vec();
        space.resize(size, 0);
        deepest = deepest.max(parse(&space));
    }
    deepest
}

fn parse(space: &[u8]) -> u64 {
    let Ok(found) = Capabilities::parse(space) else {
        return 0;
    };
    let mut last: Vec<(u16, u16)> = Vec::new();
    for entry in &found.entries {
        let (start, end) = (entry.offset, entry.offset.saturating_add(entry.len));
        assert!(
            usize::from(end) <= space.len().max(STANDARD_SIZE),
            "{entry:?}"
        );
        assert!((entry.list == List::Standard) == (start < 256), "{entry:?}");
        assert!(
            last.iter().all(|(s, e)| end <= *s || *e <= start),
            "{entry:?} lies over another"
        );
        last.push((start, end));
    }
    let _ = (found.has_flr(), found.ats_enabled());
    found.entries.len() as u64
}
