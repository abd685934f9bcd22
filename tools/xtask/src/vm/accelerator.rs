//! Whether guests run on the processor itself or emulated.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};

use super::boot::{Boot, Kernel};
use super::cache::key;
use super::setup::Setup;
use super::topologies;

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor, through the host kernel's KVM.
    Kvm,
    /// QEMU's translator, on one host thread for each virtual processor.
    Tcg,
    /// QEMU's translator, with time that passes by instructions: the time-stamp counter advances by
    /// one for each that the guest executes, on however busy a host. For a guest with one processor.
    Counted,
}

impl Accelerator {
    /// The value of QEMU's `-accel`.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
            Self::Counted => "tcg,thread=single",
        }
    }

    /// The value of QEMU's `-icount`, where it has one.
    pub(super) fn instruction_count(self) -> Option<&'static str> {
        (self == Self::Counted).then_some("shift=0,sleep=off")
    }

    /// How much longer a guest may take than it would under KVM.
    pub(super) fn patience(self) -> u32 {
        match self {
            Self::Kvm => 1,
            Self::Tcg => 6,
            Self::Counted => 12,
        }
    }

    /// KVM where it works, found out by booting a guest with it: on some machines /dev/kvm opens, and guests die in their
    /// first second. The answer is kept until the next boot of the host. `FAILSTOP_ACCEL=kvm` or `=tcg` decides instead.
    ///
    /// # Errors
    ///
    /// When the variable holds something else.
    pub fn choose(setup: &Setup, kernel: Kernel) -> Result<Self> {
        match std::env::var("FAILSTOP_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Self::Kvm),
            Ok("tcg") => return Ok(Self::Tcg),
            Err(_) | Ok("") => {}
            Ok(other) => bail!("FAILSTOP_ACCEL is {other}; it may be kvm or tcg"),
        }
        if fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_err()
        {
            return Ok(Self::Tcg);
        }
        let verdict = verdict_path(setup);
        if let Ok(text) = fs::read_to_string(&verdict) {
            return Ok(if text == "kvm" { Self::Kvm } else { Self::Tcg });
        }
        let accelerator = if kvm_boots(setup, kernel) {
            Self::Kvm
        } else {
            Self::Tcg
        };
        fs::write(verdict, accelerator.to_string())?;
        Ok(accelerator)
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
            Self::Counted => "tcg that counts instructions",
        })
    }
}

fn verdict_path(setup: &Setup) -> PathBuf {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    setup
        .cache
        .path(format!("accelerator-{}", key([boot.trim()])))
}

fn kvm_boots(setup: &Setup, kernel: Kernel) -> bool {
    let Ok(topology) = topologies::find("two-igb") else {
        return false;
    };
    let boot = Boot::new(kernel, topology)
        .accelerator(Accelerator::Kvm)
        .boot_limit(Duration::from_secs(15));
    boot.start(setup).and_then(super::Guest::shut_down).is_ok()
}
