//! Queues on and off. ENABLE takes effect when the receiver or transmitter is on (§8.10.10,
//! §8.12.13), and stays until it is written as 0; a fault can keep it.

use failstop::igb::bits::{ReceiveControl, TransmitControl};
use failstop::igb::registers::{RCTL, TCTL};

use super::Device;
use crate::host::Host;

impl Device {
    pub(super) fn receiver_switched(&mut self) {
        if self.file.get(RCTL).contains(ReceiveControl::RXEN) {
            for queue in &mut self.receive_queues {
                queue.enabled |= queue.requested;
            }
        } else {
            self.buffer.clear();
        }
    }

    pub(super) fn transmitter_switched(&mut self) {
        if self.file.get(TCTL).contains(TransmitControl::TXEN) {
            for queue in &mut self.transmit_queues {
                queue.enabled |= queue.requested;
            }
        }
    }

    pub(super) fn enable_receive(&mut self, number: usize, enable: bool, host: &mut dyn Host) {
        let on = self.file.get(RCTL).contains(ReceiveControl::RXEN);
        let queue = &mut self.receive_queues[number];
        queue.requested = enable;
        if enable {
            queue.enabled |= on;
        } else if queue.enabled {
            queue.enabled = false;
            self.told_to_stop(number, false, false, host);
        }
    }

    pub(super) fn enable_transmit(&mut self, number: usize, enable: bool, host: &mut dyn Host) {
        let on = self.file.get(TCTL).contains(TransmitControl::TXEN);
        let queue = &mut self.transmit_queues[number];
        queue.requested = enable;
        if enable {
            queue.enabled |= on;
        } else if queue.enabled {
            queue.enabled = false;
            self.told_to_stop(number, true, false, host);
        }
    }
}
