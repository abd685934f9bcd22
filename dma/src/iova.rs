//! Which I/O virtual addresses are handed out, and when again.

use std::collections::BTreeMap;
use std::mem;
use std::ops::{Range, RangeInclusive};

pub use failstop_pci::transport::Iova;
use thiserror::Error;

/// The smallest window that addresses are handed out in, in bytes.
const WINDOW: u64 = 4 << 30;

/// No stretch of the wanted size is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "no {len:#x} bytes of IOVA space are free, with a guard page, within the device's {mask:#x}"
)]
pub struct NoSpace {
    /// Bytes wanted.
    pub len: u64,
    /// The highest address that the device can put on the bus.
    pub mask: u64,
}

/// Hands out IOVAs in a circle, with an unmapped guard page after each stretch, inside a window
/// (R2).
///
/// In a circle, so that a late access to a stretch that was given back meets nothing for as long
/// as possible. In a window (the larger of 4 GiB and eight times the peak), because the kernel
/// frees page-table pages only when one unmap covers them whole, and a circle through all of the
/// space would eat host memory (C38).
#[derive(Debug)]
pub struct IovaAllocator {
    /// What the kernel and the device allow, ascending, whole pages.
    allowed: Vec<RangeInclusive<u64>>,
    mask: u64,
    page: u64,
    /// What is added to a length before `whole` cuts it down to whole pages: a guard page, and what
    /// rounds it up.
    padding: u64,
    whole: u64,
    /// Runs of stretches that are handed out and touch, guard pages included: start and end. A
    /// search passes over a run at once, however many stretches it has.
    used: BTreeMap<u64, u64>,
    /// The run that the newest stretch is of, or was: not in `used`, so that most calls look at
    /// nothing else. The next stretch is looked for from its end on.
    open: Range<u64>,
    /// From the end of `open` to here, at least, everything is free, allowed and in the window.
    room: u64,
    /// Handed out, guard pages left out.
    bytes: u64,
    /// The most of them that there ever were.
    peak: u64,
}

impl IovaAllocator {
    /// An allocator over `ranges` (the kernel's, reserved windows left out) as far as `mask` (the
    /// device's highest address, inclusive) reaches. `page` is the IOMMU's page size in bytes,
    /// a power of two.
    #[must_use]
    pub fn new(ranges: &[RangeInclusive<u64>], mask: u64, page: u64) -> Self {
        let page = page.checked_next_power_of_two().unwrap_or(1 << 63);
        let allowed = ranges
            .iter()
            .filter_map(|range| {
                // Address 0 is never handed out: too many devices and people take it for none.
                let start = round_up((*range.start()).max(page), page)?;
                let end = (*range.end()).min(mask);
                let end = end
                    .checked_add(1)
                    .map_or(u64::MAX - (page - 1), |end| end / page * page);
                (start < end).then(|| start..=end - 1)
            })
            .collect();
        Self {
            allowed,
            mask,
            page,
            padding: page + (page - 1),
            whole: !(page - 1),
            used: BTreeMap::new(),
            open: 0..0,
            room: 0,
            bytes: 0,
            peak: 0,
        }
    }

    /// Takes `len` bytes, rounded up to whole pages, starting at a multiple of `align` (a power
    /// of two; at least the page size is used, also for 0).
    ///
    /// # Errors
    ///
    /// [`NoSpace`].
    #[inline]
    pub fn take(&mut self, len: u64, align: u64) -> Result<Iova, NoSpace> {
        let taken = self.place(len, align).map(Iova);
        taken.ok_or_else(|| self.no_space(len))
    }

    /// The bytes that a stretch of `len` takes up: whole pages, and the guard page.
    #[inline]
    fn span(&self, len: u64) -> Option<u64> {
        Some(len.checked_add(self.padding)? & self.whole)
    }

    #[cold]
    fn no_space(&self, len: u64) -> NoSpace {
        let mask = self.mask;
        NoSpace { len, mask }
    }

    #[inline]
    fn place(&mut self, len: u64, align: u64) -> Option<u64> {
        if len == 0 {
            return None;
        }
        let span = self.span(len)?;
        if align > self.page {
            self.align(align);
        }
        let next = self.open.end;
        let (start, end) = match next.checked_add(span) {
            Some(end) if end <= self.room => (next, end),
            _ => self.find(span, align.max(self.page))?,
        };
        self.open.end = end;
        self.bytes += span - self.page;
        if self.bytes > self.peak {
            self.peak = self.bytes;
        }
        Some(start)
    }

    /// Goes on at a multiple of `align`.
    #[inline(never)]
    fn align(&mut self, align: u64) {
        let next = round_up(self.open.end, align).unwrap_or(u64::MAX);
        if next != self.open.end {
            self.close(next);
        }
    }

    /// Opens a run where `span` bytes are free. Returns where they start and end.
    #[inline(never)]
    fn find(&mut self, span: u64, align: u64) -> Option<(u64, u64)> {
        let from = self.open.end;
        self.close(from);
        let peak = self.peak.max(self.bytes + (span - self.page));
        let window = WINDOW.max(peak.saturating_mul(8));
        let ranges = within(&self.allowed, window);
        let start = self
            .search(&ranges, from, span, align)
            .or_else(|| self.search(&ranges, 0, span, align))
            // A crowded window is no reason to fail while there is room above it.
            .or_else(|| self.search(&self.allowed, 0, span, align))?;
        self.open = start..start;
        if let Some((&before, &end)) = self.used.range(..start).next_back()
            && end == start
        {
            self.used.remove(&before);
            self.open.start = before;
        }
        let range = ranges.iter().find(|range| range.contains(&start));
        // Above the window there is no room for a second one without another search.
        let end = range.map_or(0, |range| range.end().saturating_add(1));
        let after = self.used.range(start..).next();
        self.room = after.map_or(end, |(&after, _)| end.min(after));
        Some((start, start + span))
    }

    /// Puts the open run where the others are. The next one begins at `next`.
    fn close(&mut self, next: u64) {
        let run = mem::replace(&mut self.open, next..next);
        if !run.is_empty() {
            self.put(run);
        }
    }

    #[inline(never)]
    fn put(&mut self, Range { start, mut end }: Range<u64>) {
        if let Some(to) = self.used.remove(&end) {
            end = to;
        }
        self.used.insert(start, end);
    }

    /// Gives a stretch back: `len` bytes, as they were taken. What is not handed out is ignored;
    /// part of a stretch, or one given back twice, is the caller's error.
    #[inline]
    pub fn give_back(&mut self, iova: Iova, len: u64) {
        let Iova(start) = iova;
        let Some(span) = self.span(len) else {
            return;
        };
        let Some(end) = start.checked_add(span) else {
            return;
        };
        if self.open.start == start && end <= self.open.end {
            self.open.start = end;
        } else if !self.split(start, end) {
            return;
        }
        self.bytes -= span - self.page;
    }

    /// Takes a stretch out of a run, but not from the start of the open one. False when there is no
    /// such run.
    #[inline(never)]
    fn split(&mut self, start: u64, end: u64) -> bool {
        if self.open.start < start && end <= self.open.end {
            // What is closed ends where this stretch began, so that the next one is taken behind it.
            self.put(self.open.start..start);
            self.open.start = end;
            return true;
        }
        let run = self.used.range(..=start).next_back();
        let Some((&from, &to)) = run.filter(|&(_, &to)| end <= to) else {
            return false;
        };
        if from < start {
            self.used.insert(from, start);
        } else {
            self.used.remove(&from);
        }
        if end < to {
            self.used.insert(end, to);
        }
        true
    }

    /// The first start at or after `from` where `span` bytes are free.
    fn search(
        &self,
        ranges: &[RangeInclusive<u64>],
        from: u64,
        span: u64,
        align: u64,
    ) -> Option<u64> {
        let skip = ranges.partition_point(|range| *range.end() < from);
        ranges.get(skip..)?.iter().find_map(|range| {
            let mut at = round_up((*range.start()).max(from), align)?;
            // Whoever began before `at` may reach into it.
            if let Some((_, &end)) = self.used.range(..at).next_back()
                && end > at
            {
                at = round_up(end, align)?;
            }
            if at > *range.end() {
                return None;
            }
            for (&start, &end) in self.used.range(at..=*range.end()) {
                if at.checked_add(span)? <= start {
                    break;
                }
                if end > at {
                    at = round_up(end, align)?;
                }
            }
            (at.checked_add(span - 1)? <= *range.end()).then_some(at)
        })
    }
}

/// Up to the next multiple of `to`, a power of two.
fn round_up(value: u64, to: u64) -> Option<u64> {
    Some(value.checked_add(to - 1)? & !(to - 1))
}

/// The first `bytes` of `ranges`.
fn within(ranges: &[RangeInclusive<u64>], bytes: u64) -> Vec<RangeInclusive<u64>> {
    let mut left = bytes;
    ranges
        .iter()
        .map_while(|range| {
            let size = range.end() - range.start() + 1;
            let taken = size.min(left);
            left -= taken;
            (taken > 0).then(|| *range.start()..=range.start() + (taken - 1))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn ranges_39_bits() -> Vec<RangeInclusive<u64>> {
        vec![0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]
    }

    #[test]
    fn address_zero_is_not_handed_out() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        assert_eq!(iovas.take(1, 1), Ok(Iova(PAGE)));
    }

    #[test]
    fn a_guard_page_lies_between_neighbours() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        let first = iovas.take(2 * PAGE, 1).unwrap();
        let second = iovas.take(PAGE, 1).unwrap();
        assert_eq!(second.0 - first.0, 3 * PAGE);
    }

    #[test]
    fn what_was_given_back_is_used_last() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        let first = iovas.take(PAGE, 1).unwrap();
        iovas.give_back(first, PAGE);
        assert_ne!(iovas.take(PAGE, 1).unwrap(), first);
    }

    #[test]
    fn a_full_space_says_so_and_has_room_again_later() {
        let mut iovas = IovaAllocator::new(&[PAGE..=5 * PAGE - 1], u64::MAX, PAGE);
        let (first, second) = (iovas.take(PAGE, 1).unwrap(), iovas.take(PAGE, 1).unwrap());
        for align in [1, 2 * PAGE] {
            assert!(iovas.take(PAGE, align).is_err());
        }
        iovas.give_back(first, PAGE);
        assert_eq!(iovas.take(PAGE, 1), Ok(first));
        iovas.give_back(second, PAGE);
        assert_eq!(iovas.take(PAGE, 1), Ok(second));
    }

    #[test]
    fn what_was_not_handed_out_is_not_given_back() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        let first = iovas.take(PAGE, 1).unwrap();
        for (iova, len) in [(first, 3 * PAGE), (Iova(0), PAGE), (Iova(u64::MAX), PAGE)] {
            iovas.give_back(iova, len);
        }
        iovas.give_back(first, u64::MAX);
        assert_eq!(iovas.bytes, PAGE);
    }

    #[test]
    fn neighbours_cost_one_step_of_a_search() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        for _ in 0..60_000 {
            iovas.take(PAGE, 1).unwrap();
        }
        assert_eq!(iovas.used.len(), 0);
    }

    #[test]
    fn c22_the_reserved_window_and_the_devices_mask_are_respected() {
        let ranges = [0xfede_0000..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff];
        let mut iovas = IovaAllocator::new(&ranges, 0xffff_ffff, PAGE);
        while let Ok(Iova(start)) = iovas.take(0x8_0000, 1) {
            assert!(
                start >= 0xfef0_0000 && start + 0x8_0000 <= 1 << 32,
                "{start:#x}"
            );
        }
        let Iova(small) = iovas.take(PAGE, 1).unwrap();
        assert!(ranges.iter().any(|range| range.contains(&small)));
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        assert!(iovas.take(0, 1).is_err());
        assert!(iovas.take(1 << 40, 1).is_err());
        assert!(iovas.take(u64::MAX, 1).is_err());
    }

    #[test]
    fn all_of_a_64_bit_space_can_be_described() {
        let mut iovas = IovaAllocator::new(&[0..=u64::MAX], u64::MAX, PAGE);
        assert!(iovas.take(1 << 40, 1 << 21).is_ok());
    }

    #[test]
    fn c38_a_million_mappings_stay_inside_the_window() {
        let mut iovas = IovaAllocator::new(&ranges_39_bits(), u64::MAX, PAGE);
        let mut highest = 0;
        for _ in 0..1_000_000 {
            let iova = iovas.take(PAGE, 1).unwrap();
            highest = highest.max(iova.0 + PAGE);
            iovas.give_back(iova, PAGE);
        }
        // The window's 4 GiB and the MSI hole in it.
        assert!(highest <= WINDOW + 0x10_0000 + PAGE, "{highest:#x}");
    }

    proptest! {
        #[test]
        fn stretches_never_touch(steps in proptest::collection::vec((any::<bool>(), 1u64..40_000, 0u32..22), 1..200)) {
            let ranges = ranges_39_bits();
            let mut iovas = IovaAllocator::new(&ranges, 0x1_0000_0000, PAGE);
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for (take, len, align) in steps {
                if take || live.is_empty() {
                    let Iova(start) = iovas.take(len, 1 << align).unwrap();
                    let end = start + len.next_multiple_of(PAGE);
                    prop_assert!(start.is_multiple_of(PAGE.max(1 << align)));
                    prop_assert!(ranges.iter().any(|r| r.contains(&start) && r.contains(&(end - 1))));
                    let before = live.range(..=start).next_back().is_none_or(|(_, &e)| e + PAGE <= start);
                    let after = live.range(start..).next().is_none_or(|(&s, _)| end + PAGE <= s);
                    prop_assert!(before && after);
                    live.insert(start, end);
                } else if let Some((&start, &end)) = live.iter().nth(len as usize % live.len()) {
                    live.remove(&start);
                    iovas.give_back(Iova(start), end - start);
                }
                prop_assert_eq!(iovas.bytes, live.iter().map(|(s, e)| e - s).sum::<u64>());
            }
            for (start, end) in live {
                iovas.give_back(Iova(start), end - start);
            }
            prop_assert!(iovas.used.is_empty() && iovas.open.is_empty());
        }
    }
}
