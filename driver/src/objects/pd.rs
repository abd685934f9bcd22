//! Protection domains.

use std::sync::Arc;

use failstop_dma::proof::{ObjectId, ReleaseProof};

use super::CreateError;
use crate::device::{Core, Device, Entered};
use crate::owned::{Object, Owned, Refusal};

#[derive(Debug)]
pub(super) struct PdShared {
    pub(super) id: ObjectId,
    pub(super) core: Arc<Core>,
    _entered: Entered,
}

/// A protection domain: what may be used together.
#[derive(Debug)]
pub struct Pd(pub(super) Arc<PdShared>);

impl Object for Pd {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(None),
            _ => Err(Refusal::Busy(
                "memory regions or queues use the protection domain",
            )),
        }
    }

    fn let_go(self, _: Option<ReleaseProof>) {}

    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }
}

impl Device {
    /// Makes a protection domain.
    ///
    /// # Errors
    ///
    /// [`CreateError::Device`] on a broken device.
    pub fn alloc_pd(&self) -> Result<Owned<Pd>, CreateError> {
        self.core.check()?;
        let core = self.core.clone();
        let id = core.new_object("PD");
        let pd = PdShared {
            id,
            _entered: core.enter(),
            core,
        };
        Ok(Owned::new(Pd(Arc::new(pd))))
    }
}
