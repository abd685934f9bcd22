use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::super::{AddressSpace, Opened};
use super::*;
use crate::address::Address;
use crate::config::{CommandError, CommandRegister, ConfigSpace};
use crate::sysfs::Sysfs;
use crate::testing::{Counting, allocated};
use crate::transport::{DmaLimits, DmaMemory, Iova, Kind, Transport};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Where ATS Control is in `with_ats`.
const ATS_CONTROL: u16 = 0x106;

/// A function whose descriptor is an ordinary file: a page of BAR 0, then config space, which
/// has a PCIe capability and ATS in this state.
fn with_ats(control: u16) -> Function {
    let mut config = vec![0u8; EXTENDED_SIZE];
    config[..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
    config[4] = 0x02; // Memory Space Enable.
    config[6] = 0x10;
    config[0x34] = 0x40;
    config[0x40] = 0x10;
    config[0x100..0x104].copy_from_slice(&[0x0f, 0, 1, 0]);
    config[0x106..0x108].copy_from_slice(&control.to_le_bytes());
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&config, page_size()).unwrap();
    let region = |size, mappable, file_offset| PlacedRegion {
        region: Region {
            size,
            readable: true,
            writable: true,
            mappable,
        },
        file_offset,
    };
    let page = page_size();
    let mut regions = vec![region(page, vec![(0, page)], 0)];
    regions.resize(7, region(0, Vec::new(), 0));
    regions.push(region(EXTENDED_SIZE as u64, Vec::new(), page));
    let mut function = Function {
        id: DeviceId::fresh(),
        name: "0000:01:00.0".to_owned(),
        file: Descriptor::new(file.into()).unwrap(),
        regions,
        irqs: [0, 1, 10, 1, 1],
        can_reset: false,
        ats: None,
        shown_reset: ResetMethod::Flr,
        gate: Gate::default(),
    };
    let ats = function.capabilities().unwrap().ats;
    function.ats = ats.map(|ats| (ats.control(), ats.enabled));
    function
}

fn set_ats(function: &Function, control: u16) {
    let bytes = control.to_le_bytes();
    function
        .write(
            Generation::FIRST,
            RegionIndex::Config,
            ATS_CONTROL.into(),
            &bytes,
        )
        .unwrap();
}

#[test]
fn c44_ats_that_is_off_leaves_the_iommu_enforcing() {
    assert_eq!(with_ats(0).strength(), Strength::Enforcing);
}

#[test]
fn c44_ats_that_was_on_when_attached_revokes_nothing() {
    let function = with_ats(0x8000);
    assert_eq!(function.strength(), Strength::None);
    // Translations may have been taken while it was on.
    set_ats(&function, 0);
    assert_eq!(function.strength(), Strength::None);
}

/// Strength is computed, not assumed (R1).
#[test]
fn c44_ats_that_was_turned_on_since_is_seen() {
    let function = with_ats(0);
    set_ats(&function, 0x8000);
    assert_eq!(function.strength(), Strength::None);
}

#[test]
fn c44_no_answer_is_no_proof_that_ats_is_off() {
    let function = with_ats(0);
    set_ats(&function, 0xffff);
    assert_eq!(function.strength(), Strength::None);
}

#[test]
fn c32_a_function_that_reads_zero_is_no_proof_that_ats_is_off() {
    let function = with_ats(0);
    let gone = [0; 2];
    let at = offset::COMMAND.into();
    function
        .write(Generation::FIRST, RegionIndex::Config, at, &gone)
        .unwrap();
    assert_eq!(function.strength(), Strength::None);
}

#[test]
fn access_beyond_a_region_is_refused() {
    let function = with_ats(0);
    let mut word = [0; 4];
    for offset in [page_size() - 2, page_size(), u64::MAX - 1] {
        let result = function.read(Generation::FIRST, RegionIndex::Bar(0), offset, &mut word);
        assert!(
            matches!(result, Err(AccessError::Failed { .. })),
            "{offset:#x}"
        );
    }
    let absent = function.read(Generation::FIRST, RegionIndex::Bar(9), 0, &mut word);
    assert!(matches!(absent, Err(AccessError::Failed { .. })));
}

#[test]
fn config_space_outlives_the_generation() {
    let function = with_ats(0);
    function.expire(Generation::FIRST);
    let mut word = [0; 4];
    let first = Generation::FIRST;
    let register = function.read(first, RegionIndex::Bar(0), 0, &mut word);
    assert!(matches!(register, Err(AccessError::Expired { .. })));
    assert!(
        function
            .read(first, RegionIndex::Config, 0, &mut word)
            .is_ok()
    );
}

#[test]
fn only_the_mappable_part_has_a_file() {
    let function = with_ats(0);
    assert!(function.region_file(RegionIndex::Bar(0), 0).is_ok());
    assert!(function.region_file(RegionIndex::Bar(0), 1).is_err());
    assert!(
        function
            .region_file(RegionIndex::Bar(0), page_size())
            .is_err()
    );
    assert!(function.region_file(RegionIndex::Config, 0).is_err());
}

#[test]
fn vectors_that_there_are_not_are_refused_before_the_kernel() {
    let function = with_ats(0);
    let file = tempfile::tempfile().unwrap();
    let result = function.set_irqs(IrqIndex::Msix, 10, &[file.as_fd()]);
    assert_eq!(
        result.unwrap_err().source.raw_os_error(),
        Some(Errno::EINVAL as i32)
    );
}

#[test]
fn function_without_reset_says_so() {
    let error = with_ats(0).reset().unwrap_err();
    let ResetFailed::Failed { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(source.raw_os_error(), Some(Errno::EINVAL as i32));
}

/// An address space in which nothing is mapped, and what it says of its end.
#[derive(Debug, Default)]
struct Unasked {
    shared: bool,
    detaches: bool,
    left: bool,
}

impl AddressSpace for Unasked {
    const KIND: Kind = Kind::Container;

    fn limits(&self) -> io::Result<DmaLimits> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn map(&self, _: Iova, _: DmaMemory<'_>) -> Result<(), Errno> {
        Err(Errno::ENOTTY)
    }

    fn unmap(&self, _: Iova, _: u64) -> Result<u64, Errno> {
        Err(Errno::ENOTTY)
    }

    fn is_shared(&self) -> bool {
        self.shared
    }

    fn group(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn detach(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        match self.detaches {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn hang_up(&self) -> bool {
        self.left
    }
}

/// The transport that the ladder has of a function opened through the kernel.
fn opened() -> Opened<Unasked> {
    within(Unasked::default(), 0)
}

fn within(space: Unasked, ats_control: u16) -> Opened<Unasked> {
    let function = with_ats(ats_control);
    let address: Address = function.name().parse().unwrap();
    Opened {
        function,
        space,
        place: Place::new(&Sysfs::under("/nowhere".as_ref()), address),
    }
}

/// A function has left its space, as a ground for release (R3), when the kernel says so by either
/// call, and an IOMMU enforced the space (R1), in which it was alone.
#[test]
fn r3_a_function_has_left_its_space_on_the_kernels_word_and_alone_only() {
    let (alone, ats) = (false, 0x8000);
    for (shared, detaches, left, control, ground) in [
        (alone, false, true, 0, true),
        (alone, true, false, 0, true),
        (alone, false, false, 0, false),
        (!alone, true, true, 0, false),
        (alone, true, true, ats, false),
    ] {
        let space = Unasked {
            shared,
            detaches,
            left,
        };
        let opened = within(space, control);
        let proof = opened.hang_up();
        let case = (shared, detaches, left, control);
        assert_eq!(proof.is_some(), ground, "{case:?}");
        assert!(proof.is_none_or(|proof| proof.device() == opened.id()));
    }
}

/// The ladder's first step, of both outcomes that it has on a function that answers.
#[test]
fn bus_master_off_allocates_nothing() {
    let opened = opened();
    let config = ConfigSpace::new(&opened);
    let command = CommandRegister::open(&config).unwrap();
    command.bus_master_on(&config).unwrap();
    let before = allocated();
    let off = command.bus_master_off(&config);
    let after = allocated();
    assert!(off.is_ok(), "{off:?}");
    assert_eq!(after, before);
}

/// Whoever has the lock of the registers' gate, whoever is held up by the kernel inside it, and
/// whoever waits for him: config space is asked past them, so that there is no lock of theirs to
/// wait for, nor a sleeper to wake (R4.2).
#[test]
fn bus_master_off_waits_for_nobody_who_reaches_registers() {
    let opened = opened();
    let function = &opened.function;
    let (entered, inside) = mpsc::channel();
    let (go, held) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            function.gate.pass(Generation::FIRST, || {
                entered.send(()).unwrap();
                let _ = held.recv();
            })
        });
        inside.recv().unwrap();
        scope.spawn(|| function.expire(Generation::FIRST));
        while function.gate.pass(Generation::FIRST, || ()).is_some() {
            thread::yield_now();
        }
        let locked = function.gate.state();
        let (done, told) = mpsc::channel();
        let opened = &opened;
        scope.spawn(move || {
            let config = ConfigSpace::new(opened);
            let off = CommandRegister::open(&config)
                .map_err(CommandError::from)
                .and_then(|command| command.bus_master_off(&config).map(drop));
            done.send(off.is_ok())
        });
        let off = told.recv_timeout(Duration::from_secs(10));
        drop(locked);
        go.send(()).unwrap();
        assert_eq!(off, Ok(true));
    });
}

/// An access of registers by the ladder's own window, for the canary.
#[test]
fn a_register_is_read_without_allocating() {
    let function = with_ats(0);
    let mut word = [0; 4];
    let before = allocated();
    let read = function.read(Generation::LADDER, RegionIndex::Bar(0), 0, &mut word);
    assert_eq!(allocated(), before);
    assert!(read.is_ok());
}
