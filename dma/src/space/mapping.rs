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
/// freed until a proof comes ([`AddressSpace::settle`]).
///
/// When the ladder took the range out of the ledger, the handle is a *shell* (R5): it goes on
/// holding its pages, counted as held, and has nothing to do with whoever uses the address next.
#[must_use]
pub struct Mapping {
    space: Arc<AddressSpace>,
    key: Key,
    owner: ObjectId,
    memory: Arc<Memory>,
    /// Whether this handle still counts: until it was released.
    entered: bool,
}

/// Memory that was not released.
#[derive(Debug, Error)]
pub enum NotReleased {
    /// The proof is of another object, or of another mapping of it: nothing was done, the mapping is handed back.
    #[error("the proof covers other memory than that of {} at IOVA {}", .0.owner, .0.key.iova)]
    Scope(Mapping),
    /// Another operation was under way: nothing was done, the mapping is handed back.
    #[error("{}: the address space is busy; try again", .0.owner)]
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
    pub(super) fn new(
        space: Arc<AddressSpace>,
        key: Key,
        owner: ObjectId,
        memory: Arc<Memory>,
    ) -> Self {
        Self {
            space,
            key,
            owner,
            memory,
            entered: true,
        }
    }

    /// Where the device finds it.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.key.iova
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

    /// Whose it is.
    #[must_use]
    pub fn owner(&self) -> ObjectId {
        self.owner
    }

    /// The memory, for volatile access.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Whether the ladder took it out of the ledger: no device reaches the memory any more, which
    /// stays for as long as this handle and others hold it.
    #[must_use]
    pub fn is_shell(&self) -> bool {
        !self.space.ledger.lists(&self.key)
    }

    /// Takes the memory out of the device's reach and, unless others still hold it, frees it.
    ///
    /// A [shell](Self::is_shell) is out of reach already, whatever the proof says. While the ladder
    /// is unmapping the range, it is left to the ladder, which frees it when the unmap was exact.
    ///
    /// # Errors
    ///
    /// [`NotReleased`].
    pub fn release(mut self, proof: &ReleaseProof) -> Result<(), NotReleased> {
        if !proof.covers(self.owner, self.iova()) && !self.is_shell() {
            return Err(NotReleased::Scope(self));
        }
        let len = self.memory.len() as u64;
        self.entered = false;
        let space = &self.space;
        let next = space.ledger.let_go(&self.key, len);
        if !matches!(next, LetGo::Unmap) {
            return self.let_go_already(next);
        }
        let outcome = space.transport.dma_unmap(self.iova(), len);
        match space.ledger.unmap_returned(&self.key, outcome) {
            // Unless others hold it, the memory is freed here, where no lock is held.
            Some(memory) => drop(memory),
            None => return Err(self.not_unmapped(outcome)),
        }
        Ok(())
    }

    /// There is nothing to unmap, or not for this hand.
    #[cold]
    fn let_go_already(self, next: LetGo) -> Result<(), NotReleased> {
        match next {
            LetGo::Absent => Err(self.not_unmapped(Unmapped::Absent)),
            LetGo::Freed(memory) => {
                drop(memory);
                Ok(())
            }
            LetGo::Struck | LetGo::Left | LetGo::Unmap => Ok(()),
        }
    }

    #[cold]
    fn not_unmapped(mut self, outcome: Unmapped) -> NotReleased {
        if outcome == Unmapped::Busy {
            self.entered = true;
            return NotReleased::Busy(self);
        }
        NotReleased::Unmap {
            object: self.owner,
            iova: self.iova(),
            len: self.memory.len() as u64,
            outcome,
        }
    }

    /// The memory stays where it is.
    #[cold]
    fn dropped_without_proof(&self) {
        let len = self.memory.len() as u64;
        if self.space.ledger.handle_dropped(&self.key, len) {
            log::warn!(
                "{}: no proof that the device let go; {:?} quarantined",
                self.owner,
                self.memory
            );
        }
    }
}

impl Drop for Mapping {
    #[inline]
    fn drop(&mut self) {
        if self.entered {
            self.dropped_without_proof();
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} at IOVA {} for {}",
            self.memory,
            self.iova(),
            self.owner
        )
    }
}
