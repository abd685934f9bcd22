//! Which entry is where: found by address, for overlaps and for walks.

use std::collections::BTreeMap;
use std::ops::Range;

/// Slots of the ledger's entries by the address at which each begins.
///
/// Most mappings follow the one before, and many go before the next one comes. So the tree is not
/// touched for a range inside the gap that the last search found, nor by an entry that goes while it
/// is the newest.
#[derive(Default)]
pub(super) struct Index {
    /// All but the newest.
    tree: BTreeMap<u64, usize>,
    newest: Option<(u64, usize)>,
    /// Nothing is entered in here. There may be more around it, since entries go.
    gap: Range<u64>,
}

impl Index {
    fn in_gap(&self, range: &Range<u64>) -> bool {
        self.gap.start <= range.start && range.end <= self.gap.end
    }

    /// The entry that may overlap the range: of those that begin before it ends, the last one. None
    /// when there is no such entry, or it is known to end before the range.
    pub(super) fn before(&mut self, range: &Range<u64>) -> Option<(u64, usize)> {
        if self.in_gap(range) {
            return None;
        }
        let before = self.by_address().range(..range.end).next_back();
        before.map(|(&at, &slot)| (at, slot))
    }

    /// Adds an entry whose range nothing else overlaps.
    pub(super) fn insert(&mut self, range: &Range<u64>, slot: usize) {
        if !self.in_gap(range) {
            let after = self.by_address().range(range.end..).next();
            self.gap.end = after.map_or(u64::MAX, |(&after, _)| after);
        }
        self.gap.start = range.end;
        if let Some((at, slot)) = self.newest.replace((range.start, slot)) {
            self.tree.insert(at, slot);
        }
    }

    /// Takes out the entry that begins there.
    pub(super) fn remove(&mut self, at: u64) {
        if self.newest.take_if(|(newest, _)| *newest == at).is_none() {
            self.tree.remove(&at);
        }
    }

    /// All of them, in order.
    pub(super) fn by_address(&mut self) -> &BTreeMap<u64, usize> {
        if let Some((at, slot)) = self.newest.take() {
            self.tree.insert(at, slot);
        }
        &self.tree
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Beside a map that is searched every time.
        #[test]
        fn an_overlap_is_found_whatever_came_and_went(
            steps in proptest::collection::vec((any::<bool>(), 0u64..60, 1u64..5), 1..200),
        ) {
            let mut index = Index::default();
            let mut entered = BTreeMap::new();
            for (slot, (enter, at, len)) in steps.into_iter().enumerate() {
                let range = at..at + len;
                let free = |(&start, &(end, _)): (&u64, &(u64, usize))| end <= at || range.end <= start;
                if !enter {
                    if entered.remove(&at).is_some() {
                        index.remove(at);
                    }
                } else if entered.iter().all(free) {
                    let before = index.before(&range);
                    prop_assert!(before.is_none_or(|(start, _)| entered[&start].0 <= at));
                    index.insert(&range, slot);
                    entered.insert(at, (range.end, slot));
                } else {
                    let before = index.before(&range);
                    prop_assert!(before.is_some_and(|(start, _)| entered[&start].0 > at));
                }
            }
            let expected: Vec<_> = entered.iter().map(|(&at, &(_, slot))| (at, slot)).collect();
            let found: Vec<_> = index.by_address().iter().map(|(&at, &slot)| (at, slot)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
