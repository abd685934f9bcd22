//! What the ledger and the allocator of addresses add to the kernel's map and unmap.
//!
//! Counted in instructions, by the processor's time-stamp counter in a guest whose QEMU advances it
//! by one for each (`-icount shift=0,sleep=off`). The bare calls are those that are made inside ours.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use failstop::dma::memory::{Memory, page_size};
use failstop::dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop::dma::space::{AddressSpace, Mapping};
use failstop::igb::registers as reg;
use failstop::pci::clock::SystemClock;
use failstop::pci::config::{CommandRegister, ConfigSpace};
use failstop::pci::id::Generation;
use failstop::pci::transport::Transport;
use failstop::pci::window::{StopBit, Window};
use libtest_mimic::Failed;

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

/// Maps and releases one page `pairs` times with each number of live mappings, in ascending order.
///
/// # Errors
///
/// When the device cannot be opened, or something is not mapped or released.
pub fn run(fixture: &Fixture, mappings: &[usize], pairs: usize) -> Result<Vec<Figure>, Failed> {
    let transport = Arc::new(Timed::new(fixture.transport()?, instructions));
    let bench = Bench::new(transport)?;
    let mut live = Vec::new();
    let mut figures = Vec::new();
    let mut added = Vec::new();
    for &mappings in mappings {
        bench.fill(&mut live, mappings)?;
        let (ours, bare) = bench.measure(pairs)?;
        let (ours, bare) = (median(ours), median(bare));
        added.push(ours - bare);
        let name = format!("ledger: map and release a page ({mappings} mappings)");
        figures.push(
            Figure::ratio(name, "instructions", ours, bare, LIMIT).note(format!(
                "beside the map and unmap ioctls in it; {:.0} added; medians of {pairs}",
                ours - bare
            )),
        );
    }
    if let ([first, .., last], [least, .., most]) = (&added[..], mappings) {
        let name = format!("ledger: what is added at {most} mappings, beside {least}");
        figures.push(Figure::ratio(name, "instructions", *last, *first, GROWTH));
    }
    for mapping in live {
        mapping.release(&bench.proof)?;
    }
    Ok(figures)
}

struct Bench {
    transport: Arc<Timed>,
    space: Arc<AddressSpace>,
    owner: ObjectId,
    proof: ReleaseProof,
    memory: Arc<Memory>,
}

impl Bench {
    fn new(transport: Arc<Timed>) -> Result<Self, Failed> {
        let clock = Arc::new(SystemClock::default());
        let config = ConfigSpace::new(&*transport);
        let command = CommandRegister::open(&config)?;
        let _off = command.bus_master_off(&config)?;
        transport.reset()?;
        command.memory_space_on(&config)?;
        let owner = ObjectId {
            device: transport.id(),
            generation: Generation::FIRST,
            serial: 1,
            kind: "MR",
        };
        // A queue that never ran is stopped: the ground on which everything here is released.
        let window = Window::open(transport.clone(), Generation::FIRST, 0, 0x2_0000)?;
        let control = reg::RXDCTL.offset();
        const WRITE_BACK: NonZeroU32 = NonZeroU32::new(1 << 16).unwrap();
        const ENABLE: NonZeroU32 = NonZeroU32::new(1 << 25).unwrap();
        window.write(
            failstop::pci::register::Reg::<u32>::at(control),
            WRITE_BACK.get(),
        );
        let stop = StopBit {
            register: control,
            stop: ENABLE,
            alive: WRITE_BACK,
            deadline: Duration::from_millis(100),
            interval: Duration::from_micros(100),
            settle: Duration::from_micros(100),
        };
        let stopped = window.wait_stopped(&*clock, &stop)?;
        let proof = Acknowledged::by_register(owner, stopped)
            .ok_or("another device stopped")?
            .into();
        let space = AddressSpace::new(transport.clone(), u64::MAX, clock)?;
        Ok(Self {
            transport,
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
    fn fill(&self, live: &mut Vec<Mapping>, mappings: usize) -> Result<(), Failed> {
        while live.len() + 1 < mappings {
            live.push(self.map()?);
            if live.len().is_multiple_of(HOLES) {
                // Two neighbours, of which the first goes at once.
                let hole = self.map()?;
                live.push(self.map()?);
                hole.release(&self.proof)?;
            }
        }
        Ok(())
    }

    /// What each pair took, and of it the calls of the transport.
    fn measure(&self, pairs: usize) -> Result<(Vec<f64>, Vec<f64>), Failed> {
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let memory = self.memory.clone();
            self.transport.take();
            let start = instructions();
            let mapping = self.space.map_again(self.owner, memory)?;
            mapping.release(&self.proof)?;
            let took = instructions() - start;
            ours.push(took as f64);
            bare.push(self.transport.take() as f64);
        }
        ensure(bare.iter().all(|&count| count > 0.0), || {
            "the time-stamp counter stands still".into()
        })?;
        Ok((ours, bare))
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
