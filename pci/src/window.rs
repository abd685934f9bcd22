//! BAR windows: bounded, typed, replaceable register access.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicBool, Ordering};
use std::time::Duration;

use thiserror::Error;

use crate::clock::Clock;
use crate::id::{DeviceId, Generation};
use crate::mapped::Mapped;
use crate::register::{ReadClear, Reg, Value};
use crate::transport::{Kind, RegionIndex, Transport};

/// A BAR that cannot be used.
#[derive(Debug, Error)]
pub enum WindowError {
    /// The BAR is absent or smaller than the provider's registers.
    #[error(
        "{device}: BAR {bar} has {size:#x} bytes, the driver needs {needed:#x}: not the device that its ids say, or its BARs were not assigned"
    )]
    TooSmall {
        /// The function's name.
        device: String,
        /// Which BAR.
        bar: u8,
        /// Bytes there are.
        size: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// Mapping failed.
    #[error("{device}: could not map BAR {bar}")]
    Map {
        /// The function's name.
        device: String,
        /// Which BAR.
        bar: u8,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// One generation's view of a memory BAR.
///
/// Reads and writes cannot fail: a function that is gone reads all-ones, as on the bus, and so does
/// a window that was detached. Parts that the transport lets us map are accessed directly, the
/// others by its messages.
#[derive(Debug)]
pub struct Window {
    transport: Arc<dyn Transport>,
    generation: Generation,
    bar: u8,
    size: u64,
    areas: Vec<(u64, Mapped)>,
    detached: AtomicBool,
}

impl Window {
    /// Opens BAR `bar` for the driver of `generation`, which needs its first `needed` bytes.
    ///
    /// # Errors
    ///
    /// [`WindowError`].
    pub fn open(
        transport: Arc<dyn Transport>,
        generation: Generation,
        bar: u8,
        needed: u64,
    ) -> Result<Arc<Self>, WindowError> {
        let region = transport.region(RegionIndex::Bar(bar));
        let device = || transport.name().to_owned();
        if region.size < needed {
            return Err(WindowError::TooSmall {
                device: device(),
                bar,
                size: region.size,
                needed,
            });
        }
        let mut areas = Vec::new();
        for &(offset, len) in &region.mappable {
            let map = || -> io::Result<Mapped> {
                let len = usize::try_from(len).map_err(io::Error::other)?;
                let (file, at) = transport.region_file(RegionIndex::Bar(bar), offset)?;
                Mapped::new(file.as_fd(), at, len)
            };
            areas.push((
                offset,
                map().map_err(|source| WindowError::Map {
                    device: device(),
                    bar,
                    source,
                })?,
            ));
        }
        let detached = AtomicBool::new(false);
        Ok(Arc::new(Self {
            generation,
            bar,
            size: region.size,
            areas,
            detached,
            transport,
        }))
    }

    /// The function that this window shows.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.transport.id()
    }

    /// The function's name, for messages.
    #[must_use]
    pub fn device_name(&self) -> &str {
        self.transport.name()
    }

    /// The life that this window belongs to.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads a register.
    #[must_use]
    pub fn read<V: Value>(&self, register: Reg<V>) -> V {
        V::from_bits(self.read_at(register.offset()))
    }

    /// Writes a register. The write may be posted: read something afterwards to know that it arrived.
    pub fn write<V: Value>(&self, register: Reg<V>, value: V) {
        let offset = register.offset();
        if let Some(cell) = self.cell(offset) {
            cell.write(value.bits());
        } else {
            self.tell(offset, value.bits());
        }
    }

    /// Writes a register by a message.
    pub(crate) fn tell(&self, offset: u32, value: u32) {
        if self.reaches(offset)
            && let Err(error) = self.transport.write(
                self.generation,
                RegionIndex::Bar(self.bar),
                offset.into(),
                &value.to_le_bytes(),
            )
        {
            log::debug!("{error}");
        }
    }

    /// Changes some bits of a register: reads, applies `change`, writes.
    ///
    /// All-ones is what a function reads that is gone, and is not written back: it may have returned
    /// by then, and would take it for a command (C17).
    pub fn update<V: Value>(&self, register: Reg<V>, change: impl FnOnce(V) -> V) {
        let value = self.read(register);
        if value.bits() != u32::MAX {
            self.write(register, change(value));
        }
    }

    fn read_at(&self, offset: u32) -> u32 {
        match self.cell(offset) {
            Some(cell) => cell.read(),
            None => self.ask(offset),
        }
    }

    /// A reading that the function itself gave. A vfio-user server is believed only for what it
    /// answered [R1]: a page that it lets us map merely stores what we write.
    ///
    /// All-ones from a window that was replaced: its private pages keep what is stored in them, so
    /// that what the driver wrote just now would read as an answer.
    fn answer(&self, offset: u32) -> u32 {
        let value = if self.transport.kind() == Kind::VfioUser {
            self.ask(offset)
        } else {
            self.read_at(offset)
        };
        // The pages are announced before they are placed, so that whoever read from one sees that
        // here.
        atomic::fence(Ordering::SeqCst);
        if self.is_detached() { u32::MAX } else { value }
    }

    /// Reads a register by a message.
    pub(crate) fn ask(&self, offset: u32) -> u32 {
        let mut bits = [0xff; 4];
        if !self.reaches(offset) {
            return u32::MAX;
        }
        match self.transport.read(
            self.generation,
            RegionIndex::Bar(self.bar),
            offset.into(),
            &mut bits,
        ) {
            Ok(()) => u32::from_le_bytes(bits),
            Err(error) => {
                log::debug!("{error}");
                u32::MAX
            }
        }
    }

    fn cell(&self, offset: u32) -> Option<crate::mapped::Cell<'_>> {
        self.areas.iter().find_map(|(start, map)| {
            let into = u64::from(offset).checked_sub(*start)?;
            map.cell(usize::try_from(into).ok()?)
        })
    }

    /// Whether messages may go to this offset.
    fn reaches(&self, offset: u32) -> bool {
        let inside = u64::from(offset) + 4 <= self.size;
        if !inside {
            log::error!(
                "{}: register {offset:#x} is outside BAR {}",
                self.transport.name(),
                self.bar
            );
        }
        inside && !self.detached.load(Ordering::Acquire)
    }

    /// A register to be written once per burst, its bounds paid for here; none outside the BAR.
    #[must_use]
    pub fn doorbell<V: Value>(self: &Arc<Self>, register: Reg<V>) -> Option<Doorbell> {
        Doorbell::new(self.clone(), register.offset())
    }

    /// Ends this window [R4.3]: from the return of this call on nothing that is read or written
    /// through it, or through doorbells made from it, reaches the function. Reads give all-ones.
    ///
    /// # Errors
    ///
    /// When the kernel does not place the private pages; the window may still show the device then.
    pub fn detach(&self) -> io::Result<()> {
        self.detached.store(true, Ordering::Release);
        // The ladder's window outlives every life, and ends none.
        if self.generation != Generation::LADDER {
            self.transport.expire(self.generation);
        }
        self.areas.iter().try_for_each(|(_, map)| map.detach())
    }

    /// Whether this window no longer shows the device: detached, or replaced by the SIGBUS guard.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire) || self.areas.iter().any(|(_, map)| map.is_detached())
    }

    /// Polls a register every `interval` until `ready` says yes.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`] after `deadline`, or at once when the register reads all-ones.
    pub fn wait<V: Value>(
        &self,
        clock: &dyn Clock,
        register: Reg<V>,
        deadline: Duration,
        interval: Duration,
        mut ready: impl FnMut(V) -> bool,
    ) -> Result<V, NoAnswer> {
        let end = clock.now() + deadline;
        loop {
            let value = self.read(register);
            if value.bits() == u32::MAX {
                return Err(NoAnswer::Gone {
                    register: register.offset(),
                    value: u32::MAX,
                });
            }
            if ready(value) {
                return Ok(value);
            }
            if clock.now() >= end {
                let value = value.bits();
                return Err(NoAnswer::TimedOut {
                    register: register.offset(),
                    value,
                    deadline,
                });
            }
            clock.sleep(interval);
        }
    }

    /// Polls until `stop.stop` reads clear, lets the device settle, and reads again: the only
    /// place where a [`Stopped`] is made, so that there is none without a reading [R3.1].
    ///
    /// # Errors
    ///
    /// [`NoAnswer`] when a bit is still set at the deadline, when a reading does not show
    /// `stop.alive`: the function is gone, whether it reads all-ones or all-zero (C32); or when the
    /// window was replaced meanwhile, by [`Window::detach`] or by the guard.
    pub fn wait_stopped(&self, clock: &dyn Clock, stop: &StopBit) -> Result<Stopped, NoAnswer> {
        let end = clock.now() + stop.deadline;
        let read = || {
            let value = self.answer(stop.register);
            let alive = value != u32::MAX && value & stop.alive.get() == stop.alive.get();
            if alive {
                Ok(value)
            } else {
                Err(NoAnswer::Gone {
                    register: stop.register,
                    value,
                })
            }
        };
        loop {
            if read()? & stop.stop.get() == 0 {
                clock.sleep(stop.settle);
                let value = read()?;
                if value & stop.stop.get() == 0 {
                    return Ok(Stopped {
                        device: self.device(),
                        generation: self.generation,
                        register: stop.register,
                        queue: stop.queue,
                    });
                }
            }
            if clock.now() >= end {
                let value = read()?;
                return Err(NoAnswer::TimedOut {
                    register: stop.register,
                    value,
                    deadline: stop.deadline,
                });
            }
            clock.sleep(stop.interval);
        }
    }
}

/// The exclusive use of a window's registers: what reads that clear need.
#[derive(Debug)]
pub struct Registers(Arc<Window>);

impl Registers {
    /// Takes the window.
    #[must_use]
    pub fn new(window: Arc<Window>) -> Self {
        Self(window)
    }

    /// The window, for handles that only read and write.
    #[must_use]
    pub fn window(&self) -> &Arc<Window> {
        &self.0
    }

    /// Reads a register that the reading clears.
    pub fn take<V: Value>(&mut self, register: ReadClear<V>) -> V {
        V::from_bits(self.0.read_at(register.offset()))
    }
}

impl Deref for Registers {
    type Target = Window;

    fn deref(&self) -> &Window {
        &self.0
    }
}

/// A queue of a function, as its family numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QueueName {
    /// A receive queue.
    Receive(u32),
    /// A send queue.
    Send(u32),
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Receive(number) => write!(f, "receive queue {number}"),
            Self::Send(number) => write!(f, "send queue {number}"),
        }
    }
}

/// How one register says that a queue stopped.
#[derive(Clone, Copy, Debug)]
pub struct StopBit {
    /// The queue that it speaks of; none of one that speaks of the whole function.
    pub queue: Option<QueueName>,
    /// Bytes from the BAR's start.
    pub register: u32,
    /// The bits that read 0 once stopped.
    pub stop: NonZeroU32,
    /// Bits of the same register that the driver set and the reading must show: proof of life.
    pub alive: NonZeroU32,
    /// How long the device may take.
    pub deadline: Duration,
    /// Time between two readings.
    pub interval: Duration,
    /// How long writes that the device had under way may take to land after the bit reads 0.
    pub settle: Duration,
}

/// A reading that a queue stopped, by a function that is alive. Names the device and the generation,
/// the queue, and the register that said so.
#[must_use]
#[derive(Debug)]
pub struct Stopped {
    device: DeviceId,
    generation: Generation,
    register: u32,
    queue: Option<QueueName>,
}

impl Stopped {
    /// Which function said so.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// In which life.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Which register, in bytes from the start of its BAR.
    #[must_use]
    pub fn register(&self) -> u32 {
        self.register
    }

    /// Whether it says that this queue stopped: that one did, or the whole function.
    #[must_use]
    pub fn is_of(&self, queue: QueueName) -> bool {
        self.queue.is_none_or(|stopped| stopped == queue)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "register {:#x} reads that ", self.register)?;
        match self.queue {
            Some(queue) => write!(f, "{queue} stopped"),
            None => f.write_str("the whole function stopped"),
        }
    }
}

/// A register did not come to say what was waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoAnswer {
    /// It still said otherwise at the deadline.
    #[error("register {register:#x} still reads {value:#x} after {deadline:?}")]
    TimedOut {
        /// Bytes from the BAR's start.
        register: u32,
        /// The last reading.
        value: u32,
        /// How long was waited.
        deadline: Duration,
    },
    /// What was written is not what it reads.
    #[error("register {register:#x} reads {value:#x} after {written:#x} was written")]
    NotTaken {
        /// Bytes from the BAR's start.
        register: u32,
        /// What was written.
        written: u32,
        /// The reading.
        value: u32,
    },
    /// The reading does not come from a living function.
    #[error("register {register:#x} reads {value:#x}: the device is gone")]
    Gone {
        /// Bytes from the BAR's start.
        register: u32,
        /// The reading.
        value: u32,
    },
}

/// A tail register: written once per burst, after the descriptors.
#[derive(Debug)]
pub struct Doorbell {
    cell: Option<crate::mapped::FixedCell>,
    offset: u32,
    window: Arc<Window>,
}

impl Doorbell {
    #[expect(unsafe_code, reason = "keeps a checked register next to its window")]
    fn new(window: Arc<Window>, offset: u32) -> Option<Self> {
        // SAFETY: the window that the register belongs to is kept in the same value.
        let cell = window
            .cell(offset)
            .map(|cell| unsafe { crate::mapped::FixedCell::new(cell) });
        (cell.is_some() || window.reaches(offset)).then_some(Self {
            cell,
            offset,
            window,
        })
    }

    /// Tells the device: the descriptors written before are seen before `value`.
    #[inline(always)]
    pub fn ring(&self, value: u32) {
        crate::barrier::before_doorbell();
        match self.cell {
            Some(cell) => cell.write(value),
            None => self.message(value),
        }
    }

    /// Whether what is rung reaches nobody: the window was detached or replaced by the guard, or the
    /// transport lost its peer.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.window.is_detached() || self.window.transport.is_lost()
    }

    #[cold]
    #[inline(never)]
    fn message(&self, value: u32) {
        let window = &self.window;
        let bar = RegionIndex::Bar(window.bar);
        if !window.detached.load(Ordering::Acquire)
            && let Err(error) = window.transport.post(
                window.generation,
                bar,
                self.offset.into(),
                &value.to_le_bytes(),
            )
        {
            log::debug!("{error}");
        }
    }
}

#[cfg(test)]
mod tests;
