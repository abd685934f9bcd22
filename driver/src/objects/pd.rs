//! Protection domains.

use std::sync::Arc;

use failstop_dma::proof::{ObjectId, ReleaseProof};
use failstop_pci::id::Generation;

use super::CreateError;
use crate::device::Device;
use crate::life::{Entered, Life};
use crate::owned::{Object, Owned, Refusal, Release};

#[derive(Debug)]
pub(super) struct PdShared {
    pub(super) id: ObjectId,
    pub(super) life: Arc<Life>,
    _entered: Entered,
}

/// A protection domain: what may be used together.
#[derive(Debug)]
pub struct Pd(pub(super) Arc<PdShared>);

impl Object for Pd {
    fn stop(&mut self) -> Result<Release, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(Release::Unknown),
            _ => Err(Refusal::InUse(
                "memory regions or queues use the protection domain",
            )),
        }
    }

    fn let_go(self, _: Release) {}

    fn life(&self) -> &Arc<Life> {
        &self.0.life
    }
}

impl Device {
    /// Makes a protection domain.
    ///
    /// # Errors
    ///
    /// [`CreateError::Device`] on a broken device.
    pub fn alloc_pd(&self) -> Result<Owned<Pd>, CreateError> {
        Pd::of(self.life())
    }
}

impl Pd {
    /// The life that it is of.
    pub(crate) fn generation(&self) -> Generation {
        self.0.life.generation()
    }

    /// What its memory goes on, once the device is broken and the verdict is in.
    pub(crate) fn revoked(&self) -> Option<Arc<ReleaseProof>> {
        self.0.life.lifecycle().verdict()?.proof
    }

    pub(crate) fn of(life: Arc<Life>) -> Result<Owned<Self>, CreateError> {
        life.check()?;
        let pd = PdShared {
            id: life.new_object("PD"),
            _entered: life.enter(),
            life,
        };
        Ok(Owned::new(Self(Arc::new(pd))))
    }
}
