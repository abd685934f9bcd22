//! The model as a driver sees it, in a world of plain memory.

use failstop::igb::bits::{
    EepromControl, EepromRead, Mdi, ReceiveControl, ReceiveQueueControl, SplitReceive, Status,
    Thresholds, TransmitControl, TransmitQueueControl,
};
use failstop::igb::descriptors::{RxDone, RxRead, TxData, TxDone};
use failstop::igb::phy::CONTROL;
use failstop::igb::registers::*;
use failstop_pci::register::{Reg, Value};

use super::*;
use crate::testing::{BASE, World};

mod faults;
mod lies;
mod moments;

const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x10];
const RX_RING: u64 = BASE;
const TX_RING: u64 = BASE + 0x1000;
const RX_BUFFERS: u64 = BASE + 0x10000;
const TX_BUFFERS: u64 = BASE + 0x40000;
const DESCRIPTORS: u32 = 16;
const BUFFER: u64 = 2048;

const COMMAND: u64 = 4;
const PM_CONTROL: u64 = 0x44;
const DEVICE_CONTROL: u64 = 0xa8;
const DEVICE_STATUS: u64 = 0xaa;

/// A device and its world, and the driver's side of the registers.
struct Bench {
    device: Device,
    world: World,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            device: Device::new(MAC, Duration::ZERO),
            world: World::default(),
        };
        bench.config(COMMAND, &[6, 0]);
        bench
    }

    /// A device with both rings on, in PHY loopback, promiscuous.
    fn running() -> Self {
        let mut bench = Self::new();
        bench.bring_up();
        bench
    }

    fn bring_up(&mut self) {
        self.set(MDIC, Mdi::write(CONTROL, 0x4140));
        let forced =
            Control::SLU | Control::FRCSPD | Control::FRCDPLX | Control::SPEED_1000 | Control::FD;
        self.set(CTRL, forced);
        for n in 0..DESCRIPTORS {
            let words = RxRead::one_buffer(RX_BUFFERS + u64::from(n) * BUFFER).words();
            self.world.put(RX_RING + u64::from(n) * 16, words);
        }
        self.set(RDBAL, RX_RING as u32);
        self.set(RDBAH, (RX_RING >> 32) as u32);
        self.set(RDLEN, DESCRIPTORS * 16);
        self.set(SRRCTL, SplitReceive::one_buffer(2048));
        self.set(RXDCTL, ReceiveQueueControl::ENABLE);
        self.set(TDBAL, TX_RING as u32);
        self.set(TDBAH, (TX_RING >> 32) as u32);
        self.set(TDLEN, DESCRIPTORS * 16);
        self.set(TXDCTL, TransmitQueueControl::ENABLE);
        self.set(
            RCTL,
            ReceiveControl::RXEN | ReceiveControl::UPE | ReceiveControl::SECRC,
        );
        self.set(TCTL, TransmitControl::TXEN | TransmitControl::PSP);
        self.set(RDT, DESCRIPTORS - 1);
    }

    fn set<V: Value>(&mut self, register: Reg<V>, value: V) {
        let bytes = value.bits().to_le_bytes();
        let offset = u64::from(register.offset());
        self.device
            .write(Region::Registers, offset, &bytes, &mut self.world)
            .unwrap();
    }

    fn at(&mut self, offset: u32) -> u32 {
        let mut bytes = [0; 4];
        self.device
            .read(
                Region::Registers,
                u64::from(offset),
                &mut bytes,
                &mut self.world,
            )
            .unwrap();
        u32::from_le_bytes(bytes)
    }

    fn get<V: Value>(&mut self, register: Reg<V>) -> V {
        V::from_bits(self.at(register.offset()))
    }

    fn config(&mut self, offset: u64, bytes: &[u8]) {
        self.device
            .write(Region::Config, offset, bytes, &mut self.world)
            .unwrap();
    }

    fn config_byte(&mut self, offset: u64) -> u8 {
        let mut byte = [0];
        self.device
            .read(Region::Config, offset, &mut byte, &mut self.world)
            .unwrap();
        byte[0]
    }

    fn run(&mut self) {
        self.device.run(&mut self.world);
    }

    fn fault(&mut self, spec: &str) {
        self.device
            .add_fault(spec.parse().unwrap(), &mut self.world);
    }

    /// Puts a frame of `len` bytes of `fill` into transmit slot `n`, without ringing.
    fn post(&mut self, n: u32, len: u16, fill: u8) {
        let buffer = TX_BUFFERS + u64::from(n) * BUFFER;
        let at = (buffer - BASE) as usize;
        self.world.memory[at..at + usize::from(len)].fill(fill);
        self.world.memory[at] = 2; // unicast
        let words = TxData::whole(buffer, len, true).words();
        self.world.put(TX_RING + u64::from(n) * 16, words);
    }

    /// Sends `count` frames from slot `first` on.
    fn send(&mut self, first: u32, count: u32) {
        for n in first..first + count {
            self.post(n, 60, 0x40 + n as u8);
        }
        self.set(TDT, first + count);
    }

    /// Lets time pass, a millisecond at a time.
    fn wait(&mut self, ms: u64) {
        for _ in 0..ms {
            self.world.now += Duration::from_millis(1);
            self.run();
        }
    }

    /// A function level reset, with decoding and mastering on afterwards.
    fn reset_function(&mut self) {
        self.config(DEVICE_CONTROL, &[0x10, 0xa8]);
        self.config(COMMAND, &[6, 0]);
    }

    /// Whether a queue's ENABLE reads as set: receive, then transmit.
    fn enabled(&mut self) -> (bool, bool) {
        (
            self.get(RXDCTL).contains(ReceiveQueueControl::ENABLE),
            self.get(TXDCTL).contains(TransmitQueueControl::ENABLE),
        )
    }

    fn stop_receive(&mut self) {
        self.set(RXDCTL, ReceiveQueueControl::empty());
    }

    /// Whether the device issues DMA by itself within some milliseconds.
    fn is_active(&mut self) -> bool {
        let before = (self.world.accesses, self.world.stray.len());
        self.wait(5);
        before != (self.world.accesses, self.world.stray.len())
    }

    /// What a receive buffer begins with.
    fn buffer(&self, n: usize) -> u8 {
        let at = (RX_BUFFERS - BASE + n as u64 * BUFFER) as usize;
        self.world.memory[at]
    }

    fn rogue(&self) -> (u64, u64, u64) {
        let counts = self.device.rogue_dma();
        (counts.blocked, counts.reached, counts.late)
    }

    fn rx(&self, n: u32) -> RxDone {
        RxDone(self.world.word(RX_RING + u64::from(n) * 16 + 8))
    }

    fn tx_done(&self, n: u32) -> bool {
        TxDone(self.world.word(TX_RING + u64::from(n) * 16 + 8)).is_done()
    }

    fn counters(&self) -> &DeviceCounters {
        self.device.counters()
    }
}

#[test]
fn a_frame_sent_in_phy_loopback_arrives() {
    let mut bench = Bench::running();
    bench.send(0, 1);
    assert!(bench.tx_done(0));
    let done = bench.rx(0);
    assert!(done.is_done() && done.is_whole());
    assert_eq!(done.length(), 60);
    let at = (RX_BUFFERS - BASE) as usize;
    assert_eq!(bench.world.memory[at + 1..at + 60], [0x40; 59]);
    assert_eq!((bench.get(RDH), bench.get(TDH)), (1, 1));
}

#[test]
fn rctl_lbm_alone_loops_nothing_back() {
    let mut bench = Bench::running();
    bench.set(MDIC, Mdi::write(CONTROL, 0x1140));
    bench.device.set_carrier(true, &mut bench.world);
    bench.world.now += Duration::from_millis(20);
    bench.set(
        RCTL,
        ReceiveControl::RXEN | ReceiveControl::UPE | ReceiveControl::LBM_0,
    );
    bench.send(0, 1);
    assert_eq!((bench.world.wire.len(), bench.counters().rx_frames), (1, 0));
}

#[test]
fn only_descriptors_with_rs_are_written_back() {
    let mut bench = Bench::running();
    bench.post(0, 60, 1);
    let words = TxData::whole(TX_BUFFERS, 60, false).words();
    bench.world.put(TX_RING, words);
    bench.set(TDT, 1);
    assert!(!bench.tx_done(0));
    assert_eq!(bench.get(TDH), 1);
}

#[test]
fn a_frame_larger_than_a_buffer_spans_descriptors() {
    let mut bench = Bench::running();
    bench.set(RLPML, 9018);
    bench.set(RCTL, bench_long());
    for n in 0..2 {
        bench.post(n, 2048, 7);
    }
    let mut first = TxData::whole(TX_BUFFERS, 2048, false);
    first.command -= failstop::igb::descriptors::TxCommand::EOP;
    bench.world.put(TX_RING, first.words());
    bench.set(TDT, 2);
    assert!(!bench.rx(0).is_whole() && bench.rx(1).is_whole());
    assert_eq!((bench.rx(0).length(), bench.rx(1).length()), (2048, 2048));
}

fn bench_long() -> ReceiveControl {
    ReceiveControl::RXEN | ReceiveControl::UPE | ReceiveControl::SECRC | ReceiveControl::LPE
}

#[test]
fn a_frame_that_is_too_long_is_dropped_and_counted() {
    let mut bench = Bench::running();
    bench.post(0, 1519, 7);
    bench.set(TDT, 1);
    assert!(!bench.rx(0).is_done());
    assert_eq!(bench.at(failstop::igb::statistics::ROC.offset()), 1);
}

#[test]
fn frames_wait_in_the_packet_buffer_for_descriptors() {
    let mut bench = Bench::running();
    bench.set(RDT, 1);
    bench.send(0, 3);
    assert_eq!(bench.counters().rx_frames, 1);
    bench.set(RDT, 5);
    assert_eq!(bench.counters().rx_frames, 3);
}

#[test]
fn enable_reads_zero_until_receiver_and_transmitter_are_on() {
    let mut bench = Bench::new();
    bench.set(RXDCTL, ReceiveQueueControl::ENABLE);
    bench.set(TXDCTL, TransmitQueueControl::ENABLE);
    assert!(!bench.get(RXDCTL).contains(ReceiveQueueControl::ENABLE));
    assert!(!bench.get(TXDCTL).contains(TransmitQueueControl::ENABLE));
    bench.set(RCTL, ReceiveControl::RXEN);
    bench.set(TCTL, TransmitControl::TXEN);
    assert!(bench.get(RXDCTL).contains(ReceiveQueueControl::ENABLE));
    assert!(bench.get(TXDCTL).contains(TransmitQueueControl::ENABLE));
}

#[test]
fn a_stopped_queue_reads_its_thresholds_and_no_enable() {
    let mut bench = Bench::running();
    let thresholds = Thresholds {
        prefetch: 8,
        host: 8,
        write_back: 4,
    };
    bench.set(
        RXDCTL,
        ReceiveQueueControl::from_bits_retain(thresholds.bits()),
    );
    assert_eq!(bench.get(RXDCTL).bits(), 0x0004_0808);
}

#[test]
fn a_stopped_receive_queue_writes_nothing() {
    let mut bench = Bench::running();
    bench.set(RXDCTL, ReceiveQueueControl::empty());
    bench.send(0, 1);
    assert!(!bench.rx(0).is_done());
}

#[test]
fn bus_master_off_stops_all_dma_and_on_resumes_it() {
    let mut bench = Bench::running();
    bench.config(COMMAND, &[2, 0]);
    let before = bench.world.accesses;
    bench.send(0, 2);
    bench.run();
    assert_eq!(bench.world.accesses, before);
    bench.config(COMMAND, &[6, 0]);
    assert_eq!(bench.counters().rx_frames, 2);
}

#[test]
fn bus_master_off_sends_no_interrupt_message() {
    let mut bench = Bench::running();
    bench.set(IMS, InterruptCause::LSC);
    bench.world.interrupts.clear();
    bench.config(COMMAND, &[2, 0]);
    bench.set(ICS, InterruptCause::LSC);
    assert!(bench.world.interrupts.is_empty());
}

#[test]
fn master_disable_stops_dma_and_status_says_so() {
    let mut bench = Bench::running();
    let control = bench.get(CTRL) | Control::GIO_MASTER_DISABLE;
    bench.set(CTRL, control);
    let before = bench.world.accesses;
    bench.send(0, 1);
    assert_eq!(bench.world.accesses, before);
    assert!(!bench.get(STATUS).contains(Status::GIO_MASTER_ENABLE));
}

#[test]
fn d3hot_stops_dma_and_hides_the_registers() {
    let mut bench = Bench::running();
    bench.config(PM_CONTROL, &[3, 0]);
    let before = bench.world.accesses;
    bench.send(0, 1);
    assert_eq!((bench.world.accesses, bench.at(0)), (before, u32::MAX));
}

#[test]
fn leaving_d3hot_resets_the_mac() {
    let mut bench = Bench::running();
    bench.config(PM_CONTROL, &[3, 0]);
    bench.config(PM_CONTROL, &[0, 0]);
    bench.config(COMMAND, &[6, 0]);
    assert_eq!(bench.get(RDLEN), 0);
}

#[test]
fn memory_space_off_reads_all_ones() {
    let mut bench = Bench::running();
    bench.config(COMMAND, &[4, 0]);
    assert_eq!(bench.at(8), u32::MAX);
}

#[test]
fn c20_a_function_level_reset_stops_dma_for_good() {
    let mut bench = Bench::running();
    bench.send(0, 1);
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    let before = bench.world.accesses;
    // Even with bus mastering, memory space, receiver and transmitter back on.
    bench.config(COMMAND, &[6, 0]);
    bench.set(RCTL, ReceiveControl::RXEN | ReceiveControl::UPE);
    bench.set(TCTL, TransmitControl::TXEN);
    bench.set(CTRL, Control::SLU);
    bench.set(TDT, 8);
    bench.world.now += Duration::from_secs(1);
    bench.run();
    assert_eq!(bench.world.accesses, before);
    assert_eq!((bench.get(TDLEN), bench.get(RDBAL)), (0, 0));
}

#[test]
fn a_function_level_reset_clears_bus_master_and_keeps_phy_loopback() {
    let mut bench = Bench::running();
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    assert_eq!(bench.config_byte(COMMAND), 0);
    bench.config(COMMAND, &[6, 0]);
    bench.set(MDIC, Mdi::read(CONTROL));
    assert_eq!(bench.get(MDIC).data(), 0x4140);
}

#[test]
fn a_software_reset_defaults_the_mac_and_reloads_its_address() {
    let mut bench = Bench::running();
    bench.set(RAL, 0xDEAD_BEEFu32);
    bench.set(CTRL, Control::RST);
    assert!(!bench.get(CTRL).contains(Control::RST));
    assert_eq!((bench.get(RDLEN), bench.get(RCTL).bits()), (0, 0));
    assert_eq!(bench.get(RAL), 0x0000_0002);
}

#[test]
fn the_nvm_is_read_a_millisecond_after_a_software_reset() {
    let mut bench = Bench::new();
    bench.set(CTRL, Control::RST);
    assert!(!bench.get(EECD).contains(EepromControl::AUTO_RD));
    bench.world.now += Duration::from_millis(1);
    assert_eq!(bench.get(EECD).bits(), 0x2300);
}

#[test]
fn a_stray_read_wedges_the_queue_until_a_function_level_reset() {
    let mut bench = Bench::running();
    let words = TxData::whole(0xDEAD_0000, 60, true).words();
    bench.world.put(TX_RING, words);
    bench.set(TDT, 1);
    assert_eq!(bench.world.stray, [0xDEAD_0000]);
    bench.set(CTRL, Control::RST);
    bench.bring_up();
    bench.send(0, 1);
    assert!(!bench.tx_done(0), "a software reset freed the engine");
    bench.config(DEVICE_CONTROL, &[0x10, 0xa8]);
    bench.config(COMMAND, &[6, 0]);
    bench.bring_up();
    bench.send(0, 1);
    assert!(bench.tx_done(0));
}

#[test]
fn a_stray_write_is_lost_and_the_queue_goes_on() {
    let mut bench = Bench::running();
    bench.world.put(RX_RING, [0xDEAD_0000, 0]);
    bench.send(0, 2);
    assert_eq!(bench.world.stray, [0xDEAD_0000]);
    assert!(bench.rx(1).is_done());
}

#[test]
fn the_eeprom_answers_through_eerd() {
    let mut bench = Bench::new();
    bench.set(EERD, EepromRead::of(2));
    let answer = bench.get(EERD);
    assert!(answer.contains(EepromRead::DONE));
    assert_eq!(answer.data(), 0x1000);
}

#[test]
fn the_first_read_of_swsm_takes_the_semaphore() {
    let mut bench = Bench::new();
    assert_eq!((bench.at(0x5B50), bench.at(0x5B50)), (0, 1));
    bench.set(SWSM, failstop::igb::bits::SoftwareSemaphore::SWESMBI);
    assert_eq!(bench.at(0x5B50), 2);
}

#[test]
fn status_at_probe_is_what_linux_expects() {
    let mut bench = Bench::new();
    assert_eq!(bench.at(8), 0x0008_0081);
}

#[test]
fn a_frame_from_the_wire_needs_link_and_receiver() {
    let mut bench = Bench::running();
    bench.set(MDIC, Mdi::write(CONTROL, 0x1140));
    bench.device.receive(vec![2; 60], &mut bench.world);
    assert_eq!(bench.counters().rx_frames, 0);
    bench.device.set_carrier(true, &mut bench.world);
    bench.world.now += Duration::from_millis(20);
    bench.run();
    bench.device.receive(vec![2; 60], &mut bench.world);
    assert_eq!(bench.counters().rx_frames, 1);
}

#[test]
fn a_received_frame_fires_its_queue_s_vector() {
    let mut bench = Bench::running();
    bench.set(GPIE, failstop::igb::bits::GeneralInterrupt::MULTIPLE_MSIX);
    bench.set(IVAR, 0x0000_8283u32);
    bench.set(EIMS, 0xFFu32);
    bench.world.interrupts.clear();
    bench.send(0, 1);
    bench.world.interrupts.sort_unstable();
    assert_eq!(bench.world.interrupts, [2, 3]);
}

#[test]
fn a_ring_of_nonsense_does_nothing() {
    let mut bench = Bench::running();
    bench.set(TDT, 0xFFFF);
    bench.set(TDLEN, 0);
    bench.set(TDH, 0xFFFF);
    bench.run();
    assert_eq!(bench.counters().tx_frames, 0);
}

#[test]
fn a_partial_word_of_a_register_is_refused() {
    let mut bench = Bench::new();
    let result = bench
        .device
        .read(Region::Registers, 2, &mut [0; 2], &mut bench.world);
    assert!(result.is_err());
}

#[test]
fn an_access_beyond_a_region_is_refused() {
    let mut bench = Bench::new();
    let mut word = [0; 4];
    for (region, offset) in [
        (Region::Registers, 128 * 1024),
        (Region::Registers, u64::MAX - 3),
        (Region::MsiX, 16 * 1024),
        (Region::Config, 4096),
        (Region::Io, 8),
    ] {
        let result = bench
            .device
            .read(region, offset, &mut word, &mut bench.world);
        assert!(result.is_err(), "{region:?} {offset:#x}");
    }
}

#[test]
fn registers_are_reached_through_the_io_bar() {
    let mut bench = Bench::new();
    let world = &mut bench.world;
    bench
        .device
        .write(Region::Io, 0, &8u32.to_le_bytes(), world)
        .unwrap();
    let mut word = [0; 4];
    bench.device.read(Region::Io, 4, &mut word, world).unwrap();
    assert_eq!(u32::from_le_bytes(word), 0x0008_0081);
}

/// A driver that has lost its mind: nonsense written everywhere, the same in each run.
struct Nonsense {
    state: u64,
}

impl Nonsense {
    fn new() -> Self {
        Self {
            state: 0x9E37_79B9_7F4A_7C15,
        }
    }

    /// A linear congruential generator.
    fn random(&mut self) -> u64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.state >> 16
    }

    /// Writes a register and a descriptor; most at queue, control and interrupt registers, and at
    /// plausible addresses.
    fn write(&mut self, bench: &mut Bench) {
        let value = self.random() as u32;
        let offset = match self.random() % 8 {
            0 => 0xC000 + self.random() % 0x100,
            1 => 0xE000 + self.random() % 0x100,
            2 => self.random() % 0x1_FFFC,
            3 => 0x1500 + self.random() % 0x300,
            4 => 0x5000 + self.random() % 0xD00,
            _ => [0x0000, 0x0020, 0x0100, 0x0400, 0xC018, 0xE018][self.random() as usize % 6],
        } & !3;
        let value = match self.random() % 3 {
            0 => value,
            1 => value & 0xFF,
            _ => (BASE as u32) | value & 0x000F_FFFF,
        };
        // Data and context descriptors of any lengths, offloads and, now and then, addresses.
        let kind = [0x2B30_0000, 0xAB30_0000, 0x2A30_0000, 0x2020_0C00][self.random() as usize % 4];
        let far = usize::from(self.random().is_multiple_of(50));
        let address = [BASE | self.random() & 0xF_FFFF, self.random() << 4][far];
        let descriptor = [address, self.random() << 32 | kind | self.random() & 0x3FF];
        bench
            .world
            .put(TX_RING + self.random() % 16 * 16, descriptor);
        let bytes = value.to_le_bytes();
        let world = &mut bench.world;
        bench
            .device
            .write(Region::Registers, offset, &bytes, world)
            .unwrap();
    }
}

#[test]
fn a_driver_that_writes_nonsense_everywhere_never_breaks_the_model() {
    let mut bench = Bench::running();
    let mut nonsense = Nonsense::new();
    for round in 0..60_000u32 {
        nonsense.write(&mut bench);
        if round % 64 == 0 {
            bench.set(TDT, nonsense.random() as u32 % 16);
            bench.reset_function();
            bench.bring_up();
        }
    }
    assert!(bench.counters().function_resets > 200);
    assert!(bench.counters().tx_frames > 0 && bench.counters().aborts > 0);
}
