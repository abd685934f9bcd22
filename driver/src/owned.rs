//! The two destroys, written once for every kind of object (R5).

use std::cell::RefCell;
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
pub trait Object: Sized + Send + 'static {
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
        let Some(object) = self.object.take() else {
            return;
        };
        if !object.life().is_ours() {
            // A child of fork: the object is its parent's, whose device goes on with it (R12).
            std::mem::forget(object);
            return;
        }
        let clock = object.life().function().clock.clone();
        let end = clock.now() + PATIENCE;
        let Some(mut object) = leave(object, end) else {
            return;
        };
        loop {
            match stop(&mut object) {
                Ok(release) => return object.let_go(release),
                // Its shared part goes with its last user.
                Err(Refusal::InUse(_)) => return object.let_go(Release::Unknown),
                Err(Refusal::Busy(_)) if clock.now() < end => clock.sleep(AGAIN),
                Err(Refusal::Busy(why)) => return escalate(object, still_busy(why)),
                Err(Refusal::Failed(cause)) => return escalate(object, cause),
            }
        }
    }
}

thread_local! {
    /// What is dropped on a thread that may not wait ([`Leftovers::keep`]).
    static LEFT: RefCell<Option<Vec<Box<dyn Ending>>>> = const { RefCell::new(None) };
}

/// Leaves an object to whoever collects what is dropped on this thread; handed back where nobody
/// does.
fn leave<T: Object>(object: T, end: Duration) -> Option<T> {
    let mut object = Some(object);
    // A thread that ends has no collector.
    let _ = LEFT.try_with(|left| {
        if let Some(left) = &mut *left.borrow_mut()
            && let Some(object) = object.take()
        {
            let owned = Owned::new(object);
            left.push(Box::new(Left { owned, end }));
        }
    });
    object
}

/// Objects that were dropped where nobody may wait, for the device or for its ladder, and have not
/// gone yet (R11). Dropped, they wait as any other.
#[derive(Default)]
pub(crate) struct Leftovers(Vec<Box<dyn Ending>>);

impl Leftovers {
    /// What this thread drops while it does `act` is left here, to be ended by [`Leftovers::end`].
    pub(crate) fn keep<R>(&mut self, act: impl FnOnce() -> R) -> R {
        let _ = LEFT.try_with(|left| left.replace(Some(Vec::new())));
        let _collecting = Collecting(self);
        act()
    }

    /// Ends what needs to wait for nothing; true when nothing is left.
    pub(crate) fn end(&mut self) -> bool {
        self.0.retain_mut(|left| !left.end());
        self.0.is_empty()
    }
}

impl fmt::Debug for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Leftovers").field(&self.0.len()).finish()
    }
}

/// Collects until it is dropped, also by a panic.
struct Collecting<'a>(&'a mut Leftovers);

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        if let Ok(Some(mut left)) = LEFT.try_with(RefCell::take) {
            self.0.0.append(&mut left);
        }
    }
}

/// An object of whatever kind that is on its way out.
trait Ending: Send {
    /// Destroys it if that waits for nothing; whether it is gone.
    fn end(&mut self) -> bool;
}

/// An object that is on its way out, and when its device has been busy for too long.
struct Left<T: Object> {
    owned: Owned<T>,
    end: Duration,
}

impl<T: Object> Ending for Left<T> {
    fn end(&mut self) -> bool {
        let Some(mut object) = self.owned.object.take() else {
            return true;
        };
        let life = object.life().clone();
        let gone = if !life.is_ours() {
            None
        } else if !life.lifecycle().is_broken() {
            self.stop(&life, &mut object)
        } else if life.lifecycle().is_breaking() {
            None
        } else {
            Some(revoked(&life))
        };
        match gone {
            Some(release) => object.let_go(release),
            None => self.owned.object = Some(object),
        }
        self.owned.object.is_none()
    }
}

impl<T: Object> Left<T> {
    /// Stops an object of a device that is not broken; a device that does not let go of it is broken,
    /// and its verdict is for later.
    fn stop(&self, life: &Life, object: &mut T) -> Option<Release> {
        match object.stop() {
            Ok(release) => return Some(release),
            // Its shared part goes with its last user.
            Err(Refusal::InUse(_)) => return Some(Release::Unknown),
            Err(Refusal::Busy(_)) if life.function().clock.now() < self.end => {}
            Err(Refusal::Busy(why)) => life.break_device(still_busy(why)),
            Err(Refusal::Failed(cause)) => life.break_device(cause),
        }
        None
    }
}

/// What a device is broken for that stays busy.
fn still_busy(why: &str) -> Cause {
    Cause::TimedOut {
        what: format!("still busy after {PATIENCE:?}: {why}"),
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
