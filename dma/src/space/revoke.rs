//! What the ladder does to an address space: unmap everything, then settle what may go (R4.6).

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use failstop_pci::id::DeviceId;
use failstop_pci::left::SpaceLeft;
use failstop_pci::peer::PeerEnded;
use failstop_pci::reset::FunctionStopped;
use failstop_pci::transport::{Iova, Strength, Unmapped};

use super::AddressSpace;
use crate::ledger::Line;
use crate::proof::ReleaseProof;

/// How long, by the machine's clock, [`AddressSpace::unmap_all`] waits for another hand's call
/// before it asks again whether to go on.
const PATIENCE: Duration = Duration::from_millis(10);

/// What became of the ledger's entries by unmapping. Numbers of mappings, over all passes so far.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Swept {
    /// Unmapped exactly.
    pub unmapped: u64,
    /// The transport knew no such mapping.
    pub absent: u64,
    /// The unmap failed or was of another size.
    pub failed: u64,
    /// A map or unmap call has not returned.
    pub in_flight: u64,
    /// Not tried, or the transport stayed busy.
    pub untried: u64,
    /// The first unmap of this pass that was not exact: start, bytes, outcome.
    pub first: Option<(Iova, u64, Unmapped)>,
}

impl fmt::Display for Swept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mappings unmapped", self.unmapped)?;
        let rest = [
            (self.absent, "not known to the transport"),
            (self.failed, "not unmapped"),
            (self.in_flight, "in flight"),
            (self.untried, "not tried"),
        ];
        for (count, what) in rest {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if let Some((iova, len, outcome)) = self.first {
            write!(f, " (first: {len:#x} bytes at IOVA {iova}: {outcome:?})")?;
        }
        Ok(())
    }
}

impl Swept {
    /// Whether every entry was unmapped exactly.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.absent + self.failed + self.in_flight + self.untried == 0
    }
}

/// What was released, and what is kept.
#[must_use]
#[derive(Debug, Default)]
pub struct Settled {
    /// Bytes that were released by this call.
    pub released_bytes: u64,
    /// Mappings that were released by this call.
    pub released_mappings: u64,
    /// What is not released, with the reason, by address. Of these, a line that is still `mapping`
    /// or `unmapping` has a call under way that ends it by itself.
    pub quarantined: Vec<Line>,
    /// The ground on which handles of the life that broke, and of older ones, let go of their
    /// memory: all of it, except what is listed above. None when nothing stands for it.
    pub proof: Option<Arc<ReleaseProof>>,
}

impl AddressSpace {
    /// The device is broken: no new mapping begins (R2). A map call that is under way unmaps itself
    /// when it returns (C34).
    pub fn close(&self) {
        self.ledger.close();
    }

    /// A new life begins: mappings are made again, for owners of a generation that no proof of
    /// [`Self::settle`] covers. To be called after that; what was not settled is quarantined.
    pub fn reopen(&self) {
        self.ledger.reopen();
    }

    /// Unmaps every entry of the ledger, quarantined ones too, and keeps the outcomes. No memory is
    /// released, except of an entry that was settled, or let go by its owner, while this call was
    /// waiting for the transport.
    ///
    /// Calls of other hands (a release, a map that undoes itself) are waited for; no range is ever
    /// unmapped by two hands at once. `go_on` is asked before each call and at least every 10 ms
    /// of waiting; false ends it. A call that hangs can only be abandoned with its thread: if it
    /// comes back later, the entry is dealt with as far as [`Self::settle`] has gone by then.
    ///
    /// Does nothing while the space is not [closed](Self::close), and stops when it is reopened.
    pub fn unmap_all(&self, go_on: &dyn Fn() -> bool) -> Swept {
        let mut swept = Swept::default();
        if let Some(closing) = self.ledger.closing() {
            // Asked now, not assumed: the kernel may have turned ATS on since (R1).
            let enforced = self.transport.strength() != Strength::None;
            self.ledger.begin_sweep(enforced);
            while go_on() && self.pass(closing, enforced, go_on, &mut swept) {}
        }
        let sums = self.ledger.sums();
        Swept {
            unmapped: sums.unmapped,
            absent: sums.absent,
            failed: sums.failed,
            in_flight: sums.in_flight,
            untried: sums.untried,
            ..swept
        }
    }

    /// One walk through the ledger. Whether another one may find something to do.
    fn pass(
        &self,
        closing: u64,
        enforced: bool,
        go_on: &dyn Fn() -> bool,
        swept: &mut Swept,
    ) -> bool {
        let mut after = None;
        while let Some((key, len)) = self.ledger.claim(closing, after) {
            after = Some(key.iova);
            let outcome = self.transport.dma_unmap(key.iova, len);
            if !matches!(outcome, Unmapped::Exact | Unmapped::Busy) {
                swept.first.get_or_insert((key.iova, len, outcome));
                log::error!(
                    "{}: the unmap of {len:#x} bytes at IOVA {} was not exact: {outcome:?}",
                    self.transport.name(),
                    key.iova
                );
            }
            if let Some(memory) = self.ledger.swept(&key, outcome, enforced) {
                log::info!(
                    "{}: late proof: {len:#x} bytes at IOVA {} are unmapped now and released",
                    self.transport.name(),
                    key.iova
                );
                drop(memory);
            }
            if !go_on() {
                return false;
            }
        }
        self.ledger.wait(closing, PATIENCE)
    }

    /// Takes the function out of its address space, all of it at once: for when an unmap fails or is
    /// slow (R4.6). What [`Self::settle`] then releases although it is still mapped there never
    /// gets its address back. To be called on a [closed](Self::close) space only; like any call of
    /// the transport it may block.
    ///
    /// Returns whether that is a ground for release: an IOMMU must enforce it, and no other function
    /// share the space.
    ///
    /// # Errors
    ///
    /// When the transport cannot (only the cdev can), or fails.
    pub fn detach(&self) -> io::Result<bool> {
        let enforced = self.transport.strength() == Strength::Enforcing;
        let alone = !self.transport.shares_space();
        self.transport.detach_space()?;
        Ok(enforced && alone && self.ledger.detached())
    }

    /// The process that served the function has ended: it reaches none of the space, mapped or not,
    /// as if it had been [detached](Self::detach), and everything that no call is under way for is
    /// released. None when it served another function, and while the space is open.
    pub fn settle_ended(&self, ended: &PeerEnded) -> Option<Settled> {
        self.settle_out_of_reach(ended.device())
    }

    /// The function has left its address space, in which it was alone: as
    /// [`settle_ended`](Self::settle_ended), on the kernel's word.
    pub fn settle_left(&self, left: &SpaceLeft) -> Option<Settled> {
        self.settle_out_of_reach(left.device())
    }

    fn settle_out_of_reach(&self, device: DeviceId) -> Option<Settled> {
        let ours = device == self.transport.id();
        (ours && self.ledger.detached()).then(|| self.settle(None))
    }

    /// Nothing is mapped any more for lives that ended in that stop. False when it is no ground for
    /// this space: of another function, not alone in it, or on the function's own word only.
    pub(crate) fn end_life(&self, stopped: &FunctionStopped) -> bool {
        let ground = stopped.device() == self.transport.id() && self.is_ground(stopped);
        if ground {
            self.ledger.end(stopped.generation());
        }
        ground
    }

    /// Whether that stop of this function is a ground for memory that nothing else protects.
    fn is_ground(&self, stopped: &FunctionStopped) -> bool {
        stopped.is_ground_for_release() && !self.transport.shares_space()
    }

    /// Releases what the function cannot reach any more (R3.2), and quarantines the rest, with the reason.
    ///
    /// An entry goes when it was unmapped exactly, by an enforcing IOMMU or on a server's word; when
    /// the function was [detached](Self::detach) from its space; or
    /// when it was unmapped exactly, or was not mapped, and the function is `stopped` (by more than
    /// its own word) and shares its address space with no other. Its address is handed out again only
    /// when the function is stopped too, by more than its own word: one that says that it reset itself
    /// and did not would aim there in its next life.
    ///
    /// Makes no system call but those that free memory. Called again, it releases what can go since,
    /// and nothing twice: after a verified reset, call [`Self::unmap_all`] once more and settle with
    /// that. While the space is open only what is in quarantine is looked at, a
    /// stop says nothing, and there is no proof.
    pub fn settle(&self, stopped: Option<&FunctionStopped>) -> Settled {
        let stopped = stopped.filter(|stopped| {
            let own = stopped.device() == self.transport.id();
            if !own {
                log::error!(
                    "{}: a proof of another function was offered",
                    self.transport.name()
                );
            }
            own
        });
        let ground = stopped.is_some_and(|stopped| self.is_ground(stopped));
        let forgotten = stopped.is_some_and(FunctionStopped::is_ground_for_release);
        let stopped = stopped.map(FunctionStopped::generation);
        let settlement = self.ledger.settle(stopped, ground, forgotten);
        let released_mappings = settlement.freed.len() as u64;
        drop(settlement.freed);
        let proof = settlement
            .covered
            .map(|covered| Arc::new(ReleaseProof::of_life(self.transport.id(), covered)));
        Settled {
            released_bytes: settlement.released_bytes,
            released_mappings,
            quarantined: settlement.kept,
            proof,
        }
    }
}
