//! What the ladder does to the ledger: closes it, unmaps every entry, and settles what may go (R4).

use std::mem;
use std::ops::Bound;
use std::sync::PoisonError;
use std::time::Duration;

use failstop_pci::id::Generation;
use failstop_pci::transport::{Iova, Unmapped};

use super::{Entry, Freed, Inner, Key, Ledger, Line, Reach, State, Why, key};
use crate::proof::Ground;

/// What is unmapped, and what is not.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Sums {
    pub(crate) unmapped: u64,
    pub(crate) absent: u64,
    pub(crate) failed: u64,
    pub(crate) in_flight: u64,
    pub(crate) untried: u64,
}

/// What came of settling.
#[must_use]
#[derive(Default)]
pub(crate) struct Settlement {
    pub(crate) freed: Vec<Freed>,
    pub(crate) released_bytes: u64,
    /// Addresses that were released before, and may be handed out again now, with their bytes.
    pub(crate) reusable: Vec<(Iova, u64)>,
    pub(crate) kept: Vec<Line>,
    pub(crate) covered: Option<Covered>,
}

/// What a whole life's proof says.
pub(crate) struct Covered {
    pub(crate) ground: Ground,
    pub(crate) up_to: Generation,
    /// Ascending.
    pub(crate) except: Box<[Iova]>,
}

impl Inner {
    fn is_stopped(&self, life: Generation) -> bool {
        self.stopped.is_some_and(|stopped| life <= stopped)
    }

    fn is_forgotten(&self, life: Generation) -> bool {
        self.forgotten.is_some_and(|forgotten| life <= forgotten)
    }

    /// Whether the memory of an entry that was unmapped after a break may go.
    fn may_go(&self, entry: &Entry) -> bool {
        let life = entry.owner.generation;
        match entry.reach {
            Reach::Revoked => true,
            Reach::Unmapped => entry.let_go || self.detached || self.is_stopped(life),
            Reach::Absent => self.detached || self.is_stopped(life),
            Reach::Mapped | Reach::Unsure => self.detached,
            Reach::Calling => false,
        }
    }

    /// What an entry that does not go is from now on, and why.
    fn rest(entry: &Entry) -> (State, Why) {
        match (entry.state, entry.reach) {
            (State::Mapping, _) => (State::Mapping, Why::InMap),
            (State::Unmapping, _) => (State::Unmapping, Why::InUnmap),
            (_, Reach::Calling) => (State::Quarantined, Why::InUnmap),
            (_, Reach::Unmapped | Reach::Revoked) => (State::Quarantined, Why::NotStopped),
            (_, Reach::Absent) => (State::Quarantined, Why::Absent),
            (_, Reach::Mapped) => (State::Quarantined, entry.reason.unwrap_or(Why::NotTried)),
            (_, Reach::Unsure) => (State::Quarantined, entry.reason.unwrap_or(Why::Failed)),
        }
    }
}

impl Ledger {
    /// No new entry is taken from now on (R2). Closing twice is closing once.
    pub(crate) fn close(&self) {
        let mut inner = self.inner();
        if !inner.closed {
            inner.closed = true;
            inner.epoch += 1;
            inner.closed_at = inner.next_serial;
            (inner.enforced, inner.detached) = (false, false);
        }
    }

    /// The function was taken out of the address space. False while the ledger is open.
    pub(crate) fn detached(&self) -> bool {
        let mut inner = self.inner();
        inner.detached |= inner.closed;
        inner.closed
    }

    /// Entries of a new life are taken. What is left of the old ones is quarantined.
    pub(crate) fn reopen(&self, now: Duration) {
        let mut inner = self.inner();
        if inner.closed {
            (inner.closed, inner.detached) = (false, false);
            inner.epoch += 1;
            let left: Vec<_> = inner.all().map(|(key, _)| key).collect();
            for key in left {
                if let Some(entry) = inner.entry(key) {
                    let (state, why) = Inner::rest(entry);
                    inner.set(key, state, Some(why), now);
                }
            }
        }
    }

    /// The name of this closing; none while the ledger is open.
    pub(crate) fn closing(&self) -> Option<u64> {
        let inner = self.inner();
        inner.closed.then_some(inner.epoch)
    }

    /// A new attempt at unmapping: what failed before is tried again. `enforced`: unmaps count by
    /// themselves.
    pub(crate) fn begin_sweep(&self, enforced: bool) {
        let mut inner = self.inner();
        inner.enforced |= enforced;
        for entry in inner.entries.iter_mut().map(|(_, entry)| entry) {
            if entry.reach == Reach::Unsure {
                entry.reach = Reach::Mapped;
            }
        }
    }

    /// The next entry, beyond the one at `after`, that is to be unmapped: the caller makes the call,
    /// then says [`Ledger::swept`]. None when there is no more, or the closing is over.
    pub(crate) fn claim(
        &self,
        closing: u64,
        after: Option<Iova>,
        now: Duration,
    ) -> Option<(Key, u64)> {
        let mut inner = self.inner();
        if !inner.closed || inner.epoch != closing {
            return None;
        }
        let from = after.map_or(Bound::Unbounded, |iova| Bound::Excluded(iova.0));
        let Inner { entries, index, .. } = &mut *inner;
        let mut beyond = index.by_address().range((from, Bound::Unbounded));
        let mapped = beyond.find_map(|(&iova, &slot)| {
            let entry = entries.get(slot)?;
            (entry.reach == Reach::Mapped).then(|| (key(iova, slot, entry), entry.len))
        });
        let (key, len) = mapped?;
        inner.entry(key)?.reach = Reach::Calling;
        inner.set(key, State::Revoking, None, now);
        Some((key, len))
    }

    /// The call for a claimed entry returned. It is kept until it is settled; only when that was
    /// done meanwhile, or its owner has let go, it goes at once if it may.
    pub(crate) fn swept(
        &self,
        key: Key,
        outcome: Unmapped,
        enforced: bool,
        now: Duration,
    ) -> Option<Freed> {
        let mut inner = self.inner();
        self.came_back(&inner);
        let entry = inner.entry(key)?;
        entry.reach = Reach::after(outcome, enforced);
        let (state, let_go, life) = (entry.state, entry.let_go, entry.owner.generation);
        let settled = state == State::Quarantined;
        let may_go = inner
            .entries
            .get(key.slot)
            .is_some_and(|entry| inner.may_go(entry));
        if may_go && (settled || let_go) {
            let reusable = inner.is_forgotten(life);
            return inner.release(key, reusable);
        }
        let reason = (settled || outcome != Unmapped::Exact).then_some(Why::of(outcome));
        inner.set(key, state, reason, now);
        None
    }

    /// Waits until a call comes back, `time` of the machine's at most. False when there is nothing
    /// to wait for: no call is under way, and nothing is left to be unmapped.
    pub(crate) fn wait(&self, closing: u64, time: Duration) -> bool {
        let mut inner = self.inner();
        let pending = |entry: &Entry| matches!(entry.reach, Reach::Calling | Reach::Mapped);
        if inner.epoch != closing || !inner.entries.iter().any(|(_, entry)| pending(entry)) {
            return false;
        }
        inner.waiting += 1;
        let waited = self.returned.wait_timeout(inner, time);
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inner.waiting -= 1;
        true
    }

    /// What came of unmapping so far.
    pub(crate) fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for (_, entry) in &self.inner().entries {
            *match entry.reach {
                Reach::Unmapped | Reach::Revoked => &mut sums.unmapped,
                Reach::Absent => &mut sums.absent,
                Reach::Unsure => &mut sums.failed,
                Reach::Calling => &mut sums.in_flight,
                Reach::Mapped => &mut sums.untried,
            } += 1;
        }
        sums
    }

    /// Strikes out what may go, and quarantines the rest. `stopped`: the function was proven stopped
    /// after that life; `ground`: so that memory may go, since nobody else can reach it either.
    ///
    /// On an open ledger a stop says nothing, only what is in quarantine is looked at, and no life is
    /// covered.
    pub(crate) fn settle(
        &self,
        stopped: Option<Generation>,
        ground: bool,
        now: Duration,
    ) -> Settlement {
        let mut inner = self.inner();
        // While it is open, a life may go on after the stop.
        let stopped = stopped.filter(|_| inner.closed);
        inner.forgotten = inner.forgotten.max(stopped);
        // The stop says nothing of what would be entered after it.
        inner.over = inner.over.max(stopped);
        if ground {
            inner.stopped = inner.stopped.max(stopped);
        }
        let mut settlement = Settlement::default();
        let closed = inner.closed;
        let concerned: Vec<_> = inner
            .all()
            .filter(|(_, entry)| closed || entry.state == State::Quarantined)
            .map(|(key, _)| key)
            .collect();
        for key in concerned {
            let Some(entry) = inner.entries.get(key.slot) else {
                continue;
            };
            let (may_go, (state, why)) = (inner.may_go(entry), Inner::rest(entry));
            if may_go {
                let Some(entry) = inner.entry(key) else {
                    continue;
                };
                let (len, life) = (entry.len, entry.owner.generation);
                let reusable = inner.is_forgotten(life);
                settlement.released_bytes += len;
                settlement.freed.extend(inner.release(key, reusable));
            } else {
                inner.set(key, state, Some(why), now);
                let line = inner.entry(key).map(|entry| entry.line(key.iova.0));
                settlement.kept.extend(line);
            }
        }
        let (reusable, kept): (Vec<_>, _) = mem::take(&mut inner.kept)
            .into_iter()
            .partition(|kept| inner.is_forgotten(kept.life));
        inner.kept = kept;
        settlement.reusable = reusable.iter().map(|kept| (kept.iova, kept.len)).collect();
        settlement.covered = inner.cover();
        settlement
    }

    /// The function is proven stopped: nothing can be entered for this life and older ones any more.
    pub(crate) fn end(&self, life: Generation) {
        let mut inner = self.inner();
        inner.over = inner.over.max(Some(life));
    }
}

impl Inner {
    /// What can be said of every life so far: whatever is not entered any more was released on a
    /// ground of its own, so that only what is entered is left out.
    fn cover(&mut self) -> Option<Covered> {
        if !self.closed {
            return None;
        }
        let up_to = self.newest.max(self.stopped)?;
        let ground = if self.is_stopped(up_to) {
            Ground::Stopped
        } else if self.enforced || self.detached {
            Ground::Unmapped
        } else {
            return None;
        };
        self.over = self.over.max(Some(up_to));
        let except = self.all().map(|(key, _)| key.iova).collect();
        Some(Covered {
            ground,
            up_to,
            except,
        })
    }
}
