//! A port under the TCP/IP stack [smoltcp](https://docs.rs/smoltcp).
//!
//! [`PortDevice`] is a [`smoltcp::phy::Device`]. A device that lies can write to a
//! frame while it is read, so that the stack never sees DMA memory: what is received is copied out
//! of frames, what is sent is copied into them (R8). Checksums are computed and checked in software.
//!
//! ```no_run
//! # fn answer(device: failstop::device::Device) -> Result<(), Box<dyn std::error::Error>> {
//! use failstop::port::{Port, PortConfig};
//! use failstop::smoltcp::{PortDevice, STANDARD_FRAME};
//! use smoltcp::iface::{Config, Interface, SocketSet};
//! use smoltcp::time::Instant;
//! use smoltcp::wire::{EthernetAddress, IpCidr};
//!
//! let port = Port::open(&device, &PortConfig::default())?;
//! let mut phy = PortDevice::new(port, STANDARD_FRAME)?;
//! let config = Config::new(EthernetAddress::from(device.mac()).into());
//! let mut interface = Interface::new(config, &mut phy, Instant::now());
//! interface.update_ip_addrs(|addresses| {
//!     addresses.push("192.0.2.2/24".parse::<IpCidr>().unwrap()).unwrap();
//! });
//! let mut sockets = SocketSet::new(vec![]);
//! while device.broken().is_none() {
//!     let now = Instant::now();
//!     interface.poll(now, &mut phy, &mut sockets);
//!     // Sends what the stack queued, then sleeps until a frame comes or a timer is due.
//!     phy.wait(interface.poll_delay(now, &sockets))?;
//! }
//! # Ok(())
//! # }
//! ```

use std::io;

use ::smoltcp::phy::{self, DeviceCapabilities, Medium};
use ::smoltcp::time::{Duration, Instant};
use ::smoltcp::wire::EthernetAddress;
use failstop_dma::frame::Frame;
use thiserror::Error;

use crate::port::Port;
use crate::provider::MacAddress;

/// Bytes of the longest frame of standard Ethernet, header included, frame check sequence and VLAN
/// tag not: an IP packet of 1500 bytes.
pub const STANDARD_FRAME: u32 = 1514;

/// Frames received by one burst, and at most sent by one: a doorbell for so many.
const BATCH: usize = 32;

/// How long to sleep while the send ring is full, which no interrupt ends.
const RING_FULL: Duration = Duration::from_millis(1);

/// A port without the frames that the stack needs of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "the port has {available} spare frames, a network stack needs {}; raise PortConfig::spare_frames",
    2 * BATCH
)]
pub struct TooFewFrames {
    available: usize,
}

/// A port as a device of smoltcp.
///
/// Frames to send are queued. They go out in one burst, with one doorbell, when 32 of them
/// are queued, when the stack has taken the last received frame and asks for more, and at
/// [`PortDevice::wait`] and [`PortDevice::flush`]: so call one of the two after each poll of the
/// interface. Dropped, it sends no more.
///
/// Give TCP sockets receive buffers for fewer frames than the port has receive descriptors: the
/// window then keeps the peer from sending what the ring cannot take.
///
/// On a device that is broken nothing is received or sent, silently: see
/// [`Device::broken`](crate::device::Device::broken).
#[derive(Debug)]
pub struct PortDevice {
    // Dropped first: frames go home before their region goes.
    incoming: Incoming,
    outgoing: Outgoing,
    port: Port,
    longest: usize,
}

impl PortDevice {
    /// A device over `port`, whose frames have at most `longest_frame` bytes, Ethernet header
    /// included and frame check sequence not: [`STANDARD_FRAME`], or more where the device was
    /// opened for more ([`Config::longest_frame`](crate::provider::Config::longest_frame)) and
    /// every station of the network is set to it.
    ///
    /// Takes 64 of the port's spare frames.
    ///
    /// # Errors
    ///
    /// [`TooFewFrames`].
    pub fn new(mut port: Port, longest_frame: u32) -> Result<Self, TooFewFrames> {
        let available = port.pool().available();
        let mut incoming = port
            .take_frames(2 * BATCH)
            .ok_or(TooFewFrames { available })?;
        let outgoing = incoming.split_off(BATCH);
        let longest = longest_frame.min(port.pool().frame_size()) as usize;
        Ok(Self {
            incoming: Incoming::new(incoming),
            outgoing: Outgoing::new(outgoing, longest),
            port,
            longest,
        })
    }

    /// The port. Frames that are received or sent by it directly pass the stack by.
    pub fn port(&mut self) -> &mut Port {
        &mut self.port
    }

    /// Frames that the stack sent and the port does not take: too short or too long for it.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.outgoing.refused
    }

    /// Sends what is queued, as far as there is room in the ring; returns how many frames stay
    /// queued.
    pub fn flush(&mut self) -> usize {
        let sq = self.port.sq();
        self.outgoing.flush(|frames| {
            let refused = sq.refused();
            let sent = sq.burst(frames);
            Burst {
                sent,
                refused: sq.refused() > refused,
            }
        })
    }

    /// Sends what is queued, then sleeps until a frame is there, at most as long as the stack has
    /// nothing to do: `delay` is what
    /// [`Interface::poll_delay`](::smoltcp::iface::Interface::poll_delay) says, none is for ever.
    /// Returns whether a frame is there. On a broken device it returns at once.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Unsupported`] on a device without interrupts, and what the wait itself
    /// fails with.
    pub fn wait(&mut self, delay: Option<Duration>) -> io::Result<bool> {
        let left = self.flush();
        if self.incoming.is_ready() || self.port.rq().is_ready() {
            return Ok(true);
        }
        // Whatever the stack is to do next waits for the ring too.
        let delay = if left > 0 { Some(RING_FULL) } else { delay };
        if delay == Some(Duration::ZERO) {
            return Ok(false);
        }
        self.port.rq().wait(delay.map(Into::into))
    }

    /// The port, once what is queued was sent as far as there is room. Frames that were received
    /// and not yet taken by the stack are lost.
    #[must_use]
    pub fn into_port(mut self) -> Port {
        self.flush();
        self.port
    }
}

impl phy::Device for PortDevice {
    type RxToken<'a> = RxToken<'a>;
    type TxToken<'a> = TxToken<'a>;

    fn receive(&mut self, _: Instant) -> Option<(RxToken<'_>, TxToken<'_>)> {
        if !self.incoming.is_ready() {
            // The answers to one batch go out before the next is taken.
            self.flush();
            let port = &mut self.port;
            self.incoming.refill(|frames| port.rx_burst(frames));
        }
        // Without room for an answer the frame waits: the peer should slow down, not lose it.
        if !self.incoming.is_ready() || !self.make_room() {
            return None;
        }
        Some((self.incoming.take()?, TxToken(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: Instant) -> Option<TxToken<'_>> {
        self.make_room().then_some(TxToken(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.longest;
        capabilities
    }
}

impl PortDevice {
    /// Whether a frame can be queued, after a flush if need be.
    fn make_room(&mut self) -> bool {
        if self.outgoing.is_full() {
            self.flush();
        }
        !self.outgoing.is_full()
    }
}

impl From<MacAddress> for EthernetAddress {
    fn from(mac: MacAddress) -> Self {
        Self(mac.0)
    }
}

/// One received frame, for the stack.
#[derive(Debug)]
pub struct RxToken<'a>(&'a [u8]);

impl phy::RxToken for RxToken<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

/// Room for one frame that the stack may send.
#[derive(Debug)]
pub struct TxToken<'a>(&'a mut Outgoing);

impl phy::TxToken for TxToken<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        self.0.push(len, f)
    }
}

/// Received frames that the stack has not yet taken.
///
/// ```text
///   frames: | taken .. taken | ready .. ready | empty .. empty |
///           0                next             filled
/// ```
#[derive(Debug)]
struct Incoming {
    frames: Vec<Frame>,
    next: usize,
    filled: usize,
    /// What the stack reads.
    copy: Vec<u8>,
}

impl Incoming {
    fn new(frames: Vec<Frame>) -> Self {
        let longest = frames.iter().map(Frame::capacity).max().unwrap_or(0);
        Self {
            frames,
            next: 0,
            filled: 0,
            copy: vec![0; longest as usize],
        }
    }

    fn is_ready(&self) -> bool {
        self.next < self.filled
    }

    /// Receives a batch; the last one was taken.
    fn refill(&mut self, burst: impl FnOnce(&mut [Frame]) -> usize) {
        self.next = 0;
        self.filled = burst(&mut self.frames);
    }

    fn take(&mut self) -> Option<RxToken<'_>> {
        let frame = self.frames[..self.filled].get(self.next)?;
        self.next += 1;
        let len = frame.copy_to(&mut self.copy);
        Some(RxToken(&self.copy[..len]))
    }
}

/// How a burst of frames to send ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Burst {
    /// Frames that were exchanged, from the front.
    sent: usize,
    /// Whether the frame behind them cannot be sent at all.
    refused: bool,
}

/// Frames that the stack sent and the port has not yet taken: the first `queued` of `frames`.
#[derive(Debug)]
struct Outgoing {
    frames: Vec<Frame>,
    queued: usize,
    refused: u64,
    /// What the stack writes.
    copy: Vec<u8>,
}

impl Outgoing {
    fn new(frames: Vec<Frame>, longest: usize) -> Self {
        Self {
            frames,
            queued: 0,
            refused: 0,
            copy: vec![0; longest],
        }
    }

    fn is_full(&self) -> bool {
        self.queued == self.frames.len()
    }

    /// Queues a frame of `len` bytes that `write` fills in.
    fn push<R>(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> R) -> R {
        self.copy.clear();
        // What `write` leaves out must not be what an earlier frame said.
        self.copy.resize(len, 0);
        let result = write(&mut self.copy);
        let frame = self.frames.get_mut(self.queued);
        match frame.map(|frame| frame.fill(&self.copy)) {
            Some(Ok(())) => self.queued += 1,
            Some(Err(_)) | None => self.refused += 1,
        }
        result
    }

    /// Sends by `burst` what is queued, in order; returns how many frames stay queued.
    fn flush(&mut self, mut burst: impl FnMut(&mut [Frame]) -> Burst) -> usize {
        while self.queued > 0 {
            let Burst { sent, refused } = burst(&mut self.frames[..self.queued]);
            // A frame that cannot be sent must not hold up those behind it.
            let done = (sent + usize::from(refused)).min(self.queued);
            self.refused += u64::from(refused);
            self.frames[..self.queued].rotate_left(done);
            self.queued -= done;
            if !refused {
                break;
            }
        }
        self.queued
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use failstop_dma::proof::ObjectId;
    use failstop_dma::region::{FrameRegion, Pool};
    use failstop_dma::space::AddressSpace;
    use failstop_pci::clock::SystemClock;
    use failstop_pci::id::Generation;
    use failstop_pci::testing::{FakeFunction, limits_39_bits};
    use failstop_pci::transport::Transport;

    use super::*;

    fn region() -> (FrameRegion, Pool) {
        let function = Arc::new(FakeFunction::new(limits_39_bits()).unwrap());
        let owner = ObjectId {
            device: function.id(),
            generation: Generation::FIRST,
            serial: 1,
            kind: "MR",
        };
        let clock = Arc::new(SystemClock::default());
        let space = AddressSpace::new(function, u64::MAX, clock).unwrap();
        FrameRegion::new(space.map(owner, 4096).unwrap(), 512, 8).unwrap()
    }

    fn outgoing(pool: &mut Pool, frames: usize) -> Outgoing {
        Outgoing::new(pool.take_many(frames).unwrap(), 512)
    }

    fn push(outgoing: &mut Outgoing, content: &[u8]) {
        outgoing.push(content.len(), |bytes| bytes.copy_from_slice(content));
    }

    fn content(frame: &Frame) -> Vec<u8> {
        let mut bytes = vec![0; frame.len() as usize];
        frame.copy_to(&mut bytes);
        bytes
    }

    const NONE: Burst = Burst {
        sent: 0,
        refused: false,
    };

    #[test]
    fn queued_frames_are_sent_by_one_burst_in_order() {
        let (_region, mut pool) = region();
        let mut queue = outgoing(&mut pool, 4);
        for content in [b"one", b"two", b"six"] {
            push(&mut queue, content);
        }
        let mut bursts = Vec::new();
        let left = queue.flush(|frames| {
            bursts.push(frames.iter().map(content).collect::<Vec<_>>());
            Burst { sent: 3, ..NONE }
        });
        assert_eq!(left, 0);
        assert_eq!(bursts, [[b"one", b"two", b"six"]]);
    }

    #[test]
    fn what_the_ring_has_no_room_for_stays_queued_in_order() {
        let (_region, mut pool) = region();
        let mut queue = outgoing(&mut pool, 4);
        for content in [b"one", b"two", b"six"] {
            push(&mut queue, content);
        }
        assert_eq!(queue.flush(|_| Burst { sent: 1, ..NONE }), 2);
        push(&mut queue, b"ten");
        let mut sent = Vec::new();
        queue.flush(|frames| {
            sent = frames.iter().map(content).collect();
            NONE
        });
        assert_eq!(sent, [b"two", b"six", b"ten"]);
    }

    #[test]
    fn a_refused_frame_is_dropped_and_counted_and_those_behind_it_are_sent() {
        let (_region, mut pool) = region();
        let mut queue = outgoing(&mut pool, 4);
        for content in [b"one", b"bad", b"six"] {
            push(&mut queue, content);
        }
        let mut answers = [
            Burst {
                sent: 1,
                refused: true,
            },
            Burst { sent: 1, ..NONE },
        ]
        .into_iter();
        let mut fronts = Vec::new();
        let left = queue.flush(|frames| {
            fronts.push(content(&frames[0]));
            answers.next().unwrap()
        });
        assert_eq!((left, queue.refused), (0, 1));
        assert_eq!(fronts, [b"one", b"six"]);
    }

    #[test]
    fn a_frame_that_fits_no_buffer_is_counted_and_not_queued() {
        let (_region, mut pool) = region();
        let mut queue = outgoing(&mut pool, 1);
        push(&mut queue, &[0; 513]);
        assert_eq!((queue.queued, queue.refused), (0, 1));
    }

    #[test]
    fn an_earlier_frame_does_not_show_through_a_later_one() {
        let (_region, mut pool) = region();
        let mut queue = outgoing(&mut pool, 2);
        push(&mut queue, b"secret");
        queue.push(6, |bytes| bytes[0] = b'a');
        assert_eq!(content(&queue.frames[1]), b"a\0\0\0\0\0");
    }

    #[test]
    fn received_frames_are_taken_once_in_order() {
        let (_region, mut pool) = region();
        let mut batch = Incoming::new(pool.take_many(4).unwrap());
        batch.refill(|frames| {
            frames[0].fill(b"first").unwrap();
            frames[1].fill(b"next").unwrap();
            2
        });
        assert_eq!(batch.take().unwrap().0, b"first");
        assert_eq!(batch.take().unwrap().0, b"next");
        assert!(batch.take().is_none());
        assert!(!batch.is_ready());
    }
}
