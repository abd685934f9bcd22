//! What stands in the ledger: entries, sums, and the addresses that they are at. All of it is behind
//! one lock, so that an address is taken and entered in one step, and struck and given back in one.

use std::sync::Arc;

use failstop_pci::clock::Ticks;
use failstop_pci::id::Generation;
use failstop_pci::transport::Iova;

use super::entry::{Change, Entry, Key, Reach, State, Why};
use super::index::Index;
use super::lives::Lives;
use super::slots::Slots;
use super::{LetGo, Refused};
use crate::iova::IovaAllocator;
use crate::memory::Memory;
use crate::proof::{ObjectId, ReleaseProof};

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
    peak_mappings: usize,
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
            peak_mappings: self.peak_mappings as u64,
        }
    }

    /// `len` bytes were entered, and there are so many entries.
    #[inline]
    fn entered(&mut self, len: u64, entries: usize) {
        self.bytes += len;
        if self.bytes > self.peak_bytes {
            self.peak_bytes = self.bytes;
        }
        if entries > self.peak_mappings {
            self.peak_mappings = entries;
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

    fn struck(&mut self, entry: &Entry, handle: bool) {
        self.bytes -= entry.len;
        if entry.state == State::Quarantined {
            self.quarantined_bytes -= entry.len;
            self.quarantined_mappings -= 1;
        }
        if handle {
            self.held_bytes += entry.len;
            self.held_mappings += 1;
        }
    }

    fn shell_dropped(&mut self, struck: &Entry) {
        self.held_bytes -= struck.len;
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
    pub(super) lives: Lives,
    /// Counts closings and reopenings, so that a hand that comes back late sees that it is.
    pub(super) epoch: u64,
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
            lives: Lives::default(),
            epoch: 0,
            stopped: None,
            forgotten: None,
            enforced: false,
            detached: false,
            kept: Vec::new(),
        }
    }

    #[inline]
    pub(super) fn entry(&mut self, key: &Key) -> Option<&mut Entry> {
        self.entries.get_mut(key.slot)
    }

    /// Every entry, by address.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (Key, &Entry)> {
        let Self { entries, index, .. } = self;
        let all = index.by_address().iter();
        all.filter_map(|(&iova, &slot)| {
            let iova = Iova(iova);
            Some((Key { iova, slot }, entries.get(slot)?))
        })
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
        let range = iova.0..iova.0 + len;
        let Self { entries, index, .. } = self;
        let slot = entries.next();
        let end = |at, slot| entries.get(slot).map_or(at, |there| at + there.len);
        if let Err((at, there)) = index.insert(&range, slot, end) {
            return Err(self.overlap(iova, len, at, there));
        }
        entries.put(memory.clone(), || Entry::new(self.epoch, len, *owner, now));
        self.tally.entered(len, self.entries.len());
        Ok(Key { iova, slot })
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

    /// The owner lets go of an entry that is not mapped, or that another hand is unmapping, or not on
    /// this proof.
    #[cold]
    pub(super) fn let_go_unmapped(&mut self, key: &Key, proof: &ReleaseProof) -> LetGo {
        let epoch = self.epoch;
        let Some(entry) = self.entry(key) else {
            // The device cannot reach it any more, whatever the proof says.
            self.shell_dropped(key);
            return LetGo::Struck;
        };
        if !proof.covers(entry.owner, key.iova) {
            return LetGo::NotCovered;
        }
        let reusable = entry.epoch == epoch;
        entry.handle = false;
        match entry.reach {
            Reach::Calling => {
                entry.let_go = true;
                LetGo::Left
            }
            Reach::Absent => LetGo::Absent(entry.owner),
            _ => {
                let freed = self.release(key, reusable);
                freed.map_or(LetGo::Struck, LetGo::Freed)
            }
        }
    }

    /// Takes an entry out that the device cannot reach. Its address may be used again if the device
    /// cannot aim at it either (`reusable`), and nothing is mapped there. The memory is to be
    /// dropped when no lock is held.
    pub(super) fn release(&mut self, key: &Key, reusable: bool) -> Option<Arc<Memory>> {
        let handle = self.entry(key)?.handle;
        self.strike(key, handle, |entry, _| {
            if entry.reach.is_mapped() {
                Address::Lost
            } else {
                Address::of_unmapped(reusable)
            }
        })
    }

    /// The same after an exact unmap by the hand of its handle, which goes with it.
    #[inline]
    pub(super) fn release_unmapped(&mut self, key: &Key) -> Option<Arc<Memory>> {
        self.strike(key, false, |entry, epoch| {
            Address::of_unmapped(entry.epoch == epoch)
        })
    }

    /// The same after a map call that did nothing.
    pub(super) fn release_never_mapped(&mut self, key: &Key) -> Option<Arc<Memory>> {
        self.strike(key, false, |_, _| Address::Free)
    }

    /// Takes an entry out, and leaves its slot to the `handle` if there is one. `address` says what
    /// becomes of that, of the entry and the ledger's epoch.
    // Inlined where the common release passes: see tests/bench.
    #[inline(always)]
    fn strike(
        &mut self,
        key: &Key,
        handle: bool,
        address: impl FnOnce(&Entry, u64) -> Address,
    ) -> Option<Arc<Memory>> {
        let (entry, memory) = self.entries.take(key.slot, handle)?;
        self.tally.struck(entry, handle);
        self.index.remove(key.iova.0);
        match address(entry, self.epoch) {
            Address::Free => self.iovas.give_back(key.iova, entry.len),
            Address::Kept => keep(&mut self.kept, key.iova, entry),
            Address::Lost => {}
        }
        Some(memory)
    }

    /// The handle of a struck entry goes.
    pub(super) fn shell_dropped(&mut self, key: &Key) {
        self.tally.shell_dropped(self.entries.of_handle(key.slot));
        self.entries.vacate(key.slot);
    }
}

/// What becomes of the address of an entry that is struck.
enum Address {
    /// It is handed out again.
    Free,
    /// It is not, before the function forgot it.
    Kept,
    /// It never is: something may be mapped there.
    Lost,
}

impl Address {
    fn of_unmapped(reusable: bool) -> Self {
        if reusable { Self::Free } else { Self::Kept }
    }
}

#[cold]
fn keep(kept: &mut Vec<Kept>, iova: Iova, entry: &Entry) {
    kept.push(Kept {
        iova,
        len: entry.len,
        life: entry.owner.generation,
    });
}
