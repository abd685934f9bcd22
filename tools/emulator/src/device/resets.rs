//! Resets: by CTRL.RST, of the function, and by leaving D3hot. §4.2; PCIe 6.6.2; PCI PM 5.4.1.

use std::time::Duration;

use super::statistics::Statistics;
use super::{Device, NVM_READ, interrupts, registers};
use crate::host::Host;

impl Device {
    /// What a reset of any kind leaves of the MAC: queue 0 asks to be enabled. §8.10.10
    pub(super) fn request_first_queues(&mut self) {
        self.receive_queues[0].requested = true;
        self.transmit_queues[0].requested = true;
    }

    /// CTRL.RST. The PHY, configuration space and a wedged engine are left alone.
    pub(super) fn reset_mac(&mut self, host: &mut dyn Host) {
        for number in 0..self.receive_queues.len() {
            if self.receive_queues[number].enabled {
                self.run_away(number, false, host);
            }
            if self.transmit_queues[number].enabled {
                self.run_away(number, true, host);
            }
        }
        self.file.reset(self.nvm.mac());
        self.forget(host.now());
    }

    fn forget(&mut self, now: Duration) {
        self.interrupts = interrupts::Interrupts::default();
        self.statistics = Statistics::default();
        self.buffer.clear();
        for queue in &mut self.receive_queues {
            queue.reset();
        }
        for queue in &mut self.transmit_queues {
            queue.reset();
        }
        self.request_first_queues();
        self.nvm_read_at = now + NVM_READ;
        self.link = false;
    }

    /// Function level reset: everything but the PHY and the sticky error registers; every queue
    /// stops, wedged and stuck ones too. Also what `VFIO_DEVICE_RESET` does.
    pub fn reset_function(&mut self, now: Duration) {
        self.counters.function_resets += 1;
        self.runaways.clear();
        self.faults.reset();
        for queue in &mut self.receive_queues {
            queue.wedged = false;
        }
        for queue in &mut self.transmit_queues {
            queue.wedged = false;
        }
        self.reinitialise(now);
    }

    pub(super) fn power_up(&mut self, now: Duration) {
        self.counters.power_ups += 1;
        self.reinitialise(now);
    }

    fn reinitialise(&mut self, now: Duration) {
        self.config.reset();
        self.file = registers::File::new(self.nvm.mac());
        self.msix.fill(0);
        self.io_address = 0;
        self.forget(now);
    }
}
