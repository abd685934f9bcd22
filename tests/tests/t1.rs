//! T1: the suite on emulated devices in this process, each case on one of its own; and the tool,
//! as a person runs it.

use std::process::ExitCode;

use failstop::name::DeviceName;
use failstop_emulator::{Emulator, Options};
use failstop_tests::cases::{CASES, Case, Needs};
use failstop_tests::fixture::{Fixture, Outcome, ensure_eq};
use failstop_tests::{faults, processes, supervised, tool};
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    if let Some(exit) = processes::run() {
        return exit;
    }
    let arguments = Arguments::from_args();
    let suite = CASES
        .iter()
        .filter(|case| matches!(case.needs, Needs::Loopback | Needs::Rss))
        .map(|case| Trial::test(format!("emulated/{}", case.name), || on_emulator(case)));
    let trials = suite
        .chain(faults::trials())
        .chain(supervised::trials())
        .chain(processes::trials())
        .chain(tool::trials())
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Runs a case, and then asks the emulator whether the driver ever let it reach what was not its.
fn on_emulator(case: &Case) -> Outcome {
    let mut emulator = Emulator::on_threads(&Options::default())?;
    let fixture = Fixture {
        device: DeviceName::VfioUser(emulator.socket_path()),
        iommu: Default::default(),
    };
    (case.run)(&fixture)?;
    let stats = emulator.stats()?;
    ensure_eq(stats.stray.total(), 0, "accesses outside the mappings")?;
    ensure_eq(stats.server.mappings, 0, "mappings that are left")?;
    ensure_eq(stats.bus_master, false, "bus master after close")
}
