//! The handle of one mapping.

use std::fmt;
use std::sync::Arc;

use failstop_pci::transport::{Iova, Unmapped};
use thiserror::Error;

use super::AddressSpace;
use crate::ledger::{Key, LetGo};
use crate::memory::Memory;
use crate::proof::{ObjectId, ReleaseProof};

/// Memory of one object that the device can reach.
///
/// Dropping it without a proof quarantines the memory: it is kept, counted and reported, and not
/// freed until a proof comes ([`AddressSpace::settle`]). In a child of fork, to which the memory is
/// its parent's, a drop asks nobody and writes nothing down.
///
/// When the ladder took the range out of the ledger, the handle is a *shell* (R5): it goes on
/// holding its pages, counted as held, and has nothing to do with whoever uses the address next.
#[must_use]
pub struct Mapping {
    claim: Claim,
    memory: Arc<Memory>,
}

/// What a handle has in the ledger: its entry, or what is left of it.
struct Claim {
    space: Arc<AddressSpace>,
    key: Key,
    /// Until it was given up.
    stands: bool,
}

impl Claim {
    /// There is nothing in the ledger for it any more, or nothing to be done.
    #[inline]
    fn give_up(mut self) {
        self.stands = false;
    }

    /// The memory stays where it is.
    #[cold]
    #[inline(never)]
    fn quarantine(&self) {
        if let Some((owner, len)) = self.space.ledger.handle_dropped(&self.key) {
            log::warn!(
                "{owner}: no proof that the device let go; {len:#x} bytes at IOVA {} quarantined",
                self.key.iova
            );
        }
    }
}

impl Drop for Claim {
    #[inline]
    fn drop(&mut self) {
        if self.stands {
            if !self.space.ledger.is_ours() {
                // Also the way to the device is the parent's: its end would be heard there.
                return std::mem::forget(self.space.clone());
            }
            self.quarantine();
        }
    }
}

/// Memory that was not released.
#[derive(Debug, Error)]
pub enum NotReleased {
    /// The proof is of another object, or of another mapping of it: nothing was done, the mapping is handed back.
    #[error("the proof covers other memory than that of {} at IOVA {}", .0.owner(), .0.iova())]
    Scope(Mapping),
    /// Another operation was under way: nothing was done, the mapping is handed back.
    #[error("{}: the address space is busy; try again", .0.owner())]
    Busy(Mapping),
    /// The unmap was not exact. Record and memory stay, quarantined, and the device is not to be
    /// trusted with its address space any more (C5, C6).
    #[error(
        "{object}: the unmap of {len:#x} bytes at IOVA {iova} was not exact ({outcome:?}); its memory is kept in quarantine"
    )]
    Unmap {
        /// Whose.
        object: ObjectId,
        /// Where.
        iova: Iova,
        /// Bytes.
        len: u64,
        /// What the transport did.
        outcome: Unmapped,
    },
}

impl Mapping {
    #[inline]
    pub(super) fn new(space: Arc<AddressSpace>, key: Key, memory: Arc<Memory>) -> Self {
        let claim = Claim {
            space,
            key,
            stands: true,
        };
        Self { claim, memory }
    }

    /// Where the device finds it.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.claim.key.iova
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never: a mapping has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whose it is; in a child of fork an object of no device.
    #[must_use]
    pub fn owner(&self) -> ObjectId {
        self.claim.space.ledger.owner(&self.claim.key)
    }

    /// The memory, for volatile access.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Whether the ladder took it out of the ledger: no device reaches the memory any more, which
    /// stays for as long as this handle and others hold it. True in a child of fork.
    #[must_use]
    pub fn is_shell(&self) -> bool {
        !self.claim.space.ledger.lists(&self.claim.key)
    }

    /// Takes the memory out of the device's reach and, unless others still hold it, frees it.
    ///
    /// A [shell](Self::is_shell) is out of reach already, whatever the proof says. While the ladder
    /// is unmapping the range, it is left to the ladder, which frees it when the unmap was exact.
    ///
    /// # Errors
    ///
    /// [`NotReleased`].
    pub fn release(self, proof: &ReleaseProof) -> Result<(), NotReleased> {
        let Claim { space, key, .. } = &self.claim;
        if let Err(why) = space.ledger.let_go(key, proof) {
            return self.not_to_unmap(why);
        }
        let outcome = space
            .transport
            .dma_unmap(key.iova, self.memory.len() as u64);
        if outcome != Unmapped::Exact {
            let owner = space.ledger.not_unmapped(key, outcome);
            return Err(self.not_unmapped(owner, outcome));
        }
        // Unless others hold it, the memory is freed here, where no lock is held.
        drop(space.ledger.unmapped(key));
        self.claim.give_up();
        Ok(())
    }

    /// There is nothing to unmap, or not for this hand.
    #[cold]
    fn not_to_unmap(self, why: LetGo) -> Result<(), NotReleased> {
        match why {
            LetGo::NotCovered => return Err(NotReleased::Scope(self)),
            LetGo::Absent(owner) => return Err(self.not_unmapped(owner, Unmapped::Absent)),
            LetGo::Freed(memory) => drop(memory),
            LetGo::Struck | LetGo::Left => {}
        }
        self.claim.give_up();
        Ok(())
    }

    #[cold]
    fn not_unmapped(self, object: ObjectId, outcome: Unmapped) -> NotReleased {
        if outcome == Unmapped::Busy {
            return NotReleased::Busy(self);
        }
        let unmap = NotReleased::Unmap {
            object,
            iova: self.iova(),
            len: self.memory.len() as u64,
            outcome,
        };
        self.claim.give_up();
        unmap
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} at IOVA {} for {}",
            self.memory,
            self.iova(),
            self.owner()
        )
    }
}
