//! What an access is, as triggers of faults know it: told before it has its effect.

use failstop::igb::bits::{Control, ReceiveControl, ReceiveQueueControl, TransmitQueueControl};
use failstop::igb::registers::{CTRL, EECD, EERD, FCTTV, MDIC, RAL, RCTL, RXDCTL, TXDCTL};

use super::ring::Ring;
use super::{Device, IO_DATA, Region, config, registers, word};
use crate::faults::Moment;
use crate::host::Host;

impl Device {
    /// Something happens that faults may wait for. `host` is for those that then act at once.
    pub fn note(&mut self, moment: Moment, host: &mut dyn Host) {
        self.faults.note(moment, host.now());
        self.apply_faults(host);
    }

    pub(super) fn note_read(
        &mut self,
        region: Region,
        offset: u64,
        len: usize,
        host: &mut dyn Host,
    ) {
        if !self.faults.is_waiting() {
            return;
        }
        self.note(Moment::Access, host);
        let read = match region {
            Region::Config => {
                let status = config::DEVICE_STATUS as u64;
                if offset <= status + 1 && status < offset + len as u64 {
                    self.note(Moment::PendingRead, host);
                }
                return;
            }
            Region::MsiX => return,
            Region::Io if offset < IO_DATA => return,
            Region::Io => vec![self.io_address],
            Region::Registers => (0..len as u32 / 4).map(|n| offset as u32 + 4 * n).collect(),
        };
        for offset in read {
            let moment = match registers::canonical(offset & !3) {
                o if o == FCTTV.offset() => Moment::CanaryRead,
                o if o == EECD.offset() => Moment::InitNvm,
                o if o == RAL.offset() => Moment::InitAddress,
                _ => continue,
            };
            self.note(moment, host);
        }
    }

    pub(super) fn note_write(
        &mut self,
        region: Region,
        offset: u64,
        data: &[u8],
        host: &mut dyn Host,
    ) {
        if !self.faults.is_waiting() {
            return;
        }
        self.note(Moment::Access, host);
        match region {
            Region::Config => {
                for moment in self.config.moments(offset as usize, data) {
                    self.note(moment, host);
                }
            }
            Region::MsiX => {}
            Region::Io if offset < IO_DATA => {}
            Region::Io => self.note_register(self.io_address, word(data), host),
            Region::Registers => {
                for (n, bytes) in data.chunks_exact(4).enumerate() {
                    self.note_register(offset as u32 + 4 * n as u32, word(bytes), host);
                }
            }
        }
    }

    fn note_register(&mut self, offset: u32, value: u32, host: &mut dyn Host) {
        let offset = registers::canonical(offset & !3);
        if let Some((queue, register)) = registers::receive_queue(offset)
            && register == RXDCTL.offset()
        {
            // A queue without a ring has nothing to start or stop.
            if Ring::receive(&self.file, queue).len == 0 {
                return;
            }
            let on = value & ReceiveQueueControl::ENABLE.bits() != 0;
            match (self.receive_queues[queue].enabled, on) {
                (false, true) => self.note(Moment::RxStart, host),
                (true, false) => {
                    self.note(Moment::RxStop, host);
                    self.note(Moment::Destroy, host);
                }
                _ => {}
            }
            return;
        }
        if let Some((queue, register)) = registers::transmit_queue(offset)
            && register == TXDCTL.offset()
        {
            if Ring::transmit(&self.file, queue).len == 0 {
                return;
            }
            let on = value & TransmitQueueControl::ENABLE.bits() != 0;
            match (self.transmit_queues[queue].enabled, on) {
                (false, true) => self.note(Moment::TxStart, host),
                (true, false) => {
                    self.note(Moment::TxStop, host);
                    self.note(Moment::Destroy, host);
                }
                _ => {}
            }
            return;
        }
        let moment = match offset {
            o if o == CTRL.offset() && value & Control::RST.bits() != 0 => Moment::InitReset,
            o if o == EERD.offset() => Moment::InitNvm,
            o if o == MDIC.offset() => Moment::InitPhy,
            o if o == RCTL.offset()
                && value & ReceiveControl::RXEN.bits() != 0
                && !self.file.get(RCTL).contains(ReceiveControl::RXEN) =>
            {
                Moment::InitEnable
            }
            _ => return,
        };
        self.note(moment, host);
    }
}
