//! A device: one function, opened, brought up, broken, recovered, closed.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use failstop_dma::ledger::Ledger;
use failstop_dma::space::AddressSpace;
use failstop_pci::clock::{Clock, SystemClock};
use failstop_pci::config::{CommandRegister, ConfigSpace, Identity};
use failstop_pci::fork::Process;
use failstop_pci::id::{DeviceId, Generation};
use failstop_pci::interrupts::Interrupts;
use failstop_pci::reset::Pending;
use failstop_pci::transport::{Kind, Transport};
use failstop_pci::window::Window;
use failstop_queues::completions::Completions;
use failstop_queues::gate::Gate;
use failstop_queues::lifecycle::Cause;

use crate::events::Events;
use crate::families::{self, Driver};
use crate::flight::{Control, Flight};
use crate::ladder::{Deadlines, Function, RevocationReport};
use crate::life::{Life, Tally};
use crate::provider::{Config, Limits, Link, MacAddress, Statistics};
use crate::rss::{RssError, Settings};
use crate::watch::{self, Removal, Watch};

mod closing;
mod error;
mod glance;
mod opening;
mod recovered;
mod recovery;

pub use closing::CloseReport;
pub(crate) use closing::{end_life, out_of_reach};
pub use error::DeviceError;
use glance::Accounts;
pub use glance::{Glance, Seen};
use opening::{Bound, Reset};
pub use recovered::{RecoveryReport, RecoveryStep, RecoveryTime};
pub use recovery::RecoverError;

/// Between two looks at the link.
const LINK_LOOK: Duration = Duration::from_millis(1);
/// MSI-X vectors that are routed without RSS: one, for receive queue 0.
const VECTORS: u32 = 1;

/// One opened function.
///
/// Objects made from it ([`crate::objects`], [`crate::port::Port`]) keep it open; [`Device::close`]
/// ends it and says what stayed behind. Dropped, it goes with its last object.
#[derive(Debug)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
}

/// A device, as its handle, its ports and its supervisor share it.
#[derive(Debug)]
pub(crate) struct Inner {
    /// The life that it lives now. Held for a look and an exchange only.
    life: Mutex<Arc<Life>>,
    /// Its number, for a child of fork, which takes no lock.
    generation: AtomicU64,
    /// Held by whoever begins or ends a life.
    changing: Mutex<()>,
    /// Why no life begins any more.
    given_up: OnceLock<Cause>,
    driver: Driver,
    /// The same in each life.
    about: About,
    config: Config,
    /// How received frames are spread, now and in its next life. Held for a look or a change only.
    rss: Mutex<Option<Settings>>,
    tally: Arc<Tally>,
    /// For who looks at it without keeping it open.
    accounts: Arc<Accounts>,
    /// Whose threads serve it.
    process: Process,
    function: Arc<Function>,
    /// The last one that began a life.
    recovery: Mutex<Option<RecoveryReport>>,
    /// The last attempt at one failed: a function that was stopped may have gone since.
    unrecovered: AtomicBool,
}

/// What is said of it without a lock.
#[derive(Debug)]
struct About {
    provider: &'static str,
    part: &'static str,
    limits: Limits,
    /// Bytes.
    longest_frame: u32,
    /// As it was at open.
    mac: MacAddress,
}

/// How a device is opened.
#[derive(Debug)]
pub struct Options {
    /// What every wait is measured by.
    pub clock: Arc<dyn Clock>,
    /// How long the ladder's steps may take.
    pub deadlines: Deadlines,
    /// A driver of one's own, whatever the function's ids say.
    pub driver: Option<Driver>,
    /// What is done when the function is asked back.
    pub removal: Removal,
    /// How often it is looked whether the function was reset by somebody else (C18): one register is
    /// read, off the data path. None never looks.
    pub look: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock::default()),
            deadlines: Deadlines::default(),
            driver: None,
            removal: Removal::default(),
            look: Some(Duration::from_secs(1)),
        }
    }
}

impl Device {
    /// Takes over the function behind `transport`, resets it and sets it up.
    ///
    /// The reset is proven, as the ladder proves one: by the kernel or the server, or by the
    /// family's own where those have none that can be believed.
    ///
    /// The kernel waits up to a minute for a function that does not come back from a reset, and a
    /// signal does not end that. Each reset has [`Deadlines::reset`]: past it the call is left behind
    /// with a thread of its own, which keeps the function, and whatever `transport` has open, until
    /// the call returns. Then it may be opened again; no memory was mapped for it. Behind the kernel,
    /// the other calls of an open have no deadline of ours; nor has the reset that the kernel itself
    /// makes when a function's descriptor is opened ([`open::transport`](crate::open::transport)).
    ///
    /// # Errors
    ///
    /// [`DeviceError`]; [`DeviceError::Reset`] for a reset that is late, and
    /// [`DeviceError::InUse`] while it is outstanding.
    pub fn open(transport: Arc<dyn Transport>, config: &Config) -> Result<Self, DeviceError> {
        Self::open_with(transport, config, Options::default())
    }

    /// As [`Device::open`], with the clock that every wait uses, deadlines, or a driver of one's own.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn open_with(
        transport: Arc<dyn Transport>,
        config: &Config,
        options: Options,
    ) -> Result<Self, DeviceError> {
        let claim = Arc::new(Claimed::new(&*transport)?);
        let flight = Flight::new();
        let accessed = transport.clone();
        let bound = || Bound::new(&*accessed, options.deadlines.bring_up);
        let bounded = bound();
        let space = ConfigSpace::new(&*transport);
        let identity = identify(&space, transport.name())?;
        let known = || families::find(identity.vendor, identity.device);
        let driver = options
            .driver
            .or_else(known)
            .ok_or_else(|| DeviceError::Unknown {
                device: transport.name().to_owned(),
                vendor: identity.vendor,
                id: identity.device,
            })?;
        let command = CommandRegister::open(&space)?;
        // Whatever the last user left it doing ends here, before anything is mapped.
        let _off = command.bus_master_off(&space)?;
        command.memory_space_on(&space)?;
        let pending = Pending::find(&space)?;
        let clock = options.clock;
        // The ladder's own view of the registers, which no detach replaces.
        let own = Window::open(transport.clone(), Generation::LADDER, 0, driver.bar_bytes)?;
        let window = Window::open(transport.clone(), Generation::FIRST, 0, driver.bar_bytes)?;
        let mut provider = driver.provider(window.clone(), clock.clone());
        let (limits, canary) = (provider.limits(), provider.canary());
        let rss = config.rss.map(|rss| Settings {
            rss,
            over: limits.queues,
        });
        if let Some(Settings { rss, .. }) = &rss {
            if !provider.has_rss() {
                return Err(DeviceError::Rss(RssError::Unsupported {
                    device: transport.name().to_owned(),
                    part: provider.part(),
                }));
            }
            rss.check(transport.name(), limits.queues)?;
        }
        let vectors = rss.map_or(VECTORS, |_| limits.queues);
        let reset = Reset {
            transport: &transport,
            claim: &claim,
            command: &command,
            window: &own,
            clock: &*clock,
            deadline: options.deadlines.reset,
            canary,
            software: provider.software_reset(),
            flight: &flight,
        };
        let _stopped = reset.prove()?;
        // The reset has a deadline of its own.
        drop(bounded);
        let _bounded = bound();
        let brought_up = provider.bring_up(config);
        if window.is_detached() {
            return Err(DeviceError::Short {
                device: transport.name().to_owned(),
                source: brought_up.err(),
            });
        }
        brought_up?;
        canary.plant(&own).map_err(|source| DeviceError::Canary {
            device: transport.name().to_owned(),
            source,
        })?;
        let no_descriptor = |source| DeviceError::NoThread {
            device: transport.name().to_owned(),
            source,
        };
        let function = Function {
            command,
            gate: Gate::default(),
            window: own,
            space: AddressSpace::new(transport.clone(), limits.address_mask, clock.clone())?,
            interrupts: Interrupts::route(transport.clone(), vectors)?,
            clock,
            pending,
            detached: AtomicBool::new(false),
            canary,
            software_reset: provider.software_reset(),
            deadlines: options.deadlines,
            events: Events::new().map_err(no_descriptor)?,
            watch: OnceLock::new(),
            flight,
            outstanding: AtomicUsize::new(0),
            transport,
        };
        let (function, tally) = (Arc::new(function), Arc::new(Tally::new(claim)));
        let about = About {
            provider: provider.name(),
            part: provider.part(),
            limits,
            longest_frame: provider.longest_received(),
            mac: provider.mac(),
        };
        let life = Life::new(
            function.clone(),
            tally.clone(),
            Generation::FIRST,
            window,
            provider,
            rss,
        )?;
        let accounts = Accounts::new(&function, &tally, &life);
        let inner = Arc::new(Inner {
            life: Mutex::new(life.clone()),
            generation: AtomicU64::new(Generation::FIRST.number()),
            changing: Mutex::new(()),
            given_up: OnceLock::new(),
            recovery: Mutex::default(),
            unrecovered: AtomicBool::new(false),
            driver,
            about,
            config: *config,
            rss: Mutex::new(rss),
            tally,
            accounts: Arc::new(accounts),
            process: Process::this(),
            function,
        });
        life.note(Control::State, format_args!("opened, generation 1"));
        let watch = Watch::new(Arc::downgrade(&inner), &life, options.removal, options.look);
        let watch = watch.map_err(|source| DeviceError::NoThread {
            device: life.name(),
            source,
        })?;
        // Nobody else sets it.
        let _ = inner.function.watch.set(watch);
        Ok(Self { inner })
    }

    pub(crate) fn life(&self) -> Arc<Life> {
        self.inner.life()
    }

    /// The function's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.function.transport.name()
    }

    /// Its provider.
    #[must_use]
    pub fn provider(&self) -> &'static str {
        self.inner.about.provider
    }

    /// Its part.
    #[must_use]
    pub fn part(&self) -> &'static str {
        self.inner.about.part
    }

    /// What carries it.
    #[must_use]
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.inner.function.transport
    }

    /// Its station address; in a child of fork, as it was at open.
    #[must_use]
    pub fn mac(&self) -> MacAddress {
        // First, here and below: a lock may be held by a thread that only the parent has.
        if !self.inner.is_ours() {
            return self.inner.about.mac;
        }
        self.life().provider().mac()
    }

    /// What it can do.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.inner.about.limits
    }

    /// The least size of frames that its receive queues take, in bytes: room for the longest frame
    /// that may come.
    #[must_use]
    pub fn least_frame_size(&self) -> u32 {
        let about = &self.inner.about;
        about
            .longest_frame
            .next_multiple_of(about.limits.buffer_step)
    }

    /// The link as it is now; down in a child of fork, which has no device (R12).
    #[must_use]
    pub fn link(&self) -> Link {
        if !self.inner.is_ours() {
            return Link {
                up: false,
                speed: 0,
                full_duplex: false,
            };
        }
        self.life().provider().link()
    }

    /// Waits until the link is up, at most `deadline`; not in a child of fork.
    #[must_use]
    pub fn wait_link(&self, deadline: Duration) -> Link {
        if !self.inner.is_ours() {
            return self.link();
        }
        let clock = &self.inner.function.clock;
        let end = clock.now().saturating_add(deadline);
        loop {
            // The provider is let go of in between: others stop queues meanwhile.
            let link = self.link();
            if link.up || clock.now() >= end || self.life().lifecycle().is_broken() {
                return link;
            }
            clock.sleep(LINK_LOOK);
        }
    }

    /// What it counted since it was opened or last recovered; nothing in a child of fork.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        if !self.inner.is_ours() {
            return Statistics::default();
        }
        self.life().provider().statistics()
    }

    /// The accounts of what it can reach.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        self.inner.function.space.ledger()
    }

    /// Which of its lives it lives: the first until it is recovered. In a child of fork, which it
    /// lived then.
    #[must_use]
    pub fn generation(&self) -> Generation {
        let number = self.inner.generation.load(Ordering::Acquire);
        Generation::numbered(number).unwrap_or(Generation::FIRST)
    }

    /// Why it is broken, if it is; none in a child of fork, which has no device (R12).
    #[must_use]
    pub fn broken(&self) -> Option<Cause> {
        if !self.inner.process.is_this() {
            return None;
        }
        self.life().lifecycle().cause()
    }

    /// The requests of queues that were destroyed, and how they ended; none in a child of fork.
    #[must_use]
    pub fn completions(&self) -> Completions {
        if !self.inner.is_ours() {
            return Completions::default();
        }
        self.inner.tally.completions()
    }

    /// Objects that use it in its present life; none in a child of fork.
    #[must_use]
    pub fn objects(&self) -> usize {
        if !self.inner.is_ours() {
            return 0;
        }
        self.life().objects()
    }

    /// What happened to it, in order.
    #[must_use]
    pub fn events(&self) -> &Arc<Events> {
        &self.inner.function.events
    }

    /// Breaks it, from any thread: its ladder runs, and nothing is posted any more (R11). Does not
    /// wait. False when it was broken before, and in a child of fork, which has no device (R12).
    pub fn break_now(&self, cause: Cause) -> bool {
        self.inner.process.is_this() && self.life().lifecycle().mark_broken(cause)
    }

    /// What the ladder did to its present life: waits for the verdict of a device that is breaking;
    /// none of one that is not broken.
    #[must_use]
    pub fn revocation(&self) -> Option<RevocationReport> {
        if !self.inner.process.is_this() {
            return None;
        }
        self.life().wait_report().map(|report| (*report).clone())
    }

    /// What the last recovery did, whoever made it; none of a device in its first life, and in a
    /// child of fork.
    #[must_use]
    pub fn recovery(&self) -> Option<RecoveryReport> {
        if !self.inner.is_ours() {
            return None;
        }
        self.inner
            .recovery
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Releases what is in quarantine, if by now there is a ground: the server, which this process
    /// started ([`Options::peer`](failstop_pci::transport::vfio_user::Options::peer)), has ended. How
    /// many bytes that were. [`Device::close`] and a supervisor do so, too.
    #[must_use = "it says what was released"]
    pub fn reclaim(&self) -> u64 {
        self.inner.reclaim()
    }

    /// Ends the device, whoever still holds objects of it: queues stopped, receiver, transmitter,
    /// interrupts and bus mastering off, then reset (R5).
    ///
    /// Objects that are still held become shells: their memory leaves the device's reach, their
    /// pages stay until they are dropped and count as held.
    ///
    /// Where the kernel's VFIO drives it and memory is left in quarantine, or the function could not
    /// be stopped, or the last attempt at its recovery failed, its descriptors are closed as by [`give_back`](Self::give_back), with that deadline:
    /// what is still mapped goes with the domain (R3), and the kernel, which resets a function with
    /// its last descriptor and waits minutes for one that is gone, is not waited for.
    #[must_use = "it says what stayed behind"]
    pub fn close(self) -> CloseReport {
        let report = self.inner.close(Cause::Closed);
        if !self.inner.process.is_this() {
            return report;
        }
        let kernel = self.inner.function().transport.kind() != Kind::VfioUser;
        let verdict = self.inner.life().lifecycle().verdict();
        let stopped = verdict.is_none_or(|verdict| verdict.restartable)
            && !self.inner.unrecovered.load(Ordering::Acquire);
        if !kernel || (stopped && report.totals.quarantined_bytes == 0) {
            return report;
        }
        watch::let_go_for_good(&self.inner);
        self.inner.close_report()
    }

    /// As [`Device::close`], for a function that is asked back: closes every descriptor of it, too,
    /// also while objects are held, so that an unbind or a removal that waits goes on (C15).
    ///
    /// The orderly close has [`Deadlines::close`]; past it the ladder ends the device. The kernel
    /// resets the function when it is let go of; a call that it holds up longer than
    /// [`Deadlines::reset`] is left behind, and the function stays with it until that call returns.
    #[must_use = "it says what stayed behind"]
    pub fn give_back(self) -> CloseReport {
        if !self.inner.process.is_this() {
            return self.inner.close_report();
        }
        watch::give_back(Some(self.inner.clone()), &self.life());
        self.inner.close_report()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A child of fork: what these would do to end the device is for its parent to do, and
            // the locks that they would take may be held by threads that only the parent has.
            std::mem::forget(self.function.clone());
            let life = self.life.get_mut();
            std::mem::forget(life.unwrap_or_else(PoisonError::into_inner).clone());
        }
    }
}

impl Inner {
    pub(crate) fn life(&self) -> Arc<Life> {
        self.life
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn function(&self) -> &Arc<Function> {
        &self.function
    }

    /// How received frames are spread; for a look or a change.
    pub(crate) fn rss(&self) -> MutexGuard<'_, Option<Settings>> {
        self.rss.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the present life how received frames are spread.
    pub(crate) fn tell_rss(&self) {
        self.life().tell_rss(|| *self.rss());
    }

    /// Whether this process drives it: a child of fork does not.
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_this()
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An opened function has one device at a time: a second one would reset it under the first, and
/// their objects' names and proofs would be the same.
#[derive(Debug)]
pub(crate) struct Claimed(DeviceId);

impl Claimed {
    fn all() -> MutexGuard<'static, BTreeSet<DeviceId>> {
        static ALL: Mutex<BTreeSet<DeviceId>> = Mutex::new(BTreeSet::new());
        ALL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new(transport: &dyn Transport) -> Result<Self, DeviceError> {
        if Self::all().insert(transport.id()) {
            return Ok(Self(transport.id()));
        }
        Err(DeviceError::InUse {
            device: transport.name().to_owned(),
        })
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        Self::all().remove(&self.0);
    }
}

/// What the function is, if it is there.
fn identify(space: &ConfigSpace<'_>, name: &str) -> Result<Identity, DeviceError> {
    let value = space.read_u32(0)?;
    // Kernel VFIO answers ids of a function that is gone from its own copy; the command register
    // comes from the function.
    let command = space.command()?.bits();
    if matches!(value, 0 | u32::MAX) || command & 0xf800 != 0 {
        let value = if matches!(value, 0 | u32::MAX) {
            value
        } else {
            command.into()
        };
        return Err(DeviceError::Gone {
            device: name.to_owned(),
            value,
        });
    }
    let header = space.read_header()?;
    Identity::parse(&header).ok_or(DeviceError::Gone {
        device: name.to_owned(),
        value,
    })
}
