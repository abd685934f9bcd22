//! One life of a device: from a bring-up to the break or the close that ends it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use failstop_dma::proof::{ObjectId, ReleaseProof};
use failstop_dma::space::AddressSpace;
use failstop_pci::config::ConfigSpace;
use failstop_pci::fork::Process;
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::window::{Doorbell, NoAnswer, QueueName, Stopped, Window};
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::{Cause, Lifecycle, Verdict};

use crate::device::{Claimed, DeviceError};
use crate::flight::Control;
use crate::ladder::{self, Function, Ladder, RevocationReport, Watched};
use crate::objects::CreateError;
use crate::provider::{Limits, NotStopped, Position, Provider, RingSpec, Statistics};
use crate::rss::{Settings, Spread};

/// What a function's lives have in common and its handles add to.
#[derive(Debug)]
pub(crate) struct Tally {
    _claim: Arc<Claimed>,
    ended: Arc<Ended>,
    serial: AtomicU64,
}

/// The requests of queues that are gone, and how they ended.
#[derive(Default, Debug)]
pub(crate) struct Ended(Mutex<Completions>);

impl Ended {
    /// All of them.
    pub(crate) fn sum(&self) -> Completions {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, completions: Completions) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += completions;
    }
}

impl Tally {
    pub(crate) fn new(claim: Arc<Claimed>) -> Self {
        Self {
            _claim: claim,
            ended: Arc::default(),
            serial: AtomicU64::new(0),
        }
    }

    /// The requests of queues that are gone, and how they ended.
    pub(crate) fn completions(&self) -> Completions {
        self.ended.sum()
    }

    /// The account of them, for who reads it when the function is no one's any more.
    pub(crate) fn ended(&self) -> &Arc<Ended> {
        &self.ended
    }

    fn add(&self, completions: Completions) {
        self.ended.add(completions);
    }
}

/// What every object of one generation shares. Objects keep it; it knows none of them.
pub struct Life {
    provider: Mutex<Box<dyn Provider>>,
    window: Arc<Window>,
    lifecycle: Arc<Lifecycle>,
    ladder: Mutex<Ladder>,
    /// Whether bus mastering was turned on; changed under the function's gate.
    mastering: AtomicBool,
    /// One bit for each queue that an object has.
    receive_queues: AtomicU64,
    send_queues: AtomicU64,
    objects: AtomicUsize,
    receiving: Mutex<Receiving>,
    /// How received frames are spread, where they are. Locked before the provider.
    spread: Mutex<Option<Spread>>,
    longest_frame: u32,
    limits: Limits,
    generation: Generation,
    tally: Arc<Tally>,
    /// Whose threads its ladder is of: a child of fork has none.
    process: Process,
    function: Arc<Function>,
}

impl Life {
    /// A life over a function that was brought up, with its ladder standing ready.
    pub(crate) fn new(
        function: Arc<Function>,
        tally: Arc<Tally>,
        generation: Generation,
        window: Arc<Window>,
        provider: Box<dyn Provider>,
        rss: Option<Settings>,
    ) -> Result<Arc<Self>, DeviceError> {
        let lifecycle = Arc::<Lifecycle>::default();
        let watched = Watched {
            generation,
            lifecycle: lifecycle.clone(),
            window: window.clone(),
        };
        let ladder =
            Ladder::new(function.clone(), watched).map_err(|source| DeviceError::NoThread {
                device: function.transport.name().to_owned(),
                source,
            })?;
        Ok(Arc::new(Self {
            limits: provider.limits(),
            longest_frame: provider.longest_received(),
            provider: Mutex::new(provider),
            window,
            lifecycle,
            ladder: Mutex::new(ladder),
            mastering: AtomicBool::new(false),
            receive_queues: AtomicU64::new(0),
            send_queues: AtomicU64::new(0),
            objects: AtomicUsize::new(0),
            receiving: Mutex::default(),
            spread: Mutex::new(rss.map(Spread::new)),
            generation,
            tally,
            process: Process::this(),
            function,
        }))
    }

    /// Whether this process drives the device: a child of fork has copies of our objects, and
    /// neither their threads nor their memory (R12).
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_this()
    }

    pub(crate) fn provider(&self) -> MutexGuard<'_, Box<dyn Provider>> {
        self.provider.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The provider, unless somebody has it, who may be waiting for the device.
    pub(crate) fn try_provider(&self) -> Option<MutexGuard<'_, Box<dyn Provider>>> {
        match self.provider.try_lock() {
            Ok(provider) => Some(provider),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn function(&self) -> &Arc<Function> {
        &self.function
    }

    pub(crate) fn space(&self) -> &Arc<AddressSpace> {
        &self.function.space
    }

    pub(crate) fn interrupts(&self) -> &Interrupts {
        &self.function.interrupts
    }

    pub(crate) fn lifecycle(&self) -> &Arc<Lifecycle> {
        &self.lifecycle
    }

    pub(crate) fn window(&self) -> &Arc<Window> {
        &self.window
    }

    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The longest frame that it is set to receive, in bytes, without the frame check sequence.
    pub(crate) fn longest_frame(&self) -> u32 {
        self.longest_frame
    }

    pub(crate) fn name(&self) -> String {
        self.function.transport.name().to_owned()
    }

    /// A name for a new object of `kind`.
    pub(crate) fn new_object(&self, kind: &'static str) -> ObjectId {
        ObjectId {
            device: self.function.transport.id(),
            generation: self.generation,
            serial: self.tally.serial.fetch_add(1, Ordering::Relaxed) + 1,
            kind,
        }
    }

    /// Counts an object in.
    pub(crate) fn enter(self: &Arc<Self>) -> Entered {
        self.objects.fetch_add(1, Ordering::AcqRel);
        Entered(self.clone())
    }

    /// Looks whether the function was reset by somebody else, which has forgotten its queues then.
    /// Says nothing of one that is in somebody's hands now, or broken or closed.
    pub(crate) fn check_not_reset(&self) -> Result<(), NoAnswer> {
        if self.lifecycle.is_broken() {
            return Ok(());
        }
        // A family whose stop sequence resets the function plants the canary again before it lets go.
        let Some(_provider) = self.try_provider() else {
            return Ok(());
        };
        let function = &self.function;
        let checked = function.canary.check(&function.window);
        // The ladder, or a close, may have begun meanwhile.
        if self.lifecycle.is_broken() {
            return Ok(());
        }
        checked
    }

    /// A receive queue has its descriptors: what is counted from now on, it completes. For the
    /// progress watchdog, which may look for the first time long after that.
    pub(crate) fn began_to_receive(&self) {
        let mut provider = self.provider();
        let began = Receiving {
            starts: self.receiving().starts + 1,
            when: self.function.clock.now(),
            restarts: restarts(&**provider),
            counted: provider.statistics(),
            at: receive_positions(&mut **provider, self),
        };
        *self.receiving_now() = began;
    }

    /// What was counted when a receive queue was started last.
    pub(crate) fn receiving(&self) -> Receiving {
        self.receiving_now().clone()
    }

    fn receiving_now(&self) -> MutexGuard<'_, Receiving> {
        self.receiving
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets receive queue `number` have its part of what is spread, once it has its descriptors, or
    /// leaves it out, before it is stopped.
    pub(crate) fn spread_to(&self, number: u32, runs: bool) {
        self.change_spread(|spread, provider| {
            let bit = 1u64.checked_shl(number).unwrap_or(0);
            spread.running = match runs {
                true => spread.running | bit,
                false => spread.running & !bit,
            };
            spread.tell(provider);
        });
    }

    /// Spreads what it receives as `latest` says, which is asked when nobody else tells it: of two
    /// who change it at once, neither has the other's undone.
    pub(crate) fn tell_rss(&self, latest: impl FnOnce() -> Option<Settings>) {
        self.change_spread(|spread, provider| {
            let Some(settings) = latest().filter(|latest| spread.settings != *latest) else {
                return;
            };
            spread.settings = settings;
            provider.set_rss(&settings.rss);
            spread.tell(provider);
        });
    }

    /// Of a device that spreads what it receives, and is not broken: the next life is told anew.
    fn change_spread(&self, change: impl FnOnce(&mut Spread, &mut dyn Provider)) {
        // First: who has the lock may be waiting for a device that does not answer.
        if self.lifecycle.is_broken() {
            return;
        }
        let mut spread = self.spread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spread) = &mut *spread
            && !self.lifecycle.is_broken()
        {
            change(spread, &mut **self.provider());
            let running = spread.running;
            self.note(
                Control::Command,
                format_args!("RSS over receive queues {running:#x} (a bit each)"),
            );
        }
    }

    /// Objects that use it.
    pub(crate) fn objects(&self) -> usize {
        self.objects.load(Ordering::Acquire)
    }

    /// Refuses on a device that is broken or closed, and in a child of fork, whose memory must not come
    /// into the reach of its parent's device.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        if !self.is_ours() {
            return Err(DeviceError::Child {
                device: self.name(),
            });
        }
        if !self.lifecycle.is_broken() {
            return Ok(());
        }
        Err(match self.lifecycle.cause() {
            Some(cause) => DeviceError::Broken {
                device: self.name(),
                cause,
            },
            None => DeviceError::Closed {
                device: self.name(),
            },
        })
    }

    /// Turns bus mastering on: when the first queue's registers are written and read back (R10).
    pub(crate) fn master(&self) -> Result<(), DeviceError> {
        // First: the ladder has the gate while it waits for a config space that does not answer.
        self.check()?;
        let function = &self.function;
        let off = || {
            if let Err(error) = function.master_off() {
                log::error!("bus mastering could not be turned off again: {error}");
            }
        };
        let on = || {
            if !self.mastering.load(Ordering::Relaxed) {
                let config = ConfigSpace::new(&*function.transport);
                let on = function.command.bus_master_on(&config);
                match &on {
                    Ok(()) => self.note(Control::Config, format_args!("bus mastering reads on")),
                    Err(error) => {
                        self.note(Control::Config, format_args!("bus mastering: {error}"))
                    }
                }
                // It may have been turned on all the same.
                on.inspect_err(|_| off())?;
                self.mastering.store(true, Ordering::Relaxed);
            }
            Ok::<_, DeviceError>(())
        };
        if function.gate.open(&self.lifecycle, on, off)? {
            return Ok(());
        }
        self.check()
    }

    /// Breaks the device; its ladder goes on by itself.
    pub(crate) fn break_device(&self, cause: Cause) {
        if !self.lifecycle.is_broken() {
            self.note(Control::State, format_args!("to be broken: {cause}"));
        }
        self.lifecycle.mark_broken(cause);
    }

    /// Records a control event.
    pub(crate) fn note(&self, event: Control, what: fmt::Arguments<'_>) {
        self.function.flight.note(event, what);
    }

    /// Records that something was not mapped.
    pub(crate) fn note_not_mapped(&self, error: &dyn fmt::Display) {
        self.note(Control::Mapping, format_args!("not mapped: {error}"));
    }

    /// The verdict on a broken device: waits for it, but for the ladder's own thread (R5).
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        if !self.is_ours() {
            // Its ladder is on another thread, which a child does not have.
            return None;
        }
        if ladder::is_this_thread() {
            return self.lifecycle.verdict();
        }
        self.lifecycle.wait_verdict()
    }

    /// The ground on which a broken device's memory is released, if there is one (R6).
    pub(crate) fn revoked(&self) -> Option<Arc<ReleaseProof>> {
        self.verdict().and_then(|verdict| verdict.proof)
    }

    /// What the ladder did: waits for the verdict on a device that is breaking.
    pub(crate) fn wait_report(&self) -> Option<Arc<RevocationReport>> {
        self.verdict()?;
        self.ladder().report()
    }

    /// What the ladder did first, before any other attempt.
    pub(crate) fn first_report(&self) -> Option<RevocationReport> {
        let report = self.ladder().report()?;
        Some(match &report.first {
            Some(first) => (**first).clone(),
            None => (*report).clone(),
        })
    }

    /// What a later attempt did, in place of what the ladder's own report says.
    pub(crate) fn file_report(&self, report: &RevocationReport) {
        self.ladder().file(report);
    }

    /// The family's stop sequence for one queue.
    pub(crate) fn stop_queue(&self, way: Way, number: u32) -> Result<Stopped, NotStopped> {
        let mut provider = self.provider();
        let stopped = match way {
            Way::Receive => provider.stop_rx(number),
            Way::Send => provider.stop_tx(number),
        };
        drop(provider);
        let queue = way.queue(number);
        match &stopped {
            Ok(stopped) => self.note(Control::Command, format_args!("stop {queue}: {stopped}")),
            Err(why) => self.note(Control::Command, format_args!("stop {queue}: {why}")),
        }
        stopped
    }

    /// Gives one queue its ring and enables it.
    pub(crate) fn start_queue(
        &self,
        way: Way,
        number: u32,
        ring: &RingSpec,
    ) -> Result<Doorbell, CreateError> {
        let mut provider = self.provider();
        // Whoever had it may have waited for a device that is broken now.
        self.check()?;
        let started = match way {
            Way::Receive => provider.start_rx(number, ring),
            Way::Send => provider.start_tx(number, ring),
        };
        drop(provider);
        let (queue, entries, iova) = (way.queue(number), ring.entries, ring.iova);
        match &started {
            Ok(_) => self.note(
                Control::Command,
                format_args!("start {queue}: {entries} descriptors at {iova}"),
            ),
            Err(why) => self.note(Control::Command, format_args!("start {queue}: {why}")),
        }
        Ok(started?)
    }

    fn ladder(&self) -> MutexGuard<'_, Ladder> {
        self.ladder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the ladder's thread, after the verdict or the retirement.
    pub(crate) fn join_ladder(&self) {
        if !ladder::is_this_thread() {
            self.ladder().join();
        }
    }

    /// Reserves queue `number` for one object: two would stop each other, and ring for each other.
    pub(crate) fn claim(self: &Arc<Self>, way: Way, number: u32) -> Option<Claim> {
        let bit = 1u64.checked_shl(number)?;
        let before = self.claimed(way).fetch_or(bit, Ordering::AcqRel);
        (before & bit == 0).then(|| Claim {
            life: self.clone(),
            way,
            bit,
        })
    }

    fn claimed(&self, way: Way) -> &AtomicU64 {
        match way {
            Way::Receive => &self.receive_queues,
            Way::Send => &self.send_queues,
        }
    }

    /// The numbers of the queues that objects have.
    pub(crate) fn claims(&self, way: Way) -> impl Iterator<Item = u32> + use<> {
        let claimed = self.claimed(way).load(Ordering::Acquire);
        (0..u64::BITS).filter(move |number| claimed >> number & 1 != 0)
    }

    /// Adds the accounts of a queue that went.
    pub(crate) fn add_completions(&self, completions: Completions) {
        self.tally.add(completions);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if !self.is_ours() {
            // A child of fork: the device is its parent's, and so are the threads.
            return;
        }
        // A device that was never brought up, or is dropped without close, does not stay master. One
        // that was broken is the ladder's, or already that of a later life.
        if self.lifecycle.retire()
            && let Err(error) = self.function.master_off_for_good()
        {
            log::warn!("bus mastering could not be turned off at close: {error}");
        }
        self.join_ladder();
    }
}

impl fmt::Debug for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Life")
            .field("name", &self.function.transport.name())
            .field("generation", &self.generation.number())
            .finish_non_exhaustive()
    }
}

/// What a device had counted, and where its receive queues were, when one of them was started.
#[derive(Clone, Default, Debug)]
pub(crate) struct Receiving {
    /// How often one was.
    pub(crate) starts: u64,
    pub(crate) when: Duration,
    /// As [`restarts`] says.
    pub(crate) restarts: u32,
    pub(crate) counted: Statistics,
    /// Each queue that runs: its number and where it was.
    pub(crate) at: Vec<(u32, Position)>,
}

/// Where each receive queue of a life is.
pub(crate) fn receive_positions(provider: &mut dyn Provider, life: &Life) -> Vec<(u32, Position)> {
    let position = |queue| Some((queue, provider.rx_position(queue)?));
    life.claims(Way::Receive).filter_map(position).collect()
}

/// How often the device was reset under queues that went on.
pub(crate) fn restarts(provider: &dyn Provider) -> u32 {
    let counted = provider.restarts();
    counted.map_or(0, |counted| counted.load(Ordering::Acquire))
}

/// An object that counts as using the device.
#[derive(Debug)]
pub(crate) struct Entered(Arc<Life>);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.objects.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Which way a queue moves frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Receive,
    Send,
}

impl Way {
    /// Queue `number` of this direction.
    pub(crate) fn queue(self, number: u32) -> QueueName {
        match self {
            Self::Receive => QueueName::Receive(number),
            Self::Send => QueueName::Send(number),
        }
    }
}

/// A queue's number, taken until dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    life: Arc<Life>,
    way: Way,
    bit: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.life
            .claimed(self.way)
            .fetch_and(!self.bit, Ordering::AcqRel);
    }
}
