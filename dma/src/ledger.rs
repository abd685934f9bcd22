//! The ledger: every range that the device can reach, whose it is, and in which state (R2).

use std::fmt;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use failstop_pci::id::Generation;
use failstop_pci::transport::{Iova, Unmapped};
use slab::Slab;
use thiserror::Error;

use crate::memory::Memory;
use crate::proof::ObjectId;

mod index;
mod revoke;
#[cfg(test)]
mod tests;

use index::Index;
pub(crate) use revoke::Covered;

/// Where a range is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// Entered; the map call has not returned.
    Mapping,
    /// The device can reach it.
    Live,
    /// Its owner let go of it on a proof; the unmap call has not returned.
    Unmapping,
    /// The ladder is unmapping it, or has, and its fate is not settled (R4.6).
    Revoking,
    /// Kept back for want of proof: leaked on purpose, until proof comes.
    Quarantined,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapping => "mapping",
            Self::Live => "live",
            Self::Unmapping => "unmapping",
            Self::Revoking => "revoking",
            Self::Quarantined => "quarantined",
        })
    }
}

/// One line of the ledger, for people and reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// Start of the range.
    pub iova: Iova,
    /// Bytes.
    pub len: u64,
    /// Whose.
    pub owner: ObjectId,
    /// State.
    pub state: State,
    /// Since when, on the address space's clock, a few milliseconds early at most. What a map call
    /// brought about counts from when that began.
    pub since: Duration,
    /// Why it is quarantined, or what it waits for.
    pub reason: Option<&'static str>,
}

/// The ledger's sums. Bytes and numbers of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Totals {
    /// Bytes that the device can reach by objects in use.
    pub live_bytes: u64,
    /// Mappings of them.
    pub live_mappings: u64,
    /// Bytes kept back for want of proof.
    pub quarantined_bytes: u64,
    /// Mappings of them.
    pub quarantined_mappings: u64,
    /// Bytes that no device reaches any more and that a handle still holds: freed when it is
    /// dropped (R5).
    pub held_bytes: u64,
    /// Mappings of them.
    pub held_mappings: u64,
    /// The most bytes that were ever entered at once.
    pub peak_bytes: u64,
    /// The most mappings that were ever entered at once.
    pub peak_mappings: u64,
}

/// A range that the ledger does not take.
#[derive(Debug, Error)]
pub enum Refused {
    /// Part of it is entered already (C24).
    #[error(
        "{len:#x} bytes at IOVA {iova} overlap {held:#x} bytes at {at}, which belong to {owner} ({state})"
    )]
    Overlap {
        /// Where.
        iova: Iova,
        /// Bytes.
        len: u64,
        /// The entry that is there.
        at: Iova,
        /// Its bytes.
        held: u64,
        /// Its owner.
        owner: ObjectId,
        /// Its state.
        state: State,
    },
    /// The device is broken, or the owner is of a life of it that is over: no new mapping begins
    /// (R2).
    #[error("the device is broken: nothing is mapped any more")]
    Closed,
}

/// What the transport said of a range last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    /// The device can reach it, or nobody knows better.
    Mapped,
    /// A map or unmap call for it has not returned: only the hand that made it changes the entry's
    /// reach, and nobody strikes it out.
    Calling,
    /// Unmapped exactly, by a transport that does not enforce anything.
    Unmapped,
    /// Unmapped exactly, by an enforcing IOMMU or on a server's word.
    Revoked,
    /// The transport knew no such mapping.
    Absent,
    /// The unmap failed, or was of another size.
    Unsure,
}

impl Reach {
    /// After an unmap call with that outcome.
    fn after(outcome: Unmapped, enforced: bool) -> Self {
        match outcome {
            Unmapped::Exact if enforced => Self::Revoked,
            Unmapped::Exact => Self::Unmapped,
            Unmapped::Busy => Self::Mapped,
            Unmapped::Absent => Self::Absent,
            Unmapped::Partial { .. } | Unmapped::Failed(_) => Self::Unsure,
        }
    }
}

/// Why an entry is not released: one byte, since there are many entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    NoProof,
    Unanswered,
    NotTried,
    InMap,
    InUnmap,
    NotStopped,
    Absent,
    Partial,
    Failed,
    Busy,
}

impl Why {
    const fn text(self) -> &'static str {
        match self {
            Self::NoProof => "no proof that the device let go of it",
            Self::Unanswered => "nobody answered whether it was mapped",
            Self::NotTried => "its unmap was not tried",
            Self::InMap => "its map call has not returned",
            Self::InUnmap => "its unmap call has not returned",
            Self::NotStopped => {
                "unmapped, but nothing enforces that and the function is not proven stopped"
            }
            Self::Absent => "the transport knew no such mapping",
            Self::Partial => "the transport unmapped another size",
            Self::Failed => "the unmap failed",
            Self::Busy => "the address space stayed busy",
        }
    }

    /// Of an unmap that was not exact.
    const fn of(outcome: Unmapped) -> Self {
        match outcome {
            Unmapped::Exact => Self::NotStopped,
            Unmapped::Absent => Self::Absent,
            Unmapped::Partial { .. } => Self::Partial,
            Unmapped::Failed(_) => Self::Failed,
            Unmapped::Busy => Self::Busy,
        }
    }
}

/// The name of an entry. The address alone names whoever uses it now: a handle of an entry that was
/// struck must not touch its next user's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) iova: Iova,
    /// Where it is kept: like the address, used again.
    slot: usize,
    serial: u64,
}

struct Entry {
    serial: u64,
    len: u64,
    owner: ObjectId,
    since: Duration,
    memory: Arc<Memory>,
    state: State,
    reach: Reach,
    reason: Option<Why>,
    /// Somebody has a [`Mapping`](crate::space::Mapping) of it.
    handle: bool,
    /// Its owner let go of it on a proof of its own, while another hand was unmapping it.
    let_go: bool,
}

impl Entry {
    fn line(&self, iova: u64) -> Line {
        Line {
            iova: Iova(iova),
            len: self.len,
            owner: self.owner,
            state: self.state,
            since: self.since,
            reason: self.reason.map(Why::text),
        }
    }
}

/// An address that is not to be handed out again before the function forgot it.
struct Kept {
    iova: Iova,
    len: u64,
    life: Generation,
}

#[derive(Default)]
struct Inner {
    entries: Slab<Entry>,
    index: Index,
    totals: Totals,
    next_serial: u64,
    closed: bool,
    /// Counts closings and reopenings, so that a hand that comes back late sees that it is.
    epoch: u64,
    /// Entries of a smaller serial were entered before the ledger was last closed.
    closed_at: u64,
    /// The newest life that anything was ever entered for.
    newest: Option<Generation>,
    /// Lives that a proof covers as a whole: nothing can be entered for them any more.
    over: Option<Generation>,
    /// The function was proven stopped after this life and the older ones, which is a ground for
    /// release: not by its own word, and alone in its space.
    stopped: Option<Generation>,
    /// The same without that condition: it forgot the addresses that it was given.
    forgotten: Option<Generation>,
    /// Since the ledger was closed, entries were unmapped by a transport whose unmap counts.
    enforced: bool,
    /// Since then the function was taken out of its address space, which it has to itself, by an
    /// IOMMU.
    detached: bool,
    /// Hands that wait for a call to come back.
    waiting: usize,
    /// Addresses where nothing is mapped and whose memory is released, while the function is not
    /// proven stopped: not to be handed out again yet.
    kept: Vec<Kept>,
}

impl Inner {
    fn entry(&mut self, key: Key) -> Option<&mut Entry> {
        self.entries
            .get_mut(key.slot)
            .filter(|entry| entry.serial == key.serial)
    }

    /// Every entry, by address.
    fn all(&mut self) -> impl Iterator<Item = (Key, &Entry)> {
        let Self { entries, index, .. } = self;
        let all = index.by_address().iter();
        all.filter_map(|(&iova, &slot)| {
            let entry = entries.get(slot)?;
            Some((key(iova, slot, entry), entry))
        })
    }

    /// Brings an entry into another state.
    fn set(&mut self, key: Key, state: State, reason: Option<Why>, now: Duration) {
        let Some(entry) = self.entry(key) else {
            return;
        };
        if entry.state != state {
            entry.since = now;
        }
        entry.reason = reason;
        let (before, len) = (mem::replace(&mut entry.state, state), entry.len);
        self.totals.take(before, len);
        self.totals.put(state, len);
    }

    /// Takes an entry out.
    fn strike(&mut self, key: Key) -> Option<Entry> {
        self.entry(key)?;
        let entry = self.entries.try_remove(key.slot)?;
        self.index.remove(key.iova.0);
        self.totals.take(entry.state, entry.len);
        if entry.handle {
            self.totals.held_bytes += entry.len;
            self.totals.held_mappings += 1;
        }
        Some(entry)
    }

    /// Takes an entry out that the device cannot reach. Its address may be used again if the device
    /// cannot aim at it either (`reusable`), and nothing is mapped there.
    fn release(&mut self, key: Key, reusable: bool) -> Option<Freed> {
        let entry = self.strike(key)?;
        let unmapped = !matches!(entry.reach, Reach::Mapped | Reach::Unsure);
        let reusable = reusable && unmapped;
        if unmapped && !reusable {
            self.kept.push(Kept {
                iova: key.iova,
                len: entry.len,
                life: entry.owner.generation,
            });
        }
        Some(Freed {
            memory: entry.memory,
            reusable: reusable.then_some(key.iova),
        })
    }

    /// Whether the ledger was never closed since the entry was made.
    fn undisturbed(&self, key: Key) -> bool {
        key.serial >= self.closed_at
    }

    fn bytes(&self) -> u64 {
        self.totals.live_bytes + self.totals.quarantined_bytes
    }
}

fn key(iova: u64, slot: usize, entry: &Entry) -> Key {
    Key {
        iova: Iova(iova),
        slot,
        serial: entry.serial,
    }
}

impl Totals {
    fn sums(&mut self, state: State) -> (&mut u64, &mut u64) {
        if state == State::Quarantined {
            (&mut self.quarantined_bytes, &mut self.quarantined_mappings)
        } else {
            (&mut self.live_bytes, &mut self.live_mappings)
        }
    }

    fn put(&mut self, state: State, len: u64) {
        let (bytes, mappings) = self.sums(state);
        (*bytes, *mappings) = (*bytes + len, *mappings + 1);
    }

    fn take(&mut self, state: State, len: u64) {
        let (bytes, mappings) = self.sums(state);
        (*bytes, *mappings) = (*bytes - len, *mappings - 1);
    }

    fn shell_dropped(&mut self, len: u64) {
        self.held_bytes -= len;
        self.held_mappings -= 1;
    }
}

/// Memory that left the ledger, to be dropped when no lock is held, and the address that may be
/// handed out again.
#[must_use]
pub(crate) struct Freed {
    pub(crate) memory: Arc<Memory>,
    pub(crate) reusable: Option<Iova>,
}

/// What an owner that lets go of its entry on a proof does next.
pub(crate) enum LetGo {
    /// The entry is gone: nothing.
    Struck,
    /// Another hand is unmapping it: nothing, the entry is left to that one.
    Left,
    /// It is unmapped already.
    Freed(Freed),
    /// The transport knew no such mapping when it was to be unmapped.
    Absent,
    /// Make the unmap call, then [`Ledger::unmap_returned`].
    Unmap,
}

/// Every range that one device can reach.
///
/// Its lock is a leaf: taken for a few map operations, never held over a system call. An entry
/// holds the memory itself, so that nothing else that is dropped can free it.
///
/// People read it; only this crate's [`AddressSpace`](crate::space::AddressSpace) writes it.
#[derive(Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
    /// A call came back.
    returned: Condvar,
}

impl Ledger {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Entries are whole between any two statements, so that a panic elsewhere leaves nothing torn.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes whoever waits for the call that came back, when the lock is let go: to wake nobody would
    /// be a system call, too.
    fn came_back(&self, inner: &Inner) {
        if inner.waiting > 0 {
            self.returned.notify_all();
        }
    }

    /// Enters a range, before its map call.
    pub(crate) fn enter(
        &self,
        iova: Iova,
        owner: ObjectId,
        memory: Arc<Memory>,
        now: Duration,
    ) -> Result<Key, Refused> {
        let len = memory.len() as u64;
        let mut inner = self.inner();
        if inner.closed || inner.over.is_some_and(|over| owner.generation <= over) {
            return Err(Refused::Closed);
        }
        let range = iova.0..iova.0.saturating_add(len);
        let Inner { entries, index, .. } = &mut *inner;
        if let Some((at, slot)) = index.before(&range)
            && let Some(there) = entries.get(slot)
            && at + there.len > iova.0
        {
            let (at, held, owner, state) = (Iova(at), there.len, there.owner, there.state);
            return Err(Refused::Overlap {
                iova,
                len,
                at,
                held,
                owner,
                state,
            });
        }
        let serial = inner.next_serial;
        inner.next_serial += 1;
        let entry = Entry {
            serial,
            len,
            owner,
            since: now,
            memory,
            state: State::Mapping,
            reach: Reach::Calling,
            reason: None,
            handle: false,
            let_go: false,
        };
        let slot = inner.entries.insert(entry);
        inner.index.insert(&range, slot);
        inner.newest = inner.newest.max(Some(owner.generation));
        inner.totals.put(State::Mapping, len);
        inner.totals.peak_bytes = inner.totals.peak_bytes.max(inner.bytes());
        inner.totals.peak_mappings = inner.totals.peak_mappings.max(inner.entries.len() as u64);
        Ok(Key { iova, slot, serial })
    }

    /// The map call succeeded. False when the ledger was closed meanwhile, even if it is open
    /// again: the caller unmaps, and says so by [`Ledger::late_unmap_returned`] (C34).
    #[must_use]
    pub(crate) fn mapped(&self, key: Key) -> bool {
        let mut inner = self.inner();
        let late = !inner.undisturbed(key);
        if let Some(entry) = inner.entry(key) {
            // Both states belong to the same sum, and count from the moment of entering.
            if late {
                (entry.state, entry.reason) = (State::Unmapping, None);
            } else {
                (entry.state, entry.reach, entry.handle) = (State::Live, Reach::Mapped, true);
            }
        }
        !late
    }

    /// The map call failed, and nothing is mapped.
    pub(crate) fn not_mapped(&self, key: Key) {
        let mut inner = self.inner();
        self.came_back(&inner);
        let entry = inner.strike(key);
        drop(inner);
        drop(entry);
    }

    /// The map call ended without an answer: it counts as mapped.
    pub(crate) fn perhaps_mapped(&self, key: Key, now: Duration) {
        let mut inner = self.inner();
        self.came_back(&inner);
        if let Some(entry) = inner.entry(key) {
            entry.reach = Reach::Mapped;
        }
        inner.set(key, State::Quarantined, Some(Why::Unanswered), now);
    }

    /// The owner lets go of the entry, of `len` bytes, on a proof that covers it.
    pub(crate) fn let_go(&self, key: Key, len: u64, now: Duration) -> LetGo {
        let mut inner = self.inner();
        let reusable = inner.undisturbed(key);
        let Some(entry) = inner.entry(key) else {
            inner.totals.shell_dropped(len);
            return LetGo::Struck;
        };
        match entry.reach {
            Reach::Calling => {
                (entry.handle, entry.let_go) = (false, true);
                LetGo::Left
            }
            Reach::Unmapped | Reach::Revoked => {
                entry.handle = false;
                inner
                    .release(key, reusable)
                    .map_or(LetGo::Struck, LetGo::Freed)
            }
            Reach::Absent => {
                entry.handle = false;
                LetGo::Absent
            }
            Reach::Mapped | Reach::Unsure => {
                entry.reach = Reach::Calling;
                inner.set(key, State::Unmapping, None, now);
                LetGo::Unmap
            }
        }
    }

    /// The unmap call of [`Ledger::let_go`] returned. Memory and address are freed if it was exact.
    pub(crate) fn unmap_returned(
        &self,
        key: Key,
        outcome: Unmapped,
        now: Duration,
    ) -> Option<Freed> {
        let mut inner = self.inner();
        self.came_back(&inner);
        let undisturbed = inner.undisturbed(key);
        let entry = inner.entry(key)?;
        entry.reach = Reach::after(outcome, false);
        match outcome {
            Unmapped::Exact => {
                entry.handle = false;
                inner.release(key, undisturbed)
            }
            // The handle is handed back.
            Unmapped::Busy if undisturbed => {
                inner.set(key, State::Live, None, now);
                None
            }
            Unmapped::Busy => {
                inner.set(key, State::Quarantined, Some(Why::Busy), now);
                None
            }
            _ => {
                entry.handle = false;
                inner.set(key, State::Quarantined, Some(Why::of(outcome)), now);
                None
            }
        }
    }

    /// The unmap call after a late [`Ledger::mapped`] returned. The device never learnt the address,
    /// so that it may be used again.
    pub(crate) fn late_unmap_returned(
        &self,
        key: Key,
        outcome: Unmapped,
        now: Duration,
    ) -> Option<Freed> {
        let mut inner = self.inner();
        self.came_back(&inner);
        inner.entry(key)?.reach = Reach::after(outcome, false);
        if outcome == Unmapped::Exact {
            return inner.release(key, true);
        }
        inner.set(key, State::Quarantined, Some(Why::of(outcome)), now);
        None
    }

    /// The handle of an entry of `len` bytes goes without a proof: the range and its memory stay.
    /// False when the entry had been struck, so that only the handle's pages go.
    pub(crate) fn handle_dropped(&self, key: Key, len: u64, now: Duration) -> bool {
        let mut inner = self.inner();
        let Some(entry) = inner.entry(key) else {
            inner.totals.shell_dropped(len);
            return false;
        };
        entry.handle = false;
        if entry.state == State::Live {
            inner.set(key, State::Quarantined, Some(Why::NoProof), now);
        }
        true
    }

    /// Whether the entry is still listed.
    pub(crate) fn lists(&self, key: Key) -> bool {
        self.inner().entry(key).is_some()
    }

    /// The sums.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.inner().totals
    }

    /// Every line, by address.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        let mut inner = self.inner();
        let all = inner.all();
        all.map(|(key, entry)| entry.line(key.iova.0)).collect()
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // Whatever is still entered may still be reached: its memory is leaked, not freed.
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        for entry in inner.entries.drain() {
            mem::forget(entry.memory);
        }
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lines()).finish()
    }
}
