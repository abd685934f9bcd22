//! What completions say. Without a fault the descriptor is written back as it should be; with one
//! it says something else, somewhere else, later, or twice.

use std::time::Duration;

use failstop::igb::descriptors::{BYTES, RxDone, RxErrors, RxKind, RxStatus, TxDone};

use super::accounts::Target;
use super::late::{Late, Write};
use super::ring::Ring;
use crate::faults::{Fault, Faults, next};
use crate::host::Host;

/// How late a write-back out of order may be.
const SHUFFLED: u64 = 2_000;
/// When a completion is written over.
const REWRITE: Duration = Duration::from_micros(20);
/// The header that a frame gets then.
const HEADER: [u8; 14] = [0xD5; 14];

/// A received part of a frame that is to be written back.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteBack<'a> {
    /// Where its descriptor is.
    pub(super) slot: u64,
    /// The buffer that the descriptor named.
    pub(super) buffer: u64,
    /// What belongs into the buffer.
    pub(super) payload: &'a [u8],
    /// The descriptor's two words.
    pub(super) words: [u64; 2],
}

/// The part of a device that writes completions.
#[derive(Debug)]
pub(super) struct Lies<'a> {
    pub(super) faults: &'a Faults,
    pub(super) late: &'a mut Late,
    /// Of write-backs out of order.
    pub(super) random: &'a mut u64,
}

impl Lies<'_> {
    /// In how many descriptors a received frame is completed.
    pub(super) fn copies(&self) -> u32 {
        1 + u32::from(self.faults.has(Fault::CompletionTwice))
    }

    /// Writes a received part and its descriptor.
    pub(super) fn receive(&mut self, back: WriteBack<'_>, ring: Ring, host: &mut dyn Host) {
        if self.faults.is_quiet() {
            host.dma_write(back.buffer, back.payload);
            return write_words(back.slot, back.words, host);
        }
        if !self.faults.has(Fault::CompletionNoData) {
            host.dma_write(back.buffer, back.payload);
        }
        let words = self.receive_words(back.words);
        match self.delay() {
            None => write_words(back.slot, words, host),
            Some(delay) => {
                let due = host.now() + delay;
                let slot = Target::at(back.slot, host);
                self.late.push(due, Write::Word(slot, words[0]));
                self.late.push(due, Write::Word(slot.after(8), words[1]));
            }
        }
        for n in 0..self.beyond() {
            // Behind the tail, where nothing was posted. Addresses are left alone: the driver may be
            // about to post them.
            let slot = ring.slot(ring.ready() + n);
            host.dma_store(slot.wrapping_add(8), words[1]);
        }
        if self.faults.has(Fault::DmaRewrite) {
            let length = 60.min(RxDone(words[1]).length());
            let changed = RxDone::new(RxStatus::empty(), RxErrors::empty(), length, 0);
            let rewrite = Write::Rewrite {
                done: Target::at(back.slot, host).after(8),
                said: words[1],
                says: (changed.0 >> 32) as u32,
                frame: Target::at(back.buffer, host),
                header: HEADER.to_vec(),
            };
            self.late.push(host.now() + REWRITE, rewrite);
        }
    }

    /// Writes a sent descriptor back.
    pub(super) fn send(&mut self, slot: u64, host: &mut dyn Host) {
        let word = if self.faults.has(Fault::CompletionOnes) {
            u64::MAX
        } else {
            TxDone::DONE.0
        };
        match self.delay() {
            None => host.dma_store(slot.wrapping_add(8), word),
            Some(delay) => {
                let target = Target::at(slot, host).after(8);
                self.late
                    .push(host.now() + delay, Write::Word(target, word));
            }
        }
    }

    fn receive_words(&self, [mut kind, mut done]: [u64; 2]) -> [u64; 2] {
        let length = |done: u64, bytes: u16| done & !(0xFFFF << 32) | u64::from(bytes) << 32;
        for fault in self.faults.active() {
            match fault {
                Fault::CompletionLong(bytes) => done = length(done, bytes),
                Fault::CompletionEmpty => done = length(done, 0),
                Fault::CompletionType { no_eop: true } => done &= !u64::from(RxStatus::EOP.bits()),
                Fault::CompletionType { no_eop: false } => {
                    kind = RxKind::new(0xF, 0x1FFF, u32::MAX).0;
                }
                Fault::CompletionOnes => return [u64::MAX; 2],
                _ => {}
            }
        }
        [kind, done]
    }

    /// How late the descriptor is written; none when at once.
    fn delay(&mut self) -> Option<Duration> {
        if self.faults.is_quiet() {
            return None;
        }
        self.faults
            .find(|fault| match fault {
                Fault::LateDone(time) => Some(time),
                _ => None,
            })
            .or_else(|| {
                let shuffled = self.faults.has(Fault::CompletionShuffled);
                shuffled.then(|| Duration::from_micros(next(self.random) % SHUFFLED))
            })
    }

    /// How many descriptors behind the tail are completed too.
    fn beyond(&self) -> u32 {
        let beyond = self.faults.find(|fault| match fault {
            Fault::CompletionUnposted => Some(1),
            Fault::CompletionAhead => Some(2),
            _ => None,
        });
        beyond.unwrap_or(0)
    }
}

/// The word with DD comes last, in one store: whoever sees it sees the rest.
fn write_words(slot: u64, words: [u64; 2], host: &mut dyn Host) {
    host.dma_store(slot, words[0]);
    host.dma_store(slot.wrapping_add(8), words[1]);
}

/// What a head register reads, of which `reads` reads were made before.
pub(super) fn head(stored: u32, ring: Ring, faults: &Faults, reads: u32) -> u32 {
    let lie = faults.find(|fault| match fault {
        Fault::CompletionIndex => Some(stored | 0xFFF0),
        Fault::CompletionBackwards if ring.len > 0 => {
            Some((stored + ring.len - reads % ring.len) % ring.len)
        }
        Fault::CompletionAhead if ring.len > 0 => Some((ring.tail + 2) % ring.len),
        _ => None,
    });
    lie.unwrap_or(stored)
}

const _: () = assert!(BYTES == 16, "a descriptor is two words");
