//! One target under libFuzzer: the one that `FAILSTOP_FUZZ_TARGET` names.
#![no_main]

use std::sync::OnceLock;

use failstop_fuzz::{TARGETS, Target};

static CHOSEN: OnceLock<&'static Target> = OnceLock::new();

fn choose() {
    let name = std::env::var("FAILSTOP_FUZZ_TARGET").unwrap_or_default();
    match TARGETS.iter().find(|target| target.name == name) {
        Some(target) => drop(CHOSEN.set(target)),
        None => {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            eprintln!("FAILSTOP_FUZZ_TARGET names one of {}", names.join(", "));
            std::process::exit(2);
        }
    }
}

libfuzzer_sys::fuzz_target!(
    init: choose(),
    |data: &[u8]| {
        if let Some(target) = CHOSEN.get() {
            (target.run)(data);
        }
    }
);
