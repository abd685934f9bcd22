//! Parts of cases that run in a process of their own: as an ordinary user, or to be killed.
//!
//! Root starts the program again with a variable that names one; [`run`] then does that part
//! instead of the suite. Privileges are dropped there, where no other thread has any.

use std::env;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use failstop::queues::lifecycle::Cause;
use failstop_pci::address::Address;
use failstop_pci::memlock::Memlock;
use failstop_pci::sysfs::{BindError, Sysfs};
use failstop_pci::transport::container::Container;
use failstop_pci::transport::iommufd::Iommufd;
use failstop_pci::transport::vfio::{Iommu, OpenError};
use failstop_pci::transport::{Iova, MapError, Unmapped};
use libtest_mimic::Failed;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Uid, setuid};

use super::{Pages, departures, open_address, role, says};
use crate::fixture::{Outcome, ensure, ensure_eq};

/// The variable that names a part.
const PART: &str = "FAILSTOP_PART";

/// The ordinary user.
pub(super) const USER: u32 = 1000;

/// A part: takes the function and the IOMMU interface.
type Part = fn(Address, Iommu) -> Outcome;

const PARTS: [(&str, Part); 8] = [
    ("memlock", memlock),
    ("sunken", sunken),
    ("permission", permission),
    ("passed", passed),
    ("bind", bind),
    ("live", departures::live),
    ("fork", departures::live_beside_a_child),
    ("second", departures::open_second),
];

/// Runs the part that the environment names, if it names one.
#[must_use]
pub fn run() -> Option<ExitCode> {
    let wanted = env::var(PART).ok()?;
    let outcome = || -> Outcome {
        let (name, iommu) = wanted.split_once(' ').ok_or("no interface named")?;
        let iommu = match iommu {
            "iommufd" => Iommu::Iommufd,
            _ => Iommu::Container,
        };
        let mut parts = PARTS.iter();
        let (_, part) = parts
            .find(|(known, _)| *known == name)
            .ok_or("no such part")?;
        part(role("igb")?, iommu)
    };
    Some(match outcome() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("{}", failed.message().unwrap_or("failed"));
            ExitCode::FAILURE
        }
    })
}

/// Starts this program again for one part, and fails as it does.
pub(super) fn part(name: &str, iommu: Iommu) -> Outcome {
    let output = command(name, iommu)?.output()?;
    ensure(output.status.success(), || {
        String::from_utf8_lossy(&output.stderr).into_owned()
    })
}

/// This program, to be started again for one part.
pub(super) fn command(name: &str, iommu: Iommu) -> Result<Command, Failed> {
    let interface = match iommu {
        Iommu::Iommufd => "iommufd",
        _ => "container",
    };
    let mut command = Command::new(env::current_exe()?);
    command.env(PART, format!("{name} {interface}"));
    Ok(command)
}

/// The files that an opening of `address` through `iommu` takes, the group's or device's last.
pub(super) fn files(address: Address, iommu: Iommu) -> Result<Vec<PathBuf>, Failed> {
    let sysfs = Sysfs::system();
    if iommu == Iommu::Iommufd {
        let device = sysfs.cdev_path(address).ok_or("no character device")?;
        return Ok(vec![sysfs.iommufd_path(), device]);
    }
    let group = sysfs.function(address)?.group.ok_or("no group")?;
    Ok(vec![sysfs.container_path(), sysfs.group_path(group.number)])
}

fn drop_privileges() -> Outcome {
    Ok(setuid(Uid::from_raw(USER))?)
}

/// C21: a limit of 256 KiB, 1 MiB wanted.
fn memlock(address: Address, iommu: Iommu) -> Outcome {
    const LIMIT: u64 = 256 << 10;
    const WANTED: u64 = 1 << 20;
    setrlimit(Resource::RLIMIT_MEMLOCK, LIMIT, LIMIT)?;
    drop_privileges()?;
    let transport = open_address(address, iommu)?;
    let error = match Memlock::read()?.check(WANTED) {
        Err(error) => error,
        Ok(()) => return Err("the limit was not seen".into()),
    };
    ensure_eq(
        (error.needed, error.limit),
        (WANTED, LIMIT),
        "needed and limit",
    )?;
    says(&error, &["1048576", "262144", "ulimit -l"])?;
    // The kernel means it, and leaves nothing mapped.
    let pages = Pages::new(256)?;
    let refused = transport.dma_map(Iova(0x10_0000), pages.first(256)?);
    ensure(matches!(refused, Err(MapError::Locked { .. })), || {
        format!("{refused:?}")
    })?;
    ensure_eq(
        transport.dma_unmap(Iova(0x10_0000), WANTED),
        Unmapped::Absent,
        "unmap of what was refused",
    )?;
    // What fits is mapped.
    Memlock::read()?.check(4 * Pages::SIZE)?;
    transport.dma_map(Iova(0x10_0000), pages.first(4)?)?;
    Ok(())
}

/// C21: the limit sinks to what is in use, under a port. More is refused, by us and by the kernel, and
/// nothing else changes: frames pass, and a recovery maps what was mapped before.
fn sunken(address: Address, iommu: Iommu) -> Outcome {
    const AMPLE: u64 = 64 << 20;
    /// Room for what the kernel counts beside our mappings.
    const SLACK: u64 = 64 << 10;
    setrlimit(Resource::RLIMIT_MEMLOCK, AMPLE, AMPLE)?;
    drop_privileges()?;
    let (device, mut port) = departures::in_use(address, iommu)?;
    let live = device.ledger().totals().live_bytes;
    let limit = live + SLACK;
    setrlimit(Resource::RLIMIT_MEMLOCK, limit, limit)?;
    let pd = device.alloc_pd()?;
    match pd.register(1024, 2048) {
        Ok(_) => return Err("2 MiB more were locked".into()),
        Err(error) => says(&error, &["ulimit -l"])?,
    }
    ensure_eq(
        device.ledger().totals().live_bytes,
        live,
        "live bytes after what was refused",
    )?;
    departures::pass_frame(&device, &mut port)?;
    device.break_now(Cause::User);
    device.recover()?;
    ensure(device.wait_link(Duration::from_secs(5)).up, || {
        "no link after the recovery".into()
    })?;
    departures::pass_frame(&device, &mut port)?;
    drop((pd, port));
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

fn permission(address: Address, iommu: Iommu) -> Outcome {
    let refused = files(address, iommu)?.pop().ok_or("no files")?;
    drop_privileges()?;
    match open_address(address, iommu) {
        Err(error @ OpenError::Permission { .. }) => {
            says(&error, &[&refused.display().to_string(), "chown"])
        }
        other => Err(format!("{other:?}").into()),
    }
}

/// Root opens the files, the ordinary user uses them.
fn passed(address: Address, iommu: Iommu) -> Outcome {
    let open = |path: &PathBuf| -> Result<OwnedFd, Failed> {
        Ok(fs::File::options()
            .read(true)
            .write(true)
            .open(path)?
            .into())
    };
    let descriptors: Vec<OwnedFd> = files(address, iommu)?
        .iter()
        .map(open)
        .collect::<Result<_, _>>()?;
    let [space, function] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| "not two files")?;
    drop_privileges()?;
    let sysfs = Sysfs::system();
    let transport = if iommu == Iommu::Iommufd {
        Iommufd::from_fd(space)?.open_passed(&sysfs, address, &[], function)?
    } else {
        Container::from_fd(space)?.open_passed(&sysfs, address, &[], function)?
    };
    transport.dma_map(Iova(0x10_0000), Pages::new(1)?.first(1)?)?;
    ensure_eq(
        transport.dma_unmap(Iova(0x10_0000), Pages::SIZE),
        Unmapped::Exact,
        "unmap",
    )
}

fn bind(address: Address, _: Iommu) -> Outcome {
    drop_privileges()?;
    match Sysfs::system().bind(address, false) {
        Err(error @ BindError::Permission { .. }) => says(&error, &["driver_override", "root"]),
        other => Err(format!("{other:?}").into()),
    }
}
