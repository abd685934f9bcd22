//! What the driver makes of values that no device should write, and of callers that mix things up.
#![forbid(unsafe_code)]

use std::sync::Arc;

use failstop::device::{Device, Options};
use failstop::igb::registers as reg;
use failstop::ladder::Word;
use failstop::objects::{CreateError, QueueInit};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop_pci::clock::ManualClock;
use failstop_pci::id::Generation;
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::transport::{RegionIndex, Transport};

/// An 82576 that says what bring-up waits for, and otherwise stores what is written.
fn fake() -> Arc<FakeFunction> {
    let mut header = vec![0; 64];
    header[..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
    header[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]);
    let function = FakeFunction::new(limits_39_bits())
        .unwrap()
        .with_config(&header)
        .by_messages();
    let answers = [
        (reg::STATUS.offset(), 0x0000_0002), // Link up.
        (reg::EECD.offset(), 0x0000_0200),   // Loaded.
        (reg::MDIC.offset(), 0x1000_0000),   // Ready.
        (reg::RAL.offset(), 0x8200_0002),
        (reg::RAH.offset(), 0x8000_6057),
    ];
    for (offset, value) in answers {
        function.answer_register(offset.into(), value);
    }
    Arc::new(function)
}

fn open(function: &Arc<FakeFunction>) -> Device {
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    Device::open_with(function.clone(), &Config::default(), options).unwrap()
}

fn is_bus_master(function: &FakeFunction) -> bool {
    let mut command = [0; 2];
    function
        .read(Generation::FIRST, RegionIndex::Config, 4, &mut command)
        .unwrap();
    command[0] & 4 != 0
}

/// Where the device was told that its receive ring is.
fn receive_ring(function: &FakeFunction) -> u64 {
    let mut low = [0; 4];
    let at = u64::from(reg::RDBAL.offset());
    function
        .read(Generation::FIRST, RegionIndex::Bar(0), at, &mut low)
        .unwrap();
    u32::from_le_bytes(low).into()
}

/// The device is not trusted (R8).
#[test]
fn an_impossible_descriptor_ends_bus_mastering_and_new_mappings_at_once() {
    let function = fake();
    let device = open(&function);
    let mut port = Port::open(&device, &PortConfig::default()).unwrap();
    let mut frames = port.take_frames(1).unwrap();
    assert!(is_bus_master(&function));

    // Done, end of packet, 0xffff bytes.
    let word = 0xffff_0000_0003u64 | 0xffff << 32;
    assert!(function.dma_write(receive_ring(&function) + 8, &word.to_le_bytes()));
    assert_eq!(port.rx_burst(&mut frames), 0);

    assert!(matches!(
        device.broken(),
        Some(Cause::ImpossibleValue { .. })
    ));
    assert!(device.alloc_pd().is_err());
    let report = device.revocation().unwrap();
    assert!(!is_bus_master(&function), "bus mastering stays on");
    assert_eq!(report.verdict, Word::Revoked, "{report}");
    assert_eq!(function.mapped(), []);
    drop((port, frames));
    assert_eq!(device.close().totals.quarantined_mappings, 0);
}

#[test]
fn a_queue_that_an_object_has_is_not_given_to_another() {
    let function = fake();
    let device = open(&function);
    let port = Port::open(&device, &PortConfig::default()).unwrap();
    let again = Port::open(&device, &PortConfig::default());
    assert!(matches!(
        again,
        Err(CreateError::QueueTaken { number: 0, .. })
    ));
    drop((again, port));
    drop(Port::open(&device, &PortConfig::default()).unwrap());
    assert_eq!(device.ledger().lines(), []);
}

#[test]
fn receive_buffers_shorter_than_the_longest_frame_are_refused() {
    let function = fake();
    let device = open(&function);
    // Offered in steps of 1024: 1536 bytes would be 1024.
    for frame_size in [1024, 1536] {
        let config = PortConfig {
            frame_size,
            ..PortConfig::default()
        };
        let error = Port::open(&device, &config).unwrap_err();
        assert!(error.to_string().contains("at least 2048"), "{error}");
        assert_eq!(device.ledger().lines(), []);
    }
}

#[test]
fn a_pool_of_another_region_is_refused() {
    let (function, elsewhere) = (fake(), fake());
    let (device, other) = (open(&function), open(&elsewhere));
    let (pd, foreign) = (device.alloc_pd().unwrap(), other.alloc_pd().unwrap());
    let (mr, _pool) = pd.register(64, 2048).unwrap();
    let (_other_mr, mut pool) = foreign.register(64, 2048).unwrap();
    let cq = device.create_cq(64).unwrap();
    let refused = pd.create_rq(QueueInit {
        pd: &pd,
        cq: &cq,
        mr: &mr,
        pool: &mut pool,
        entries: 64,
        number: 0,
    });
    assert!(matches!(
        refused,
        Err(CreateError::Foreign { what: "pool", .. })
    ));
}

#[test]
fn queues_of_two_devices_that_changed_places_break_their_own_device() {
    let (healthy, stuck) = (fake(), fake());
    let (a, b) = (open(&healthy), open(&stuck));
    let mut port_a = Port::open(&a, &PortConfig::default()).unwrap();
    let mut port_b = Port::open(&b, &PortConfig::default()).unwrap();
    std::mem::swap(port_a.rq(), port_b.rq());
    // ENABLE never goes away.
    stuck.answer_register(reg::RXDCTL.offset().into(), 0x0201_0808);
    drop((port_a, port_b));
    assert_eq!(a.broken(), None);
    assert!(b.broken().is_some());
}

/// (R8)
#[test]
fn counters_that_lie_do_not_overflow() {
    use failstop::provider::Statistics;
    let most = Statistics {
        rx_bytes: u64::MAX,
        ..Statistics::default()
    };
    assert_eq!((most + most).rx_bytes, u64::MAX);
}

#[test]
fn c47_a_device_that_stays_bus_master_is_not_closed_clean() {
    let function = fake();
    let device = open(&function);
    let port = Port::open(&device, &PortConfig::default()).unwrap();
    function.ignore_config_writes();
    drop(port);
    let report = device.close();
    assert!(
        matches!(report.broken, Some(Cause::StillMaster { .. })),
        "{:?}",
        report.broken
    );
}
