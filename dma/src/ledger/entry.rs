//! One range of the ledger: whose it is, where it is in its life, and what is known of it.

use std::fmt;
use std::mem;
use std::time::Duration;

use failstop_pci::clock::Ticks;
use failstop_pci::transport::{Iova, Unmapped};

use super::Refused;
use super::times::Scale;
use crate::proof::ObjectId;

/// Where a range is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// Entered; the map call has not returned.
    Mapping,
    /// The device can reach it.
    Live,
    /// Its owner let go of it on a proof; the unmap call has not returned.
    Unmapping,
    /// The ladder is unmapping it, or has, and its fate is not settled (R4.6).
    Revoking,
    /// Kept back for want of proof: leaked on purpose, until proof comes.
    Quarantined,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapping => "mapping",
            Self::Live => "live",
            Self::Unmapping => "unmapping",
            Self::Revoking => "revoking",
            Self::Quarantined => "quarantined",
        })
    }
}

/// One line of the ledger, for people and reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// Start of the range.
    pub iova: Iova,
    /// Bytes.
    pub len: u64,
    /// Whose.
    pub owner: ObjectId,
    /// State.
    pub state: State,
    /// Since when, on the address space's clock, as near as [`Clock::ticks`] tells. What a map call
    /// brought about counts from when that began.
    ///
    /// [`Clock::ticks`]: failstop_pci::clock::Clock::ticks
    pub since: Duration,
    /// Why it is quarantined, or what it waits for.
    pub reason: Option<&'static str>,
}

/// What the transport said of a range last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    /// The device can reach it, or nobody knows better.
    Mapped,
    /// The unmap failed, or was of another size.
    Unsure,
    /// A map or unmap call for it has not returned: only the hand that made it changes the entry's
    /// reach, and nobody strikes it out.
    Calling,
    /// Unmapped exactly, by a transport that does not enforce anything.
    Unmapped,
    /// Unmapped exactly, by an enforcing IOMMU or on a server's word.
    Revoked,
    /// The transport knew no such mapping.
    Absent,
}

impl Reach {
    /// Whether there may be something to unmap, and nobody is at it.
    #[inline]
    pub(super) fn is_mapped(self) -> bool {
        matches!(self, Self::Mapped | Self::Unsure)
    }

    /// After an unmap call with that outcome.
    pub(super) fn after(outcome: Unmapped, enforced: bool) -> Self {
        match outcome {
            Unmapped::Exact if enforced => Self::Revoked,
            Unmapped::Exact => Self::Unmapped,
            Unmapped::Busy => Self::Mapped,
            Unmapped::Absent => Self::Absent,
            Unmapped::Partial { .. } | Unmapped::Failed(_) => Self::Unsure,
        }
    }
}

/// Why an entry is not released: one byte, since there are many entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    NoProof,
    Unanswered,
    NotTried,
    InMap,
    InUnmap,
    NotStopped,
    Absent,
    Partial,
    Failed,
    Busy,
}

impl Why {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::NoProof => "no proof that the device let go of it",
            Self::Unanswered => "nobody answered whether it was mapped",
            Self::NotTried => "its unmap was not tried",
            Self::InMap => "its map call has not returned",
            Self::InUnmap => "its unmap call has not returned",
            Self::NotStopped => {
                "unmapped, but nothing enforces that and the function is not proven stopped"
            }
            Self::Absent => "the transport knew no such mapping",
            Self::Partial => "the transport unmapped another size",
            Self::Failed => "the unmap failed",
            Self::Busy => "the address space stayed busy",
        }
    }

    /// Of an unmap that was not exact.
    pub(super) const fn of(outcome: Unmapped) -> Self {
        match outcome {
            Unmapped::Exact => Self::NotStopped,
            Unmapped::Absent => Self::Absent,
            Unmapped::Partial { .. } => Self::Partial,
            Unmapped::Failed(_) => Self::Failed,
            Unmapped::Busy => Self::Busy,
        }
    }
}

/// The name of an entry. The address alone names whoever uses it now: a handle of an entry that was
/// struck must not touch its next user's. The [slot](super::slots) is not used again before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) iova: Iova,
    /// Where it is kept.
    pub(super) slot: usize,
}

/// An entry of `len` bytes is in another state.
pub(super) struct Change {
    pub(super) from: State,
    pub(super) to: State,
    pub(super) len: u64,
}

/// One range. The memory is in the [slot](super::slots) beside it.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// The ledger's when it was entered: it was not closed since if that is the ledger's still.
    pub(super) epoch: u64,
    /// Bytes.
    pub(super) len: u64,
    pub(super) owner: ObjectId,
    pub(super) since: Ticks,
    pub(super) state: State,
    pub(super) reach: Reach,
    pub(super) reason: Option<Why>,
    /// Somebody has a [`Mapping`](crate::space::Mapping) of it.
    pub(super) handle: bool,
    /// Its owner let go of it on a proof of its own, while another hand was unmapping it.
    pub(super) let_go: bool,
}

impl Entry {
    /// Of a range whose map call is to be made.
    #[inline]
    pub(super) fn new(epoch: u64, len: u64, owner: ObjectId, now: Ticks) -> Self {
        Self {
            epoch,
            len,
            owner,
            since: now,
            state: State::Mapping,
            reach: Reach::Calling,
            reason: None,
            handle: false,
            let_go: false,
        }
    }

    /// Brings it into another state.
    #[inline]
    pub(super) fn set(&mut self, state: State, reason: Option<Why>, now: Ticks) -> Change {
        if self.state != state {
            self.since = now;
        }
        self.reason = reason;
        let len = self.len;
        let from = mem::replace(&mut self.state, state);
        Change {
            from,
            to: state,
            len,
        }
    }

    pub(super) fn line(&self, iova: Iova, scale: &Scale) -> Line {
        Line {
            iova,
            len: self.len,
            owner: self.owner,
            state: self.state,
            since: scale.time(self.since),
            reason: self.reason.map(Why::text),
        }
    }

    /// That it is at `at`, where something of `len` bytes at `iova` was to be entered.
    pub(super) fn overlaps(&self, at: Iova, iova: Iova, len: u64) -> Refused {
        Refused::Overlap {
            iova,
            len,
            at,
            held: self.len,
            owner: self.owner,
            state: self.state,
        }
    }
}
