//! The frames of a run: sent, received and checked, across a break of the device if there is one.

use std::io::{self, IsTerminal};
use std::ops::Add;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use failstop::device::Device;
use failstop::dma::frame::Frame;
use failstop::port::{Port, PortConfig};
use indicatif::{ProgressBar, ProgressStyle};

use crate::breaking::{Broken, break_and_recover};
use crate::run::RunArgs;
use crate::supervised::Watched;
use crate::traffic::{self, Generator};

/// Frames of one burst.
const BURST: usize = 32;
/// How long the end of a run waits for frames that are still on their way.
///
/// Longer than the watchdog takes to see that they hang.
const DRAIN: Duration = Duration::from_secs(2);
/// How long it takes at most, whatever the device goes on reporting.
const DRAIN_AT_MOST: Duration = Duration::from_secs(5);
/// How long after a recovery a port is waited for that is not carried yet: with many of them, each
/// sets its queues up in turn.
const CARRY_AT_MOST: Duration = Duration::from_secs(10);
/// How often the rates that are shown change.
const SHOW: Duration = Duration::from_millis(250);

/// The frames of a run, or of one of its ports.
#[derive(Clone, Copy, Default)]
pub(crate) struct Moved {
    /// Frames that the device was given to send.
    pub(crate) sent: u64,
    /// Frames that came back.
    pub(crate) received: u64,
    /// Bytes of them.
    pub(crate) received_bytes: u64,
    /// Frames that were on their way when the device was broken, and never came.
    pub(crate) lost: u64,
    /// Frames that were not what was sent.
    pub(crate) errors: u64,
    /// Frames that came back after the port was carried to a new life of the device.
    pub(crate) received_after: u64,
}

impl Add for Moved {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            sent: self.sent + more.sent,
            received: self.received + more.received,
            received_bytes: self.received_bytes + more.received_bytes,
            lost: self.lost + more.lost,
            errors: self.errors + more.errors,
            received_after: self.received_after + more.received_after,
        }
    }
}

/// Sends and receives until time is up, then collects what is on its way: each port on a thread of
/// its own, with a flow of its own, which comes back to it. A break, if one is asked for, is a gap
/// that does not count as time. Returns what each port moved.
pub(crate) fn move_frames(
    options: &RunArgs,
    device: &Device,
    ports: &mut [Port],
    config: &PortConfig,
    (stop, watched): (&AtomicBool, &Watched),
) -> anyhow::Result<(Vec<Moved>, Option<Broken>)> {
    let show = &Show::new(options.is_watched() && io::stderr().is_terminal());
    let mut flows = ports
        .iter_mut()
        .map(|port| Flow::new(options, device, port, config, show))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let ended = &AtomicBool::new(false);
    thread::scope(|scope| {
        let breaking = options
            .break_after()
            .map(|after| scope.spawn(move || break_and_recover(device, after, ended)));
        thread::scope(|scope| {
            for (flow, port) in flows.iter_mut().zip(ports) {
                let breaking = breaking.as_ref();
                scope.spawn(move || flow.run(options, device, port, breaking, (stop, watched)));
            }
        });
        ended.store(true, Ordering::Relaxed);
        let broken = breaking.and_then(|thread| thread.join().ok().flatten());
        Ok((flows.into_iter().map(|flow| flow.moved).collect(), broken))
    })
}

type Breaking<'scope> = ScopedJoinHandle<'scope, Option<Broken>>;

/// Frames of one port under way.
struct Flow<'a> {
    generator: Generator,
    outgoing: Vec<Frame>,
    incoming: Vec<Frame>,
    /// Frames that may be under way at once: each has a descriptor that waits for it, so that none
    /// is dropped.
    window: u64,
    /// Frames that are not waited for any more: they were under way at a break.
    given_up: u64,
    carried: u64,
    moved: Moved,
    show: &'a Show,
}

impl<'a> Flow<'a> {
    fn new(
        options: &RunArgs,
        device: &Device,
        port: &mut Port,
        config: &PortConfig,
        show: &'a Show,
    ) -> anyhow::Result<Self> {
        let flow = match device.rss() {
            Some(rss) => Some(
                traffic::Flow::to_queue(&rss, port.number(), options.queues())
                    .context("no flow leads to the queue")?,
            ),
            None => None,
        };
        let frames = port.take_frames(BURST);
        Ok(Self {
            generator: Generator::new(device.mac(), options.size(), flow),
            outgoing: frames.context("no frames to send")?,
            incoming: port
                .take_frames(BURST)
                .context("no frames to receive into")?,
            window: u64::from(config.rx_entries) / 2,
            given_up: 0,
            carried: port.carried().times,
            moved: Moved::default(),
            show,
        })
    }

    fn run(
        &mut self,
        options: &RunArgs,
        device: &Device,
        port: &mut Port,
        breaking: Option<&Breaking<'_>>,
        (stop, watched): (&AtomicBool, &Watched),
    ) {
        let (first, carried) = (device.generation().number(), self.carried);
        let mut end = Instant::now() + options.time();
        let mut looked = Instant::now();
        let mut shown = (0, 0);
        let mut sending = true;
        let mut over = breaking.is_none();
        let mut idle_since = None;
        let mut stopped = None;
        loop {
            let now = Instant::now();
            if !over && breaking.is_some_and(ScopedJoinHandle::is_finished) {
                over = true;
                end = now + options.time_after_break();
            }
            let broken = device.broken().is_some();
            // In a gap that is going to end, bursts are called as always.
            let gap = broken && !(over && watched.is_given_up());
            // The gap of a port ends when it is carried: only then its time goes on.
            let due = over && breaking.is_some() && self.carried == carried;
            let time = now < end || due && now < end + CARRY_AT_MOST;
            sending = sending && (gap || !broken && time) && !stop.load(Ordering::Relaxed);
            if !sending && now - *stopped.get_or_insert(now) > DRAIN_AT_MOST {
                break;
            }
            let received = self.turn(port, sending);
            if due && self.carried != carried {
                end = Instant::now() + options.time_after_break();
            }
            if received > 0 {
                idle_since = None;
            } else if !sending {
                let since = *idle_since.get_or_insert(now);
                if self.under_way() == 0 || now - since > DRAIN {
                    break;
                }
            } else {
                // The other side of the loop may need this core.
                thread::yield_now();
            }
            if now - looked > SHOW {
                looked = now;
                let moved = (self.moved.received, self.moved.sent);
                self.show.add(moved.0 - shown.0, moved.1 - shown.1);
                shown = moved;
                self.show.rates();
            }
        }
        self.moved.errors = self.generator.errors;
        // What was under way at a break and never came; of what was sent after it nothing may be missing.
        let missing = self.moved.sent.saturating_sub(self.moved.received);
        let lives = device.generation().number() - first;
        let in_the_gap = device.broken().is_some() || lives != self.carried - carried;
        self.moved.lost = if in_the_gap {
            missing
        } else {
            missing.min(self.given_up)
        };
    }

    /// Frames that are expected to come. A device can report more than it was sent.
    fn under_way(&self) -> u64 {
        let sent = self.moved.sent.saturating_sub(self.given_up);
        sent.saturating_sub(self.moved.received)
    }

    /// A burst each way. Returns how many frames came.
    fn turn(&mut self, port: &mut Port, sending: bool) -> usize {
        if sending && self.under_way() + BURST as u64 <= self.window {
            let sent = self.send(port) as u64;
            // What went just now went after the break.
            self.look_for_gap(port);
            self.moved.sent += sent;
        }
        let received = port.rx_burst(&mut self.incoming);
        let lost = self.generator.lost;
        for frame in &self.incoming[..received] {
            self.generator.check(frame);
            self.moved.received_bytes += u64::from(frame.len());
        }
        self.moved.received += received as u64;
        if self.generator.lost > lost {
            // The first frame after the gap tells how many there were.
            self.given_up = self.generator.lost;
        }
        if self.carried > 0 {
            self.moved.received_after += received as u64;
        }
        self.look_for_gap(port);
        received
    }

    /// Whether the port was carried to a new life of the device: what was under way is not waited
    /// for any more.
    fn look_for_gap(&mut self, port: &Port) {
        let carried = port.carried().times;
        if carried != self.carried {
            self.carried = carried;
            self.given_up = self.moved.sent.saturating_sub(self.moved.received);
            self.generator.gap();
        }
    }

    /// Fills a burst and sends it; returns how many frames went.
    fn send(&mut self, port: &mut Port) -> usize {
        for frame in &mut self.outgoing {
            self.generator.write(frame);
        }
        let sent = port.tx_burst(&mut self.outgoing);
        self.generator.unsent(self.outgoing.len() - sent);
        sent
    }
}

/// Live rates on a terminal, of all ports together.
struct Show {
    bar: Option<(ProgressBar, Instant)>,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Show {
    fn new(on: bool) -> Self {
        let bar = on.then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                bar.set_style(style);
            }
            (bar, Instant::now())
        });
        Self {
            bar,
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Counts frames of one port.
    fn add(&self, received: u64, sent: u64) {
        self.received.fetch_add(received, Ordering::Relaxed);
        self.sent.fetch_add(sent, Ordering::Relaxed);
    }

    fn rates(&self) {
        if let Some((bar, start)) = &self.bar {
            let seconds = start.elapsed().as_secs_f64();
            let rate = |n: &AtomicU64| n.load(Ordering::Relaxed) as f64 / seconds / 1000.0;
            bar.set_message(format!(
                "received {:.0} k/s, sent {:.0} k/s",
                rate(&self.received),
                rate(&self.sent)
            ));
            bar.tick();
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        if let Some((bar, _)) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
