//! Exchange rings: every slot always holds one frame, so that posting is an exchange and
//! `free + posted + held = size` by construction.
#![expect(
    unsafe_code,
    reason = "descriptor words and slots without a bounds check per packet"
)]

use std::fmt;
use std::marker::PhantomData;
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
/// `words` is the start of `mask + 1` descriptors in `mapping`'s memory, which `self` holds.
/// `slots` has the offsets of `mask + 1` frames of `region`, each counted out of it and named by
/// nothing else, so that the region lives.
pub struct ExchangeRing {
    words: NonNull<Descriptor>,
    slots: Box<[u32]>,
    mask: u32,
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
        Self {
            words: mapping.memory().base().cast(),
            mask: slots.len() as u32 - 1,
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

    /// Writes every descriptor anew, from the address of the frame in its slot.
    pub fn write_all(&mut self, descriptor: impl Fn(Iova) -> [u64; 2]) {
        let mut cursor = self.cursor(0);
        for _ in 0..=cursor.mask {
            let [low, high] = descriptor(cursor.slot_iova());
            cursor.store::<0>(low);
            cursor.store::<1>(high);
            cursor.step();
        }
    }

    /// A burst's view of the ring, at `index` (taken modulo the ring's size).
    #[inline(always)]
    pub fn cursor(&mut self, index: u32) -> Cursor<'_> {
        // SAFETY: the region lives by the invariant.
        let region = unsafe { self.region.as_ref() };
        let (iova, frame) = (region.iova(), region.frame);
        Cursor {
            words: self.words,
            slots: NonNull::from(&mut *self.slots).cast(),
            mask: self.mask,
            at: index,
            region: self.region,
            iova,
            shortest: 0,
            span: frame,
            ring: PhantomData,
        }
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

/// One burst's view of a ring: what it needs in registers, the index masked, no check left.
///
/// # Invariants
///
/// As [`ExchangeRing`]'s, which it borrows. `shortest + span` is at most what a frame of the ring holds: it
/// stands here, not in the caller's hands, so that no other ring's can be used.
#[derive(Debug)]
pub struct Cursor<'r> {
    words: NonNull<Descriptor>,
    slots: NonNull<u32>,
    mask: u32,
    at: u32,
    region: NonNull<Region>,
    iova: u64,
    shortest: u32,
    span: u32,
    ring: PhantomData<&'r mut ExchangeRing>,
}

impl Cursor<'_> {
    /// Where it is.
    #[inline(always)]
    #[must_use]
    pub fn at(&self) -> u32 {
        self.at
    }

    /// Moves to the next descriptor.
    #[inline(always)]
    pub fn step(&mut self) {
        self.at = self.at.wrapping_add(1);
    }

    /// Lets the device report from `shortest` (at most [`FRAME_ALIGN`]) to `most` bytes, or what a
    /// frame holds, where that is less. Before the first [`receive`](Self::receive).
    #[inline(always)]
    #[must_use]
    pub fn lengths(mut self, shortest: u32, most: u32) -> Self {
        // INVARIANT: no frame holds less than `FRAME_ALIGN`, so that the sum is at most its size.
        self.shortest = shortest.min(FRAME_ALIGN);
        self.span = self.span.min(most.max(self.shortest)) - self.shortest;
        self
    }

    #[inline(always)]
    fn index(&self) -> usize {
        (self.at & self.mask) as usize
    }

    #[inline(always)]
    fn descriptor(&self) -> &Descriptor {
        // SAFETY: the index is masked, so within the ring by the invariant.
        let at = unsafe { self.words.add(self.index()) };
        // SAFETY: live by the invariant; atomics promise nothing of what others store.
        unsafe { at.as_ref() }
    }

    /// One word of the descriptor, as it is now.
    #[inline(always)]
    #[must_use]
    pub fn load<const W: usize>(&self) -> u64 {
        u64::from_le(self.descriptor()[W].load(Ordering::Relaxed))
    }

    /// Sets one word of the descriptor.
    #[inline(always)]
    pub fn store<const W: usize>(&mut self, value: u64) {
        self.descriptor()[W].store(value.to_le(), Ordering::Relaxed);
    }

    /// Sets one word of the descriptor before this one, which the caller wrote last.
    #[inline(always)]
    pub fn store_before<const W: usize>(&mut self, value: u64) {
        let index = (self.at.wrapping_sub(1) & self.mask) as usize;
        // SAFETY: the index is masked, so within the ring by the invariant.
        let at = unsafe { self.words.add(index) };
        // SAFETY: live by the invariant; atomics promise nothing of what others store.
        let descriptor = unsafe { at.as_ref() };
        descriptor[W].store(value.to_le(), Ordering::Relaxed);
    }

    /// Orders a done bit that was read before what is read afterwards.
    #[inline(always)]
    pub fn acquire(&self) {
        barrier::after_done();
    }

    #[inline(always)]
    fn slot(&mut self) -> &mut u32 {
        // SAFETY: the index is masked, so within the slots by the invariant.
        let mut at = unsafe { self.slots.add(self.index()) };
        // SAFETY: the ring is borrowed exclusively.
        unsafe { at.as_mut() }
    }

    /// Where the device finds the frame in the slot.
    #[must_use]
    pub fn slot_iova(&mut self) -> Iova {
        let offset = *self.slot();
        Iova(self.iova + u64::from(offset))
    }

    /// Puts the caller's frame into the slot and gives the one that was there, whose content and
    /// length mean nothing. Returns where the device finds the new one, and its length. None when
    /// the frame is of another region, which is the caller's error and changes nothing.
    #[inline(always)]
    #[must_use]
    pub fn exchange(&mut self, frame: &mut Frame) -> Option<(Iova, u32)> {
        let len = frame.len();
        Some((self.swap(frame, len)?, len))
    }

    /// Puts the caller's frame into the slot and gives the one that was there, with the length that
    /// the device reported. A length out of range is the device's error.
    ///
    /// # Errors
    ///
    /// [`Refusal`]; nothing has changed then.
    #[inline(always)]
    pub fn receive(&mut self, frame: &mut Frame, len: u32) -> Result<Iova, Refusal> {
        // One compare for both ends: what is too short wraps round.
        if len.wrapping_sub(self.shortest) > self.span {
            return Err(Refusal::Length);
        }
        self.swap(frame, len).ok_or(Refusal::Foreign)
    }

    /// Both frames are of one region, so that their offsets are all that changes hands. `len` is at
    /// most a frame's capacity.
    #[inline(always)]
    fn swap(&mut self, frame: &mut Frame, len: u32) -> Option<Iova> {
        if frame.region() != self.region {
            return None;
        }
        let slot = self.slot();
        let given = *slot;
        *slot = frame.offset();
        let iova = Iova(self.iova + u64::from(frame.offset()));
        // SAFETY: the slot named `given` until the line above put the frame's own offset there.
        unsafe { frame.rename(given, len) };
        Some(iova)
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
