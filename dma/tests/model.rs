//! Random lives of an address space, with faults, against a small model of the contract [R2] [R3]
//! [R4]: what the backend holds mapped is in the ledger, no byte is freed that the device may
//! reach, no address is handed out again before it is unmapped and forgotten, and the sums are
//! right, after each step.

mod common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Weak;

use common::{Bench, PAGE};
use failstop_dma::ledger::{State, Totals};
use failstop_dma::memory::Memory;
use failstop_dma::space::{Mapping, NotReleased, SpaceError};
use failstop_pci::id::Generation;
use failstop_pci::transport::{ResetMethod, Strength, Unmapped};
use nix::errno::Errno;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Map {
        serial: u64,
        pages: usize,
    },
    MapFails(Errno),
    Release(usize),
    ReleaseOnForeignProof(usize),
    Drop(usize),
    /// The device breaks, and its ladder unmaps so many entries.
    Break {
        unmaps: usize,
    },
    Settle,
    /// A reset is proven, by itself or by the function's own word; what is left is unmapped.
    Stop {
        software: bool,
    },
    Reopen,
}

fn steps() -> impl Strategy<Value = Step> {
    let pick = any::<prop::sample::Index>().prop_map(|index| index.index(64));
    prop_oneof![
        8 => (1u64..4, 1usize..4).prop_map(|(serial, pages)| Step::Map { serial, pages }),
        1 => prop_oneof![Just(Errno::ENOMEM), Just(Errno::EEXIST), Just(Errno::ETIMEDOUT)]
            .prop_map(Step::MapFails),
        4 => pick.clone().prop_map(Step::Release),
        1 => pick.clone().prop_map(Step::ReleaseOnForeignProof),
        2 => pick.prop_map(Step::Drop),
        2 => (0usize..6).prop_map(|unmaps| Step::Break { unmaps }),
        2 => Just(Step::Settle),
        2 => any::<bool>().prop_map(|software| Step::Stop { software }),
        3 => Just(Step::Reopen),
    ]
}

/// Outcomes of the next unmaps. A transport that calls a mapping absent which is there is believed
/// of a stopped function, so it is not among them.
fn faults() -> impl Strategy<Value = Vec<Unmapped>> {
    let outcome = prop_oneof![
        6 => Just(Unmapped::Exact),
        1 => Just(Unmapped::Busy),
        1 => Just(Unmapped::Failed(Errno::EIO)),
        1 => Just(Unmapped::Partial { bytes: 0 }),
    ];
    proptest::collection::vec(outcome, 0..40)
}

/// What was handed out and may still be aimed at, or be mapped.
struct Handed {
    range: Range<u64>,
    life: Generation,
    memory: Weak<Memory>,
}

struct Model {
    bench: Bench,
    handles: Vec<Mapping>,
    handed: BTreeMap<u64, Handed>,
    enforcing: bool,
    closed: bool,
    stopped: Option<Generation>,
    trusted: Option<Generation>,
}

impl Model {
    fn new(enforcing: bool, faults: &[Unmapped]) -> Self {
        // So few that addresses come back soon.
        let bench = Bench::with_pages(24);
        if !enforcing {
            bench.function.set_strength(Strength::None);
        }
        for fault in faults {
            bench.function.answer_next_unmap(*fault);
        }
        Self {
            bench,
            handles: Vec::new(),
            handed: BTreeMap::new(),
            enforcing,
            closed: false,
            stopped: None,
            trusted: None,
        }
    }

    fn take(&mut self, index: usize) -> Option<Mapping> {
        let len = self.handles.len();
        (len > 0).then(|| self.handles.swap_remove(index % len))
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let _log = self.bench.function.take_log();
        match step {
            Step::Map { serial, pages } => self.map(serial, pages)?,
            Step::MapFails(errno) => {
                if !self.closed {
                    self.bench.function.fail_next_map(errno);
                    prop_assert!(self.bench.space.map(self.bench.object(9), PAGE).is_err());
                    self.note_unanswered();
                }
            }
            Step::Release(index) => {
                if let Some(mapping) = self.take(index) {
                    self.release(mapping)?;
                }
            }
            Step::ReleaseOnForeignProof(index) => {
                if let Some(mapping) = self.take(index) {
                    let shell = mapping.is_shell();
                    match mapping.release(&self.bench.proof(77)) {
                        Ok(()) => prop_assert!(shell),
                        Err(NotReleased::Scope(mapping)) => {
                            prop_assert!(!shell);
                            self.handles.push(mapping);
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
            }
            Step::Drop(index) => drop(self.take(index)),
            Step::Break { unmaps } => {
                self.bench.space.close();
                self.closed = true;
                let bench = &self.bench;
                let swept = bench.space.unmap_all(&|| bench.unmaps() < unmaps);
                prop_assert_eq!(swept.in_flight, 0);
            }
            Step::Settle => self.settle(None)?,
            Step::Stop { software } => {
                if self.closed {
                    let method = if software {
                        ResetMethod::Software
                    } else {
                        ResetMethod::Flr
                    };
                    let stopped = self.bench.stop(method);
                    let _swept = self.bench.space.unmap_all(&|| true);
                    self.stopped = Some(self.bench.life);
                    if !software {
                        self.trusted = self.stopped;
                    }
                    self.settle(Some(&stopped))?;
                }
            }
            Step::Reopen => {
                if self.closed {
                    self.bench.begin();
                    self.closed = false;
                }
            }
        }
        self.check()
    }

    fn map(&mut self, serial: u64, pages: usize) -> Result<(), TestCaseError> {
        let owner = self.bench.object(serial);
        let mapping = match self.bench.space.map(owner, pages * PAGE) {
            Ok(mapping) => mapping,
            // Too little room is no fault, and then the fault that was meant for that call is left.
            Err(SpaceError::Iova { .. } | SpaceError::Map { .. }) => {
                self.note_unanswered();
                return Ok(());
            }
            Err(error) => {
                prop_assert!(self.closed, "{error}");
                return Ok(());
            }
        };
        prop_assert!(!self.closed);
        let start = mapping.iova().0;
        let range = start..start + mapping.len() as u64;
        for handed in self.handed.values() {
            let apart = range.end < handed.range.start || handed.range.end < range.start;
            prop_assert!(apart, "{:?} is not free: {:?}", range, handed.range);
        }
        let handed = Handed {
            range,
            life: self.bench.life,
            memory: std::sync::Arc::downgrade(mapping.memory()),
        };
        self.handed.insert(start, handed);
        self.handles.push(mapping);
        Ok(())
    }

    /// A map that ended without an answer counts as mapped.
    fn note_unanswered(&mut self) {
        for (start, len) in self.bench.function.mapped() {
            self.handed.entry(start).or_insert(Handed {
                range: start..start + len,
                life: self.bench.life,
                memory: Weak::new(),
            });
        }
    }

    fn release(&mut self, mapping: Mapping) -> Result<(), TestCaseError> {
        let (start, life) = (mapping.iova().0, mapping.owner().generation);
        let shell = mapping.is_shell();
        if life != self.bench.life {
            // Nobody can read a stop bit of a life that is over.
            drop(mapping);
            return Ok(());
        }
        let proof = self.bench.proof(mapping.owner().serial);
        match mapping.release(&proof) {
            // In ordinary life an acknowledged address may be used again.
            Ok(()) if !self.closed && !shell => drop(self.handed.remove(&start)),
            Ok(()) => {}
            Err(NotReleased::Busy(mapping)) => {
                prop_assert!(!shell);
                self.handles.push(mapping);
            }
            Err(NotReleased::Unmap { .. }) => prop_assert!(!shell),
            Err(NotReleased::Scope(_)) => prop_assert!(false, "its own proof was refused"),
        }
        Ok(())
    }

    fn settle(
        &mut self,
        stopped: Option<&failstop_pci::reset::FunctionStopped>,
    ) -> Result<(), TestCaseError> {
        let before = self.bench.space.ledger().totals();
        let settled = self.bench.space.settle(stopped);
        let after = self.bench.space.ledger().totals();
        let sum = |totals: Totals| totals.live_bytes + totals.quarantined_bytes;
        prop_assert_eq!(sum(before) - sum(after), settled.released_bytes);
        if self.closed {
            prop_assert_eq!(after.live_mappings, 0);
            prop_assert_eq!(after.quarantined_mappings, settled.quarantined.len() as u64);
        }
        let grounds = self.enforcing || self.trusted.is_some();
        prop_assert!(grounds || settled.released_bytes == 0);
        if let Some(proof) = &settled.proof {
            prop_assert!(self.closed && grounds);
            for mapping in &self.handles {
                let covered = proof.covers(mapping.owner(), mapping.iova());
                prop_assert!(mapping.is_shell() || !covered);
            }
        }
        let mapped: Vec<u64> = self.mapped().collect();
        // Not on the function's own word.
        let forgotten = self.trusted;
        self.handed.retain(|start, handed| {
            mapped.contains(start) || forgotten.is_none_or(|forgotten| handed.life > forgotten)
        });
        let again = self.bench.space.settle(stopped);
        prop_assert_eq!(again.released_mappings, 0);
        Ok(())
    }

    fn mapped(&self) -> impl Iterator<Item = u64> {
        self.bench
            .function
            .mapped()
            .into_iter()
            .map(|(start, _)| start)
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let ledger = self.bench.space.ledger();
        let lines = ledger.lines();
        for (start, len) in self.bench.function.mapped() {
            let listed = lines
                .iter()
                .any(|line| (line.iova.0, line.len) == (start, len));
            prop_assert!(listed, "{start:#x} is mapped and not in the ledger");
            if let Some(handed) = self.handed.get(&start) {
                let kept = handed.memory.upgrade().is_some() || handed.memory.ptr_eq(&Weak::new());
                prop_assert!(kept, "{start:#x} is mapped and its memory gone");
            }
        }
        let totals = ledger.totals();
        let sums = |quarantined: bool| {
            lines
                .iter()
                .filter(|line| (line.state == State::Quarantined) == quarantined)
                .fold((0, 0), |(bytes, n), line| (bytes + line.len, n + 1))
        };
        prop_assert_eq!((totals.live_bytes, totals.live_mappings), sums(false));
        prop_assert_eq!(
            (totals.quarantined_bytes, totals.quarantined_mappings),
            sums(true)
        );
        let held = self.handles.iter().filter(|mapping| mapping.is_shell());
        let held = held.fold((0, 0), |(bytes, n), mapping| {
            (bytes + mapping.len() as u64, n + 1)
        });
        prop_assert_eq!((totals.held_bytes, totals.held_mappings), held);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn memory_and_addresses_stay_until_they_are_out_of_reach(
        enforcing: bool,
        faults in faults(),
        steps in proptest::collection::vec(steps(), 1..120),
    ) {
        let mut model = Model::new(enforcing, &faults);
        for step in steps {
            model.step(step)?;
        }
    }
}
