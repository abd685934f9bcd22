//! PCI functions from user space: sysfs, config space, BAR windows, doorbells, interrupts, reset,
//! and the transports that carry them (VFIO container, VFIO cdev with iommufd, vfio-user).

pub mod id;
pub mod register;
pub mod transport;
