use std::sync::Arc;

use super::*;
use crate::register::Reg;
use crate::testing::{BAR_SIZE, FakeFunction, Happened, Reading, ResetScript, limits_39_bits};
use crate::transport::Kind;

const CANARY: Canary = Canary {
    register: 0x2800,
    planted: 0x00a5_0000,
    reset: 0x0000_0000,
    mask: 0x00ff_0000,
};

/// A function in the middle of its life: canary planted, bus master, then turned off.
struct Life {
    function: Arc<FakeFunction>,
    command: CommandRegister,
    window: Arc<Window>,
    off: BusMasterOff,
}

impl Life {
    fn of(function: FakeFunction) -> Self {
        let function = Arc::new(function);
        let config = ConfigSpace::new(&*function);
        let command = CommandRegister::open(&config).unwrap();
        let window = Window::open(function.clone(), Generation::LADDER, 0, BAR_SIZE).unwrap();
        command.memory_space_on(&config).unwrap();
        CANARY.plant(&window).unwrap();
        command.bus_master_on(&config).unwrap();
        let off = command.bus_master_off(&config).unwrap();
        Self {
            function: function.clone(),
            command,
            window,
            off,
        }
    }

    fn new() -> Self {
        Self::of(fake(Kind::Container))
    }

    fn config(&self) -> ConfigSpace<'_> {
        ConfigSpace::new(&*self.function)
    }

    fn issue(&self) -> Issued {
        let method = self.function.reset_methods()[0];
        issue(&*self.function, &self.off, method).unwrap()
    }

    fn verify(&self, issued: Issued) -> Result<FunctionStopped, NotProven> {
        verify(
            issued,
            &self.config(),
            &self.command,
            &self.window,
            &CANARY,
            Generation::FIRST,
        )
    }

    fn reset(&self) -> Result<FunctionStopped, NotProven> {
        self.verify(self.issue())
    }
}

fn fake(kind: Kind) -> FakeFunction {
    FakeFunction::new(limits_39_bits()).unwrap().with_kind(kind)
}

/// (R4.5)
#[test]
fn a_reset_that_resets_is_proven() {
    for kind in [Kind::Container, Kind::Iommufd, Kind::VfioUser] {
        let life = Life::of(fake(kind).by_messages());
        let stopped = life.reset().unwrap();
        assert_eq!(stopped.device(), life.function.id());
        assert_eq!(stopped.generation(), Generation::FIRST);
        assert!(stopped.is_ground_for_release());
        // The canary leaves no trace.
        assert_eq!(life.function.register(CANARY.register.into()), 0);
    }
}

/// (R4.2)
#[test]
fn bus_mastering_is_off_before_the_reset() {
    let life = Life::new();
    let _issued = life.issue();
    let log = life.function.log();
    let reset = Happened::Reset(ResetMethod::Flr);
    let at = log.iter().position(|entry| *entry == reset).unwrap();
    assert_eq!(log[at - 1], Happened::Command(0x0402));
}

#[test]
fn bus_mastering_that_was_on_since_is_not_covered() {
    let life = Life::new();
    // A hand that was left behind comes back in the next life.
    let issued = life.issue();
    life.command.bus_master_on(&life.config()).unwrap();
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::MasteredSince { .. })
    ));
    assert!(life.function.is_master(), "the check turned it off");
    // Nor does a witness of that time prove anything now.
    let _off = life.command.bus_master_off(&life.config()).unwrap();
    assert!(matches!(life.reset(), Err(NotProven::MasteredSince { .. })));
    assert!(life.command.was_master());
}

#[test]
fn c14_a_window_that_the_guard_replaced_can_still_prove() {
    let life = Life::new();
    life.function.turn_decoding_off().unwrap();
    assert_eq!(life.window.read(Reg::<u32>::at(CANARY.register)), u32::MAX);
    life.function.turn_decoding_on().unwrap();
    assert!(life.window.is_detached());
    let _stopped = life.reset().unwrap();
}

#[test]
fn bus_mastering_off_on_another_function_resets_nothing() {
    let (life, other) = (Life::new(), Life::new());
    life.function.take_log().clear();
    let refused = issue(&*life.function, &other.off, ResetMethod::Flr);
    assert!(matches!(refused, Err(ResetFailed::NotOff { .. })));
    assert_eq!(life.function.log(), []);
}

/// A call that returned is a claim (R4.5).
#[test]
fn c43_a_reset_that_returned_0_and_reset_nothing_is_not_proven() {
    let life = Life::new();
    life.function
        .script_reset(ResetMethod::Flr, ResetScript::ResetsNothing);
    let error = life.reset().unwrap_err();
    assert!(
        matches!(
            error,
            NotProven::NotReset {
                method: ResetMethod::Flr,
                register: 0x2800,
                value: 0x00a5_0000,
                reset: 0,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("nothing was reset"), "{error}");
}

#[test]
fn c43_the_next_method_may_still_prove_it() {
    let life = Life::new();
    life.function
        .script_reset(ResetMethod::Flr, ResetScript::ResetsNothing);
    life.reset().unwrap_err();
    let issued = issue(&*life.function, &life.off, ResetMethod::Bus).unwrap();
    assert_eq!(
        life.verify(issued).unwrap().method(),
        Some(ResetMethod::Bus)
    );
}

#[test]
fn c32_a_function_whose_config_reads_as_gone_is_not_proven() {
    for reading in [Reading::AllOnes, Reading::Zero] {
        let life = Life::new();
        let issued = life.issue();
        life.function.misread_config(reading, u64::MAX);
        let error = life.verify(issued).unwrap_err();
        assert!(matches!(error, NotProven::Gone { .. }), "{error}");
    }
}

#[test]
fn bus_mastering_that_a_reset_restored_is_not_proven_and_not_hidden() {
    let life = Life::new();
    life.function.script_next_reset(ResetScript::RestoresMaster);
    let error = life.reset().unwrap_err();
    assert!(matches!(error, NotProven::StillMaster { .. }), "{error}");
    assert!(life.function.is_master(), "the check turned it off");
}

#[test]
fn bus_mastering_that_reads_set_is_not_proven() {
    let life = Life::new();
    let issued = life.issue();
    life.function.set_reads_as_master(true);
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::StillMaster { .. })
    ));
}

#[test]
fn a_function_that_sleeps_after_the_reset_is_not_proven() {
    let life = Life::new();
    let issued = life.issue();
    life.function.set_power_state(PowerState::D3hot);
    let error = life.verify(issued).unwrap_err();
    assert!(
        matches!(
            error,
            NotProven::Asleep {
                state: PowerState::D3hot,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_canary_of_all_ones_is_not_proven() {
    let life = Life::new();
    let issued = life.issue();
    life.function.set_register(CANARY.register.into(), u32::MAX);
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::NoAnswer {
            source: NoAnswer::Gone { .. },
            ..
        })
    ));
}

#[test]
fn c32_a_canary_that_reads_its_reset_value_and_takes_none_is_not_proven() {
    // All of BAR 0 reads zero, as QEMU's do after a removal.
    let life = Life::of(fake(Kind::VfioUser).by_messages());
    let issued = life.issue();
    life.function.answer_register(CANARY.register.into(), 0);
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::NoAnswer {
            source: NoAnswer::NotTaken { value: 0, .. },
            ..
        })
    ));
}

#[test]
fn c32_a_page_that_a_server_lets_us_map_is_not_asked() {
    // The mapped page reads as reset; the server, asked, says otherwise.
    let life = Life::of(fake(Kind::VfioUser));
    let issued = life.issue();
    let planted = CANARY.planted;
    life.function
        .answer_register(CANARY.register.into(), planted);
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::NotReset { .. })
    ));
}

#[test]
fn a_window_that_was_replaced_proves_nothing() {
    let life = Life::new();
    let issued = life.issue();
    life.window.detach().unwrap();
    assert!(matches!(
        life.verify(issued),
        Err(NotProven::NoAnswer { .. })
    ));
}

#[test]
fn a_proof_of_another_function_is_refused() {
    let (life, other) = (Life::new(), Life::new());
    assert!(matches!(
        life.verify(other.issue()),
        Err(NotProven::Foreign { .. })
    ));
}

#[test]
fn a_canary_that_cannot_tell_is_refused() {
    let life = Life::new();
    let canary = Canary {
        planted: 0x0100_0000,
        ..CANARY
    };
    let proven = verify(
        life.issue(),
        &life.config(),
        &life.command,
        &life.window,
        &canary,
        Generation::FIRST,
    );
    assert!(matches!(proven, Err(NotProven::Useless { .. })));
}

#[test]
fn a_canary_at_a_reset_value_other_than_zero_is_proven() {
    let canary = Canary {
        reset: 0x0011_0000,
        ..CANARY
    };
    let life = Life::of(fake(Kind::Container).with_reset_value(0x2800, 0x0011_2233));
    let proven = verify(
        life.issue(),
        &life.config(),
        &life.command,
        &life.window,
        &canary,
        Generation::FIRST,
    );
    let _stopped = proven.unwrap();
    assert_eq!(life.function.register(0x2800), 0x0011_2233);
}

#[test]
fn a_canary_that_does_not_take_is_said_at_once() {
    let life = Life::of(fake(Kind::VfioUser).by_messages());
    life.function.answer_register(CANARY.register.into(), 0);
    assert!(matches!(
        CANARY.plant(&life.window),
        Err(NoAnswer::NotTaken { .. })
    ));
    life.function
        .answer_register(CANARY.register.into(), u32::MAX);
    assert!(matches!(
        CANARY.plant(&life.window),
        Err(NoAnswer::Gone { .. })
    ));
}

#[test]
fn a_function_that_was_never_master_is_stopped_without_a_reset() {
    let function = fake(Kind::Container);
    let config = ConfigSpace::new(&function);
    let command = CommandRegister::open(&config).unwrap();
    let stopped = never_mastered(&command, Generation::FIRST).unwrap();
    assert_eq!(stopped.device(), function.id());
    assert_eq!(stopped.method(), None);
}

#[test]
fn a_function_that_was_master_is_stopped_only_by_a_proven_reset() {
    let life = Life::new();
    assert_eq!(never_mastered(&life.command, Generation::FIRST), None);
    life.function.script_next_reset(ResetScript::ResetsNothing);
    life.reset().unwrap_err();
    assert_eq!(never_mastered(&life.command, Generation::FIRST), None);
    let _stopped = life.reset().unwrap();
    assert!(never_mastered(&life.command, Generation::FIRST).is_some());
}

#[test]
fn a_function_that_was_master_when_opened_is_not_taken_for_stopped() {
    let function = fake(Kind::VfioUser).with_config(&[0, 0, 0, 0, 6, 0]);
    let command = CommandRegister::open(&ConfigSpace::new(&function)).unwrap();
    assert_eq!(never_mastered(&command, Generation::FIRST), None);
}

/// (R4.5) (R3.2)
#[test]
fn a_software_reset_alone_is_no_ground_for_release() {
    let life = Life::new();
    let clear = || {
        life.window.write(Reg::<u32>::at(CANARY.register), 0);
        Ok::<(), std::io::Error>(())
    };
    let issued = issue_software(&*life.function, &life.off, clear).unwrap();
    let stopped = life.verify(issued).unwrap();
    assert_eq!(stopped.method(), Some(ResetMethod::Software));
    assert!(!stopped.is_ground_for_release());
}

#[test]
fn a_software_reset_that_failed_is_not_issued() {
    let life = Life::new();
    let failed = issue_software(&*life.function, &life.off, || Err("it did not end"));
    let error = failed.unwrap_err();
    let source = StdError::source(&error).unwrap();
    assert_eq!(source.to_string(), "it did not end");
}

/// (R4.4)
#[test]
fn transactions_pending_are_seen() {
    let life = Life::new();
    let pending = Pending::find(&life.config()).unwrap().unwrap();
    assert!(!pending.outstanding(&life.config()).unwrap());
    life.function.set_transactions_pending(true);
    assert!(pending.outstanding(&life.config()).unwrap());
}

#[test]
fn a_function_without_pcie_has_no_transactions_to_show() {
    // One capability: power management.
    let mut config = [0; 256];
    config[6] = 0x10;
    config[0x34] = 0x40;
    config[0x40] = 0x01;
    let function = fake(Kind::Container).with_config(&config);
    assert_eq!(Pending::find(&ConfigSpace::new(&function)).unwrap(), None);
}

#[test]
fn a_cyclic_capability_list_ends() {
    let mut config = [0; 256];
    config[6] = 0x10;
    config[0x34] = 0x40;
    config[0x40..0x42].copy_from_slice(&[0x05, 0x40]);
    let function = fake(Kind::Container).with_config(&config);
    assert_eq!(Pending::find(&ConfigSpace::new(&function)).unwrap(), None);
}
