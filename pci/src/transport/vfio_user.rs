//! vfio-user: a PCI function served by another process.

pub mod socket;
pub mod wire;
