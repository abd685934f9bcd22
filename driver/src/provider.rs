//! What the driver asks of a device family.

use std::fmt;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use failstop_dma::iova::Iova;
use failstop_pci::clock::Clock;
use failstop_pci::reset::Canary;
use failstop_pci::window::{Doorbell, NoAnswer, Stopped, Window};
use thiserror::Error;

use crate::name::last_resort;
use crate::rss::{Rss, Table};

/// A device that could not be brought up.
#[derive(Debug, Error)]
pub enum ProviderError {
    /// It does not answer as a living function does.
    #[error(
        "{device}: {register} reads {value:#x}: the device is gone, or its memory decoding is off"
    )]
    Gone {
        /// The function's name.
        device: String,
        /// Which register was read.
        register: &'static str,
        /// What it read.
        value: u32,
    },
    /// A step of its initialisation did not end.
    #[error(
        "{device}: {step} did not end: {source}; open it again, and if that does not help, {}",
        last_resort(.device)
    )]
    Init {
        /// The function's name.
        device: String,
        /// What was waited for.
        step: &'static str,
        /// What was read.
        source: NoAnswer,
    },
    /// It has no usable station address.
    #[error(
        "{device}: no valid MAC address, neither in its registers ({mac}) nor in its NVM: its NVM may be blank"
    )]
    NoAddress {
        /// The function's name.
        device: String,
        /// What was found.
        mac: MacAddress,
    },
    /// A queue did not start.
    #[error("{device}: {queue} {number} did not start: {source}")]
    Queue {
        /// The function's name.
        device: String,
        /// Receive or transmit queue.
        queue: &'static str,
        /// Its number.
        number: u32,
        /// What was read.
        source: NoAnswer,
    },
    /// Something that the device cannot do was asked of it.
    #[error("{device}: {what} is {value}, the device takes {least} to {most}")]
    OutOfRange {
        /// The function's name.
        device: String,
        /// What.
        what: &'static str,
        /// The value asked for.
        value: u64,
        /// The least that it takes.
        least: u64,
        /// The most that it takes.
        most: u64,
    },
}

/// An Ethernet station address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Whether a station may have it: not zero, not a group address.
    #[must_use]
    pub fn is_station(self) -> bool {
        self.0 != [0; 6] && self.0[0] & 1 == 0
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// What a device is set to when it is brought up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Receive every frame, whatever its address.
    pub promiscuous: bool,
    /// What is sent is received: by the PHY, without a cable.
    pub loopback: bool,
    /// The longest frame, in bytes, without the frame check sequence: 1514 for standard Ethernet,
    /// 1518 with a VLAN tag.
    pub longest_frame: u32,
    /// Spread received frames over several receive queues; none has all in queue 0. See
    /// [`crate::rss`] for what can be changed later.
    pub rss: Option<Rss>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            promiscuous: false,
            loopback: false,
            longest_frame: 1518,
            rss: None,
        }
    }
}

/// What a family's parts can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Receive queues, and as many transmit queues.
    pub queues: u32,
    /// The longest frame, in bytes, without the frame check sequence.
    pub longest_frame: u32,
    /// Entries of a ring, at most. A power of two.
    pub ring_entries: u32,
    /// The highest address that the device puts on the bus.
    pub address_mask: u64,
    /// Receive buffers are offered in multiples of this many bytes.
    pub buffer_step: u32,
}

/// What a family's descriptors look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Formats {
    /// igb: advanced receive and transmit descriptors ([`crate::igb::descriptors`]).
    Advanced,
    /// e1000e: extended receive and legacy transmit descriptors ([`crate::e1000e::descriptors`]).
    Extended,
}

/// A queue's ring, as the device has to know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingSpec {
    /// Where the descriptors are.
    pub iova: Iova,
    /// How many there are: a power of two.
    pub entries: u32,
    /// Bytes of each receive buffer; unused by transmit queues.
    pub buffer: u32,
}

/// The link, as the device sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Whether frames can pass.
    pub up: bool,
    /// Mb/s; meaningful while up.
    pub speed: u32,
    /// Whether both directions work at once.
    pub full_duplex: bool,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let duplex = if self.full_duplex { "full" } else { "half" };
        match self.up {
            true => write!(f, "up, {} Mb/s, {duplex} duplex", self.speed),
            false => f.write_str("down"),
        }
    }
}

/// What the device counted since it was opened. Frames and bytes; bytes include the frame check
/// sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Good frames received.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Good frames sent.
    pub tx_frames: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames dropped for want of room in the device.
    pub rx_missed: u64,
    /// Frames that found no free descriptor.
    pub rx_no_buffer: u64,
    /// Frames with a bad check sequence.
    pub rx_crc_errors: u64,
    /// Frames that were too short, too long or otherwise malformed.
    pub rx_length_errors: u64,
    /// Pause frames received: the peer asked us to wait.
    pub rx_pause: u64,
    /// Frames for the machine's management, which need not reach the host.
    pub rx_management: u64,
}

impl Add for Statistics {
    type Output = Self;

    // The numbers are the device's: a lie must not be an overflow (R8).
    fn add(self, more: Self) -> Self {
        Self {
            rx_frames: self.rx_frames.saturating_add(more.rx_frames),
            rx_bytes: self.rx_bytes.saturating_add(more.rx_bytes),
            tx_frames: self.tx_frames.saturating_add(more.tx_frames),
            tx_bytes: self.tx_bytes.saturating_add(more.tx_bytes),
            rx_missed: self.rx_missed.saturating_add(more.rx_missed),
            rx_no_buffer: self.rx_no_buffer.saturating_add(more.rx_no_buffer),
            rx_crc_errors: self.rx_crc_errors.saturating_add(more.rx_crc_errors),
            rx_length_errors: self.rx_length_errors.saturating_add(more.rx_length_errors),
            rx_pause: self.rx_pause.saturating_add(more.rx_pause),
            rx_management: self.rx_management.saturating_add(more.rx_management),
        }
    }
}

/// How far a queue is, as its registers say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Position {
    /// The descriptor that the device takes next.
    pub head: u32,
    /// The first descriptor that it may not take.
    pub tail: u32,
    /// Descriptors of the ring.
    pub entries: u32,
}

impl Position {
    /// Descriptors that the device has and has not taken. 0 where the registers make no sense.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        let Self {
            head,
            tail,
            entries,
        } = *self;
        if head >= entries || tail >= entries {
            return 0;
        }
        if tail >= head {
            tail - head
        } else {
            tail + (entries - head)
        }
    }
}

/// Why a queue is not stopped.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NotStopped {
    /// The device says that the queue is still used (EAGAIN): nothing has changed.
    #[error("the device says that it is busy: {0}")]
    Busy(&'static str),
    /// The sequence did not end as documented.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
}

impl NotStopped {
    /// Whether asking again may help.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }
}

/// Resets a function by registers of its own, through the ladder's window: the last rung (R4.5). Not
/// a method of the provider, whose lock a destroy that hangs may hold.
pub type SoftwareReset = fn(&Window, &dyn Clock) -> Result<(), NoAnswer>;

/// One device family's control path.
///
/// A provider holds no DMA memory and makes no proofs: it writes registers, and what it says of a
/// queue that stopped is a reading by [`Window::wait_stopped`](failstop_pci::window::Window::wait_stopped).
pub trait Provider: Send + fmt::Debug {
    /// The family.
    fn name(&self) -> &'static str;

    /// The part.
    fn part(&self) -> &'static str;

    /// What the part can do.
    fn limits(&self) -> Limits;

    /// What the descriptors of its rings look like.
    fn formats(&self) -> Formats;

    /// Counts how often the device was reset under queues that went on, so that doorbells got lost:
    /// each such ring then rings again. None where that never happens.
    fn restarts(&self) -> Option<Arc<AtomicU32>> {
        None
    }

    /// Whether it can spread received frames over several receive queues.
    fn has_rss(&self) -> bool {
        false
    }

    /// Resets the device and sets it up, queues disabled, interrupts masked. Where [`Config::rss`]
    /// says so, received frames are hashed, and all go to queue 0 until
    /// [`Provider::set_rss_table`]; only asked of a device that [has RSS](Provider::has_rss).
    ///
    /// # Errors
    ///
    /// [`ProviderError`]; no queue runs then.
    fn bring_up(&mut self, config: &Config) -> Result<(), ProviderError>;

    /// The longest frame that the device may put into one buffer as it is set up, in bytes, after
    /// [`Provider::bring_up`]: at least what the configuration says. Receive buffers must hold it,
    /// since a frame that goes on in the next buffer is none.
    fn longest_received(&self) -> u32;

    /// The station address, after [`Provider::bring_up`].
    fn mac(&self) -> MacAddress;

    /// The link as it is now.
    fn link(&mut self) -> Link;

    /// Waits until the link is up, at most `deadline`.
    fn wait_link(&mut self, deadline: Duration) -> Link;

    /// Receives every frame, or only those for us.
    fn set_promiscuous(&mut self, on: bool);

    /// Changes key and hash types of a device that was brought up with RSS; its table stays.
    fn set_rss(&mut self, _rss: &Rss) {}

    /// Gives a device that was brought up with RSS its indirection table. Every queue that it names
    /// is one that the part has.
    fn set_rss_table(&mut self, _table: &Table) {}

    /// Gives receive queue `queue` its ring and enables it; no descriptor is posted yet. The
    /// returned doorbell posts them.
    ///
    /// # Errors
    ///
    /// [`ProviderError`]; the queue does not run then.
    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError>;

    /// The family's documented stop sequence for receive queue `queue`.
    ///
    /// # Errors
    ///
    /// [`NotStopped`]: the queue may go on writing.
    fn stop_rx(&mut self, queue: u32) -> Result<Stopped, NotStopped>;

    /// Gives transmit queue `queue` its ring and enables it. The returned doorbell posts descriptors.
    ///
    /// # Errors
    ///
    /// [`ProviderError`]; the queue does not run then.
    fn start_tx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError>;

    /// The family's documented stop sequence for transmit queue `queue`.
    ///
    /// # Errors
    ///
    /// [`NotStopped`]: the queue may go on reading and writing.
    fn stop_tx(&mut self, queue: u32) -> Result<Stopped, NotStopped>;

    /// A register that shows whether a reset happened: harmless, not used by this driver, put back
    /// to a constant by every kind of reset.
    fn canary(&self) -> Canary;

    /// The family's reset by its own registers.
    fn software_reset(&self) -> SoftwareReset;

    /// What the device counted.
    fn statistics(&mut self) -> Statistics;

    /// Looks whether the function is there, where one reading tells.
    ///
    /// # Errors
    ///
    /// [`NoAnswer::Gone`] when it is not.
    fn check_alive(&mut self) -> Result<(), NoAnswer> {
        Ok(())
    }

    /// Whether flow control holds transmission at this moment.
    fn is_paused(&mut self) -> bool {
        false
    }

    /// How far receive queue `queue` is; none where that cannot be told. For the progress watchdog
    /// ([`crate::supervisor`]).
    fn rx_position(&mut self, _queue: u32) -> Option<Position> {
        None
    }

    /// How far transmit queue `queue` is; as [`Provider::rx_position`].
    fn tx_position(&mut self, _queue: u32) -> Option<Position> {
        None
    }

    /// Routes the interrupt of receive queue `queue` to MSI-X vector `vector`, masked. Writing the
    /// value to the doorbell lets the vector fire once, at once if something is there; it masks
    /// itself then. None where the device has no such register.
    fn route_rx_interrupt(&mut self, queue: u32, vector: u32) -> Option<(Doorbell, u32)>;

    /// Disables receiver, transmitter and interrupts. Proves nothing.
    fn quiesce(&mut self);
}
