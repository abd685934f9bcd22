//! The receive engine: the packet buffer, and descriptors that frames are written through. §7.1

use std::collections::VecDeque;

use failstop::igb::bits::{Control, ReceiveChecksum, ReceiveControl, SplitReceive};
use failstop::igb::descriptors::{RxDone, RxErrors, RxKind, RxStatus};
use failstop::igb::registers::{CTRL, QUEUE_STRIDE, RCTL, RDH, RXCSUM, SRRCTL, VET};

use super::filter;
use super::lies::{Lies, WriteBack};
use super::offload::{self, Checksum, Layers, TCP, UDP};
use super::registers::File;
use super::ring::Ring;
use crate::host::{Abort, Host};

/// Bytes of frames that wait for descriptors: the packet buffer's 64 KiB. §8.3
const PACKET_BUFFER: usize = 64 * 1024;
/// Advanced descriptors with one buffer. §8.10.2
const ONE_BUFFER: u32 = 1;

/// One receive queue's state behind its registers.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// RXDCTL.ENABLE as the driver wrote it.
    pub(super) requested: bool,
    /// RXDCTL.ENABLE as it reads: the engine runs.
    pub(super) enabled: bool,
    /// A read was aborted: the engine does nothing more until a function level reset.
    pub(super) wedged: bool,
}

impl Queue {
    /// What CTRL.RST does: everything but the wedge is forgotten.
    pub(super) fn reset(&mut self) {
        *self = Self {
            wedged: self.wedged,
            ..Self::default()
        };
    }
}

/// A frame that passed the filters, and what its descriptor will say.
#[derive(Debug)]
pub(super) struct Arrival {
    bytes: Vec<u8>,
    /// The queue that it is for.
    pub(super) queue: usize,
    kind: RxKind,
    status: RxStatus,
    errors: RxErrors,
    vlan: u16,
}

impl Arrival {
    /// Looks a frame over, as RXCSUM, MRQC, CTRL.VME and RCTL.SECRC say.
    #[must_use]
    pub(super) fn new(file: &File, mut bytes: Vec<u8>) -> Self {
        let mut status = RxStatus::empty();
        let mut vlan = 0;
        if file.get(CTRL).contains(Control::VME)
            && let Some(tag) = offload::tag(&bytes, file.get(VET) as u16)
        {
            offload::strip_tag(&mut bytes);
            status |= RxStatus::VP;
            vlan = tag;
        }
        let layers = offload::layers(&bytes);
        let hash = filter::rss(file, layers.as_ref());
        let (checked, errors) = check(file, layers.as_ref());
        let (rss_type, value) = hash.unwrap_or((0, 0));
        let kind = RxKind::new(rss_type, packet_type(layers.as_ref()), value);
        let queue = filter::queue(file, hash);
        if !file.get(RCTL).contains(ReceiveControl::SECRC) {
            let fcs = offload::frame_check(&bytes);
            bytes.extend_from_slice(&fcs);
        }
        Self {
            bytes,
            queue,
            kind,
            status: status | checked,
            errors,
            vlan,
        }
    }

    /// Gives the frame's storage back.
    #[must_use]
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn done(&self, length: usize, last: bool) -> RxDone {
        let end = if last {
            RxStatus::EOP
        } else {
            RxStatus::empty()
        };
        let status = self.status | RxStatus::DD | end;
        RxDone::new(status, self.errors, length as u16, self.vlan)
    }
}

fn packet_type(layers: Option<&Layers<'_>>) -> u16 {
    let Some(layers) = layers else { return 0 };
    let ip = if layers.ipv4 { 1 << 0 } else { 1 << 2 };
    ip | match layers.protocol {
        Some(TCP) => 1 << 4,
        Some(UDP) => 1 << 5,
        _ => 0,
    }
}

/// Checksum offload. §7.1.10
fn check(file: &File, layers: Option<&Layers<'_>>) -> (RxStatus, RxErrors) {
    let (mut status, mut errors) = (RxStatus::empty(), RxErrors::empty());
    let control = file.get(RXCSUM);
    let Some(layers) = layers else {
        return (status, errors);
    };
    if control.contains(ReceiveChecksum::IPOFLD) && layers.ip_checksum != Checksum::Absent {
        status |= RxStatus::IPCS;
        errors.set(RxErrors::IPE, layers.ip_checksum == Checksum::Bad);
    }
    if control.contains(ReceiveChecksum::TUOFLD) {
        let checksum = layers.transport_checksum();
        if checksum != Checksum::Absent {
            status |= RxStatus::L4I;
            status.set(RxStatus::UDPCS, layers.protocol == Some(UDP));
            errors.set(RxErrors::L4E, checksum == Checksum::Bad);
        }
    }
    (status, errors)
}

/// What became of a frame that was offered to its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Placed {
    /// It was written to memory.
    Written,
    /// There are not enough descriptors now.
    NoDescriptors,
    /// It can never be written: the queue is off, of an unknown descriptor type, or too small.
    Never,
}

/// Writes a frame through its queue's descriptors.
///
/// # Errors
///
/// [`Abort`] when a descriptor could not be read: the queue is wedged then, and the frame lost.
pub(super) fn place(
    queue: &Queue,
    arrival: &Arrival,
    file: &mut File,
    lies: &mut Lies<'_>,
    host: &mut dyn Host,
) -> Result<Placed, Abort> {
    let split: SplitReceive = file.of_queue(SRRCTL, arrival.queue);
    if !queue.enabled || queue.wedged || split.descriptor_type() != ONE_BUFFER {
        return Ok(Placed::Never);
    }
    let buffer = match split.packet_bytes() {
        0 => file.get(RCTL).buffer_bytes(),
        bytes => bytes,
    } as usize;
    let ring = Ring::receive(file, arrival.queue);
    let needed = arrival.bytes.len().div_ceil(buffer) as u32;
    if needed >= ring.len {
        return Ok(Placed::Never);
    }
    if ring.ready() < needed {
        return Ok(Placed::NoDescriptors);
    }
    let copies = lies.copies().min(ring.ready() / needed.max(1));
    for n in 0..copies * needed {
        let number = n % needed;
        let start = number as usize * buffer;
        let part = &arrival.bytes[start..arrival.bytes.len().min(start + buffer)];
        let slot = ring.slot(n);
        let done = arrival.done(part.len(), number + 1 == needed);
        let back = WriteBack {
            slot,
            buffer: host.dma_load(slot)?,
            payload: part,
            words: [arrival.kind.0, done.0],
        };
        lies.receive(back, ring, host);
    }
    file.set(
        RDH.of(arrival.queue as u32, QUEUE_STRIDE),
        ring.index(copies * needed),
    );
    Ok(Placed::Written)
}

/// Frames that wait for descriptors, oldest first.
#[derive(Debug, Default)]
pub(super) struct PacketBuffer {
    frames: VecDeque<Arrival>,
    bytes: usize,
}

impl PacketBuffer {
    /// Keeps a frame.
    ///
    /// # Errors
    ///
    /// The frame, when there is no room.
    pub(super) fn push(&mut self, arrival: Arrival) -> Result<(), Arrival> {
        let bytes = self.bytes + arrival.bytes.len();
        if bytes > PACKET_BUFFER {
            return Err(arrival);
        }
        self.bytes = bytes;
        self.frames.push_back(arrival);
        Ok(())
    }

    /// Puts a frame back that was taken out as the oldest.
    pub(super) fn put_back(&mut self, arrival: Arrival) {
        self.bytes += arrival.bytes.len();
        self.frames.push_front(arrival);
    }

    /// Takes the oldest frame out.
    pub(super) fn pop(&mut self) -> Option<Arrival> {
        let arrival = self.frames.pop_front()?;
        self.bytes -= arrival.bytes.len();
        Some(arrival)
    }

    /// Whether no frame waits.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether another long frame would find room: a wire may hold frames back while not.
    #[must_use]
    pub(super) fn has_room(&self) -> bool {
        self.bytes + 16 * 1024 <= PACKET_BUFFER
    }

    /// Forgets every frame.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.bytes = 0;
    }
}
