//! A device: one function, opened, brought up, closed.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use failstop_dma::ledger::{Ledger, Line, Totals};
use failstop_dma::proof::ObjectId;
use failstop_dma::space::{AddressSpace, SpaceError};
use failstop_pci::clock::{Clock, SystemClock};
use failstop_pci::config::{CommandError, CommandRegister, ConfigSpace, Identity};
use failstop_pci::id::Generation;
use failstop_pci::interrupts::Interrupts;
use failstop_pci::transport::{AccessError, IrqError, ResetFailed, Transport};
use failstop_pci::window::{Window, WindowError};
use failstop_queues::completions::Completions;
use failstop_queues::lifecycle::{Cause, Lifecycle};
use thiserror::Error;

use crate::families;
use crate::provider::{Config, Limits, Link, MacAddress, Provider, ProviderError, Statistics};

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
        "{device}: no driver for {vendor:04x}:{id:04x}; failstop drives Intel 82576, I350 and I210"
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
    /// It could not be reset.
    #[error(transparent)]
    Reset(#[from] ResetFailed),
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
    /// The device is broken.
    #[error("{device}: broken ({cause}); close it and open it again")]
    Broken {
        /// The function's name.
        device: String,
        /// Why.
        cause: Cause,
    },
}

/// MSI-X vectors that are routed: one, for the receive queue.
const VECTORS: u32 = 1;

/// What every object of a device shares. Objects keep it alive; it knows none of them.
pub struct Core {
    // Dropped first: provider and window let go of the BAR before the transport goes.
    provider: Mutex<Box<dyn Provider>>,
    interrupts: Interrupts,
    window: Arc<Window>,
    space: Arc<AddressSpace>,
    lifecycle: Arc<Lifecycle>,
    command: CommandRegister,
    mastering: Mutex<bool>,
    /// One bit for each queue that an object has.
    receive_queues: AtomicU64,
    send_queues: AtomicU64,
    serial: AtomicU64,
    objects: AtomicUsize,
    longest_frame: u32,
    totals: Mutex<Completions>,
    limits: Limits,
    generation: Generation,
    transport: Arc<dyn Transport>,
}

impl Core {
    pub(crate) fn provider(&self) -> MutexGuard<'_, Box<dyn Provider>> {
        self.provider.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    pub(crate) fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    pub(crate) fn lifecycle(&self) -> &Arc<Lifecycle> {
        &self.lifecycle
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The longest frame that it is set to receive, in bytes, without the frame check sequence.
    pub(crate) fn longest_frame(&self) -> u32 {
        self.longest_frame
    }

    pub(crate) fn name(&self) -> String {
        self.transport.name().to_owned()
    }

    /// A name for a new object of `kind`.
    pub(crate) fn new_object(&self, kind: &'static str) -> ObjectId {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        ObjectId {
            device: self.transport.id(),
            generation: self.generation,
            serial,
            kind,
        }
    }

    /// Counts an object in: the device is not closed under it.
    pub(crate) fn enter(self: &Arc<Self>) -> Entered {
        self.objects.fetch_add(1, Ordering::AcqRel);
        Entered(self.clone())
    }

    /// Refuses on a broken device.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        match self.lifecycle.cause() {
            Some(cause) => Err(DeviceError::Broken {
                device: self.name(),
                cause: cause.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Turns bus mastering on: when the first queue's registers are written and read back (R10).
    pub(crate) fn master(&self) -> Result<(), DeviceError> {
        let mut on = self
            .mastering
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        if !*on {
            self.command
                .bus_master_on(&ConfigSpace::new(&*self.transport))?;
            *on = true;
        }
        Ok(())
    }

    /// Turns bus mastering off and reads it back.
    pub(crate) fn unmaster(&self) -> Result<(), CommandError> {
        let mut on = self
            .mastering
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.command
            .bus_master_off(&ConfigSpace::new(&*self.transport))
            .map(drop)?;
        *on = false;
        Ok(())
    }

    /// Breaks the device: no new mapping, nothing posted, bus mastering off.
    pub(crate) fn break_device(&self, cause: Cause) {
        self.lifecycle.mark_broken(cause);
    }

    /// What breaking the device brings about, whoever broke it: also a burst that found an
    /// impossible descriptor (R8).
    fn fence(&self) {
        self.space.close();
        // No MSI will come: whoever sleeps is woken by us (C40).
        (0..VECTORS)
            .filter_map(|n| self.interrupts.vector(n))
            .for_each(|vector| vector.signal());
        if let Err(error) = self.unmaster() {
            log::error!("bus mastering could not be turned off: {error}");
        }
    }

    /// Reserves queue `number` for one object: two would stop each other, and ring for each other.
    pub(crate) fn claim(self: &Arc<Self>, way: Way, number: u32) -> Option<Claim> {
        let bit = 1u64.checked_shl(number)?;
        let before = self.claimed(way).fetch_or(bit, Ordering::AcqRel);
        (before & bit == 0).then(|| Claim {
            core: self.clone(),
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

    /// Adds the accounts of a queue that went.
    pub(crate) fn add_completions(&self, completions: Completions) {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner) += completions;
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // A device that was never brought up, or is dropped without close, does not stay master.
        if let Err(error) = self.unmaster() {
            log::warn!("bus mastering could not be turned off at close: {error}");
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.transport.name())
            .finish_non_exhaustive()
    }
}

/// An object that counts as using the device.
#[derive(Debug)]
pub(crate) struct Entered(pub(crate) Arc<Core>);

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

/// A queue's number, taken until dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    core: Arc<Core>,
    way: Way,
    bit: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.core
            .claimed(self.way)
            .fetch_and(!self.bit, Ordering::AcqRel);
    }
}

/// One opened function.
///
/// Objects made from it ([`crate::objects`], [`crate::port::Port`]) keep it open; [`Device::close`]
/// ends it and says what stayed behind. Dropped, it goes with its last object.
#[derive(Debug)]
pub struct Device {
    pub(crate) core: Arc<Core>,
}

/// What a closed device left behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CloseReport {
    /// The ledger's sums.
    pub totals: Totals,
    /// What is not released: quarantined, with the reason.
    pub left: Vec<Line>,
    /// Every request that was posted, and how it ended.
    pub completions: Completions,
    /// Why the device was broken, if it was.
    pub broken: Option<Cause>,
}

/// A device that objects still use.
#[derive(Debug, Error)]
#[error("{} object(s) still use the device; destroy them first", .objects)]
pub struct StillUsed {
    /// The device, open.
    pub device: Device,
    /// How many.
    pub objects: usize,
}

impl Device {
    /// Takes over the function behind `transport`, resets it and sets it up.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn open(transport: Arc<dyn Transport>, config: &Config) -> Result<Self, DeviceError> {
        Self::open_with_clock(transport, config, Arc::new(SystemClock::default()))
    }

    /// As [`Device::open`], with the clock that every wait uses.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn open_with_clock(
        transport: Arc<dyn Transport>,
        config: &Config,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, DeviceError> {
        let space = ConfigSpace::new(&*transport);
        let identity = identify(&space, transport.name())?;
        let unknown = || DeviceError::Unknown {
            device: transport.name().to_owned(),
            vendor: identity.vendor,
            id: identity.device,
        };
        let driver = families::find(identity.vendor, identity.device).ok_or_else(unknown)?;
        let command = CommandRegister::open(&space)?;
        // Whatever the last user left it doing ends here, before anything is mapped.
        let _off = command.bus_master_off(&space)?;
        transport.reset()?;
        command.memory_space_on(&space)?;
        let generation = Generation::FIRST;
        let window = Window::open(transport.clone(), generation, 0, driver.bar_bytes)?;
        let mut provider = driver.provider(window.clone(), clock.clone());
        let limits = provider.limits();
        provider.bring_up(config)?;
        let space = AddressSpace::new(transport.clone(), limits.address_mask, clock)?;
        let interrupts = Interrupts::route(transport.clone(), VECTORS)?;
        let core = Core {
            interrupts,
            provider: Mutex::new(provider),
            window,
            space,
            lifecycle: Arc::default(),
            command,
            mastering: Mutex::new(false),
            receive_queues: AtomicU64::new(0),
            send_queues: AtomicU64::new(0),
            longest_frame: config.longest_frame,
            serial: AtomicU64::new(1),
            objects: AtomicUsize::new(0),
            totals: Mutex::default(),
            limits,
            generation,
            transport,
        };
        let core = Arc::new(core);
        let weak = Arc::downgrade(&core);
        core.lifecycle.on_break(move || {
            if let Some(core) = weak.upgrade() {
                core.fence();
            }
        });
        Ok(Self { core })
    }

    /// The function's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.core.transport.name()
    }

    /// Its provider.
    #[must_use]
    pub fn provider(&self) -> &'static str {
        self.core.provider().name()
    }

    /// Its part.
    #[must_use]
    pub fn part(&self) -> &'static str {
        self.core.provider().part()
    }

    /// What carries it.
    #[must_use]
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.core.transport
    }

    /// Its station address.
    #[must_use]
    pub fn mac(&self) -> MacAddress {
        self.core.provider().mac()
    }

    /// What it can do.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.core.limits
    }

    /// The link as it is now.
    #[must_use]
    pub fn link(&self) -> Link {
        self.core.provider().link()
    }

    /// Waits until the link is up, at most `deadline`.
    #[must_use]
    pub fn wait_link(&self, deadline: Duration) -> Link {
        self.core.provider().wait_link(deadline)
    }

    /// What it counted.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.core.provider().statistics()
    }

    /// The accounts of what it can reach.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        self.core.space.ledger()
    }

    /// Why it is broken, if it is.
    #[must_use]
    pub fn broken(&self) -> Option<Cause> {
        self.core.lifecycle.cause().cloned()
    }

    /// The requests of queues that were destroyed, and how they ended.
    #[must_use]
    pub fn completions(&self) -> Completions {
        *self
            .core
            .totals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Objects that use it.
    #[must_use]
    pub fn objects(&self) -> usize {
        self.core.objects.load(Ordering::Acquire)
    }

    /// Ends the device: receiver, transmitter, interrupts and bus mastering off, then reset.
    ///
    /// # Errors
    ///
    /// [`StillUsed`] while objects use it: nothing has changed.
    pub fn close(self) -> Result<CloseReport, StillUsed> {
        let objects = self.objects();
        if objects > 0 {
            return Err(StillUsed {
                device: self,
                objects,
            });
        }
        let core = &self.core;
        core.provider().quiesce();
        if let Err(error) = core.unmaster() {
            // Not clean, whatever the ledger says: the report names it.
            core.break_device(Cause::StillMaster {
                what: error.to_string(),
            });
        }
        if let Err(error) = core.transport.reset() {
            log::warn!("{error} at close");
        }
        if let Err(error) = core.window.detach() {
            log::error!("a window could not be detached at close: {error}");
        }
        let left = core.space.ledger().lines();
        Ok(CloseReport {
            totals: core.space.ledger().totals(),
            left,
            completions: self.completions(),
            broken: self.broken(),
        })
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
    let header = space.read_all()?;
    Identity::parse(&header).ok_or(DeviceError::Gone {
        device: name.to_owned(),
        value,
    })
}
