//! A break in the middle of a run, and the recovery from it, by a thread of its own: whoever moves
//! frames goes on calling bursts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::{Device, RecoverError, RecoveryReport};
use failstop::ladder::RevocationReport;
use failstop::pci::id::Generation;
use failstop::queues::lifecycle::Cause;

/// How often the thread looks whether the run ended before the break.
const LOOK: Duration = Duration::from_millis(20);

/// What came of a break.
pub(crate) struct Broken {
    /// What the ladder did.
    pub(crate) revocation: Option<RevocationReport>,
    /// The new life, or why there is none.
    pub(crate) recovered: Result<Generation, RecoverError>,
    /// What the recovery did, if there was one.
    pub(crate) recovery: Option<RecoveryReport>,
    /// From the break to the new life.
    pub(crate) gap: Duration,
}

/// Breaks the device `after` some time and recovers it; nothing when the run ended before.
pub(crate) fn break_and_recover(
    device: &Device,
    after: Duration,
    ended: &AtomicBool,
) -> Option<Broken> {
    let start = Instant::now();
    loop {
        let left = after.saturating_sub(start.elapsed());
        if left.is_zero() {
            break;
        }
        if ended.load(Ordering::Relaxed) {
            return None;
        }
        thread::sleep(left.min(LOOK));
    }
    let broken = Instant::now();
    // When something else broke it first, there is as much to recover from.
    device.break_now(Cause::User);
    let revocation = device.revocation();
    let recovered = match device.recover() {
        // Something else recovered it first.
        Err(RecoverError::NotBroken { .. }) => Ok(device.generation()),
        other => other,
    };
    let recovery = recovered.as_ref().ok().and_then(|_| device.recovery());
    Some(Broken {
        revocation,
        recovered,
        recovery,
        gap: broken.elapsed(),
    })
}
