//! Frames for a cell: some that must come back as they were, some that need not, and frames at home
//! that nobody may write.

use std::thread;
use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::dma::region::Pool;
use failstop::port::Port;

use crate::fixture::{Outcome, ensure, self_addressed};

/// Frames under way at once: less than any buffer of the device holds.
const WINDOW: u64 = 16;
/// Bytes of each.
const LEN: usize = 90;
/// How long frames may take, where nothing is wrong.
const PATIENCE: Duration = Duration::from_secs(10);
/// What frames at home are filled with.
const POISON: u8 = 0xA5;

/// What became of frames.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// Taken by the send queue.
    pub sent: u64,
    /// That came back.
    pub received: u64,
    /// Of these, with bytes that nobody sent.
    pub wrong: u64,
}

/// Sends what there is room for, and takes what is there.
fn turn(port: &mut Port, bytes: &[u8], moved: &mut Traffic, more: bool) {
    if more
        && moved.sent < moved.received + WINDOW
        && let Some(mut frame) = port.take_frame()
        && frame.fill(bytes).is_ok()
    {
        moved.sent += port.tx_burst(std::slice::from_mut(&mut frame)) as u64;
    }
    let Some(mut frames) = port.take_frames(4) else {
        return;
    };
    let received = port.rx_burst(&mut frames);
    let mut copy = vec![0; bytes.len()];
    for frame in &frames[..received] {
        moved.received += 1;
        let copied = frame.copy_to(&mut copy);
        if frame.len() as usize != bytes.len() || copied != bytes.len() || copy != bytes {
            moved.wrong += 1;
        }
    }
}

/// Frames that all have to come back.
///
/// # Errors
///
/// When one does not, or comes back as another.
pub fn good(port: &mut Port, device: &Device) -> Outcome {
    let bytes = self_addressed(device, LEN, 1);
    // What a break left under way comes first.
    let mut before = Traffic::default();
    for _ in 0..64 {
        turn(port, &bytes, &mut before, false);
    }
    let mut moved = Traffic::default();
    let end = Instant::now() + PATIENCE;
    while moved.received < 32 {
        let more = moved.sent < 32;
        turn(port, &bytes, &mut moved, more);
        ensure(Instant::now() < end, || {
            format!(
                "frames do not come back: {moved:?}, broken: {:?}",
                device.broken()
            )
        })?;
        thread::yield_now();
    }
    ensure(moved.wrong == 0, || {
        format!("frames come back as others: {moved:?}")
    })
}

/// Frames and sleeps for a while, or until the device is broken, whatever becomes of them; `pause`
/// lies between two turns.
pub fn bad(port: &mut Port, device: &Device, time: Duration, pause: Duration) -> Traffic {
    let bytes = self_addressed(device, LEN, 1);
    let mut moved = Traffic::default();
    let end = Instant::now() + time;
    let mut turns = 0u32;
    while Instant::now() < end && device.broken().is_none() {
        turn(port, &bytes, &mut moved, true);
        turns += 1;
        if !pause.is_zero() {
            thread::sleep(pause);
        }
        // With a window full of what does not come back, the next is sent all the same.
        if turns.is_multiple_of(64) {
            moved.received = moved.received.max(moved.sent.saturating_sub(WINDOW / 2));
            // A sleep that is interrupted is as good.
            let _ = port.rq().wait(Some(Duration::from_millis(1)));
        }
    }
    moved
}

/// Bursts until the port was carried to a new life once more, `time` at most.
pub fn carry(port: &mut Port, time: Duration) {
    let end = Instant::now() + time;
    let before = port.carried().times;
    let Some(mut frames) = port.take_frames(4) else {
        return;
    };
    loop {
        port.rx_burst(&mut frames);
        port.tx_burst(&mut []);
        if port.carried().times > before || Instant::now() >= end {
            return;
        }
        thread::yield_now();
    }
}

/// Takes every frame that is at home, poisons it, and looks at it for a while: how many were written,
/// if any was (C11).
pub fn watched(pool: &mut Pool, time: Duration) -> Option<usize> {
    let mut frames = Vec::new();
    while let Some(mut one) = pool.take_many(1) {
        frames.append(&mut one);
    }
    let mut length = 0;
    for frame in &mut frames {
        let poison = vec![POISON; frame.capacity() as usize];
        length = poison.len();
        // It is as long as the frame.
        let _ = frame.fill(&poison);
    }
    thread::sleep(time);
    let mut bytes = vec![0; length];
    let written = frames.iter().filter(|frame| {
        let copied = frame.copy_to(&mut bytes);
        bytes[..copied].iter().any(|byte| *byte != POISON)
    });
    Some(written.count()).filter(|count| *count > 0)
}
