//! The emulated device without a driver: registers and rings by hand, through the same transport. What ours is put
//! beside, and good for nothing else: it believes the device, and its frames are always the same.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use failstop::dma::proof::{Acknowledged, ObjectId, ReleaseProof};
use failstop::dma::space::{AddressSpace, Mapping};
use failstop::igb::bits::{
    Control, Mdi, PoolOffload, ReceiveControl, SplitReceive, Status, TransmitControl,
};
use failstop::igb::descriptors::{BYTES, RxDone, RxRead, TxData};
use failstop::igb::phy::{self, PhyControl};
use failstop::igb::registers as reg;
use failstop::pci::clock::SystemClock;
use failstop::pci::config::{CommandRegister, ConfigSpace};
use failstop::pci::id::Generation;
use failstop::pci::register::{Reg, Value};
use failstop::pci::transport::Transport;
use failstop::pci::window::{Doorbell, StopBit, Window};
use libtest_mimic::Failed;
use vm_memory::VolatileMemory;

use super::round_trip::{BURST, Side};

/// Descriptors of each ring: those of a port by default.
const ENTRIES: u32 = 512;
/// Bytes of a ring.
const RING: usize = ENTRIES as usize * BYTES;
/// RXDCTL and TXDCTL: thresholds that a reading of a living queue shows, and ENABLE. 82576 datasheet, §8.10.10
const WRITE_BACK: NonZeroU32 = NonZeroU32::new(1 << 16).unwrap();
const ENABLE: NonZeroU32 = NonZeroU32::new(1 << 25).unwrap();
/// How long the device may take for anything.
const PATIENCE: Duration = Duration::from_secs(2);

/// Two rings and their frames in one mapping: receive ring, send ring, receive buffers, frames to send.
pub(super) struct ByHand {
    mapping: Option<Mapping>,
    window: Arc<Window>,
    receive_tail: Doorbell,
    send_tail: Doorbell,
    owner: ObjectId,
    command: CommandRegister,
    transport: Arc<dyn Transport>,
    /// Bytes of a buffer.
    buffer: u32,
    /// Bytes of a frame.
    len: u16,
    /// The next descriptor of each ring.
    received: u32,
    sent: u32,
}

impl ByHand {
    /// Sets the device up in loopback, for frames of `len` bytes.
    pub(super) fn open(transport: Arc<dyn Transport>, len: u16) -> Result<Self, Failed> {
        let config = ConfigSpace::new(&*transport);
        let command = CommandRegister::open(&config)?;
        let _off = command.bus_master_off(&config)?;
        transport.reset()?;
        command.memory_space_on(&config)?;
        let window = Window::open(transport.clone(), Generation::FIRST, 0, reg::BAR_SIZE)?;
        loop_back(&window)?;
        let longest = u32::from(len) + 4;
        window.write(reg::RLPML, longest);
        let pool = PoolOffload::LPE | PoolOffload::AUPE | PoolOffload::BAM | PoolOffload::STRCRC;
        window.write(reg::VMOLR, pool | PoolOffload::from_bits_retain(longest));
        let receive = ReceiveControl::RXEN | ReceiveControl::LPE | ReceiveControl::SECRC;
        window.write(reg::RCTL, receive | ReceiveControl::UPE);
        window.write(reg::TCTL, TransmitControl::TXEN | TransmitControl::PSP);

        let buffer = u32::from(len).next_multiple_of(1024).max(2048);
        let owner = owner(&*transport);
        let clock = Arc::new(SystemClock::default());
        let space = AddressSpace::new(transport.clone(), u64::MAX, clock)?;
        let bytes = 2 * RING + 2 * (ENTRIES * buffer) as usize;
        let mapping = space.map(owner, bytes)?;
        window.write(
            reg::SRRCTL,
            SplitReceive::one_buffer(buffer) | SplitReceive::DROP_EN,
        );
        let base = mapping.iova().0;
        let (low, high) = (reg::RDBAL, reg::RDBAH);
        start(
            &window,
            [low, high, reg::RDLEN, reg::RDH, reg::RDT],
            control(reg::RXDCTL),
            base,
        )?;
        let (low, high) = (reg::TDBAL, reg::TDBAH);
        let ring = base + RING as u64;
        start(
            &window,
            [low, high, reg::TDLEN, reg::TDH, reg::TDT],
            control(reg::TXDCTL),
            ring,
        )?;
        let bell = |tail| window.doorbell(tail).ok_or("no tail register");
        let hand = Self {
            receive_tail: bell(reg::RDT)?,
            send_tail: bell(reg::TDT)?,
            mapping: Some(mapping),
            window,
            owner,
            buffer,
            len,
            received: 0,
            sent: 0,
            transport: transport.clone(),
            command,
        };
        for slot in 0..ENTRIES {
            hand.post(slot);
            // To 02:00:00:00:00:00, which a promiscuous function takes.
            hand.store(hand.to_send(slot), 2);
        }
        hand.command.bus_master_on(&config)?;
        hand.receive_tail.ring(ENTRIES - 1);
        Ok(hand)
    }

    /// The word of the memory at so many bytes.
    fn word<T>(&self, at: usize, access: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        let view = self.mapping.as_ref()?.memory().view();
        view.get_atomic_ref(at).ok().map(access)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at, |word| word.store(value.to_le(), Ordering::Relaxed));
    }

    fn load(&self, at: usize) -> u64 {
        let word = self.word(at, |word| word.load(Ordering::Acquire));
        word.map_or(0, u64::from_le)
    }

    /// Where the frame of a send slot is.
    fn to_send(&self, slot: u32) -> usize {
        2 * RING + ((ENTRIES + slot) * self.buffer) as usize
    }

    fn iova(&self, at: usize) -> u64 {
        self.mapping.as_ref().map_or(0, |mapping| mapping.iova().0) + at as u64
    }

    /// Gives a receive slot its buffer.
    fn post(&self, slot: u32) {
        let buffer = 2 * RING + (slot * self.buffer) as usize;
        let [first, second] = RxRead::one_buffer(self.iova(buffer)).words();
        let at = slot as usize * BYTES;
        self.store(at, first);
        self.store(at + 8, second);
    }
}

impl Side for ByHand {
    fn send(&mut self, frames: usize) -> usize {
        for left in (0..frames).rev() {
            let slot = self.sent % ENTRIES;
            let report = left == 0;
            let frame = self.iova(self.to_send(slot));
            let [first, second] = TxData::whole(frame, self.len, report).words();
            let at = RING + slot as usize * BYTES;
            self.store(at, first);
            self.store(at + 8, second);
            self.sent = self.sent.wrapping_add(1);
        }
        if frames > 0 {
            self.send_tail.ring(self.sent % ENTRIES);
        }
        frames
    }

    fn receive(&mut self) -> usize {
        let mut frames = 0;
        while frames < BURST {
            let slot = self.received % ENTRIES;
            if !RxDone(self.load(slot as usize * BYTES + 8)).is_done() {
                break;
            }
            self.post(slot);
            self.received = self.received.wrapping_add(1);
            frames += 1;
        }
        if frames > 0 {
            self.receive_tail
                .ring(self.received.wrapping_sub(1) % ENTRIES);
        }
        frames
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let config = ConfigSpace::new(&*self.transport);
        // What is not given back is quarantined, and the benchmark's process ends soon.
        let _off = self.command.bus_master_off(&config);
        if let (Ok(proof), Some(mapping)) = (stopped(&self.window, self.owner), self.mapping.take())
        {
            let _kept = mapping.release(&proof);
        }
    }
}

/// Who owns what is mapped by hand.
pub(super) fn owner(transport: &dyn Transport) -> ObjectId {
    ObjectId {
        device: transport.id(),
        generation: Generation::FIRST,
        serial: 1,
        kind: "MR",
    }
}

/// Stops the first receive queue, and has that as the ground on which this owner's memory is released.
pub(super) fn stopped(window: &Window, owner: ObjectId) -> Result<ReleaseProof, Failed> {
    let register = control(reg::RXDCTL);
    window.write(register, WRITE_BACK.get());
    let stop = StopBit {
        queue: None,
        register: register.offset(),
        stop: ENABLE,
        alive: WRITE_BACK,
        deadline: Duration::from_millis(100),
        interval: Duration::from_micros(100),
        settle: Duration::from_micros(100),
    };
    let stopped = window.wait_stopped(&SystemClock::default(), &stop)?;
    let proof = Acknowledged::by_register(owner, stopped).ok_or("another device stopped")?;
    Ok(proof.into())
}

/// A queue's control register, as bits.
fn control<V: Value>(register: Reg<V>) -> Reg {
    Reg::at(register.offset())
}

/// Reads a register until `ready`.
fn wait<V: Value>(window: &Window, at: Reg<V>, ready: impl Fn(V) -> bool) -> Result<(), Failed> {
    let end = Instant::now() + PATIENCE;
    while !ready(window.read(at)) {
        if Instant::now() > end {
            return Err(format!("register {:#x} did not say so in time", at.offset()).into());
        }
    }
    Ok(())
}

/// The PHY as the other end of the link. 82576 datasheet, §3.5.6.3.1
fn loop_back(window: &Window) -> Result<(), Failed> {
    let forced = PhyControl::LOOPBACK | PhyControl::SPEED_1000 | PhyControl::FULL_DUPLEX;
    window.write(reg::MDIC, Mdi::write(phy::CONTROL, forced.bits()));
    wait(window, reg::MDIC, |mdic| mdic.contains(Mdi::READY))?;
    window.update(reg::CTRL, |ctrl| {
        ctrl | Control::FRCSPD | Control::FRCDPLX | Control::SPEED_1000 | Control::FD | Control::SLU
    });
    wait(window, reg::STATUS, |status| status.contains(Status::LU))
}

/// Gives a queue its ring. `registers` are the base's two halves, length, head and tail.
fn start(window: &Window, registers: [Reg; 5], control: Reg, iova: u64) -> Result<(), Failed> {
    let values = [iova as u32, (iova >> 32) as u32, RING as u32, 0, 0];
    for (register, value) in registers.into_iter().zip(values) {
        window.write(register, value);
    }
    window.write(control, WRITE_BACK.get() | ENABLE.get());
    wait(window, control, |bits: u32| bits & ENABLE.get() != 0)
}
