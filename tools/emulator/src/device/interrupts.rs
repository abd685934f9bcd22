//! Causes, masks and vectors. §7.3, §8.8

use failstop::igb::bits::{GeneralInterrupt, InterruptCause, ivar_shift};
use failstop::igb::registers::{
    EIAC, EIAM, EICR, EICS, EIMC, EIMS, GPIE, IAM, ICR, ICS, IMC, IMS, IVAR, IVAR_MISC,
};

const IVARS: u32 = 8;

/// The interrupt block's state.
#[derive(Debug, Default)]
pub(super) struct Interrupts {
    causes: InterruptCause,
    mask: InterruptCause,
    auto_mask: InterruptCause,
    vectors: u32,
    vector_mask: u32,
    vector_auto_clear: u32,
    vector_auto_mask: u32,
    mode: GeneralInterrupt,
    allocation: [u32; IVARS as usize],
    other_allocation: u32,
    /// Vectors, and whether the one of the simple modes, whose last message still stands for their
    /// pending cause.
    sent: u32,
    line: bool,
}

impl Interrupts {
    fn is_multiple(&self) -> bool {
        self.mode.contains(GeneralInterrupt::MULTIPLE_MSIX)
    }

    fn is_asserted(&self) -> bool {
        self.causes.intersects(self.mask)
    }

    /// Descriptors of a queue were written back.
    pub(super) fn queue(&mut self, queue: usize, transmit: bool) {
        if self.is_multiple() {
            let word = self.allocation[queue % IVARS as usize];
            self.raise(word >> ivar_shift(queue as u32, transmit));
        } else {
            self.causes |= if transmit {
                InterruptCause::TXDW
            } else {
                InterruptCause::RXDW
            };
        }
    }

    /// Something else happened.
    pub(super) fn cause(&mut self, causes: InterruptCause) {
        self.causes |= causes;
        if self.is_multiple() && causes.intersects(self.mask) {
            self.raise(self.other_allocation >> 8);
        }
    }

    /// Sets the vector that an allocation byte names, if it is valid.
    fn raise(&mut self, entry: u32) {
        if entry & 0x80 != 0 {
            self.vectors |= 1 << (entry & 0x1F);
        }
    }

    /// Reads the register at a canonical offset, with what reading it does, if it is one of ours.
    pub(super) fn read(&mut self, offset: u32) -> Option<u32> {
        Some(match offset {
            o if o == ICR.offset() => self.read_causes(),
            o if o == IMS.offset() || o == IMC.offset() => self.mask.bits(),
            o if o == IAM.offset() => self.auto_mask.bits(),
            o if o == GPIE.offset() => self.mode.bits(),
            o if o == EICR.offset() => {
                let vectors = self.vectors;
                self.vectors &= self.vector_auto_clear;
                self.sent &= self.vectors;
                vectors
            }
            o if o == EIMS.offset() || o == EIMC.offset() => self.vector_mask,
            o if o == EIAC.offset() => self.vector_auto_clear,
            o if o == EIAM.offset() => self.vector_auto_mask,
            o if o == ICS.offset() || o == EICS.offset() => 0,
            o if o == IVAR_MISC.offset() => self.other_allocation,
            _ => self.allocation[allocation_index(offset)?],
        })
    }

    fn read_causes(&mut self) -> u32 {
        let asserted = self.is_asserted();
        let mut causes = self.causes;
        causes.set(InterruptCause::INTA, asserted);
        // §8.8.7: without NSICR a read clears only when an interrupt is asserted or all are masked.
        if asserted || self.mask.is_empty() || self.mode.contains(GeneralInterrupt::NSICR) {
            self.causes = InterruptCause::empty();
        }
        if asserted && !self.is_multiple() {
            self.mask -= self.auto_mask;
        }
        causes.bits()
    }

    /// Writes the register at a canonical offset; false when it is not one of ours.
    pub(super) fn write(&mut self, offset: u32, value: u32) -> bool {
        let causes = InterruptCause::from_bits_retain(value);
        match offset {
            o if o == ICR.offset() => self.causes -= causes,
            o if o == ICS.offset() => self.cause(causes),
            o if o == IMS.offset() => {
                self.mask |= causes;
                // What was pending under the mask becomes an interrupt now.
                self.cause(self.causes & causes);
            }
            o if o == IMC.offset() => self.mask -= causes,
            o if o == IAM.offset() => self.auto_mask = causes,
            o if o == GPIE.offset() => self.mode = GeneralInterrupt::from_bits_retain(value),
            o if o == EICR.offset() => {
                self.vectors &= !value;
                self.sent &= !value;
            }
            o if o == EICS.offset() => self.vectors |= value,
            o if o == EIMS.offset() => self.vector_mask |= value,
            o if o == EIMC.offset() => {
                self.vector_mask &= !value;
                self.sent &= !value;
            }
            o if o == EIAC.offset() => self.vector_auto_clear = value,
            o if o == EIAM.offset() => self.vector_auto_mask = value,
            o if o == IVAR_MISC.offset() => self.other_allocation = value,
            _ => match allocation_index(offset) {
                Some(index) => self.allocation[index] = value,
                None => return false,
            },
        }
        true
    }

    /// The vectors whose cause is new, a bit each: a message is due by each of them. In the simple
    /// modes there is only vector 0. The caller sees to it that the function may issue requests.
    #[must_use]
    pub(super) fn settle(&mut self) -> u32 {
        if !self.is_multiple() {
            let asserted = self.is_asserted() || self.vectors & self.vector_mask != 0;
            let new = asserted && !self.line;
            self.line = asserted;
            return u32::from(new);
        }
        let new = self.vectors & self.vector_mask & !self.sent;
        self.vectors &= !(new & self.vector_auto_clear);
        if self.mode.contains(GeneralInterrupt::EIAME) {
            self.vector_mask &= !(new & self.vector_auto_mask);
        }
        self.sent = self.vectors & self.vector_mask;
        new
    }
}

fn allocation_index(offset: u32) -> Option<usize> {
    let at = offset.checked_sub(IVAR.offset())? / 4;
    (at < IVARS).then_some(at as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPIE as Linux sets it, receive queue 0 on vector 1, other causes on vector 0.
    fn multiple() -> Interrupts {
        let mut interrupts = Interrupts::default();
        interrupts.write(GPIE.offset(), 0xC000_0011);
        interrupts.write(IVAR.offset(), 0x81);
        interrupts.write(IVAR_MISC.offset(), 0x80 << 8);
        interrupts.write(EIMS.offset(), 0x3);
        interrupts
    }

    #[test]
    fn a_queue_s_cause_goes_to_its_vector() {
        let mut interrupts = multiple();
        interrupts.queue(0, false);
        assert_eq!(interrupts.settle(), 1 << 1);
    }

    #[test]
    fn an_invalid_entry_sends_nothing() {
        let mut interrupts = multiple();
        interrupts.queue(0, true);
        assert_eq!(interrupts.settle(), 0);
    }

    #[test]
    fn a_fired_vector_clears_and_masks_itself_as_eiac_and_eiam_say() {
        let mut interrupts = multiple();
        interrupts.write(EIAC.offset(), 2);
        interrupts.write(EIAM.offset(), 2);
        interrupts.queue(0, false);
        assert_ne!(interrupts.settle(), 0);
        assert_eq!(interrupts.read(EICR.offset()), Some(0));
        assert_eq!(interrupts.read(EIMS.offset()), Some(1));
    }

    #[test]
    fn a_cause_under_the_mask_fires_when_the_mask_opens() {
        let mut interrupts = multiple();
        interrupts.write(EIMC.offset(), 2);
        interrupts.queue(0, false);
        assert_eq!(interrupts.settle(), 0);
        interrupts.write(EIMS.offset(), 2);
        assert_ne!(interrupts.settle(), 0);
    }

    #[test]
    fn a_pending_vector_fires_once_until_it_is_cleared() {
        let mut interrupts = multiple();
        interrupts.write(EICS.offset(), 2);
        assert_ne!(interrupts.settle(), 0);
        interrupts.write(EICS.offset(), 2);
        assert_eq!(interrupts.settle(), 0);
        interrupts.write(EICR.offset(), 2);
        interrupts.write(EICS.offset(), 2);
        assert_ne!(interrupts.settle(), 0);
    }

    #[test]
    fn without_msi_x_mode_every_cause_is_vector_0_and_reading_icr_clears_it() {
        let mut interrupts = Interrupts::default();
        interrupts.write(IMS.offset(), InterruptCause::RXDW.bits());
        interrupts.queue(3, false);
        assert_eq!(interrupts.settle(), 1 << 0);
        assert_eq!(interrupts.read(ICR.offset()), Some(0x8000_0080));
        assert_eq!(interrupts.read(ICR.offset()), Some(0));
    }

    #[test]
    fn a_masked_cause_asserts_nothing() {
        let mut interrupts = Interrupts::default();
        interrupts.write(ICS.offset(), InterruptCause::LSC.bits());
        assert_eq!(interrupts.settle(), 0);
    }
}
