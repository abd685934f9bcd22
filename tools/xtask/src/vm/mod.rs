//! The QEMU tier's plumbing: everything between "a clean machine" and "this command ran in a guest, and here is its output".
//!
//! - [`Setup`] has what guests need: QEMU, busybox, two kernels. It fetches Debian packages through apt with a private
//!   root, so the host's own packages are not touched and nobody need be root, and keeps the results in a cache.
//! - [`topologies`] lists the machines that a guest can have, and names their functions by role.
//! - [`Dpdk`] is what measurements are made beside, for guests that need it.
//! - [`Boot`] says which kernel, machine and files; [`Guest`] is the machine that runs, and runs commands in it.
//!
//! Three environment variables decide what otherwise decides itself: `FAILSTOP_CACHE` (the folder of all that was fetched or
//! built; by default `failstop` in the user's cache folder; 1 GB, and 3 GB while the kernel is built), `FAILSTOP_ACCEL` (`kvm`
//! or `tcg`; by default KVM if a guest comes up with it) and `FAILSTOP_DEBIAN_MIRROR` (the archive to fetch from; by default
//! the one that the host's own apt uses, if the host is Debian).
//!
//! ```no_run
//! use xtask::protocol::Run;
//! use xtask::vm::{Boot, Kernel, Setup, topologies};
//!
//! # fn main() -> anyhow::Result<()> {
//! let setup = Setup::ensure()?;
//! let guest = Boot::new(Kernel::Small, topologies::find("two-igb")?).file("target/debug/failstop")?.start(&setup)?;
//! let list = guest.run(&Run::new(["failstop", "list"]))?;
//! assert!(list.success(), "{}", list.text());
//! let ended = guest.shut_down()?;
//! assert!(ended.kernel_log.iommu_faults().is_empty());
//! # Ok(())
//! # }
//! ```

mod accelerator;
mod apt;
mod boot;
mod cache;
mod debian_kernel;
mod dpdk;
mod guest;
mod initramfs;
mod kernel_log;
mod libraries;
mod qemu;
mod qmp;
mod setup;
mod small_kernel;
pub mod topologies;
mod tree;

pub use accelerator::Accelerator;
pub use boot::{Boot, Kernel};
pub use dpdk::Dpdk;
pub use guest::{Ended, Finished, Guest, Running};
pub use kernel_log::{KernelLog, Record};
pub use qmp::Qmp;
pub use setup::Setup;
pub use topologies::Topology;
