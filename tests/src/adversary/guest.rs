//! Cells inside a guest, whose function an emulator of the host's serves: as many of them in one
//! process as hold.

use std::env;
use std::fs::{self, File};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use failstop_emulator::control::Client as Control;
use libtest_mimic::{Failed, Trial};

use super::cell::{self, NotSeen};
use super::plays::{Play, plays};
use super::table::{Table, TableError, Tier, Word};
use crate::fixture::Fixture;

/// The variable that names the serial port (virtio) which leads to the emulator's control socket.
pub const CONTROL: &str = "FAILSTOP_CONTROL";
/// The variable with the titles of the cells to play, a space between two.
pub const CELLS: &str = "FAILSTOP_CELLS";
/// What stands before a cell's title in the name of its test.
pub const PREFIX: &str = "matrix/";
/// What a guest says of a cell that held: behind it the title, and how the device ended.
const CAME_TO: &str = "came to: ";
/// What a guest says of a fault that the emulator does not have: behind it the title, and why.
const NOT_OFFERED: &str = "not offered: ";
/// What stands between the two.
const IS: &str = " = ";

/// The cells that [`CELLS`] names as tests, where this is a guest that has a control port. Behind one
/// that fails none is played: it may have left something behind in this process.
///
/// # Errors
///
/// When the table cannot be read.
pub fn trials() -> Result<Vec<Trial>, TableError> {
    let Some(port) = env::var_os(CONTROL) else {
        return Ok(Vec::new());
    };
    let port = port.to_string_lossy().into_owned();
    let named = env::var(CELLS).unwrap_or_default();
    let named: Vec<&str> = named.split(' ').collect();
    let table = Table::read()?;
    let failed = Arc::new(AtomicBool::new(false));
    let trials = plays(&table, Tier::T3)
        .into_iter()
        .filter(|play| named.contains(&&*play.title()))
        .map(|play| {
            let (port, failed) = (port.clone(), failed.clone());
            let title = play.title();
            Trial::test(format!("{PREFIX}{title}"), move || {
                if failed.load(Ordering::Relaxed) {
                    return Ok(());
                }
                match played(&port, &play) {
                    Ok(word) => println!("{CAME_TO}{title}{IS}{word}"),
                    Err(NotSeen::NotOffered(why)) => println!("{NOT_OFFERED}{title}{IS}{why}"),
                    Err(NotSeen::Failed(why)) => {
                        failed.store(true, Ordering::Relaxed);
                        return Err(why);
                    }
                }
                Ok(())
            })
        });
    Ok(trials.collect())
}

fn played(port: &str, play: &Play) -> Result<Word, NotSeen> {
    let control = Control::over(open(port)?);
    let seen = cell::judge_function(Fixture::from_environment()?, control, play)?;
    Ok(seen.word)
}

/// What a guest's output says of a cell: nothing of one that failed, or that was not played.
#[must_use]
pub fn told(output: &str, title: &str) -> Option<Result<String, NotSeen>> {
    // The name of the test stands before it on the line.
    let after = |mark: &str| {
        let mark = format!("{mark}{title}{IS}");
        let mut lines = output.lines();
        lines.find_map(|line| Some(line.split_once(&mark)?.1.to_owned()))
    };
    let not_offered = || after(NOT_OFFERED).map(|why| Err(NotSeen::NotOffered(why)));
    after(CAME_TO).map(Ok).or_else(not_offered)
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
        let output = "running 2 tests\n\
             test matrix/lie/close ... came to: lie/close = revoked closed\nok\n\
             test matrix/lie/idle  ... not offered: lie/idle = no such fault\nok\n\
             test result: ok\n";
        let told = |title| told(output, title);
        assert!(matches!(told("lie/close"), Some(Ok(word)) if word == "revoked closed"));
        let not_offered = told("lie/idle");
        assert!(
            matches!(not_offered, Some(Err(NotSeen::NotOffered(why))) if why == "no such fault")
        );
        assert!(told("lie/traffic").is_none());
    }
}
