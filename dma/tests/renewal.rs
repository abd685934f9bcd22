//! What becomes of a region's memory when it is carried into another life behind a server, which may
//! keep the file that it was sent (R8, R10).
//!
//! A program of its own, with one test that limits the addresses of the whole process.

mod common;

use std::sync::Mutex;

use common::Bench;
use failstop_dma::frame::Frame;
use failstop_dma::region::{FrameRegion, Pool};
use failstop_dma::space::SpaceError;
use failstop_pci::transport::ResetMethod;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use vm_memory::Bytes;

const FRAME: u32 = 2048;
/// More than an allocator has lying about.
const FRAMES: u32 = 32 << 10;

/// One test's limit is every test's.
static ALONE: Mutex<()> = Mutex::new(());

fn region(bench: &Bench) -> (FrameRegion, Pool) {
    let mapping = bench.map(10, (FRAMES * FRAME) as usize);
    FrameRegion::new(mapping, FRAME, FRAMES).unwrap()
}

/// Ends a life and begins the next.
fn carry(bench: &mut Bench, region: FrameRegion) -> Result<FrameRegion, (FrameRegion, SpaceError)> {
    bench.space.close();
    let stopped = bench.stop(ResetMethod::Flr);
    let _swept = bench.space.unmap_all(&|| true);
    let proof = bench.space.settle(Some(&stopped)).proof.unwrap();
    bench.begin();
    region.carry(&proof, &bench.space, bench.object(10))
}

/// Runs `act` while the process gets no more than a few pages of addresses.
fn without_addresses<T>(act: impl FnOnce() -> T) -> T {
    let (soft, hard) = getrlimit(Resource::RLIMIT_AS).unwrap();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let mapped = pages * common::PAGE as u64;
    setrlimit(Resource::RLIMIT_AS, mapped + (16 << 20), hard).unwrap();
    let result = act();
    setrlimit(Resource::RLIMIT_AS, soft, hard).unwrap();
    result
}

fn number(frames: &mut [Frame], first: u32) {
    for (frame, number) in frames.iter_mut().zip(first..) {
        frame.fill(&[number as u8; FRAME as usize]).unwrap();
    }
}

fn is_numbered(frames: &[Frame], first: u32) -> bool {
    let mut bytes = [0; FRAME as usize];
    frames.iter().zip(first..).all(|(frame, number)| {
        frame.copy_to(&mut bytes) == bytes.len() && bytes == [number as u8; FRAME as usize]
    })
}

#[test]
fn a_carry_that_gets_no_memory_leaves_every_byte_where_it_was() {
    let _alone = ALONE.lock().unwrap();
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let mut frames = pool.take_many(FRAMES as usize).unwrap();
    number(&mut frames, 1);

    let (region, error) = without_addresses(|| carry(&mut bench, region)).unwrap_err();

    assert!(matches!(error, SpaceError::Memory { .. }), "{error}");
    assert!(is_numbered(&frames, 1));
    number(&mut frames, 2);
    assert!(is_numbered(&frames, 2));
    let totals = bench.space.ledger().totals();
    assert_eq!((totals.live_mappings, totals.held_mappings), (0, 1));
    assert_eq!(totals.held_bytes, u64::from(FRAMES * FRAME));

    let _region = carry(&mut bench, region).unwrap();
    assert!(is_numbered(&frames, 2));
    let totals = bench.space.ledger().totals();
    assert_eq!((totals.live_mappings, totals.held_mappings), (1, 0));
}

/// Mappings of DMA memory that the process has.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("failstop-dma"))
        .count()
}

/// A process has 65530 mappings.
#[test]
fn a_region_of_thousands_of_lives_has_as_many_mappings_as_one_of_three() {
    let _alone = ALONE.lock().unwrap();
    let mut bench = Bench::new();
    let mapping = bench.map(10, FRAME as usize);
    let (mut region, mut pool) = FrameRegion::new(mapping, FRAME, 1).unwrap();
    let mut frame = pool.take().unwrap();
    for _ in 0..3 {
        region = carry(&mut bench, region).unwrap();
    }
    let before = mappings();
    for life in 0..3000u64 {
        frame.fill(&life.to_le_bytes()).unwrap();
        region = carry(&mut bench, region).unwrap();
        assert_eq!(frame.view().read_obj::<u64>(0).unwrap(), life);
    }
    assert_eq!(mappings(), before);
}

#[test]
fn a_view_finds_its_frame_again_where_another_life_s_memory_was_put() {
    let _alone = ALONE.lock().unwrap();
    let mut bench = Bench::new();
    let mapping = bench.map(10, FRAME as usize);
    let (mut region, mut pool) = FrameRegion::new(mapping, FRAME, 1).unwrap();
    let mut frame = pool.take().unwrap();
    frame.fill(&[7; 64]).unwrap();
    let view = frame.view();
    for _ in 0..3 {
        region = carry(&mut bench, region).unwrap();
    }
    assert_eq!(view.read_obj::<u64>(0).unwrap(), 0x0707_0707_0707_0707);
    view.write_obj(9u64, 8).unwrap();
    assert_eq!(frame.view().read_obj::<u64>(8).unwrap(), 9);
    drop(region);
}

#[test]
fn a_view_of_an_ended_life_stays_readable_and_its_pages_go_back_a_life_later() {
    let _alone = ALONE.lock().unwrap();
    let mut bench = Bench::new();
    let (region, mut pool) = region(&bench);
    let mut frame = pool.take().unwrap();
    frame.fill(&[7; 64]).unwrap();
    let view = frame.view();

    let region = carry(&mut bench, region).unwrap();
    assert_eq!(view.read_obj::<u64>(0).unwrap(), 0x0707_0707_0707_0707);

    let _region = carry(&mut bench, region).unwrap();
    assert_eq!(view.read_obj::<u64>(0).unwrap(), 0);
    assert_eq!(
        frame.view().read_obj::<u64>(0).unwrap(),
        0x0707_0707_0707_0707
    );
}
