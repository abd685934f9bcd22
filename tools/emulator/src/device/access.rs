//! What reading and writing a register does, beyond what the register file remembers.

use failstop::igb::bits::{
    Control, ControlExtended, EepromControl, EepromRead, Mdi, ReceiveQueueControl, Status,
    TransmitQueueControl,
};
use failstop::igb::phy::{CONTROL, PhyControl};
use failstop::igb::registers::{
    CTRL, CTRL_EXT, EECD, EERD, MDIC, RCTL, RDH, RXDCTL, STATUS, SWSM, TCTL, TDH, TXDCTL,
};

use super::ring::Ring;
use super::{Device, lies, registers};
use crate::faults::Fault;
use crate::host::Host;

impl Device {
    pub(super) fn read_register(&mut self, offset: u32, host: &mut dyn Host) -> u32 {
        let offset = registers::canonical(offset & !3);
        if let Some(count) = self.statistics.take(offset) {
            return count;
        }
        if let Some(value) = self.interrupts.read(offset) {
            return value;
        }
        let stored = self.file.word(offset);
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RDH.offset()
        {
            let ring = Ring::receive(&self.file, queue);
            return self.read_head(stored, ring);
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TDH.offset()
        {
            let ring = Ring::transmit(&self.file, queue);
            return self.read_head(stored, ring);
        }
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RXDCTL.offset()
        {
            let enabled = self.receive_queues[queue].enabled || self.shows_enable(queue, false);
            return stored | flag(enabled, ReceiveQueueControl::ENABLE.bits());
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TXDCTL.offset()
        {
            let enabled = self.transmit_queues[queue].enabled || self.shows_enable(queue, true);
            return stored | flag(enabled, TransmitQueueControl::ENABLE.bits());
        }
        match offset {
            o if o == STATUS.offset() => self.status(host).bits(),
            o if o == EECD.offset() => {
                let read = host.now() >= self.nvm_read_at;
                stored & !EepromControl::AUTO_RD.bits() | flag(read, EepromControl::AUTO_RD.bits())
            }
            o if o == SWSM.offset() => {
                self.file.set_word(offset, stored | 1);
                stored
            }
            _ => stored,
        }
    }

    fn read_head(&mut self, stored: u32, ring: Ring) -> u32 {
        if self.faults.is_quiet() {
            return stored;
        }
        self.trouble.head_reads = self.trouble.head_reads.wrapping_add(1);
        lies::head(stored, ring, &self.faults, self.trouble.head_reads)
    }

    fn status(&mut self, host: &mut dyn Host) -> Status {
        self.update_link(host);
        let mut status = Status::FD | Status::SPEED_1000;
        status.set(Status::LU, self.link);
        // A queue that does not stop has requests outstanding.
        let disabled = self.file.get(CTRL).contains(Control::GIO_MASTER_DISABLE);
        let stuck = !self.link && self.faults.has(Fault::MasterStuckLinkDown);
        status.set(
            Status::GIO_MASTER_ENABLE,
            !disabled || stuck || !self.trouble.engines.is_empty(),
        );
        status
    }

    pub(super) fn write_register(&mut self, offset: u32, value: u32, host: &mut dyn Host) {
        let offset = registers::canonical(offset & !3);
        if self.interrupts.write(offset, value) {
            return;
        }
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RXDCTL.offset()
        {
            self.file.write(offset, value);
            let enable = value & ReceiveQueueControl::ENABLE.bits() != 0;
            return self.enable_receive(queue, enable, host);
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TXDCTL.offset()
        {
            self.file.write(offset, value);
            let enable = value & TransmitQueueControl::ENABLE.bits() != 0;
            return self.enable_transmit(queue, enable, host);
        }
        match offset {
            o if o == CTRL.offset() => self.write_control(Control::from_bits_retain(value), host),
            o if o == CTRL_EXT.offset() => {
                let value = ControlExtended::from_bits_retain(value) - ControlExtended::EE_RST;
                self.file.set(CTRL_EXT, value);
            }
            o if o == EECD.offset() => self.write_eecd(EepromControl::from_bits_retain(value)),
            o if o == EERD.offset() => self.read_nvm(EepromRead::from_bits_retain(value)),
            o if o == MDIC.offset() => {
                let answer = self.phy.command(Mdi::from_bits_retain(value), host.now());
                self.file.set(MDIC, answer);
            }
            o if o == RCTL.offset() => {
                self.file.set_word(offset, value);
                self.receiver_switched();
            }
            o if o == TCTL.offset() => {
                self.file.set_word(offset, value);
                self.transmitter_switched();
            }
            _ => self.file.write(offset, value),
        }
    }

    fn write_control(&mut self, control: Control, host: &mut dyn Host) {
        if control.contains(Control::RST) {
            self.counters.software_resets += 1;
            return self.reset_mac(host);
        }
        if control.contains(Control::PHY_RST) {
            let reset = Mdi::write(CONTROL, PhyControl::RESET.bits());
            self.phy.command(reset, host.now());
        }
        self.file.set(CTRL, control - Control::PHY_RST);
    }

    /// Bit-bang access is granted when asked for; nothing is behind it. §8.4.1
    fn write_eecd(&mut self, value: EepromControl) {
        let asked = value & EepromControl::REQ;
        let mut eecd = self.file.get(EECD) - EepromControl::REQ - EepromControl::GNT;
        eecd |= asked;
        eecd.set(EepromControl::GNT, !asked.is_empty());
        self.file.set(EECD, eecd);
    }

    fn read_nvm(&mut self, command: EepromRead) {
        let mut answer = u32::from(command.address()) << 2;
        if command.contains(EepromRead::START) {
            let data = self.nvm.word(command.address());
            answer |= u32::from(data) << 16 | EepromRead::DONE.bits();
        }
        self.file.set_word(EERD.offset(), answer);
    }
}

const fn flag(on: bool, bits: u32) -> u32 {
    if on { bits } else { 0 }
}
