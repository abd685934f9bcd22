//! The accounts of work requests: each that was posted ends in exactly one completion (R7).

use std::ops::{Add, AddAssign};

/// Work requests of one queue, or of several added up. A request is a descriptor that the device
/// was given.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Completions {
    /// Requests posted.
    pub posted: u64,
    /// Completed: the frame was received or sent.
    pub success: u64,
    /// Completed with an error that the device reported for this request.
    pub error: u64,
    /// Ended without having been carried out, because their queue went.
    pub flushed: u64,
    /// Of the flushed: those whose buffers are not given back, since the verdict does not cover
    /// them.
    pub quarantined: u64,
}

impl Completions {
    /// Requests that the device still has.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.posted - self.success - self.error - self.flushed
    }

    /// The accounts after the queue went: what was outstanding is flushed.
    #[must_use]
    pub fn flush(self) -> Self {
        Self {
            flushed: self.flushed + self.outstanding(),
            ..self
        }
    }

    /// The accounts of a queue whose memory is quarantined: no flush gave a buffer back.
    #[must_use]
    pub fn quarantine(self) -> Self {
        Self {
            quarantined: self.flushed,
            ..self
        }
    }
}

impl Add for Completions {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            posted: self.posted + other.posted,
            success: self.success + other.success,
            error: self.error + other.error,
            flushed: self.flushed + other.flushed,
            quarantined: self.quarantined + other.quarantined,
        }
    }
}

impl AddAssign for Completions {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
