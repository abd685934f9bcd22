//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Where a PCI function sits: domain, bus, device and function (BDF).
///
/// Linux numbers domains beyond 16 bits for some bridges (Intel VMD: `10000:e1:00.0`), and prints
/// at least four digits; so does this type.
///
/// ```
/// use failstop_pci::address::Address;
///
/// let address: Address = "01:00.1".parse()?;
/// assert_eq!(address.to_string(), "0000:01:00.1");
/// assert_eq!(address, "0000:01:00.1".parse()?);
/// # Ok::<(), failstop_pci::address::ParseAddressError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    domain: u32,
    bus: u8,
    /// Device in bits 7:3, function in bits 2:0, as in a PCI routing ID.
    devfn: u8,
}

impl Address {
    /// The function `function` (0 to 7) of `device` (0 to 31) on `bus` of `domain`; none when one
    /// of them is out of range.
    #[must_use]
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self {
            domain,
            bus,
            devfn: device << 3 | function,
        })
    }

    /// The PCI domain (segment group).
    #[must_use]
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus number.
    #[must_use]
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The device number: 0 to 31.
    #[must_use]
    pub const fn device(self) -> u8 {
        self.devfn >> 3
    }

    /// The function number: 0 to 7.
    #[must_use]
    pub const fn function(self) -> u8 {
        self.devfn & 7
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain,
            self.bus,
            self.device(),
            self.function()
        )
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not the address of a PCI function.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "'{text}' is not a PCI address: expected DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, \
     like 0000:01:00.0, or BUS:DEVICE.FUNCTION, like 01:00.0"
)]
pub struct ParseAddressError {
    /// What was given.
    pub text: String,
}

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParseAddressError {
            text: text.to_owned(),
        })
    }
}

fn parse(text: &str) -> Option<Address> {
    let (slot, function) = text.rsplit_once('.')?;
    let (rest, device) = slot.rsplit_once(':')?;
    let (domain, bus) = match rest.split_once(':') {
        Some((domain, bus)) => (hex(domain, 4..=8)?, bus),
        None => (0, rest),
    };
    Address::new(
        domain,
        u8::try_from(hex(bus, 1..=2)?).ok()?,
        u8::try_from(hex(device, 1..=2)?).ok()?,
        u8::try_from(hex(function, 1..=1)?).ok()?,
    )
}

/// A hexadecimal number with as many digits as `digits` allows, and nothing else: `from_str_radix`
/// would take a sign.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    if !digits.contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn full_form_is_parsed() {
        assert_eq!(
            "0000:01:00.0".parse(),
            Ok(Address::new(0, 1, 0, 0).unwrap())
        );
    }

    #[test]
    fn domain_defaults_to_zero() {
        assert_eq!(
            "1f:1e.7".parse(),
            Ok(Address::new(0, 0x1f, 0x1e, 7).unwrap())
        );
    }

    #[test]
    fn domain_beyond_sixteen_bits_is_kept() {
        let address: Address = "10000:e1:00.0".parse().unwrap();
        assert_eq!(address.domain(), 0x1_0000);
        assert_eq!(address.to_string(), "10000:e1:00.0");
    }

    #[test]
    fn error_names_the_text_and_the_form() {
        let error = "eth0".parse::<Address>().unwrap_err().to_string();
        assert!(
            error.contains("'eth0'") && error.contains("0000:01:00.0"),
            "{error}"
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            ":",
            ".",
            "0000:01:00",
            "0000:01:00.8",
            "0000:01:20.0",
            "0000:100:00.0",
            "+000:01:00.0",
            "0000:01:00.0 ",
            "0:01:00.0",
            "0000:0000:01:00.0",
            "0000:01:00.00",
            "123456789:01:00.0",
            "é:0.0",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?} was accepted");
        }
    }

    proptest! {
        #[test]
        fn display_and_parse_agree(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = Address::new(domain, bus, device, function).unwrap();
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let _ = text.parse::<Address>();
        }
    }
}
