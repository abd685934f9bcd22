//! The ledger: every range that the device can reach, whose it is, and in which state (R2).

use std::fmt;
use std::mem;
use std::sync::Arc;

use failstop_pci::clock::Clock;
use failstop_pci::fork::Process;
use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::transport::{Iova, Unmapped};
use parking_lot::{Condvar, Mutex, MutexGuard};
use thiserror::Error;

use crate::iova::{IovaAllocator, NoSpace};
use crate::memory::Memory;
use crate::proof::{ObjectId, ReleaseProof};

mod accounts;
mod entry;
mod index;
mod lives;
mod revoke;
mod slots;
#[cfg(test)]
mod tests;
mod times;

use accounts::Accounts;
pub use accounts::Totals;
pub(crate) use entry::Key;
pub use entry::{Line, State};
use entry::{Reach, Why};
pub(crate) use revoke::Covered;
use times::Times;

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

/// Why nothing was entered. In a box, so that the way that succeeds keeps no room for it.
#[derive(Debug)]
pub(crate) enum NotEntered {
    NoSpace(NoSpace),
    Refused(Refused),
}

impl From<NoSpace> for Box<NotEntered> {
    fn from(no_space: NoSpace) -> Self {
        Box::new(NotEntered::NoSpace(no_space))
    }
}

impl From<Refused> for Box<NotEntered> {
    fn from(refused: Refused) -> Self {
        Box::new(NotEntered::Refused(refused))
    }
}

/// Why an owner that lets go of its entry on a proof does not unmap it.
pub(crate) enum LetGo {
    /// The entry is gone: nothing.
    Struck,
    /// The proof is of another: nothing was done.
    NotCovered,
    /// Another hand is unmapping it: nothing, the entry is left to that one.
    Left,
    /// It was unmapped already: drop this.
    Freed(Arc<Memory>),
    /// The transport knew no such mapping when it was to be unmapped. Whose it is.
    Absent(ObjectId),
}

/// Every range that one device can reach, and the addresses that are left.
///
/// Its lock is a leaf: taken for a few map operations, never held over a system call. An entry
/// holds the memory itself, so that nothing else that is dropped can free it.
///
/// In a child of fork nobody waits for the lock, which may be held there for ever: the accounts read
/// as empty (C28, R12).
///
/// People read it; only this crate's [`AddressSpace`](crate::space::AddressSpace) writes it.
pub struct Ledger {
    times: Times,
    /// Whose the accounts are.
    process: Process,
    accounts: Mutex<Accounts>,
    /// A call came back.
    returned: Condvar,
}

impl Ledger {
    pub(crate) fn new(iovas: IovaAllocator, clock: Arc<dyn Clock>) -> Self {
        Self {
            times: Times::new(clock),
            process: Process::this(),
            accounts: Mutex::new(Accounts::new(iovas)),
            returned: Condvar::new(),
        }
    }

    /// Whether this process keeps the accounts: a child of fork has a copy, and does not.
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_this()
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // Entries are whole between any two statements, so that a panic leaves nothing torn: there
        // is no poison to look for.
        self.accounts.lock()
    }

    /// Writes down that a call came back, and wakes whoever waits for it.
    fn came_back<T>(&self, write: impl FnOnce(&mut Accounts) -> T) -> T {
        let result = write(&mut self.accounts());
        self.returned.notify_all();
        result
    }

    /// Takes a range of addresses for `memory`, starting at a multiple of `align`, and enters it,
    /// before its map call.
    #[inline]
    pub(crate) fn enter(
        &self,
        owner: &ObjectId,
        memory: &Arc<Memory>,
        align: u64,
    ) -> Result<Key, Box<NotEntered>> {
        let now = self.times.stamp();
        let len = memory.len() as u64;
        let mut accounts = self.accounts();
        if !accounts.lives.admit(owner.generation) {
            return Err(refuse(accounts, Refused::Closed));
        }
        let iova = match accounts.iovas.take(len, align) {
            Ok(iova) => iova,
            Err(no_space) => return Err(refuse(accounts, no_space)),
        };
        match accounts.enter(iova, owner, memory, now) {
            Ok(key) => Ok(key),
            Err(overlap) => {
                accounts.iovas.give_back(iova, len);
                Err(refuse(accounts, *overlap))
            }
        }
    }

    /// The map call succeeded. False when the ledger was closed meanwhile, even if it is open
    /// again: the caller unmaps, and says so by [`Ledger::late_unmap_returned`] (C34).
    #[must_use]
    pub(crate) fn mapped(&self, key: &Key) -> bool {
        let mut accounts = self.accounts();
        let epoch = accounts.epoch;
        let Some(entry) = accounts.entry(key) else {
            return false;
        };
        // Both states belong to the same sum, and count from the moment of entering.
        if entry.epoch != epoch {
            (entry.state, entry.reason) = (State::Unmapping, None);
            return false;
        }
        (entry.state, entry.reach, entry.handle) = (State::Live, Reach::Mapped, true);
        true
    }

    /// The map call failed, and nothing is mapped.
    pub(crate) fn not_mapped(&self, key: &Key) {
        drop(self.came_back(|accounts| accounts.release_never_mapped(key)));
    }

    /// The map call ended without an answer: it counts as mapped.
    pub(crate) fn perhaps_mapped(&self, key: &Key) {
        let now = self.times.stamp();
        self.came_back(|accounts| {
            if let Some(entry) = accounts.entry(key) {
                entry.reach = Reach::Mapped;
            }
            accounts.set(key, State::Quarantined, Some(Why::Unanswered), now);
        });
    }

    /// The owner lets go of the entry, if the proof covers it. The caller makes the unmap call, then
    /// says [`Ledger::unmapped`] or [`Ledger::not_unmapped`].
    ///
    /// # Errors
    ///
    /// There is no call to be made.
    #[inline]
    pub(crate) fn let_go(&self, key: &Key, proof: &ReleaseProof) -> Result<(), LetGo> {
        let now = self.times.stamp();
        let mut accounts = self.accounts();
        match accounts.entry(key) {
            Some(entry) if entry.reach.is_mapped() && proof.covers(entry.owner, key.iova) => {
                entry.reach = Reach::Calling;
                let change = entry.set(State::Unmapping, None, now);
                accounts.tally.changed(change);
                Ok(())
            }
            _ => Err(accounts.let_go_unmapped(key, proof)),
        }
    }

    /// The unmap call of [`Ledger::let_go`] was exact. The address is free, and so is the memory, to be
    /// dropped by the caller.
    #[inline]
    pub(crate) fn unmapped(&self, key: &Key) -> Option<Arc<Memory>> {
        self.came_back(|accounts| accounts.release_unmapped(key))
    }

    /// It was not. Returns whose it is.
    pub(crate) fn not_unmapped(&self, key: &Key, outcome: Unmapped) -> ObjectId {
        let now = self.times.stamp();
        self.came_back(|accounts| {
            let epoch = accounts.epoch;
            let Some(entry) = accounts.entry(key) else {
                return accounts.entries.of_handle(key.slot).owner;
            };
            let owner = entry.owner;
            entry.reach = Reach::after(outcome, false);
            // The handle is handed back when nothing was done.
            entry.handle = outcome == Unmapped::Busy;
            if entry.handle && entry.epoch == epoch {
                accounts.set(key, State::Live, None, now);
            } else {
                accounts.set(key, State::Quarantined, Some(Why::of(outcome)), now);
            }
            owner
        })
    }

    /// The unmap call after a late [`Ledger::mapped`] returned. The device never learnt the address,
    /// so that it may be used again.
    pub(crate) fn late_unmap_returned(&self, key: &Key, outcome: Unmapped) -> Option<Arc<Memory>> {
        let now = self.times.stamp();
        self.came_back(|accounts| {
            accounts.entry(key)?.reach = Reach::after(outcome, false);
            if outcome == Unmapped::Exact {
                return accounts.release(key, true);
            }
            accounts.set(key, State::Quarantined, Some(Why::of(outcome)), now);
            None
        })
    }

    /// The handle of an entry goes without a proof: the range and its memory stay. Returns whose they
    /// are, and the bytes; none when the entry had been struck, so that only the handle's pages go.
    pub(crate) fn handle_dropped(&self, key: &Key) -> Option<(ObjectId, u64)> {
        let now = self.times.stamp();
        let mut accounts = self.accounts();
        let Some(entry) = accounts.entry(key) else {
            accounts.shell_dropped(key);
            return None;
        };
        let kept = (entry.owner, entry.len);
        entry.handle = false;
        if entry.state == State::Live {
            accounts.set(key, State::Quarantined, Some(Why::NoProof), now);
        }
        Some(kept)
    }

    /// Whose the entry of a handle is, or was; in a child of fork an object of no device, which no
    /// proof covers.
    pub(crate) fn owner(&self, key: &Key) -> ObjectId {
        if !self.is_ours() {
            return ObjectId {
                device: DeviceId::fresh(),
                generation: Generation::FIRST,
                serial: 0,
                kind: "object of a parent process",
            };
        }
        self.accounts().entries.of_handle(key.slot).owner
    }

    /// Whether the entry is still listed; not in a child of fork.
    pub(crate) fn lists(&self, key: &Key) -> bool {
        self.is_ours() && self.accounts().entry(key).is_some()
    }

    /// The sums; of nothing in a child of fork.
    #[must_use]
    pub fn totals(&self) -> Totals {
        if !self.is_ours() {
            return Totals::default();
        }
        self.accounts().totals()
    }

    /// Every line, by address; none in a child of fork.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        if !self.is_ours() {
            return Vec::new();
        }
        let scale = self.times.scale();
        let mut accounts = self.accounts();
        let all = accounts.all();
        all.map(|(key, entry)| entry.line(key.iova, &scale))
            .collect()
    }
}

/// Nothing is entered, and the lock goes.
#[cold]
fn refuse(accounts: MutexGuard<'_, Accounts>, why: impl Into<Box<NotEntered>>) -> Box<NotEntered> {
    drop(accounts);
    why.into()
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // Whatever is still entered may still be reached: its memory is leaked, not freed.
        self.accounts
            .get_mut()
            .entries
            .drain()
            .for_each(mem::forget);
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lines()).finish()
    }
}
