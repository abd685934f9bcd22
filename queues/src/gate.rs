//! The order between turning bus mastering on and the end of a life.

use std::fmt;
use std::sync::PoisonError;

use crate::lifecycle::Lifecycle;
use crate::sync::Mutex;

/// Held by whoever turns bus mastering of one function on or off, whatever life it is in: on the
/// last switch of a life that ended it is off (R10).
///
/// The ladder's first write, which stops DMA, waits for nobody and goes past the gate; it switches
/// off once more through it ([`Gate::shut`]).
#[derive(Default)]
pub struct Gate {
    held: Mutex<()>,
}

impl Gate {
    /// Switches on for a life that is not broken; true when it is on now. `on` may find that it was
    /// before.
    ///
    /// A break that comes meanwhile finds the ladder's first write perhaps before ours: then `off`
    /// undoes it.
    ///
    /// # Errors
    ///
    /// What `on` says.
    pub fn open<E>(
        &self,
        lifecycle: &Lifecycle,
        on: impl FnOnce() -> Result<(), E>,
        off: impl FnOnce(),
    ) -> Result<bool, E> {
        let _held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if lifecycle.is_broken() {
            return Ok(false);
        }
        on()?;
        if lifecycle.is_broken() {
            off();
            return Ok(false);
        }
        Ok(true)
    }

    /// Switches off, once nobody can be about to switch on: of a life whose end was marked before,
    /// nobody does any more.
    pub fn shut<T>(&self, off: impl FnOnce() -> T) -> T {
        let _held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        off()
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(failstop_loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::lifecycle::Cause;

    #[test]
    fn r10_a_broken_life_is_not_switched_on() {
        let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
        lifecycle.mark_broken(Cause::User);
        let never = || -> Result<(), ()> { panic!("switched on") };
        assert_eq!(gate.open(&lifecycle, never, || {}), Ok(false));
    }

    #[test]
    fn r10_a_break_while_it_is_switched_on_is_undone() {
        let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
        let is_on = Cell::new(false);
        let on = || -> Result<(), ()> {
            lifecycle.mark_broken(Cause::User);
            is_on.set(true);
            Ok(())
        };
        assert_eq!(gate.open(&lifecycle, on, || is_on.set(false)), Ok(false));
        assert!(!is_on.get());
    }

    #[test]
    fn what_keeps_it_off_is_said() {
        let (gate, lifecycle) = (Gate::default(), Lifecycle::default());
        assert_eq!(gate.open(&lifecycle, || Err(5), || {}), Err(5));
        assert_eq!(gate.open(&lifecycle, || Ok::<_, ()>(()), || {}), Ok(true));
        assert_eq!(gate.shut(|| 7), 7);
    }
}
