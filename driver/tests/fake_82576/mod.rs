//! An 82576 made of memory, for T0.

#![allow(
    dead_code,
    unused_imports,
    reason = "each test program uses a part of it"
)]

use std::sync::Arc;
use std::time::Duration;

use failstop::device::{Device, Options};
use failstop::events::DeviceEvent;
use failstop::igb::registers as reg;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop_pci::clock::ManualClock;
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::transport::IrqIndex;

/// Longer than any of this takes, on any machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// STATUS with the link up, 1000 Mb/s, full duplex. 82576 §8.2.2
pub(crate) const LINK_UP: u32 = 0x0000_0083;
/// STATUS with the link down.
pub(crate) const LINK_DOWN: u32 = 0x0000_0001;

/// An 82576 with interrupts, which says what bring-up waits for, and otherwise stores what is
/// written.
pub(crate) fn fake() -> Arc<FakeFunction> {
    Arc::new(unserved())
}

/// As [`fake`], to be changed.
pub(crate) fn unserved() -> FakeFunction {
    let mut header = vec![0; 64];
    header[..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
    header[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]);
    let function = FakeFunction::new(limits_39_bits())
        .unwrap()
        .with_config(&header)
        .with_interrupts(2)
        .by_messages();
    let answers = [
        (reg::STATUS.offset(), LINK_UP),
        (reg::EECD.offset(), 0x0000_0200), // Loaded.
        (reg::MDIC.offset(), 0x1000_0000), // Ready.
        (reg::RAL.offset(), 0x8200_0002),
        (reg::RAH.offset(), 0x8000_6057),
    ];
    for (offset, value) in answers {
        function.answer_register(offset.into(), value);
    }
    function
}

/// A device, what it is made of, and its time.
pub(crate) struct World {
    pub(crate) function: Arc<FakeFunction>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) device: Device,
}

impl World {
    pub(crate) fn new(options: Options) -> Self {
        Self::over(fake(), options)
    }

    pub(crate) fn over(function: Arc<FakeFunction>, options: Options) -> Self {
        let clock = Arc::new(ManualClock::default());
        let options = Options {
            clock: clock.clone(),
            ..options
        };
        let device = Device::open_with(function.clone(), &Config::default(), options).unwrap();
        Self {
            function,
            clock,
            device,
        }
    }

    pub(crate) fn port(&self) -> Port {
        Port::open(&self.device, &PortConfig::default()).unwrap()
    }

    pub(crate) fn fire(&self, index: IrqIndex) {
        assert!(self.function.fire(index, 0), "nobody listens");
    }

    /// The next thing that happens.
    pub(crate) fn next(&self) -> DeviceEvent {
        let event = self.device.events().next(SOON).unwrap();
        event.expect("nothing happened")
    }

    /// Expects a break, and returns its cause.
    pub(crate) fn broken(&self, generation: u64) -> Cause {
        match self.next() {
            DeviceEvent::Broken {
                generation: of,
                cause,
            } => {
                assert_eq!(of.number(), generation);
                cause
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits for the removal's end, whatever the ladder could or could not show.
    pub(crate) fn until_removed(&self) {
        while self.next() != DeviceEvent::Removed {}
    }
}
