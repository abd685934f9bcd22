//! DMA memory, IOVA allocation, the ledger and release proofs.
//!
//! Memory enters a device's reach by [`space::AddressSpace::map`] and leaves it by
//! [`space::Mapping::release`], which takes a [`proof::ReleaseProof`]; on a broken device by the
//! ladder, which unmaps everything and settles what may go
//! ([`space::AddressSpace::unmap_all`], [`space::AddressSpace::settle`]). There is no other way out:
//! a mapping that is dropped without proof is quarantined until one comes.

pub mod frame;
pub mod iova;
pub mod ledger;
pub mod memory;
pub mod proof;
pub mod region;
pub mod ring;
pub mod space;
