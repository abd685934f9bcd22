//! vfio-user: a PCI function served by another process, over a Unix socket.
//!
//! The client is strict. Every message has a deadline; an answer counts only if it is the answer
//! to the question, whole and well-formed; a refusal is an error, whatever errno it names. The
//! first thing that a server does wrong ends the connection, and from then on every call fails at
//! once: a server that broke the protocol has lost its word, and in vfio-user the server's word is
//! all there is ([`Strength::ServerWord`](super::Strength::ServerWord)).
//!
//! ```no_run
//! use failstop_pci::transport::vfio_user::{Client, Options};
//! use failstop_pci::transport::{RegionIndex, Transport};
//!
//! let device = Client::connect("/run/nic.sock", Options::default())?;
//! println!("BAR 0 has {:#x} bytes", device.region(RegionIndex::Bar(0)).size);
//! # Ok::<(), failstop_pci::transport::vfio_user::ConnectError>(())
//! ```
//!
//! What goes over the socket is in [`wire`], how whole messages get there in [`socket`]; a server
//! uses both, too.

mod access;
mod client;
mod connection;
mod describe;
mod dial;
mod error;
pub mod socket;
pub mod wire;

pub use client::{Client, Options};
pub use error::{Broken, ConnectError, Doing, Violation};
