//! T4: the suite on a real function, which `FAILSTOP_HIL` names and which is bound to vfio-pci. It
//! loops back in its PHY, so that no cable is needed.

use std::process::ExitCode;

use failstop_tests::cases::{CASES, Needs};
use failstop_tests::fixture::Fixture;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One device, one case at a time.
    arguments.test_threads = Some(1);
    let Ok(name) = std::env::var("FAILSTOP_HIL") else {
        eprintln!("FAILSTOP_HIL names no function: nothing is tested");
        return ExitCode::SUCCESS;
    };
    let fixture = match name.parse() {
        Ok(device) => Fixture {
            device,
            iommu: Default::default(),
        },
        Err(error) => {
            eprintln!("FAILSTOP_HIL: {error}");
            return ExitCode::FAILURE;
        }
    };
    let trials = CASES
        .iter()
        .filter(|case| matches!(case.needs, Needs::Loopback | Needs::KernelVfio))
        .map(|case| {
            let fixture = fixture.clone();
            Trial::test(case.name, move || (case.run)(&fixture))
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
