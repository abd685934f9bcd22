//! An Ethernet port: one receive and one send queue, and the frames that pass through them.

use failstop_dma::frame::Frame;
use failstop_dma::region::{Census, Pool};
use failstop_queues::completions::Completions;

use crate::device::Device;
use crate::objects::{
    Cq, CreateError, Mr, Pd, QueueInit, RX_LEAST, Rq, Sq, TX_LEAST, check_entries,
};
use crate::owned::Owned;

/// A port's sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortConfig {
    /// Receive descriptors: a power of two.
    pub rx_entries: u32,
    /// Transmit descriptors: a power of two.
    pub tx_entries: u32,
    /// Bytes of a frame: at least the longest frame that the device is set to receive.
    ///
    /// Real devices do not care where a frame's pages are. QEMU's drop a frame to be sent whose
    /// buffer is not contiguous in the guest's memory, as one of more than a base page often is not:
    /// reserve large pages there.
    pub frame_size: u32,
    /// Frames for the caller, next to those that the rings hold.
    pub spare_frames: u32,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            rx_entries: 512,
            tx_entries: 512,
            frame_size: 2048,
            spare_frames: 256,
        }
    }
}

/// One receive queue and one send queue of a device. For one thread, or for two with
/// [`Port::into_parts`].
///
/// ```no_run
/// # fn forward(device: failstop::device::Device) -> Result<(), Box<dyn std::error::Error>> {
/// use failstop::port::{Port, PortConfig};
///
/// let mut port = Port::open(&device, &PortConfig::default())?;
/// let mut frames = port.take_frames(32).ok_or("no frames")?;
/// while device.broken().is_none() {
///     let received = port.rx_burst(&mut frames);
///     // The first `received` frames are full; sending exchanges them for frames that were sent.
///     // What the ring has no room for stays with us, and is received into next time.
///     port.tx_burst(&mut frames[..received]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Port {
    rq: Owned<Rq>,
    sq: Owned<Sq>,
    pool: Pool,
    mr: Owned<Mr>,
    rx_cq: Owned<Cq>,
    tx_cq: Owned<Cq>,
    pd: Owned<Pd>,
}

impl Port {
    /// Makes queue 0 of each direction, with memory of their own.
    ///
    /// # Errors
    ///
    /// [`CreateError`]; nothing is left then.
    pub fn open(device: &Device, config: &PortConfig) -> Result<Self, CreateError> {
        // Before memory is mapped for rings that are then refused.
        check_entries(&device.core, config.rx_entries, RX_LEAST)?;
        check_entries(&device.core, config.tx_entries, TX_LEAST)?;
        let pd = device.alloc_pd()?;
        let frames = config
            .rx_entries
            .saturating_add(config.tx_entries)
            .saturating_add(config.spare_frames);
        let (mr, mut pool) = pd.register(frames, config.frame_size)?;
        let rx_cq = device.create_cq(config.rx_entries)?;
        let tx_cq = device.create_cq(config.tx_entries)?;
        let rx = QueueInit {
            pd: &pd,
            cq: &rx_cq,
            mr: &mr,
            pool: &mut pool,
            entries: config.rx_entries,
            number: 0,
        };
        let rq = pd.create_rq(rx)?;
        let tx = QueueInit {
            pd: &pd,
            cq: &tx_cq,
            mr: &mr,
            pool: &mut pool,
            entries: config.tx_entries,
            number: 0,
        };
        let sq = pd.create_sq(tx)?;
        Ok(Self {
            rq,
            sq,
            pool,
            mr,
            rx_cq,
            tx_cq,
            pd,
        })
    }

    /// Exchanges up to `frames.len()` empty frames for received ones; returns how many: the first
    /// so many of `frames` are full.
    #[inline]
    pub fn rx_burst(&mut self, frames: &mut [Frame]) -> usize {
        self.rq.burst(frames)
    }

    /// Exchanges frames to send for frames that were sent, from the front of `frames`; returns how
    /// many. Fewer than `frames.len()` when the ring is full, when the device is broken, or when a
    /// frame cannot be sent: one under 17 bytes, over the device's longest, or of another memory
    /// region ends the burst before it and is counted ([`Sq::refused`]).
    #[inline]
    pub fn tx_burst(&mut self, frames: &mut [Frame]) -> usize {
        self.sq.burst(frames)
    }

    /// Takes a frame, of length 0.
    #[must_use]
    pub fn take_frame(&mut self) -> Option<Frame> {
        self.pool.take()
    }

    /// Takes `n` frames, or none at all.
    #[must_use]
    pub fn take_frames(&mut self, n: usize) -> Option<Vec<Frame>> {
        self.pool.take_many(n)
    }

    /// The pool that its frames come from.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The receive queue.
    pub fn rq(&mut self) -> &mut Rq {
        &mut self.rq
    }

    /// The send queue.
    pub fn sq(&mut self) -> &mut Sq {
        &mut self.sq
    }

    /// Both queues' requests, and how they ended.
    #[must_use]
    pub fn completions(&mut self) -> Completions {
        self.sq.reap();
        self.rq.completions() + self.sq.completions()
    }

    /// Where the frames are.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.mr.census()
    }

    /// The objects that the port is made of, to be used or destroyed one by one.
    #[must_use]
    pub fn into_parts(self) -> Parts {
        let Self {
            rq,
            sq,
            pool,
            mr,
            rx_cq,
            tx_cq,
            pd,
        } = self;
        Parts {
            rq,
            sq,
            pool,
            mr,
            rx_cq,
            tx_cq,
            pd,
        }
    }
}

/// What a port is made of, children first: dropped in this or any other order.
#[derive(Debug)]
pub struct Parts {
    /// The receive queue; for one thread.
    pub rq: Owned<Rq>,
    /// The send queue; for one thread, which may be another.
    pub sq: Owned<Sq>,
    /// Frames; [`Pool::share`] makes one for another thread.
    pub pool: Pool,
    /// The memory region.
    pub mr: Owned<Mr>,
    /// Where receive requests complete.
    pub rx_cq: Owned<Cq>,
    /// Where send requests complete.
    pub tx_cq: Owned<Cq>,
    /// The protection domain.
    pub pd: Owned<Pd>,
}
