//! `failstop replay`: plays a written scenario, and ends as it does.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use failstop_emulator::Emulator;
use failstop_replay::{Failure, Played, replay as play};
use failstop_scenario::Scenario;

use crate::exit::Exit;
use crate::{Usage, emulated, explain};

/// Options of `failstop replay`.
#[derive(Args, Debug)]
pub(crate) struct ReplayArgs {
    /// The scenario: what it runs on, and a step a line. Tests that fail write one and name it
    file: PathBuf,
}

/// Plays the scenario, says how it went, and how the process should end: as `run` does, or with 1
/// where a step does not hold.
///
/// # Errors
///
/// [`Usage`] when the file cannot be read, is no scenario, or names no device; otherwise when the
/// device cannot be had.
pub(crate) fn replay(options: &ReplayArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let path = options.file.display();
    let bytes =
        fs::read(&options.file).map_err(|why| Usage(format!("cannot read {path}: {why}")))?;
    let text = String::from_utf8(bytes).map_err(|_| {
        Usage(format!(
            "{path} is no scenario: it is no text (UTF-8); name a file that a test which failed wrote, and named"
        ))
    })?;
    let scenario: Scenario = text.parse().map_err(|why| {
        let why = anyhow::Error::new(why).context(format!("{path} is no scenario"));
        Usage(explain(&why))
    })?;
    let start = |options: &_| Emulator::spawn(&[OsString::from(emulated::SUBCOMMAND)], options);
    match play(&scenario, &start) {
        Ok(Played::Ended(ending)) => {
            writeln!(out, "{ending}")?;
            Ok(Exit::of(ending.exit))
        }
        Ok(Played::Held { steps }) => {
            writeln!(out, "{steps} steps, and the contract holds after each")?;
            Ok(Exit::Clean)
        }
        Err(failure @ Failure::Step { .. }) => {
            let failure = anyhow::Error::new(failure).context(path.to_string());
            writeln!(out, "{}", explain(&failure))?;
            Ok(Exit::Wrong)
        }
        Err(failure @ (Failure::NotEmulated(_) | Failure::Name(_))) => {
            let failure = anyhow::Error::new(failure).context(path.to_string());
            Err(Usage(explain(&failure)).into())
        }
        Err(failure) => Err(failure.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays this text from a file; how it ends, and what is said.
    fn played(text: impl AsRef<[u8]>) -> (anyhow::Result<Exit>, String) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("some.scenario");
        fs::write(&file, text.as_ref()).unwrap();
        let mut out = Vec::new();
        let exit = replay(&ReplayArgs { file }, &mut out);
        (exit, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_sequence_that_keeps_the_contract_ends_clean() {
        let (exit, said) = played("failstop scenario 1\non scripted server\ncreate 0 pd\nbreak\n");
        assert_eq!(exit.unwrap(), Exit::Clean);
        assert!(said.contains("2 steps"), "{said}");
    }

    #[test]
    fn a_step_that_does_not_hold_is_named_and_ends_with_one() {
        let (exit, said) = played("failstop scenario 1\non scripted server\nport\n");
        assert_eq!(exit.unwrap(), Exit::Wrong);
        assert!(said.contains("step 1, 'port'"), "{said}");
    }

    #[test]
    fn text_that_is_no_scenario_names_its_line() {
        let (exit, _) = played("failstop scenario 1\non scripted server\nbrake\n");
        let error = exit.unwrap_err();
        assert!(error.is::<Usage>(), "{error:?}");
        assert!(error.to_string().contains("line 3"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_text_is_named_with_what_to_do() {
        let (exit, _) = played([0xFF, 0xFE, 0x00]);
        let error = exit.unwrap_err();
        assert!(error.is::<Usage>(), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("some.scenario"), "{said}");
        assert!(said.contains("a test which failed"), "{said}");
    }
}
