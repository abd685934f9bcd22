//! Bursts against a ring whose device is this test: what it may write, and what comes of it.
#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use failstop_dma::frame::Frame;
use failstop_dma::iova::Iova;
use failstop_dma::memory::Memory;
use failstop_dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop_dma::region::{FrameRegion, Pool};
use failstop_dma::ring::ExchangeRing;
use failstop_dma::space::AddressSpace;
use failstop_pci::clock::ManualClock;
use failstop_pci::id::Generation;
use failstop_pci::register::Reg;
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::transport::Transport;
use failstop_pci::window::{StopBit, Window};
use failstop_queues::completions::Completions;
use failstop_queues::format::{RxFormat, TxFormat, clean_len};
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};
use failstop_queues::receive::Rx;
use failstop_queues::transmit::Tx;
use vm_memory::Bytes;

const TAIL: Reg = Reg::at(0x18);
const STOP: Reg = Reg::at(0x28);
const ENTRIES: u32 = 64;
const FRAME: u32 = 2048;

/// Done bit 0, end of packet bit 1, error bit 31, length in bits 47:32; report bit 0, sent bit 32.
struct Toy;

impl RxFormat for Toy {
    fn post(iova: Iova) -> [u64; 2] {
        [iova.0, 0]
    }

    fn is_done(word: u64) -> bool {
        word & 1 != 0
    }

    fn clean_len(word: u64) -> u64 {
        clean_len(word, 0x8000_0003, 3)
    }

    fn is_error(word: u64) -> bool {
        word & 0x8000_0002 == 0x8000_0002
    }
}

impl TxFormat for Toy {
    const SHORTEST: u32 = 17;

    fn post(iova: Iova, _: u32, report: bool) -> [u64; 2] {
        [iova.0, u64::from(report)]
    }

    fn is_done(word: u64) -> bool {
        word >> 32 & 1 != 0
    }
}

struct Bench {
    window: Arc<Window>,
    lifecycle: Arc<Lifecycle>,
    ring: Arc<Memory>,
    pool: Pool,
    region: FrameRegion,
    proof: ReleaseProof,
}

impl Bench {
    fn new() -> (Self, ExchangeRing) {
        let function = Arc::new(FakeFunction::new(limits_39_bits()).unwrap().with_decoding());
        let clock = Arc::new(ManualClock::default());
        let space = AddressSpace::new(function.clone(), u64::MAX, clock.clone()).unwrap();
        let object = |serial, kind| ObjectId {
            device: function.id(),
            generation: Generation::FIRST,
            serial,
            kind,
        };
        let memory = space.map(object(1, "MR"), 256 * FRAME as usize).unwrap();
        let (region, mut pool) = FrameRegion::new(memory, FRAME, 256).unwrap();
        let mapping = space
            .map(object(2, "RQ"), ExchangeRing::bytes(ENTRIES))
            .unwrap();
        let ring = mapping.memory().clone();
        let exchange = ExchangeRing::new(mapping, &mut pool, ENTRIES).unwrap();
        let window = Window::open(function.clone(), Generation::FIRST, 0, 0x1000).unwrap();
        window.write(STOP, 1);
        let bit = StopBit {
            queue: None,
            register: STOP.offset(),
            stop: NonZeroU32::new(2).unwrap(),
            alive: NonZeroU32::new(1).unwrap(),
            deadline: Duration::from_millis(1),
            interval: Duration::from_micros(1),
            settle: Duration::from_micros(1),
        };
        let stopped = window.wait_stopped(&*clock, &bit).unwrap();
        let proof = Acknowledged::by_register(object(2, "RQ"), stopped)
            .unwrap()
            .into();
        let lifecycle = Arc::new(Lifecycle::default());
        (
            Self {
                window,
                lifecycle,
                ring,
                pool,
                region,
                proof,
            },
            exchange,
        )
    }

    fn rx() -> (Self, Rx<Toy>) {
        let (bench, mut rx) = Self::rx_unstarted();
        rx.start();
        (bench, rx)
    }

    fn rx_unstarted() -> (Self, Rx<Toy>) {
        let (bench, ring) = Self::new();
        let bell = bench.window.doorbell(TAIL).unwrap();
        let rx = Rx::new(ring, FRAME, bell, bench.lifecycle.clone());
        (bench, rx)
    }

    fn tx() -> (Self, Tx<Toy>) {
        let (bench, ring) = Self::new();
        let bell = bench.window.doorbell(TAIL).unwrap();
        let tx = Tx::new(ring, FRAME, bell, bench.lifecycle.clone());
        (bench, tx)
    }

    /// What the device writes.
    fn write(&self, index: u32, word: u64) {
        self.ring
            .view()
            .write_obj(word, (index % ENTRIES) as usize * 16 + 8)
            .unwrap();
    }

    fn word(&self, index: u32) -> u64 {
        self.ring
            .view()
            .read_obj((index % ENTRIES) as usize * 16 + 8)
            .unwrap()
    }

    fn tail(&self) -> u32 {
        self.window.read(TAIL)
    }

    fn frames(&mut self, count: usize, len: u32) -> Vec<Frame> {
        let mut frames = self.pool.take_many(count).unwrap();
        frames
            .iter_mut()
            .for_each(|frame| frame.set_len(len).unwrap());
        frames
    }
}

const fn received(len: u64) -> u64 {
    3 | len << 32
}

#[test]
fn an_empty_poll_receives_nothing_and_rings_nothing() {
    let (mut bench, mut rx) = Bench::rx();
    assert_eq!(bench.tail(), ENTRIES - 1);
    bench.window.write(TAIL, 0xdead);
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 0);
    assert_eq!(bench.tail(), 0xdead);
}

#[test]
fn received_frames_are_exchanged_and_their_slots_posted_again() {
    let (mut bench, mut rx) = Bench::rx();
    (0..3).for_each(|index| bench.write(index, received(60 + u64::from(index))));
    let mut frames = bench.frames(8, 0);

    assert_eq!(rx.burst(&mut frames), 3);

    assert_eq!(
        frames.iter().map(Frame::len).collect::<Vec<_>>(),
        [60, 61, 62, 0, 0, 0, 0, 0]
    );
    assert_eq!(bench.tail(), 2);
    assert_eq!(bench.word(0), 0);
    let expected = Completions {
        posted: 63 + 3,
        success: 3,
        error: 0,
        ..Completions::default()
    };
    assert_eq!(rx.completions(), expected);
    assert_eq!(rx.bytes(), 60 + 61 + 62);
}

#[test]
fn a_burst_over_the_rings_end_is_one_burst() {
    let (mut bench, mut rx) = Bench::rx();
    let mut frames = bench.frames(60, 0);
    (0..60).for_each(|index| bench.write(index, received(60)));
    assert_eq!(rx.burst(&mut frames), 60);
    (60..70).for_each(|index| bench.write(index, received(u64::from(index))));

    assert_eq!(rx.burst(&mut frames), 10);

    let lengths: Vec<_> = frames.iter().take(11).map(Frame::len).collect();
    assert_eq!(lengths, [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 60]);
    assert_eq!(bench.tail(), 69 % ENTRIES);
    assert_eq!(rx.bytes(), 60 * 60 + (60..70).sum::<u64>());
    assert_eq!(rx.completions().success, 70);
}

#[test]
fn a_queue_is_idle_until_a_descriptor_is_done_or_the_device_broken() {
    let (mut bench, mut rx) = Bench::rx();
    assert!(rx.is_idle());
    bench.write(0, received(60));
    assert!(!rx.is_idle());
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
    assert!(rx.is_idle());
    bench.lifecycle.mark_broken(Cause::User);
    assert!(!rx.is_idle());
}

#[test]
fn a_burst_takes_no_more_than_there_is_room_for() {
    let (mut bench, mut rx) = Bench::rx();
    (0..5).for_each(|index| bench.write(index, received(60)));
    assert_eq!(rx.burst(&mut bench.frames(2, 0)), 2);
    assert_eq!(rx.burst(&mut []), 0);
    assert_eq!(rx.burst(&mut bench.frames(8, 0)), 3);
    assert!(!bench.lifecycle.is_broken());
}

/// (R8)
#[test]
fn a_length_beyond_the_buffer_breaks_the_device_and_delivers_what_came_before() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(60));
    bench.write(1, received(u64::from(FRAME) + 1));
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 1);
    assert!(matches!(
        bench.lifecycle.cause(),
        Some(Cause::ImpossibleValue { .. })
    ));
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 0);
    assert_eq!(rx.completions().success, 1);
}

/// (R8)
#[test]
fn a_length_of_nothing_is_no_frame() {
    for len in [0, 13] {
        let (mut bench, mut rx) = Bench::rx();
        bench.write(0, received(14));
        bench.write(1, received(len));
        assert_eq!(rx.burst(&mut bench.frames(4, 0)), 1);
        assert!(matches!(
            bench.lifecycle.cause(),
            Some(Cause::ImpossibleValue { .. })
        ));
        assert_eq!(rx.completions().success, 1);
    }
}

/// A device that runs on beyond the tail completes the gap; posted next, it would be taken for a
/// completion of what was posted then (R8).
#[test]
fn c27_a_done_bit_in_the_gap_breaks_the_device_while_others_are_outstanding() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(60));
    bench.write(ENTRIES - 1, received(60));
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
    assert!(matches!(
        bench.lifecycle.cause(),
        Some(Cause::ImpossibleValue { .. })
    ));
    assert_eq!(bench.tail(), ENTRIES - 1, "the gap was posted");
}

/// (R7)
#[test]
fn c13_a_done_bit_in_the_gap_ends_no_sweep_before_what_the_hardware_wrote() {
    let (mut bench, mut rx) = Bench::rx();
    for index in 0..4 {
        bench.write(index, received(60));
    }
    bench.write(ENTRIES - 1, received(60));
    bench.lifecycle.mark_broken(Cause::User);
    bench.lifecycle.finish(Verdict::default());
    for _ in 0..4 {
        assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
        assert!(!rx.is_ended());
    }
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert!(rx.is_ended());
    let ended = rx.completions();
    assert_eq!((ended.success, ended.outstanding()), (4, 0));
}

#[test]
fn a_done_descriptor_without_a_whole_frame_breaks_the_device() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, 1 | 60 << 32);
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 0);
    assert!(bench.lifecycle.is_broken());
}

/// (R8)
#[test]
fn a_descriptor_of_all_ones_breaks_the_device() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, u64::MAX);
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 0);
    assert!(bench.lifecycle.is_broken());
}

/// An error of one frame is an error completion, and the device goes on (R9).
#[test]
fn a_frame_in_error_is_counted_dropped_and_its_slot_posted_again() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(60) | 1 << 31);
    bench.write(1, received(61));
    let mut frames = bench.frames(4, 0);
    assert_eq!(rx.burst(&mut frames), 1);
    assert_eq!(frames[0].len(), 61);
    assert_eq!(bench.tail(), 1);
    assert_eq!(
        rx.completions(),
        Completions {
            posted: 65,
            success: 1,
            error: 1,
            ..Completions::default()
        }
    );
}

#[test]
fn a_device_that_reports_only_errors_does_not_hold_the_caller() {
    let (mut bench, mut rx) = Bench::rx();
    // More than the ring holds: as one that goes on writing while we look.
    (0..ENTRIES).for_each(|index| bench.write(index, received(60) | 1 << 31));
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert_eq!(rx.completions().error, u64::from(ENTRIES) - 1);
}

/// (R6)
#[test]
fn nothing_is_rung_on_a_broken_device() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(60));
    bench.lifecycle.mark_broken(Cause::User);
    bench.window.write(TAIL, 0xdead);
    assert_eq!(rx.burst(&mut bench.frames(4, 0)), 1);
    assert_eq!(bench.tail(), 0xdead);
}

#[test]
fn a_foreign_frame_ends_a_receive_burst_and_breaks_nothing() {
    let (mut bench, mut rx) = Bench::rx();
    let (mut other, _) = Bench::rx();
    bench.write(0, received(60));
    assert_eq!(rx.burst(&mut other.frames(1, 0)), 0);
    assert!(!bench.lifecycle.is_broken());
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
}

#[test]
fn the_last_of_a_burst_asks_for_a_report_and_completes_all_of_it() {
    let (mut bench, mut tx) = Bench::tx();
    assert_eq!(tx.burst(&mut bench.frames(5, 60)), 5);
    assert_eq!(
        (0..5).map(|index| bench.word(index)).collect::<Vec<_>>(),
        [0, 0, 0, 0, 1]
    );
    assert_eq!(bench.tail(), 5);
    tx.reap();
    assert_eq!(tx.completions().outstanding(), 5);
    bench.write(4, 1 << 32);
    tx.reap();
    assert_eq!(
        tx.completions(),
        Completions {
            posted: 5,
            success: 5,
            error: 0,
            ..Completions::default()
        }
    );
}

#[test]
fn a_burst_over_the_rings_end_asks_for_a_report_where_one_is_due_and_at_its_own_end() {
    let (mut bench, mut tx) = Bench::tx();
    assert_eq!(tx.burst(&mut bench.frames(60, 60)), 60);
    bench.write(59, 1 << 32);

    assert_eq!(tx.burst(&mut bench.frames(10, 61)), 10);

    let asks: Vec<_> = (0..70).map(|index| bench.word(index)).collect();
    let asked = (0..64).filter(|&index| asks[index] == 1);
    assert_eq!(asked.collect::<Vec<_>>(), [5, 31, 63]);
    assert_eq!(bench.tail(), 70 % ENTRIES);
    assert_eq!(tx.bytes(), 60 * 60 + 10 * 61);
    bench.write(69, 1 << 32);
    tx.reap();
    assert_eq!(tx.completions().success, 70);
}

#[test]
fn a_frame_that_is_refused_behind_a_report_is_counted_once() {
    let (mut bench, mut tx) = Bench::tx();
    let mut frames = bench.frames(40, 60);
    frames[32].set_len(0).unwrap();
    assert_eq!(tx.burst(&mut frames), 32);
    assert_eq!(tx.refused(), 1);
    assert_eq!(bench.tail(), 32);
}

#[test]
fn one_slot_stays_free_and_a_full_ring_takes_nothing() {
    let (mut bench, mut tx) = Bench::tx();
    assert_eq!(tx.burst(&mut bench.frames(80, 60)), ENTRIES as usize - 1);
    assert_eq!(tx.burst(&mut bench.frames(1, 60)), 0);
    // The first report frees the first 32.
    bench.write(31, 1 << 32);
    assert_eq!(tx.burst(&mut bench.frames(80, 60)), 32);
}

#[test]
fn a_done_bit_beyond_what_was_posted_completes_nothing() {
    let (mut bench, mut tx) = Bench::tx();
    tx.burst(&mut bench.frames(3, 60));
    bench.write(31, 1 << 32);
    tx.reap();
    assert_eq!(tx.completions().outstanding(), 3);
}

#[test]
fn frames_that_the_device_cannot_send_end_the_burst_and_are_counted() {
    let (mut bench, mut tx) = Bench::tx();
    for len in [0, 16] {
        let mut frames = bench.frames(2, 60);
        frames[1].set_len(len).unwrap();
        assert_eq!(tx.burst(&mut frames), 1, "{len}");
    }
    assert_eq!(tx.refused(), 2);
    assert_eq!(tx.completions().posted, 2);
}

#[test]
fn a_burst_that_ends_early_asks_for_a_report_all_the_same() {
    let (mut bench, mut tx) = Bench::tx();
    let mut frames = bench.frames(4, 60);
    frames[2].set_len(0).unwrap();
    assert_eq!(tx.burst(&mut frames), 2);
    assert_eq!((bench.word(0), bench.word(1)), (0, 1));
    bench.write(1, 1 << 32);
    tx.reap();
    assert_eq!(tx.completions().success, 2);
}

/// (R11)
#[test]
fn who_breaks_the_device_first_names_the_cause() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(u64::from(FRAME) + 1));
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert!(!bench.lifecycle.mark_broken(Cause::User));
    assert!(matches!(
        bench.lifecycle.cause(),
        Some(Cause::ImpossibleValue { .. })
    ));
}

/// Each request ends once (R7).
#[test]
fn c31_nothing_is_flushed_before_the_verdict_and_everything_once_after_it() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(60));
    bench.lifecycle.mark_broken(Cause::User);
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert_eq!(rx.completions().flushed, 0);
    // Written while the ladder ran: the last sweep delivers it.
    bench.write(1, received(61));
    bench.lifecycle.finish(Verdict::default());
    let mut frames = bench.frames(4, 0);
    assert_eq!(rx.burst(&mut frames), 1);
    assert_eq!(frames[0].len(), 61);
    assert_eq!(rx.burst(&mut frames), 0);
    let ended = rx.completions();
    assert_eq!((ended.success, ended.outstanding()), (2, 0));
    // What is received on a broken device is not posted again.
    assert_eq!(ended.posted, u64::from(ENTRIES) - 1);
    // A late done bit after the flush is no second completion.
    bench.write(2, received(60));
    assert!(!rx.is_ready());
    assert_eq!(rx.burst(&mut frames), 0);
    assert_eq!(rx.completions(), ended);
}

/// (R7)
#[test]
fn c31_sent_frames_are_completed_before_the_rest_is_flushed() {
    let (mut bench, mut tx) = Bench::tx();
    assert_eq!(tx.burst(&mut bench.frames(40, 60)), 40);
    bench.lifecycle.mark_broken(Cause::User);
    tx.reap();
    assert_eq!(tx.completions().outstanding(), 40);
    bench.write(31, 1 << 32);
    bench.lifecycle.finish(Verdict::default());
    tx.reap();
    let ended = tx.completions();
    assert_eq!((ended.success, ended.flushed), (32, 8));
    bench.write(39, 1 << 32);
    tx.reap();
    assert_eq!(tx.completions(), ended);
}

#[test]
fn an_impossible_value_ends_the_sweep_after_the_verdict() {
    let (mut bench, mut rx) = Bench::rx();
    bench.write(0, received(u64::from(FRAME) + 1));
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert_eq!(rx.completions().flushed, 0);
    bench.lifecycle.finish(Verdict::default());
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert_eq!(rx.completions().outstanding(), 0);
}

#[test]
fn a_foreign_frame_does_not_end_the_sweep() {
    let (mut bench, mut rx) = Bench::rx();
    let (mut other, _) = Bench::rx();
    bench.write(0, received(60));
    bench.lifecycle.mark_broken(Cause::User);
    bench.lifecycle.finish(Verdict::default());
    assert_eq!(rx.burst(&mut other.frames(1, 0)), 0);
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 1);
}

#[test]
fn a_broken_device_is_sent_nothing() {
    let (mut bench, mut tx) = Bench::tx();
    bench.lifecycle.mark_broken(Cause::User);
    assert_eq!(tx.burst(&mut bench.frames(4, 60)), 0);
    assert_eq!(tx.completions().posted, 0);
}

#[test]
fn many_turns_around_the_ring_keep_the_accounts_and_every_frame() {
    let (mut bench, mut rx) = Bench::rx();
    let mut frames = bench.frames(8, 0);
    let mut next = 0u32;
    for turn in 0..1000u32 {
        let count = turn % 9;
        (0..count).for_each(|at| bench.write(next + at, received(60)));
        let taken = rx.burst(&mut frames) as u32;
        assert_eq!(taken, count.min(8));
        next += taken;
    }
    let completions = rx.completions();
    assert_eq!(completions.success, u64::from(next));
    assert_eq!(completions.flush().outstanding(), 0);
    drop(frames);
    let (slots, mapping) = rx.into_ring().dismantle(&bench.proof).unwrap();
    drop(slots);
    mapping.release(&bench.proof).unwrap();
    drop(bench.pool);
    assert_eq!(bench.region.census().home, 256);
}

#[test]
fn c27_a_done_descriptor_that_was_never_posted_breaks_the_device() {
    let (mut bench, mut rx) = Bench::rx();
    for index in 0..ENTRIES {
        bench.write(index, received(60));
    }
    let posted = ENTRIES as usize - 1;
    assert_eq!(rx.burst(&mut bench.frames(posted + 1, 0)), posted);
    assert!(matches!(
        bench.lifecycle.cause(),
        Some(Cause::ImpossibleValue { .. })
    ));
    bench.lifecycle.finish(Verdict::default());
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    let ended = rx.completions();
    assert_eq!((ended.success, ended.outstanding()), (ended.posted, 0));
}

#[test]
fn before_the_start_nothing_is_posted() {
    let (mut bench, mut rx) = Bench::rx_unstarted();
    assert_eq!(rx.completions().posted, 0);
    bench.write(0, received(60));
    assert_eq!(rx.burst(&mut bench.frames(1, 0)), 0);
    assert!(bench.lifecycle.is_broken());
}
