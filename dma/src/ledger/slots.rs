//! Where entries are kept, with the memory that each holds: a vector whose vacant slots are used
//! again, the last one first.
//!
//! A slot is its entry's as long as that is there, and then its handle's: it is vacant when both are
//! gone. So whoever has the handle of an entry, or makes a call for it, names it by its slot, and never
//! meets the next one.

use std::mem;
use std::sync::Arc;

use super::entry::Entry;
use crate::memory::Memory;

/// What is in a slot is changed where it lies: entries are never moved.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// The slot that is filled next: the first of those that are vacant, or the one after all others.
    next: usize,
    /// Entries.
    len: usize,
}

struct Slot {
    entry: Entry,
    /// None when the entry is an old one: the slot is vacant, or a handle's.
    memory: Option<Arc<Memory>>,
    /// Of a vacant one: what is filled after it.
    next: usize,
}

impl Slots {
    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The slot that the next entry gets.
    #[inline]
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// Adds an entry, made where it lies.
    #[inline]
    pub(super) fn put(&mut self, memory: Arc<Memory>, entry: impl FnOnce() -> Entry) {
        self.len += 1;
        let Some(slot) = self.slots.get_mut(self.next) else {
            return self.grow(entry(), memory);
        };
        self.next = slot.next;
        slot.entry = entry();
        // Nothing was there to be dropped.
        mem::forget(slot.memory.replace(memory));
    }

    #[cold]
    fn grow(&mut self, entry: Entry, memory: Arc<Memory>) {
        self.slots.push(Slot {
            entry,
            memory: Some(memory),
            next: 0,
        });
        self.next = self.slots.len();
    }

    /// What is in a slot.
    #[inline]
    pub(super) fn get(&self, slot: usize) -> Option<&Entry> {
        let slot = self.slots.get(slot)?;
        slot.memory.is_some().then_some(&slot.entry)
    }

    /// The same, to be changed.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut Entry> {
        let slot = self.slots.get_mut(slot)?;
        slot.memory.is_some().then_some(&mut slot.entry)
    }

    /// Takes an entry out. Its slot is vacant then, unless it has a `handle` that stays.
    #[inline]
    pub(super) fn take(&mut self, at: usize, handle: bool) -> Option<(&Entry, Arc<Memory>)> {
        let slot = self.slots.get_mut(at)?;
        let memory = slot.memory.take()?;
        self.len -= 1;
        if !handle {
            slot.next = mem::replace(&mut self.next, at);
        }
        Some((&slot.entry, memory))
    }

    /// The handle of an entry that was taken out goes.
    pub(super) fn vacate(&mut self, at: usize) {
        if let Some(slot) = self.slots.get_mut(at) {
            slot.next = mem::replace(&mut self.next, at);
        }
    }

    /// What is, or was, in the slot of a handle.
    pub(super) fn of_handle(&self, slot: usize) -> &Entry {
        &self.slots[slot].entry
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
        (self.next, self.len) = (0, 0);
        self.slots.drain(..).filter_map(|slot| slot.memory)
    }
}

#[cfg(test)]
mod tests {
    use failstop_pci::clock::Ticks;
    use failstop_pci::id::{DeviceId, Generation};

    use super::*;
    use crate::proof::ObjectId;

    /// Puts an entry of that many bytes. Returns its slot.
    fn put(slots: &mut Slots, len: u64) -> usize {
        let owner = ObjectId {
            device: DeviceId::fresh(),
            generation: Generation::FIRST,
            serial: len,
            kind: "RQ",
        };
        let slot = slots.next();
        let memory = Arc::new(Memory::new(1).unwrap());
        slots.put(memory, || Entry::new(0, len, owner, Ticks(0)));
        slot
    }

    fn lens(slots: &Slots) -> Vec<u64> {
        slots.iter().map(|entry| entry.len).collect()
    }

    #[test]
    fn vacant_slots_are_used_again_before_there_are_more() {
        let mut slots = Slots::default();
        let [first, second, third] = [1, 2, 3].map(|len| put(&mut slots, len));
        for slot in [second, first] {
            assert!(slots.take(slot, false).is_some());
            assert!(slots.get(slot).is_none() && slots.take(slot, false).is_none());
        }
        assert_eq!((slots.len(), lens(&slots)), (1, vec![3]));
        assert_eq!([4, 5].map(|len| put(&mut slots, len)), [first, second]);
        assert_eq!(put(&mut slots, 6), third + 1);
        assert_eq!((slots.len(), lens(&slots)), (4, vec![4, 5, 3, 6]));
    }

    #[test]
    fn a_slot_is_not_used_again_before_its_handle_is_gone() {
        let mut slots = Slots::default();
        let slot = put(&mut slots, 1);
        assert!(slots.take(slot, true).is_some());
        assert_ne!(put(&mut slots, 2), slot);
        assert!(slots.get(slot).is_none());
        assert_eq!(slots.of_handle(slot).len, 1);
        slots.vacate(slot);
        assert_eq!(put(&mut slots, 3), slot);
    }
}
