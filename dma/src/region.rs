//! Regions: DMA memory cut into equal frames, and the pools that hand them out.
#![expect(
    unsafe_code,
    reason = "frames point at the region that they are part of"
)]

use std::fmt;
use std::mem;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use failstop_pci::fork::Process;
use failstop_pci::transport::Iova;
use thiserror::Error;

use crate::frame::Frame;
use crate::memory::{Mapped, Memory, Pages};
use crate::proof::{ObjectId, ReleaseProof, Unreferenced};
use crate::space::{AddressSpace, Mapping, NotReleased, SpaceError};

/// Bytes that a frame's size is a multiple of: a cache line, so that two frames never share one.
pub const FRAME_ALIGN: u32 = 64;

/// Frames that cannot be cut from memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "{count} frames of {frame} bytes cannot be had: a region has 1 or more, of 64 to 65536 bytes in steps of 64, and at most 4 GiB in all"
)]
pub struct BadFrameSize {
    frame: u32,
    count: u32,
}

/// What the frames of one region share.
///
/// # Invariants
///
/// `base` is the start of `home.memory`, which holds `count` frames of `frame` bytes each, or was
/// until another took over: something is mapped there as long as the region lives, in `home.former`,
/// or, some lives later, `home.memory` again.
/// Each frame is in `home.offsets`, in `home.lost`, or counted in `home.out`, which counts the [`Shared`] handles
/// too: the region is freed when it reaches 0, and not before.
pub(crate) struct Region {
    /// Never null.
    base: AtomicPtr<u8>,
    /// Changes only while the region is closed to rings: see [`FrameRegion::carry`].
    iova: AtomicU64,
    pub(crate) frame: u32,
    count: u32,
    /// Rings that hold frames of this region and were not dismantled with a proof, also those that
    /// were lost; the top bit closes the region to new ones.
    rings: AtomicU32,
    /// Who may ask for `home`: in a child of fork it may be held for ever, by a thread that is not there.
    process: Process,
    home: Mutex<Home>,
}

struct Home {
    /// Whose the region is.
    object: ObjectId,
    memory: Arc<Memory>,
    /// What `memory` was in lives that ended, latest last. A thread may have a view of it.
    former: Vec<Former>,
    offsets: Vec<u32>,
    out: u64,
    /// Frames of rings that were dropped without a proof. Nobody has them, and while the region is
    /// mapped nobody may; the ledger, not this region, keeps their memory.
    lost: Vec<u32>,
    /// How many rings those were.
    lost_rings: u32,
}

/// Memory that another took over from.
enum Former {
    /// The file was given up.
    Mapped(Mapped),
    /// Something else holds it too.
    Held(Arc<Memory>),
}

/// Lives that ended whose memory stays as it is, or at least apart.
const APART: usize = 2;

impl Home {
    /// Moves `memory`, which is new, to the place of one of some lives ago, if there is one: a process
    /// has 65530 mappings, and a device may be recovered more often.
    ///
    /// A thread may have a view of that place still, of a frame that it holds. It finds the same frame
    /// there, as if the memory had never moved, and nobody else's.
    fn settle(&mut self, memory: Arc<Memory>) -> Arc<Memory> {
        // Kernels before 5.16 refuse to move large pages when they have unmapped the place already.
        let movable = memory.pages() == Pages::Base;
        let Some(place) = movable.then(|| self.spare()).flatten() else {
            return memory;
        };
        let (memory, place) = match Arc::try_unwrap(memory) {
            Ok(memory) => match memory.moved_to(place) {
                Ok(memory) => return Arc::new(memory),
                Err((memory, place, error)) => {
                    log::warn!("{}: memory is not moved: {error}", self.object);
                    (Arc::new(memory), place)
                }
            },
            Err(memory) => (memory, Some(place)),
        };
        self.former.splice(0..0, place.map(Former::Mapped));
        memory
    }

    /// Where memory of some lives ago is that nothing but a view may know.
    fn spare(&mut self) -> Option<Mapped> {
        let old = self.former.len().checked_sub(APART)?;
        for at in 0..=old {
            match self.former.remove(at) {
                Former::Mapped(mapped) => return Some(mapped),
                Former::Held(memory) => match Arc::try_unwrap(memory) {
                    Ok(memory) => return Some(memory.into_mapped()),
                    Err(memory) => self.former.insert(at, Former::Held(memory)),
                },
            }
        }
        None
    }

    /// Puts `memory` in the place of the former one, which stays mapped and as it is until the next
    /// time; then its pages are given back.
    fn replace(&mut self, memory: Arc<Memory>) {
        if let Some(Former::Mapped(mapped)) = self.former.last()
            && let Err(error) = mapped.give_pages_back()
        {
            log::warn!(
                "{}: {mapped:?} of an ended life keep their pages: {error}",
                self.object
            );
        }
        let former = mem::replace(&mut self.memory, memory);
        self.former.push(match Arc::try_unwrap(former) {
            Ok(memory) => Former::Mapped(memory.into_mapped()),
            Err(memory) => Former::Held(memory),
        });
    }
}

const CLOSED: u32 = 1 << 31;

impl Region {
    /// None in a child of fork, which waits for no lock of its parent's (C28) [R12].
    fn home(&self) -> Option<MutexGuard<'_, Home>> {
        self.process
            .is_this()
            .then(|| self.home.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where the device finds it. A ring that holds the region keeps it from changing.
    #[inline(always)]
    pub(crate) fn iova(&self) -> u64 {
        self.iova.load(Ordering::Relaxed)
    }

    /// Where its bytes are now.
    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        // Acquire: who sees another memory sees what was copied there.
        let base = self.base.load(Ordering::Acquire);
        // SAFETY: never null by the field's promise.
        unsafe { NonNull::new_unchecked(base) }
    }

    /// Whose it is; none in a child of fork.
    fn object(&self) -> Option<ObjectId> {
        Some(self.home()?.object)
    }

    /// Takes a frame home; frees the region when that was the last of everything. In a child of fork the
    /// frame is leaked, and with it the region.
    pub(crate) fn come_home(region: NonNull<Self>, offset: u32) {
        Self::let_go(region, 1, |home| home.offsets.push(offset));
    }

    /// Gives up the frames of a ring that is dropped without a proof.
    ///
    /// # Safety
    ///
    /// `slots` are frames counted out of the region that nothing names any more.
    pub(crate) unsafe fn lose(region: NonNull<Self>, slots: &[u32]) {
        Self::let_go(region, slots.len() as u64, |home| {
            home.lost.extend(slots);
            home.lost_rings += 1;
        });
    }

    fn let_go(region: NonNull<Self>, count: u64, note: impl FnOnce(&mut Home)) {
        let last = {
            // SAFETY: the caller's frames or handle are counted in `out`, so the region lives.
            let Some(mut home) = unsafe { region.as_ref() }.home() else {
                return;
            };
            note(&mut home);
            home.out -= count;
            home.out == 0
        };
        if last {
            // SAFETY: made by `Box::leak` in `FrameRegion::new`; nothing counts on it any more.
            drop(unsafe { Box::from_raw(region.as_ptr()) });
        }
    }

    /// Whether a proof for a ring gives back the frames of this region that are in it.
    pub(crate) fn is_given_back_by(&self, proof: &ReleaseProof) -> bool {
        let covered = |object| proof.covers(object, Iova(self.iova()));
        !proof.is_of_life() || self.object().is_some_and(covered)
    }

    /// Closes the region to new rings; false when another number of rings than `rings` holds it, or
    /// it is closed already.
    fn close(&self, rings: u32) -> bool {
        self.rings
            .compare_exchange(rings, rings | CLOSED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Opens it again, held by `rings`, after [`Self::close`].
    fn open(&self, rings: u32) {
        self.rings.store(rings, Ordering::Release);
    }

    /// Counts a ring in; false once the region is closed.
    pub(crate) fn enter_ring(&self) -> bool {
        self.rings
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n & CLOSED == 0).then_some(n + 1)
            })
            .is_ok()
    }

    /// Counts a ring out, which was dismantled with a proof.
    pub(crate) fn leave_ring(&self) {
        self.rings.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A counted handle of a region.
struct Shared(NonNull<Region>);

// SAFETY: a region is reached through shared references, atomics and a mutex only.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn region(&self) -> &Region {
        // SAFETY: this handle is counted in `out`, so the region lives.
        unsafe { self.0.as_ref() }
    }
}

impl Clone for Shared {
    fn clone(&self) -> Self {
        // Where nothing is counted, nothing is counted down either.
        if let Some(mut home) = self.region().home() {
            home.out += 1;
        }
        Self(self.0)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        Region::let_go(self.0, 1, |_| {});
    }
}

/// A memory region's mapping and the frames that it is cut into.
///
/// The device learns a frame's address only from a ring that the frame is posted to, so that the
/// region may be released once no ring holds it (R3.3). Frames that the caller still holds then
/// keep the pages, not the mapping.
pub struct FrameRegion {
    mapping: Mapping,
    shared: Shared,
}

impl FrameRegion {
    /// Cuts `count` frames of `frame` bytes (a multiple of [`FRAME_ALIGN`], at most 65536) from a
    /// mapping. What is left of it, as when it was rounded up to a large page, is not used.
    ///
    /// # Errors
    ///
    /// [`BadFrameSize`], with the mapping handed back.
    pub fn new(
        mapping: Mapping,
        frame: u32,
        count: u32,
    ) -> Result<(Self, Pool), (Mapping, BadFrameSize)> {
        let len = mapping.len();
        match Self::check(frame, count) {
            Ok(bytes) if bytes <= len => {}
            _ => return Err((mapping, BadFrameSize { frame, count })),
        }
        let memory = mapping.memory().clone();
        let region = Region {
            base: AtomicPtr::new(memory.base().as_ptr()),
            iova: AtomicU64::new(mapping.iova().0),
            frame,
            count,
            rings: AtomicU32::new(0),
            process: Process::this(),
            home: Mutex::new(Home {
                object: mapping.owner(),
                memory,
                former: Vec::new(),
                offsets: (0..count).rev().map(|i| i * frame).collect(),
                out: 1,
                lost: Vec::new(),
                lost_rings: 0,
            }),
        };
        let shared = Shared(NonNull::from(Box::leak(Box::new(region))));
        let pool = Pool {
            shared: shared.clone(),
            free: Vec::new(),
        };
        Ok((Self { mapping, shared }, pool))
    }

    /// The bytes that `count` frames of `frame` bytes need: to be asked before they are mapped.
    ///
    /// # Errors
    ///
    /// [`BadFrameSize`].
    pub fn check(frame: u32, count: u32) -> Result<usize, BadFrameSize> {
        let fits = (FRAME_ALIGN..=1 << 16).contains(&frame) && frame.is_multiple_of(FRAME_ALIGN);
        match frame.checked_mul(count) {
            Some(bytes) if fits && bytes > 0 => Ok(bytes as usize),
            _ => Err(BadFrameSize { frame, count }),
        }
    }

    /// Where the device finds the region.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.mapping.iova()
    }

    /// Whose it is: see [`Mapping::owner`].
    #[must_use]
    pub fn owner(&self) -> ObjectId {
        self.mapping.owner()
    }

    /// Whether `pool` hands out frames of this region.
    #[must_use]
    pub fn feeds(&self, pool: &Pool) -> bool {
        self.shared.0 == pool.shared.0
    }

    /// Rings that hold frames of it and were not dismantled with a proof.
    #[must_use]
    pub fn rings(&self) -> u32 {
        self.shared.region().rings.load(Ordering::Acquire) & !CLOSED
    }

    /// Closes the region to new rings and says that none holds it; none when one does, and nothing
    /// has changed then. None in a child of fork, whose parent's rings go on.
    #[must_use]
    pub fn unreferenced(&self) -> Option<Unreferenced> {
        let region = self.shared.region();
        if !region.process.is_this() {
            return None;
        }
        let closed = region.close(0) || region.rings.load(Ordering::Acquire) == CLOSED;
        closed.then(|| Unreferenced::new(self.owner(), self.iova()))
    }

    /// Maps the region anew for another life of its device, as `owner`'s: the same memory and the
    /// same frames, at another address. Pools and frames that are out stay valid.
    ///
    /// `proof` is of the life that ended, and the ladder has released the old mapping on it; no
    /// ring may hold frames of the region. Frames of rings that were dropped without a proof come
    /// home.
    ///
    /// Behind a server its content moves to memory with a file of its own: what the server was sent in
    /// the life that ended it may keep, and write to, whatever it answered. What other threads write
    /// into frames meanwhile, or through views that they have, may be lost there. Such a view may point
    /// to the former memory, which stays mapped: at the next carry its pages are given back, and at the
    /// one after that the new memory moves to its place, where the view finds its frame again.
    ///
    /// # Errors
    ///
    /// The region, as it was, with [`SpaceError::NotCarried`], or why it could not be mapped.
    pub fn carry(
        mut self,
        proof: &ReleaseProof,
        space: &Arc<AddressSpace>,
        owner: ObjectId,
    ) -> Result<Self, (Self, SpaceError)> {
        let refused = |region: Self, why| {
            let error = space.not_carried(region.owner(), why);
            Err((region, error))
        };
        if !self.shared.region().process.is_this() {
            return refused(self, "it is of the process that this one was forked from");
        }
        if !proof.covers(self.owner(), self.iova()) {
            return refused(self, "the proof does not cover it");
        }
        if !self.mapping.is_shell() {
            return refused(self, "its old mapping was not released");
        }
        let region = self.shared.region();
        let lost = region.home().map_or(0, |home| home.lost_rings);
        if !region.close(lost) {
            return refused(self, "queues hold frames of it, or it is being destroyed");
        }
        // Closed to rings from here on, so that none reads the address while it changes.
        let old = self.mapping.memory();
        let memory = match space.renewed(owner, old) {
            Ok(memory) if Arc::ptr_eq(&memory, old) => memory,
            Ok(memory) => match region.home() {
                Some(mut home) => home.settle(memory),
                None => memory,
            },
            Err(error) => {
                region.open(lost);
                return Err((self, error));
            }
        };
        let mapping = match space.map_again(owner, memory.clone()) {
            Ok(mapping) => mapping,
            Err(error) => {
                if !Arc::ptr_eq(&memory, old)
                    && let Some(mut home) = region.home()
                {
                    // Views of some lives ago may point there.
                    home.former.insert(0, Former::Held(memory));
                }
                region.open(lost);
                return Err((self, error));
            }
        };
        drop(memory);
        region.iova.store(mapping.iova().0, Ordering::Relaxed);
        let memory = mapping.memory().clone();
        self.mapping = mapping;
        if let Some(mut home) = region.home() {
            home.object = owner;
            if !Arc::ptr_eq(&home.memory, &memory) {
                let base = memory.base().as_ptr();
                home.replace(memory);
                region.base.store(base, Ordering::Release);
            }
            // What the device could still reach when its ring was dropped, it cannot any more.
            let found = mem::take(&mut home.lost);
            home.offsets.extend(found);
            home.lost_rings = 0;
            region.open(0);
        }
        Ok(self)
    }

    /// The mapping, to be released with a proof.
    ///
    /// Frames of the region stay what they are; a ring that holds some is what the proof must
    /// speak of.
    #[must_use = "a mapping that is dropped is quarantined"]
    pub fn into_mapping(self) -> Mapping {
        self.mapping
    }

    /// Releases the region if no ring holds it. In a child of fork, which has nothing to release, it is
    /// handed back as if one did.
    ///
    /// # Errors
    ///
    /// [`ReleaseRegion`].
    pub fn release(self) -> Result<(), ReleaseRegion> {
        match self.unreferenced() {
            Some(proof) => self
                .mapping
                .release(&proof.into())
                .map_err(ReleaseRegion::NotReleased),
            None => Err(ReleaseRegion::Referenced(self)),
        }
    }
}

/// A region that was not released.
#[derive(Debug, Error)]
pub enum ReleaseRegion {
    /// A ring holds frames of it: nothing was done, it is handed back.
    #[error("{} is still held by {} ring(s)", .0.owner(), .0.rings())]
    Referenced(FrameRegion),
    /// The unmap did not end well.
    #[error(transparent)]
    NotReleased(#[from] NotReleased),
}

impl fmt::Debug for FrameRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}", self.mapping, self.census())
    }
}

/// Where a region's frames are: `free + out = total`, at any time (C13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Census {
    /// Frames of the region.
    pub total: u32,
    /// Frames at home, which nobody holds.
    pub home: u32,
    /// Frames that pools, rings and callers hold.
    pub out: u32,
}

impl FrameRegion {
    /// Counts the frames; in a child of fork none is at home.
    #[must_use]
    pub fn census(&self) -> Census {
        let region = self.shared.region();
        let home = region.home().map_or(0, |home| home.offsets.len() as u32);
        Census {
            total: region.count,
            home,
            out: region.count - home,
        }
    }
}

/// Hands out frames of one region, and takes them back without a lock. One thread's; a region can
/// have several.
///
/// In a child of fork it has the frames that it held at the fork, which are the child's own pages of
/// zeros, and fetches no others.
pub struct Pool {
    shared: Shared,
    free: Vec<Frame>,
}

impl Pool {
    /// A second pool of the same region, for another thread.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            free: Vec::new(),
        }
    }

    /// Takes a frame, of length 0; none when all are out.
    #[must_use]
    pub fn take(&mut self) -> Option<Frame> {
        if self.free.is_empty() {
            self.fetch();
        }
        self.free.pop()
    }

    /// Takes `n` frames, or none at all.
    #[must_use]
    pub fn take_many(&mut self, n: usize) -> Option<Vec<Frame>> {
        if self.free.len() < n {
            self.fetch();
        }
        let keep = self.free.len().checked_sub(n)?;
        Some(self.free.split_off(keep))
    }

    /// Takes a frame back without a lock.
    ///
    /// # Errors
    ///
    /// A frame of another region is handed back.
    pub fn put(&mut self, mut frame: Frame) -> Result<(), Frame> {
        if frame.region() != self.shared.0 {
            return Err(frame);
        }
        frame.clear();
        self.free.push(frame);
        Ok(())
    }

    /// Bytes of each frame.
    #[must_use]
    pub fn frame_size(&self) -> u32 {
        self.shared.region().frame
    }

    /// Frames that can be taken now.
    #[must_use]
    pub fn available(&self) -> usize {
        let home = self.shared.region().home();
        self.free.len() + home.map_or(0, |home| home.offsets.len())
    }

    pub(crate) fn region(&self) -> NonNull<Region> {
        self.shared.0
    }

    #[cold]
    fn fetch(&mut self) {
        let offsets = {
            let Some(mut home) = self.shared.region().home() else {
                return;
            };
            home.out += home.offsets.len() as u64;
            mem::take(&mut home.offsets)
        };
        // SAFETY: these frames were at home, so nobody else has them, and they are counted out now.
        self.free.extend(
            offsets
                .into_iter()
                .map(|offset| unsafe { Frame::new(self.shared.0, offset) }),
        );
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = self.available();
        match self.shared.region().object() {
            Some(object) => write!(f, "pool of {object}: {available} available"),
            None => write!(f, "pool of a parent process: {available} available"),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(object) = self.object() {
            write!(f, "{object}: ")?;
        }
        write!(f, "{} frames of {} bytes", self.count, self.frame)
    }
}
