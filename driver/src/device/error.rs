//! What keeps a device from being opened, or used.

use std::io;

use failstop_dma::space::SpaceError;
use failstop_pci::config::CommandError;
use failstop_pci::transport::{AccessError, IrqError, ResetFailed};
use failstop_pci::window::{NoAnswer, WindowError};
use failstop_queues::lifecycle::Cause;
use thiserror::Error;

use crate::name::last_resort;
use crate::provider::ProviderError;
use crate::rss::RssError;

/// A device that could not be opened or brought up. Nothing of it stays mapped, and its bus
/// mastering is off.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Config space could not be read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Its command register does not take.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// No provider drives it.
    #[error(
        "{device}: no driver for {vendor:04x}:{id:04x}; failstop drives Intel 82574, 82576, I350 and I210"
    )]
    Unknown {
        /// The function's name.
        device: String,
        /// Vendor id.
        vendor: u16,
        /// Device id.
        id: u16,
    },
    /// Config space reads as that of a function that is not there.
    #[error("{device}: config space reads {value:#010x}: the device is gone or powered down")]
    Gone {
        /// The function's name.
        device: String,
        /// The first double word.
        value: u32,
    },
    /// A child of fork has copies of its parent's objects, and no device.
    #[error("{device}: it is driven by the process that this one was forked from; open one here")]
    Child {
        /// The function's name.
        device: String,
    },
    /// A reset of it is under way, or may happen yet.
    #[error(transparent)]
    Reset(#[from] ResetFailed),
    /// None of its resets shows that it took place: what its last owner started may go on, in
    /// memory that is to be this one's.
    #[error(
        "{device}: no reset of it could be proven, so that it may go on with what it was told before, and is not used: {tried}; {}",
        last_resort(.device)
    )]
    NotReset {
        /// The function's name.
        device: String,
        /// Each reset, and why it is not believed.
        tried: String,
    },
    /// A mapped register could not be reached, and all of them read all-ones since.
    #[error(
        "{device}: a mapped register of it raised SIGBUS: behind a server, its BAR is shorter than the server said; behind the kernel, it stopped to decode memory; {}",
        last_resort(.device)
    )]
    Short {
        /// The function's name.
        device: String,
        /// What the bring-up came to.
        #[source]
        source: Option<ProviderError>,
    },
    /// Its BAR is unusable.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// Its address space is unusable.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Its interrupts could not be routed.
    #[error(transparent)]
    Irq(#[from] IrqError),
    /// Its family's initialisation failed.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// What it receives cannot be spread as the configuration says.
    #[error(transparent)]
    Rss(#[from] RssError),
    /// The register that is to show a reset does not keep a value: no reset could be proven.
    #[error(
        "{device}: the register that is to show that a reset happened does not take a value ({source}): is it the device that its ids say?"
    )]
    Canary {
        /// The function's name.
        device: String,
        /// What was read.
        source: NoAnswer,
    },
    /// A thread or descriptor that the device needs could not be had.
    #[error("{device}: no thread or descriptor for the ladder: raise `ulimit -u` or `ulimit -n`")]
    NoThread {
        /// The function's name.
        device: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This transport's function is driven by another `Device` of this process.
    #[error(
        "{device}: in use by this process already; close the other device first, or open the function again by its name"
    )]
    InUse {
        /// The function's name.
        device: String,
    },
    /// The device is broken.
    #[error("{device}: broken ({cause}); recover it, or close it and open it again")]
    Broken {
        /// The function's name.
        device: String,
        /// Why.
        cause: Cause,
    },
    /// The device is closed.
    #[error("{device}: closed; open it again")]
    Closed {
        /// The function's name.
        device: String,
    },
}
