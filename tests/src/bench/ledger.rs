//! What the ledger and the allocator of addresses add to the kernel's map and unmap.
//!
//! Counted in instructions, by the processor's time-stamp counter in a guest whose QEMU advances it
//! by one for each (`-icount shift=0,sleep=off`). The bare calls are those that are made inside ours.

use std::collections::VecDeque;
use std::sync::Arc;

use failstop::dma::memory::{Memory, page_size};
use failstop::dma::proof::{ObjectId, ReleaseProof};
use failstop::dma::space::{AddressSpace, Mapping};
use failstop::pci::clock::SystemClock;
use failstop::pci::config::{CommandRegister, ConfigSpace};
use failstop::pci::id::Generation;
use failstop::pci::transport::Transport;
use failstop::pci::window::Window;
use failstop_pci::testing::allocated;
use libtest_mimic::Failed;

use super::by_hand;
use super::timed::Timed;
use super::{Figure, median};
use crate::fixture::{Fixture, ensure};

/// Ours, in bare map and unmap calls.
const LIMIT: f64 = 1.05;
/// What is added at the most mappings, in what is added at one. A logarithm of 60,000 is 16; a tree
/// of wide nodes and the parts that do not grow stay well below.
const GROWTH: f64 = 4.0;
/// Of so many entered, one is released: that addresses are used in many runs, not in one.
const HOLES: usize = 16;

/// Bytes that a mapping may take in the accounts.
const MEMORY: f64 = 256.0;

/// Maps and releases one page `pairs` times with each number of live mappings, in ascending order.
/// What they take is measured in a program whose allocator is [`Counting`](failstop_pci::testing::Counting).
///
/// # Errors
///
/// When the device cannot be opened, or something is not mapped or released.
pub fn run(fixture: &Fixture, mappings: &[usize], pairs: usize) -> Result<Vec<Figure>, Failed> {
    let bench = Bench::new(fixture.transport()?)?;
    let most = mappings.iter().copied().max().unwrap_or(0);
    let mut live = VecDeque::with_capacity(most + 1);
    let before = allocated().bytes;
    let mut figures = Vec::new();
    let mut added = Vec::new();
    let figure = |what: String, pairs: &Pairs, limit| {
        let (ours, bare) = (pairs.ours(), pairs.bare());
        let note = format!(
            "beside the map and unmap ioctls in it; {:.0} added; medians of {}; {:.0} for counting left out",
            ours - bare,
            pairs.0.len(),
            pairs.counting(),
        );
        let figure = Figure::ratio(what, "instructions", ours, bare, LIMIT).note(note);
        Figure { limit, ..figure }
    };
    let mut oldest = Vec::new();
    for &mappings in mappings {
        bench.fill(&mut live, mappings)?;
        let measured = bench.measure(pairs, Ok)?;
        added.push(measured.ours() - measured.bare());
        let name = format!("ledger: map and release a page ({mappings} mappings)");
        figures.push(figure(name, &measured, Some(LIMIT)));
        if mappings > 1 {
            let measured = bench.measure(pairs, |newest| {
                live.push_back(newest);
                live.pop_front().ok_or_else(|| "nothing is live".into())
            })?;
            let name = format!("ledger: map a page and release the oldest ({mappings} mappings)");
            oldest.push(figure(name, &measured, None));
        }
    }
    figures.append(&mut oldest);
    if let ([first, .., last], [least, .., most]) = (&added[..], mappings) {
        let name = format!("ledger: what is added at {most} mappings, beside {least}");
        figures.push(Figure::ratio(name, "instructions", *last, *first, GROWTH));
    }
    if !live.is_empty() {
        let bytes = (allocated().bytes - before) as f64 / live.len() as f64;
        let name = format!("ledger: memory of a mapping ({most} mappings)");
        let figure = Figure::plain(name, "bytes", bytes);
        figures.push(Figure {
            limit: Some(MEMORY),
            ..figure
        });
    }
    for mapping in live {
        mapping.release(&bench.proof)?;
    }
    Ok(figures)
}

/// What one pair took.
struct Pair {
    all: u64,
    /// Of it, in calls of the transport.
    calls: u64,
    /// Of that, in calls of the transport behind.
    bare: u64,
}

struct Pairs(Vec<Pair>);

impl Pairs {
    fn median(&self, of: impl Fn(&Pair) -> u64) -> f64 {
        median(self.0.iter().map(|pair| of(pair) as f64).collect())
    }

    /// Without the counting.
    fn ours(&self) -> f64 {
        self.median(|pair| pair.all) - self.counting()
    }

    fn bare(&self) -> f64 {
        self.median(|pair| pair.bare)
    }

    /// Calls go through two transports that count. What the second one adds, it adds to the calls of
    /// the first one; the first one adds as much.
    fn counting(&self) -> f64 {
        2.0 * self.median(|pair| pair.calls - pair.bare)
    }
}

struct Bench {
    transport: Arc<Timed>,
    /// The one that it passes calls on to.
    behind: Arc<Timed>,
    space: Arc<AddressSpace>,
    owner: ObjectId,
    proof: ReleaseProof,
    memory: Arc<Memory>,
}

impl Bench {
    fn new(transport: Arc<dyn Transport>) -> Result<Self, Failed> {
        let behind = Arc::new(Timed::new(transport, instructions));
        let transport = Arc::new(Timed::new(behind.clone(), instructions));
        let clock = Arc::new(SystemClock::default());
        let config = ConfigSpace::new(&*transport);
        let command = CommandRegister::open(&config)?;
        let _off = command.bus_master_off(&config)?;
        transport.reset()?;
        command.memory_space_on(&config)?;
        let owner = by_hand::owner(&*transport);
        // A queue that never ran is stopped: the ground on which everything here is released.
        let window = Window::open(transport.clone(), Generation::FIRST, 0, 0x2_0000)?;
        let proof = by_hand::stopped(&window, owner)?;
        let space = AddressSpace::new(transport.clone(), u64::MAX, clock)?;
        Ok(Self {
            transport,
            behind,
            space,
            owner,
            proof,
            memory: Arc::new(Memory::new(page_size())?),
        })
    }

    fn map(&self) -> Result<Mapping, Failed> {
        Ok(self.space.map_again(self.owner, self.memory.clone())?)
    }

    /// Maps until so many are live, but the one that is measured.
    fn fill(&self, live: &mut VecDeque<Mapping>, mappings: usize) -> Result<(), Failed> {
        while live.len() + 1 < mappings {
            live.push_back(self.map()?);
            if live.len().is_multiple_of(HOLES) {
                // Two neighbours, of which the first goes at once.
                let hole = self.map()?;
                live.push_back(self.map()?);
                hole.release(&self.proof)?;
            }
        }
        Ok(())
    }

    /// Maps, and releases what `pick` gives for the new mapping.
    fn measure(
        &self,
        pairs: usize,
        mut pick: impl FnMut(Mapping) -> Result<Mapping, Failed>,
    ) -> Result<Pairs, Failed> {
        let mut measured = Vec::with_capacity(pairs);
        for _ in 0..pairs {
            let memory = self.memory.clone();
            self.transport.take();
            self.behind.take();
            let start = instructions();
            let mapping = self.space.map_again(self.owner, memory)?;
            let mapping = pick(mapping)?;
            mapping.release(&self.proof)?;
            measured.push(Pair {
                all: instructions() - start,
                calls: self.transport.take(),
                bare: self.behind.take(),
            });
        }
        ensure(measured.iter().all(|pair| pair.bare > 0), || {
            "the time-stamp counter stands still".into()
        })?;
        Ok(Pairs(measured))
    }
}

/// The time-stamp counter.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "reads a counter of the processor")]
fn instructions() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and Linux lets programs use it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> u64 {
    0
}
