//! Error numbers as Linux on most architectures has them (`asm-generic/errno*.h`), so that a
//! scenario means the same wherever it is read.

use std::fmt;
use std::str::FromStr;

/// An error number, from 1 to [`Errno::LAST`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Errno(i32);

/// What is written by name; every other number is written as such.
const NAMES: [(&str, i32); 16] = [
    ("EPERM", 1),
    ("ENOENT", 2),
    ("EINTR", 4),
    ("EIO", 5),
    ("ENXIO", 6),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EFAULT", 14),
    ("EBUSY", 16),
    ("EEXIST", 17),
    ("ENODEV", 19),
    ("EINVAL", 22),
    ("ENOSPC", 28),
    ("EOPNOTSUPP", 95),
    ("ETIMEDOUT", 110),
];

impl Errno {
    /// The last number that Linux has given a meaning to.
    pub const LAST: i32 = 133;
    /// Input or output error.
    pub const EIO: Self = Self(5);

    /// The error of this number, if there is one.
    #[must_use]
    pub const fn new(number: i32) -> Option<Self> {
        if number >= 1 && number <= Self::LAST {
            Some(Self(number))
        } else {
            None
        }
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> i32 {
        self.0
    }
}

/// Text that is neither the name nor the number of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("an error is a number from 1 to 133, or a name such as EIO or ENOMEM")]
pub struct NoErrno;

impl FromStr for Errno {
    type Err = NoErrno;

    fn from_str(text: &str) -> Result<Self, NoErrno> {
        let named = NAMES.iter().find(|(name, _)| *name == text);
        let number = match named {
            Some((_, number)) => *number,
            None => text.parse().map_err(|_| NoErrno)?,
        };
        Self::new(number).ok_or(NoErrno)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_the_same_error() {
        assert_eq!("ENOMEM".parse::<Errno>(), "12".parse::<Errno>());
    }

    #[test]
    fn numbers_that_no_error_has_are_refused() {
        for text in ["0", "-5", "134", "EWHAT", ""] {
            assert!(text.parse::<Errno>().is_err(), "{text}");
        }
    }
}
