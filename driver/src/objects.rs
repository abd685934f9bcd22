//! Verbs: protection domains, memory regions, completion queues, receive and send queues.
//!
//! An object keeps what it is made from: a queue its memory region, completion queue and
//! protection domain. Handles may be dropped in any order; a parent goes with its last child.

mod cq;
mod mr;
mod pd;
mod queue;
mod rings;
mod rq;
mod sq;

use failstop_dma::proof::ReleaseProof;
use failstop_dma::region::BadFrameSize;
use failstop_dma::ring::RingError;
use failstop_dma::space::{Mapping, NotReleased, SpaceError};
use failstop_queues::lifecycle::Cause;
use thiserror::Error;

pub use self::cq::Cq;
pub use self::mr::Mr;
pub use self::pd::Pd;
pub use self::queue::QueueInit;
pub(crate) use self::queue::{RX_LEAST, TX_LEAST, check_entries};
pub use self::rq::Rq;
pub use self::sq::Sq;
use crate::device::DeviceError;
use crate::flight::Control;
use crate::life::Life;
use crate::provider::ProviderError;
use crate::rss::RssError;

/// An object that was not made. Nothing is left of it.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The device is broken, or cannot be made bus master.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Its memory could not be had or mapped.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// Frames of that size cannot be cut.
    #[error("{device}: {source}")]
    Frame {
        /// The function's name.
        device: String,
        /// Why.
        source: BadFrameSize,
    },
    /// The frames are too small for what the device is set to receive.
    #[error(
        "{device}: frames of {frame} bytes are too small for a receive queue that takes frames of {longest}: register at least {least} bytes each, or open the device with a shorter longest frame"
    )]
    FrameSize {
        /// The function's name.
        device: String,
        /// Bytes of each frame.
        frame: u32,
        /// The least that it may be.
        least: u32,
        /// The longest frame that the device is set to receive, in bytes.
        longest: u32,
    },
    /// A ring of that size cannot be made.
    #[error("{device}: {source}")]
    Ring {
        /// The function's name.
        device: String,
        /// Why.
        source: RingError,
    },
    /// The device refused.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// Received frames cannot be spread over several queues.
    #[error(transparent)]
    Rss(#[from] RssError),
    /// The completion queue has no room for the completions of so many requests.
    #[error(
        "{device}: the completion queue has {free} of {capacity} entries left, the queue posts up to {needed}"
    )]
    CompletionQueueFull {
        /// The function's name.
        device: String,
        /// Entries not reserved.
        free: u32,
        /// Entries.
        capacity: u32,
        /// Entries needed.
        needed: u32,
    },
    /// Another object has that queue.
    #[error(
        "{device}: {kind} {number} of the device is in use: destroy it first, or take another number"
    )]
    QueueTaken {
        /// The function's name.
        device: String,
        /// Which kind of queue.
        kind: &'static str,
        /// Its number.
        number: u32,
    },
    /// The completion queue, memory region, pool or protection domain is of another device.
    #[error("{device}: the {what} belongs to another device, protection domain or memory region")]
    Foreign {
        /// The function's name.
        device: String,
        /// What.
        what: &'static str,
    },
}
/// Gives a mapping that the device never learnt of, or let go of, back; escalates if the unmap
/// goes wrong.
fn release(mapping: Mapping, proof: &ReleaseProof, life: &Life) {
    let mut mapping = mapping;
    // Another thread's unmap of the same range is impossible by construction; a transport that
    // says busy is asked a few times and then not believed.
    for _ in 0..100 {
        match mapping.release(proof) {
            Ok(()) => return,
            Err(NotReleased::Busy(again)) => mapping = again,
            Err(NotReleased::Scope(kept)) => {
                log::error!("a proof of another object was offered for {kept:?}");
                return;
            }
            Err(error @ NotReleased::Unmap { .. }) => {
                life.note(Control::Mapping, format_args!("{error}"));
                life.break_device(Cause::UnmapFailed {
                    what: error.to_string(),
                });
                return;
            }
        }
        std::thread::yield_now();
    }
    life.note(Control::Mapping, format_args!("{mapping:?} stays busy"));
    life.break_device(Cause::UnmapFailed {
        what: format!("{mapping:?} stays busy"),
    });
}
