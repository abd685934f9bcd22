//! Whatever can be written can be read, and is the same then.

use std::time::Duration;

use failstop_scenario::fault::{Block, MessageType, Messages, Outside, Storm, Stuck};
use failstop_scenario::scenario::Behind;
use failstop_scenario::step::{
    After, Memory, Object, Reading, Reset, Script, Software, Stop, Unmap, Verdict, Way,
};
use failstop_scenario::{Count, Errno, Fault, Moment, On, Scenario, Spec, Step, Trigger};
use proptest::option;
use proptest::prelude::*;

fn one<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> {
    prop::sample::select(all)
}

fn errno() -> impl Strategy<Value = Errno> {
    (1..=Errno::LAST).prop_filter_map("a number of an error", Errno::new)
}

fn ms() -> impl Strategy<Value = Duration> {
    (1..=u32::MAX).prop_map(|ms| Duration::from_millis(ms.into()))
}

fn messages() -> impl Strategy<Value = Messages> {
    (option::of(one(MessageType::ALL)), any::<bool>()).prop_map(|(of, once)| Messages { of, once })
}

fn fault() -> impl Strategy<Value = Fault> {
    let stuck = (any::<bool>(), any::<bool>())
        .prop_map(|(quiet, until_rst)| Stuck { quiet, until_rst })
        .boxed();
    let plain = [
        Fault::Lie,
        Fault::BusMasterReadback,
        Fault::DmaRewrite,
        Fault::CompletionAhead,
        Fault::FlrHangs,
        Fault::NoFlr,
        Fault::ServerReorder,
    ];
    prop_oneof![
        stuck.clone().prop_map(Fault::RxQueueStuck),
        stuck.prop_map(Fault::TxQueueStuck),
        ms().prop_map(Fault::SlowStop),
        ms().prop_map(Fault::LateDone),
        any::<u32>().prop_map(|us| Fault::DataAfterStop(Duration::from_micros(us.into()))),
        option::of(one(Outside::ALL)).prop_map(Fault::DmaOutside),
        any::<u16>().prop_map(Fault::CompletionLong),
        any::<bool>().prop_map(|no_eop| Fault::CompletionType { no_eop }),
        option::of(ms()).prop_map(Fault::Gone),
        option::of(ms()).prop_map(Fault::GoneZero),
        errno().prop_map(Fault::FlrFails),
        ms().prop_map(Fault::LinkFlaps),
        any::<bool>().prop_map(|notice| Fault::SelfReset { notice }),
        one(Storm::ALL).prop_map(Fault::IrqStorm),
        one(Block::ALL).prop_map(Fault::IrqBlock),
        messages().prop_map(Fault::ServerHangs),
        (errno(), messages()).prop_map(|(errno, of)| Fault::ServerError(errno, of)),
        option::of(one(MessageType::ALL)).prop_map(Fault::ServerDies),
        messages().prop_map(Fault::ServerShort),
        prop::sample::select(plain.to_vec()),
    ]
}

fn moment() -> impl Strategy<Value = Count> {
    let named = (0..Moment::NAMED.len(), 1..=u32::MAX).prop_map(|(i, n)| Count {
        at: Moment::NAMED[i].1,
        n,
    });
    let random = (any::<u64>(), 1..=1000u16).prop_map(|(seed, per_mille)| Count {
        at: Moment::Random { seed, per_mille },
        n: 1,
    });
    prop_oneof![4 => named, 1 => random]
}

fn spec() -> impl Strategy<Value = Spec> {
    (fault(), prop::collection::vec(moment(), 0..4)).prop_map(|(fault, counts)| Spec {
        fault,
        trigger: Trigger(counts),
    })
}

fn script() -> impl Strategy<Value = Script> {
    let stop = prop_oneof![
        any::<u32>().prop_map(Stop::Busy),
        any::<u32>().prop_map(Stop::Slow),
        Just(Stop::Never),
        one(Reading::ALL).prop_map(Stop::Reads),
    ];
    let reset = prop_oneof![
        Just(Reset::Nothing),
        Just(Reset::RestoresMaster),
        errno().prop_map(Reset::Fails),
    ];
    prop_oneof![
        (one(Way::ALL), any::<u32>(), stop).prop_map(|(way, n, stop)| Script::Stop(way, n, stop)),
        one(Way::ALL).prop_map(Script::Start),
        Just(Script::BringUp),
        Just(Script::ReadsAsMaster),
        reset.prop_map(Script::Reset),
        one(Software::ALL).prop_map(Script::Software),
        (one(Reading::ALL), option::of(any::<u32>())).prop_map(|(r, n)| Script::Config(r, n)),
    ]
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Ok),
        Just(Verdict::Refused),
        (one(Memory::ALL), one(After::ALL))
            .prop_map(|(memory, after)| Verdict::Broke(memory, after)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let plain = vec![
        Step::ClearFaults,
        Step::Open,
        Step::Port,
        Step::Recover,
        Step::Close,
        Step::DeviceWrites,
        Step::DeviceWritesEverywhere,
        Step::Heal,
        Step::Break,
        Step::BreakAndHold,
    ];
    let two = || (any::<u32>(), any::<u32>());
    let object = || (any::<u32>(), one(Object::ALL));
    let unmap = prop_oneof![
        Just(Unmap::Busy),
        Just(Unmap::Absent),
        Just(Unmap::Partial),
        errno().prop_map(Unmap::Fails),
    ];
    prop_oneof![
        spec().prop_map(Step::Fault),
        prop::sample::select(plain),
        ms().prop_map(Step::Wait),
        object().prop_map(|(kit, object)| Step::Create(kit, object)),
        object().prop_map(|(kit, object)| Step::Destroy(kit, object)),
        object().prop_map(|(kit, object)| Step::TryDestroy(kit, object)),
        two().prop_map(|(kit, n)| Step::Post(kit, n)),
        two().prop_map(|(kit, n)| Step::Poll(kit, n)),
        any::<u32>().prop_map(Step::Reap),
        any::<u32>().prop_map(Step::Send),
        any::<u32>().prop_map(Step::Receive),
        two().prop_map(|(kit, n)| Step::DeviceReceives(kit, n)),
        two().prop_map(|(kit, n)| Step::DeviceSends(kit, n)),
        (two(), any::<u64>()).prop_map(|((kit, at), word)| Step::DeviceLies(kit, at, word)),
        script().prop_map(Step::Script),
        (1..=u32::MAX, errno()).prop_map(|(n, errno)| Step::MapFails(n, errno)),
        unmap.prop_map(Step::Unmap),
        (verdict(), any::<u8>()).prop_map(|(verdict, exit)| Step::Expect(verdict, exit)),
    ]
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let on = prop_oneof![
        Just(On::Emulated("82576".to_owned())),
        one(Behind::ALL).prop_map(On::Scripted),
        Just(On::Device("0000:01:00.0".to_owned())),
    ];
    let steps = prop::collection::vec(step(), 0..20);
    (on, option::of(any::<u64>()), steps).prop_map(|(on, seed, steps)| Scenario { on, seed, steps })
}

proptest! {
    #[test]
    fn a_fault_survives_being_written_and_read(spec in spec()) {
        prop_assert_eq!(spec.to_string().parse::<Spec>(), Ok(spec));
    }

    #[test]
    fn a_scenario_survives_being_written_and_read(scenario in scenario()) {
        prop_assert_eq!(scenario.to_string().parse::<Scenario>(), Ok(scenario));
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "(failstop scenario 1\non emulated 82576\n)?[a-z0-9:@+=/ \n-]{0,80}") {
        let _ = text.parse::<Scenario>();
        let _ = text.parse::<Spec>();
    }
}
