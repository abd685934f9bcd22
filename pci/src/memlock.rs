//! The locked-memory limit, checked before memory is mapped (C21).
//!
//! Mapping memory for DMA locks it. The kernel refuses with ENOMEM in the middle of things; asking
//! beforehand gives an error with numbers in it.

use std::fs;
use std::io;

use nix::sys::resource::{Resource, getrlimit};
use thiserror::Error;

/// `CAP_IPC_LOCK` of `linux/capability.h`: its holder has no limit.
const CAP_IPC_LOCK: u32 = 14;

/// What this process may lock, and has locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memlock {
    /// `RLIMIT_MEMLOCK` in bytes; none when unlimited.
    pub limit: Option<u64>,
    /// Bytes that count against it: locked by mlock or type1, and pinned by iommufd.
    pub used: u64,
    /// The process has `CAP_IPC_LOCK`, so that the limit does not bind it.
    pub exempt: bool,
}

/// Memory that may not be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "{needed} bytes of memory must be locked, the limit (RLIMIT_MEMLOCK) is {limit} and {used} are in \
     use: raise it with `ulimit -l {kibibytes}` (KiB; as root, or up to the hard limit), in \
     /etc/security/limits.conf, or with LimitMEMLOCK= in a systemd unit",
    kibibytes = needed.saturating_add(*used).div_ceil(1024)
)]
pub struct MemlockError {
    /// Bytes to be locked.
    pub needed: u64,
    /// The limit in bytes.
    pub limit: u64,
    /// Bytes that count against it already.
    pub used: u64,
}

impl Memlock {
    /// Reads this process's limit and use.
    ///
    /// # Errors
    ///
    /// When `/proc/self/status` cannot be read.
    pub fn read() -> io::Result<Self> {
        let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
        let status = fs::read_to_string("/proc/self/status")?;
        let limit = (soft != libc::RLIM_INFINITY).then_some(soft);
        Ok(Self::from_status(limit, &status))
    }

    /// Takes the use out of the text of `/proc/PID/status` (proc_pid_status(5)).
    fn from_status(limit: Option<u64>, status: &str) -> Self {
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        let bytes = |name| {
            field(name)
                .and_then(|text| text.strip_suffix(" kB")?.trim().parse::<u64>().ok())
                .map_or(0, |kibibytes| kibibytes.saturating_mul(1024))
        };
        let capabilities = field("CapEff")
            .and_then(|text| u64::from_str_radix(text, 16).ok())
            .unwrap_or(0);
        Self {
            limit,
            used: bytes("VmLck").saturating_add(bytes("VmPin")),
            exempt: capabilities & 1 << CAP_IPC_LOCK != 0,
        }
    }

    /// Checks that `needed` more bytes may be locked.
    ///
    /// # Errors
    ///
    /// [`MemlockError`] with the numbers.
    pub fn check(&self, needed: u64) -> Result<(), MemlockError> {
        match self.limit {
            Some(limit) if !self.exempt && needed.saturating_add(self.used) > limit => {
                Err(MemlockError {
                    needed,
                    limit,
                    used: self.used,
                })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tx\nVmLck:\t      64 kB\nVmPin:\t     128 kB\nCapEff:\t0000000000000000\n";

    /// (R13)
    #[test]
    fn c21_error_has_needed_limit_and_used() {
        let memlock = Memlock::from_status(Some(0x8_0000), STATUS);
        let error = memlock.check(0x10_0000).unwrap_err();
        assert_eq!(
            error,
            MemlockError {
                needed: 0x10_0000,
                limit: 0x8_0000,
                used: 192 * 1024
            }
        );
        assert!(error.to_string().contains("ulimit -l 1216"), "{error}");
    }

    #[test]
    fn c21_what_just_fits_is_allowed() {
        let memlock = Memlock::from_status(Some(0x8_0000), STATUS);
        assert_eq!(memlock.check(0x8_0000 - 192 * 1024), Ok(()));
        assert!(memlock.check(0x8_0000 - 192 * 1024 + 1).is_err());
    }

    #[test]
    fn capability_exempts() {
        let status = STATUS.replace("0000000000000000", "0000000000004000");
        let memlock = Memlock::from_status(Some(0), &status);
        assert_eq!(memlock.check(u64::MAX), Ok(()));
    }

    #[test]
    fn no_limit_is_no_limit() {
        assert_eq!(Memlock::from_status(None, STATUS).check(u64::MAX), Ok(()));
    }

    #[test]
    fn this_process_can_be_read() {
        assert!(Memlock::read().is_ok());
    }
}
