//! Random sequences.

use failstop_pci::testing::{Reading, ResetScript};
use failstop_pci::transport::Unmapped;
use nix::errno::Errno;
use proptest::prelude::*;

use crate::world::scripted::{QUEUES, RX, Software, Stop, Way};
use crate::world::steps::{Fault, Of, Step};

fn faults() -> impl Strategy<Value = Fault> {
    let way = prop_oneof![Just(Way::Receive), Just(Way::Send)];
    let stop = prop_oneof![
        3 => (1u32..4).prop_map(Stop::Busy),
        1 => Just(Stop::Busy(u32::MAX)),
        3 => (1u32..50).prop_map(Stop::Slow),
        1 => Just(Stop::Never),
        1 => Just(Stop::AllOnes),
        1 => Just(Stop::Zero),
    ];
    let map = prop_oneof![
        Just(Errno::ENOMEM),
        Just(Errno::EEXIST),
        Just(Errno::ETIMEDOUT)
    ];
    let unmap = prop_oneof![
        Just(Unmapped::Busy),
        Just(Unmapped::Partial { bytes: 0 }),
        Just(Unmapped::Failed(Errno::EIO)),
    ];
    let reset = prop_oneof![
        Just(ResetScript::ResetsNothing),
        Just(ResetScript::RestoresMaster),
        Just(ResetScript::Fails(Errno::EIO)),
        Just(ResetScript::Fails(Errno::EAGAIN)),
    ];
    let software = prop_oneof![
        Just(Software::ResetsNothing),
        Just(Software::NoAnswer),
        Just(Software::Panics),
    ];
    let reading = prop_oneof![Just(Reading::AllOnes), Just(Reading::Zero)];
    prop_oneof![
        4 => (way.clone(), 0..QUEUES, stop).prop_map(|(way, n, stop)| Fault::Stop(way, n, stop)),
        1 => way.prop_map(Fault::Start),
        2 => map.prop_map(Fault::Map),
        3 => unmap.prop_map(Fault::Unmap),
        4 => reset.prop_map(Fault::Reset),
        1 => software.prop_map(Fault::Software),
        2 => (reading, prop_oneof![1u64..20, Just(u64::MAX)]).prop_map(|(r, n)| Fault::Gone(r, n)),
        1 => Just(Fault::ReadsAsMaster),
        1 => Just(Fault::BringUp),
    ]
}

/// What goes wrong, and ends.
fn trouble() -> impl Strategy<Value = Step> {
    let kit = 0..QUEUES as usize;
    let word = prop_oneof![
        Just(u64::MAX),
        Just(0x3),
        Just(0xffff << 32 | 3),
        any::<u64>()
    ];
    let lie = (kit, 0..RX, word);
    prop_oneof![
        12 => faults().prop_map(Step::Fault),
        6 => Just(Step::Heal),
        2 => Just(Step::DeviceWritesEverywhere),
        2 => lie.prop_map(|(kit, at, word)| Step::DeviceLies(kit, at, word)),
    ]
}

/// What a program and its device do.
fn ordinary() -> impl Strategy<Value = Step> {
    let kit = 0..QUEUES as usize;
    let of = prop_oneof![
        2 => Just(Of::Pd),
        2 => Just(Of::Mr),
        2 => Just(Of::Cq),
        3 => Just(Of::Rq),
        3 => Just(Of::Sq),
    ];
    let object = (kit.clone(), of);
    let some = |most: u32| (kit.clone(), 0..most);
    prop_oneof![
        60 => object.clone().prop_map(|(kit, of)| Step::Create(kit, of)),
        6 => object.clone().prop_map(|(kit, of)| Step::TryDestroy(kit, of)),
        6 => object.prop_map(|(kit, of)| Step::Destroy(kit, of)),
        25 => some(9).prop_map(|(kit, n)| Step::Post(kit, n as usize)),
        35 => some(9).prop_map(|(kit, n)| Step::Poll(kit, n as usize)),
        10 => kit.clone().prop_map(Step::Reap),
        35 => some(10).prop_map(|(kit, n)| Step::DeviceReceives(kit, n)),
        20 => some(20).prop_map(|(kit, n)| Step::DeviceSends(kit, n)),
        3 => Just(Step::DeviceWrites),
        3 => Just(Step::Break),
        1 => Just(Step::BreakAndHold),
        8 => Just(Step::Recover),
        1 => Just(Step::Close),
    ]
}

pub(crate) fn steps(with_faults: bool) -> BoxedStrategy<Step> {
    if with_faults {
        prop_oneof![10 => ordinary(), 1 => trouble()].boxed()
    } else {
        ordinary().boxed()
    }
}
