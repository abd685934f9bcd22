//! The adversary: every fault in every phase of a device's life, and what the contract demands of
//! the driver then.
//!
//! The demand stands twice, so that nobody changes it in passing: in words, a cell of
//! `tests/adversary/verdicts.toml` for each fault and phase, and as rules ([`demand`]) that are given
//! only what a faulty device truly is. A test holds one against the other.
//!
//! ```text
//!  verdicts.toml ──> table ──> cell: demanded word and exit code ──┐
//!                      │ truth                                     ├── equal, or a test is red
//!                      └────> demand: the rules of the contract ───┘
//! ```

pub mod cell;
pub mod demand;
pub mod guest;
pub mod host;
pub mod plays;
pub mod print;
pub mod run;
pub mod table;
pub mod traffic;
