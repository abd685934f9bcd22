//! What people write: scenarios, names, command lines. What is understood is written back in one
//! form, which says the same.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use failstop::name::DeviceName;
use failstop::open::IommuChoice;
use failstop_pci::address::Address;
use failstop_scenario::{Errno, Scenario, Spec, Step, Trigger};

/// The depth is how many steps there are.
pub(crate) fn scenario(data: &[u8]) -> u64 {
    let Ok(text) = str::from_utf8(data) else {
        return 0;
    };
    if let Ok(step) = Step::parse(text) {
        assert_eq!(Step::parse(&step.to_string()).as_ref(), Ok(&step));
    }
    again::<Scenario>(text).map_or(0, |scenario| scenario.steps.len() as u64)
}

/// The depth is how many kinds of name the text is one of.
pub(crate) fn names(data: &[u8]) -> u64 {
    let Ok(text) = str::from_utf8(data) else {
        return 0;
    };
    [
        again::<DeviceName>(text).is_some(),
        again::<Address>(text).is_some(),
        again::<IommuChoice>(text).is_some(),
        again::<Spec>(text).is_some(),
        again::<Trigger>(text).is_some(),
        again::<Errno>(text).is_some(),
    ]
    .into_iter()
    .map(u64::from)
    .sum()
}

/// Arguments, one a line; the depth is 1 when they make sense.
pub(crate) fn command_line(data: &[u8]) -> u64 {
    let Ok(text) = str::from_utf8(data) else {
        return 0;
    };
    let arguments: Vec<&str> = text.lines().collect();
    let ours = failstop_cli::understands(arguments.iter().copied());
    let emulators = failstop_emulator::cli::understands(arguments);
    u64::from(ours || emulators)
}

/// Reads the text, and what is written of it, which must be the same.
fn again<T: FromStr + Display + PartialEq + Debug>(text: &str) -> Option<T> {
    let read: T = text.parse().ok()?;
    let written = read.to_string();
    let back = written.parse::<T>();
    assert!(
        back.as_ref().is_ok_and(|back| *back == read),
        "{text:?} is {read:?}, written {written:?}"
    );
    Some(read)
}
