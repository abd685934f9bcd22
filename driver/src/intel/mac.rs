//! What is done in the same way with a MAC of either family.

use std::sync::Arc;
use std::time::Duration;

use failstop_pci::clock::Clock;
use failstop_pci::register::{Reg, Value};
use failstop_pci::window::{NoAnswer, Registers, Window};

use super::bits::{AddressHigh, Control, EepromControl, EepromRead, Mdi, Status};
use super::phy::{self, PhyControl};
// The 82574 has these at the same offsets, which a test below holds.
use crate::igb::descriptors;
use crate::igb::registers::{
    ADDRESS_STRIDE, CTRL, EECD, EERD, MDIC, MTA, RAH, RAL, STATUS, TABLE_ENTRIES, WORD_STRIDE,
};
use crate::provider::{Link, MacAddress, Position, ProviderError};

/// Bytes of a frame check sequence.
pub(crate) const FCS: u32 = 4;
/// After CTRL.RST nothing is accessed for so long. 82576 §4.2.1.6.1
const RESET_SETTLE: Duration = Duration::from_millis(1);
/// How long the NVM may take to load after a reset; Linux gives it 10 ms.
const AUTO_READ: Duration = Duration::from_millis(50);
/// How long an MDIC or NVM command may take.
const COMMAND: Duration = Duration::from_millis(100);
/// Between two looks at a register that is waited for.
pub(crate) const POLL: Duration = Duration::from_micros(20);

/// Issues the software reset, and waits until the NVM is loaded again.
///
/// # Errors
///
/// [`NoAnswer`] from a function that is gone.
pub(crate) fn software_reset(window: &Window, clock: &dyn Clock) -> Result<(), NoAnswer> {
    window.update(CTRL, |ctrl| ctrl | Control::RST);
    clock.sleep(RESET_SETTLE);
    let loaded = |eecd: EepromControl| eecd.contains(EepromControl::AUTO_RD);
    match window.wait(clock, EECD, AUTO_READ, RESET_SETTLE, loaded) {
        Err(slow @ NoAnswer::TimedOut { .. }) => {
            // A part without an NVM never says so, nor does every model; whether what the NVM holds
            // arrived shows in the station address.
            log::info!(
                "{}: the NVM did not report loading: {slow}",
                window.device_name()
            );
            Ok(())
        }
        other => other.map(drop),
    }
}

/// A MAC's registers, and the clock of every wait for them.
#[derive(Debug)]
pub(crate) struct Mac {
    pub(crate) registers: Registers,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Mac {
    pub(crate) fn new(window: Arc<Window>, clock: Arc<dyn Clock>) -> Self {
        Self {
            registers: Registers::new(window),
            clock,
        }
    }

    pub(crate) fn device(&self) -> String {
        self.registers.device_name().to_owned()
    }

    pub(crate) fn init_failed(&self, step: &'static str) -> impl FnOnce(NoAnswer) -> ProviderError {
        let device = self.device();
        move |source| ProviderError::Init {
            device,
            step,
            source,
        }
    }

    /// As [`Window::wait`], by this clock.
    pub(crate) fn wait<V: Value>(
        &self,
        register: Reg<V>,
        deadline: Duration,
        interval: Duration,
        ready: impl FnMut(V) -> bool,
    ) -> Result<V, NoAnswer> {
        self.registers
            .wait(&*self.clock, register, deadline, interval, ready)
    }

    /// A living function of the families reads neither all-ones nor all-zero in STATUS after a reset.
    pub(crate) fn check_alive(&self) -> Result<(), ProviderError> {
        let value = self.registers.read(STATUS).bits();
        match value {
            0 | u32::MAX => Err(ProviderError::Gone {
                device: self.device(),
                register: "STATUS",
                value,
            }),
            _ => Ok(()),
        }
    }

    /// As [`Mac::check_alive`], for a device that runs.
    pub(crate) fn look_alive(&self) -> Result<(), NoAnswer> {
        match self.registers.read(STATUS).bits() {
            value @ (0 | u32::MAX) => Err(NoAnswer::Gone {
                register: STATUS.offset(),
                value,
            }),
            _ => Ok(()),
        }
    }

    /// Whether a pause frame holds transmission at this moment. 82576 §8.2.2
    pub(crate) fn is_paused(&self) -> bool {
        self.registers.read(STATUS).contains(Status::TXOFF)
    }

    /// How far a queue is, by its registers. `None` from a function that is gone.
    pub(crate) fn position(&self, head: Reg, tail: Reg, length: Reg) -> Option<Position> {
        let read = |register: Reg| match self.registers.read(register) {
            u32::MAX => None,
            value => Some(value),
        };
        Some(Position {
            head: read(head)?,
            tail: read(tail)?,
            // Descriptors of every format of the families have so many bytes.
            entries: read(length)? / descriptors::BYTES as u32,
        })
    }

    /// The station address: loaded into the first receive address by reset, or in the NVM's first
    /// three words.
    pub(crate) fn load_address(&self) -> Result<MacAddress, ProviderError> {
        let low = self.registers.read(RAL).to_le_bytes();
        let high = self.registers.read(RAH).bits().to_le_bytes();
        let mut mac = MacAddress([low[0], low[1], low[2], low[3], high[0], high[1]]);
        if !mac.is_station() {
            for word in 0..3 {
                self.registers.write(EERD, EepromRead::of(word));
                let done = |read: EepromRead| read.contains(EepromRead::DONE);
                let read = self
                    .wait(EERD, COMMAND, POLL, done)
                    .map_err(self.init_failed("reading the NVM"))?;
                let at = usize::from(word) * 2;
                mac.0[at..at + 2].copy_from_slice(&read.data().to_le_bytes());
            }
        }
        if mac.is_station() {
            return Ok(mac);
        }
        Err(ProviderError::NoAddress {
            device: self.device(),
            mac,
        })
    }

    /// Receives frames to `mac` and no other station or group: the first of `entries` receive
    /// addresses.
    pub(crate) fn set_address(&self, mac: MacAddress, entries: u32) {
        let registers = &self.registers;
        let [a, b, c, d, _, _] = mac.0;
        registers.write(RAL, u32::from_le_bytes([a, b, c, d]));
        registers.write(RAH, AddressHigh::of(mac.0));
        for entry in 1..entries {
            registers.write(RAH.of(entry, ADDRESS_STRIDE), AddressHigh::empty());
            registers.write(RAL.of(entry, ADDRESS_STRIDE), 0);
        }
        for entry in 0..TABLE_ENTRIES {
            registers.write(MTA.of(entry, WORD_STRIDE), 0);
        }
    }

    /// Carries out an MDIC command. 82576 §8.2.4, 82574 §10.2.2.7
    fn mdi(&self, command: Mdi, step: &'static str) -> Result<Mdi, ProviderError> {
        self.registers.write(MDIC, command);
        let ready = |mdic: Mdi| mdic.contains(Mdi::READY);
        self.wait(MDIC, COMMAND, POLL, ready)
            .map_err(self.init_failed(step))
    }

    /// Writes a PHY register.
    pub(crate) fn write_phy(&self, register: u32, value: u16) -> Result<(), ProviderError> {
        self.mdi(Mdi::write(register, value), "writing a PHY register")
            .map(drop)
    }

    /// Reads a PHY register.
    pub(crate) fn read_phy(&self, register: u32) -> Result<u16, ProviderError> {
        self.mdi(Mdi::read(register), "reading a PHY register")
            .map(Mdi::data)
    }

    /// The PHY as the other end of the link, at 1000 Mb/s; waits until the link is up.
    pub(crate) fn force_loopback(&self, deadline: Duration) -> Result<(), ProviderError> {
        let forced = PhyControl::LOOPBACK | PhyControl::SPEED_1000 | PhyControl::FULL_DUPLEX;
        self.write_phy(phy::CONTROL, forced.bits())?;
        self.registers.update(CTRL, |ctrl| {
            let cleared = ctrl - Control::SPEED_100 - Control::SPEED_1000;
            cleared
                | Control::FRCSPD
                | Control::FRCDPLX
                | Control::SPEED_1000
                | Control::FD
                | Control::SLU
        });
        let up = |status: Status| status.contains(Status::LU);
        self.wait(STATUS, deadline, Duration::from_millis(1), up)
            .map(drop)
            .map_err(self.init_failed("raising the link in PHY loopback"))
    }

    /// The link as it is now.
    pub(crate) fn link(&self) -> Link {
        let status = self.registers.read(STATUS);
        let up = status.contains(Status::LU) && status.bits() != u32::MAX;
        let speed = match (
            status.contains(Status::SPEED_1000),
            status.contains(Status::SPEED_100),
        ) {
            (true, _) => 1000,
            (false, true) => 100,
            (false, false) => 10,
        };
        Link {
            up,
            speed,
            full_duplex: status.contains(Status::FD),
        }
    }

    /// Waits until the link is up, at most `deadline`.
    pub(crate) fn wait_link(&self, deadline: Duration) -> Link {
        let up = |status: Status| status.contains(Status::LU);
        // Down at the deadline is an answer, which the reading below gives.
        let _ = self.wait(STATUS, deadline, Duration::from_millis(1), up);
        self.link()
    }
}

#[cfg(test)]
mod tests {
    use crate::{e1000e, igb};

    #[test]
    fn the_registers_that_both_families_share_are_at_the_same_offsets() {
        use failstop_pci::register::Value;
        fn same<V: Value>(a: failstop_pci::register::Reg<V>, b: failstop_pci::register::Reg<V>) {
            assert_eq!(a.offset(), b.offset());
        }
        same(igb::registers::CTRL, e1000e::registers::CTRL);
        same(igb::registers::STATUS, e1000e::registers::STATUS);
        same(igb::registers::EECD, e1000e::registers::EECD);
        same(igb::registers::EERD, e1000e::registers::EERD);
        same(igb::registers::MDIC, e1000e::registers::MDIC);
        same(igb::registers::MTA, e1000e::registers::MTA);
        same(igb::registers::RAL, e1000e::registers::RAL);
        same(igb::registers::RAH, e1000e::registers::RAH);
    }
}
