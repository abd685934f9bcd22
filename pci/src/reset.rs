//! A reset and its proof: the only place where a [`FunctionStopped`] is made (R4.5).
//!
//! A reset call that returned 0 may have reset nothing (C43), and the kernel restores what it saved
//! of configuration space, bus mastering included. So bus mastering is off before, by type; and
//! what counts is read afterwards: the function answers, in D0, with bus mastering still clear, and
//! a register that the driver had given a value is back at what resets leave in it.

use std::error::Error as StdError;

use thiserror::Error;

use crate::capabilities::{DeviceStatus, PowerManagement, PowerState, id};
use crate::config::{BusMasterOff, Command, CommandError, CommandRegister, ConfigSpace};
use crate::id::{DeviceId, Generation};
use crate::transport::{AccessError, ResetFailed, ResetMethod, Transport};
use crate::window::{NoAnswer, Window};

/// A harmless register that tells whether a reset happened: it is given a value before bus
/// mastering is first turned on, and a reset puts it back at a constant.
///
/// `planted` and `reset` differ in `mask`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Canary {
    /// Bytes from the start of the BAR, a multiple of 4.
    pub register: u32,
    /// The value that the driver gives it, in the bits of `mask`.
    pub planted: u32,
    /// What every reset leaves in it, in the bits of `mask`.
    pub reset: u32,
    /// The bits that count.
    pub mask: u32,
}

impl Canary {
    /// Gives the register its value, and reads it back as the function's own answer. To be called
    /// in every life before bus mastering is turned on: an unplanted canary shows every reset as
    /// done.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`] when the register reads otherwise.
    pub fn plant(&self, window: &Window) -> Result<(), NoAnswer> {
        self.put(window, self.planted)
    }

    /// Whether a reset took place since it was planted, by whatever and whoever: the register reads
    /// what a reset leaves in it. A function that does not answer says nothing; one that is gone and
    /// reads as zeros cannot be told from one that was reset to zero.
    ///
    /// # Errors
    ///
    /// [`NoAnswer::NotTaken`], with the reading, when it was reset.
    pub fn check(&self, window: &Window) -> Result<(), NoAnswer> {
        let Ok(value) = self.read(window) else {
            return Ok(());
        };
        if (value ^ self.reset) & self.mask != 0 {
            return Ok(());
        }
        Err(NoAnswer::NotTaken {
            register: self.register,
            written: self.planted,
            value,
        })
    }

    /// Writes the canary's bits of `value`, leaving the others, and reads them back.
    fn put(&self, window: &Window, value: u32) -> Result<(), NoAnswer> {
        let register = self.register;
        let before = self.read(window)?;
        let written = before & !self.mask | value & self.mask;
        window.tell(register & !3, written);
        let value = self.read(window)?;
        if (value ^ written) & self.mask != 0 {
            return Err(NoAnswer::NotTaken {
                register,
                written,
                value,
            });
        }
        Ok(())
    }

    /// The register as the function answers it: by a message, which a server must answer itself
    /// [R1], and which fails where a mapped register of a function that does not decode raises
    /// SIGBUS, so that the guard would replace the window for good.
    fn read(&self, window: &Window) -> Result<u32, NoAnswer> {
        let (register, value) = (self.register, window.ask(self.register & !3));
        // A register whose bits all count and are ones would look like a function that is gone.
        if value == u32::MAX {
            return Err(NoAnswer::Gone { register, value });
        }
        Ok(value)
    }
}

/// A reset call that returned 0, made with bus mastering off: a claim.
#[derive(Debug)]
#[must_use]
pub struct Issued {
    device: DeviceId,
    method: ResetMethod,
    /// How often bus mastering had been turned on when it was seen to be off.
    masterings: u64,
}

impl Issued {
    /// How.
    #[must_use]
    pub fn method(&self) -> ResetMethod {
        self.method
    }
}

/// Resets the function by `method`. Bus mastering is off before: the kernel saves configuration
/// space and restores it after the reset (R4.2).
///
/// # Errors
///
/// [`ResetFailed`].
pub fn issue(
    transport: &dyn Transport,
    off: &BusMasterOff,
    method: ResetMethod,
) -> Result<Issued, ResetFailed> {
    same_function(transport, off)?;
    transport.reset_by(method)?;
    Ok(Issued {
        device: transport.id(),
        method,
        masterings: off.masterings(),
    })
}

/// Resets the function by its provider's software reset, which `reset` performs: the last rung.
///
/// # Errors
///
/// [`ResetFailed`], with what `reset` says.
pub fn issue_software<E>(
    transport: &dyn Transport,
    off: &BusMasterOff,
    reset: impl FnOnce() -> Result<(), E>,
) -> Result<Issued, ResetFailed>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    same_function(transport, off)?;
    reset().map_err(|error| ResetFailed::new(transport.name(), std::io::Error::other(error)))?;
    Ok(Issued {
        device: transport.id(),
        method: ResetMethod::Software,
        masterings: off.masterings(),
    })
}

fn same_function(transport: &dyn Transport, off: &BusMasterOff) -> Result<(), ResetFailed> {
    if off.device() == transport.id() {
        return Ok(());
    }
    Err(ResetFailed::NotOff {
        device: transport.name().to_owned(),
    })
}

/// Why a reset that was issued is not proven. The function may still be as it was.
#[derive(Debug, Error)]
pub enum NotProven {
    /// Configuration space could not be reached.
    #[error("configuration space cannot be reached after the reset")]
    Access(#[from] AccessError),
    /// The command register reads as that of a function that is not there.
    #[error("{device}: the command register reads {read:#06x} after the reset: nobody answers")]
    Gone {
        /// The function's name.
        device: String,
        /// The reading.
        read: u16,
    },
    /// Bus Master Enable is set: the reset put back what was saved, or somebody turned it on.
    #[error("{device}: bus mastering is on after the reset (command register {read:#06x})")]
    StillMaster {
        /// The function's name.
        device: String,
        /// The command register.
        read: u16,
    },
    /// Bus mastering was turned on after it had been seen to be off for this reset: the reading is
    /// of another time.
    #[error("{device}: bus mastering was turned on again around the reset")]
    MasteredSince {
        /// The function's name.
        device: String,
    },
    /// The function is not in D0.
    #[error("{device}: in {state:?} after the reset, not in D0: its registers do not answer")]
    Asleep {
        /// The function's name.
        device: String,
        /// The power state.
        state: PowerState,
    },
    /// Memory Space Enable did not take.
    #[error("memory decoding could not be turned on after the reset")]
    Decoding(#[source] CommandError),
    /// The canary's register does not answer.
    #[error("{device}: the canary gives no answer after the reset")]
    NoAnswer {
        /// The function's name.
        device: String,
        /// What it reads.
        #[source]
        source: NoAnswer,
    },
    /// The canary is not at its reset value: nothing was reset (C43).
    #[error(
        "{device}: register {register:#x} reads {value:#x} after the {method} reset, {reset:#x} was to be \
         expected (mask {mask:#x}): nothing was reset"
    )]
    NotReset {
        /// The function's name.
        device: String,
        /// How it was to be reset.
        method: ResetMethod,
        /// Bytes from the BAR's start.
        register: u32,
        /// The reading.
        value: u32,
        /// What a reset leaves there.
        reset: u32,
        /// The bits that count.
        mask: u32,
    },
    /// The canary cannot tell: its two values are the same.
    #[error("{device}: the canary at {register:#x} has the same value planted and reset")]
    Useless {
        /// The function's name.
        device: String,
        /// Bytes from the BAR's start.
        register: u32,
    },
    /// Command register, configuration space, window and reset are not all of one function.
    #[error("{device}: the proof was asked of another function than the one that was reset")]
    Foreign {
        /// The function's name.
        device: String,
    },
}

/// Proof that a function is *stopped*: bus mastering read back clear, and the reset is proven, or
/// none was needed. It holds for everything that the function was told in `generation` or before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct FunctionStopped {
    device: DeviceId,
    generation: Generation,
    method: Option<ResetMethod>,
}

impl FunctionStopped {
    /// Which function.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The life that ended: every object of this or an older one is covered.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// How it was reset; none when bus mastering was never on.
    #[must_use]
    pub fn method(&self) -> Option<ResetMethod> {
        self.method
    }

    /// Whether this alone is a ground to release memory that no IOMMU protects: a software reset,
    /// which the function itself carries out, is not (R4.5).
    #[must_use]
    pub fn is_ground_for_release(&self) -> bool {
        self.method != Some(ResetMethod::Software)
    }
}

/// Proves a reset: the function answers, in D0, with bus mastering clear although nobody cleared it
/// since, with Memory Space Enable written on; and the canary, planted in this life, is back at its
/// reset value in a register that still takes values. `window` is the ladder's own.
///
/// # Errors
///
/// [`NotProven`]. Nothing that the reset may have left undone is hidden by a retry of this call,
/// which needs another reset.
pub fn verify(
    issued: Issued,
    config: &ConfigSpace<'_>,
    command: &CommandRegister,
    window: &Window,
    canary: &Canary,
    generation: Generation,
) -> Result<FunctionStopped, NotProven> {
    let device = || config.device_name().to_owned();
    let all = [config.device(), command.device(), window.device()];
    if all.iter().any(|id| *id != issued.device) {
        return Err(NotProven::Foreign { device: device() });
    }
    if command.masterings() != issued.masterings {
        return Err(NotProven::MasteredSince { device: device() });
    }
    let register = canary.register;
    if (canary.planted ^ canary.reset) & canary.mask == 0 {
        return Err(NotProven::Useless {
            device: device(),
            register,
        });
    }
    // Read before it is written: what the reset left is of interest, not what we make of it. All
    // zero is what a reset leaves where nobody restores it; whether anybody answers shows below.
    let read = config.command()?;
    if read.bits() & Command::RESERVED != 0 {
        return Err(NotProven::Gone {
            device: device(),
            read: read.bits(),
        });
    }
    if read.contains(Command::BUS_MASTER) {
        return Err(NotProven::StillMaster {
            device: device(),
            read: read.bits(),
        });
    }
    if let Some(at) = config.find_capability(id::POWER_MANAGEMENT)? {
        let state = PowerManagement::state_of(config.read_u16(at + PowerManagement::CONTROL)?);
        if state != PowerState::D0 {
            return Err(NotProven::Asleep {
                device: device(),
                state,
            });
        }
    }
    command
        .memory_space_on(config)
        .map_err(|error| match error {
            CommandError::Access(error) => NotProven::Access(error),
            CommandError::NotTaken { device, read, .. } => NotProven::StillMaster { device, read },
            CommandError::NoAnswer { device, read, .. } => NotProven::Gone { device, read },
            error @ CommandError::Foreign { .. } => NotProven::Decoding(error),
        })?;
    let silent = |source| NotProven::NoAnswer {
        device: device(),
        source,
    };
    let value = canary.read(window).map_err(silent)?;
    if (value ^ canary.reset) & canary.mask != 0 {
        return Err(NotProven::NotReset {
            device: device(),
            method: issued.method,
            register,
            value,
            reset: canary.reset,
            mask: canary.mask,
        });
    }
    // A reset value of zero is also what a function reads that is gone or does not decode (C32):
    // one that answers takes a value, and gives it back.
    canary.put(window, canary.planted).map_err(silent)?;
    canary.put(window, canary.reset).map_err(silent)?;
    // A software reset is the function's own word: taken for "it never was master" by the next
    // climb it would be a ground after all.
    if issued.method != ResetMethod::Software {
        command.forget_masterings(issued.masterings);
    }
    Ok(FunctionStopped {
        device: issued.device,
        generation,
        method: Some(issued.method),
    })
}

/// The proof without a reset, where bus mastering was never on since the function was opened or
/// last proven reset: it cannot have begun anything.
pub fn never_mastered(
    command: &CommandRegister,
    generation: Generation,
) -> Option<FunctionStopped> {
    (!command.was_master()).then_some(FunctionStopped {
        device: command.device(),
        generation,
        method: None,
    })
}

/// Where a PCIe function says that it has requests outstanding (PCIe base specification 6.0,
/// §7.5.3.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pending {
    status: u16,
}

impl Pending {
    /// Looks for it; none on conventional PCI. To be called while the function is well.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when configuration space cannot be read.
    pub fn find(config: &ConfigSpace<'_>) -> Result<Option<Self>, AccessError> {
        let at = config.find_capability(id::PCI_EXPRESS)?;
        // Device Status is 10 bytes in; the list's pointers end at 0xfc.
        Ok(at.map(|at| Self { status: at + 0x0a }))
    }

    /// Whether Transactions Pending is set. All-ones, from a function that is gone, is a yes; zero
    /// is a no from whoever gave it: a note for the report, never a proof (R4.4).
    ///
    /// # Errors
    ///
    /// [`AccessError`] when configuration space cannot be read.
    pub fn outstanding(&self, config: &ConfigSpace<'_>) -> Result<bool, AccessError> {
        let status = DeviceStatus::from_bits_retain(config.read_u16(self.status)?);
        Ok(status.contains(DeviceStatus::TRANSACTIONS_PENDING))
    }
}

#[cfg(test)]
mod tests;
