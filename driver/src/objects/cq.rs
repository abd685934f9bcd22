//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::CreateError;
use crate::device::Device;
use crate::life::{Entered, Life};
use crate::owned::{Object, Owned, Refusal, Release};

#[derive(Debug)]
pub(super) struct CqShared {
    pub(super) life: Arc<Life>,
    capacity: u32,
    reserved: AtomicU32,
    _entered: Entered,
}

/// A completion queue: where requests end. Its capacity is reserved by the queues that complete
/// into it, so that it cannot overrun (C27). Families whose rings carry their own completions need
/// no memory for it.
#[derive(Debug)]
pub struct Cq(pub(super) Arc<CqShared>);

impl Object for Cq {
    fn stop(&mut self) -> Result<Release, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(Release::Unknown),
            _ => Err(Refusal::InUse("queues complete into the completion queue")),
        }
    }

    fn let_go(self, _: Release) {}

    fn life(&self) -> &Arc<Life> {
        &self.0.life
    }
}

/// Reserved entries of a completion queue.
#[derive(Debug)]
pub(super) struct Reservation {
    cq: Arc<CqShared>,
    entries: u32,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.cq.reserved.fetch_sub(self.entries, Ordering::AcqRel);
    }
}

impl CqShared {
    pub(super) fn reserve(self: &Arc<Self>, entries: u32) -> Result<Reservation, CreateError> {
        let take = |now: u32| now.checked_add(entries).filter(|&sum| sum <= self.capacity);
        match self
            .reserved
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
        {
            Ok(_) => Ok(Reservation {
                cq: self.clone(),
                entries,
            }),
            Err(now) => Err(CreateError::CompletionQueueFull {
                device: self.life.name(),
                free: self.capacity - now,
                capacity: self.capacity,
                needed: entries,
            }),
        }
    }
}

impl Device {
    /// Makes a completion queue of `capacity` entries.
    ///
    /// # Errors
    ///
    /// [`CreateError::Device`] on a broken device.
    pub fn create_cq(&self, capacity: u32) -> Result<Owned<Cq>, CreateError> {
        Cq::of(self.life(), capacity)
    }
}

impl Cq {
    pub(crate) fn of(life: Arc<Life>, capacity: u32) -> Result<Owned<Self>, CreateError> {
        life.check()?;
        let cq = CqShared {
            capacity,
            reserved: AtomicU32::new(0),
            _entered: life.enter(),
            life,
        };
        Ok(Owned::new(Self(Arc::new(cq))))
    }
}
