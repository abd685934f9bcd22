//! What a host does to a machine's functions while they are in use, for real: memory that is unmapped
//! under a device, errors on the bus and hot-unplug made by QEMU, limits, death at any moment.
//!
//! What only the host can do a case asks it for, by a line of its output that begins with [`ASK`].

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::RecoverError;
use failstop::events::DeviceEvent;
use failstop_pci::address::Address;
use failstop_pci::sysfs::Sysfs;
use failstop_pci::transport::Unmapped;
use failstop_pci::transport::vfio::Iommu;
use libtest_mimic::Failed;

use super::departures::{SOON, a_bus_error_is_recovered_from, in_use, pass_frame, say};
use super::opening::bus_master;
use super::{bound, inner};
use crate::fixture::{Outcome, ensure, ensure_eq, self_addressed, send};

/// What stands before what the host is asked to do: a QMP command of `device_del ROLE` or
/// `monitor LINE`.
pub const ASK: &str = "host: ";

/// What the kernel logs from now on.
struct Log(File);

impl Log {
    fn from_now() -> Result<Self, Failed> {
        let mut log = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")?;
        while Self::record(&mut log).is_some() {}
        Ok(Self(log))
    }

    fn record(log: &mut File) -> Option<String> {
        let mut record = vec![0; 8192];
        let len = log.read(&mut record).ok()?;
        Some(String::from_utf8_lossy(&record[..len]).into_owned())
    }

    /// Waits for a record of which `is_it` says so.
    fn wait_for(&mut self, is_it: impl Fn(&str) -> bool) -> Result<String, Failed> {
        let end = Instant::now() + SOON;
        loop {
            match Self::record(&mut self.0) {
                Some(record) if is_it(&record) => return Ok(record),
                Some(_) => {}
                None => {
                    ensure(Instant::now() < end, || {
                        "the kernel logs no such thing".into()
                    })?;
                    thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }
}

/// The IOMMU says which access it stopped, and the driver does not believe the mapping's end: an
/// unmap of ours that finds nothing breaks the device (R2, C5).
pub(super) fn the_iommu_logs_what_an_igb_does_with_a_ring_that_is_unmapped_under_it(
    iommu: Iommu,
) -> Outcome {
    let address = bound("igb")?;
    let (device, mut port) = in_use(address, iommu)?;
    let lines = device.ledger().lines();
    let ring = lines
        .iter()
        .find(|line| line.owner.kind == "SQ")
        .ok_or("no send queue in the ledger")?;
    let mut log = Log::from_now()?;
    let unmapped = device.transport().dma_unmap(ring.iova, ring.len);
    ensure_eq(
        unmapped,
        Unmapped::Exact,
        "the unmap behind the driver's back",
    )?;
    // The device fetches the next descriptor from there.
    send(&mut port, &self_addressed(&device, 60, 1))?;
    let of = &address.to_string()[5..];
    let fault = log.wait_for(|record| {
        record.contains("DMAR:") && record.contains("[DMA Read") && record.contains(of)
    })?;
    let at = format!("fault addr {:#x}", ring.iova.0);
    ensure(fault.contains(&at), || format!("`{at}` is not in {fault}"))?;
    drop(port);
    let broken = device.broken().map(|cause| cause.to_string());
    ensure(
        broken.as_ref().is_some_and(|cause| cause.contains("unmap")),
        || format!("broken: {broken:?}"),
    )?;
    let recovered = device.recover();
    // It is taken out of an address space in which something may be left, where that can be done (R4.6);
    // then only an open finds another (R10).
    let detached = iommu == Iommu::Iommufd;
    match recovered {
        Ok(_) if !detached => {}
        Err(RecoverError::Detached { .. }) if detached => {}
        other => return Err(format!("{other:?}").into()),
    }
    let report = device.close();
    ensure_eq(
        report.totals.quarantined_bytes,
        0,
        "what a stopped function keeps",
    )?;
    ensure_eq(report.left, Vec::new(), "ledger")?;
    let (device, port) = in_use(address, iommu)?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger of the next")
}

/// A real root port's message instead of the kernel's injector (C16).
pub(super) fn c16_an_error_message_of_the_root_port_breaks_the_device_which_is_recovered(
    iommu: Iommu,
) -> Outcome {
    let (device, port) = in_use(bound("igb")?, iommu)?;
    say(&format!(
        "\n{ASK}monitor pcie_aer_inject_error rp1 COMP_TIME"
    ))?;
    a_bus_error_is_recovered_from(device, port)
}

/// A map that fails in life, by the container's limit on mappings: what is live stays, nothing else
/// does (C21, C25).
pub(super) fn c25_a_map_beyond_the_limit_in_life_leaves_nothing_mapped() -> Outcome {
    const LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let address = bound("igb")?;
    let before = fs::read_to_string(LIMIT)?;
    // The port's region and rings; read when the container is opened.
    fs::write(LIMIT, "3")?;
    let opened = in_use(address, Iommu::Container);
    fs::write(LIMIT, before.trim())?;
    let (device, mut port) = opened?;
    let live = device.ledger().totals();
    let pd = device.alloc_pd()?;
    let error = match pd.register(64, 2048) {
        Ok(_) => return Err("a fourth mapping within a limit of three".into()),
        Err(error) => error.to_string(),
    };
    ensure(error.contains("no room for another mapping"), || {
        error.clone()
    })?;
    ensure_eq(
        device.ledger().totals().live_bytes,
        live.live_bytes,
        "live bytes",
    )?;
    ensure_eq(device.ledger().totals().quarantined_bytes, 0, "quarantine")?;
    ensure_eq(device.broken(), None, "broken by a map that failed")?;
    pass_frame(&device, &mut port)?;
    drop((pd, port));
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

/// Killed while it opens, brings up, passes frames (R12): the function is no bus master, and the next
/// user has it.
pub(super) fn a_process_that_is_killed_at_any_moment_leaves_bus_mastering_off(
    iommu: Iommu,
) -> Outcome {
    let address = bound("igb")?;
    for delay in [0, 5, 20, 60, 150, 300, 600, 1200] {
        let mut child = inner::command("live", iommu)?
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        thread::sleep(Duration::from_millis(delay));
        child.kill()?;
        child.wait()?;
        ensure_eq(
            bus_master(address)?,
            Some(false),
            &format!("bus mastering after a death at {delay} ms"),
        )?;
    }
    let (device, port) = in_use(address, iommu)?;
    drop(port);
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

/// The administrator presses the slot's button under traffic (C15). Last of its machine, since the
/// function is gone then.
pub(super) fn c15_a_function_that_is_hot_unplugged_in_traffic_is_let_go() -> Outcome {
    let address = bound("igb-peer")?;
    let (device, mut port) = in_use(address, Iommu::Container)?;
    say(&format!("\n{ASK}device_del igb-peer"))?;
    let end = Instant::now() + SOON;
    loop {
        match device.events().next(Duration::ZERO)? {
            Some(DeviceEvent::Removed) => break,
            Some(_) => {}
            // Frames until it is taken away.
            None if device.broken().is_none() => {
                let _ = pass_frame(&device, &mut port);
            }
            None => thread::sleep(Duration::from_millis(10)),
        }
        ensure(Instant::now() < end, || "it is not removed".into())?;
    }
    drop(port);
    let report = device.close();
    ensure_eq(report.left, Vec::new(), "ledger")?;
    ensure_eq(report.completions.outstanding(), 0, "outstanding requests")?;
    has_left(address, end)
}

fn has_left(address: Address, end: Instant) -> Outcome {
    while Sysfs::system().function(address).is_ok() {
        ensure(Instant::now() < end, || {
            "the slot keeps its function".into()
        })?;
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
