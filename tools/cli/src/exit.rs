//! How the command ends: the one table of its exit codes.

use std::fmt::Write as _;
use std::process::ExitCode;

/// Exit codes of every subcommand. `emulate` hands its own through, which are of this table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// Everything as asked.
    Clean = 0,
    /// Frames were lost or changed, or a run was cut short, with clean accounts; or a step of a scenario
    /// does not hold.
    Wrong = 1,
    /// The command line, or a file or socket that it names, makes no sense.
    Usage = 2,
    /// The device could not be used, or left as it was.
    NotUsable = 3,
    /// Memory is left in quarantine.
    Quarantined = 4,
    /// The device is fenced and was not recovered.
    Fenced = 5,
}

impl Exit {
    const ALL: [Self; 6] = [
        Self::Clean,
        Self::Wrong,
        Self::Usage,
        Self::NotUsable,
        Self::Quarantined,
        Self::Fenced,
    ];

    /// The end with this code; one that there is not is [`Exit::Wrong`].
    pub(crate) fn of(code: u8) -> Self {
        let found = Self::ALL.into_iter().find(|exit| *exit as u8 == code);
        found.unwrap_or(Self::Wrong)
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Wrong => {
                "frames were lost or changed, a run was cut short, a step of a scenario does not hold, or an emulator died of a fault"
            }
            Self::Usage => "usage: arguments, or a file or socket that they name",
            Self::NotUsable => "device not usable",
            Self::Quarantined => "memory left in quarantine",
            Self::Fenced => "device fenced and not recovered",
        }
    }

    /// The table, as `--help` shows it.
    pub(crate) fn table() -> String {
        let mut text = String::from("Exit codes:");
        for exit in Self::ALL {
            // Writing to a string does not fail.
            let _ = write!(text, "\n  {}  {}", exit as u8, exit.meaning());
        }
        text
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
