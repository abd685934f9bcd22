//! The ledger: every range that the device can reach, whose it is, and in which state (R2).

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use failstop_pci::transport::Iova;
use thiserror::Error;

use crate::memory::Memory;
use crate::proof::ObjectId;

/// Where a range is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// Entered; the map call has not returned.
    Mapping,
    /// The device can reach it.
    Live,
    /// The unmap call has not returned.
    Unmapping,
    /// Kept back for want of proof: leaked on purpose, until proof comes.
    Quarantined,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapping => "mapping",
            Self::Live => "live",
            Self::Unmapping => "unmapping",
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
    /// Since when, on the address space's clock.
    pub since: Duration,
    /// Why it is quarantined.
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
    /// The device is broken: no new mapping begins (R2).
    #[error("the device is broken: nothing is mapped any more")]
    Closed,
}

struct Entry {
    len: u64,
    owner: ObjectId,
    state: State,
    since: Duration,
    reason: Option<&'static str>,
    memory: Arc<Memory>,
}

#[derive(Default)]
struct Inner {
    entries: BTreeMap<u64, Entry>,
    closed: bool,
    bytes: u64,
    peak_bytes: u64,
    peak_mappings: u64,
}

/// Every range that one device can reach.
///
/// Its lock is a leaf: taken for a few map operations, never held over a system call. An entry
/// holds the memory itself, so that nothing else that is dropped can free it.
#[derive(Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
}

impl Ledger {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Entries are whole between any two statements, so that a panic elsewhere leaves nothing torn.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a range, before its map call.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    pub fn enter(
        &self,
        iova: Iova,
        owner: ObjectId,
        memory: Arc<Memory>,
        now: Duration,
    ) -> Result<(), Refused> {
        let len = memory.len() as u64;
        let mut inner = self.inner();
        if inner.closed {
            return Err(Refused::Closed);
        }
        let end = iova.0.saturating_add(len);
        if let Some((&at, there)) = inner.entries.range(..end).next_back()
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
        let entry = Entry {
            len,
            owner,
            state: State::Mapping,
            since: now,
            reason: None,
            memory,
        };
        inner.entries.insert(iova.0, entry);
        inner.bytes += len;
        inner.peak_bytes = inner.peak_bytes.max(inner.bytes);
        inner.peak_mappings = inner.peak_mappings.max(inner.entries.len() as u64);
        Ok(())
    }

    /// The map call succeeded. False when the ledger was closed meanwhile: the caller unmaps (C34).
    #[must_use]
    pub(crate) fn mapped(&self, iova: Iova, now: Duration) -> bool {
        let mut inner = self.inner();
        let open = !inner.closed;
        if let Some(entry) = inner.entries.get_mut(&iova.0)
            && open
        {
            (entry.state, entry.since) = (State::Live, now);
        }
        open
    }

    /// The unmap call is about to be made.
    pub(crate) fn unmapping(&self, iova: Iova, now: Duration) {
        self.set(iova, State::Unmapping, None, now);
    }

    /// The unmap call changed nothing: as before it.
    pub(crate) fn still_live(&self, iova: Iova, now: Duration) {
        self.set(iova, State::Live, None, now);
    }

    /// No proof: the range and its memory stay.
    pub(crate) fn quarantine(&self, iova: Iova, reason: &'static str, now: Duration) {
        self.set(iova, State::Quarantined, Some(reason), now);
    }

    fn set(&self, iova: Iova, state: State, reason: Option<&'static str>, now: Duration) {
        if let Some(entry) = self.inner().entries.get_mut(&iova.0) {
            (entry.state, entry.reason, entry.since) = (state, reason, now);
        }
    }

    /// The device cannot reach the range any more: strikes it out and hands back its memory.
    pub(crate) fn strike(&self, iova: Iova) -> Option<Arc<Memory>> {
        let mut inner = self.inner();
        let entry = inner.entries.remove(&iova.0)?;
        inner.bytes -= entry.len;
        Some(entry.memory)
    }

    /// Whether an entry starts here.
    #[must_use]
    pub fn holds(&self, iova: Iova) -> bool {
        self.inner().entries.contains_key(&iova.0)
    }

    /// No new entry is taken from now on (R2).
    pub fn close(&self) {
        self.inner().closed = true;
    }

    /// The sums.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let inner = self.inner();
        let mut totals = Totals {
            peak_bytes: inner.peak_bytes,
            peak_mappings: inner.peak_mappings,
            ..Totals::default()
        };
        for entry in inner.entries.values() {
            let (bytes, mappings) = if entry.state == State::Quarantined {
                (
                    &mut totals.quarantined_bytes,
                    &mut totals.quarantined_mappings,
                )
            } else {
                (&mut totals.live_bytes, &mut totals.live_mappings)
            };
            *bytes += entry.len;
            *mappings += 1;
        }
        totals
    }

    /// Every line, by address.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        let line = |(&iova, entry): (&u64, &Entry)| Line {
            iova: Iova(iova),
            len: entry.len,
            owner: entry.owner,
            state: entry.state,
            since: entry.since,
            reason: entry.reason,
        };
        self.inner().entries.iter().map(line).collect()
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // Whatever is still entered may still be reached: its memory is leaked, not freed.
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        for entry in mem::take(&mut inner.entries).into_values() {
            mem::forget(entry.memory);
        }
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lines()).finish()
    }
}
