//! An emulated Intel 82576, served over vfio-user: for tests without hardware, for guests under
//! QEMU, and as the device that `failstop run` starts by itself.
//!
//! Its parts, from the inside out: [`device`], the model, which has no I/O of its own and gets
//! memory, interrupts, a wire and time from a [`host::Host`]; [`server`], which gives it a vfio-user
//! client's memory and eventfds and checks every DMA access against what that client has mapped;
//! [`control`], the socket by which tests count and script; [`emulator`], which starts all this, on
//! threads or in a process of its own.
//!
//! ```
//! use failstop_emulator::{Emulator, Options};
//!
//! let mut emulator = Emulator::on_threads(&Options::default())?;
//! // A driver opens vfio-user:PATH with this path.
//! assert!(emulator.socket_path().exists());
//! emulator.fault("rxq-stuck")?;
//! assert_eq!(emulator.stats()?.stray.total(), 0);
//! emulator.stop();
//! # Ok::<(), failstop_emulator::EmulatorError>(())
//! ```
//!
//! # What it is strict about
//!
//! - DMA needs bus mastering, D0, and master requests not disabled; a function level reset ends it,
//!   whatever fault made it go on (C20).
//! - A read that nobody answers wedges its queue until a function level reset; a write that nobody
//!   takes is lost, as posted writes are. Both are counted as stray.
//! - RXDCTL and TXDCTL show ENABLE only while the engine runs; BAR 0 is never memory-mapped, so the
//!   bit never reads back merely as it was written.
//! - Loopback is the PHY's. RCTL.LBM does nothing (§3.5.6.2), and frames need link: CTRL.SLU, and a
//!   cable or loopback.
//! - A frame without IFCS is no frame, and one that finds no descriptors waits in a packet buffer of
//!   64 KiB.
//! - When its client goes, the function is reset and every mapping is dropped.
//!
//! # What it leaves out
//!
//! Legacy descriptors and header splitting, interrupt throttling, flow control, timestamps,
//! filters other than address, multicast table and VLAN table, SCTP checksums, virtual functions,
//! wake-up, manageability, write-back thresholds (descriptors are written back at once), the
//! INTx line's level (an assertion is one event), and the access rights of configuration space
//! beyond what drivers use.

pub mod cli;
pub mod control;
pub mod device;
pub mod emulator;
pub mod faults;
pub mod host;
pub mod server;
pub mod stats;
#[cfg(test)]
mod testing;

pub use emulator::{Cable, Emulator, EmulatorError, Options, Running};
pub use server::irqs::Notice;
