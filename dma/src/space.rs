//! One device's address space: memory goes into it by [`AddressSpace::map`] and comes out of it by
//! [`Mapping::release`] with a proof, or stays.
#![expect(
    unsafe_code,
    reason = "vouches to the transport for the life of mapped memory"
)]

use std::fmt;
use std::io;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use failstop_pci::clock::Clock;
use failstop_pci::memlock::{Memlock, MemlockError};
use failstop_pci::transport::{Iova, Kind, MapError, Transport, Unmapped};
use thiserror::Error;

use crate::iova::{IovaAllocator, NoSpace};
use crate::ledger::{Ledger, Refused};
use crate::memory::{HUGE, Memory, MemoryError, Pages, page_size};
use crate::proof::{ObjectId, ReleaseProof};

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
        let memory = Arc::new(memory);
        let align = if memory.pages() == Pages::Huge {
            HUGE as u64
        } else {
            self.page
        };
        let iova = self
            .iovas()
            .take(memory.len() as u64, align)
            .map_err(|source| SpaceError::Iova {
                device: device(),
                object: owner,
                source,
            })?;
        self.map_at(iova, owner, memory).inspect_err(|_| {
            // A late unmap that failed left a quarantined entry, which keeps its address.
            if !self.ledger.holds(iova) {
                self.iovas().give_back(iova);
            }
        })
    }

    /// Whether so many more bytes may be locked: asked before anything is mapped (C21).
    fn check_memlock(&self, object: ObjectId, len: usize) -> Result<(), SpaceError> {
        let device = || self.transport.name().to_owned();
        let memlock = match Memlock::read() {
            Ok(memlock) => memlock,
            // Without /proc the kernel's own refusal has to do.
            Err(error) => {
                log::debug!("the locked-memory limit is not known: {error}");
                return Ok(());
            }
        };
        memlock
            .check(len as u64)
            .map_err(|source| SpaceError::Memlock {
                device: device(),
                object,
                source,
            })
    }

    fn map_at(
        self: &Arc<Self>,
        iova: Iova,
        owner: ObjectId,
        memory: Arc<Memory>,
    ) -> Result<Mapping, SpaceError> {
        let refused = |source| SpaceError::Refused {
            device: self.transport.name().to_owned(),
            object: owner,
            source,
        };
        self.ledger
            .enter(iova, owner, memory.clone(), self.clock.now())
            .map_err(refused)?;
        // SAFETY: the ledger's entry holds the memory; it is struck out only after an exact unmap,
        // and when the ledger goes first, it leaks it.
        let for_device = unsafe { memory.for_device() };
        if let Err(source) = self.transport.dma_map(iova, for_device) {
            if matches!(source, MapError::Unanswered { .. }) {
                self.keep(iova, "nobody answered whether it was mapped");
            } else {
                self.ledger.strike(iova);
            }
            return Err(SpaceError::Map {
                object: owner,
                source,
            });
        }
        let mapping = Mapping {
            space: self.clone(),
            iova,
            owner,
            memory,
            entered: true,
        };
        if !self.ledger.mapped(iova, self.clock.now()) {
            // The device was broken while the call was under way: undo it ourselves (C34).
            mapping.unmap_late();
            return Err(refused(Refused::Closed));
        }
        Ok(mapping)
    }

    fn iovas(&self) -> std::sync::MutexGuard<'_, IovaAllocator> {
        self.iovas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One unmap call, its outcome in the ledger.
    fn unmap(&self, iova: Iova, len: u64) -> Unmapped {
        self.ledger.unmapping(iova, self.clock.now());
        let outcome = self.transport.dma_unmap(iova, len);
        match outcome {
            Unmapped::Exact => {
                let memory = self.ledger.strike(iova);
                self.iovas().give_back(iova);
                drop(memory);
            }
            Unmapped::Busy => self.ledger.still_live(iova, self.clock.now()),
            Unmapped::Absent => self.keep(iova, "the transport knew no such mapping"),
            Unmapped::Partial { .. } => self.keep(iova, "the transport unmapped another size"),
            Unmapped::Failed(_) => self.keep(iova, "the unmap failed"),
        }
        outcome
    }

    fn keep(&self, iova: Iova, reason: &'static str) {
        self.ledger.quarantine(iova, reason, self.clock.now());
    }
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("ledger", &self.ledger)
            .finish_non_exhaustive()
    }
}

/// Memory of one object that the device can reach.
///
/// Dropping it without a proof quarantines the memory: it is kept, counted and reported, never
/// freed.
#[must_use]
pub struct Mapping {
    space: Arc<AddressSpace>,
    iova: Iova,
    owner: ObjectId,
    memory: Arc<Memory>,
    /// Whether the ledger still lists it: until it was released or struck.
    entered: bool,
}

/// Memory that was not released.
#[derive(Debug, Error)]
pub enum NotReleased {
    /// The proof is of another object, or of another mapping of it: nothing was done, the mapping is handed back.
    #[error("the proof covers other memory than that of {} at IOVA {}", .0.owner, .0.iova)]
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
    /// Where the device finds it.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.iova
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

    /// Takes the memory out of the device's reach and, unless others still hold it, frees it.
    ///
    /// # Errors
    ///
    /// [`NotReleased`].
    pub fn release(mut self, proof: &ReleaseProof) -> Result<(), NotReleased> {
        if !proof.covers(self.owner, self.iova) {
            return Err(NotReleased::Scope(self));
        }
        let (object, iova, len) = (self.owner, self.iova, self.memory.len() as u64);
        match self.space.unmap(iova, len) {
            Unmapped::Exact => {
                self.entered = false;
                Ok(())
            }
            Unmapped::Busy => Err(NotReleased::Busy(self)),
            outcome => {
                self.entered = false;
                Err(NotReleased::Unmap {
                    object,
                    iova,
                    len,
                    outcome,
                })
            }
        }
    }

    /// After the ledger closed under a map call: the device never learnt the address.
    fn unmap_late(mut self) {
        let outcome = self.space.unmap(self.iova, self.memory.len() as u64);
        self.entered = outcome == Unmapped::Busy;
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if mem::take(&mut self.entered) {
            log::warn!(
                "{}: no proof that the device let go; {:?} quarantined",
                self.owner,
                self.memory
            );
            self.space
                .keep(self.iova, "no proof that the device let go of it");
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} at IOVA {} for {}",
            self.memory, self.iova, self.owner
        )
    }
}
