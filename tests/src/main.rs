//! Runs the suite on the device that `FAILSTOP_DEVICE` names.

use failstop::igb::{Part, VENDOR};
use failstop_tests::adversary::guest;
use failstop_tests::cases::{CASES, Needs};
use failstop_tests::fixture::Fixture;
use libtest_mimic::{Arguments, Trial};

/// Whether the environment names a PCI function that is one.
fn is_82576() -> bool {
    let name = std::env::var("FAILSTOP_DEVICE").unwrap_or_default();
    let id = std::fs::read_to_string(format!("/sys/bus/pci/devices/{name}/device"));
    let id = id.unwrap_or_default();
    let id = u16::from_str_radix(id.trim().trim_start_matches("0x"), 16);
    id.is_ok_and(|id| Part::of(VENDOR, id) == Some(Part::I82576))
}

fn main() -> std::process::ExitCode {
    let mut arguments = Arguments::from_args();
    // One device, one case at a time.
    arguments.test_threads = Some(1);
    let emulated =
        std::env::var("FAILSTOP_DEVICE").is_ok_and(|name| name.starts_with("vfio-user:"));
    let peer = std::env::var_os("FAILSTOP_KERNEL_NIC").is_some();
    let offered = |needs| match needs {
        Needs::Loopback => true,
        Needs::KernelVfio => !emulated,
        Needs::Rss => emulated || is_82576(),
        // Only guests of the QEMU tier have a topology.
        Needs::OwnMachine => std::env::var_os("FAILSTOP_TOPOLOGY").is_some(),
        // Whoever took it down says so.
        Needs::LinkDown => std::env::var_os("FAILSTOP_LINK_DOWN").is_some(),
        Needs::KernelPeer => peer && !emulated,
    };
    let cells = match guest::trials() {
        Ok(cells) => cells,
        Err(error) => {
            eprintln!("{error}");
            return std::process::ExitCode::FAILURE;
        }
    };
    let trials = CASES
        .iter()
        .filter(|case| offered(case.needs))
        .map(|case| Trial::test(case.name, || (case.run)(&Fixture::from_environment()?)))
        .chain(cells)
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
