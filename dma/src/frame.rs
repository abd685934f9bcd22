//! Frames: buffers that are moved, never copied or cloned, between the caller and the rings.
#![expect(unsafe_code, reason = "volatile access to DMA memory")]

use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ptr::NonNull;

use thiserror::Error;
use vm_memory::VolatileSlice;

use crate::region::Region;

/// More bytes than a frame holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{len} bytes do not fit a frame of {capacity}")]
pub struct TooLong {
    /// Bytes wanted.
    pub len: usize,
    /// Bytes that fit.
    pub capacity: u32,
}

/// One buffer of DMA memory. Whoever has it owns its bytes, as far as a device that misbehaves
/// lets them: contents are read by copies, by volatile words and by fixed-size header views, never
/// as a slice (R8).
///
/// Dropped, it goes home to its region; in a child of fork, which waits for nobody, it is leaked.
///
/// # Invariants
///
/// `region` lives, because this frame is counted out of it; `offset` is the start of a frame in
/// it that no other `Frame` names; `len` is at most the frame's capacity.
#[must_use = "a frame that is dropped goes home to its pool"]
pub struct Frame {
    region: NonNull<Region>,
    offset: u32,
    len: u32,
}

// SAFETY: a frame is the only name of its bytes, and its region may be used from any thread.
unsafe impl Send for Frame {}

impl Frame {
    /// The frame at `offset`.
    ///
    /// # Safety
    ///
    /// `offset` is a frame of `region` that no other `Frame` names, and is counted out of it.
    pub(crate) unsafe fn new(region: NonNull<Region>, offset: u32) -> Self {
        Self {
            region,
            offset,
            len: 0,
        }
    }

    #[inline(always)]
    pub(crate) fn region(&self) -> NonNull<Region> {
        self.region
    }

    #[inline(always)]
    pub(crate) fn offset(&self) -> u32 {
        self.offset
    }

    #[inline(always)]
    fn shared(&self) -> &Region {
        // SAFETY: lives by the invariant.
        unsafe { self.region.as_ref() }
    }

    /// Bytes of content.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it has no content.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit.
    #[inline(always)]
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.shared().frame
    }

    /// Sets the length of the content; bytes that were there before show.
    ///
    /// # Errors
    ///
    /// [`TooLong`].
    pub fn set_len(&mut self, len: u32) -> Result<(), TooLong> {
        let capacity = self.capacity();
        if len > capacity {
            return Err(TooLong {
                len: len as usize,
                capacity,
            });
        }
        self.len = len;
        Ok(())
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Takes the frame's name, which it has no more: whoever has it must give it to another frame.
    pub(crate) fn into_offset(self) -> u32 {
        let offset = self.offset;
        mem::forget(self);
        offset
    }

    /// Makes this another frame of its region, with as many bytes.
    ///
    /// # Safety
    ///
    /// `offset` is a frame of the same region, counted out of it, which nothing else names; the
    /// caller has taken the former offset.
    #[inline(always)]
    pub(crate) unsafe fn rename(&mut self, offset: u32) {
        self.offset = offset;
    }

    /// Sets the length of what was received.
    ///
    /// # Safety
    ///
    /// `len` is at most the frame's capacity.
    #[inline(always)]
    pub(crate) unsafe fn set_received(&mut self, len: u32) {
        debug_assert!(len <= self.capacity());
        self.len = len;
    }

    #[inline(always)]
    fn base(&self) -> NonNull<u8> {
        // SAFETY: within the region by the invariant.
        unsafe { self.shared().base().add(self.offset as usize) }
    }

    /// The content, for volatile access and copies.
    #[must_use]
    pub fn view(&self) -> VolatileSlice<'_> {
        // SAFETY: `len` bytes from `base` are this frame's by the invariant, and the slice borrows it.
        unsafe { VolatileSlice::new(self.base().as_ptr(), self.len as usize) }
    }

    /// Copies the content's start into `to`; returns how many bytes that were.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        self.view().copy_to(to)
    }

    /// Replaces the content by a copy of `from`.
    ///
    /// # Errors
    ///
    /// [`TooLong`]; the content is as before.
    pub fn fill(&mut self, from: &[u8]) -> Result<(), TooLong> {
        let capacity = self.capacity();
        let len = u32::try_from(from.len())
            .ok()
            .filter(|&len| len <= capacity)
            .ok_or(TooLong {
                len: from.len(),
                capacity,
            })?;
        self.len = len;
        self.view().copy_from(from);
        Ok(())
    }

    /// The first `N` bytes, when there are that many: their bounds are paid for here.
    #[inline(always)]
    #[must_use]
    pub fn head<const N: usize>(&self) -> Option<Head<'_, N>> {
        (self.len as usize >= N).then(|| Head {
            base: self.base(),
            frame: PhantomData,
        })
    }
}

impl Drop for Frame {
    #[cold]
    fn drop(&mut self) {
        Region::come_home(self.region, self.offset);
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "frame at {:#x}, {} of {} bytes",
            self.offset,
            self.len,
            self.capacity()
        )
    }
}

/// The first `N` bytes of a frame, by volatile words at offsets that the compiler checks. Words
/// are in memory order: little-endian as a number.
///
/// # Invariants
///
/// `base` is the start of at least `N` bytes of the borrowed frame.
#[derive(Debug)]
pub struct Head<'f, const N: usize> {
    base: NonNull<u8>,
    frame: PhantomData<&'f Frame>,
}

impl<const N: usize> Head<'_, N> {
    /// The word of 4 bytes at offset `O`.
    #[inline(always)]
    #[must_use]
    pub fn word<const O: usize>(&self) -> u32 {
        const {
            assert!(
                O + 4 <= N && O.is_multiple_of(4),
                "a word lies within the head, aligned"
            )
        }
        // SAFETY: within the `N` bytes by the assertion.
        let at = unsafe { self.base.add(O) };
        // SAFETY: aligned, because frames start at cache lines; live, because borrowed.
        u32::from_le(unsafe { at.cast::<u32>().read_volatile() })
    }

    /// Sets the word of 4 bytes at offset `O`.
    #[inline(always)]
    pub fn set_word<const O: usize>(&mut self, value: u32) {
        const {
            assert!(
                O + 4 <= N && O.is_multiple_of(4),
                "a word lies within the head, aligned"
            )
        }
        // SAFETY: within the `N` bytes by the assertion.
        let at = unsafe { self.base.add(O) };
        // SAFETY: aligned, because frames start at cache lines; live, because borrowed.
        unsafe { at.cast::<u32>().write_volatile(value.to_le()) }
    }
}
