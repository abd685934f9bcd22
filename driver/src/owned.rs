//! The two destroys, written once for every kind of object (R5).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use failstop_dma::proof::ReleaseProof;
use failstop_queues::lifecycle::Cause;

use crate::device::Core;

/// Why an object does not go now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Something of ours still uses it: nothing has changed, try again later.
    Busy(&'static str),
    /// The device did not let go of it.
    Failed(Cause),
}

/// What a kind of object says of itself.
pub trait Object: Sized {
    /// Asks the device to let go. A proof comes only from a reading or from the accounts; an object
    /// that the device knows nothing of needs none.
    fn stop(&mut self) -> Result<Option<ReleaseProof>, Refusal>;

    /// Gives up the memory: released on the proof, quarantined without one where it needs one.
    fn let_go(self, proof: Option<ReleaseProof>);

    /// The device that it is of. Asked of the object itself: through a mutable reference two
    /// objects can change places, also those of two devices.
    fn core(&self) -> &Arc<Core>;
}

/// An object, and its two destroys.
///
/// [`Owned::try_destroy`] hands it back when it is busy. [`Owned::destroy`] and dropping cannot
/// fail: what is busy goes with the last of its users; when the device does not let go, the device
/// is broken and the object's memory quarantined.
#[must_use = "an object is destroyed when it is dropped"]
pub struct Owned<T: Object> {
    object: Option<T>,
}

/// The object, whole, and why it stays.
#[derive(Debug)]
pub struct Busy<T: Object> {
    /// The object.
    pub object: Owned<T>,
    /// What uses it.
    pub why: &'static str,
}

impl<T: Object> Owned<T> {
    pub(crate) fn new(object: T) -> Self {
        Self {
            object: Some(object),
        }
    }

    /// Destroys the object if nothing uses it.
    ///
    /// # Errors
    ///
    /// [`Busy`]: nothing has changed, and the object is handed back. A device that does not let go
    /// is no refusal: it is broken, and the destroy succeeds.
    pub fn try_destroy(mut self) -> Result<(), Busy<T>> {
        if let Some(mut object) = self.object.take() {
            match Self::stop(&mut object) {
                Ok(proof) => object.let_go(proof),
                Err(why) => {
                    self.object = Some(object);
                    return Err(Busy { object: self, why });
                }
            }
        }
        Ok(())
    }

    /// Destroys the object; what still uses it keeps it until the last of them goes.
    pub fn destroy(self) {
        drop(self);
    }

    /// The proof, if any, or why it is busy.
    fn stop(object: &mut T) -> Result<Option<ReleaseProof>, &'static str> {
        match object.stop() {
            Ok(proof) => Ok(proof),
            Err(Refusal::Busy(why)) => Err(why),
            Err(Refusal::Failed(cause)) => {
                object.core().break_device(cause);
                Ok(None)
            }
        }
    }
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        if let Some(mut object) = self.object.take() {
            // Busy: the object's shared part goes with its last user.
            let proof = Self::stop(&mut object).unwrap_or_default();
            object.let_go(proof);
        }
    }
}

// The object is taken out only by the destroys, which take the owner with them.
const THERE: &str = "an owned object is there until it is destroyed";

impl<T: Object> Deref for Owned<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        self.object.as_ref().expect(THERE)
    }
}

impl<T: Object> DerefMut for Owned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        self.object.as_mut().expect(THERE)
    }
}

impl<T: Object + fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}
