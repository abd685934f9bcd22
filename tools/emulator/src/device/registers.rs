//! The register file: storage, aliases, write masks, defaults. What a register *does* is in
//! [`device`](super); this is what it remembers.

use failstop::igb::bits::AddressHigh;
use failstop::igb::bits::Thresholds;
use failstop::igb::registers::{
    ADDRESS_STRIDE, BAR_SIZE, CTRL, EECD, EITR, FCAH, FCRTH, FCT, FCTTV, GCR, ICR,
    QUEUE_ALIAS_STRIDE, QUEUE_ALIASES, QUEUE_STRIDE, RAH, RAH16, RAL, RDBAL, RDH, RDLEN, RDT,
    RECEIVE_ALIAS, RXDCTL, RXPBS, STATUS, SW_FW_SYNC, SWSM, TDBAL, TDH, TDLEN, TDT, TIPG,
    TRANSMIT_ALIAS, TXDCTL, TXPBS, VET,
};
use failstop_pci::register::{Reg, Value};

/// Queues each way.
pub(super) const QUEUES: u32 = 16;
const QUEUE_SPACE: u32 = QUEUES * QUEUE_STRIDE;
/// Manageability's view of the NVM: configuration cycles of both ports are done. §8.21
const EEMNGCTL: u32 = 0x1010;
const EITRS: u32 = 25;

/// The one offset of a register that has two. See [`failstop::igb::registers`].
#[must_use]
pub(super) fn canonical(offset: u32) -> u32 {
    match offset {
        0x00C0 => ICR.offset(),
        0x00C8 => ICR.offset() + 4,
        0x00D0 => ICR.offset() + 8,
        0x00D8 => ICR.offset() + 12,
        0x00E0 => ICR.offset() + 16,
        _ => alias(offset, RECEIVE_ALIAS, RDBAL.offset())
            .or_else(|| alias(offset, TRANSMIT_ALIAS, TDBAL.offset()))
            .unwrap_or(offset),
    }
}

fn alias(offset: u32, from: u32, to: u32) -> Option<u32> {
    let at = offset.checked_sub(from)?;
    let (queue, register) = (at / QUEUE_ALIAS_STRIDE, at % QUEUE_ALIAS_STRIDE);
    (queue < QUEUE_ALIASES && register < QUEUE_STRIDE)
        .then_some(to + queue * QUEUE_STRIDE + register)
}

/// Queue and offset within its registers, when `offset` (canonical) is one of the receive queues',
/// as an offset that names queue 0's register.
#[must_use]
pub(super) fn receive_queue(offset: u32) -> Option<(usize, u32)> {
    queue(offset, RDBAL.offset())
}

/// The same for transmit queues.
#[must_use]
pub(super) fn transmit_queue(offset: u32) -> Option<(usize, u32)> {
    queue(offset, TDBAL.offset())
}

fn queue(offset: u32, first: u32) -> Option<(usize, u32)> {
    let at = offset.checked_sub(first).filter(|at| *at < QUEUE_SPACE)?;
    Some(((at / QUEUE_STRIDE) as usize, first + at % QUEUE_STRIDE))
}

/// Which bits of a register (canonical offset) a write changes.
fn write_mask(offset: u32) -> u32 {
    if let Some((_, register)) = receive_queue(offset).or_else(|| transmit_queue(offset)) {
        return match register {
            r if r == RDBAL.offset() || r == TDBAL.offset() => !0x7F,
            r if r == RDLEN.offset() || r == TDLEN.offset() => 0x000F_FFF0,
            r if [RDH, RDT, TDH, TDT].iter().any(|reg| reg.offset() == r) => 0xFFFF,
            r if r == RXDCTL.offset() || r == TXDCTL.offset() => Thresholds::MASK,
            _ => u32::MAX,
        };
    }
    let addresses = RAL.offset()..RAL.offset() + 16 * ADDRESS_STRIDE;
    let upper_addresses = RAH16.offset() - 4..RAH16.offset() - 4 + 8 * ADDRESS_STRIDE;
    if addresses.contains(&offset) || upper_addresses.contains(&offset) {
        return if offset % ADDRESS_STRIDE == 4 {
            0x83FF_FFFF
        } else {
            u32::MAX
        };
    }
    match offset {
        o if o == STATUS.offset() || o == EEMNGCTL => 0,
        o if [FCAH, FCT, FCTTV].iter().any(|reg| reg.offset() == o) => 0xFFFF,
        o if o == FCRTH.offset() => 0xFFF0,
        o if o == TIPG.offset() => 0x3FFF_FFFF,
        o if o == SWSM.offset() => 3,
        _ => u32::MAX,
    }
}

/// What is in the registers.
#[derive(Debug)]
pub(super) struct File {
    words: Vec<u32>,
}

impl File {
    /// A register file as power-on leaves it; the NVM holds `mac`.
    #[must_use]
    pub(super) fn new(mac: [u8; 6]) -> Self {
        let mut file = Self {
            words: vec![0; BAR_SIZE as usize / 4],
        };
        file.set(RXPBS, 0x40u32);
        file.set(TXPBS, 0x28u32);
        file.set_defaults(mac);
        file
    }

    /// What CTRL.RST does to storage: everything to its default but the semaphores, the interrupt
    /// throttles and the packet buffer sizes. §4.2
    pub(super) fn reset(&mut self, mac: [u8; 6]) {
        let throttles = (0..EITRS).map(|n| EITR.offset() + 4 * n);
        let kept: Vec<(u32, u32)> = [
            SWSM.offset(),
            SW_FW_SYNC.offset(),
            RXPBS.offset(),
            TXPBS.offset(),
        ]
        .into_iter()
        .chain(throttles)
        .map(|offset| (offset, self.word(offset)))
        .collect();
        self.words.fill(0);
        self.set_defaults(mac);
        for (offset, value) in kept {
            self.set_word(offset, value);
        }
    }

    fn set_defaults(&mut self, mac: [u8; 6]) {
        self.set_word(CTRL.offset(), 0x0000_0201); // full duplex, 1000 Mb/s
        self.set_word(EECD.offset(), 0x0000_2300); // present, read, 1024 words
        self.set_word(GCR.offset(), 0x0005_0000); // resend on completion timeout; capability version 2
        self.set_word(EEMNGCTL, 0x000C_0000);
        self.set(VET, 0x8100u32);
        self.set(RAL, u32::from_le_bytes([mac[0], mac[1], mac[2], mac[3]]));
        self.set(RAH, AddressHigh::of(mac));
        for queue in 0..QUEUES {
            self.set_word(RXDCTL.of(queue, QUEUE_STRIDE).offset(), 1 << 16);
        }
    }

    /// The word at a canonical offset; 0 beyond the BAR.
    #[must_use]
    #[inline]
    pub(super) fn word(&self, offset: u32) -> u32 {
        self.words.get(offset as usize / 4).copied().unwrap_or(0)
    }

    /// Sets the word at a canonical offset, whatever its write mask.
    #[inline]
    pub(super) fn set_word(&mut self, offset: u32, value: u32) {
        if let Some(word) = self.words.get_mut(offset as usize / 4) {
            *word = value;
        }
    }

    /// Sets what a driver may set of the word at a canonical offset.
    pub(super) fn write(&mut self, offset: u32, value: u32) {
        let mask = write_mask(offset);
        self.set_word(offset, self.word(offset) & !mask | value & mask);
    }

    /// A register's value.
    #[must_use]
    #[inline]
    pub(super) fn get<V: Value>(&self, register: Reg<V>) -> V {
        V::from_bits(self.word(register.offset()))
    }

    /// Sets a register, whatever its write mask.
    #[inline]
    pub(super) fn set<V: Value>(&mut self, register: Reg<V>, value: V) {
        self.set_word(register.offset(), value.bits());
    }

    /// The value of a queue's register, named by queue 0's.
    #[must_use]
    #[inline]
    pub(super) fn of_queue<V: Value>(&self, register: Reg<V>, queue: usize) -> V {
        self.get(register.of(queue as u32, QUEUE_STRIDE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_3_s_old_and_new_addresses_are_one_register() {
        assert_eq!(canonical(0x2B18), 0xC0D8);
        assert_eq!(canonical(0x3B28), 0xE0E8);
    }

    #[test]
    fn packet_buffer_registers_between_the_aliases_keep_their_own_addresses() {
        assert_eq!(canonical(0x2C18), 0x2C18);
        assert_eq!(canonical(0x2840), 0x2840);
    }

    #[test]
    fn the_masks_that_linux_s_self_test_needs_hold() {
        let mut file = File::new([0; 6]);
        for (offset, expected) in [
            (0xC000, 0xFFFF_FF80),
            (0xC008, 0x000F_FFF0),
            (0xC018, 0x0000_FFFF),
            (0xE040, 0xFFFF_FF80),
            (0x5404, 0x83FF_FFFF),
            (0x54E4, 0x83FF_FFFF),
            (0x002C, 0x0000_FFFF),
            (0x0030, 0x0000_FFFF),
            (0x0170, 0x0000_FFFF),
            (0x2168, 0x0000_FFF0),
            (0x0410, 0x3FFF_FFFF),
            (0x5200, 0xFFFF_FFFF),
            (0x0038, 0xFFFF_FFFF),
        ] {
            file.set_word(offset, 0);
            file.write(offset, u32::MAX);
            assert_eq!(file.word(offset), expected, "register {offset:#x}");
        }
    }

    #[test]
    fn status_ignores_writes() {
        let mut file = File::new([0; 6]);
        file.write(0x0008, u32::MAX);
        assert_eq!(file.word(0x0008), 0);
    }

    #[test]
    fn a_reset_keeps_throttles_and_forgets_the_multicast_table() {
        let mut file = File::new([0; 6]);
        file.write(0x1684, 7);
        file.write(0x5200, 7);
        file.reset([0; 6]);
        assert_eq!((file.word(0x1684), file.word(0x5200)), (7, 0));
    }
}
