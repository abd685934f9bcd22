//! A function, its address space, and proofs as a provider and the ladder get them.
#![allow(dead_code, reason = "each test target uses a part")]

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use failstop_dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop_dma::space::{AddressSpace, Mapping};
use failstop_pci::clock::ManualClock;
use failstop_pci::config::{CommandRegister, ConfigSpace};
use failstop_pci::id::Generation;
use failstop_pci::register::Reg;
use failstop_pci::reset::{Canary, FunctionStopped, issue, issue_software, verify};
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::transport::{DmaLimits, Kind, ResetMethod, Transport};
use failstop_pci::window::{StopBit, Stopped, Window};

pub(crate) const PAGE: usize = 4096;

const STOP_REGISTER: Reg = Reg::at(0x2828);
const ENABLE: u32 = 1 << 25;
const THRESHOLDS: u32 = 0x0004_0408;
const CANARY: Canary = Canary {
    register: 0x3000,
    planted: 0x55,
    reset: 0,
    mask: 0xff,
};

pub(crate) struct Bench {
    pub(crate) function: Arc<FakeFunction>,
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) life: Generation,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with_limits(limits_39_bits())
    }

    /// A space in which a mapping of one page fits once.
    pub(crate) fn with_room_for_one() -> Self {
        Self::with_pages(2)
    }

    /// A space of so many pages, guard pages included.
    pub(crate) fn with_pages(pages: u64) -> Self {
        let limits = DmaLimits {
            ranges: vec![0x1000..=0xfff + pages * PAGE as u64],
            ..limits_39_bits()
        };
        Self::with_limits(limits)
    }

    fn with_limits(limits: DmaLimits) -> Self {
        Self::of(FakeFunction::new(limits).unwrap())
    }

    /// Behind a cdev, with room for one mapping.
    pub(crate) fn iommufd() -> Self {
        let limits = DmaLimits {
            ranges: vec![0x1000..=0x2fff],
            ..limits_39_bits()
        };
        Self::of(FakeFunction::new(limits).unwrap().with_kind(Kind::Iommufd))
    }

    fn of(function: FakeFunction) -> Self {
        let function = Arc::new(function.with_decoding());
        let clock = Arc::new(ManualClock::default());
        let space = AddressSpace::new(function.clone(), u64::MAX, clock.clone()).unwrap();
        Self {
            function,
            space,
            clock,
            life: Generation::FIRST,
        }
    }

    pub(crate) fn object(&self, serial: u64) -> ObjectId {
        ObjectId {
            device: self.function.id(),
            generation: self.life,
            serial,
            kind: "RQ",
        }
    }

    pub(crate) fn map(&self, serial: u64, len: usize) -> Mapping {
        self.space.map(self.object(serial), len).unwrap()
    }

    /// A proof as a provider gets it: by reading a stop bit.
    pub(crate) fn proof(&self, serial: u64) -> ReleaseProof {
        Acknowledged::by_register(self.object(serial), self.queue_stopped())
            .unwrap()
            .into()
    }

    /// A queue's stop bit, read in this life.
    pub(crate) fn queue_stopped(&self) -> Stopped {
        let window = Window::open(self.function.clone(), self.life, 0, 0x1_0000).unwrap();
        window.write(STOP_REGISTER, THRESHOLDS);
        let stop = StopBit {
            queue: None,
            register: STOP_REGISTER.offset(),
            stop: NonZeroU32::new(ENABLE).unwrap(),
            alive: NonZeroU32::new(THRESHOLDS).unwrap(),
            deadline: Duration::from_millis(10),
            interval: Duration::from_micros(100),
            settle: Duration::from_micros(100),
        };
        window.wait_stopped(&*self.clock, &stop).unwrap()
    }

    /// What the ladder gets: a verified reset, by `method`, at the end of this life.
    pub(crate) fn stop(&self, method: ResetMethod) -> FunctionStopped {
        let config = ConfigSpace::new(&*self.function);
        let command = CommandRegister::open(&config).unwrap();
        let window = Window::open(self.function.clone(), Generation::LADDER, 0, 0x1_0000).unwrap();
        command.memory_space_on(&config).unwrap();
        CANARY.plant(&window).unwrap();
        let off = command.bus_master_off(&config).unwrap();
        let issued = if method == ResetMethod::Software {
            issue_software(&*self.function, &off, || {
                self.function.set_register(CANARY.register.into(), 0);
                Ok::<_, io::Error>(())
            })
        } else {
            self.function.set_reset_methods(&[method]);
            issue(&*self.function, &off, method)
        };
        verify(
            issued.unwrap(),
            &config,
            &command,
            &window,
            &CANARY,
            self.life,
        )
        .unwrap()
    }

    /// A new life begins.
    pub(crate) fn begin(&mut self) {
        self.life = self.life.next();
        self.space.reopen();
    }

    /// Lets the device issue DMA.
    pub(crate) fn bus_master_on(&self) {
        let config = ConfigSpace::new(&*self.function);
        let command = CommandRegister::open(&config).unwrap();
        command.bus_master_on(&config).unwrap();
    }

    /// How often something was unmapped.
    pub(crate) fn unmaps(&self) -> usize {
        use failstop_pci::testing::Happened;
        let log = self.function.log();
        log.iter()
            .filter(|happened| matches!(happened, Happened::Unmap { .. }))
            .count()
    }
}
