//! Set-up, tests and virtual machines: what `cargo xtask` does, as a library, so that the test harness uses the same.
//!
//! - [`command`] is the command line;
//! - [`tiers`] runs the checks and the tests; `rules` and `mutate` ask what the tests are worth;
//! - `bench` measures, `fuzz` and `soak` try to wear it out;
//! - [`vm`] gets QEMU and the guest kernels, and boots guests;
//! - [`guest`] is what runs inside them;
//! - [`protocol`] is what the two say to each other.

mod bench;
mod fuzz;
mod mutate;
mod rules;
mod soak;

pub mod command;
pub mod guest;
pub mod protocol;
pub mod tiers;
pub mod vm;
