//! Where entries are kept, with the memory that each holds: a vector whose vacant slots are used
//! again, the last one first.

use std::sync::Arc;

use super::entry::{Entry, Key};
use crate::memory::Memory;
use crate::proof::ObjectId;

/// What is in a slot is changed where it lies: entries are never moved.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    vacant: Vec<usize>,
}

struct Slot {
    entry: Entry,
    /// None when the slot is vacant: the entry is an old one then.
    memory: Option<Arc<Memory>>,
}

impl Slots {
    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// The most entries that there ever were at once: there is no more room than was needed.
    pub(super) fn peak(&self) -> usize {
        self.slots.len()
    }

    /// A slot to [put](Self::put) an entry into, or to [leave](Self::leave).
    #[inline]
    pub(super) fn vacant(&mut self, owner: &ObjectId) -> usize {
        self.vacant.pop().unwrap_or_else(|| self.grow(owner))
    }

    #[cold]
    fn grow(&mut self, owner: &ObjectId) -> usize {
        self.slots.push(Slot {
            entry: Entry::of(*owner),
            memory: None,
        });
        self.slots.len() - 1
    }

    /// Fills a vacant slot.
    #[inline]
    pub(super) fn put(&mut self, slot: usize, entry: Entry, memory: Arc<Memory>) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.entry = entry;
            slot.memory = Some(memory);
        }
    }

    /// Leaves a vacant slot vacant.
    pub(super) fn leave(&mut self, slot: usize) {
        self.vacant.push(slot);
    }

    /// What is in a slot.
    pub(super) fn get(&self, slot: usize) -> Option<&Entry> {
        let slot = self.slots.get(slot)?;
        slot.memory.is_some().then_some(&slot.entry)
    }

    /// The entry of that name, if it is still there.
    #[inline]
    pub(super) fn find(&mut self, key: &Key) -> Option<&mut Entry> {
        let slot = self.slots.get_mut(key.slot)?;
        let there = slot.memory.is_some() && slot.entry.serial == key.serial;
        there.then_some(&mut slot.entry)
    }

    /// Takes the entry of that name out.
    #[inline]
    pub(super) fn take(&mut self, key: &Key) -> Option<(&Entry, Arc<Memory>)> {
        let slot = self.slots.get_mut(key.slot)?;
        if slot.entry.serial != key.serial {
            return None;
        }
        let memory = slot.memory.take()?;
        self.vacant.push(key.slot);
        Some((&slot.entry, memory))
    }

    /// All of them, as they lie.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let taken = self.slots.iter().filter(|slot| slot.memory.is_some());
        taken.map(|slot| &slot.entry)
    }

    /// The same, to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        let taken = self.slots.iter_mut().filter(|slot| slot.memory.is_some());
        taken.map(|slot| &mut slot.entry)
    }

    /// Takes the memory of all of them out.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Arc<Memory>> {
        self.vacant.clear();
        self.slots.drain(..).filter_map(|slot| slot.memory)
    }
}
