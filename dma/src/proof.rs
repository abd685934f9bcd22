//! The grounds on which memory may be released (R3).
//!
//! There is no proof without a reading: an [`Acknowledged`] consumes what `pci` makes only by
//! reading a register of a living function, an [`Unreferenced`] is made only by a region that no
//! queue holds, and a whole life is covered only by a `FunctionStopped` of `pci`, or by what
//! [`AddressSpace::settle`] found unmapped.

use std::fmt;

use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::reset::FunctionStopped;
use failstop_pci::transport::Iova;
use failstop_pci::window::Stopped;

use crate::ledger::Covered;
use crate::space::AddressSpace;

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

impl ObjectId {
    /// Whether both name the same object: its number tells it, whatever the kind is called.
    #[inline]
    fn is(&self, other: &Self) -> bool {
        self.serial == other.serial
            && self.generation == other.generation
            && self.device == other.device
    }
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

/// A ground for release: names the device, the life and the memory that it covers.
#[must_use]
#[derive(Debug)]
pub struct ReleaseProof {
    scope: Scope,
    ground: Ground,
}

#[derive(Debug)]
enum Scope {
    Object {
        object: ObjectId,
        /// The start of the one mapping that it covers; all of the object's without one.
        iova: Option<Iova>,
    },
    /// Every object of these lives.
    Life {
        device: DeviceId,
        /// And all older ones.
        generation: Generation,
        /// Starts of mappings that are not covered, ascending.
        except: Box<[Iova]>,
    },
}

/// Which ground a proof stands on, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ground {
    /// The device acknowledged the stop (R3.1).
    Acknowledged,
    /// The device never knew the range by itself, and no queue holds it any more (R3.3).
    Unreferenced,
    /// The function was stopped: bus mastering off and a proven reset (R3.2).
    Stopped,
    /// An enforcing IOMMU, or the server, removed the mapping exactly, or the function from its
    /// address space (R4).
    Unmapped,
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acknowledged => "the device acknowledged the stop",
            Self::Unreferenced => "no queue holds an address of it",
            Self::Stopped => "the function is stopped",
            Self::Unmapped => "the mapping was removed",
        })
    }
}

impl ReleaseProof {
    /// Every object of a function that was proven stopped, of the life that ended so and of older
    /// ones. None when others can issue DMA in its address space, when the stop is the function's
    /// own word only (a software reset), or it is another function's.
    ///
    /// From now on nothing is mapped in `space` for those lives. The caller must not turn bus
    /// mastering on again before it began a new one.
    pub fn stopped(stopped: &FunctionStopped, space: &AddressSpace) -> Option<Self> {
        let generation = stopped.generation();
        space.end_life(stopped).then(|| Self {
            scope: Scope::Life {
                device: stopped.device(),
                generation,
                except: Box::default(),
            },
            ground: Ground::Stopped,
        })
    }

    pub(crate) fn of_life(device: DeviceId, covered: Covered) -> Self {
        Self {
            scope: Scope::Life {
                device,
                generation: covered.up_to,
                except: covered.except,
            },
            ground: covered.ground,
        }
    }

    /// Whether the memory of `object` that is mapped at `iova` may be released on it.
    #[must_use]
    #[inline]
    pub fn covers(&self, object: ObjectId, iova: Iova) -> bool {
        match &self.scope {
            Scope::Object {
                object: covered,
                iova: only,
            } => covered.is(&object) && only.is_none_or(|only| only == iova),
            Scope::Life {
                device,
                generation,
                except,
            } => {
                *device == object.device
                    && object.generation <= *generation
                    && except.binary_search(&iova).is_err()
            }
        }
    }

    /// Whether it says of itself which memory is left out, so that memory that a covered queue
    /// points to must be asked for by its own name. An acknowledged queue points to nothing.
    pub(crate) fn is_of_life(&self) -> bool {
        matches!(self.scope, Scope::Life { .. })
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
            scope: Scope::Object {
                object: acknowledged.object,
                iova: None,
            },
            ground: Ground::Acknowledged,
        }
    }
}

impl From<Unreferenced> for ReleaseProof {
    fn from(unreferenced: Unreferenced) -> Self {
        Self {
            scope: Scope::Object {
                object: unreferenced.object,
                iova: Some(unreferenced.iova),
            },
            ground: Ground::Unreferenced,
        }
    }
}
