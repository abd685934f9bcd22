//! The locked-memory limit (C21), without asking the system at every mapping.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use failstop_pci::memlock::{Memlock, MemlockError};

/// Each reading of the limit is good for this part of what is left of it. Others lock memory too,
/// other address spaces of this process among them; the nearer the limit, the more often it is read.
const SHARE: u64 = 8;

/// How many bytes may be locked before the limit is looked at again.
#[derive(Debug)]
pub(super) struct LockBudget {
    /// None where nothing limits this process, or nobody says what.
    left: Option<AtomicU64>,
}

impl LockBudget {
    /// Nothing that is mapped is locked.
    pub(super) fn unlimited() -> Self {
        Self { left: None }
    }

    /// Of this process, as it is now: one that is exempt from the limit is not asked again.
    pub(super) fn read() -> Self {
        Self::of(Memlock::read())
    }

    fn of(memlock: io::Result<Memlock>) -> Self {
        let left = match memlock {
            Ok(memlock) if memlock.exempt => None,
            Ok(memlock) => memlock.limit.map(|_| AtomicU64::new(share(&memlock, 0))),
            // Without /proc the kernel's own refusal has to do.
            Err(error) => {
                log::debug!("the locked-memory limit is not known: {error}");
                None
            }
        };
        Self { left }
    }

    /// Whether `len` more bytes may be locked.
    ///
    /// # Errors
    ///
    /// [`MemlockError`], with the numbers as they are now.
    #[inline]
    pub(super) fn take(&self, len: u64) -> Result<(), MemlockError> {
        self.take_or(len, Memlock::read)
    }

    #[inline]
    fn take_or(
        &self,
        len: u64,
        read: impl FnOnce() -> io::Result<Memlock>,
    ) -> Result<(), MemlockError> {
        let Some(left) = &self.left else {
            return Ok(());
        };
        let within = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(len)
        });
        if within.is_ok() {
            return Ok(());
        }
        look_again(left, len, read())
    }
}

#[cold]
fn look_again(
    left: &AtomicU64,
    len: u64,
    memlock: io::Result<Memlock>,
) -> Result<(), MemlockError> {
    match memlock {
        Ok(memlock) => {
            memlock.check(len)?;
            left.store(share(&memlock, len), Ordering::Relaxed);
        }
        Err(error) => log::debug!("the locked-memory limit is not known: {error}"),
    }
    Ok(())
}

/// What may be locked on the strength of one reading, once `len` bytes more are.
fn share(memlock: &Memlock, len: u64) -> u64 {
    let limit = memlock.limit.unwrap_or(u64::MAX);
    limit.saturating_sub(memlock.used).saturating_sub(len) / SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(used: u64) -> io::Result<Memlock> {
        Ok(Memlock {
            limit: Some(8000),
            used,
            exempt: false,
        })
    }

    fn not_read() -> io::Result<Memlock> {
        panic!("the limit was read again")
    }

    #[test]
    fn c21_far_from_the_limit_it_is_not_read_again() {
        let budget = LockBudget::of(limited(0));
        assert_eq!(budget.take_or(600, not_read), Ok(()));
        assert_eq!(budget.take_or(400, not_read), Ok(()));
    }

    #[test]
    fn c21_near_the_limit_it_is_read_and_what_is_used_counts() {
        let budget = LockBudget::of(limited(0));
        let error = budget.take_or(1001, || limited(7000)).unwrap_err();
        assert_eq!((error.needed, error.limit, error.used), (1001, 8000, 7000));
        assert_eq!(budget.take_or(1001, || limited(5399)), Ok(()));
        // (8000 - 5399 - 1001) / 8.
        assert_eq!(budget.take_or(200, not_read), Ok(()));
        assert!(budget.take_or(1, || limited(8000)).is_err());
    }

    #[test]
    fn who_is_exempt_is_not_asked() {
        let memlock = limited(8000).map(|memlock| Memlock {
            exempt: true,
            ..memlock
        });
        assert_eq!(LockBudget::of(memlock).take_or(u64::MAX, not_read), Ok(()));
    }

    #[test]
    fn without_a_reading_the_kernel_decides() {
        let budget = LockBudget::of(Err(io::ErrorKind::NotFound.into()));
        assert_eq!(budget.take_or(u64::MAX, not_read), Ok(()));
    }
}
