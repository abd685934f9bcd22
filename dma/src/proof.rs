//! The grounds on which memory may be released (R3).
//!
//! There is no proof without a reading: an [`Acknowledged`] consumes what `pci` makes only by
//! reading a register of a living function, and an [`Unreferenced`] is made only by a region that
//! no queue holds.

use std::fmt;

use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::transport::Iova;
use failstop_pci::window::Stopped;

/// One object on one device in one life of it: whose memory a mapping is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ObjectId {
    /// The opened function.
    pub device: DeviceId,
    /// Its life.
    pub generation: Generation,
    /// Unique on the device.
    pub serial: u64,
    /// What kind of object, for people.
    pub kind: &'static str,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.serial)
    }
}

/// The device said, as its provider's documented stop sequence asks for, that it let go of one
/// object (R3.1).
#[must_use]
#[derive(Debug)]
pub struct Acknowledged {
    object: ObjectId,
}

impl Acknowledged {
    /// By the queue's own register: `stopped` was read from a living function. None when the
    /// reading is of another device or another life than the object.
    pub fn by_register(object: ObjectId, stopped: Stopped) -> Option<Self> {
        let same = stopped.device() == object.device && stopped.generation() == object.generation;
        same.then_some(Self { object })
    }

    /// Whose acknowledgement it is.
    #[must_use]
    pub fn object(&self) -> ObjectId {
        self.object
    }
}

/// No queue of the device holds an address of this object's memory, and none can again: every
/// ring that ever did was given back on a proof of its own (R3.3).
#[must_use]
#[derive(Debug)]
pub struct Unreferenced {
    object: ObjectId,
    iova: Iova,
}

impl Unreferenced {
    pub(crate) fn new(object: ObjectId, iova: Iova) -> Self {
        Self { object, iova }
    }
}

/// A ground for release: names the object whose memory it covers.
#[must_use]
#[derive(Debug)]
pub struct ReleaseProof {
    object: ObjectId,
    /// The start of the one mapping that it covers; all of the object's without one.
    iova: Option<Iova>,
    ground: Ground,
}

/// Which ground a proof stands on, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ground {
    /// The device acknowledged the stop (R3.1).
    Acknowledged,
    /// The device never knew the range by itself, and no queue holds it any more (R3.3).
    Unreferenced,
}

impl ReleaseProof {
    /// Whether the memory of `object` that is mapped at `iova` may be released on it.
    #[must_use]
    pub fn covers(&self, object: ObjectId, iova: Iova) -> bool {
        self.object == object && self.iova.is_none_or(|covered| covered == iova)
    }

    /// What it stands on.
    #[must_use]
    pub fn ground(&self) -> Ground {
        self.ground
    }
}

impl From<Acknowledged> for ReleaseProof {
    fn from(acknowledged: Acknowledged) -> Self {
        Self {
            object: acknowledged.object,
            iova: None,
            ground: Ground::Acknowledged,
        }
    }
}

impl From<Unreferenced> for ReleaseProof {
    fn from(unreferenced: Unreferenced) -> Self {
        Self {
            object: unreferenced.object,
            iova: Some(unreferenced.iova),
            ground: Ground::Unreferenced,
        }
    }
}
