//! A ring of descriptors, as a queue's registers describe it.

use failstop::igb::descriptors::BYTES;
use failstop::igb::registers::{RDBAH, RDBAL, RDH, RDLEN, RDT, TDBAH, TDBAL, TDH, TDLEN, TDT};
use failstop_pci::register::Reg;

use super::registers::File;

/// Where a ring is, and whose its descriptors are: from head to before tail the device's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ring {
    /// IOVA of descriptor 0.
    pub(super) base: u64,
    /// Descriptors.
    pub(super) len: u32,
    /// The device's index.
    pub(super) head: u32,
    /// The driver's index.
    pub(super) tail: u32,
}

impl Ring {
    /// The ring of a receive queue.
    #[must_use]
    pub(super) fn receive(file: &File, queue: usize) -> Self {
        Self::of([RDBAL, RDBAH, RDLEN, RDH, RDT], file, queue)
    }

    /// The ring of a transmit queue.
    #[must_use]
    pub(super) fn transmit(file: &File, queue: usize) -> Self {
        Self::of([TDBAL, TDBAH, TDLEN, TDH, TDT], file, queue)
    }

    fn of(registers: [Reg<u32>; 5], file: &File, queue: usize) -> Self {
        let [low, high, bytes, head, tail] = registers.map(|r| file.of_queue(r, queue));
        Self {
            base: u64::from(low) | u64::from(high) << 32,
            len: bytes / BYTES as u32,
            head,
            tail,
        }
    }

    /// How many descriptors are the device's; 0 when the indexes make no sense.
    #[must_use]
    pub(super) const fn ready(self) -> u32 {
        if self.head >= self.len || self.tail >= self.len {
            0
        } else if self.tail >= self.head {
            self.tail - self.head
        } else {
            self.tail + self.len - self.head
        }
    }

    /// The index `n` after the head.
    #[must_use]
    pub(super) const fn index(self, n: u32) -> u32 {
        if self.len == 0 {
            return 0;
        }
        ((self.head as u64 + n as u64) % self.len as u64) as u32
    }

    /// IOVA of the descriptor `n` after the head.
    #[must_use]
    pub(super) const fn slot(self, n: u32) -> u64 {
        self.base.wrapping_add(self.index(n) as u64 * BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: Ring = Ring {
        base: 0x1000,
        len: 8,
        head: 6,
        tail: 2,
    };

    #[test]
    fn the_device_s_part_wraps() {
        assert_eq!(RING.ready(), 4);
        assert_eq!(RING.slot(3), 0x1010);
        assert_eq!(RING.index(2), 0);
    }

    #[test]
    fn head_equal_to_tail_is_empty() {
        assert_eq!(Ring { tail: 6, ..RING }.ready(), 0);
    }

    #[test]
    fn indexes_outside_the_ring_leave_the_device_nothing() {
        assert_eq!(Ring { tail: 8, ..RING }.ready(), 0);
        assert_eq!(Ring { len: 0, ..RING }.ready(), 0);
        assert_eq!(Ring { len: 0, ..RING }.slot(1), 0x1000);
    }
}
