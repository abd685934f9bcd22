//! DMA that should not be: queues that were told to stop, or to be reset, and go on with the
//! descriptors that they had fetched, whatever the registers say; and accesses to where nothing was
//! ever given.

use std::time::Duration;

use failstop::igb::descriptors::{BYTES, RxDone, RxErrors, RxStatus, TxDone};

use super::accounts::{Accounts, Rogue, Target};
use super::registers::File;
use super::ring::Ring;
use crate::faults::fault::Outside;
use crate::host::Host;

/// Time between two accesses.
const PERIOD: Duration = Duration::from_millis(1);
/// Descriptors that an engine keeps on the chip.
const FETCHED: u32 = 32;
/// What is written into buffers: recognisable, and no plausible frame.
pub(super) const LATE: [u8; 60] = [0xD5; 60];
const PAGE: u64 = 4096;
/// Pages that are looked at for one that is not mapped.
const SEARCHED: u64 = 1024;

/// What a received descriptor says of [`LATE`].
pub(super) fn late_done() -> u64 {
    let status = RxStatus::DD | RxStatus::EOP;
    RxDone::new(status, RxErrors::empty(), LATE.len() as u16, 0).0
}

/// A descriptor on the chip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetched {
    pub(super) slot: Target,
    pub(super) buffer: Target,
}

/// The descriptors that a queue has on the chip: those that it was given, or, of a transmit queue,
/// those that it was done with last, whose write-backs leave the buffer's address in place.
pub(super) fn fetch(
    queue: usize,
    transmit: bool,
    file: &File,
    host: &mut dyn Host,
) -> Vec<Fetched> {
    let (ring, count) = if transmit {
        let ring = Ring::transmit(file, queue);
        let back = FETCHED.min(ring.len);
        let head = ring.index(ring.len.saturating_sub(back));
        (Ring { head, ..ring }, back)
    } else {
        let ring = Ring::receive(file, queue);
        (ring, ring.ready().min(FETCHED))
    };
    let mut fetched = Vec::new();
    for n in 0..count {
        let slot = ring.slot(n);
        // What is on the chip was read before, when it could be.
        if host.mapping(slot).is_some()
            && let Ok(buffer) = host.dma_load(slot)
            && buffer != 0
        {
            fetched.push(Fetched {
                slot: Target::at(slot, host),
                buffer: Target::at(buffer, host),
            });
        }
    }
    fetched
}

/// How a queue goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Manner {
    /// ENABLE reads as set because of it.
    pub(super) shows: bool,
    /// It issues DMA.
    pub(super) dma: bool,
    /// A bus master bit that is off holds it up.
    pub(super) obeys_master: bool,
    /// CTRL.RST ends it.
    pub(super) until_rst: bool,
    /// ENABLE written as 0 ends it: nobody has told it to stop yet.
    pub(super) until_stop: bool,
    /// It ends by itself.
    pub(super) until: Option<Duration>,
}

impl Manner {
    /// A queue that says that it runs, and does.
    pub(super) const STUCK: Self = Self {
        shows: true,
        dma: true,
        obeys_master: true,
        until_rst: false,
        until_stop: false,
        until: None,
    };
    /// A queue that a reset passed by.
    pub(super) const SURVIVES: Self = Self {
        shows: false,
        until_rst: true,
        until_stop: true,
        ..Self::STUCK
    };
}

/// A queue that goes on.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) queue: usize,
    pub(super) transmit: bool,
    pub(super) manner: Manner,
    fetched: Vec<Fetched>,
    next: usize,
    due: Duration,
}

impl Engine {
    pub(super) fn new(
        (queue, transmit): (usize, bool),
        manner: Manner,
        fetched: Vec<Fetched>,
        now: Duration,
    ) -> Self {
        Self {
            queue,
            transmit,
            manner,
            fetched,
            next: 0,
            due: now,
        }
    }

    pub(super) fn has_ended(&self, now: Duration) -> bool {
        self.manner.until.is_some_and(|end| now >= end)
    }

    /// When it acts, or ends, next; `master` is whether it may issue requests.
    #[must_use]
    pub(super) fn next_event(&self, master: bool) -> Option<Duration> {
        let acts = self.acts(master).then_some(self.due);
        [acts, self.manner.until].into_iter().flatten().min()
    }

    fn acts(&self, master: bool) -> bool {
        self.manner.dma && !self.fetched.is_empty() && (master || !self.manner.obeys_master)
    }

    /// Acts if it is time; true when it did.
    pub(super) fn act(
        &mut self,
        master: bool,
        host: &mut dyn Host,
        accounts: &mut Accounts,
    ) -> bool {
        let now = host.now();
        let fetched = self.fetched.get(self.next).copied();
        let Some(Fetched { slot, buffer }) =
            fetched.filter(|_| self.acts(master) && now >= self.due)
        else {
            return false;
        };
        self.due = now + PERIOD;
        self.next = (self.next + 1) % self.fetched.len();
        let name = if self.transmit { "tx" } else { "rx" };
        let mut rogue = Rogue::new(format!("{name} {}", self.queue), host, accounts);
        if self.transmit {
            rogue.read(buffer, LATE.len());
            rogue.store(slot.after(8), TxDone::DONE.0);
        } else {
            rogue.write(buffer, &LATE);
            rogue.store(slot, 0);
            rogue.store(slot.after(8), late_done());
        }
        true
    }
}

/// DMA to where nothing was given.
#[derive(Debug, Default)]
pub(super) struct Astray {
    due: Duration,
    turns: u64,
}

impl Astray {
    /// When it acts next.
    #[must_use]
    pub(super) const fn due(&self) -> Duration {
        self.due
    }

    /// Acts if it is time: reads, writes, or both by turns, at a place that is not mapped.
    pub(super) fn act(
        &mut self,
        place: Option<Outside>,
        file: &File,
        host: &mut dyn Host,
        accounts: &mut Accounts,
    ) -> bool {
        let now = host.now();
        if now < self.due {
            return false;
        }
        self.due = now + PERIOD;
        self.turns += 1;
        let turn = self.turns;
        let (guard, write) = match place {
            Some(Outside::Read) => (false, false),
            Some(Outside::Write) => (false, true),
            Some(Outside::Guard) => (true, turn.is_multiple_of(2)),
            None => (turn.is_multiple_of(2), (turn / 2).is_multiple_of(2)),
        };
        let start = if guard {
            beside(turn, file)
        } else {
            // Somewhere in the first 2^47 bytes, address 0 first.
            (turn - 1).wrapping_mul(0x1357_9BDF_1000) & 0x7FFF_FFFF_F000
        };
        // What is mapped there was given to it, by whomever.
        let free = (0..SEARCHED).map(|n| start.wrapping_add(n * PAGE));
        let Some(iova) = free.into_iter().find(|iova| host.mapping(*iova).is_none()) else {
            return false;
        };
        let target = Target {
            iova,
            mapping: None,
        };
        let mut rogue = Rogue::new("outside".to_owned(), host, accounts);
        if write {
            rogue.write(target, &LATE);
        } else {
            rogue.read(target, LATE.len());
        }
        true
    }
}

/// The page after one of the rings, by turns.
fn beside(turn: u64, file: &File) -> u64 {
    let queue = 0;
    let ring = if turn.is_multiple_of(4) {
        Ring::transmit(file, queue)
    } else {
        Ring::receive(file, queue)
    };
    let end = ring.base + u64::from(ring.len) * BYTES as u64;
    end.next_multiple_of(PAGE)
}
