//! Memory regions.

use std::sync::Arc;

use failstop_dma::proof::ReleaseProof;
use failstop_dma::region::{Census, FrameRegion, Pool};

use super::pd::{Pd, PdShared};
use super::{CreateError, release};
use crate::life::Life;
use crate::owned::{Object, Owned, Refusal, Release};

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
        let life = &self.pd.life;
        // A broken device is not touched any more, and its unmaps were the ladder's (R6).
        if life.lifecycle().is_broken() {
            let proof = life.revoked();
            let covered = |proof: &Arc<ReleaseProof>| proof.covers(region.owner(), region.iova());
            if let Some(proof) = proof.filter(covered) {
                release(region.into_mapping(), &proof, life);
            }
        } else if let Some(proof) = region.unreferenced() {
            release(region.into_mapping(), &proof.into(), life);
        }
        // Else a ring that holds it was quarantined: so is the region, by its mapping's drop.
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

impl Mr {
    /// The same memory and frames, mapped anew in the life of `pd`; this region has none then. No
    /// ring of the life that ended may hold its frames any more.
    pub(crate) fn carry(
        &mut self,
        proof: &ReleaseProof,
        pd: &Owned<Pd>,
    ) -> Result<Owned<Self>, CreateError> {
        let life = pd.life();
        let foreign = || CreateError::Foreign {
            device: life.name(),
            what: "memory region",
        };
        // Queues that were taken apart hold it no more.
        let shared = Arc::get_mut(&mut self.0).ok_or_else(foreign)?;
        let region = shared.region.take().ok_or_else(foreign)?;
        match region.carry(proof, life.space(), life.new_object("MR")) {
            Ok(region) => {
                let shared = MrShared {
                    region: Some(region),
                    pd: pd.0.clone(),
                };
                Ok(Owned::new(Self(Arc::new(shared))))
            }
            Err((region, error)) => {
                life.note_not_mapped(&error);
                shared.region = Some(region);
                Err(error.into())
            }
        }
    }
}

impl Object for Mr {
    fn stop(&mut self) -> Result<Release, Refusal> {
        match Arc::strong_count(&self.0) {
            1 => Ok(Release::Unknown),
            _ => Err(Refusal::InUse("queues hold frames of the memory region")),
        }
    }

    fn let_go(self, _: Release) {
        // Dropping the last reference releases the memory.
    }

    fn life(&self) -> &Arc<Life> {
        &self.0.pd.life
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
        let life = &self.0.life;
        life.check()?;
        let id = life.new_object("MR");
        let frame = |source| CreateError::Frame {
            device: life.name(),
            source,
        };
        let bytes = FrameRegion::check(frame_size, frames).map_err(frame)?;
        let mapping = life.space().map(id, bytes);
        let mapping = mapping.inspect_err(|error| life.note_not_mapped(error))?;
        let (region, pool) =
            FrameRegion::new(mapping, frame_size, frames).map_err(|(_, source)| frame(source))?;
        let shared = MrShared {
            region: Some(region),
            pd: self.0.clone(),
        };
        Ok((Owned::new(Mr(Arc::new(shared))), pool))
    }
}
