//! The integrated PHY, IGP03: registers by page, autonegotiation, loopback. §3.5, §8.24

use std::time::Duration;

use failstop::igb::bits::Mdi;
use failstop::igb::phy::{
    ADDRESS, ADVERTISEMENT, CONTROL, GIGABIT_CONTROL, GIGABIT_STATUS, ID_1, ID_2, IGP03_ID,
    PAGE_SELECT, PARTNER_ABILITY, PORT_STATUS, POWER_MANAGEMENT, PhyControl, PhyStatus, STATUS,
};

/// How long the link partner takes to agree.
const AUTONEGOTIATION: Duration = Duration::from_millis(10);
/// The lowest register that belongs to a page.
const FIRST_PAGED: u32 = 16;

/// The PHY's state.
#[derive(Debug)]
pub(super) struct Phy {
    /// By full address: bits 15:5 of the page, bits 4:0 of the register.
    registers: Vec<u16>,
    page: u16,
    /// When autonegotiation ends; none when it ended or is off.
    negotiating_until: Option<Duration>,
    /// Whether a partner is on the other end of the cable.
    carrier: bool,
}

impl Phy {
    /// A PHY that powers up at `now`.
    #[must_use]
    pub(super) fn new(now: Duration) -> Self {
        let mut phy = Self {
            registers: vec![0; 1 << 16],
            page: 0,
            negotiating_until: None,
            carrier: false,
        };
        phy.reset(now);
        phy
    }

    fn reset(&mut self, now: Duration) {
        self.registers.fill(0);
        for (register, value) in [
            (CONTROL, 0x1140),
            (STATUS, 0x7949),
            (ID_1, IGP03_ID.0),
            (ID_2, IGP03_ID.1),
            (ADVERTISEMENT, 0x0DE1),
            (PARTNER_ABILITY, 0x45E1),
            (GIGABIT_CONTROL, 0x0300),
            (GIGABIT_STATUS, 0x7800),
            (PORT_STATUS, 0xC000),
            (POWER_MANAGEMENT, 0x008D),
            // Automatic gain control of the four pairs: a cable of plausible length.
            (0x11B1, 0x2000),
            (0x12B1, 0x2000),
            (0x14B1, 0x2000),
            (0x18B1, 0x2000),
        ] {
            self.registers[register as usize] = value;
        }
        self.page = 0;
        self.negotiating_until = Some(now + AUTONEGOTIATION);
    }

    /// Plugs or pulls the cable.
    pub(super) fn set_carrier(&mut self, carrier: bool, now: Duration) {
        if carrier && !self.carrier {
            self.negotiating_until = Some(now + AUTONEGOTIATION);
        }
        self.carrier = carrier;
    }

    /// Whether the cable is plugged in.
    #[must_use]
    pub(super) const fn has_carrier(&self) -> bool {
        self.carrier
    }

    fn control(&self) -> PhyControl {
        PhyControl::from_bits_retain(self.registers[CONTROL as usize])
    }

    /// Whether frames that the MAC sends come back to it (§3.5.6.3.1).
    #[must_use]
    pub(super) fn is_loopback(&self) -> bool {
        self.control().contains(PhyControl::LOOPBACK)
    }

    /// Whether the PHY tells the MAC that the link is up.
    #[must_use]
    pub(super) fn has_link(&self, now: Duration) -> bool {
        let control = self.control();
        if control.intersects(PhyControl::POWER_DOWN | PhyControl::ISOLATE) {
            return false;
        }
        if control.contains(PhyControl::LOOPBACK) {
            return true;
        }
        let negotiated = self.negotiating_until.is_none_or(|end| now >= end);
        self.carrier && (negotiated || !control.contains(PhyControl::AUTONEG))
    }

    /// When the link may change by itself.
    #[must_use]
    pub(super) fn next_change(&self, now: Duration) -> Option<Duration> {
        self.negotiating_until
            .filter(|end| self.carrier && *end > now)
    }

    /// Executes an MDIC command and returns what the register then reads. §8.2.4
    pub(super) fn command(&mut self, command: Mdi, now: Duration) -> Mdi {
        if command.phy() != ADDRESS || command.contains(Mdi::READ) == command.contains(Mdi::WRITE) {
            return command | Mdi::READY | Mdi::ERROR;
        }
        if command.contains(Mdi::WRITE) {
            self.write(command.register(), command.data(), now);
            return command | Mdi::READY;
        }
        let data = self.read(command.register(), now);
        let kept = command.bits() & !0xFFFF & !Mdi::ERROR.bits();
        Mdi::from_bits_retain(kept | u32::from(data) | Mdi::READY.bits())
    }

    fn index(&self, register: u32) -> usize {
        let page = if register < FIRST_PAGED {
            0
        } else {
            self.page & !0x1F
        };
        usize::from(page) | register as usize
    }

    fn read(&self, register: u32, now: Duration) -> u16 {
        let value = match register {
            PAGE_SELECT => self.page,
            _ => self.registers[self.index(register)],
        };
        if register == STATUS && self.has_link(now) {
            value | (PhyStatus::LINK | PhyStatus::AUTONEG_COMPLETE).bits()
        } else {
            value
        }
    }

    fn write(&mut self, register: u32, data: u16, now: Duration) {
        match register {
            CONTROL => self.write_control(PhyControl::from_bits_retain(data), now),
            STATUS | ID_1 | ID_2 | PARTNER_ABILITY | GIGABIT_STATUS => {}
            PAGE_SELECT => self.page = data,
            _ => {
                let index = self.index(register);
                self.registers[index] = data;
            }
        }
    }

    fn write_control(&mut self, control: PhyControl, now: Duration) {
        if control.contains(PhyControl::RESET) {
            return self.reset(now);
        }
        let before = self.control();
        let woke =
            before.contains(PhyControl::POWER_DOWN) && !control.contains(PhyControl::POWER_DOWN);
        let left_loopback =
            before.contains(PhyControl::LOOPBACK) && !control.contains(PhyControl::LOOPBACK);
        if woke || left_loopback || control.contains(PhyControl::RESTART_AUTONEG) {
            self.negotiating_until = Some(now + AUTONEGOTIATION);
        }
        self.registers[CONTROL as usize] = (control - PhyControl::RESTART_AUTONEG).bits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::ZERO;
    const LATER: Duration = Duration::from_millis(11);

    fn read(phy: &mut Phy, register: u32, now: Duration) -> u16 {
        phy.command(Mdi::read(register), now).data()
    }

    #[test]
    fn the_identifier_is_igp03_s() {
        let mut phy = Phy::new(START);
        assert_eq!(
            (read(&mut phy, 2, START), read(&mut phy, 3, START)),
            (0x02A8, 0x0391)
        );
    }

    #[test]
    fn a_command_is_ready_and_repeats_its_register() {
        let answer = Phy::new(START).command(Mdi::read(2), START);
        assert!(answer.contains(Mdi::READY) && !answer.contains(Mdi::ERROR));
        assert_eq!(answer.register(), 2);
    }

    #[test]
    fn another_phy_address_is_an_error() {
        let stranger = Mdi::from_bits_retain(Mdi::read(2).bits() ^ 3 << 21);
        assert!(
            Phy::new(START)
                .command(stranger, START)
                .contains(Mdi::ERROR)
        );
    }

    #[test]
    fn link_comes_when_autonegotiation_ends() {
        let mut phy = Phy::new(START);
        phy.set_carrier(true, START);
        assert!(!phy.has_link(START) && phy.has_link(LATER));
        assert_eq!(read(&mut phy, STATUS, LATER), 0x796D);
    }

    #[test]
    fn loopback_is_link_without_a_cable() {
        let mut phy = Phy::new(START);
        phy.command(Mdi::write(CONTROL, 0x4140), START);
        assert!(phy.is_loopback() && phy.has_link(START));
    }

    #[test]
    fn registers_from_16_on_belong_to_the_page() {
        let mut phy = Phy::new(START);
        phy.command(Mdi::write(PAGE_SELECT, 0x11B1), START);
        assert_eq!(read(&mut phy, 0x11, START), 0x2000);
        phy.command(Mdi::write(PAGE_SELECT, 0), START);
        assert_eq!(read(&mut phy, 0x11, START), 0xC000);
    }

    #[test]
    fn a_reset_ends_loopback() {
        let mut phy = Phy::new(START);
        phy.command(Mdi::write(CONTROL, 0x4140), START);
        phy.command(Mdi::write(CONTROL, 0x8000), START);
        assert!(!phy.is_loopback());
    }
}
