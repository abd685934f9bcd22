//! For whom something may be entered: not while the ledger is closed, nor for a life that is over.

use failstop_pci::id::Generation;

#[derive(Default)]
pub(super) struct Lives {
    /// The one that was admitted last, if it would be again: most that is entered is for the same one, and
    /// needs no second look.
    current: Option<Generation>,
    closed: bool,
    /// A proof covers this one and the older ones as a whole: nothing can be entered for them any more.
    over: Option<Generation>,
    /// The newest one that anything was ever entered for.
    newest: Option<Generation>,
}

impl Lives {
    /// Whether something may be entered for an owner of that life, which it then is.
    #[inline]
    pub(super) fn admit(&mut self, life: Generation) -> bool {
        self.current == Some(life) || self.look_at(life)
    }

    #[inline(never)]
    fn look_at(&mut self, life: Generation) -> bool {
        let admitted = self.is_open_for(life);
        if admitted {
            self.current = Some(life);
            self.newest = self.newest.max(self.current);
        }
        admitted
    }

    /// Whether something may be entered for an owner of that life.
    fn is_open_for(&self, life: Generation) -> bool {
        !self.closed && self.over.is_none_or(|over| over < life)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn newest(&self) -> Option<Generation> {
        self.newest
    }

    pub(super) fn close(&mut self) {
        (self.closed, self.current) = (true, None);
    }

    pub(super) fn reopen(&mut self) {
        self.closed = false;
    }

    /// That life and the older ones are over; none without one.
    pub(super) fn end(&mut self, life: Option<Generation>) {
        self.over = self.over.max(life);
        self.current = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_admitted_for_a_life_after_its_end_whoever_was_admitted_before() {
        let mut lives = Lives::default();
        let (old, new) = (Generation::FIRST, Generation::FIRST.next());
        assert!(lives.admit(old) && lives.admit(old));
        lives.end(Some(old));
        assert!(!lives.admit(old) && lives.admit(new) && !lives.admit(old));
        assert_eq!(lives.newest(), Some(new));
    }

    #[test]
    fn nothing_is_admitted_while_it_is_closed() {
        let mut lives = Lives::default();
        assert!(lives.admit(Generation::FIRST));
        lives.close();
        assert!(!lives.admit(Generation::FIRST) && !lives.admit(Generation::FIRST.next()));
        lives.reopen();
        assert!(lives.admit(Generation::FIRST));
    }
}
