//! What stands in the ledger: entries, sums, and the addresses that they are at. All of it is behind
//! one lock, so that an address is taken and entered in one step, and struck and given back in one.

use std::sync::Arc;

use failstop_pci::clock::Ticks;
use failstop_pci::id::Generation;
use failstop_pci::transport::Iova;

use super::entry::{Change, Entry, Key, Reach, State, Why};
use super::index::Index;
use super::slots::Slots;
use super::{LetGo, Refused};
use crate::iova::IovaAllocator;
use crate::memory::Memory;
use crate::proof::ObjectId;

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

/// What is counted as entries come, change and go.
#[derive(Default)]
pub(super) struct Tally {
    bytes: u64,
    quarantined_bytes: u64,
    quarantined_mappings: u64,
    held_bytes: u64,
    held_mappings: u64,
    peak_bytes: u64,
}

impl Tally {
    fn totals(&self, entries: &Slots) -> Totals {
        Totals {
            live_bytes: self.bytes - self.quarantined_bytes,
            live_mappings: entries.len() as u64 - self.quarantined_mappings,
            quarantined_bytes: self.quarantined_bytes,
            quarantined_mappings: self.quarantined_mappings,
            held_bytes: self.held_bytes,
            held_mappings: self.held_mappings,
            peak_bytes: self.peak_bytes,
            peak_mappings: entries.peak() as u64,
        }
    }

    fn entered(&mut self, len: u64) {
        self.bytes += len;
        if self.bytes > self.peak_bytes {
            self.peak_bytes = self.bytes;
        }
    }

    pub(super) fn changed(&mut self, Change { from, to, len }: Change) {
        if from == State::Quarantined && to != from {
            self.quarantined_bytes -= len;
            self.quarantined_mappings -= 1;
        }
        if to == State::Quarantined && to != from {
            self.quarantined_bytes += len;
            self.quarantined_mappings += 1;
        }
    }

    fn struck(&mut self, entry: &Entry) {
        self.bytes -= entry.len;
        if entry.state == State::Quarantined {
            self.quarantined_bytes -= entry.len;
            self.quarantined_mappings -= 1;
        }
        if entry.handle {
            self.held_bytes += entry.len;
            self.held_mappings += 1;
        }
    }

    /// The handle of a struck entry went.
    pub(super) fn shell_dropped(&mut self, len: u64) {
        self.held_bytes -= len;
        self.held_mappings -= 1;
    }
}

/// An address that is not to be handed out again before the function forgot it.
pub(super) struct Kept {
    pub(super) iova: Iova,
    pub(super) len: u64,
    pub(super) life: Generation,
}

pub(super) struct Accounts {
    pub(super) entries: Slots,
    pub(super) index: Index,
    pub(super) iovas: IovaAllocator,
    pub(super) tally: Tally,
    pub(super) next_serial: u64,
    pub(super) closed: bool,
    /// Counts closings and reopenings, so that a hand that comes back late sees that it is.
    pub(super) epoch: u64,
    /// Entries of a smaller serial were entered before the ledger was last closed.
    pub(super) closed_at: u64,
    /// The newest life that anything was ever entered for.
    pub(super) newest: Option<Generation>,
    /// Lives that a proof covers as a whole: nothing can be entered for them any more.
    pub(super) over: Option<Generation>,
    /// The function was proven stopped after this life and the older ones, which is a ground for
    /// release: not by its own word, and alone in its space.
    pub(super) stopped: Option<Generation>,
    /// The same without that condition: it forgot the addresses that it was given.
    pub(super) forgotten: Option<Generation>,
    /// Since the ledger was closed, entries were unmapped by a transport whose unmap counts.
    pub(super) enforced: bool,
    /// Since then the function was taken out of its address space, which it has to itself, by an
    /// IOMMU.
    pub(super) detached: bool,
    /// Addresses where nothing is mapped and whose memory is released, while the function is not
    /// proven stopped: not to be handed out again yet.
    pub(super) kept: Vec<Kept>,
}

impl Accounts {
    pub(super) fn new(iovas: IovaAllocator) -> Self {
        Self {
            entries: Slots::default(),
            index: Index::default(),
            iovas,
            tally: Tally::default(),
            next_serial: 0,
            closed: false,
            epoch: 0,
            closed_at: 0,
            newest: None,
            over: None,
            stopped: None,
            forgotten: None,
            enforced: false,
            detached: false,
            kept: Vec::new(),
        }
    }

    pub(super) fn entry(&mut self, key: &Key) -> Option<&mut Entry> {
        self.entries.find(key)
    }

    /// Every entry, by address.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (Key, &Entry)> {
        let Self { entries, index, .. } = self;
        let all = index.by_address().iter();
        all.filter_map(|(&iova, &slot)| {
            let entry = entries.get(slot)?;
            Some((Key::of(entry, iova, slot), entry))
        })
    }

    /// Whether something may be entered for an owner of that life.
    pub(super) fn is_open_for(&self, life: Generation) -> bool {
        !self.closed && self.over.is_none_or(|over| over < life)
    }

    /// Enters a range before its map call.
    #[inline]
    pub(super) fn enter(
        &mut self,
        iova: Iova,
        owner: &ObjectId,
        memory: &Arc<Memory>,
        now: Ticks,
    ) -> Result<Key, Box<Refused>> {
        let len = memory.len() as u64;
        let range = iova.0..iova.0.saturating_add(len);
        let Self { entries, index, .. } = self;
        let slot = entries.vacant(owner);
        let end = |at, slot| entries.get(slot).map_or(at, |there| at + there.len);
        if let Err((at, there)) = index.insert(&range, slot, end) {
            entries.leave(slot);
            return Err(self.overlap(iova, len, at, there));
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let entry = Entry {
            serial,
            len,
            since: now,
            ..Entry::of(*owner)
        };
        self.entries.put(slot, entry, memory.clone());
        if self.newest < Some(owner.generation) {
            self.newest = Some(owner.generation);
        }
        self.tally.entered(len);
        Ok(Key { iova, slot, serial })
    }

    #[cold]
    fn overlap(&self, iova: Iova, len: u64, at: u64, there: usize) -> Box<Refused> {
        let there = self.entries.get(there);
        let refused = there.map(|there| there.overlaps(Iova(at), iova, len));
        Box::new(refused.unwrap_or(Refused::Closed))
    }

    pub(super) fn totals(&self) -> Totals {
        self.tally.totals(&self.entries)
    }

    /// Brings an entry into another state.
    pub(super) fn set(&mut self, key: &Key, state: State, reason: Option<Why>, now: Ticks) {
        if let Some(entry) = self.entry(key) {
            let change = entry.set(state, reason, now);
            self.tally.changed(change);
        }
    }

    /// The owner lets go of an entry that is not mapped, or that another hand is unmapping.
    #[cold]
    pub(super) fn let_go_unmapped(&mut self, key: &Key) -> LetGo {
        let reusable = self.undisturbed(key);
        let Some(entry) = self.entry(key) else {
            return LetGo::Struck;
        };
        entry.handle = false;
        match entry.reach {
            Reach::Calling => {
                entry.let_go = true;
                LetGo::Left
            }
            Reach::Absent => LetGo::Absent,
            _ => {
                let freed = self.release(key, reusable);
                freed.map_or(LetGo::Struck, LetGo::Freed)
            }
        }
    }

    /// Takes an entry out that the device cannot reach. Its address may be used again if the device
    /// cannot aim at it either (`reusable`), and nothing is mapped there. The memory is to be
    /// dropped when no lock is held.
    // Inlined where the common release passes: see tests/bench.
    #[inline(always)]
    pub(super) fn release(&mut self, key: &Key, reusable: bool) -> Option<Arc<Memory>> {
        let (entry, memory) = self.entries.take(key)?;
        let (iova, len, life) = (key.iova, entry.len, entry.owner.generation);
        let unmapped = !matches!(entry.reach, Reach::Mapped | Reach::Unsure);
        self.tally.struck(entry);
        self.index.remove(iova.0);
        if unmapped && reusable {
            self.iovas.give_back(iova, len);
        } else if unmapped {
            self.keep(Kept { iova, len, life });
        }
        Some(memory)
    }

    #[cold]
    fn keep(&mut self, kept: Kept) {
        self.kept.push(kept);
    }

    /// The same after an exact unmap, or a map call that did nothing; nobody has a handle of it.
    #[inline]
    pub(super) fn release_unmapped(&mut self, key: &Key, reusable: bool) -> Option<Arc<Memory>> {
        let entry = self.entry(key)?;
        (entry.reach, entry.handle) = (Reach::Unmapped, false);
        self.release(key, reusable)
    }

    /// Whether the ledger was never closed since the entry was made.
    pub(super) fn undisturbed(&self, key: &Key) -> bool {
        key.serial >= self.closed_at
    }
}
