//! A look at a device by somebody who does not keep it open.

use std::sync::Weak;

use failstop_dma::ledger::{Line, Totals};
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::Cause;

use super::{Device, Inner};

/// Sees what a device can reach, from any thread, also while its owner closes it: for whoever has to
/// say what state it is in when that takes too long. Nothing is kept open by it, and nobody waited for.
#[derive(Clone, Debug)]
pub struct Glance {
    inner: Weak<Inner>,
}

/// What a device's accounts are at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct Seen {
    /// The ledger's sums.
    pub totals: Totals,
    /// What is mapped or in quarantine.
    pub left: Vec<Line>,
    /// The requests of queues that were destroyed.
    pub completions: Completions,
    /// Why it is broken, if it is.
    pub broken: Option<Cause>,
}

impl Device {
    /// A way to look at it from elsewhere.
    #[must_use]
    pub fn glance(&self) -> Glance {
        Glance {
            inner: std::sync::Arc::downgrade(&self.inner),
        }
    }
}

impl Glance {
    /// Looks; none of a device that is closed, and in a child of fork.
    #[must_use]
    pub fn look(&self) -> Option<Seen> {
        let inner = self.inner.upgrade()?;
        if !inner.process.is_this() {
            return None;
        }
        let ledger = inner.function.space.ledger();
        Some(Seen {
            totals: ledger.totals(),
            left: ledger.lines(),
            completions: inner.tally.completions(),
            broken: inner.life().lifecycle().cause(),
        })
    }
}
