//! Resets: by CTRL.RST, of the function, and by leaving D3hot. §4.2; PCIe 6.6.2; PCI PM 5.4.1.

use std::time::Duration;

use nix::errno::Errno;

use super::rogue::Manner;
use super::statistics::Statistics;
use super::{Device, NVM_READ, interrupts, registers};
use crate::faults::Fault;
use crate::host::Host;

/// What becomes of a function level reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reset {
    /// It is said to be done.
    Done,
    /// It is said to have failed.
    Failed(Errno),
    /// Nothing is ever said.
    Hangs,
    /// The function has none.
    Absent,
}

impl Device {
    /// What a reset of any kind leaves of the MAC: queue 0 asks to be enabled. §8.10.10
    pub(super) fn request_first_queues(&mut self) {
        self.receive_queues[0].requested = true;
        self.transmit_queues[0].requested = true;
    }

    /// CTRL.RST. The PHY, configuration space and a wedged engine are left alone.
    pub(super) fn reset_mac(&mut self, host: &mut dyn Host) {
        if self.faults.has(Fault::RstNoop) {
            self.survive(Manner::SURVIVES, host);
        } else {
            self.default_mac(host);
        }
    }

    /// A reset of the MAC that works, whoever asked for it.
    pub(super) fn default_mac(&mut self, host: &mut dyn Host) {
        for number in 0..self.receive_queues.len() {
            if self.receive_queues[number].enabled {
                self.told_to_stop(number, false, true, host);
            }
            if self.transmit_queues[number].enabled {
                self.told_to_stop(number, true, true, host);
            }
        }
        self.trouble.engines.retain(|e| !e.manner.until_rst);
        self.trouble.late.clear();
        self.file.reset(self.nvm.mac());
        self.forget(host.now());
    }

    fn forget(&mut self, now: Duration) {
        self.interrupts = interrupts::Interrupts::default();
        self.statistics = Statistics::default();
        self.statistics.conduct(self.conduct());
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

    /// Function level reset, by register or by message: everything but the PHY and the sticky error
    /// registers; every queue stops, wedged and stuck ones too. Or what a fault makes of it.
    pub fn reset_function(&mut self, host: &mut dyn Host) -> Reset {
        if self.trouble.hung {
            return Reset::Hangs;
        }
        let instead = self.faults.find(|fault| match fault {
            Fault::NoFlr => Some(Reset::Absent),
            Fault::FlrFails(errno) => Some(Reset::Failed(Errno::from_raw(errno.number()))),
            Fault::FlrHangs => Some(Reset::Hangs),
            Fault::FlrNoop => Some(Reset::Done),
            _ => None,
        });
        match instead {
            // Nobody is there to be reset.
            _ if self.is_gone() => return Reset::Failed(Errno::ENODEV),
            None => self.really_reset(host.now()),
            Some(Reset::Done) => self.survive(Manner::SURVIVES, host),
            Some(Reset::Hangs) => self.trouble.hung = true,
            Some(Reset::Failed(_) | Reset::Absent) => {}
        }
        instead.unwrap_or(Reset::Done)
    }

    /// A function level reset that works.
    pub(super) fn really_reset(&mut self, now: Duration) {
        self.counters.function_resets += 1;
        self.trouble.engines.clear();
        self.trouble.late.clear();
        self.faults.function_reset();
        self.unwedge();
        self.reinitialise(now);
    }

    /// What the machine does when the function's driver is gone: bus mastering off, and a reset.
    pub fn release(&mut self, host: &mut dyn Host) {
        if !self.is_gone() && self.config.is_bus_master() {
            self.config.clear_master();
            self.mastering_ended(host);
        }
        let _reset = self.reset_function(host);
    }

    /// Off, and on again: nothing is left but the cable, the counters, and the faults that it was
    /// told to have.
    pub fn power_cycle(&mut self, host: &mut dyn Host) {
        let now = host.now();
        let mut fresh = Self::new(self.nvm.mac(), now);
        fresh.counters = std::mem::take(&mut self.counters);
        fresh.faults = std::mem::take(&mut self.faults);
        fresh.trouble.accounts = std::mem::take(&mut self.trouble.accounts);
        fresh.statistics.conduct(fresh.conduct());
        fresh.phy.set_carrier(self.phy.has_carrier(), now);
        *self = fresh;
    }

    fn unwedge(&mut self) {
        for queue in &mut self.receive_queues {
            queue.wedged = false;
        }
        for queue in &mut self.transmit_queues {
            queue.wedged = false;
        }
    }

    pub(super) fn power_up(&mut self, now: Duration) {
        // With No_Soft_Reset the state is kept (PCI PM 5.4.1).
        if self.faults.has(Fault::NoFlr) {
            return;
        }
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
