//! Runs the kernel cases of the guest's machine, as root in it. `FAILSTOP_TOPOLOGY` names the
//! machine: `cargo xtask vm run --topology aw39 --env FAILSTOP_TOPOLOGY=aw39 -- failstop-kernel-suite`.

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
    let trials = CASES
        .iter()
        .filter(|case| case.machine.is_here())
        .flat_map(KernelCase::trials)
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
