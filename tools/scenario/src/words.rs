//! Words of a line or of a fault's arguments, taken one by one.

use std::str::FromStr;

/// What is left of a sequence of words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a> {
    rest: &'a [&'a str],
}

impl<'a> Words<'a> {
    pub(crate) const fn new(words: &'a [&'a str]) -> Self {
        Self { rest: words }
    }

    /// The next word.
    pub(crate) fn word(&mut self) -> Option<&'a str> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// The next word as something that has a written form.
    pub(crate) fn parse<T: FromStr>(&mut self) -> Option<T> {
        self.word()?.parse().ok()
    }

    /// The next word, if it has that form; else it stays.
    pub(crate) fn optional<T: FromStr>(&mut self) -> Option<T> {
        let value = self.rest.first()?.parse().ok()?;
        self.word();
        Some(value)
    }

    /// Whether the next word is this one, which is taken then.
    pub(crate) fn flag(&mut self, word: &str) -> bool {
        let found = self.rest.first() == Some(&word);
        if found {
            self.word();
        }
        found
    }

    /// A number in hexadecimal, after `0x`.
    pub(crate) fn hexadecimal(&mut self) -> Option<u64> {
        u64::from_str_radix(self.word()?.strip_prefix("0x")?, 16).ok()
    }

    /// Whether no word is left.
    pub(crate) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// All words that are left.
    pub(crate) fn rest(&mut self) -> &'a [&'a str] {
        std::mem::take(&mut self.rest)
    }
}

/// An enumeration whose values are words: for files, for printing, and in order.
///
/// It makes the constant `ALL`, the method `word`, [`Display`](std::fmt::Display), which pads, and
/// [`FromStr`], whose error is [`NoSuchWord`](crate::NoSuchWord).
#[macro_export]
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// Every one, in the order of this documentation.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The word that stands for it.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::NoSuchWord;

            fn from_str(text: &str) -> Result<Self, $crate::NoSuchWord> {
                let found = Self::ALL.iter().copied().find(|one| one.word() == text);
                found.ok_or($crate::NoSuchWord)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

pub(crate) use words;

/// A word that is not of its enumeration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no such word here")]
pub struct NoSuchWord;
