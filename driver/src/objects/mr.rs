//! Memory regions.

use std::sync::Arc;

use failstop_dma::proof::ReleaseProof;
use failstop_dma::region::{Census, FrameRegion, Pool};

use super::pd::{Pd, PdShared};
use super::{CreateError, release};
use crate::device::Core;
use crate::owned::{Object, Owned, Refusal};

#[derive(Debug)]
pub(super) struct MrShared {
    /// There until the last user goes.
    pub(super) region: Option<FrameRegion>,
    pub(super) pd: Arc<PdShared>,
}

impl Drop for MrShared {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else {
            return;
        };
        match region.unreferenced() {
            Some(proof) => release(region.into_mapping(), &proof.into(), &self.pd.core),
            // A ring that holds it was quarantined: so is the region, by its mapping's drop.
            None => drop(region),
        }
    }
}

/// A memory region: DMA memory cut into frames. On a NIC the device learns an address only from a
/// ring, so that the region is released once every ring that held one was proven stopped (R3.3).
#[derive(Debug)]
pub struct Mr(pub(super) Arc<MrShared>);

impl Mr {
    /// Where its frames are.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.0.region.as_ref().map(FrameRegion::census)
    }
}

impl Object for Mr {
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(None),
            _ => Err(Refusal::Busy("queues hold frames of the memory region")),
        }
    }

    fn let_go(self, _: Option<ReleaseProof>) {
        // Dropping the last reference releases the memory.
    }

    fn core(&self) -> &Arc<Core> {
        &self.0.pd.core
    }
}

impl Owned<Pd> {
    /// Registers new memory: `frames` buffers of `frame_size` bytes (64 to 65536, in steps of 64),
    /// as one mapping. The pool hands the buffers out.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    pub fn register(&self, frames: u32, frame_size: u32) -> Result<(Owned<Mr>, Pool), CreateError> {
        let core = &self.0.core;
        core.check()?;
        let id = core.new_object("MR");
        let frame = |source| CreateError::Frame {
            device: core.name(),
            source,
        };
        let bytes = FrameRegion::check(frame_size, frames).map_err(frame)?;
        let mapping = core.space().map(id, bytes)?;
        let (region, pool) =
            FrameRegion::new(mapping, frame_size, frames).map_err(|(_, source)| frame(source))?;
        let shared = MrShared {
            region: Some(region),
            pd: self.0.clone(),
        };
        Ok((Owned::new(Mr(Arc::new(shared))), pool))
    }
}
