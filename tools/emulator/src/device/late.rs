//! Writes that the device has begun and that land later: what the faults `late-dd`,
//! `data-after-stop`, `cq-shuffled` and `dma-rewrite` are made of. Nothing holds them up but that
//! the function is gone; a reset drops them.

use std::time::Duration;

use super::accounts::{Accounts, Rogue, Target};
use crate::host::Host;

/// Writes under way at once: twice the longest ring, which only a driver that has lost its mind
/// makes more of.
const MOST: usize = 65_536;

/// What lands.
#[derive(Debug)]
pub(super) enum Write {
    /// Bytes.
    Bytes(Target, Vec<u8>),
    /// A word, in one access.
    Word(Target, u64),
    /// What changes after its completion, unless the descriptor was posted again meanwhile.
    Rewrite {
        /// The descriptor's second word.
        done: Target,
        /// What it said.
        said: u64,
        /// What its upper half, which holds the length, says from now on. The lower half has the done
        /// bit: a driver may post the descriptor again between our look and our write, and must not find
        /// it completed by that.
        says: u32,
        /// The frame.
        frame: Target,
        /// Its first bytes from now on.
        header: Vec<u8>,
    },
}

/// Writes under way.
#[derive(Debug, Default)]
pub(super) struct Late {
    writes: Vec<(Duration, Write)>,
}

impl Late {
    /// Lets a write land then; one too many is lost.
    pub(super) fn push(&mut self, due: Duration, write: Write) {
        if self.writes.len() >= MOST {
            return;
        }
        let at = self.writes.partition_point(|(other, _)| *other <= due);
        self.writes.insert(at, (due, write));
    }

    pub(super) fn clear(&mut self) {
        self.writes.clear();
    }

    /// When the next one lands, if one is under way.
    #[must_use]
    pub(super) fn due(&self) -> Option<Duration> {
        self.writes.first().map(|(due, _)| *due)
    }

    /// Lets those land whose time has come.
    pub(super) fn land(&mut self, host: &mut dyn Host, accounts: &mut Accounts) {
        let now = host.now();
        let count = self.writes.partition_point(|(due, _)| *due <= now);
        for (_, write) in self.writes.drain(..count) {
            let mut rogue = Rogue::new("late".to_owned(), host, accounts);
            match write {
                Write::Bytes(target, bytes) => rogue.write(target, &bytes),
                Write::Word(target, value) => rogue.store(target, value),
                Write::Rewrite {
                    done,
                    said,
                    says,
                    frame,
                    header,
                } => {
                    if host.dma_load(done.iova) == Ok(said) {
                        let mut rogue = Rogue::new("rewrite".to_owned(), host, accounts);
                        rogue.write(frame, &header);
                        rogue.write(done.after(4), &says.to_le_bytes());
                    }
                }
            }
        }
    }
}
