//! What ends a device from outside: an unbind (C15), an error on the bus (C16), the death of its
//! process (R12, C39).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{Device, Options};
use failstop::events::DeviceEvent;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop_pci::address::Address;
use failstop_pci::sysfs::Sysfs;
use failstop_pci::transport::vfio::{Iommu, OpenError};
use libtest_mimic::Failed;
use nix::unistd::{ForkResult, fork};

use super::opening::bus_master;
use super::{bound, inner, open_address, says};
use crate::fixture::{Outcome, ensure, ensure_eq, receive, self_addressed, send};

/// How long a kernel under emulation may take.
pub(super) const SOON: Duration = Duration::from_secs(30);
/// How soon a function whose last reference is gone must be no bus master any more.
const AT_ONCE: Duration = Duration::from_secs(1);

/// A device in loopback, and a port of it through which a frame passed.
pub(super) fn in_use(address: Address, iommu: Iommu) -> Result<(Device, Port), Failed> {
    let config = Config {
        loopback: true,
        ..Config::default()
    };
    let transport = open_address(address, iommu)?;
    let device = Device::open_with(transport, &config, Options::default())?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    pass_frame(&device, &mut port)?;
    Ok((device, port))
}

pub(super) fn pass_frame(device: &Device, port: &mut Port) -> Outcome {
    let bytes = self_addressed(device, 60, 1);
    send(port, &bytes)?;
    ensure_eq(receive(port)?, bytes, "the frame")
}

pub(super) fn next(device: &Device) -> Result<DeviceEvent, Failed> {
    let event = device.events().next(SOON)?;
    event.ok_or_else(|| "nothing happened".into())
}

pub(super) fn c15_an_unbind_of_a_port_in_use_returns(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let (device, mut port) = in_use(address, iommu)?;
    let unbind = thread::spawn(move || Sysfs::system().unbind(address, true));
    ensure_eq(next(&device)?, DeviceEvent::RemovalRequested, "first event")?;
    while next(&device)? != DeviceEvent::Removed {}
    let end = Instant::now() + SOON;
    while !unbind.is_finished() {
        ensure(Instant::now() < end, || "the unbind waits on".into())?;
        thread::sleep(Duration::from_millis(10));
    }
    unbind.join().map_err(|_| "the unbind panicked")??;
    // All of this while the port is held, which goes on without a device.
    let mut frames = port.take_frames(4).ok_or("no frames")?;
    ensure_eq(port.tx_burst(&mut frames), 0, "frames sent after it")?;
    drop((frames, port));
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger")?;
    ensure_eq(report.completions.outstanding(), 0, "outstanding requests")
}

/// `struct aer_error_inj` of drivers/pci/pcie/aer_inject.c: a completion timeout, which is not fatal
/// (PCIe base specification 6.0, §7.8.4.2).
fn inject_error(address: Address) -> Outcome {
    const COMPLETION_TIMEOUT: u32 = 1 << 14;
    let text = address.to_string();
    let number = |text: &str| u32::from_str_radix(text, 16);
    let mut parts = text.split([':', '.']);
    let mut part = || parts.next().ok_or("no address");
    let (domain, bus) = (number(part()?)?, number(part()?)?);
    let (device, function) = (number(part()?)?, number(part()?)?);
    let mut bytes = vec![bus as u8, device as u8, function as u8, 0];
    for word in [COMPLETION_TIMEOUT, 0, 0, 0, 0, 0, domain] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    Ok(fs::write("/dev/aer_inject", bytes)?)
}

pub(super) fn c16_an_error_on_the_bus_breaks_the_device_which_is_recovered(
    iommu: Iommu,
) -> Outcome {
    let address = bound("igb")?;
    let (device, port) = in_use(address, iommu)?;
    inject_error(address)?;
    a_bus_error_is_recovered_from(device, port)
}

/// The device breaks by an error on the bus that is on its way, and is recovered under its port.
pub(super) fn a_bus_error_is_recovered_from(device: Device, mut port: Port) -> Outcome {
    match next(&device)? {
        DeviceEvent::Broken {
            cause: Cause::BusError,
            ..
        } => {}
        other => return Err(format!("{other:?}").into()),
    }
    device.recover()?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    pass_frame(&device, &mut port)?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

/// What a part says when it has the device.
const LIVE: &str = "live";

pub(super) fn say(word: &str) -> Outcome {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{word}")?;
    Ok(stdout.flush()?)
}

/// A part: drives the device until it is killed.
pub(super) fn live(address: Address, iommu: Iommu) -> Outcome {
    let (device, mut port) = in_use(address, iommu)?;
    say(LIVE)?;
    loop {
        pass_frame(&device, &mut port)?;
    }
}

/// A part: the same, with a child of fork, which ends when our standard input does.
pub(super) fn live_beside_a_child(address: Address, iommu: Iommu) -> Outcome {
    let (device, mut port) = in_use(address, iommu)?;
    #[expect(unsafe_code, reason = "forks")]
    // SAFETY: the child makes system calls only, and ends.
    let forked = unsafe { fork() }?;
    if let ForkResult::Child = forked {
        let _ = nix::unistd::read(std::io::stdin(), &mut [0]);
        #[expect(unsafe_code, reason = "ends a forked child")]
        // SAFETY: ends the process without running what the harness registered.
        unsafe {
            libc::_exit(0)
        }
    }
    // The fork took nothing from us.
    pass_frame(&device, &mut port)?;
    say(LIVE)?;
    loop {
        pass_frame(&device, &mut port)?;
    }
}

/// A part: opens what its parent has open.
pub(super) fn open_second(address: Address, iommu: Iommu) -> Outcome {
    match open_address(address, iommu) {
        Err(error @ OpenError::Busy { .. }) => says(&error, &[&address.to_string(), "in use"]),
        other => Err(format!("{other:?}").into()),
    }
}

/// Starts a part that has the device; its standard input is held open.
fn start(name: &str, iommu: Iommu) -> Result<(Child, ChildStdin), Failed> {
    let mut child = inner::command(name, iommu)?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdin = child.stdin.take().ok_or("no standard input")?;
    let stdout = child.stdout.take().ok_or("no standard output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line.trim() != LIVE {
        child.kill()?;
        child.wait()?;
        return Err(format!("the process says `{line}`").into());
    }
    Ok((child, stdin))
}

/// Kills the process that drives the function, and makes sure that it is no bus master at once.
fn kill(mut child: Child, address: Address) -> Outcome {
    ensure_eq(bus_master(address)?, Some(true), "bus mastering in traffic")?;
    child.kill()?;
    let killed = Instant::now();
    while bus_master(address)? != Some(false) {
        ensure(killed.elapsed() < AT_ONCE, || {
            "bus mastering stays on after SIGKILL".into()
        })?;
        thread::sleep(Duration::from_millis(5));
    }
    child.wait()?;
    Ok(())
}

pub(super) fn a_process_that_is_killed_leaves_bus_mastering_off(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let (child, stdin) = start("live", iommu)?;
    kill(child, address)?;
    drop(stdin);
    let (device, port) = in_use(address, iommu)?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

pub(super) fn c39_a_child_of_fork_does_not_keep_a_killed_parents_device(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let (child, stdin) = start("fork", iommu)?;
    kill(child, address)?;
    // Until here the grandchild read from this.
    drop(stdin);
    Ok(())
}

pub(super) fn another_process_is_told_that_the_function_is_in_use(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let (device, port) = in_use(address, iommu)?;
    inner::part("second", iommu)?;
    ensure_eq(device.broken(), None, "broken by another's attempt")?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger")
}
