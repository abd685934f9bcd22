//! Each fault of queues, DMA, resets and interrupts does what the table says, and ends when it says.

use super::*;
use crate::device::Reset;
use crate::host::Notice;

#[test]
fn rxq_stuck_keeps_enable_and_writes_through_a_software_reset() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck");
    bench.stop_receive();
    assert!(bench.get(RXDCTL).contains(ReceiveQueueControl::ENABLE));
    bench.set(CTRL, Control::RST);
    let before = bench.world.accesses;
    bench.world.now += Duration::from_millis(5);
    bench.run();
    assert!(bench.world.accesses > before);
}

#[test]
fn txq_stuck_keeps_enable_and_goes_on_reading() {
    let mut bench = Bench::running();
    bench.send(0, 2);
    bench.fault("txq-stuck");
    bench.set(TXDCTL, TransmitQueueControl::empty());
    let before = bench.world.accesses;
    bench.world.now += Duration::from_millis(5);
    bench.run();
    assert!(bench.get(TXDCTL).contains(TransmitQueueControl::ENABLE));
    assert!(bench.world.accesses > before);
}

#[test]
fn a_stuck_queue_obeys_bus_master() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck");
    bench.stop_receive();
    bench.config(COMMAND, &[2, 0]);
    let before = bench.world.accesses;
    bench.world.now += Duration::from_millis(5);
    bench.run();
    assert_eq!(bench.world.accesses, before);
}

#[test]
fn a_gone_function_reads_all_ones_everywhere_and_does_nothing() {
    let mut bench = Bench::running();
    bench.fault("gone");
    let before = bench.world.accesses;
    bench.send(0, 1);
    assert_eq!((bench.at(8), bench.config_byte(0)), (u32::MAX, 0xFF));
    assert_eq!(bench.world.accesses, before);
}

#[test]
fn a_gone_zero_function_reads_zero() {
    let mut bench = Bench::running();
    bench.fault("gone-zero");
    assert_eq!((bench.at(8), bench.config_byte(0)), (0, 0));
}

#[test]
fn a_device_that_stalls_takes_and_writes_nothing_until_a_function_level_reset() {
    let mut bench = Bench::running();
    bench.fault("tx-stalls");
    let before = bench.world.accesses;
    bench.send(0, 2);
    assert_eq!(bench.world.accesses, before);
    bench.fault("rx-stalls");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.config(COMMAND, &[6, 0]);
    bench.bring_up();
    bench.send(0, 2);
    assert!(bench.rx(0).is_done());
}

#[test]
fn c20_a_function_level_reset_stops_a_queue_that_would_not_stop() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck");
    bench.stop_receive();
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.config(COMMAND, &[6, 0]);
    let before = bench.world.accesses;
    bench.world.now += Duration::from_secs(1);
    bench.run();
    assert_eq!(bench.world.accesses, before);
}

#[test]
fn rxq_stuck_quiet_keeps_enable_and_issues_no_dma() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck:quiet");
    bench.stop_receive();
    assert!(!bench.is_active());
    assert!(bench.enabled().0);
}

#[test]
fn stuck_rst_ends_with_a_software_reset() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck:rst");
    bench.fault("txq-stuck:rst");
    bench.stop_receive();
    assert!(bench.is_active());
    bench.set(CTRL, Control::RST);
    assert!(!bench.is_active());
    assert_eq!(bench.enabled(), (false, false));
}

#[test]
fn a_queue_that_is_started_again_after_it_was_stuck_still_is() {
    let mut bench = Bench::running();
    bench.fault("rxq-stuck");
    bench.stop_receive();
    bench.reset_function();
    bench.bring_up();
    bench.stop_receive();
    assert!(bench.enabled().0 && bench.is_active());
}

#[test]
fn slow_keeps_enable_and_dma_for_its_time_and_then_stops() {
    let mut bench = Bench::running();
    bench.fault("slow:20");
    bench.stop_receive();
    assert!(bench.is_active());
    bench.wait(14);
    assert!(bench.enabled().0);
    bench.wait(1);
    assert!(!bench.enabled().0);
    assert!(!bench.is_active());
}

#[test]
fn a_queue_that_lies_reads_as_stopped_and_goes_on_until_a_function_level_reset() {
    let mut bench = Bench::running();
    bench.fault("lie");
    bench.stop_receive();
    assert!(!bench.enabled().0);
    bench.set(CTRL, Control::RST);
    assert!(bench.is_active());
    bench.config(COMMAND, &[2, 0]);
    assert!(!bench.is_active(), "it obeys bus mastering");
    bench.reset_function();
    assert!(!bench.is_active());
}

#[test]
fn what_a_rogue_queue_meets_is_late_then_blocked_then_reached() {
    let mut bench = Bench::running();
    bench.fault("lie");
    bench.stop_receive();
    bench.wait(1);
    assert!(matches!(bench.rogue(), (0, 0, 1..)));
    bench.world.mapping = None;
    bench.wait(1);
    assert!(matches!(bench.rogue(), (1.., 0, _)));
    bench.world.mapping = Some(1);
    bench.wait(1);
    assert!(matches!(bench.rogue(), (_, 1.., _)));
    let log = bench.device.log(1);
    assert_eq!((log[0].meant, log[0].met), (Some(0), Some(1)));
    bench.device.reset_counters();
    assert_eq!(bench.rogue(), (0, 0, 0));
}

#[test]
fn a_mark_stands_in_the_log_among_the_accesses() {
    let mut bench = Bench::running();
    bench.device.mark("ladder".to_owned(), &bench.world);
    bench.fault("lie");
    bench.stop_receive();
    bench.wait(1);
    let log = bench.device.log(100);
    assert_eq!(
        (log[0].what.as_str(), log[1].what.as_str()),
        ("ladder", "rx 0")
    );
}

#[test]
fn bme_ignored_goes_on_with_mastering_off_until_a_software_reset() {
    let mut bench = Bench::running();
    bench.fault("bme-ignored");
    assert!(!bench.is_active());
    bench.config(COMMAND, &[2, 0]);
    assert!(bench.is_active());
    bench.set(CTRL, Control::RST);
    assert!(!bench.is_active());
}

#[test]
fn bme_ignored_ends_with_a_function_level_reset_and_with_a_stop() {
    for stop in [true, false] {
        let mut bench = Bench::running();
        bench.fault("bme-ignored");
        bench.config(COMMAND, &[2, 0]);
        if stop {
            bench.stop_receive();
            bench.set(TXDCTL, TransmitQueueControl::empty());
        } else {
            bench.reset_function();
        }
        assert!(!bench.is_active(), "stop {stop}");
    }
}

#[test]
fn bme_readback_reads_as_set_and_masters_nothing() {
    let mut bench = Bench::running();
    bench.fault("bme-readback");
    bench.config(COMMAND, &[2, 0]);
    assert_eq!(bench.config_byte(COMMAND), 6);
    bench.send(0, 1);
    assert!(!bench.rx(0).is_done());
    bench.reset_function();
    bench.config(COMMAND, &[0, 0]);
    assert_eq!(bench.config_byte(COMMAND), 4);
}

#[test]
fn late_dd_completes_late_also_with_mastering_off() {
    let mut bench = Bench::running();
    bench.fault("late-dd:20");
    bench.send(0, 1);
    bench.config(COMMAND, &[2, 0]);
    bench.wait(19);
    assert!(!bench.rx(0).is_done() && !bench.tx_done(0));
    bench.wait(1);
    assert!(bench.rx(0).is_done() && bench.tx_done(0));
}

#[test]
fn a_reset_drops_what_is_late() {
    for function in [true, false] {
        let mut bench = Bench::running();
        bench.fault("late-dd:20");
        bench.send(0, 1);
        if function {
            bench.reset_function();
        } else {
            bench.set(CTRL, Control::RST);
        }
        bench.wait(30);
        assert!(!bench.rx(0).is_done(), "function {function}");
    }
}

#[test]
fn data_lands_after_a_stop_that_was_acknowledged() {
    let mut bench = Bench::running();
    bench.fault("data-after-stop:300");
    bench.stop_receive();
    assert!(!bench.enabled().0);
    bench.world.now += Duration::from_micros(299);
    bench.run();
    assert!(!bench.rx(0).is_done());
    bench.world.now += Duration::from_micros(1);
    bench.run();
    assert!(bench.rx(0).is_done());
    assert_eq!(bench.buffer(0), 0xD5);
    assert!(!bench.is_active(), "it lands once");
}

#[test]
fn dma_outside_meets_no_mapping_and_obeys_bus_master() {
    for place in ["", ":read", ":write", ":guard"] {
        let mut bench = Bench::running();
        bench.fault(&format!("dma-outside{place}"));
        // A driver's own reset at open is no cure.
        bench.reset_function();
        bench.bring_up();
        bench.wait(10);
        let (blocked, reached, late) = bench.rogue();
        assert!(blocked >= 9, "{place}: {blocked}");
        assert_eq!((reached, late), (0, 0), "{place}");
        bench.config(COMMAND, &[2, 0]);
        assert!(!bench.is_active(), "{place}");
    }
}

#[test]
fn dma_outside_guard_is_next_to_what_was_given() {
    let mut bench = Bench::running();
    bench.fault("dma-outside:guard");
    bench.wait(4);
    let end = BASE + bench.world.memory.len() as u64;
    assert_eq!(bench.world.stray.len(), 4);
    assert!(
        bench.world.stray.iter().all(|iova| *iova == end),
        "{:x?}",
        bench.world.stray
    );
}

#[test]
fn a_gone_function_comes_back_as_it_was() {
    let mut bench = Bench::running();
    bench.fault("gone:20");
    bench.set(FCTTV, 0x5AFEu32);
    assert_eq!(bench.at(8), u32::MAX);
    bench.wait(19);
    assert_eq!(bench.config_byte(COMMAND), 0xFF);
    bench.wait(1);
    assert_eq!(
        (bench.config_byte(COMMAND), bench.at(FCTTV.offset())),
        (6, 0)
    );
    bench.send(0, 1);
    assert!(bench.rx(0).is_done());
}

#[test]
fn a_gone_function_cannot_be_reset() {
    let mut bench = Bench::running();
    bench.fault("gone:20");
    let reset = bench.device.reset_function(&mut bench.world);
    assert!(matches!(reset, Reset::Failed(_)));
    bench.wait(20);
    assert_eq!(bench.get(RDLEN), DESCRIPTORS * 16);
}

#[test]
fn pending_stuck_reads_transactions_pending_until_it_is_taken_back() {
    let mut bench = Bench::running();
    assert_eq!(bench.config_byte(DEVICE_STATUS) & 0x20, 0);
    bench.fault("pending-stuck");
    assert_eq!(bench.config_byte(DEVICE_STATUS) & 0x20, 0x20);
    bench.reset_function();
    assert_eq!(bench.config_byte(DEVICE_STATUS) & 0x20, 0x20);
    bench.device.clear_faults(&mut bench.world);
    assert_eq!(bench.config_byte(DEVICE_STATUS) & 0x20, 0);
}

#[test]
fn flr_fails_resets_nothing_and_says_why() {
    let mut bench = Bench::running();
    bench.fault("flr-fails:ENODEV");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    assert_eq!(bench.get(RDLEN), DESCRIPTORS * 16);
    let reset = bench.device.reset_function(&mut bench.world);
    assert_eq!(reset, Reset::Failed(nix::errno::Errno::ENODEV));
}

#[test]
fn flr_hangs_leaves_a_function_that_never_comes_back_until_it_is_taken_back() {
    let mut bench = Bench::running();
    bench.fault("flr-hangs");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.wait(1000);
    assert_eq!((bench.at(8), bench.config_byte(0)), (u32::MAX, 0xFF));
    let again = bench.device.reset_function(&mut bench.world);
    assert_eq!(again, Reset::Hangs);
    bench.device.clear_faults(&mut bench.world);
    assert_eq!(
        (bench.config_byte(0), bench.config_byte(COMMAND)),
        (0x86, 0)
    );
}

#[test]
fn flr_noop_claims_success_and_queues_go_on_until_ctrl_rst() {
    let mut bench = Bench::running();
    bench.fault("flr-noop");
    bench.set(FCTTV, 0x5AFEu32);
    let reset = bench.device.reset_function(&mut bench.world);
    assert_eq!(reset, Reset::Done);
    assert_eq!(bench.at(FCTTV.offset()), 0x5AFE);
    assert!(bench.is_active());
    bench.set(CTRL, Control::RST);
    assert!(!bench.is_active());
    assert_eq!(bench.at(FCTTV.offset()), 0);
}

#[test]
fn rst_noop_keeps_everything_and_queues_go_on_until_a_function_level_reset() {
    let mut bench = Bench::running();
    bench.fault("rst-noop");
    bench.set(FCTTV, 0x5AFEu32);
    bench.set(CTRL, Control::RST);
    assert!(!bench.get(CTRL).contains(Control::RST));
    assert_eq!(bench.at(FCTTV.offset()), 0x5AFE);
    assert!(bench.is_active());
    bench.reset_function();
    assert!(!bench.is_active());
    assert_eq!(bench.at(FCTTV.offset()), 0);
}

#[test]
fn queues_survive_their_client_where_no_reset_works_and_meet_the_next_one_s_memory() {
    let mut bench = Bench::running();
    bench.fault("flr-noop");
    bench.fault("rst-noop");
    bench.device.release(&mut bench.world);
    bench.world.mapping = Some(1);
    assert!(!bench.is_active(), "the machine has switched mastering off");
    bench.set(CTRL, Control::RST);
    bench.config(COMMAND, &[6, 0]);
    assert!(bench.is_active());
    assert!(bench.rogue().1 > 0);
}

#[test]
fn no_flr_shows_no_capability_and_nothing_resets_the_function() {
    let mut bench = Bench::running();
    assert_eq!(bench.config_byte(DEVICE_CONTROL - 1) & 0x10, 0x10);
    bench.fault("no-flr");
    assert_eq!(bench.config_byte(DEVICE_CONTROL - 1) & 0x10, 0);
    assert_eq!(bench.config_byte(PM_CONTROL) & 8, 8, "No_Soft_Reset");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.config(PM_CONTROL, &[3, 0]);
    bench.config(PM_CONTROL, &[0, 0]);
    assert_eq!(bench.get(RDLEN), DESCRIPTORS * 16);
    let reset = bench.device.reset_function(&mut bench.world);
    assert_eq!(reset, Reset::Absent);
    bench.set(CTRL, Control::RST);
    assert_eq!(bench.get(RDLEN), 0, "CTRL.RST works");
}

#[test]
fn master_stuck_stays_set_only_while_the_link_is_down() {
    let mut bench = Bench::running();
    bench.fault("master-stuck-linkdown");
    bench.reset_function();
    bench.bring_up();
    let control = bench.get(CTRL);
    bench.set(CTRL, control | Control::GIO_MASTER_DISABLE);
    assert!(!bench.get(STATUS).contains(Status::GIO_MASTER_ENABLE));
    bench.set(CTRL, (control - Control::SLU) | Control::GIO_MASTER_DISABLE);
    assert!(bench.get(STATUS).contains(Status::GIO_MASTER_ENABLE));
}

#[test]
fn statistics_that_wrap_do_so_through_resets() {
    let mut bench = Bench::running();
    bench.fault("stats-wrap");
    bench.set(CTRL, Control::RST);
    assert!(bench.at(failstop::igb::statistics::GPTC.offset()) > u32::MAX - 100);
}

#[test]
fn statistics_that_run_backwards_do() {
    let mut bench = Bench::running();
    bench.fault("stats-backwards");
    let gptc = failstop::igb::statistics::GPTC.offset();
    let first = bench.at(gptc);
    bench.send(0, 1);
    assert!(bench.at(gptc) < first);
    bench.device.clear_faults(&mut bench.world);
    assert_eq!(bench.at(gptc), 0);
}

#[test]
fn the_link_flaps_with_its_period() {
    let mut bench = Bench::running();
    bench.fault("link-flaps:10");
    let mut seen = Vec::new();
    for _ in 0..4 {
        bench.run();
        seen.push(bench.get(STATUS).contains(Status::LU));
        bench.wait(10);
    }
    assert_eq!(seen, [false, true, false, true]);
    let next = bench.device.next_event(bench.world.now);
    assert_eq!(next, Some(bench.world.now + Duration::from_millis(10)));
    bench.device.clear_faults(&mut bench.world);
    bench.wait(25);
    assert!(bench.device.has_link());
}

#[test]
fn a_self_reset_happens_once_and_tells_only_if_it_should() {
    for (spec, notices) in [
        ("self-reset", vec![]),
        ("self-reset:notice", vec![Notice::Error]),
    ] {
        let mut bench = Bench::running();
        bench.set(FCTTV, 0x5AFEu32);
        bench.fault(spec);
        assert_eq!((bench.at(FCTTV.offset()), bench.get(RDLEN)), (0, 0));
        assert_eq!(bench.config_byte(COMMAND), 6, "configuration space stays");
        assert_eq!(bench.world.notices, notices);
        bench.bring_up();
        bench.send(0, 1);
        assert!(bench.rx(0).is_done());
    }
}

#[test]
fn a_storm_fires_until_it_is_taken_back() {
    let mut bench = Bench::running();
    bench.world.interrupts.clear();
    bench.fault("irq-storm");
    bench.wait(3);
    assert_eq!(bench.world.interrupts.len(), 3 * VECTORS as usize);
    bench.fault("irq-storm:error");
    bench.wait(3);
    assert_eq!(bench.world.notices, [Notice::Error; 3]);
    bench.fault("irq-storm:request");
    bench.wait(1);
    assert_eq!(bench.world.notices.last(), Some(&Notice::Request));
    bench.device.clear_faults(&mut bench.world);
    bench.world.notices.clear();
    bench.wait(3);
    assert!(bench.world.notices.is_empty());
}

/// Receive queue 0 on vector 3, transmit on vector 2.
fn routed(spec: &str) -> Bench {
    let mut bench = Bench::running();
    bench.set(GPIE, failstop::igb::bits::GeneralInterrupt::MULTIPLE_MSIX);
    bench.set(IVAR, 0x0000_8283u32);
    bench.set(EIMS, 0xFFu32);
    bench.world.interrupts.clear();
    bench.fault(spec);
    bench.send(0, 1);
    bench.world.interrupts.sort_unstable();
    bench
}

#[test]
fn irq_none_sends_nothing() {
    assert_eq!(routed("irq-none").world.interrupts, [0; 0]);
}

#[test]
fn irq_wrong_vector_sends_the_next_one() {
    assert_eq!(routed("irq-wrong-vector").world.interrupts, [3, 4]);
}

#[test]
fn a_power_cycle_forgets_everything_but_faults_counters_and_the_cable() {
    let mut bench = Bench::running();
    bench.device.set_carrier(true, &mut bench.world);
    bench.fault("flr-hangs");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.device.power_cycle(&mut bench.world);
    assert_eq!(
        (bench.config_byte(0), bench.config_byte(COMMAND)),
        (0x86, 0)
    );
    assert_eq!(bench.device.reset_function(&mut bench.world), Reset::Hangs);
}

#[test]
fn nonsense_never_breaks_a_model_with_any_fault() {
    let mut nonsense = Nonsense::new();
    for entry in crate::faults::TABLE {
        let arguments = match entry.arguments {
            text if text.starts_with(':') => ":1",
            _ => "",
        };
        let mut bench = Bench::running();
        for trigger in ["", "@random=1/100", "@destroy"] {
            bench.fault(&format!("{}{arguments}{trigger}", entry.name));
            for round in 0..200u32 {
                nonsense.write(&mut bench);
                bench.world.now += Duration::from_micros(100);
                if round % 32 == 0 {
                    bench.world.mapping = bench.world.mapping.map(|serial| serial + 1);
                    bench.reset_function();
                    bench.bring_up();
                }
            }
        }
        bench.device.clear_faults(&mut bench.world);
        bench.reset_function();
        bench.bring_up();
        bench.send(0, 1);
        assert!(
            bench.rx(0).is_done(),
            "{} left something behind",
            entry.name
        );
    }
}

#[test]
fn a_self_reset_happens_where_ctrl_rst_does_nothing() {
    let mut bench = Bench::running();
    bench.fault("rst-noop");
    bench.fault("self-reset");
    assert_eq!(bench.get(RDLEN), 0);
}

#[test]
fn interrupts_are_as_they_should_be_when_a_fault_is_taken_back() {
    for spec in ["irq-none", "irq-wrong-vector"] {
        let mut bench = routed(spec);
        bench.device.clear_faults(&mut bench.world);
        bench.at(EICR.offset());
        bench.world.interrupts.clear();
        bench.send(1, 1);
        bench.world.interrupts.sort_unstable();
        assert_eq!(bench.world.interrupts, [2, 3], "{spec}");
    }
}
