//! PCI functions from user space: sysfs, config space, BAR windows, doorbells, interrupts, reset,
//! and the transports that carry them (VFIO container, VFIO cdev with iommufd, vfio-user).

pub mod address;
pub mod barrier;
pub mod capabilities;
pub mod clock;
pub mod config;
mod descriptor;
pub mod fork;
pub mod id;
pub mod interrupts;
pub mod left;
mod mapped;
pub mod memlock;
pub mod peer;
pub mod register;
pub mod reset;
pub mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod transport;
pub mod window;
