//! Cells inside a guest, whose function an emulator of the host's serves.

use std::env;
use std::fs::{self, File};
use std::io;

use failstop_emulator::control::Client as Control;
use libtest_mimic::{Failed, Trial};

use super::cell::{self, NotSeen};
use super::plays::plays;
use super::table::{Table, TableError, Tier};
use crate::fixture::Fixture;

/// The variable that names the serial port (virtio) which leads to the emulator's control socket.
pub const CONTROL: &str = "FAILSTOP_CONTROL";
/// What stands before a cell's title in the name of its test.
pub const PREFIX: &str = "matrix/";
/// What a guest says of a cell that held: behind it, how the device ended.
pub const CAME_TO: &str = "came to: ";
/// What a guest says of a fault that the emulator does not have: behind it, why.
pub const NOT_OFFERED: &str = "not offered: ";

/// The cells as tests, where this is a guest that has a control port.
///
/// # Errors
///
/// When the table cannot be read.
pub fn trials() -> Result<Vec<Trial>, TableError> {
    let Some(port) = env::var_os(CONTROL) else {
        return Ok(Vec::new());
    };
    let port = port.to_string_lossy().into_owned();
    let table = Table::read()?;
    let trials = plays(&table, Tier::T3).into_iter().map(|play| {
        let port = port.clone();
        Trial::test(format!("{PREFIX}{}", play.title()), move || {
            let control = Control::over(open(&port)?);
            match cell::judge_function(Fixture::from_environment()?, control, &play) {
                Ok(seen) => println!("{CAME_TO}{}", seen.word),
                Err(NotSeen::NotOffered(why)) => println!("{NOT_OFFERED}{why}"),
                Err(NotSeen::Failed(failed)) => return Err(failed),
            }
            Ok(())
        })
    });
    Ok(trials.collect())
}

/// What a guest's output says of a cell.
///
/// # Errors
///
/// [`NotSeen`], with all of the output where it says nothing of the kind.
pub fn told(output: &str) -> Result<String, NotSeen> {
    // The name of the test stands before it on the line.
    let after = |mark: &str| {
        output
            .lines()
            .find_map(|line| Some(line.split_once(mark)?.1))
    };
    if let Some(word) = after(CAME_TO) {
        return Ok(word.to_owned());
    }
    Err(match after(NOT_OFFERED) {
        Some(why) => NotSeen::NotOffered(why.to_owned()),
        None => NotSeen::Failed(output.into()),
    })
}

/// Opens the serial port of this name.
fn open(name: &str) -> Result<File, Failed> {
    for port in fs::read_dir("/sys/class/virtio-ports")? {
        let port = port?;
        let found = fs::read_to_string(port.path().join("name")).unwrap_or_default();
        if found.trim_end() == name {
            let path = std::path::Path::new("/dev").join(port.file_name());
            return Ok(File::options().read(true).write(true).open(path)?);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no serial port is called {name}"),
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_tells_stands_after_the_name_of_the_test() {
        let word = told("running 1 test\ntest matrix/lie/close ... came to: revoked closed\nok\n");
        assert_eq!(word.ok(), Some("revoked closed".to_owned()));
        let not_offered = told("test matrix/lie/close ... not offered: no such fault\nok\n");
        assert!(matches!(not_offered, Err(NotSeen::NotOffered(why)) if why == "no such fault"));
        assert!(matches!(told("test result: ok"), Err(NotSeen::Failed(_))));
    }
}
