//! One device's address space: memory goes into it by [`AddressSpace::map`] and comes out of it by
//! [`Mapping::release`] with a proof, by the ladder ([`AddressSpace::unmap_all`], then
//! [`AddressSpace::settle`]), or stays.
#![expect(
    unsafe_code,
    reason = "vouches to the transport for the life of mapped memory"
)]

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use failstop_pci::clock::Clock;
use failstop_pci::memlock::MemlockError;
use failstop_pci::transport::{Kind, MapError, Transport};
use thiserror::Error;

use crate::iova::{IovaAllocator, NoSpace};
use crate::ledger::{Freed, Ledger, Refused};
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
    clock: Arc<dyn Clock>,
    ledger: Ledger,
    iovas: Mutex<IovaAllocator>,
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
        let iovas = Mutex::new(IovaAllocator::new(&limits.ranges, mask, page));
        Ok(Arc::new(Self {
            transport,
            clock,
            ledger: Ledger::default(),
            iovas,
            page,
            budget: LockBudget::read(),
        }))
    }

    /// The accounts.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
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
        let kernel = self.transport.kind() != Kind::VfioUser;
        if kernel {
            self.check_memlock(owner, whole)?;
        }
        // A peer could punch holes into large pages that it was given, for which the pool then has
        // no replacement: an access of ours would be a SIGBUS.
        let memory = if kernel {
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
        if self.transport.kind() != Kind::VfioUser {
            self.check_memlock(owner, memory.len())?;
        }
        self.place(owner, memory)
    }

    /// Whether so many more bytes may be locked: asked before anything is mapped (C21).
    fn check_memlock(&self, object: ObjectId, len: usize) -> Result<(), SpaceError> {
        self.budget
            .take(len as u64)
            .map_err(|source| SpaceError::Memlock {
                device: self.transport.name().to_owned(),
                object,
                source,
            })
    }

    fn place(
        self: &Arc<Self>,
        owner: ObjectId,
        memory: Arc<Memory>,
    ) -> Result<Mapping, SpaceError> {
        let device = || self.transport.name().to_owned();
        let refused = |source| SpaceError::Refused {
            device: device(),
            object: owner,
            source,
        };
        let align = if memory.pages() == Pages::Huge {
            HUGE as u64
        } else {
            self.page
        };
        let len = memory.len() as u64;
        let iova = self
            .iovas()
            .take(len, align)
            .map_err(|source| SpaceError::Iova {
                device: device(),
                object: owner,
                source,
            })?;
        let began = self.clock.coarse();
        let key = self
            .ledger
            .enter(iova, owner, memory.clone(), began)
            .inspect_err(|_| self.iovas().give_back(iova, len))
            .map_err(refused)?;
        // SAFETY: the ledger's entry holds the memory; it is struck out only after an exact unmap or
        // a proof that the function stopped, and when the ledger goes first, it leaks it.
        let for_device = unsafe { memory.for_device() };
        if let Err(source) = self.transport.dma_map(iova, for_device) {
            if matches!(source, MapError::Unanswered { .. }) {
                self.ledger.perhaps_mapped(key, self.clock.coarse());
            } else {
                self.ledger.not_mapped(key);
                self.iovas().give_back(iova, len);
            }
            return Err(SpaceError::Map {
                object: owner,
                source,
            });
        }
        if !self.ledger.mapped(key) {
            // The device was broken while the call was under way: undo it ourselves (C34).
            let outcome = self.transport.dma_unmap(iova, len);
            let now = self.clock.coarse();
            match self.ledger.late_unmap_returned(key, outcome, now) {
                Some(freed) => self.recycle(freed),
                None => log::error!(
                    "{}: {owner}: a map in flight at a break could not be undone ({outcome:?}): quarantined",
                    self.transport.name()
                ),
            }
            return Err(refused(Refused::Closed));
        }
        Ok(Mapping::new(self.clone(), key, owner, memory))
    }

    pub(crate) fn not_carried(&self, object: ObjectId, why: &'static str) -> SpaceError {
        SpaceError::NotCarried {
            device: self.transport.name().to_owned(),
            object,
            why,
        }
    }

    fn iovas(&self) -> MutexGuard<'_, IovaAllocator> {
        self.iovas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back what left the ledger. The memory is freed here, unless others hold it.
    fn recycle(&self, freed: Freed) {
        if let Some(iova) = freed.reusable {
            self.iovas().give_back(iova, freed.memory.len() as u64);
        }
        drop(freed.memory);
    }
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("ledger", &self.ledger)
            .finish_non_exhaustive()
    }
}
