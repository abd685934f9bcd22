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
