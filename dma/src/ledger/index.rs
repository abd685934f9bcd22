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
    /// Adds an entry, or returns where the one begins that it overlaps, with its slot. `end` says
    /// where an entry ends.
    #[inline]
    pub(super) fn insert(
        &mut self,
        range: &Range<u64>,
        slot: usize,
        end: impl FnOnce(u64, usize) -> u64,
    ) -> Result<(), (u64, usize)> {
        if range.start < self.gap.start || self.gap.end < range.end {
            self.find_gap(range, end)?;
        }
        self.gap.start = range.end;
        if self.newest.is_some() {
            self.file_newest();
        }
        self.newest = Some((range.start, slot));
        Ok(())
    }

    #[inline(never)]
    fn file_newest(&mut self) {
        if let Some((at, slot)) = self.newest.take() {
            self.tree.insert(at, slot);
        }
    }

    /// Looks for the gap that the range is in.
    #[cold]
    #[inline(never)]
    fn find_gap(
        &mut self,
        range: &Range<u64>,
        end: impl FnOnce(u64, usize) -> u64,
    ) -> Result<(), (u64, usize)> {
        let tree = self.by_address();
        // Of those that begin before the range ends, only the last one may reach into it.
        if let Some((&at, &slot)) = tree.range(..range.end).next_back()
            && end(at, slot) > range.start
        {
            return Err((at, slot));
        }
        let after = tree.range(range.end..).next();
        self.gap.end = after.map_or(u64::MAX, |(&after, _)| after);
        Ok(())
    }

    /// Takes out the entry that begins there.
    #[inline]
    pub(super) fn remove(&mut self, at: u64) {
        match self.newest {
            Some((newest, _)) if newest == at => self.newest = None,
            _ => self.remove_older(at),
        }
    }

    #[inline(never)]
    fn remove_older(&mut self, at: u64) {
        self.tree.remove(&at);
    }

    /// All of them, in order.
    pub(super) fn by_address(&mut self) -> &BTreeMap<u64, usize> {
        self.file_newest();
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
            let mut entered: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
            for (slot, (enter, at, len)) in steps.into_iter().enumerate() {
                let range = at..at + len;
                if !enter {
                    if entered.remove(&at).is_some() {
                        index.remove(at);
                    }
                    continue;
                }
                let overlapped = entered.iter().rev().find(|(start, (end, _))| **start < range.end && at < *end);
                let expected = overlapped.map_or(Ok(()), |(&start, &(_, slot))| Err((start, slot)));
                prop_assert_eq!(index.insert(&range, slot, |start, _| entered[&start].0), expected);
                if expected.is_ok() {
                    entered.insert(at, (range.end, slot));
                }
            }
            let expected: Vec<_> = entered.iter().map(|(&at, &(_, slot))| (at, slot)).collect();
            let found: Vec<_> = index.by_address().iter().map(|(&at, &slot)| (at, slot)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
