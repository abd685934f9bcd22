//! The transmit engine: descriptors in, frames out, write-backs. §7.2

use failstop::igb::bits::TransmitControl;
use failstop::igb::descriptors::{TxCommand, TxContext, TxData, TxDescriptor, TxOptions};
use failstop::igb::registers::{QUEUE_STRIDE, TCTL, TDH, TDWBAH, TDWBAL, VET};

use super::lies::Lies;
use super::offload::{self, ETHERNET, SHORTEST};
use super::registers::File;
use super::ring::Ring;
use crate::host::{Abort, Host};

/// The longest packet without segmentation that the transmit buffer takes, in bytes.
const LONGEST: usize = 16 * 1024;
/// The longest packet that is segmented: 18 bits of payload, and headers.
const LONGEST_SEGMENTED: usize = (1 << 18) + 1024;
const CONTEXTS: usize = 8;

/// One transmit queue's state behind its registers.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// TXDCTL.ENABLE as the driver wrote it.
    pub(super) requested: bool,
    /// TXDCTL.ENABLE as it reads: the engine runs.
    pub(super) enabled: bool,
    /// A read was aborted: the engine does nothing more until a function level reset.
    pub(super) wedged: bool,
    contexts: [TxContext; CONTEXTS],
    packet: Packet,
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

/// A packet whose descriptors are being read.
#[derive(Debug, Default)]
struct Packet {
    bytes: Vec<u8>,
    /// The packet's first descriptor: offloads, payload length and context stand there.
    first: Option<TxData>,
    too_long: bool,
}

/// What one step of a queue did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Step {
    /// A descriptor with RS was written back.
    pub(super) reported: bool,
}

/// Processes one descriptor of `queue`, whose ring has one ready. Frames go to `out`.
///
/// # Errors
///
/// [`Abort`] when a read was aborted: the queue is wedged then.
pub(super) fn step(
    queue: &mut Queue,
    number: usize,
    ring: Ring,
    file: &mut File,
    lies: &mut Lies<'_>,
    host: &mut dyn Host,
    out: &mut Vec<Vec<u8>>,
) -> Result<Step, Abort> {
    let slot = ring.slot(0);
    let words = [host.dma_load(slot)?, host.dma_load(slot.wrapping_add(8))?];
    match TxDescriptor::from_words(words) {
        TxDescriptor::Context(context) => {
            queue.contexts[usize::from(context.index) % CONTEXTS] = context;
        }
        TxDescriptor::Data(data) => {
            queue.packet.append(&data, host)?;
            if data.command.contains(TxCommand::EOP) {
                let packet = std::mem::take(&mut queue.packet);
                queue.packet.bytes = packet.finish(&queue.contexts, file, out);
                queue.packet.bytes.clear();
            }
        }
        TxDescriptor::Unknown => log::debug!("transmit queue {number}: not an advanced descriptor"),
    }
    let head = ring.index(1);
    file.set(TDH.of(number as u32, QUEUE_STRIDE), head);
    let reported = words[1] as u32 & TxCommand::RS.bits() != 0;
    if reported {
        write_back(number, slot, head, file, lies, host);
    }
    Ok(Step { reported })
}

/// Tells the driver: the head into its own memory where that is on (TDWBAL bit 0), else DD.
fn write_back(
    number: usize,
    slot: u64,
    head: u32,
    file: &File,
    lies: &mut Lies<'_>,
    host: &mut dyn Host,
) {
    let low = file.of_queue(TDWBAL, number);
    if low & 1 == 0 {
        lies.send(slot, host);
    } else {
        let address = u64::from(low & !3) | u64::from(file.of_queue(TDWBAH, number)) << 32;
        host.dma_write(address, &head.to_le_bytes());
    }
}

impl Packet {
    fn append(&mut self, data: &TxData, host: &mut dyn Host) -> Result<(), Abort> {
        let first = *self.first.get_or_insert(*data);
        let longest = if first.command.contains(TxCommand::TSE) {
            LONGEST_SEGMENTED
        } else {
            LONGEST
        };
        let start = self.bytes.len();
        let end = start + usize::from(data.length);
        if self.too_long || end > longest {
            self.too_long = true;
            return Ok(());
        }
        self.bytes.resize(end, 0);
        host.dma_read(data.address, &mut self.bytes[start..])
    }

    /// Turns the packet into frames, and hands its storage back.
    fn finish(
        mut self,
        contexts: &[TxContext; CONTEXTS],
        file: &File,
        out: &mut Vec<Vec<u8>>,
    ) -> Vec<u8> {
        let Some(first) = self.first else {
            return self.bytes;
        };
        // Without IFCS the frame's last bytes stand where its check sequence should be.
        if self.too_long || self.bytes.len() < ETHERNET || !first.command.contains(TxCommand::IFCS)
        {
            log::debug!("a packet of {} bytes cannot be sent", self.bytes.len());
            return self.bytes;
        }
        let context = &contexts[usize::from(first.context) % CONTEXTS];
        let tag = first
            .command
            .contains(TxCommand::VLE)
            .then_some((file.get(VET) as u16, context.vlan));
        let pad = file.get(TCTL).contains(TransmitControl::PSP);
        let mut send = |frame: &mut Vec<u8>| {
            if let Some((ethertype, tag)) = tag {
                offload::insert_tag(frame, ethertype, tag);
            }
            if pad && frame.len() < SHORTEST {
                frame.resize(SHORTEST, 0);
            }
            out.push(std::mem::take(frame));
        };
        if first.command.contains(TxCommand::TSE) {
            let payload = first.payload as usize;
            let mut scratch = Vec::new();
            let done = offload::segment(
                &self.bytes,
                payload,
                context,
                first.options,
                &mut scratch,
                send,
            );
            if done.is_none() {
                log::debug!("a packet to segment contradicts its context");
            }
            return self.bytes;
        }
        if first.options.intersects(TxOptions::IXSM | TxOptions::TXSM)
            && offload::insert_checksums(&mut self.bytes, context, first.options, 0).is_none()
        {
            log::debug!(
                "checksums lie outside a packet of {} bytes",
                self.bytes.len()
            );
            return self.bytes;
        }
        send(&mut self.bytes);
        self.bytes
    }
}
