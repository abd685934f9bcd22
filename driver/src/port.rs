//! An Ethernet port: one receive and one send queue, and the frames that pass through them. A device
//! has as many as it has pairs of queues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop_dma::frame::Frame;
use failstop_dma::proof::ReleaseProof;
use failstop_dma::region::{Census, Pool};
use failstop_queues::completions::Completions;

use crate::device::{Device, Inner};
use crate::life::Life;
use crate::objects::{
    Cq, CreateError, Mr, Pd, QueueInit, RX_LEAST, Rq, Sq, TX_LEAST, check_entries,
};
use crate::owned::{Leftovers, Object, Owned};
use crate::provider::ProviderError;
use crate::rss::RssError;

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
///
/// A port is carried across a recovery ([`Device::recover`]): its bursts return 0 while the device
/// is broken, deliver what had been received, and go on with new queues over the same memory once a
/// new life began. [`Port::carried`] says how often, and how many requests were flushed.
#[derive(Debug)]
pub struct Port {
    rq: Owned<Rq>,
    sq: Owned<Sq>,
    pool: Pool,
    mr: Owned<Mr>,
    rx_cq: Owned<Cq>,
    tx_cq: Owned<Cq>,
    pd: Owned<Pd>,
    config: PortConfig,
    /// Of both queues.
    number: u32,
    carried: Carried,
    /// Received before a break, and not asked for until the queue was carried.
    backlog: Vec<Frame>,
    /// The receive queue of the present life, until the backlog was asked for: what it receives
    /// comes after that.
    next_rq: Option<Owned<Rq>>,
    /// What carries dropped that could not go at once: a burst waits neither for a device that is
    /// busy nor for a ladder (R11).
    left: Leftovers,
    /// When it may be tried again to carry it, after an attempt that failed.
    carry_again: Option<Duration>,
    device: Arc<Inner>,
}

/// How long after an attempt to carry a port that failed it is tried again: not with every burst,
/// which would be a loop of system calls.
const CARRY_AGAIN: Duration = Duration::from_millis(10);

/// How often a port was carried to a new life of its device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Carried {
    /// Times.
    pub times: u64,
    /// The requests of queues that were left behind, and how they ended.
    pub completions: Completions,
    /// How long it took the last time to take the old queues apart and to map the memory anew.
    pub remapped: Duration,
    /// How long it took the last time to make the new queues.
    pub requeued: Duration,
}

impl Port {
    /// Makes queue 0 of each direction, with memory of their own.
    ///
    /// # Errors
    ///
    /// [`CreateError`]; nothing is left then.
    pub fn open(device: &Device, config: &PortConfig) -> Result<Self, CreateError> {
        Self::open_queue(device, config, 0)
    }

    /// Makes `count` ports, of queues 0 to `count` - 1, and spreads over them what the device
    /// receives ([`crate::rss`]); it is to be opened with [`Config::rss`], unless there is only one.
    ///
    /// Each port is for one thread and shares nothing with the others: it has memory of its own,
    /// about `frame_size` times all of its frames (2.6 MB by default, so that 16 ports pin 42 MB),
    /// and is carried across a recovery by its own next burst, whether others burst or not. Until a
    /// port is carried, and after it is dropped, the others receive its flows.
    ///
    /// ```no_run
    /// # fn forward(transport: std::sync::Arc<dyn failstop::pci::transport::Transport>)
    /// #     -> Result<(), Box<dyn std::error::Error>> {
    /// use failstop::device::Device;
    /// use failstop::port::{Port, PortConfig};
    /// use failstop::provider::Config;
    /// use failstop::rss::Rss;
    ///
    /// let config = Config { rss: Some(Rss::default()), ..Config::default() };
    /// let device = Device::open(transport, &config)?;
    /// let ports = Port::open_many(&device, &PortConfig::default(), 4)?;
    /// std::thread::scope(|scope| {
    ///     for mut port in ports {
    ///         let device = &device;
    ///         scope.spawn(move || {
    ///             let mut frames = port.take_frames(32).unwrap_or_default();
    ///             while device.broken().is_none() {
    ///                 let received = port.rx_burst(&mut frames);
    ///                 port.tx_burst(&mut frames[..received]);
    ///             }
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`Config::rss`]: crate::provider::Config
    ///
    /// # Errors
    ///
    /// [`CreateError`]: [`CreateError::Rss`] without RSS; no port is left then, and frames go where
    /// they went.
    pub fn open_many(
        device: &Device,
        config: &PortConfig,
        count: u32,
    ) -> Result<Vec<Self>, CreateError> {
        device.check_ours()?;
        let most = device.limits().queues;
        if !(1..=most).contains(&count) {
            return Err(CreateError::Provider(ProviderError::OutOfRange {
                device: device.name().to_owned(),
                what: "the number of ports",
                value: count.into(),
                least: 1,
                most: most.into(),
            }));
        }
        // One takes everything without being told.
        if count > 1 {
            device.check_spreads()?;
        }
        let ports = (0..count)
            .map(|number| Self::open_queue(device, config, number))
            .collect::<Result<Vec<_>, _>>()?;
        // Last, so that what fails changes nothing: a queue takes flows from its start on anyway.
        match device.spread_over(count) {
            Err(RssError::Off { .. }) if count == 1 => {}
            other => other?,
        }
        Ok(ports)
    }

    /// Makes queue `number` of each direction, with memory of their own. Without RSS only queue 0
    /// receives.
    ///
    /// # Errors
    ///
    /// [`CreateError`]; nothing is left then.
    pub fn open_queue(
        device: &Device,
        config: &PortConfig,
        number: u32,
    ) -> Result<Self, CreateError> {
        let life = device.life();
        // Before memory is mapped for rings that are then refused.
        check_entries(&life, config.rx_entries, RX_LEAST)?;
        check_entries(&life, config.tx_entries, TX_LEAST)?;
        let pd = Pd::of(life)?;
        let frames = config
            .rx_entries
            .saturating_add(config.tx_entries)
            .saturating_add(config.spare_frames);
        let (mr, mut pool) = pd.register(frames, config.frame_size)?;
        let (rq, sq, rx_cq, tx_cq) = queues(config, number, &pd, &mr, &mut pool)?;
        Ok(Self {
            rq,
            sq,
            pool,
            mr,
            rx_cq,
            tx_cq,
            pd,
            config: *config,
            number,
            carried: Carried::default(),
            backlog: Vec::new(),
            next_rq: None,
            left: Leftovers::default(),
            carry_again: None,
            device: device.inner.clone(),
        })
    }

    /// Exchanges up to `frames.len()` empty frames for received ones; returns how many: the first
    /// so many of `frames` are full.
    ///
    /// Never waits for a break to be over: neither for the ladder, nor for a recovery. The burst
    /// that carries the port to a new life maps its memory and makes its queues, which asks the kernel,
    /// or the server, and the device's registers; when the device breaks again meanwhile, or refuses,
    /// it returns 0, and a later burst ends what was made by then.
    #[inline]
    pub fn rx_burst(&mut self, frames: &mut [Frame]) -> usize {
        // Looked at first, so that a poll that finds nothing is a few instructions of the caller's.
        if self.rq.is_idle() {
            return 0;
        }
        self.receive(frames)
    }

    /// A receive burst that has something to do.
    #[inline(never)]
    fn receive(&mut self, frames: &mut [Frame]) -> usize {
        let received = self.rq.receive(frames);
        if received == 0 && self.rq.is_ended() {
            return self.late_rx_burst(frames);
        }
        received
    }

    /// A receive burst that found nothing, with a break behind it.
    #[cold]
    #[inline(never)]
    fn late_rx_burst(&mut self, frames: &mut [Frame]) -> usize {
        if !self.backlog.is_empty() {
            let received = frames.len().min(self.backlog.len());
            let late = self.backlog.drain(..received);
            // What was in the caller's frames goes home.
            frames
                .iter_mut()
                .zip(late)
                .for_each(|(frame, late)| *frame = late);
            return received;
        }
        if let Some(next) = self.next_rq.take() {
            self.rq = next;
            return self.rx_burst(frames);
        }
        // What a carry finds to be received comes first, by this function again.
        if self.carry() {
            return self.rx_burst(frames);
        }
        0
    }

    /// Exchanges frames to send for frames that were sent, from the front of `frames`; returns how
    /// many. Fewer than `frames.len()` when the ring is full, when the device is broken, or when a
    /// frame cannot be sent: one under 17 bytes, over the device's longest, or of another memory
    /// region ends the burst before it and is counted ([`Sq::refused`]).
    ///
    /// Waits for a break to be over as little as [`Port::rx_burst`], and carries the port as that does.
    #[inline(never)]
    pub fn tx_burst(&mut self, frames: &mut [Frame]) -> usize {
        let sent = self.sq.burst(frames);
        if sent == 0 && self.sq.is_ended() {
            return self.late_tx_burst(frames);
        }
        sent
    }

    /// A send burst that sent nothing, with a break behind it.
    #[cold]
    #[inline(never)]
    fn late_tx_burst(&mut self, frames: &mut [Frame]) -> usize {
        if self.carry() {
            return self.tx_burst(frames);
        }
        0
    }

    /// Carries the port to the device's present life, if that is not the one that it is of: new
    /// queues over the same memory, mapped anew. False when it stays where it is, as while the
    /// device is not recovered; it is tried again then.
    #[cold]
    #[inline(never)]
    fn carry(&mut self) -> bool {
        if !self.pd.life().is_ours() {
            // The device is the parent's, and its locks may be held by threads of its (R12).
            return false;
        }
        let life = self.device.life();
        if life.lifecycle().is_broken() {
            self.left.end();
            return false;
        }
        let now = self.device.function().clock.now();
        if self.carry_again.is_some_and(|again| now < again) {
            return false;
        }
        // Among them may be one that has the queue's number, or frames of the region.
        if !self.left.end() {
            self.carry_again = Some(now.saturating_add(CARRY_AGAIN));
            return false;
        }
        let mut left = Leftovers::default();
        let result = left.keep(|| self.carry_to(life));
        left.end();
        self.left = left;
        match result {
            Ok(carried) => {
                self.carry_again = None;
                carried
            }
            Err(error) => {
                // Said once, however often it fails.
                if self.carry_again.is_none() {
                    log::warn!("a port was not carried to the new life yet: {error}");
                }
                // Frames that are missing come home with the bursts, and asked the kernel nothing.
                let pause = match error {
                    CreateError::Ring { .. } => Duration::ZERO,
                    _ => CARRY_AGAIN,
                };
                self.carry_again = Some(now.saturating_add(pause));
                false
            }
        }
    }

    fn carry_to(&mut self, life: Arc<Life>) -> Result<bool, CreateError> {
        let start = Instant::now();
        if life.generation() != self.pd.generation() {
            let Some(proof) = self.pd.revoked() else {
                return Ok(false);
            };
            if !self.leave(&proof) {
                return Ok(false);
            }
            let pd = Pd::of(life)?;
            self.mr = self.mr.carry(&proof, &pd)?;
            self.pd = pd;
            self.carried.remapped = start.elapsed();
        }
        let start = Instant::now();
        // Also when they could not be made the last time.
        let (rq, sq, rx_cq, tx_cq) = queues(
            &self.config,
            self.number,
            &self.pd,
            &self.mr,
            &mut self.pool,
        )?;
        (self.sq, self.rx_cq, self.tx_cq) = (sq, rx_cq, tx_cq);
        if self.backlog.is_empty() {
            self.rq = rq;
        } else {
            self.next_rq = Some(rq);
        }
        self.carried.requeued = start.elapsed();
        self.carried.times += 1;
        Ok(true)
    }

    /// Takes the queues of the life that ended apart: what was received goes to the backlog, the
    /// rest is flushed.
    ///
    /// False while there is no frame to take what was received into: the caller's next receive
    /// burst has some.
    fn leave(&mut self, proof: &Arc<ReleaseProof>) -> bool {
        // Its frames come home.
        self.sq.reap();
        self.carried.completions += self.sq.vacate(proof);
        if let Some(next) = self.next_rq.take() {
            self.rq = next;
        }
        let mut frame = self.pool.take_many(1).unwrap_or_default();
        while self.rq.burst(&mut frame) == 1 {
            self.backlog.append(&mut frame);
            frame = self.pool.take_many(1).unwrap_or_default();
        }
        if self.rq.is_ready() {
            return false;
        }
        self.carried.completions += self.rq.vacate(proof);
        true
    }

    /// How often it was carried to a new life of its device.
    #[must_use]
    pub fn carried(&self) -> Carried {
        self.carried
    }

    /// Which of the device's queues it has, of each direction.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
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

    /// Both queues' requests, and how they ended, with those of queues that were left behind.
    #[must_use]
    pub fn completions(&mut self) -> Completions {
        self.sq.reap();
        let receiving = self.next_rq.as_ref().unwrap_or(&self.rq).completions();
        self.carried.completions + receiving + self.sq.completions()
    }

    /// Where the frames are.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.mr.census()
    }

    /// The objects that the port is made of, to be used or destroyed one by one. They stay with the
    /// life that they are of.
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
            next_rq,
            ..
        } = self;
        let rq = next_rq.unwrap_or(rq);
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

type Queues = (Owned<Rq>, Owned<Sq>, Owned<Cq>, Owned<Cq>);

/// Queue `number` of each direction, and where they complete.
fn queues(
    config: &PortConfig,
    number: u32,
    pd: &Owned<Pd>,
    mr: &Owned<Mr>,
    pool: &mut Pool,
) -> Result<Queues, CreateError> {
    let cq = |entries| Cq::of(pd.life().clone(), entries);
    let (rx_cq, tx_cq) = (cq(config.rx_entries)?, cq(config.tx_entries)?);
    let rq = pd.create_rq(QueueInit {
        pd,
        cq: &rx_cq,
        mr,
        pool: &mut *pool,
        entries: config.rx_entries,
        number,
    })?;
    let sq = pd.create_sq(QueueInit {
        pd,
        cq: &tx_cq,
        mr,
        pool,
        entries: config.tx_entries,
        number,
    })?;
    Ok((rq, sq, rx_cq, tx_cq))
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
