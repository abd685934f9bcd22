//! What the ladder does to the ledger: closes it, unmaps every entry, and settles what may go (R4).

use std::mem;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use failstop_pci::id::Generation;
use failstop_pci::transport::{Iova, Unmapped};

use super::Ledger;
use super::accounts::{Accounts, Kept};
use super::entry::{Entry, Key, Line, Reach, State, Why};
use crate::memory::Memory;
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
    pub(crate) freed: Vec<Arc<Memory>>,
    pub(crate) released_bytes: u64,
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

impl Accounts {
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

    /// Hands addresses out again that were kept until the function forgot them.
    fn give_back_forgotten(&mut self) {
        let kept = mem::take(&mut self.kept).into_iter();
        let (forgotten, kept): (Vec<_>, _) = kept.partition(|kept| self.is_forgotten(kept.life));
        self.kept = kept;
        for Kept { iova, len, .. } in forgotten {
            self.iovas.give_back(iova, len);
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
        let mut accounts = self.accounts();
        if !accounts.lives.is_closed() {
            accounts.lives.close();
            accounts.epoch += 1;
            (accounts.enforced, accounts.detached) = (false, false);
        }
    }

    /// The function was taken out of the address space. False while the ledger is open.
    pub(crate) fn detached(&self) -> bool {
        let mut accounts = self.accounts();
        let closed = accounts.lives.is_closed();
        accounts.detached |= closed;
        closed
    }

    /// Entries of a new life are taken. What is left of the old ones is quarantined.
    pub(crate) fn reopen(&self) {
        let now = self.times.stamp();
        let mut accounts = self.accounts();
        if accounts.lives.is_closed() {
            accounts.lives.reopen();
            accounts.detached = false;
            accounts.epoch += 1;
            let left: Vec<_> = accounts.all().map(|(key, _)| key).collect();
            for key in left {
                if let Some(entry) = accounts.entry(&key) {
                    let (state, why) = Accounts::rest(entry);
                    accounts.set(&key, state, Some(why), now);
                }
            }
        }
    }

    /// The name of this closing; none while the ledger is open.
    pub(crate) fn closing(&self) -> Option<u64> {
        let accounts = self.accounts();
        accounts.lives.is_closed().then_some(accounts.epoch)
    }

    /// A new attempt at unmapping: what failed before is tried again. `enforced`: unmaps count by
    /// themselves.
    pub(crate) fn begin_sweep(&self, enforced: bool) {
        let mut accounts = self.accounts();
        accounts.enforced |= enforced;
        for entry in accounts.entries.iter_mut() {
            if entry.reach == Reach::Unsure {
                entry.reach = Reach::Mapped;
            }
        }
    }

    /// The next entry, beyond the one at `after`, that is to be unmapped: the caller makes the call,
    /// then says [`Ledger::swept`]. None when there is no more, or the closing is over.
    pub(crate) fn claim(&self, closing: u64, after: Option<Iova>) -> Option<(Key, u64)> {
        let now = self.times.stamp();
        let mut accounts = self.accounts();
        if !accounts.lives.is_closed() || accounts.epoch != closing {
            return None;
        }
        let from = after.map_or(Bound::Unbounded, |iova| Bound::Excluded(iova.0));
        let Accounts { entries, index, .. } = &mut *accounts;
        let mut beyond = index.by_address().range((from, Bound::Unbounded));
        let mapped = beyond.find_map(|(&iova, &slot)| {
            let entry = entries.get(slot)?;
            let iova = Iova(iova);
            (entry.reach == Reach::Mapped).then_some((Key { iova, slot }, entry.len))
        });
        let (key, len) = mapped?;
        accounts.entry(&key)?.reach = Reach::Calling;
        accounts.set(&key, State::Revoking, None, now);
        Some((key, len))
    }

    /// The call for a claimed entry returned. It is kept until it is settled; only when that was
    /// done meanwhile, or its owner has let go, it goes at once if it may.
    pub(crate) fn swept(
        &self,
        key: &Key,
        outcome: Unmapped,
        enforced: bool,
    ) -> Option<Arc<Memory>> {
        let now = self.times.stamp();
        self.came_back(|accounts| {
            let entry = accounts.entry(key)?;
            entry.reach = Reach::after(outcome, enforced);
            let (state, let_go, life) = (entry.state, entry.let_go, entry.owner.generation);
            let settled = state == State::Quarantined;
            let entry = accounts.entries.get(key.slot)?;
            if accounts.may_go(entry) && (settled || let_go) {
                let reusable = accounts.is_forgotten(life);
                return accounts.release(key, reusable);
            }
            let reason = (settled || outcome != Unmapped::Exact).then_some(Why::of(outcome));
            accounts.set(key, state, reason, now);
            None
        })
    }

    /// Waits until a call comes back, `time` of the machine's at most. False when there is nothing
    /// to wait for: no call is under way, and nothing is left to be unmapped.
    pub(crate) fn wait(&self, closing: u64, time: Duration) -> bool {
        let mut accounts = self.accounts();
        let pending = |entry: &Entry| matches!(entry.reach, Reach::Calling | Reach::Mapped);
        if accounts.epoch != closing || !accounts.entries.iter().any(pending) {
            return false;
        }
        self.returned.wait_for(&mut accounts, time);
        true
    }

    /// What came of unmapping so far.
    pub(crate) fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for entry in self.accounts().entries.iter() {
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
    /// after that life; `ground`: so that memory may go, since nobody else can reach it either;
    /// `forgotten`: by more than its own word, so that it aims at none of its addresses any more.
    ///
    /// On an open ledger a stop says nothing, only what is in quarantine is looked at, and no life is
    /// covered.
    pub(crate) fn settle(
        &self,
        stopped: Option<Generation>,
        ground: bool,
        forgotten: bool,
    ) -> Settlement {
        let (now, scale) = (self.times.stamp(), self.times.scale());
        let mut accounts = self.accounts();
        // While it is open, a life may go on after the stop.
        let stopped = stopped.filter(|_| accounts.lives.is_closed());
        if forgotten {
            accounts.forgotten = accounts.forgotten.max(stopped);
        }
        // The stop says nothing of what would be entered after it.
        accounts.lives.end(stopped);
        if ground {
            accounts.stopped = accounts.stopped.max(stopped);
        }
        let mut settlement = Settlement::default();
        let closed = accounts.lives.is_closed();
        let concerned: Vec<_> = accounts
            .all()
            .filter(|(_, entry)| closed || entry.state == State::Quarantined)
            .map(|(key, _)| key)
            .collect();
        for key in concerned {
            let Some(entry) = accounts.entries.get(key.slot) else {
                continue;
            };
            let (may_go, (state, why)) = (accounts.may_go(entry), Accounts::rest(entry));
            if may_go {
                let Some(entry) = accounts.entry(&key) else {
                    continue;
                };
                let (len, life) = (entry.len, entry.owner.generation);
                let reusable = accounts.is_forgotten(life);
                settlement.released_bytes += len;
                settlement.freed.extend(accounts.release(&key, reusable));
            } else {
                accounts.set(&key, state, Some(why), now);
                let line = accounts
                    .entry(&key)
                    .map(|entry| entry.line(key.iova, &scale));
                settlement.kept.extend(line);
            }
        }
        accounts.give_back_forgotten();
        settlement.covered = accounts.cover();
        settlement
    }

    /// The function is proven stopped: nothing can be entered for this life and older ones any more.
    pub(crate) fn end(&self, life: Generation) {
        self.accounts().lives.end(Some(life));
    }
}

impl Accounts {
    /// What can be said of every life so far: whatever is not entered any more was released on a
    /// ground of its own, so that only what is entered is left out.
    fn cover(&mut self) -> Option<Covered> {
        if !self.lives.is_closed() {
            return None;
        }
        let up_to = self.lives.newest().max(self.stopped)?;
        let ground = if self.is_stopped(up_to) {
            Ground::Stopped
        } else if self.enforced || self.detached {
            Ground::Unmapped
        } else {
            return None;
        };
        self.lives.end(Some(up_to));
        let except = self.all().map(|(key, _)| key.iova).collect();
        Some(Covered {
            ground,
            up_to,
            except,
        })
    }
}
