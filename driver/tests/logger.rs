//! A logger of the user's that panics holds up nobody.
#![forbid(unsafe_code)]

mod scripted;

use failstop::ladder::Word;
use failstop::queues::lifecycle::Cause;
use log::{Level, Log, Metadata, Record};
use scripted::{Bench, Objects};

/// Prints to a pipe that nobody reads any more.
struct Broken;

impl Log for Broken {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let ladder = std::thread::current()
            .name()
            .is_some_and(|name| name.starts_with("ladder"));
        assert!(!ladder || record.level() > Level::Warn, "on purpose");
    }

    fn flush(&self) {}
}

#[test]
fn a_logger_that_panics_on_the_ladder_holds_up_nobody() {
    log::set_logger(&Broken).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let bench = Bench::new();
    let device = bench.open();
    let objects = Objects::new(&device, 0).unwrap();
    assert!(device.break_now(Cause::User));
    assert_eq!(device.revocation().unwrap().verdict, Word::Revoked);
    drop(objects);
    assert_eq!(device.recover().unwrap().number(), 2);
}
