//! Each lie of a completion is told, where it should be.

use super::*;
use failstop::igb::descriptors::{RxKind, RxStatus};

/// What the first word of a received descriptor says.
fn kind(bench: &Bench, n: u32) -> RxKind {
    RxKind(bench.world.word(RX_RING + u64::from(n) * 16))
}

fn sent(spec: &str, frames: u32) -> Bench {
    let mut bench = Bench::running();
    bench.fault(spec);
    bench.send(0, frames);
    bench
}

#[test]
fn cq_long_and_cq_empty_say_another_length() {
    assert_eq!(sent("cq-long:9000", 1).rx(0).length(), 9000);
    let bench = sent("cq-empty", 1);
    assert_eq!(bench.rx(0).length(), 0);
    assert!(bench.rx(0).is_done() && bench.rx(0).is_whole());
}

#[test]
fn cq_type_says_reserved_types_or_no_end() {
    let bench = sent("cq-type", 1);
    let kind = kind(&bench, 0);
    assert_eq!((kind.rss_type(), kind.packet_type()), (0xF, 0x1FFF));
    assert!(bench.rx(0).is_whole());
    assert!(!sent("cq-type:no-eop", 1).rx(0).is_whole());
}

#[test]
fn cq_twice_completes_a_frame_in_two_descriptors() {
    let bench = sent("cq-twice", 1);
    assert!(bench.rx(0).is_done() && bench.rx(1).is_done() && !bench.rx(2).is_done());
    assert_eq!((bench.buffer(0), bench.buffer(1)), (2, 2));
    assert_eq!(bench.counters().rx_frames, 1);
}

#[test]
fn cq_twice_completes_once_where_there_is_room_for_one() {
    let mut bench = Bench::running();
    bench.fault("cq-twice");
    bench.set(RDT, 1);
    bench.send(0, 1);
    assert!(bench.rx(0).is_done() && !bench.rx(1).is_done());
}

#[test]
fn cq_unposted_marks_the_descriptor_at_the_tail() {
    let bench = sent("cq-unposted", 1);
    assert!(bench.rx(0).is_done() && bench.rx(DESCRIPTORS - 1).is_done());
    assert!(!bench.rx(1).is_done());
}

#[test]
fn cq_ahead_marks_two_beyond_the_tail_and_so_reads_the_head() {
    let mut bench = Bench::running();
    bench.fault("cq-ahead");
    bench.set(RDT, 4);
    bench.send(0, 1);
    assert!(bench.rx(4).is_done() && bench.rx(5).is_done() && !bench.rx(6).is_done());
    assert_eq!(bench.get(RDH), 6);
}

#[test]
fn cq_nodata_completes_what_was_not_written() {
    let bench = sent("cq-nodata", 1);
    assert!(bench.rx(0).is_done());
    assert_eq!(bench.buffer(0), 0);
}

#[test]
fn cq_shuffled_writes_back_out_of_order_and_loses_none() {
    let mut bench = sent("cq-shuffled", 8);
    let mut order = Vec::new();
    for _ in 0..400 {
        for n in 0..8 {
            if bench.rx(n).is_done() && !order.contains(&n) {
                order.push(n);
            }
        }
        bench.world.now += Duration::from_micros(10);
        bench.run();
    }
    assert_eq!(order.len(), 8);
    assert!(!order.is_sorted(), "{order:?}");
}

#[test]
fn cq_ones_writes_all_ones_into_both_kinds_of_descriptors() {
    let bench = sent("cq-ones", 1);
    assert_eq!((bench.rx(0).0, kind(&bench, 0).0), (u64::MAX, u64::MAX));
    assert_eq!(bench.world.word(TX_RING + 8), u64::MAX);
}

#[test]
fn cq_index_reads_heads_beyond_the_ring() {
    let mut bench = sent("cq-index", 1);
    assert!(bench.get(RDH) >= DESCRIPTORS && bench.get(TDH) >= DESCRIPTORS);
    assert!(bench.rx(0).is_done(), "work goes on");
}

#[test]
fn cq_backwards_reads_heads_that_fall() {
    let mut bench = sent("cq-backwards", 8);
    let (first, second, third) = (bench.get(RDH), bench.get(RDH), bench.get(RDH));
    assert!(first > second && second > third, "{first} {second} {third}");
}

#[test]
fn dma_rewrite_changes_header_and_descriptor_after_their_completion() {
    let mut bench = Bench::running();
    bench.fault("dma-rewrite");
    bench.post(0, 100, 7);
    bench.set(TDT, 1);
    assert_eq!((bench.rx(0).length(), bench.buffer(0)), (100, 2));
    bench.world.now += Duration::from_micros(20);
    bench.run();
    assert_eq!((bench.rx(0).length(), bench.buffer(0)), (60, 0xD5));
}

#[test]
fn dma_rewrite_completes_no_descriptor_that_is_posted_again_at_that_moment() {
    let mut bench = Bench::running();
    bench.fault("dma-rewrite");
    bench.send(0, 1);
    let again = RxRead::one_buffer(RX_BUFFERS).words();
    bench.world.posted_behind_load = Some((RX_RING, again));
    bench.wait(1);
    assert_eq!(bench.buffer(0), 0xD5);
    assert!(!bench.rx(0).is_done());
}

#[test]
fn dma_rewrite_leaves_a_descriptor_alone_that_was_posted_again() {
    let mut bench = Bench::running();
    bench.fault("dma-rewrite");
    bench.send(0, 1);
    bench
        .world
        .put(RX_RING, RxRead::one_buffer(RX_BUFFERS).words());
    bench.wait(1);
    assert!(!bench.rx(0).is_done());
    assert_eq!(bench.buffer(0), 2);
}

#[test]
fn lies_end_when_they_are_taken_back() {
    let mut bench = sent("cq-empty", 1);
    bench.device.clear_faults(&mut bench.world);
    bench.post(1, 60, 1);
    bench.set(TDT, 2);
    assert_eq!(bench.rx(1).length(), 60);
    assert_eq!(
        bench.rx(1).0 as u32 & RxStatus::EOP.bits(),
        RxStatus::EOP.bits()
    );
}
