//! The device sees every moment that a trigger can wait for, before it has its effect.

use super::*;
use crate::faults::Moment;

/// Whether `act` lets a fault begin that waits for this moment.
fn begins(moment: &str, bench: &mut Bench, act: impl FnOnce(&mut Bench)) -> bool {
    bench.fault(&format!("pending-stuck@{moment}"));
    assert_eq!(
        bench.config_byte(DEVICE_STATUS) & 0x20,
        0,
        "{moment} came too early"
    );
    act(bench);
    let begun = bench.config_byte(DEVICE_STATUS) & 0x20 != 0;
    bench.device.clear_faults(&mut bench.world);
    begun
}

type Act = fn(&mut Bench);

#[test]
fn registers_and_configuration_space_show_every_moment_of_a_life() {
    let cases: [(&str, Act); 14] = [
        ("1", |bench| bench.send(0, 1)),
        ("init-reset", |bench| bench.set(CTRL, Control::RST)),
        ("init-nvm", |bench| _ = bench.get(EECD)),
        ("init-nvm", |bench| bench.set(EERD, EepromRead::of(0))),
        ("init-address", |bench| _ = bench.get(RAL)),
        ("init-phy", |bench| bench.set(MDIC, Mdi::read(CONTROL))),
        ("rx-stop", Bench::stop_receive),
        ("destroy", Bench::stop_receive),
        ("tx-stop", |bench| {
            bench.set(TXDCTL, TransmitQueueControl::empty())
        }),
        ("destroy", |bench| {
            bench.set(TXDCTL, TransmitQueueControl::empty())
        }),
        ("bme-off", |bench| bench.config(COMMAND, &[2, 0])),
        ("reset", |bench| bench.config(DEVICE_CONTROL, &[0x10, 0xa8])),
        ("canary-read", |bench| _ = bench.get(FCTTV)),
        ("access=3", |bench| _ = bench.get(STATUS)),
    ];
    for (moment, act) in cases {
        assert!(begins(moment, &mut Bench::running(), act), "{moment}");
    }
}

#[test]
fn what_is_switched_on_is_seen_too() {
    let cases: [(&str, Act); 4] = [
        ("bme-on", |bench| bench.config(COMMAND, &[6, 0])),
        ("init-enable", |bench| bench.set(RCTL, ReceiveControl::RXEN)),
        ("rx-start", |bench| {
            bench.set(RXDCTL, ReceiveQueueControl::ENABLE)
        }),
        ("tx-start", |bench| {
            bench.set(TXDCTL, TransmitQueueControl::ENABLE)
        }),
    ];
    for (moment, act) in cases {
        let mut bench = Bench::new();
        bench.config(COMMAND, &[2, 0]);
        bench.set(RDLEN, 128u32);
        bench.set(TDLEN, 128u32);
        assert!(begins(moment, &mut bench, act), "{moment}");
    }
}

#[test]
fn the_first_start_of_a_queue_is_no_destroy() {
    let mut bench = Bench::new();
    bench.set(RCTL, ReceiveControl::RXEN);
    // Queue 0 asks to be enabled by default; drivers switch it off before they give it a ring.
    assert!(!begins("destroy", &mut bench, Bench::stop_receive));
}

#[test]
fn reading_transactions_pending_is_seen() {
    let mut bench = Bench::running();
    bench.fault("gone@pending-read=2");
    bench.config_byte(DEVICE_STATUS);
    assert_eq!(bench.config_byte(COMMAND), 6);
    assert_eq!(
        bench.config_byte(DEVICE_STATUS),
        0xFF,
        "gone at the reading itself"
    );
}

#[test]
fn a_fault_begins_before_what_it_waited_for_takes_effect() {
    let mut bench = Bench::running();
    bench.fault("gone:1@rx-stop");
    bench.stop_receive();
    bench.wait(1);
    assert!(bench.enabled().0, "the write was lost");
}

#[test]
fn what_the_server_sees_is_told_by_it() {
    let mut bench = Bench::running();
    for (moment, word) in [
        (Moment::Open, "open"),
        (Moment::Detach, "detach"),
        (Moment::Map, "map"),
        (Moment::Unmap, "unmap"),
        (Moment::Message, "message"),
    ] {
        let tell = |bench: &mut Bench| bench.device.note(moment, &mut bench.world);
        assert!(begins(word, &mut bench, tell), "{word}");
    }
}
