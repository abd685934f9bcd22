//! The harness itself, on real guests: what tests rely on when they run a command in one.
//!
//! Part of tier T2: `cargo test -p xtask --features guests --test guests`.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::json;
use xtask::protocol::Run;
use xtask::vm::{Boot, Guest, Kernel, Setup, topologies};

/// One guest for all tests that leave it as it was.
fn guest() -> &'static Guest {
    static GUEST: OnceLock<Guest> = OnceLock::new();
    GUEST.get_or_init(|| boot(Kernel::Small, "two-igb"))
}

fn boot(kernel: Kernel, topology: &str) -> Guest {
    let setup = Setup::ensure().unwrap();
    Boot::new(kernel, topologies::find(topology).unwrap())
        .start(&setup)
        .unwrap()
}

#[test]
fn output_and_exit_code_arrive_apart() {
    let finished = guest()
        .run(&Run::shell("echo out; echo err >&2; exit 7"))
        .unwrap();
    assert_eq!(
        (finished.stdout.as_slice(), finished.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert_eq!(finished.exit.code, Some(7));
}

#[test]
fn a_command_past_its_time_is_killed_with_its_children() {
    let run = Run::shell("sleep 1000 & sleep 1000").timeout(Duration::from_millis(300));
    let finished = guest().run(&run).unwrap();
    assert!(
        finished.exit.timed_out && !finished.exit.stuck,
        "{}",
        finished.text()
    );
    let processes = guest().run(&Run::new(["ps"])).unwrap();
    assert!(
        !processes.text().contains("sleep 1000"),
        "{}",
        processes.text()
    );
}

#[test]
fn a_signal_is_not_an_exit_code() {
    let running = guest().spawn(&Run::new(["sleep", "1000"])).unwrap();
    running.kill().unwrap();
    let finished = running.wait().unwrap();
    assert_eq!(
        (
            finished.exit.code,
            finished.exit.signal,
            finished.exit.timed_out
        ),
        (None, Some(9), false)
    );
}

#[test]
fn an_unknown_program_is_an_answer() {
    let finished = guest().run(&Run::new(["no-such-program"])).unwrap();
    assert!(finished.exit.error.is_some() && !finished.success());
}

#[test]
fn an_ordinary_user_has_the_limit_and_no_privileges() {
    let run = Run::shell("id -u; id -G; ulimit -l; cat /proc/self/status | grep CapEff")
        .user(1000, Some(64 << 10));
    let finished = guest().run(&run).unwrap();
    assert_eq!(
        String::from_utf8_lossy(&finished.stdout),
        "1000\n1000\n64\nCapEff:\t0000000000000000\n"
    );
}

#[test]
fn commands_run_side_by_side() {
    let started = Instant::now();
    let running: Vec<_> = (0..4)
        .map(|_| guest().spawn(&Run::new(["sleep", "2"])).unwrap())
        .collect();
    assert!(
        running
            .into_iter()
            .all(|running| running.wait().unwrap().success())
    );
    assert!(started.elapsed() < Duration::from_secs(6));
}

#[test]
fn a_megabyte_of_output_is_whole() {
    let finished = guest()
        .run(&Run::shell("head -c 1048576 /dev/zero"))
        .unwrap();
    assert!(finished.stdout.len() == 1 << 20 && finished.stdout.iter().all(|&byte| byte == 0));
}

#[test]
fn a_file_arrives_with_its_mode() {
    guest()
        .put("/tmp/new/script", 0o755, b"#!/bin/sh\necho ran\n")
        .unwrap();
    assert_eq!(
        guest().run(&Run::new(["/tmp/new/script"])).unwrap().stdout,
        b"ran\n"
    );
}

#[test]
fn the_kernels_log_comes_without_the_console() {
    guest()
        .run(&Run::shell("echo '<6>a word from a test' > /dev/kmsg"))
        .unwrap();
    let log = guest().kernel_log().unwrap();
    assert_eq!(log.matching("a word from a test").len(), 1);
    assert!(
        log.iommu_faults().is_empty() && log.kernel_bugs().is_empty(),
        "{}",
        log.text()
    );
}

#[test]
fn qemu_takes_orders() {
    let mut qmp = guest().qmp().unwrap();
    assert_eq!(
        qmp.execute("query-status", json!({})).unwrap()["status"],
        "running"
    );
    assert!(qmp.monitor("info pci").unwrap().contains("8086:10c9"));
}

#[test]
fn a_role_leads_to_a_function_that_binds_to_vfio() {
    let line = "cd /sys/bus/pci/devices/$FAILSTOP_IGB_PEER && echo vfio-pci > driver_override && \
                echo $FAILSTOP_IGB_PEER > driver/unbind && echo $FAILSTOP_IGB_PEER > /sys/bus/pci/drivers_probe && \
                ls -d /dev/iommu /dev/vfio/devices/* /dev/vfio/$(basename $(readlink iommu_group)) && \
                echo $FAILSTOP_IGB_PEER > driver/unbind && echo > driver_override && \
                echo $FAILSTOP_IGB_PEER > /sys/bus/pci/drivers_probe && basename $(readlink driver)";
    let finished = guest().run(&Run::shell(line)).unwrap();
    let text = finished.text();
    assert!(
        finished.success() && text.contains("/dev/vfio/devices/vfio") && text.contains("igb\n"),
        "{text}"
    );
}

#[test]
fn a_kernel_that_panics_is_reported_with_its_last_words() {
    let guest = boot(Kernel::Small, "two-igb");
    let error = guest
        .run(&Run::shell("echo c > /proc/sysrq-trigger"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the guest is gone") && error.contains("sysrq triggered crash"),
        "{error}"
    );
}

#[test]
fn debians_kernel_loads_its_modules_and_shuts_down() {
    let guest = boot(Kernel::Debian, "igb-kernel-nic");
    assert!(
        guest.greeting().complaints.is_empty(),
        "{:?}",
        guest.greeting().complaints
    );
    let finished = guest
        .run(&Run::shell(
            "basename $(readlink /sys/bus/pci/devices/$FAILSTOP_KERNEL_NIC/driver)",
        ))
        .unwrap();
    assert_eq!(finished.stdout, b"e1000e\n");
    assert!(
        guest
            .shut_down()
            .unwrap()
            .kernel_log
            .kernel_bugs()
            .is_empty()
    );
}

#[test]
fn functions_without_isolation_share_a_group() {
    // The harness itself refuses a machine that is not what its topology says.
    boot(Kernel::Small, "shared-group").shut_down().unwrap();
}

#[test]
fn without_an_iommu_there_are_no_groups() {
    let guest = boot(Kernel::Small, "no-iommu");
    let line =
        "ls /sys/kernel/iommu_groups; cat /sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
    assert_eq!(guest.run(&Run::shell(line)).unwrap().stdout, b"Y\n");
}
