//! What watches a run: it recovers a device that breaks, keeps what the ladder said of it, and says
//! when nobody will try any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use failstop::device::Device;
use failstop::events::DeviceEvent;
use failstop::ladder::RevocationReport;
use failstop::supervisor::{Duty, Policy};

/// How often it looks whether the run is over, and at the link.
const LOOK: Duration = Duration::from_millis(20);
/// A hang is seen within a second; attempts at a recovery go on for 1.5 s.
const POLICY: Policy = Policy {
    attempts: 5,
    within: Duration::from_secs(600),
    backoff: Duration::from_millis(100),
    longest_backoff: Duration::from_secs(1),
    watchdog: Some(Duration::from_secs(1)),
    interval: Duration::from_millis(100),
};

/// What is known of a run's device, between who watches it and who uses it.
#[derive(Default)]
pub(crate) struct Watched {
    over: AtomicBool,
    given_up: AtomicBool,
    revocation: Mutex<Option<RevocationReport>>,
}

impl Watched {
    /// Watches the device until [`Watched::end`], or until it is closed or asked back.
    pub(crate) fn watch(&self, device: &Device) {
        let mut duty = Duty::new(device, POLICY);
        while !self.over.load(Ordering::Acquire) {
            // Before an attempt at a recovery begins another life, of which there is none.
            self.note(device);
            let Some(pause) = duty.look() else { break };
            let event = device.events().next(pause.min(LOOK));
            if let Ok(Some(DeviceEvent::GivenUp { .. })) = event {
                self.given_up.store(true, Ordering::Release);
            }
        }
        self.given_up.store(true, Ordering::Release);
    }

    /// Whether nobody will recover a broken device any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Nobody watches, from the start.
    pub(crate) fn nobody(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Keeps what the ladder says of a broken device; waits for its verdict.
    pub(crate) fn note(&self, device: &Device) {
        if let Some(report) = device.revocation() {
            *self.revocation() = Some(report);
        }
    }

    /// What the ladder said last.
    pub(crate) fn take(&self) -> Option<RevocationReport> {
        self.revocation().take()
    }

    fn revocation(&self) -> std::sync::MutexGuard<'_, Option<RevocationReport>> {
        self.revocation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the attempts at a device that is broken, unless the run is to stop; whether it
    /// lives.
    pub(crate) fn wait(&self, device: &Device, stop: &AtomicBool) -> bool {
        while device.broken().is_some() {
            if self.is_given_up() || stop.load(Ordering::Acquire) {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// Waits for the attempts at a device that is broken, and ends the watch.
    pub(crate) fn end(&self, device: &Device, stop: &AtomicBool) {
        self.wait(device, stop);
        self.over.store(true, Ordering::Release);
    }
}
