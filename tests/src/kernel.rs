//! What kernel VFIO itself must do under our transports: cases for guests, beside the suite's.
//!
//! A case names the machine that it needs (a topology of `cargo xtask vm`) and runs as root there:
//! it binds functions, and where it needs an ordinary user it starts itself again as one.

use std::env;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use failstop_pci::address::Address;
use failstop_pci::sysfs::Sysfs;
use failstop_pci::transport::vfio::{self, Iommu, OpenError};
use failstop_pci::transport::{DmaMemory, Transport};
use libtest_mimic::{Failed, Trial};
use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fixture::Outcome;

pub mod inner;

mod binding;
mod departures;
mod groups;
mod limits;
mod mappings;
mod opening;
pub mod outside;
mod resets;

/// A machine that cases need, by its topology.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Machine {
    /// `two-igb`: two 82576, each in a group of its own.
    TwoIgb,
    /// `aw39`: the same behind an IOMMU with 39 address bits.
    Narrow,
    /// `no-iommu`: the same without an IOMMU.
    NoIommu,
    /// `shared-group`: an 82576 and an 82574 in one group, and an 82576 in another.
    SharedGroup,
    /// `igb-kernel-nic`: an 82576, and an 82574 behind a port of its own.
    KernelNic,
    /// `two-igb` with [`Machine::words`] that turn interrupt remapping off.
    NoRemapping,
    /// `two-igb` once more, whose host does what it should not; its kernel may log IOMMU faults.
    BadHost,
    /// Whatever machine has the function that `FAILSTOP_IGB` names, where `FAILSTOP_TOPOLOGY` is
    /// `hardware`; and `two-igb` taken for one.
    Hardware,
}

impl Machine {
    /// The topology's name.
    #[must_use]
    pub const fn topology(self) -> &'static str {
        match self {
            Self::TwoIgb | Self::NoRemapping | Self::BadHost | Self::Hardware => "two-igb",
            Self::Narrow => "aw39",
            Self::NoIommu => "no-iommu",
            Self::SharedGroup => "shared-group",
            Self::KernelNic => "igb-kernel-nic",
        }
    }

    /// A word for the kernel's command line that the machine needs.
    #[must_use]
    pub const fn words(self) -> Option<&'static str> {
        match self {
            Self::NoRemapping => Some("intremap=off"),
            // No kernel knows it.
            Self::BadHost => Some("failstop.bad_host"),
            Self::Hardware => Some("failstop.hardware"),
            _ => None,
        }
    }

    /// Whether this process runs on one: `FAILSTOP_TOPOLOGY` and the kernel's command line say so.
    #[must_use]
    pub fn is_here(self) -> bool {
        let topology = env::var("FAILSTOP_TOPOLOGY");
        if topology.as_deref() == Ok("hardware") {
            return self == Self::Hardware;
        }
        let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
        let has = |machine: Self| {
            let mut words = command_line.split_whitespace();
            words.any(|word| Some(word) == machine.words())
        };
        topology.is_ok_and(|name| name == self.topology())
            && [Self::NoRemapping, Self::BadHost, Self::Hardware]
                .iter()
                .all(|machine| has(*machine) == (self == *machine))
    }
}

/// How a case is run.
#[derive(Clone, Copy)]
pub enum Run {
    /// Once.
    Once(fn() -> Outcome),
    /// Once for each of the kernel's IOMMU interfaces; skipped for one that it lacks.
    Each(fn(Iommu) -> Outcome),
    /// Once, on a kernel without iommufd.
    WithoutIommufd(fn() -> Outcome),
    /// Once, on a kernel with the no-IOMMU mode.
    WithNoIommuMode(fn() -> Outcome),
}

/// What a guest's kernel has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// iommufd, and character devices for VFIO.
    pub iommufd: bool,
    /// The no-IOMMU mode.
    pub noiommu_mode: bool,
}

impl Abilities {
    /// Those of our own small guest kernel.
    pub const SMALL: Self = Self {
        iommufd: true,
        noiommu_mode: true,
    };
    /// Those of Debian's kernels.
    pub const DEBIAN: Self = Self {
        iommufd: false,
        noiommu_mode: false,
    };

    /// Those of the kernel that this runs on.
    #[must_use]
    pub fn here() -> Self {
        Self {
            iommufd: Sysfs::system().iommufd_path().exists(),
            noiommu_mode: Path::new(NOIOMMU_MODE).exists(),
        }
    }
}

/// One behaviour that must hold.
#[derive(Clone, Copy)]
pub struct KernelCase {
    /// What it says, as a test's name.
    pub name: &'static str,
    /// The machine that it needs.
    pub machine: Machine,
    /// Tries it.
    pub run: Run,
}

/// A case as one test: its name, whether a kernel can run it, and the test.
struct Variant {
    name: String,
    applies: bool,
    run: Box<dyn FnOnce() -> Outcome + Send>,
}

impl KernelCase {
    /// The names of its tests on a kernel that can do this, without those that it cannot run.
    #[must_use]
    pub fn names(&self, kernel: Abilities) -> Vec<String> {
        let variants = self.variants(kernel).into_iter();
        variants
            .filter(|variant| variant.applies)
            .map(|variant| variant.name)
            .collect()
    }

    /// The case as tests of this kernel: those that it cannot run are ignored, never passed.
    #[must_use]
    pub fn trials(&self) -> Vec<Trial> {
        let machine = self.machine;
        let variants = self.variants(Abilities::here()).into_iter();
        variants
            .map(|variant| {
                let run = move || {
                    let outcome = (variant.run)();
                    // The next case finds the machine as this one did.
                    if machine != Machine::NoIommu {
                        bound("igb")?;
                    }
                    outcome
                };
                Trial::test(variant.name, run).with_ignored_flag(!variant.applies)
            })
            .collect()
    }

    fn variants(&self, kernel: Abilities) -> Vec<Variant> {
        let once = |run: fn() -> Outcome, applies| {
            vec![Variant {
                name: self.name.to_owned(),
                applies,
                run: Box::new(run),
            }]
        };
        let through = |run: fn(Iommu) -> Outcome, name, iommu, applies| Variant {
            name: format!("{name}::{}", self.name),
            applies,
            run: Box::new(move || run(iommu)),
        };
        match self.run {
            Run::Once(run) => once(run, true),
            Run::WithoutIommufd(run) => once(run, !kernel.iommufd),
            Run::WithNoIommuMode(run) => once(run, kernel.noiommu_mode),
            Run::Each(run) => vec![
                through(run, "container", Iommu::Container, true),
                through(run, "iommufd", Iommu::Iommufd, kernel.iommufd),
            ],
        }
    }
}

/// The switch of the kernel's no-IOMMU mode.
const NOIOMMU_MODE: &str = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

macro_rules! cases {
    ($($machine:ident $run:ident: $module:ident { $($name:ident),+ $(,)? })+) => {
        &[$($(KernelCase {
            name: stringify!($name),
            machine: Machine::$machine,
            run: Run::$run($module::$name),
        }),+),+]
    };
}

/// Every case.
pub const CASES: &[KernelCase] = cases! {
    TwoIgb Each: opening {
        regions_and_interrupts_are_described,
        configuration_space_is_that_of_an_82576,
        strength_is_enforcing_behind_an_iommu,
        reset_returns_success_and_clears_the_command_register,
        interrupts_are_routed_and_disabled_again,
        an_ended_generation_reaches_no_register,
        a_function_that_is_open_is_named_busy,
        bus_mastering_is_off_after_the_last_close,
        a_kernel_driver_in_the_way_is_named,
    }
    TwoIgb Once: opening {
        auto_takes_iommufd_where_there_is_one,
    }
    TwoIgb WithoutIommufd: opening {
        a_kernel_without_iommufd_says_so,
    }
    TwoIgb Each: mappings {
        a_mapping_is_unmapped_exactly,
        nothing_mapped_is_absent,
        c6_unmap_of_a_part_is_not_success,
        c6_unmap_of_more_than_was_mapped_is_not_exact,
        c6_map_over_an_existing_mapping_is_an_error,
        c25_entries_left_are_counted,
    }
    Narrow Each: mappings {
        c22_usable_iovas_end_at_39_bits,
        c22_the_last_usable_page_can_be_mapped,
    }
    TwoIgb Each: limits {
        c21_an_ordinary_user_is_told_the_limit,
        c21_a_limit_that_sinks_in_life_leaves_the_device_as_it_was,
        no_permission_names_the_file,
        descriptors_are_used_after_privileges_are_dropped,
    }
    TwoIgb Once: binding {
        a_function_is_bound_and_given_back,
        an_interface_with_an_address_is_not_taken_away,
        an_open_function_is_not_given_back,
        an_ordinary_user_cannot_bind,
    }
    NoIommu Once: binding {
        without_an_iommu_nothing_is_bound,
    }
    NoIommu WithNoIommuMode: binding {
        noiommu_mode_is_recognised_and_refused,
    }
    NoRemapping Each: opening {
        without_interrupt_remapping_the_switch_is_named,
    }
    SharedGroup Each: groups {
        c23_the_sibling_and_its_driver_are_named,
        c37_a_foreign_bus_master_is_refused_by_name,
        functions_of_one_group_share_an_address_space,
        r3_a_function_that_is_hung_up_has_left_its_address_space,
    }
    TwoIgb Each: resets {
        a_function_level_reset_is_proven,
        every_method_is_used_and_the_kernels_choice_restored,
        only_iommufd_takes_a_function_out_of_its_space,
        c15_an_unbind_returns_when_the_function_is_hung_up,
        c39_a_child_of_fork_does_not_keep_the_function_bus_master,
    }
    TwoIgb Each: departures {
        c15_an_unbind_of_a_port_in_use_returns,
        c16_an_error_on_the_bus_breaks_the_device_which_is_recovered,
        a_process_that_is_killed_leaves_bus_mastering_off,
        c39_a_child_of_fork_does_not_keep_a_killed_parents_device,
        another_process_is_told_that_the_function_is_in_use,
    }
    BadHost Each: outside {
        the_iommu_logs_what_an_igb_does_with_a_ring_that_is_unmapped_under_it,
        c16_an_error_message_of_the_root_port_breaks_the_device_which_is_recovered,
        a_process_that_is_killed_at_any_moment_leaves_bus_mastering_off,
    }
    Hardware Each: departures {
        c15_an_unbind_of_a_port_in_use_returns,
        a_process_that_is_killed_leaves_bus_mastering_off,
        another_process_is_told_that_the_function_is_in_use,
    }
    Hardware Each: outside {
        a_process_that_is_killed_at_any_moment_leaves_bus_mastering_off,
    }
    BadHost Once: outside {
        c25_a_map_beyond_the_limit_in_life_leaves_nothing_mapped,
        c15_a_function_that_is_hot_unplugged_in_traffic_is_let_go,
    }
    KernelNic Each: resets {
        c43_a_reset_that_resets_nothing_is_not_proven_and_the_next_is,
    }
    SharedGroup Each: resets {
        c36_a_hot_reset_that_touches_a_sibling_is_refused_by_its_name,
        functions_that_share_an_address_space_say_so,
    }
    SharedGroup Once: groups {
        a_second_container_for_one_group_is_named_busy,
    }
};

/// The function that has this role in the machine (`igb`, `igb-peer`, `sibling`).
///
/// # Errors
///
/// When the environment names none.
pub fn role(name: &str) -> Result<Address, Failed> {
    let variable = format!("FAILSTOP_{}", name.to_uppercase().replace('-', "_"));
    let text = env::var(&variable).map_err(|_| format!("{variable} names no function"))?;
    Ok(text.parse()?)
}

/// Binds the function of that role to vfio-pci, whatever has it.
fn bound(name: &str) -> Result<Address, Failed> {
    let address = role(name)?;
    Sysfs::system().bind(address, true)?;
    Ok(address)
}

/// Binds and opens the machine's 82576.
fn open(iommu: Iommu) -> Result<Arc<dyn Transport>, Failed> {
    Ok(open_address(bound("igb")?, iommu)?)
}

fn open_address(address: Address, iommu: Iommu) -> Result<Arc<dyn Transport>, OpenError> {
    vfio::open(&Sysfs::system(), address, iommu, &[])
}

/// Fails the case unless the error's text has every one of `parts` in it.
fn says(error: &dyn std::error::Error, parts: &[&str]) -> Outcome {
    let text = error.to_string();
    match parts.iter().find(|part| !text.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(format!("`{text}` does not say `{part}`").into()),
    }
}

/// Memory that a case maps for DMA. It stays for the rest of the process, mapped or not.
struct Pages {
    file: std::os::fd::OwnedFd,
    map: MmapRaw,
}

impl Pages {
    const SIZE: u64 = 4096;

    fn new(count: usize) -> Result<&'static Self, Failed> {
        let file = memfd_create(c"pages", MFdFlags::MFD_CLOEXEC)?;
        let len = count * usize::try_from(Self::SIZE)?;
        nix::unistd::ftruncate(&file, i64::try_from(len)?)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        Ok(Box::leak(Box::new(Self { file, map })))
    }

    /// All of it, or its first `count` pages.
    #[expect(
        unsafe_code,
        reason = "vouches for the life of memory that is never freed"
    )]
    fn first(&'static self, count: u64) -> Result<DmaMemory<'static>, Failed> {
        let addr = NonNull::new(self.map.as_mut_ptr()).ok_or("mapped at zero")?;
        let len = count * Self::SIZE;
        assert!(len <= self.map.len() as u64, "more pages than there are");
        // SAFETY: the mapping is leaked, so it outlives every use by the device, and nobody reads
        // what is in it.
        Ok(unsafe { DmaMemory::new(addr, len, self.file.as_fd(), 0) })
    }
}
