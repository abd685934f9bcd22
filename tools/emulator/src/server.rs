//! The vfio-user server: one device, one client at a time, on a Unix socket.
//!
//! The protocol is QEMU's `docs/interop/vfio-user.rst`; its layouts are
//! [`failstop_pci::transport::vfio_user::wire`]. What a client sends is never trusted: a message
//! that is broken, too long or absurd ends in an error reply or in the end of the connection, and
//! nothing that it asks for is kept beyond its connection.
//!
//! Only BAR 1, the flash, can be mapped. BAR 0 is never: RXDCTL and TXDCTL lie in it, and an ENABLE
//! bit in shared memory would read back merely as the driver wrote it. (A fault offers it all the same.)

pub mod connection;
mod fork;
pub mod handler;
mod incoming;
pub mod irqs;
pub mod memory;
mod misbehaviour;
pub mod port;
mod replies;
pub mod wire;
