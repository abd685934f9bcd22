//! Accounts of DMA that faults make: each access remembers the mapping that it was meant for, and
//! is judged by the one that it meets.

use std::collections::VecDeque;

use crate::host::Host;
use crate::stats::{LogEntry, Outcome, RogueDma};

/// Lines of the log that are kept: the latest.
const KEPT: usize = 4096;

/// An address, and the mapping that held it when the device was given it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) iova: u64,
    pub(super) mapping: Option<u64>,
}

impl Target {
    /// The address as it is mapped now.
    #[must_use]
    pub(super) fn at(iova: u64, host: &dyn Host) -> Self {
        Self {
            iova,
            mapping: host.mapping(iova),
        }
    }

    /// The address so many bytes further, of the same mapping.
    #[must_use]
    pub(super) const fn after(self, bytes: u64) -> Self {
        Self {
            iova: self.iova.wrapping_add(bytes),
            ..self
        }
    }
}

/// Counts, and the log.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    counts: RogueDma,
    log: VecDeque<LogEntry>,
    next: u64,
}

impl Accounts {
    pub(super) const fn counts(&self) -> &RogueDma {
        &self.counts
    }

    pub(super) fn reset_counts(&mut self) {
        self.counts = RogueDma::default();
    }

    /// The latest lines of the log, oldest first.
    pub(super) fn log(&self, lines: usize) -> Vec<LogEntry> {
        let skipped = self.log.len().saturating_sub(lines);
        self.log.iter().skip(skipped).cloned().collect()
    }

    /// Puts a mark into the log.
    pub(super) fn mark(&mut self, word: String, host: &dyn Host) {
        let nowhere = Target {
            iova: 0,
            mapping: None,
        };
        self.push(word, nowhere, 0, false, None, Outcome::Phase, host);
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the columns of a line of the log"
    )]
    fn push(
        &mut self,
        what: String,
        target: Target,
        len: usize,
        write: bool,
        met: Option<u64>,
        outcome: Outcome,
        host: &dyn Host,
    ) {
        if self.log.len() == KEPT {
            self.log.pop_front();
        }
        self.log.push_back(LogEntry {
            n: self.next,
            us: u64::try_from(host.now().as_micros()).unwrap_or(u64::MAX),
            what,
            write,
            iova: target.iova,
            len: len as u64,
            meant: target.mapping,
            met,
            outcome,
        });
        self.next += 1;
    }
}

/// A hand for accesses that should not be: performs them, counts them, and writes them down.
pub(super) struct Rogue<'a> {
    what: String,
    host: &'a mut dyn Host,
    accounts: &'a mut Accounts,
}

impl<'a> Rogue<'a> {
    /// `what` names the engine in the log.
    pub(super) fn new(what: String, host: &'a mut dyn Host, accounts: &'a mut Accounts) -> Self {
        Self {
            what,
            host,
            accounts,
        }
    }

    fn note(&mut self, target: Target, len: usize, write: bool) {
        let met = self.host.mapping(target.iova);
        let counts = &mut self.accounts.counts;
        let outcome = match met {
            None => {
                counts.blocked += 1;
                Outcome::Blocked
            }
            Some(_) if met == target.mapping => {
                counts.late += 1;
                Outcome::Late
            }
            Some(_) => {
                counts.reached += 1;
                Outcome::Reached
            }
        };
        let what = self.what.clone();
        self.accounts
            .push(what, target, len, write, met, outcome, self.host);
    }

    /// Writes.
    pub(super) fn write(&mut self, target: Target, data: &[u8]) {
        self.note(target, data.len(), true);
        self.host.dma_write(target.iova, data);
    }

    /// Writes a word, in one access.
    pub(super) fn store(&mut self, target: Target, value: u64) {
        self.note(target, 8, true);
        self.host.dma_store(target.iova, value);
    }

    /// Reads. An abort changes nothing for an engine that has lost its mind.
    pub(super) fn read(&mut self, target: Target, len: usize) {
        self.note(target, len, false);
        let _aborted = self.host.dma_read(target.iova, &mut vec![0; len]);
    }
}
