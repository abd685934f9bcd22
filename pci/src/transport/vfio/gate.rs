//! Which accesses of registers are let through, and who waits for them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::id::Generation;

/// Lets accesses of the living generation through, and waits for those inside when it ends: for its
/// own and older ones only. One that the kernel holds up must not hold up the ladder's, which neither
/// allocates here nor makes a system call (R4.2).
#[derive(Default, Debug)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Debug)]
pub(super) struct GateState {
    /// The highest generation that is over; 0 for none.
    over: u64,
    /// The generation of each access that is inside.
    inside: Vec<u64>,
}

impl Default for GateState {
    fn default() -> Self {
        Self {
            over: 0,
            // More threads than ever make accesses at once.
            inside: Vec::with_capacity(64),
        }
    }
}

/// An access that is inside.
struct Inside<'a>(&'a Gate, u64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(at) = state.inside.iter().position(|&number| number == self.1) {
            state.inside.swap_remove(at);
        }
        // Nobody waits for a generation that is not over.
        if self.1 <= state.over {
            self.0.left.notify_all();
        }
    }
}

impl Gate {
    /// A panic leaves nothing half done behind this lock.
    pub(super) fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an access of `generation`, unless that is over.
    pub(super) fn pass<T>(&self, generation: Generation, act: impl FnOnce() -> T) -> Option<T> {
        let number = generation.number();
        let _inside = {
            let mut state = self.state();
            if number <= state.over {
                return None;
            }
            state.inside.push(number);
            Inside(self, number)
        };
        Some(act())
    }

    /// Ends `generation` and those before it, and waits for their accesses that are inside.
    pub(super) fn expire(&self, generation: Generation) {
        let number = generation.number();
        let mut state = self.state();
        state.over = state.over.max(number);
        drop(
            self.left
                .wait_while(state, |state| {
                    state.inside.iter().any(|&inside| inside <= number)
                })
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn generation_that_is_over_does_not_pass() {
        let gate = Gate::default();
        assert_eq!(gate.pass(Generation::FIRST, || 1), Some(1));
        gate.expire(Generation::FIRST);
        assert_eq!(gate.pass(Generation::FIRST, || 1), None);
        assert_eq!(gate.pass(Generation::FIRST.next(), || 1), Some(1));
    }

    #[test]
    fn expiring_an_older_generation_again_changes_nothing() {
        let gate = Gate::default();
        gate.expire(Generation::FIRST.next());
        gate.expire(Generation::FIRST);
        assert_eq!(gate.pass(Generation::FIRST.next(), || 1), None);
    }

    /// A register read that the kernel holds up must not stall the canary (R4).
    #[test]
    fn c35_who_waits_for_an_access_of_an_old_life_holds_up_none_of_the_ladders() {
        let gate = Gate::default();
        let (entered, go) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                gate.pass(Generation::FIRST, || {
                    entered.wait();
                    go.wait();
                })
            });
            entered.wait();
            scope.spawn(|| gate.expire(Generation::FIRST));
            while gate.pass(Generation::FIRST, || ()).is_some() {
                thread::yield_now();
            }
            let (passed, told) = std::sync::mpsc::channel();
            let gate = &gate;
            scope.spawn(move || {
                for _ in 0..1000 {
                    let _ = passed.send(gate.pass(Generation::LADDER, || ()));
                }
            });
            let deadline = std::time::Duration::from_secs(10);
            let all = (0..1000).all(|_| told.recv_timeout(deadline) == Ok(Some(())));
            go.wait();
            assert!(
                all,
                "the ladder waited for an access of the life that ended"
            );
        });
    }

    #[test]
    fn expire_waits_for_the_access_inside() {
        let gate = Gate::default();
        let left = AtomicBool::new(false);
        let (entered, go) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                gate.pass(Generation::FIRST, || {
                    entered.wait();
                    go.wait();
                    left.store(true, Ordering::SeqCst);
                })
            });
            entered.wait();
            go.wait();
            gate.expire(Generation::FIRST);
            assert!(left.load(Ordering::SeqCst));
        });
    }
}
