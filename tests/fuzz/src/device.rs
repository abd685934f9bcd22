//! A whole device whose function is the input: what registers read, what stands in its rings, when it
//! is gone, between anything that a program does.
//!
//! An input is a byte that says how many registers are bent before the device is opened, those, and
//! then commands of a byte each with what they take.

use std::sync::Arc;

use failstop::device::{Device, Options};
use failstop::e1000e::registers as e1000e_reg;
use failstop::igb::registers as igb_reg;
use failstop::intel::bits::{Control, Status};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::queues::lifecycle::Cause;
use failstop_pci::clock::ManualClock;
use failstop_pci::testing::{Delegate, FakeFunction, Reading, limits_39_bits};
use failstop_pci::transport::{RegionIndex, Transport};

use crate::bytes::Bytes;

const PORT: PortConfig = PortConfig {
    rx_entries: 8,
    tx_entries: 64,
    frame_size: 2048,
    spare_frames: 16,
};
/// Bytes of BAR 0.
const REGISTERS: u32 = 0x1_0000;

/// An 82576; the depth is how many requests ended in a completion of their own, and one for the open.
pub(crate) fn igb(data: &[u8]) -> u64 {
    drive(&IGB, data)
}

/// An 82574.
pub(crate) fn e1000e(data: &[u8]) -> u64 {
    drive(&E1000E, data)
}

/// What a family's function is made of.
#[derive(Debug)]
struct Family {
    id: [u8; 2],
    /// Registers, and what they hold after a reset.
    resets: &'static [(u32, u32)],
    control: u32,
    mdic: u32,
    /// The rings' base addresses: receive, send.
    rings: [u32; 2],
}

const UP: u32 = Status::LU.bits() | Status::FD.bits();
const LOADED: u32 = 0x200;

static IGB: Family = Family {
    id: [0xc9, 0x10],
    resets: &[
        (igb_reg::STATUS.offset(), UP),
        (igb_reg::EECD.offset(), LOADED),
        (igb_reg::RAL.offset(), 0x8200_0002),
        (igb_reg::RAH.offset(), 0x8000_6057),
    ],
    control: igb_reg::CTRL.offset(),
    mdic: igb_reg::MDIC.offset(),
    rings: [igb_reg::RDBAL.offset(), igb_reg::TDBAL.offset()],
};

static E1000E: Family = Family {
    id: [0xd3, 0x10],
    resets: &[
        (e1000e_reg::STATUS.offset(), UP),
        (e1000e_reg::EECD.offset(), LOADED),
        (e1000e_reg::RXCSUM.offset(), 0x300),
        (e1000e_reg::RAL.offset(), 0x8200_0002),
        (e1000e_reg::RAH.offset(), 0x8000_6057),
    ],
    control: e1000e_reg::CTRL.offset(),
    mdic: e1000e_reg::MDIC.offset(),
    rings: [e1000e_reg::RDBAL.offset(), e1000e_reg::TDBAL.offset()],
};

/// A function that resets by CTRL.RST and has a PHY that is always ready.
#[derive(Debug)]
struct Function {
    inner: FakeFunction,
    family: &'static Family,
}

impl Function {
    fn new(family: &'static Family) -> Option<Self> {
        let mut header = vec![0; 64];
        header[..2].copy_from_slice(&[0x86, 0x80]);
        header[2..4].copy_from_slice(&family.id);
        header[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]);
        let inner = FakeFunction::new(limits_39_bits())
            .ok()?
            .with_config(&header)
            .with_interrupts(2)
            .by_messages();
        let resets = family.resets.iter();
        let inner = resets.fold(inner, |inner, (offset, value)| {
            inner.with_reset_value((*offset).into(), *value)
        });
        Some(Self { inner, family })
    }

    /// The device writes a word of the descriptor at `index` of a ring.
    fn write(&self, ring: usize, index: u8, word: u64, value: u64) {
        let base = self.inner.register(self.family.rings[ring].into());
        let entries = [PORT.rx_entries, PORT.tx_entries][ring];
        let at = u64::from(base) + u64::from(u32::from(index) % entries) * 16 + word * 8;
        // Where nothing is mapped, or it is no master, nothing is written.
        let _ = self.inner.dma_write(at, &value.to_le_bytes());
    }

    fn bend(&self, bytes: &mut Bytes<'_>) {
        let (register, value) = (u32::from(bytes.u16()) * 4 % REGISTERS, bytes.u32());
        self.inner.answer_register(register.into(), value);
    }
}

impl Delegate for Function {
    fn inner(&self) -> &dyn Transport {
        &self.inner
    }

    fn after_write(&self, index: RegionIndex, offset: u64, data: &[u8]) {
        let Ok(bytes) = data.try_into() else { return };
        let value = u32::from_le_bytes(bytes);
        if index != RegionIndex::Bar(0) {
        } else if offset == u64::from(self.family.control) && value & Control::RST.bits() != 0 {
            self.inner.reset_registers();
        } else if offset == u64::from(self.family.mdic) {
            self.inner.set_register(offset, value | 1 << 28);
        }
    }
}

fn drive(family: &'static Family, data: &[u8]) -> u64 {
    let mut bytes = Bytes::new(data);
    let Some(function) = Function::new(family) else {
        return 0;
    };
    let function = Arc::new(function);
    for _ in 0..bytes.u8() % 8 {
        function.bend(&mut bytes);
    }
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    let config = Config::default();
    let Ok(device) = Device::open_with(function.clone(), &config, options) else {
        return 0;
    };
    let mut honest = true;
    let mut port = Port::open(&device, &PORT).ok();
    while !bytes.is_empty() {
        step(&mut bytes, &function, &device, &mut port, &mut honest);
    }
    drop(port);
    let report = device.close();
    let ended = report.completions;
    assert_eq!(ended.outstanding(), 0, "{ended:?}");
    // What is mapped is on the list of what is left (R2).
    for (start, len) in function.inner.mapped() {
        let listed = |line: &failstop::dma::ledger::Line| (line.iova.0, line.len) == (start, len);
        assert!(report.left.iter().any(listed), "{start:#x} is forgotten");
    }
    assert!(!honest || !function.inner.is_master(), "bus master");
    1 + ended.success + ended.error
}

fn step(
    bytes: &mut Bytes<'_>,
    function: &Function,
    device: &Device,
    port: &mut Option<Port>,
    honest: &mut bool,
) {
    match bytes.u8() % 14 {
        0..=2 => {
            let (index, value) = (bytes.u8(), bytes.u64());
            function.write(0, index, 1, value);
        }
        3 => {
            let (index, value) = (bytes.u8(), bytes.u64());
            function.write(1, index, 1, value);
        }
        4 => {
            let (index, value) = (bytes.u8(), bytes.u64());
            function.write(usize::from(index & 1), index >> 1, 0, value);
        }
        5 | 6 => {
            let (count, len) = (bytes.u8() % 16, bytes.u16());
            let Some(port) = port else { return };
            let mut frames = port.take_frames(count.into()).unwrap_or_default();
            if len & 1 == 0 {
                let received = port.rx_burst(&mut frames);
                for frame in &frames[..received] {
                    let mut all = [0; 2048];
                    assert_eq!(frame.copy_to(&mut all), frame.len() as usize);
                }
            } else {
                for frame in &mut frames {
                    // A length that no frame has is refused.
                    let _ = frame.set_len((len >> 1).into());
                }
                port.tx_burst(&mut frames);
            }
        }
        7 => function.bend(bytes),
        8 => drop(device.break_now(Cause::User)),
        9 => drop(device.recover()),
        10 => {
            let _ = (device.link(), device.statistics());
        }
        11 => *port = Port::open(device, &PORT).ok(),
        12 => *port = None,
        _ => {
            let (reads, ones) = (bytes.u8(), bytes.u8() & 1 == 1);
            let reading = if ones {
                Reading::AllOnes
            } else {
                Reading::Zero
            };
            *honest = false;
            function.inner.misread_config(reading, reads.into());
        }
    }
}
