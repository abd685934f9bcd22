//! Names of opened functions and of their lives.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// One opened function: a number that is unique in this process and never used again.
///
/// Proofs name a function by this number, so that a proof of one function can never release the
/// memory of another, nor that of a later opening of the same one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId(u64);

impl DeviceId {
    /// The next unused number; a transport takes one when it opens a function.
    #[must_use]
    pub fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// One life of an opened function, from a proven reset to the next (R10).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Generation(NonZeroU64);

impl Generation {
    /// The life that begins when the function is opened.
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// The ladder's own: newer than every life, so that its window outlives the one that it ends
    /// (R4.3). No object has it.
    pub const LADDER: Self = Self(NonZeroU64::MAX);

    /// The life with this number; none of 0.
    #[must_use]
    pub const fn numbered(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The life that recovery begins after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The number: 1 for the first life.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {}", self.0)
    }
}
