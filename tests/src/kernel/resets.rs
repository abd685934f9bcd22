//! Resets and their proof, and who keeps a function alive.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use failstop_pci::config::{CommandRegister, ConfigSpace};
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::reset::{self, Canary, FunctionStopped, NotProven};
use failstop_pci::sysfs::Sysfs;
use failstop_pci::transport::container::Container;
use failstop_pci::transport::iommufd::Iommufd;
use failstop_pci::transport::vfio::Iommu;
use failstop_pci::transport::{Iova, ResetFailed, ResetMethod, Transport, Unmapped};
use failstop_pci::window::Window;
use libtest_mimic::Failed;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use super::{Pages, bound, open, open_address, opening::bus_master, says};
use crate::fixture::{Outcome, ensure, ensure_eq};

/// Bytes of BAR 0, of both families.
const BAR: u64 = 0x2_0000;

/// The receive ring's base, low half, by the address that both families know (82576 datasheet
/// §8.10.5, 82574 datasheet §10.2.5.8).
const CANARY: Canary = Canary {
    register: 0x2800,
    planted: 0x5a5a_5000,
    reset: 0,
    mask: 0xffff_f000,
};

/// A function that was bus master, and whose canary is planted.
struct Life {
    transport: Arc<dyn Transport>,
    command: CommandRegister,
    window: Arc<Window>,
}

impl Life {
    fn begin(transport: Arc<dyn Transport>) -> Result<Self, Failed> {
        let config = ConfigSpace::new(&*transport);
        let command = CommandRegister::open(&config)?;
        command.memory_space_on(&config)?;
        let window = Window::open(transport.clone(), Generation::LADDER, 0, BAR)?;
        CANARY.plant(&window)?;
        command.bus_master_on(&config)?;
        Ok(Self {
            transport: transport.clone(),
            command,
            window,
        })
    }

    fn reset(&self, method: ResetMethod) -> Result<Result<FunctionStopped, NotProven>, Failed> {
        let config = ConfigSpace::new(&*self.transport);
        let off = self.command.bus_master_off(&config)?;
        let issued = reset::issue(&*self.transport, &off, method)?;
        Ok(reset::verify(
            issued,
            &config,
            &self.command,
            &self.window,
            &CANARY,
            Generation::FIRST,
        ))
    }
}

pub(super) fn a_function_level_reset_is_proven(iommu: Iommu) -> Outcome {
    let life = Life::begin(open(iommu)?)?;
    ensure(life.command.was_master(), || "never bus master".into())?;
    let methods = life.transport.reset_methods();
    ensure_eq(methods.first(), Some(&ResetMethod::Flr), "first method")?;
    let stopped = life.reset(ResetMethod::Flr)??;
    ensure_eq(stopped.method(), Some(ResetMethod::Flr), "method")?;
    ensure(!life.command.was_master(), || "not forgotten".into())
}

pub(super) fn every_method_is_used_and_the_kernels_choice_restored(iommu: Iommu) -> Outcome {
    let sysfs = Sysfs::system();
    let address = bound("igb")?;
    let before = sysfs.reset_method(address)?;
    let life = Life::begin(open_address(address, iommu)?)?;
    for method in life.transport.reset_methods() {
        // A register that a method leaves as it is would make the next one's proof fail.
        let proven = life.reset(method)?;
        ensure(
            matches!(proven, Ok(_) | Err(NotProven::NotReset { .. })),
            || format!("{method}: {proven:?}"),
        )?;
        ensure_eq(&sysfs.reset_method(address)?, &before, "reset_method")?;
        CANARY.plant(&life.window)?;
    }
    let refused = life.transport.reset_by(ResetMethod::AfFlr);
    ensure(
        matches!(refused, Err(ResetFailed::NotOffered { .. })),
        || format!("{refused:?}"),
    )
}

/// An 82574 in QEMU: the PM reset, which the kernel prefers, returns 0.
pub(super) fn c43_a_reset_that_resets_nothing_is_not_proven_and_the_next_is(
    iommu: Iommu,
) -> Outcome {
    let life = Life::begin(open_address(bound("kernel-nic")?, iommu)?)?;
    let methods = life.transport.reset_methods();
    ensure_eq(methods, vec![ResetMethod::Pm, ResetMethod::Bus], "methods")?;
    let nothing = life.reset(ResetMethod::Pm)?;
    ensure(matches!(nothing, Err(NotProven::NotReset { .. })), || {
        format!("{nothing:?}")
    })?;
    let stopped = life.reset(ResetMethod::Bus)??;
    ensure_eq(stopped.method(), Some(ResetMethod::Bus), "method")
}

pub(super) fn c36_a_hot_reset_that_touches_a_sibling_is_refused_by_its_name(
    iommu: Iommu,
) -> Outcome {
    let sibling = bound("sibling")?;
    let transport = open(iommu)?;
    match transport.reset_by(ResetMethod::Hot) {
        Err(error @ ResetFailed::Touches { .. }) => says(&error, &[&sibling.to_string()]),
        other => Err(format!("{other:?}").into()),
    }
}

pub(super) fn functions_that_share_an_address_space_say_so(iommu: Iommu) -> Outcome {
    let sysfs = Sysfs::system();
    let pair = [bound("igb")?, bound("sibling")?];
    let (first, second) = if iommu == Iommu::Iommufd {
        let iommufd = Iommufd::new(&sysfs)?;
        let first = iommufd.open(&sysfs, pair[0], &pair)?;
        ensure(!first.shares_space(), || "alone, and shares".into())?;
        (first, iommufd.open(&sysfs, pair[1], &pair)?)
    } else {
        let container = Container::new(&sysfs)?;
        let first = container.open(&sysfs, pair[0], &pair)?;
        ensure(!first.shares_space(), || "alone, and shares".into())?;
        (first, container.open(&sysfs, pair[1], &pair)?)
    };
    ensure(first.shares_space() && second.shares_space(), || {
        "two, and neither shares".into()
    })?;
    // What one hangs up the other goes on using.
    first.hang_up();
    ensure(!second.shares_space(), || "alone again, and shares".into())?;
    ConfigSpace::new(&*second).command()?;
    second.dma_map(Iova(0x10_0000), Pages::new(1)?.first(1)?)?;
    ensure_eq(
        second.dma_unmap(Iova(0x10_0000), Pages::SIZE),
        Unmapped::Exact,
        "unmap",
    )
}

pub(super) fn only_iommufd_takes_a_function_out_of_its_space(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    transport.dma_map(Iova(0x10_0000), Pages::new(1)?.first(1)?)?;
    let detached = transport.detach_space();
    ensure_eq(
        detached.is_ok(),
        iommu == Iommu::Iommufd,
        "detached from its space",
    )?;
    ensure_eq(
        transport.dma_unmap(Iova(0x10_0000), Pages::SIZE),
        Unmapped::Exact,
        "unmap",
    )
}

pub(super) fn c15_an_unbind_returns_when_the_function_is_hung_up(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let transport = open_address(address, iommu)?;
    let window = Window::open(transport.clone(), Generation::FIRST, 0, BAR)?;
    let interrupts = Interrupts::route(transport.clone(), 1)?;
    let unbind = thread::spawn(move || Sysfs::system().unbind(address, true));
    let request = interrupts.request().ok_or("no request event")?;
    ensure(request.wait(Some(Duration::from_secs(20)))?, || {
        "no request for the device".into()
    })?;
    ensure(!unbind.is_finished(), || "the unbind did not wait".into())?;
    window.detach()?;
    transport.hang_up();
    let end = Instant::now() + Duration::from_secs(20);
    while !unbind.is_finished() {
        ensure(Instant::now() < end, || "the unbind waits on".into())?;
        thread::sleep(Duration::from_millis(10));
    }
    unbind.join().map_err(|_| "the unbind panicked")??;
    // All of this while the transport is still held.
    ensure(ConfigSpace::new(&*transport).command().is_err(), || {
        "an access after hanging up succeeded".into()
    })
}

pub(super) fn c39_a_child_of_fork_does_not_keep_the_function_bus_master(iommu: Iommu) -> Outcome {
    let address = bound("igb")?;
    let life = Life::begin(open_address(address, iommu)?)?;
    ensure_eq(bus_master(address)?, Some(true), "bus mastering while open")?;
    // The child lives until the parent closes its end.
    let (wait, go) = nix::unistd::pipe()?;
    // What it inherited is closed before it says that it is there: the parent may run first.
    let (there, here) = nix::unistd::pipe()?;
    #[expect(unsafe_code, reason = "forks")]
    // SAFETY: the child makes system calls only, and ends.
    let forked = unsafe { fork() }?;
    match forked {
        ForkResult::Child => {
            drop(go);
            let _ = nix::unistd::write(&here, &[1]);
            let _ = nix::unistd::read(&wait, &mut [0]);
            #[expect(unsafe_code, reason = "ends a forked child")]
            // SAFETY: ends the process without running what the harness registered.
            unsafe {
                libc::_exit(0)
            }
        }
        ForkResult::Parent { child } => {
            drop(here);
            let said = nix::unistd::read(&there, &mut [0]);
            drop(life);
            let after = bus_master(address);
            drop(go);
            ensure_eq(said?, 1, "what the child said")?;
            let status = waitpid(child, None)?;
            ensure_eq(status, WaitStatus::Exited(child, 0), "the child's end")?;
            ensure_eq(after?, Some(false), "bus mastering beside a living child")
        }
    }
}
