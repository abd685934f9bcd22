//! Registers as data: where they are, what they hold, and where the datasheet describes them.
//!
//! A family lists its registers once, with [`registers!`](crate::registers); the driver and its
//! emulated twin use the same constants, and a tool can print the list.

use std::marker::PhantomData;

/// What a 32-bit register holds: plain bits, or a `bitflags` type over them.
pub trait Value: Copy {
    /// The value with these bits, unknown ones included.
    fn from_bits(bits: u32) -> Self;
    /// Its bits.
    fn bits(self) -> u32;
}

impl Value for u32 {
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self
    }
}

/// A 32-bit register whose reading changes nothing.
#[derive(Debug)]
pub struct Reg<V = u32> {
    offset: u32,
    value: PhantomData<V>,
}

impl<V> Clone for Reg<V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Reg<V> {}

impl<V> Reg<V> {
    /// The register `offset` bytes into its BAR, a multiple of 4.
    #[must_use]
    pub const fn at(offset: u32) -> Self {
        assert!(
            offset.is_multiple_of(4),
            "a register starts at a multiple of 4 bytes"
        );
        Self {
            offset,
            value: PhantomData,
        }
    }

    /// Bytes from the start of the BAR.
    #[must_use]
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// The register `index` strides of `stride` bytes further on: one of a row.
    #[must_use]
    pub const fn of(self, index: u32, stride: u32) -> Self {
        Self::at(self.offset + index * stride)
    }
}

/// A 32-bit register that a read clears, so that reading it takes exclusive access
/// ([`Registers::take`](crate::window::Registers::take)).
#[derive(Debug)]
pub struct ReadClear<V = u32> {
    offset: u32,
    value: PhantomData<V>,
}

impl<V> Clone for ReadClear<V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for ReadClear<V> {}

impl<V> ReadClear<V> {
    /// The register `offset` bytes into its BAR, a multiple of 4.
    #[must_use]
    pub const fn at(offset: u32) -> Self {
        assert!(
            offset.is_multiple_of(4),
            "a register starts at a multiple of 4 bytes"
        );
        Self {
            offset,
            value: PhantomData,
        }
    }

    /// Bytes from the start of the BAR.
    #[must_use]
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// The register `index` strides of `stride` bytes further on: one of a row.
    #[must_use]
    pub const fn of(self, index: u32, stride: u32) -> Self {
        Self::at(self.offset + index * stride)
    }
}

/// One line of a family's register list, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Description {
    /// The datasheet's name.
    pub name: &'static str,
    /// Bytes from the start of the BAR.
    pub offset: u32,
    /// Whether a read clears it, so that a tool must not show its value.
    pub read_clears: bool,
    /// What it is: the first line of its documentation, with the datasheet section.
    pub text: &'static str,
}

/// Declares a family's registers, one line each, and the list of them.
///
/// ```
/// failstop_pci::registers! {
///     /// Every register of the example family.
///     pub REGISTERS {
///         /// Device control. §8.2.1
///         CTRL: Reg<u32> = 0x0000;
///         /// Interrupt causes. §8.8.2
///         ICR: ReadClear<u32> = 0x1500;
///     }
/// }
/// assert_eq!(CTRL.offset(), 0);
/// assert_eq!(REGISTERS[1].name, "ICR");
/// assert!(REGISTERS[1].read_clears);
/// ```
#[macro_export]
macro_rules! registers {
    ($(#[doc = $list:literal])* pub $table:ident { $($(#[doc = $text:literal])+ $name:ident : $kind:ident < $value:ty > = $offset:expr;)* }) => {
        $($(#[doc = $text])+ pub const $name: $crate::register::$kind<$value> = $crate::register::$kind::at($offset);)*
        $(#[doc = $list])*
        pub const $table: &[$crate::register::Description] = &[$($crate::register::Description {
            name: stringify!($name),
            offset: $offset,
            read_clears: $crate::registers!(@clears $kind),
            text: concat!($($text),+),
        }),*];
    };
    (@clears Reg) => { false };
    (@clears ReadClear) => { true };
}

/// Lets a `bitflags` type be the value of a register.
#[macro_export]
macro_rules! register_value {
    ($($flags:ty),+ $(,)?) => { $(
        impl $crate::register::Value for $flags {
            #[inline(always)]
            fn from_bits(bits: u32) -> Self {
                Self::from_bits_retain(bits)
            }

            #[inline(always)]
            fn bits(self) -> u32 {
                <$flags>::bits(&self)
            }
        }
    )+ };
}
