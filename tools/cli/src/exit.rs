//! How the command ends.

use std::process::ExitCode;

/// Exit codes; clap itself ends with 2 on a command line that it does not understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// Everything as asked.
    Clean = 0,
    /// Frames were lost or changed; the accounts are clean.
    Wrong = 1,
    /// The device could not be used, or left as it was.
    NotUsable = 3,
    /// Memory is left in quarantine.
    Quarantined = 4,
    /// The device is fenced and was not recovered.
    Fenced = 5,
}

impl Exit {
    /// The end with this code; one that there is not is [`Exit::Wrong`].
    pub(crate) fn of(code: u8) -> Self {
        let all = [
            Self::Clean,
            Self::NotUsable,
            Self::Quarantined,
            Self::Fenced,
        ];
        let found = all.into_iter().find(|exit| *exit as u8 == code);
        found.unwrap_or(Self::Wrong)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
