//! What faults make of the model: taken into account when one begins or ends, and acted upon
//! whenever the device runs.

use std::time::Duration;

use failstop::igb::descriptors::TxDone;

use super::accounts::Accounts;
use super::late::{Late, Write};
use super::ring::Ring;
use super::rogue::{self, Astray, Engine, LATE, Manner};
use super::statistics::Conduct;
use super::{Device, VECTORS, config};
use crate::faults::fault::{Outside, Storm};
use crate::faults::{Fault, Spec};
use crate::host::{Host, Notice};

/// Time between two blows of a storm of interrupts.
const STORM: Duration = Duration::from_micros(100);
/// Frames that land after a stop.
const AFTER_STOP: usize = 4;

/// What the faults of a device are about.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// Queues that go on.
    pub(super) engines: Vec<Engine>,
    pub(super) late: Late,
    pub(super) accounts: Accounts,
    /// A reset of the function never ended.
    pub(super) hung: bool,
    /// Reads of head registers.
    pub(super) head_reads: u32,
    /// Where the random numbers of write-backs are.
    pub(super) random: u64,
    astray: Astray,
    storm_due: Duration,
}

impl Device {
    /// Makes the device misbehave.
    pub fn add_fault(&mut self, spec: Spec, host: &mut dyn Host) {
        self.faults.add(spec, host.now());
        self.apply_faults(host);
    }

    /// Ends all misbehaviour; queues that would not stop are stopped, and a reset that hangs ends.
    pub fn clear_faults(&mut self, host: &mut dyn Host) {
        self.faults.clear();
        self.trouble.engines.clear();
        self.trouble.late.clear();
        if std::mem::take(&mut self.trouble.hung) {
            self.really_reset(host.now());
        }
        self.apply_faults(host);
    }

    /// Ends one fault; what it left behind stays.
    pub fn end_fault(&mut self, fault: Fault) {
        self.faults.end(fault.name());
    }

    /// Takes faults into account that began or ended.
    pub(super) fn apply_faults(&mut self, host: &mut dyn Host) {
        self.faults.expire(host.now());
        if !self.faults.take_change() {
            return;
        }
        self.statistics.conduct(self.conduct());
        let reset = self.faults.find(|fault| match fault {
            Fault::SelfReset { notice } => Some(notice),
            _ => None,
        });
        if let Some(notice) = reset {
            self.faults.end("self-reset");
            self.default_mac(host);
            if notice {
                host.notice(Notice::Error);
            }
        }
    }

    /// How statistics count.
    pub(super) fn conduct(&self) -> Conduct {
        let conduct = self.faults.find(|fault| match fault {
            Fault::StatsWrap => Some(Conduct::Wraps),
            Fault::StatsBackwards => Some(Conduct::Backwards),
            _ => None,
        });
        conduct.unwrap_or_default()
    }

    /// Whether the function is not there: fell off the bus, or never came back from a reset.
    pub(super) fn is_gone(&self) -> bool {
        self.trouble.hung || self.gone_byte_by_fault().is_some()
    }

    /// What reads return while the function is gone.
    pub(super) fn gone_byte(&self) -> u8 {
        self.gone_byte_by_fault().unwrap_or(0xFF)
    }

    fn gone_byte_by_fault(&self) -> Option<u8> {
        self.faults.find(|fault| match fault {
            Fault::Gone(_) => Some(0xFF),
            Fault::GoneZero(_) => Some(0),
            _ => None,
        })
    }

    /// Whether the bus master bit holds nothing up: set, or ignored.
    pub(super) fn is_master(&self) -> bool {
        !self.is_gone() && (self.config.is_bus_master() || self.faults.has(Fault::BusMasterIgnored))
    }

    /// Whether a fault holds the link down at this moment.
    pub(super) fn is_flapped_down(&self, now: Duration) -> bool {
        self.flaps()
            .is_some_and(|(period, since)| flaps_since(period, since, now).is_multiple_of(2))
    }

    fn flaps(&self) -> Option<(Duration, Duration)> {
        self.faults.find_since(|fault| match fault {
            Fault::LinkFlaps(period) => Some(period),
            _ => None,
        })
    }

    /// Lies about configuration space: what was read of it, from `offset` on.
    pub(super) fn misread(&self, offset: usize, data: &mut [u8]) {
        let mut change = |at: usize, set: u8, clear: u8| {
            if let Some(byte) = at.checked_sub(offset).and_then(|at| data.get_mut(at)) {
                *byte = *byte & !clear | set;
            }
        };
        for fault in self.faults.active() {
            match fault {
                Fault::BusMasterReadback => change(config::COMMAND, config::BUS_MASTER as u8, 0),
                Fault::PendingStuck => change(config::DEVICE_STATUS, config::PENDING, 0),
                Fault::NoFlr => {
                    change(config::DEVICE_CAPABILITIES + 3, 0, config::FLR_CAPABLE);
                    change(config::PM_CONTROL, config::NO_SOFT_RESET, 0);
                }
                _ => {}
            }
        }
    }

    /// Whether ENABLE of a queue reads as set though it was told to stop.
    pub(super) fn shows_enable(&self, queue: usize, transmit: bool) -> bool {
        let engines = &self.trouble.engines;
        engines
            .iter()
            .any(|e| e.queue == queue && e.transmit == transmit && e.manner.shows)
    }

    /// Lets a queue that was told to stop go on, if a fault says so; `by_reset` when CTRL.RST told
    /// it.
    pub(super) fn told_to_stop(
        &mut self,
        queue: usize,
        transmit: bool,
        by_reset: bool,
        host: &mut dyn Host,
    ) {
        let here = move |e: &Engine| e.queue == queue && e.transmit == transmit;
        let engines = &mut self.trouble.engines;
        engines.retain(|e| !(here(e) && e.manner.until_stop));
        if self.faults.is_quiet() || !self.has_ring(queue, transmit) {
            return;
        }
        let now = host.now();
        let manner = self.faults.find(|fault| match fault {
            Fault::RxQueueStuck(stuck) | Fault::TxQueueStuck(stuck) => {
                let ours = matches!(fault, Fault::TxQueueStuck(_)) == transmit;
                (ours && !(by_reset && stuck.until_rst)).then_some(Manner {
                    dma: !stuck.quiet,
                    until_rst: stuck.until_rst,
                    ..Manner::STUCK
                })
            }
            Fault::Lie => Some(Manner {
                shows: false,
                ..Manner::STUCK
            }),
            Fault::SlowStop(time) if !by_reset => Some(Manner {
                until: Some(now + time),
                until_rst: true,
                ..Manner::STUCK
            }),
            _ => None,
        });
        if let Some(manner) = manner {
            self.go_on(queue, transmit, manner, host);
        }
        let after = self.faults.find(|fault| match fault {
            Fault::DataAfterStop(time) if !by_reset => Some(time),
            _ => None,
        });
        if let Some(after) = after
            && self.is_master()
        {
            self.land_later(queue, transmit, now + after, host);
        }
    }

    fn has_ring(&self, queue: usize, transmit: bool) -> bool {
        let ring = if transmit {
            Ring::transmit(&self.file, queue)
        } else {
            Ring::receive(&self.file, queue)
        };
        ring.len != 0
    }

    fn go_on(&mut self, queue: usize, transmit: bool, manner: Manner, host: &mut dyn Host) {
        let engines = &self.trouble.engines;
        if engines
            .iter()
            .any(|e| e.queue == queue && e.transmit == transmit)
        {
            return;
        }
        let fetched = if manner.dma {
            rogue::fetch(queue, transmit, &self.file, host)
        } else {
            Vec::new()
        };
        let engine = Engine::new((queue, transmit), manner, fetched, host.now());
        self.trouble.engines.push(engine);
    }

    fn land_later(&mut self, queue: usize, transmit: bool, due: Duration, host: &mut dyn Host) {
        let late = &mut self.trouble.late;
        let fetched = rogue::fetch(queue, transmit, &self.file, host);
        for descriptor in fetched.into_iter().take(AFTER_STOP) {
            if transmit {
                late.push(due, Write::Word(descriptor.slot.after(8), TxDone::DONE.0));
                continue;
            }
            late.push(due, Write::Bytes(descriptor.buffer, LATE.to_vec()));
            late.push(due, Write::Word(descriptor.slot, 0));
            let done = rogue::late_done();
            late.push(due, Write::Word(descriptor.slot.after(8), done));
        }
    }

    /// Lets every queue that runs go on with the descriptors that it has: a reset, or bus mastering
    /// going off, passed it by.
    pub(super) fn survive(&mut self, manner: Manner, host: &mut dyn Host) {
        for queue in 0..self.receive_queues.len() {
            let running = [
                (false, self.receive_queues[queue].enabled),
                (true, self.transmit_queues[queue].enabled),
            ];
            for (transmit, enabled) in running {
                if enabled && self.has_ring(queue, transmit) {
                    self.go_on(queue, transmit, manner, host);
                }
            }
        }
    }

    /// Bus mastering went off.
    pub(super) fn mastering_ended(&mut self, host: &mut dyn Host) {
        if self.faults.has(Fault::BusMasterIgnored) {
            let manner = Manner {
                obeys_master: false,
                ..Manner::SURVIVES
            };
            self.survive(manner, host);
        }
    }

    /// Ends queues whose time has come.
    pub(super) fn end_engines(&mut self, now: Duration) {
        self.trouble.engines.retain(|engine| !engine.has_ended(now));
    }

    /// Does what faults do by themselves.
    pub(super) fn misbehave(&mut self, host: &mut dyn Host) {
        let master = self.is_master();
        self.end_engines(host.now());
        let trouble = &mut self.trouble;
        for engine in &mut trouble.engines {
            let acted = engine.act(master, host, &mut trouble.accounts);
            self.counters.runaway_accesses += u64::from(acted);
        }
        trouble.late.land(host, &mut trouble.accounts);
        if self.faults.is_quiet() {
            return;
        }
        if master && let Some(place) = self.outside() {
            let trouble = &mut self.trouble;
            trouble
                .astray
                .act(place, &self.file, host, &mut trouble.accounts);
        }
        if let Some(storm) = self.storm()
            && host.now() >= self.trouble.storm_due
        {
            self.trouble.storm_due = host.now() + STORM;
            match storm {
                Storm::MsiX => (0..VECTORS).for_each(|vector| host.interrupt(vector)),
                Storm::Error => host.notice(Notice::Error),
                Storm::Request => host.notice(Notice::Request),
            }
        }
    }

    fn outside(&self) -> Option<Option<Outside>> {
        self.faults.find(|fault| match fault {
            Fault::DmaOutside(place) => Some(place),
            _ => None,
        })
    }

    fn storm(&self) -> Option<Storm> {
        self.faults.find(|fault| match fault {
            Fault::IrqStorm(storm) => Some(storm),
            _ => None,
        })
    }

    /// When [`Device::misbehave`] has something to do, or a fault ends, if ever.
    pub(super) fn next_misbehaviour(&self, now: Duration) -> Option<Duration> {
        let expiry = self.faults.next_expiry();
        if self.is_gone() {
            return expiry;
        }
        let master = self.is_master();
        let trouble = &self.trouble;
        let engines = trouble.engines.iter().filter_map(|e| e.next_event(master));
        let flap = self.flaps().map(|(period, since)| {
            since + period.saturating_mul(flaps_since(period, since, now).saturating_add(1))
        });
        let astray = self
            .outside()
            .filter(|_| master)
            .map(|_| trouble.astray.due());
        let storm = self.storm().map(|_| trouble.storm_due);
        let others = [expiry, trouble.late.due(), flap, astray, storm];
        engines.chain(others.into_iter().flatten()).min()
    }

    /// Which vectors an interrupt of these goes out by.
    pub(super) fn routed(&self, vectors: u32) -> u32 {
        let routed = self.faults.find(|fault| match fault {
            Fault::IrqNone => Some(0),
            Fault::IrqWrongVector => {
                let all = (1 << VECTORS) - 1;
                Some((vectors << 1 | vectors >> (VECTORS - 1)) & all)
            }
            _ => None,
        });
        routed.unwrap_or(vectors)
    }
}

/// How often the link has changed since then.
fn flaps_since(period: Duration, since: Duration, now: Duration) -> u32 {
    let elapsed = now.saturating_sub(since).as_nanos();
    u32::try_from(elapsed / period.as_nanos().max(1)).unwrap_or(u32::MAX)
}
