//! Runs the kernel cases of the machine that `FAILSTOP_TOPOLOGY` names, as root, in a guest.

use std::process::ExitCode;

use failstop_tests::kernel::{CASES, KernelCase, inner};
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    if let Some(exit) = inner::run() {
        return exit;
    }
    let mut arguments = Arguments::from_args();
    // One device, one case at a time.
    arguments.test_threads = Some(1);
    let topology = std::env::var("FAILSTOP_TOPOLOGY").unwrap_or_else(|_| "two-igb".to_owned());
    let trials = CASES
        .iter()
        .filter(|case| case.machine.topology() == topology)
        .flat_map(KernelCase::trials)
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
