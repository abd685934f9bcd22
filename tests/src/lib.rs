//! The suite: what must hold on every device, emulated, under QEMU or real.
//!
//! A case names what it needs of a device, never a tier. `suite` (a binary of this crate) runs the
//! cases on the device that `FAILSTOP_DEVICE` names; `tests/t1.rs` runs them on emulated devices
//! here, `tests/t2.rs` in guests under QEMU.

pub mod adversary;
pub mod bench;
pub mod cases;
pub mod faults;
pub mod fixture;
pub mod flows;
pub mod kernel;
mod net;
pub mod plan;
pub mod processes;
pub mod report;
pub mod supervised;
pub mod tool;

pub use net::captured as captured_frames;
