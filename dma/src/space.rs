//! One device's address space: memory goes into it by [`AddressSpace::map`] and comes out of it by
//! [`Mapping::release`] with a proof, by the ladder ([`AddressSpace::unmap_all`], then
//! [`AddressSpace::settle`]), or stays.
#![expect(
    unsafe_code,
    reason = "vouches to the transport for the life of mapped memory"
)]

use std::fmt;
use std::io;
use std::sync::Arc;

use failstop_pci::clock::Clock;
use failstop_pci::memlock::MemlockError;
use failstop_pci::transport::{Kind, MapError, Transport};
use thiserror::Error;

use crate::iova::{IovaAllocator, NoSpace};
use crate::ledger::{Key, Ledger, NotEntered, Refused};
use crate::memory::{HUGE, Memory, MemoryError, Pages, page_size};
use crate::proof::ObjectId;

mod budget;
mod mapping;
mod revoke;

use budget::LockBudget;
pub use mapping::{Mapping, NotReleased};
pub use revoke::{Settled, Swept};

/// Memory that could not be made reachable. Nothing is mapped then.
#[derive(Debug, Error)]
pub enum SpaceError {
    /// The transport did not say what may be mapped.
    #[error("{device}: could not learn which addresses may be mapped")]
    Limits {
        /// The function's name.
        device: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No memory.
    #[error("{device}: {object}")]
    Memory {
        /// The function's name.
        device: String,
        /// For whom.
        object: ObjectId,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// So much memory may not be locked.
    #[error("{device}: {object}: {source}")]
    Memlock {
        /// The function's name.
        device: String,
        /// For whom.
        object: ObjectId,
        /// Why, with the numbers.
        source: MemlockError,
    },
    /// No addresses.
    #[error("{device}: {object}: {source}")]
    Iova {
        /// The function's name.
        device: String,
        /// For whom.
        object: ObjectId,
        /// Why.
        source: NoSpace,
    },
    /// The ledger refused, before anything was asked of the kernel.
    #[error("{device}: {object}: {source}")]
    Refused {
        /// The function's name.
        device: String,
        /// For whom.
        object: ObjectId,
        /// Why.
        source: Refused,
    },
    /// A region was not carried into another life. It is as it was.
    #[error("{device}: {object} cannot be carried into another life: {why}")]
    NotCarried {
        /// The function's name.
        device: String,
        /// Which region.
        object: ObjectId,
        /// What stands against it.
        why: &'static str,
    },
    /// The transport refused.
    #[error("{object}: {source}")]
    Map {
        /// For whom.
        object: ObjectId,
        /// Why.
        source: MapError,
    },
}

/// What one device can reach, and the accounts of it.
pub struct AddressSpace {
    transport: Arc<dyn Transport>,
    ledger: Arc<Ledger>,
    page: u64,
    budget: LockBudget,
}

impl AddressSpace {
    /// The space of the function behind `transport`, which can put addresses up to `mask`
    /// (inclusive) on the bus.
    ///
    /// # Errors
    ///
    /// [`SpaceError::Limits`].
    pub fn new(
        transport: Arc<dyn Transport>,
        mask: u64,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, SpaceError> {
        let limits = transport
            .dma_limits()
            .map_err(|source| SpaceError::Limits {
                device: transport.name().to_owned(),
                source,
            })?;
        // One mapping is whole pages of both sides, and nothing else lives in them [R2].
        let page = limits.page_size.max(page_size() as u64);
        let iovas = IovaAllocator::new(&limits.ranges, mask, page);
        // The kernel locks what is mapped; a server does not.
        let kernel = transport.kind() != Kind::VfioUser;
        let budget = if kernel {
            LockBudget::read()
        } else {
            LockBudget::unlimited()
        };
        Ok(Arc::new(Self {
            transport,
            ledger: Arc::new(Ledger::new(iovas, clock)),
            page,
            budget,
        }))
    }

    /// The accounts. Whoever keeps them keeps nothing of the space open, and may read them when it
    /// is gone.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Makes `len` bytes (rounded up to whole pages) of new memory reachable for `owner`: one
    /// mapping, however large (C25).
    ///
    /// # Errors
    ///
    /// [`SpaceError`]; nothing is mapped then.
    pub fn map(self: &Arc<Self>, owner: ObjectId, len: usize) -> Result<Mapping, SpaceError> {
        let device = || self.transport.name().to_owned();
        let whole = len
            .checked_next_multiple_of(self.page as usize)
            .unwrap_or(usize::MAX);
        self.check_memlock(owner, whole)?;
        // A peer could punch holes into large pages that it was given, for which the pool then has
        // no replacement: an access of ours would be a SIGBUS.
        let memory = if self.transport.kind() != Kind::VfioUser {
            Memory::new(whole)
        } else {
            Memory::of_base_pages(whole)
        };
        let memory = memory.map_err(|source| SpaceError::Memory {
            device: device(),
            object: owner,
            source,
        })?;
        self.place(owner, Arc::new(memory))
    }

    /// The memory to map for another life in `memory`'s stead: itself, or where a peer was sent its
    /// file a new one with the same content, so that no file is ever sent for two lives.
    ///
    /// # Errors
    ///
    /// [`SpaceError::Memory`].
    pub(crate) fn renewed(
        &self,
        object: ObjectId,
        memory: &Arc<Memory>,
    ) -> Result<Arc<Memory>, SpaceError> {
        if self.transport.kind() != Kind::VfioUser {
            return Ok(memory.clone());
        }
        let renewed = memory.renewed().map_err(|source| SpaceError::Memory {
            device: self.transport.name().to_owned(),
            object,
            source,
        })?;
        Ok(Arc::new(renewed))
    }

    /// Makes memory that was mapped before reachable again, for `owner`, at another address: what a
    /// recovery carries into the next life.
    ///
    /// Memory that is still mapped for another object is not refused here: who offers it has both
    /// mappings, and needs a proof for each.
    ///
    /// # Errors
    ///
    /// [`SpaceError`]; nothing is mapped then, and the memory stays with whoever else holds it.
    pub fn map_again(
        self: &Arc<Self>,
        owner: ObjectId,
        memory: Arc<Memory>,
    ) -> Result<Mapping, SpaceError> {
        self.check_memlock(owner, memory.len())?;
        self.place(owner, memory)
    }

    /// Whether so many more bytes may be locked: asked before anything is mapped (C21).
    #[inline]
    fn check_memlock(&self, object: ObjectId, len: usize) -> Result<(), SpaceError> {
        let taken = self.budget.take(len as u64);
        taken.map_err(|source| self.not_lockable(object, source))
    }

    #[cold]
    fn not_lockable(&self, object: ObjectId, source: MemlockError) -> SpaceError {
        SpaceError::Memlock {
            device: self.transport.name().to_owned(),
            object,
            source,
        }
    }

    // Two callers, of which one is measured: see tests/bench.
    #[inline(always)]
    fn place(
        self: &Arc<Self>,
        owner: ObjectId,
        memory: Arc<Memory>,
    ) -> Result<Mapping, SpaceError> {
        let align = match memory.pages() {
            Pages::Huge => HUGE as u64,
            // Whatever the allocator hands out.
            Pages::Base => 0,
        };
        let key = self
            .ledger
            .enter(&owner, &memory, align)
            .map_err(|error| self.not_entered(owner, *error))?;
        // SAFETY: the ledger's entry holds the memory; it is struck out only after an exact unmap or
        // a proof that the function stopped, and when the ledger goes first, it leaks it.
        let for_device = unsafe { memory.for_device() };
        if let Err(source) = self.transport.dma_map(key.iova, for_device) {
            return Err(self.not_mapped(&key, owner, source));
        }
        if !self.ledger.mapped(&key) {
            return Err(self.mapped_late(&key, owner, memory.len() as u64));
        }
        Ok(Mapping::new(self.clone(), key, memory))
    }

    #[cold]
    fn not_entered(&self, object: ObjectId, error: NotEntered) -> SpaceError {
        let device = self.transport.name().to_owned();
        match error {
            NotEntered::NoSpace(source) => SpaceError::Iova {
                device,
                object,
                source,
            },
            NotEntered::Refused(source) => SpaceError::Refused {
                device,
                object,
                source,
            },
        }
    }

    #[cold]
    fn not_mapped(&self, key: &Key, object: ObjectId, source: MapError) -> SpaceError {
        if matches!(source, MapError::Unanswered { .. }) {
            self.ledger.perhaps_mapped(key);
        } else {
            self.ledger.not_mapped(key);
        }
        SpaceError::Map { object, source }
    }

    /// The device was broken while the call was under way: undo it ourselves (C34).
    #[cold]
    fn mapped_late(&self, key: &Key, owner: ObjectId, len: u64) -> SpaceError {
        let outcome = self.transport.dma_unmap(key.iova, len);
        let freed = self.ledger.late_unmap_returned(key, outcome);
        if freed.is_none() {
            log::error!(
                "{}: {owner}: a map in flight at a break could not be undone ({outcome:?}): quarantined",
                self.transport.name()
            );
        }
        self.not_entered(owner, NotEntered::Refused(Refused::Closed))
    }

    pub(crate) fn not_carried(&self, object: ObjectId, why: &'static str) -> SpaceError {
        SpaceError::NotCarried {
            device: self.transport.name().to_owned(),
            object,
            why,
        }
    }
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("ledger", &self.ledger)
            .finish_non_exhaustive()
    }
}
