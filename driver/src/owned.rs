//! The two destroys, written once for every kind of object (R5).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use failstop_dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop_pci::window::{NoAnswer, Stopped};
use failstop_queues::lifecycle::Cause;

use crate::life::Life;
use crate::provider::NotStopped;

/// How long a destroy that cannot fail asks a device again that says that an object is busy.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits in between.
const AGAIN: Duration = Duration::from_millis(1);

/// Why an object does not go now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Something of ours still uses it: nothing has changed, and it goes with the last of them.
    InUse(&'static str),
    /// The device says that it still uses it (EAGAIN): nothing has changed, try again later.
    Busy(&'static str),
    /// The device did not let go of it.
    Failed(Cause),
}

impl Refusal {
    /// What the end of a stop sequence for `what` means.
    pub(crate) fn of(what: &dyn fmt::Display, why: NotStopped) -> Self {
        let text = |error: NoAnswer| format!("{what}: {error}");
        match why {
            NotStopped::Busy(why) => Self::Busy(why),
            NotStopped::NoAnswer(gone @ NoAnswer::Gone { .. }) => {
                Self::Failed(Cause::Gone { what: text(gone) })
            }
            NotStopped::NoAnswer(stuck) => Self::Failed(Cause::StopFailed { what: text(stuck) }),
        }
    }
}

/// The ground on which an object's memory goes; an object that the device never knew needs none.
#[derive(Clone, Debug)]
pub enum Release {
    /// The device has nothing to say of it.
    Unknown,
    /// It is proven.
    On(Arc<ReleaseProof>),
    /// It is not proven: what memory there is goes to quarantine.
    Unproven,
}

impl Release {
    /// The ground that a family's acknowledgement is, for the object that it names.
    pub(crate) fn acknowledged(object: ObjectId, stopped: Stopped) -> Result<Self, Refusal> {
        Acknowledged::by_register(object, stopped)
            .map(|acknowledged| Self::On(Arc::new(acknowledged.into())))
            .ok_or_else(|| {
                Refusal::Failed(Cause::StopFailed {
                    what: format!("{object}: the reading is of another device or generation"),
                })
            })
    }

    /// The proof, if there is one.
    #[must_use]
    pub fn proof(&self) -> Option<&ReleaseProof> {
        match self {
            Self::On(proof) => Some(proof),
            Self::Unknown | Self::Unproven => None,
        }
    }
}

/// What a kind of object says of itself.
pub trait Object: Sized {
    /// Asks the device to let go, which is not broken. A proof comes only from a reading or from the
    /// accounts.
    ///
    /// # Errors
    ///
    /// [`Refusal`].
    fn stop(&mut self) -> Result<Release, Refusal>;

    /// Gives up the memory: released on the proof, quarantined without one where it needs one.
    fn let_go(self, release: Release);

    /// The life that it is of. Asked of the object itself: through a mutable reference two objects
    /// can change places, also those of two devices.
    #[doc(hidden)]
    fn life(&self) -> &Arc<Life>;
}

/// An object, and its two destroys.
///
/// [`Owned::try_destroy`] hands it back when it is busy. [`Owned::destroy`] and dropping cannot
/// fail: what is in use goes with the last of its users; when the device does not let go, the device
/// is broken, its ladder runs, and the object goes on the verdict. On a device that is broken
/// already every destroy succeeds without touching it (R6). In a child of fork every destroy succeeds
/// at once and does nothing.
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
            if !object.life().is_ours() {
                std::mem::forget(object);
                return Ok(());
            }
            match stop(&mut object) {
                Ok(release) => object.let_go(release),
                Err(Refusal::InUse(why) | Refusal::Busy(why)) => {
                    self.object = Some(object);
                    return Err(Busy { object: self, why });
                }
                Err(Refusal::Failed(cause)) => escalate(object, cause),
            }
        }
        Ok(())
    }

    /// Destroys the object; what still uses it keeps it until the last of them goes.
    pub fn destroy(self) {
        drop(self);
    }
}

/// Stops an object, or learns that there is no need to.
fn stop<T: Object>(object: &mut T) -> Result<Release, Refusal> {
    let life = object.life();
    if life.lifecycle().is_broken() {
        return Ok(revoked(life));
    }
    object.stop()
}

/// What a broken device's memory goes on.
fn revoked(life: &Life) -> Release {
    life.revoked().map_or(Release::Unproven, Release::On)
}

/// Breaks the device, whose ladder then says what the object's memory goes on.
fn escalate<T: Object>(object: T, cause: Cause) {
    let life = object.life().clone();
    life.break_device(cause);
    object.let_go(revoked(&life));
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        let Some(mut object) = self.object.take() else {
            return;
        };
        if !object.life().is_ours() {
            // A child of fork: the object is its parent's, whose device goes on with it (R12).
            std::mem::forget(object);
            return;
        }
        let clock = object.life().function().clock.clone();
        let end = clock.now() + PATIENCE;
        loop {
            match stop(&mut object) {
                Ok(release) => return object.let_go(release),
                // Its shared part goes with its last user.
                Err(Refusal::InUse(_)) => return object.let_go(Release::Unknown),
                Err(Refusal::Busy(_)) if clock.now() < end => clock.sleep(AGAIN),
                Err(Refusal::Busy(why)) => {
                    let what = format!("still busy after {PATIENCE:?}: {why}");
                    return escalate(object, Cause::TimedOut { what });
                }
                Err(Refusal::Failed(cause)) => return escalate(object, cause),
            }
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
