//! Bursts, completions and polling, over exchange rings.
//!
//! A burst is an exchange: every ring slot always holds one frame, so that receiving swaps empty
//! frames for full ones and sending swaps full frames for sent ones. Nothing is refilled or
//! reclaimed by loops, and no burst makes a system call, takes a lock or allocates.
//!
//! A device family says what its descriptors look like ([`mod@format`]); what one of them means for the
//! ring stands here, once: [`receive::Rx`], [`transmit::Tx`].
#![forbid(unsafe_code)]

pub mod completions;
pub mod format;
pub mod gate;
pub mod lifecycle;
pub mod receive;
mod sync;
pub mod transmit;
