//! What faults make of the server: messages that get no answer, another one, or the end of it; files
//! cut short; eventfds that block.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use failstop_pci::transport::vfio_user::wire::{Header, encode};
use rustix::fs::FallocateFlags;

use super::handler::{Outcome, REGISTERS, Service, file_of};
use super::incoming::Incoming;
use crate::device::bar_size;
use crate::faults::Fault;
use crate::host::Host;

/// How long a file that is said to be the registers' keeps its length.
const OFFERED: Duration = Duration::from_millis(5);
/// How often eventfds are made to block.
const BLOCK: Duration = Duration::from_millis(1);

/// What faults of the server are about.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// The file that was offered as the registers', and when it is cut short.
    offered: Option<(File, Duration)>,
    /// When the client's eventfds are made to block again.
    block_due: Duration,
    /// Questions of our own that the client has not answered yet, whatever became of the fault.
    pub(super) unanswered: usize,
}

impl Trouble {
    /// Whether a reply is one that we wait for; it is counted then.
    pub(super) const fn take_answer(&mut self) -> bool {
        let is_awaited = self.unanswered > 0;
        self.unanswered = self.unanswered.saturating_sub(1);
        is_awaited
    }
}

impl Service {
    /// What a fault of the server does instead of what a message asks.
    pub(super) fn interfere(&mut self, incoming: Incoming, header: &Header) -> Option<Outcome> {
        let faults = self.device.faults();
        if faults.is_quiet() {
            return None;
        }
        let (fault, once, outcome) = faults.find(|fault| match fault {
            Fault::ServerDies(Some(of)) if incoming.is(of) => Some((fault, false, Outcome::Death)),
            Fault::ServerHangs(messages) if incoming.is_among(messages) => {
                Some((fault, messages.once, Outcome::Silence))
            }
            Fault::ServerError(errno, messages) if incoming.is_among(messages) => {
                let reply = encode(&header.failure(errno.number().unsigned_abs()), &[], &[]);
                let outcome = if header.wants_no_reply() {
                    Outcome::Silence
                } else {
                    Outcome::Reply(reply, None)
                };
                Some((fault, messages.once, outcome))
            }
            _ => None,
        })?;
        if matches!(fault, Fault::ServerError(..)) {
            self.counters.refused += 1;
        }
        if once {
            self.device.end_fault(fault);
        }
        Some(outcome)
    }

    /// Cuts a reply short, if a fault says so: to half of its payload, or, without one, to a size
    /// that no message has.
    pub(super) fn shorten(&mut self, incoming: Incoming, mut reply: Vec<u8>) -> Vec<u8> {
        let short = self.device.faults().find(|fault| match fault {
            Fault::ServerShort(messages) if incoming.is_among(messages) => Some((fault, messages)),
            _ => None,
        });
        let Some((fault, messages)) = short else {
            return reply;
        };
        if messages.once {
            self.device.end_fault(fault);
        }
        let payload = reply.len().saturating_sub(Header::SIZE);
        let size = if payload == 0 {
            Header::SIZE / 2
        } else {
            reply.truncate(Header::SIZE + payload / 2);
            reply.len()
        };
        // The size stands behind id and command.
        reply[4..8].copy_from_slice(&(size as u32).to_ne_bytes());
        reply
    }

    /// A file that is said to be the registers', and will be cut short.
    pub(super) fn offer_registers(&mut self) -> io::Result<File> {
        let file = file_of("failstop-registers", bar_size(REGISTERS as usize), 0)?;
        self.trouble.offered = Some((file.try_clone()?, self.world.now() + OFFERED));
        Ok(file)
    }

    /// Does what faults of the server do by themselves.
    pub fn misbehave(&mut self) {
        let now = self.world.now();
        if let Some((file, _)) = self.trouble.offered.take_if(|(_, end)| now >= *end) {
            cut_short(&file);
        }
        let block = self.device.faults().find(|fault| match fault {
            Fault::IrqBlock(block) => Some(block),
            _ => None,
        });
        if let Some(block) = block
            && now >= self.trouble.block_due
        {
            self.trouble.block_due = now + BLOCK;
            self.world.irqs.block(block);
        }
    }

    /// When [`Service::misbehave`] has something to do, if ever.
    #[must_use]
    pub fn next_misbehaviour(&self) -> Option<Duration> {
        let faults = self.device.faults();
        let blocks = faults.find(|fault| match fault {
            Fault::IrqBlock(_) => Some(self.trouble.block_due),
            _ => None,
        });
        let offered = self.trouble.offered.as_ref().map(|(_, end)| *end);
        [blocks, offered].into_iter().flatten().min()
    }
}

/// Cuts a file short, and punches a hole where it keeps its length.
pub(super) fn cut_short(file: &impl AsFd) {
    let size = rustix::fs::fstat(file).map_or(0, |stat| stat.st_size.unsigned_abs());
    let cut = rustix::fs::ftruncate(file, 0);
    log::info!("a file of {size} bytes is cut short: {cut:?}");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if cut.is_err() && size > 0 {
        let punched = rustix::fs::fallocate(file, hole, 0, size);
        log::info!("a hole is punched into it: {punched:?}");
    }
}
