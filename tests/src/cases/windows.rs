//! Kernel VFIO's mapped BARs and the IOMMU behind it.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use failstop::dma::memory::{HUGE, Pages};
use failstop::dma::proof::ObjectId;
use failstop::dma::region::FrameRegion;
use failstop::dma::space::AddressSpace;
use failstop::igb::registers::{BAR_SIZE, RAL, STATUS};
use failstop::pci::clock::SystemClock;
use failstop::pci::config::{CommandRegister, ConfigSpace, offset};
use failstop::pci::id::Generation;
use failstop::pci::window::Window;
use failstop::port::{Port, PortConfig};

use libtest_mimic::Failed;

use crate::fixture::{Fixture, Outcome, ensure, ensure_eq, self_addressed, send};

pub(super) fn c14_a_bar_without_memory_decoding_reads_all_ones(fixture: &Fixture) -> Outcome {
    let transport = fixture.transport()?;
    let config = ConfigSpace::new(&*transport);
    let command = CommandRegister::open(&config)?;
    command.memory_space_on(&config)?;
    let window = Window::open(transport.clone(), Generation::FIRST, 0, BAR_SIZE)?;
    let alive = window.read(STATUS).bits();
    ensure(alive != u32::MAX && alive != 0, || {
        format!("STATUS reads {alive:#x}")
    })?;
    config.write_u16(offset::COMMAND, 0)?;
    ensure_eq(
        window.read(STATUS).bits(),
        u32::MAX,
        "STATUS without memory decoding",
    )?;
    window.write(RAL, 1);
    ensure(window.is_detached(), || {
        "the guard did not replace the window".into()
    })?;
    // A new window sees the device again; the old one never.
    command.memory_space_on(&config)?;
    let again = Window::open(transport.clone(), Generation::FIRST, 0, BAR_SIZE)?;
    ensure_eq(again.read(STATUS).bits(), alive, "STATUS in a new window")?;
    ensure_eq(
        window.read(STATUS).bits(),
        u32::MAX,
        "STATUS in the old window",
    )
}

pub(super) fn c33_a_detached_window_reaches_no_register(fixture: &Fixture) -> Outcome {
    let transport = fixture.transport()?;
    let config = ConfigSpace::new(&*transport);
    CommandRegister::open(&config)?.memory_space_on(&config)?;
    let old = Window::open(transport.clone(), Generation::FIRST, 0, BAR_SIZE)?;
    let new = Window::open(transport.clone(), Generation::FIRST.next(), 0, BAR_SIZE)?;
    let doorbell = old.doorbell(RAL).ok_or("no doorbell")?;
    std::thread::scope(|scope| {
        let hammer = scope.spawn(|| {
            for value in 1..200_000 {
                doorbell.ring(value | 1);
            }
        });
        while new.read(RAL) & 1 == 0 && !hammer.is_finished() {}
        old.detach()?;
        new.write(RAL, 0x1234_5600);
        for _ in 0..1000 {
            ensure_eq(
                new.read(RAL),
                0x1234_5600,
                "a register after the old window was detached",
            )?;
        }
        hammer.join().map_err(|_| "the hammering thread panicked")?;
        ensure_eq(new.read(RAL), 0x1234_5600, "the register at the end")?;
        ensure_eq(old.read(STATUS).bits(), u32::MAX, "the old window")
    })
}

pub(super) fn c38_mapping_churn_costs_no_kernel_memory(fixture: &Fixture) -> Outcome {
    const MAPS: u64 = 2_000;
    let transport = fixture.transport()?;
    let space = AddressSpace::new(
        transport.clone(),
        u64::MAX,
        Arc::new(SystemClock::default()),
    )?;
    let owner = ObjectId {
        device: transport.id(),
        generation: Generation::FIRST,
        serial: 1,
        kind: "MR",
    };
    let pages = || -> Result<u64, std::io::Error> {
        let stat = fs::read_to_string("/proc/vmstat")?;
        let line = stat
            .lines()
            .find_map(|line| line.strip_prefix("nr_iommu_pages "));
        Ok(line
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0))
    };
    let before = pages()?;
    for _ in 0..MAPS {
        let mapping = space.map(owner, 4096)?;
        let (region, pool) = FrameRegion::new(mapping, 2048, 2).map_err(|(_, error)| error)?;
        drop(pool);
        region.release()?;
    }
    let after = pages()?;
    // Spread over the whole space, each pair costs a page of its own; packed in the window, every
    // 2 MiB of it does.
    let bound = MAPS * 8192 / (2 << 20) + 16;
    ensure(after.saturating_sub(before) <= bound, || {
        format!("{before} IOMMU pages before, {after} after; {bound} more are allowed")
    })?;
    ensure_eq(space.ledger().lines(), Vec::new(), "ledger")
}

pub(super) fn without_bus_mastering_nothing_arrives(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let config = ConfigSpace::new(&**device.transport());
    let command = config.read_u16(offset::COMMAND)?;
    config.write_u16(offset::COMMAND, command & !4)?;
    send(&mut port, &self_addressed(&device, 60, 1))?;
    std::thread::sleep(Duration::from_millis(100));
    ensure(!port.rq().is_ready(), || {
        "a frame arrived without bus mastering".into()
    })?;
    drop(port);
    drop(device);
    Ok(())
}

pub(super) fn large_pages_are_used_where_there_are_any(fixture: &Fixture) -> Outcome {
    const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
    let transport = fixture.transport()?;
    let space = AddressSpace::new(
        transport.clone(),
        u64::MAX,
        Arc::new(SystemClock::default()),
    )?;
    let owner = ObjectId {
        device: transport.id(),
        generation: Generation::FIRST,
        serial: 1,
        kind: "MR",
    };
    let pages = |reserved: &str| -> Result<Pages, Failed> {
        fs::write(RESERVED, reserved)?;
        let mapping = space.map(owner, HUGE)?;
        let pages = mapping.memory().pages();
        let aligned = mapping.iova().0.is_multiple_of(HUGE as u64);
        ensure(aligned || pages == Pages::Base, || {
            format!("mapped at {}", mapping.iova())
        })?;
        let (region, pool) = FrameRegion::new(mapping, 2048, 16).map_err(|(_, error)| error)?;
        drop(pool);
        region.release()?;
        Ok(pages)
    };
    let before = fs::read_to_string(RESERVED)?;
    let (with, without) = (pages("4"), pages("0"));
    fs::write(RESERVED, before.trim())?;
    ensure_eq(with?, Pages::Huge, "pages with four in reserve")?;
    ensure_eq(without?, Pages::Base, "pages with none in reserve")
}
