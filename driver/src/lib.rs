//! failstop: a userspace driver for PCI network functions on Linux VFIO.
//!
//! Memory that a device could reach by DMA is never released until the device provably cannot
//! reach it, whatever the device does.
//!
//! [`device::Device`] owns one function; [`port::Port`] moves frames; [`objects`] are what a port is
//! made of.
#![forbid(unsafe_code)]

pub mod device;
pub mod e1000e;
pub mod events;
pub mod families;
pub mod flight;
pub mod igb;
pub mod intel;
pub mod ladder;
pub mod life;
pub mod name;
pub mod objects;
pub mod open;
pub mod owned;
pub mod port;
pub mod provider;
pub mod rss;
#[cfg(feature = "smoltcp")]
pub mod smoltcp;
pub mod supervisor;
pub mod watch;

pub use failstop_dma as dma;
pub use failstop_pci as pci;
pub use failstop_queues as queues;

/// The README's programs compile.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

// Tests in here use what programs of tests share.
#[cfg(test)]
extern crate self as failstop;
