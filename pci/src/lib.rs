//! PCI functions from user space.
