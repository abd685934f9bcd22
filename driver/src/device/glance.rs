//! A look at a device by somebody who does not keep it open.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use failstop_dma::ledger::{Ledger, Line, Totals};
use failstop_pci::fork::Process;
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::{Cause, Lifecycle};

use super::Device;
use crate::ladder::Function;
use crate::life::{Ended, Life, Tally};

/// Sees what a device can reach, from any thread, while its owner closes it and when it is gone: for
/// whoever has to say what state it is in when that takes too long. Nothing is kept open by it, and
/// nobody waited for.
#[derive(Clone, Debug)]
pub struct Glance {
    accounts: Arc<Accounts>,
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
    /// Why it is broken, if it is; why it was, if it is gone.
    pub broken: Option<Cause>,
}

/// A device's accounts, apart from the device: who has them does not have it, so that its last holder,
/// who ends it, is never somebody who looked.
#[derive(Debug)]
pub(crate) struct Accounts {
    ledger: Arc<Ledger>,
    ended: Arc<Ended>,
    /// Of its present life.
    lifecycle: Mutex<Arc<Lifecycle>>,
    process: Process,
}

impl Accounts {
    /// Of a function whose first life is `life`.
    pub(crate) fn new(function: &Function, tally: &Tally, life: &Life) -> Self {
        Self {
            ledger: function.space.ledger().clone(),
            ended: tally.ended().clone(),
            lifecycle: Mutex::new(life.lifecycle().clone()),
            process: Process::this(),
        }
    }

    /// Another life begins.
    pub(crate) fn follow(&self, life: &Life) {
        *self.lifecycle() = life.lifecycle().clone();
    }

    fn lifecycle(&self) -> MutexGuard<'_, Arc<Lifecycle>> {
        self.lifecycle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    /// A way to look at it from elsewhere.
    #[must_use]
    pub fn glance(&self) -> Glance {
        Glance {
            accounts: self.inner.accounts.clone(),
        }
    }
}

impl Glance {
    /// Looks; of a device that is gone, what it left behind. None in a child of fork.
    #[must_use]
    pub fn look(&self) -> Option<Seen> {
        let accounts = &*self.accounts;
        // First: a lock may be held by a thread that only the parent has.
        if !accounts.process.is_this() {
            return None;
        }
        Some(Seen {
            totals: accounts.ledger.totals(),
            left: accounts.ledger.lines(),
            completions: accounts.ended.sum(),
            broken: accounts.lifecycle().cause(),
        })
    }
}
