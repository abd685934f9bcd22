//! Exchange rings: every slot always holds one frame, so that posting is an exchange and
//! `free + posted + held = size` by construction.
#![expect(
    unsafe_code,
    reason = "descriptor words and slots without a bounds check per packet"
)]

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use failstop_pci::barrier;
use failstop_pci::transport::Iova;
use thiserror::Error;

use crate::frame::Frame;
use crate::proof::{ObjectId, ReleaseProof};
use crate::region::{FRAME_ALIGN, Pool, Region};
use crate::space::{AddressSpace, Mapping, SpaceError};

/// Two 64-bit little-endian words: what the NICs of this driver use as a descriptor.
type Descriptor = [AtomicU64; 2];
/// Bytes of a slot, which has the offset of its frame.
const SLOT: usize = size_of::<u32>();

/// Why a ring was not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RingError {
    /// A ring has a power of two of entries.
    #[error("a ring has a power of two of entries, not {entries}")]
    NotPowerOfTwo {
        /// Entries wanted.
        entries: u32,
    },
    /// The memory is too small.
    #[error("{entries} descriptors need {needed:#x} bytes, the mapping has {len:#x}")]
    Memory {
        /// Entries wanted.
        entries: u32,
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        len: usize,
    },
    /// Every slot needs a frame.
    #[error(
        "{entries} entries need as many frames, the pool has {available}: register a larger memory region"
    )]
    Frames {
        /// Entries wanted.
        entries: u32,
        /// Frames that the pool can give.
        available: usize,
    },
    /// The region is being destroyed.
    #[error("the memory region is being destroyed")]
    RegionClosed,
}

/// Why a ring was not made, with memory of its own. Nothing is mapped for it then, and every frame is
/// where it was.
#[derive(Debug, Error)]
pub enum NotMade {
    /// There cannot be such a ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Its memory could not be had or mapped.
    #[error(transparent)]
    Space(#[from] SpaceError),
}

/// A ring of descriptors in DMA memory and the frames that they name.
///
/// # Invariants
///
/// `words` is the start of `mask + 1` descriptors in `mapping`'s memory, which `self` holds, and
/// `watched` a word of one of them. `slots` has the offsets of `mask + 1` frames of `region`, each
/// counted out of it and named by nothing else, so that the region lives. `longest` is at least
/// [`FRAME_ALIGN`] and at most what a frame of the region holds.
pub struct ExchangeRing {
    words: NonNull<Descriptor>,
    watched: NonNull<AtomicU64>,
    slots: Box<[u32]>,
    mask: u32,
    longest: u32,
    region: NonNull<Region>,
    mapping: ManuallyDrop<Mapping>,
}

// SAFETY: the ring is the only name of its descriptors on our side, accessed atomically.
unsafe impl Send for ExchangeRing {}

impl ExchangeRing {
    /// Bytes of `entries` descriptors.
    #[must_use]
    pub const fn bytes(entries: u32) -> usize {
        entries as usize * size_of::<Descriptor>()
    }

    /// Whether a ring of `entries` could be filled from `pool`: to be asked before its memory is mapped.
    ///
    /// # Errors
    ///
    /// [`RingError`].
    pub fn check(pool: &Pool, entries: u32) -> Result<(), RingError> {
        let available = pool.available();
        if !entries.is_power_of_two() {
            return Err(RingError::NotPowerOfTwo { entries });
        }
        if available < entries as usize {
            return Err(RingError::Frames { entries, available });
        }
        Ok(())
    }

    /// As [`ExchangeRing::new`], in memory that is mapped for `owner` once the frames are there: what
    /// fails after a map leaves a mapping that the device never heard of, and nobody could prove it.
    ///
    /// # Errors
    ///
    /// [`NotMade`].
    pub fn create(
        space: &Arc<AddressSpace>,
        owner: ObjectId,
        pool: &mut Pool,
        entries: u32,
    ) -> Result<Self, NotMade> {
        Self::check(pool, entries)?;
        let slots = Self::take(pool, entries)?;
        let region = pool.region();
        match space.map(owner, Self::bytes(entries)) {
            Ok(mapping) => Ok(Self::over(mapping, slots, region)),
            Err(error) => {
                // SAFETY: the pool's handle keeps the region alive.
                unsafe { region.as_ref() }.leave_ring();
                Err(error.into())
            }
        }
    }

    /// Frames for the slots, with the ring counted into their region.
    fn take(pool: &mut Pool, entries: u32) -> Result<Vec<Frame>, RingError> {
        let slots = pool
            .take_many(entries as usize)
            .ok_or_else(|| RingError::Frames {
                entries,
                available: pool.available(),
            })?;
        // SAFETY: the pool's handle keeps the region alive.
        if unsafe { pool.region().as_ref() }.enter_ring() {
            Ok(slots)
        } else {
            Err(RingError::RegionClosed)
        }
    }

    /// INVARIANT: `mapping` has room for a descriptor for each of `slots`, frames of `region`, which
    /// the ring is counted into.
    fn over(mapping: Mapping, slots: Vec<Frame>, region: NonNull<Region>) -> Self {
        let words = mapping.memory().base().cast();
        // SAFETY: the pool's handle keeps the region alive.
        let longest = unsafe { region.as_ref() }.frame;
        Self {
            words,
            // The first word of the first descriptor.
            watched: words.cast(),
            mask: slots.len() as u32 - 1,
            longest,
            slots: slots.into_iter().map(Frame::into_offset).collect(),
            region,
            mapping: ManuallyDrop::new(mapping),
        }
    }

    /// A ring of `entries` descriptors, all zero, in `mapping`, its slots filled from `pool`.
    ///
    /// # Errors
    ///
    /// [`RingError`], with the mapping handed back.
    pub fn new(
        mapping: Mapping,
        pool: &mut Pool,
        entries: u32,
    ) -> Result<Self, (Mapping, RingError)> {
        if !entries.is_power_of_two() {
            return Err((mapping, RingError::NotPowerOfTwo { entries }));
        }
        let needed = Self::bytes(entries);
        if needed > mapping.len() {
            let len = mapping.len();
            return Err((
                mapping,
                RingError::Memory {
                    entries,
                    needed,
                    len,
                },
            ));
        }
        match Self::take(pool, entries) {
            Ok(slots) => Ok(Self::over(mapping, slots, pool.region())),
            Err(error) => Err((mapping, error)),
        }
    }

    /// Where the device finds the descriptors.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.mapping.iova()
    }

    /// Entries, minus one.
    #[inline(always)]
    #[must_use]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Bytes of each frame in it.
    #[must_use]
    pub fn frame_size(&self) -> u32 {
        self.shared().frame
    }

    /// Lets the device report at most `longest` bytes of a frame, or what a frame holds, where that
    /// is less; never less than [`FRAME_ALIGN`].
    pub fn set_longest(&mut self, longest: u32) {
        // INVARIANT: no frame holds less than `FRAME_ALIGN`.
        self.longest = longest.clamp(FRAME_ALIGN, self.frame_size());
    }

    #[inline(always)]
    fn descriptor(&self, index: u32) -> &Descriptor {
        // SAFETY: the index is masked, so within the ring by the invariant.
        let at = unsafe { self.words.add((index & self.mask) as usize) };
        // SAFETY: live by the invariant; atomics promise nothing of what others store.
        unsafe { at.as_ref() }
    }

    /// One word of the descriptor at `index` (taken modulo the ring's size), as it is now.
    #[inline(always)]
    #[must_use]
    pub fn peek<const W: usize>(&self, index: u32) -> u64 {
        u64::from_le(self.descriptor(index)[W].load(Ordering::Relaxed))
    }

    /// Sets one word of the descriptor at `index` (taken modulo the ring's size).
    #[inline(always)]
    pub fn set<const W: usize>(&mut self, index: u32, value: u64) {
        self.descriptor(index)[W].store(value.to_le(), Ordering::Relaxed);
    }

    /// Lets [`watched`](Self::watched) be that word of the descriptor at `index` (taken modulo the
    /// ring's size).
    #[inline(always)]
    pub fn watch<const W: usize>(&mut self, index: u32) {
        // INVARIANT: a word of one of the ring's descriptors.
        self.watched = NonNull::from(&self.descriptor(index)[W]);
    }

    /// The word that is watched, as it is now: what a poll looks at first, without finding it.
    #[inline(always)]
    #[must_use]
    pub fn watched(&self) -> u64 {
        // SAFETY: live by the invariant; atomics promise nothing of what others store.
        let word = unsafe { self.watched.as_ref() };
        u64::from_le(word.load(Ordering::Relaxed))
    }

    /// Orders done bits that were read before what is read afterwards.
    #[inline(always)]
    pub fn acquire(&self) {
        barrier::after_done();
    }

    /// Where the device finds the frame in the slot at `index` (taken modulo the ring's size).
    #[must_use]
    pub fn slot_iova(&self, index: u32) -> Iova {
        let offset = self.slots[(index & self.mask) as usize];
        Iova(self.shared().iova() + u64::from(offset))
    }

    /// Writes the descriptor at `index` (taken modulo the ring's size) anew, from the address of the
    /// frame in its slot.
    pub fn write(&mut self, index: u32, descriptor: impl Fn(Iova) -> [u64; 2]) {
        let [low, high] = descriptor(self.slot_iova(index));
        self.set::<0>(index, low);
        self.set::<1>(index, high);
    }

    /// Writes every descriptor anew, from the address of the frame in its slot.
    pub fn write_all(&mut self, descriptor: impl Fn(Iova) -> [u64; 2]) {
        (0..=self.mask).for_each(|index| self.write(index, &descriptor));
    }

    /// Offers the slots from `index` (taken modulo the ring's size) on, each beside the next of
    /// `frames`, as many as those are or as there are up to the ring's end, for as long as `take` takes
    /// them. Returns how many that were.
    #[inline(always)]
    pub fn offer(
        &mut self,
        index: u32,
        frames: &mut [Frame],
        mut take: impl FnMut(&mut Slot<'_>) -> bool,
    ) -> usize {
        let first = (index & self.mask) as usize;
        let count = frames.len().min(self.mask as usize + 1 - first);
        let (region, longest) = (self.region, self.longest);
        // SAFETY: the region lives by the invariant.
        let iova = unsafe { region.as_ref() }.iova();
        // SAFETY: masked, so within the ring by the invariant; so are `count` descriptors from there.
        let words = unsafe { self.words.add(first) };
        let slots = NonNull::from(&mut *self.slots).cast::<u32>();
        // SAFETY: as many slots as descriptors by the invariant.
        let slots = unsafe { slots.add(first) };
        let frames = NonNull::from(frames).cast::<Frame>();
        // Counted in bytes of slots: of that, a processor's addresses of all three are multiples, and of
        // an index they are not.
        let end = count * SLOT;
        let mut at = 0;
        while at < end {
            // SAFETY: less than `count` descriptors on.
            let descriptor = unsafe { words.byte_add(at * (size_of::<Descriptor>() / SLOT)) };
            // SAFETY: less than `count` slots on.
            let mut name = unsafe { slots.byte_add(at) };
            // SAFETY: less than `count` frames on, which is not more than there are.
            let mut frame = unsafe { frames.byte_add(at * (size_of::<Frame>() / SLOT)) };
            let taken = take(&mut Slot {
                // SAFETY: live by the invariant; atomics promise nothing of what others store.
                descriptor: unsafe { descriptor.as_ref() },
                // SAFETY: the ring is borrowed exclusively, and the one before is gone.
                name: unsafe { name.as_mut() },
                // SAFETY: the frames are borrowed exclusively, and the one before is gone.
                frame: unsafe { frame.as_mut() },
                region,
                iova,
                longest,
            });
            if !taken {
                break;
            }
            at += SLOT;
        }
        at / SLOT
    }

    fn shared(&self) -> &Region {
        // SAFETY: the region lives by the invariant.
        unsafe { self.region.as_ref() }
    }

    /// Whether the proof says that the device lets go of the ring and of every frame in it.
    ///
    /// A queue's acknowledgement does; what is said of a whole life may leave out the ring, or the
    /// region, which the device may then still write to (R7).
    #[must_use]
    pub fn is_covered_by(&self, proof: &ReleaseProof) -> bool {
        proof.covers(self.mapping.owner(), self.mapping.iova())
            && self.shared().is_given_back_by(proof)
    }

    /// Takes the ring apart, on the proof that the device let go of it: its frames, which the
    /// device cannot reach any more through it, and its own memory, to be released.
    ///
    /// # Errors
    ///
    /// It is [not covered](Self::is_covered_by) by the proof: the ring, whole.
    pub fn dismantle(mut self, proof: &ReleaseProof) -> Result<(Vec<Frame>, Mapping), Self> {
        if !self.is_covered_by(proof) {
            return Err(self);
        }
        self.shared().leave_ring();
        let slots = mem::take(&mut self.slots);
        // SAFETY: each is a frame counted out of the region that nothing else names by the
        // invariant, and `slots` was taken out, so that none is made twice.
        let frame = |offset| unsafe { Frame::new(self.region, offset) };
        let frames = slots.into_iter().map(frame).collect();
        // SAFETY: `self` is forgotten below, so nothing is taken twice.
        let mapping = unsafe { ManuallyDrop::take(&mut self.mapping) };
        mem::forget(self);
        Ok((frames, mapping))
    }
}

impl Drop for ExchangeRing {
    fn drop(&mut self) {
        // Without a proof the device may still write to the frames: they do not go home, and their
        // region stays held by this ring; the mapping is quarantined.
        // SAFETY: the slots name frames that are counted out of the region by the invariant, and
        // nothing names them after this.
        unsafe { Region::lose(self.region, &self.slots) };
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.mapping) };
    }
}

impl fmt::Debug for ExchangeRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ring of {} entries in {:?}",
            self.slots.len(),
            *self.mapping
        )
    }
}

/// One slot of a ring, beside a frame of the caller's that can be exchanged for its own.
///
/// # Invariants
///
/// `name` is the slot's, beside `descriptor`: the offset of a frame of `region`, which the device finds
/// at `iova`. `longest` is as [`ExchangeRing`]'s.
#[derive(Debug)]
pub struct Slot<'a> {
    descriptor: &'a Descriptor,
    name: &'a mut u32,
    frame: &'a mut Frame,
    region: NonNull<Region>,
    iova: u64,
    longest: u32,
}

impl Slot<'_> {
    /// One word of the descriptor, as it is now.
    #[inline(always)]
    #[must_use]
    pub fn load<const W: usize>(&self) -> u64 {
        u64::from_le(self.descriptor[W].load(Ordering::Relaxed))
    }

    /// Writes the descriptor.
    #[inline(always)]
    pub fn post(&mut self, [low, high]: [u64; 2]) {
        self.descriptor[0].store(low.to_le(), Ordering::Relaxed);
        self.descriptor[1].store(high.to_le(), Ordering::Relaxed);
    }

    /// Bytes of content of the caller's frame.
    #[inline(always)]
    #[must_use]
    pub fn frame_len(&self) -> u32 {
        self.frame.len()
    }

    /// Puts the caller's frame into the slot and gives the one that was there, whose content means
    /// nothing, with the length of the caller's. Returns where the device finds the new one. None when
    /// the frame is of another region, which is the caller's error and changes nothing.
    #[inline(always)]
    #[must_use]
    pub fn exchange(&mut self) -> Option<Iova> {
        self.is_of_the_region().then(|| self.swap())
    }

    /// Puts the caller's frame into the slot and gives the one that was there, with the `len` bytes
    /// that the device reported: at least `shortest` (or [`FRAME_ALIGN`], where that is less), at most
    /// [the longest](ExchangeRing::set_longest). Another length is the device's error.
    ///
    /// # Errors
    ///
    /// [`Refusal`]; nothing has changed then.
    #[inline(always)]
    pub fn receive(&mut self, len: u64, shortest: u32) -> Result<Iova, Refusal> {
        let shortest = shortest.min(FRAME_ALIGN);
        let span = self.longest - shortest;
        // One compare for both ends: what is too short wraps round.
        if len.wrapping_sub(shortest.into()) > span.into() {
            return Err(Refusal::Length);
        }
        if !self.is_of_the_region() {
            return Err(Refusal::Foreign);
        }
        let iova = self.swap();
        // SAFETY: at most `longest`, which a frame of the region holds.
        unsafe { self.frame.set_received(len as u32) };
        Ok(iova)
    }

    #[inline(always)]
    fn is_of_the_region(&self) -> bool {
        self.frame.region() == self.region
    }

    /// Both frames are of one region, so that their offsets are all that changes hands.
    #[inline(always)]
    fn swap(&mut self) -> Iova {
        let offset = self.frame.offset();
        let given = mem::replace(self.name, offset);
        // SAFETY: the slot named `given` until the line above put the frame's own offset there.
        unsafe { self.frame.rename(given) };
        Iova(self.iova + u64::from(offset))
    }
}

/// Why a frame was not exchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The caller's frame is of another region than the ring's.
    Foreign,
    /// The device reports more bytes than the buffer has, or fewer than a frame.
    Length,
}
