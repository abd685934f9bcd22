//! How long the ladder's steps may take.

use std::time::Duration;

/// How long each step may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadlines {
    /// An access to config space.
    pub config: Duration,
    /// How long a function that does not answer is written to again.
    pub answer: Duration,
    /// Replacing the windows and disabling the vectors.
    pub detach: Duration,
    /// Transactions that are under way.
    pub drain: Duration,
    /// All attempts at a reset together, of which a quarter is kept for the family's own. The kernel
    /// alone waits 100 ms after each (PCIe base specification 6.0, §6.6.2), and up to a minute for a
    /// function that does not come back.
    pub reset: Duration,
    /// All unmaps together.
    pub unmap: Duration,
    /// The orderly part of a close on behalf of somebody who cannot wait: a removal. Past it the
    /// ladder ends the device.
    pub close: Duration,
    /// Accesses of an open, and of a recovery, from one reset to the next, behind a server: each of
    /// them may need almost the server's deadline.
    pub bring_up: Duration,
}

impl Deadlines {
    /// How long a ladder takes at the longest, from the mark to the verdict, with every call hanging:
    /// what a destroy that cannot fail may wait for.
    #[must_use]
    pub fn total(&self) -> Duration {
        // Bus mastering off; looks for pending transactions; off again; the list of methods; the last
        // word.
        let accesses = 5 * self.config + self.answer + self.drain;
        // The unmaps, and the detach from the address space where they are slow.
        accesses + self.detach + self.reset + 2 * self.unmap
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            config: Duration::from_secs(1),
            answer: Duration::from_millis(10),
            detach: Duration::from_secs(2),
            drain: Duration::from_millis(100),
            reset: Duration::from_secs(10),
            unmap: Duration::from_secs(10),
            close: Duration::from_secs(2),
            bring_up: Duration::from_secs(10),
        }
    }
}
