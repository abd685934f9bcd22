//! The scripted device's provider, what it is told to get wrong, and its time.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use failstop::provider::{
    Config, Formats, Limits, Link, MacAddress, NotStopped, Position, Provider, ProviderError,
    RingSpec, SoftwareReset, Statistics,
};
use failstop::rss::{Rss, Table};
use failstop_pci::clock::Clock;
use failstop_pci::register::Reg;
use failstop_pci::reset::Canary;
use failstop_pci::testing::FakeFunction;
use failstop_pci::window::{Doorbell, NoAnswer, QueueName, StopBit, Stopped, Window};

use super::{
    ALIVE, CANARY, CONTROL, ENABLE, ENTRIES, FRAME, HASH, HEAD, IRQ_MASK, QUEUES, RING, RUNS,
    SOFTWARE, STATUS, STOP_DEADLINE, STOP_INTERVAL, TAIL, THRESHOLDS, WAYS, Way, base,
};

/// How a queue answers when it is told to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// At once.
    Acknowledges,
    /// EAGAIN, so many times.
    Busy(u32),
    /// After so many looks at its register.
    Slow(u32),
    /// It does not.
    Never,
    /// Its register reads all-ones.
    AllOnes,
    /// Its register reads zero.
    Zero,
}

/// What the device's own reset does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Software {
    Works = 0,
    ResetsNothing = 1,
    NoAnswer = 2,
    Panics = 3,
}

/// Time that passes when somebody sleeps, with what the device does at its moments.
#[derive(Default)]
pub struct Time {
    state: Mutex<TimeState>,
}

type Due = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct TimeState {
    now: Duration,
    due: Vec<(Duration, Due)>,
    panics_on: Option<&'static str>,
}

impl Time {
    fn state(&self) -> MutexGuard<'_, TimeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn after(&self, time: Duration, act: Due) {
        let mut state = self.state();
        let at = state.now + time;
        state.due.push((at, act));
    }

    /// Panics whenever a thread whose name begins so looks at the time.
    pub fn panic_on(&self, thread: &'static str) {
        self.state().panics_on = Some(thread);
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Time").field(&self.now()).finish()
    }
}

impl Clock for Time {
    fn now(&self) -> Duration {
        let state = self.state();
        let (now, panics_on) = (state.now, state.panics_on);
        drop(state);
        let here = |name: &str| {
            thread::current()
                .name()
                .is_some_and(|n| n.starts_with(name))
        };
        if panics_on.is_some_and(here) {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        now
    }

    fn sleep(&self, time: Duration) {
        let due: Vec<_> = {
            let mut state = self.state();
            state.now += time;
            let now = state.now;
            let (due, later) = std::mem::take(&mut state.due)
                .into_iter()
                .partition(|(at, _)| *at <= now);
            state.due = later;
            due
        };
        due.into_iter().for_each(|(_, act)| act());
    }
}

/// What the provider is to get wrong, and what was asked of it.
#[derive(Default, Debug)]
pub struct Script {
    state: Mutex<ScriptState>,
}

/// What happens while a queue is started.
struct AtStart(Due);

impl fmt::Debug for AtStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AtStart")
    }
}

#[derive(Default, Debug)]
struct ScriptState {
    /// A queue whose provider asks the other one of its direction.
    mistaken: Option<(Way, u32)>,
    stops: HashMap<(Way, u32), Stop>,
    failing_bring_ups: u32,
    failing_starts: HashMap<Way, u32>,
    at_starts: HashMap<Way, AtStart>,
    calls: BTreeMap<&'static str, u64>,
    rss: Option<Rss>,
    tables: Vec<Table>,
    lost: Vec<String>,
}

impl Script {
    fn state(&self) -> MutexGuard<'_, ScriptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How that queue answers from now on.
    pub fn stop(&self, way: Way, queue: u32, how: Stop) {
        self.state().stops.insert((way, queue), how);
    }

    /// Every queue stops as it should from now on.
    pub fn stops_work(&self) {
        self.state().stops.clear();
    }

    /// To stop that queue the provider asks the other one of its direction.
    pub fn ask_the_other(&self, way: Way, queue: u32) {
        self.state().mistaken = Some((way, queue));
    }

    /// So many bring-ups fail.
    pub fn fail_bring_ups(&self, times: u32) {
        self.state().failing_bring_ups = times;
    }

    /// So many starts of a queue fail, after the device was told of its ring.
    pub fn fail_starts(&self, way: Way, times: u32) {
        self.state().failing_starts.insert(way, times);
    }

    /// Once, when the device was told to start a queue, this happens before it says whether it did.
    pub fn at_next_start(&self, way: Way, act: impl FnOnce() + Send + 'static) {
        self.state().at_starts.insert(way, AtStart(Box::new(act)));
    }

    /// How often each command was given.
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.state().calls.clone()
    }

    /// How often that command was given.
    pub fn count(&self, command: &str) -> u64 {
        self.state().calls.get(command).copied().unwrap_or(0)
    }

    /// What the device is set to hash with; none without RSS.
    pub fn rss(&self) -> Option<Rss> {
        self.state().rss
    }

    /// The tables that the device was given, in order.
    pub fn tables(&self) -> Vec<Table> {
        self.state().tables.clone()
    }

    /// Where a table that the device had, or was given, named a queue that did not run while another
    /// did: frames were lost without a word.
    pub fn lost(&self) -> Vec<String> {
        self.state().lost.clone()
    }

    fn called(&self, command: &'static str) -> MutexGuard<'_, ScriptState> {
        let mut state = self.state();
        *state.calls.entry(command).or_default() += 1;
        state
    }

    fn note(&self, command: &'static str) {
        drop(self.called(command));
    }

    fn next_stop(&self, command: &'static str, way: Way, queue: u32) -> Stop {
        let mut state = self.called(command);
        let Some(stop) = state.stops.get_mut(&(way, queue)) else {
            return Stop::Acknowledges;
        };
        match stop {
            Stop::Busy(0) => Stop::Acknowledges,
            Stop::Busy(times) => {
                *times = if *times == u32::MAX {
                    *times
                } else {
                    *times - 1
                };
                Stop::Busy(1)
            }
            other => *other,
        }
    }
}

fn fails(times: Option<&mut u32>) -> bool {
    times.is_some_and(|times| {
        let fails = *times > 0;
        *times = times.saturating_sub(1);
        fails
    })
}

pub(super) struct Scripted {
    pub(super) window: Arc<Window>,
    pub(super) function: Arc<FakeFunction>,
    pub(super) time: Arc<Time>,
    pub(super) script: Arc<Script>,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}

impl Scripted {
    fn write(&self, register: u32, value: u32) {
        self.window.write(Reg::<u32>::at(register), value);
    }

    fn start(
        &mut self,
        command: &'static str,
        way: Way,
        queue: u32,
        ring: &RingSpec,
    ) -> Result<Doorbell, ProviderError> {
        let fails = fails(self.script.called(command).failing_starts.get_mut(&way));
        let at = base(way, queue);
        self.write(at + RING, u32::try_from(ring.iova.0).unwrap());
        self.write(at + ENTRIES, ring.entries);
        self.write(at + HEAD, 0);
        self.write(at + TAIL, 0);
        self.write(at + CONTROL, THRESHOLDS | ENABLE);
        self.write(at + RUNS, 1);
        let act = self.script.state().at_starts.remove(&way);
        if let Some(AtStart(act)) = act {
            act();
        }
        let number = queue;
        let queue = "queue";
        let device = "fake".to_owned();
        let source = NoAnswer::Gone {
            register: at,
            value: 0,
        };
        let refused = ProviderError::Queue {
            device,
            queue,
            number,
            source,
        };
        if fails {
            return Err(refused);
        }
        self.window
            .doorbell(Reg::<u32>::at(at + TAIL))
            .ok_or(refused)
    }

    /// Looks whether the device's table names a queue that does not run though another does.
    fn look_for_losses(&self, when: &str) {
        let runs = |queue: u32| {
            let register = (base(Way::Receive, queue) + RUNS).into();
            self.function.register(register) == 1
        };
        let mut state = self.script.state();
        let last = state.tables.last().copied();
        let Some(table) = last.filter(|_| (0..QUEUES).any(runs)) else {
            return;
        };
        if let Some(queue) = table.0.into_iter().find(|queue| !runs((*queue).into())) {
            state.lost.push(format!("{when}: queue {queue}"));
        }
    }

    fn stop(&mut self, command: &'static str, way: Way, queue: u32) -> Result<Stopped, NotStopped> {
        let (mut queue, mut register) = (queue, base(way, queue) + CONTROL);
        if self.script.state().mistaken == Some((way, queue)) {
            queue ^= 1;
            register = base(way, queue) + CONTROL;
        }
        let runs = register + RUNS;
        match self.script.next_stop(command, way, queue) {
            Stop::Busy(_) => return Err(NotStopped::Busy("the device counts a reference")),
            Stop::Acknowledges => {
                self.write(runs, 0);
                self.look_for_losses("a stop");
                self.write(register, THRESHOLDS);
            }
            Stop::Never => {}
            Stop::AllOnes => self.function.set_register(register.into(), u32::MAX),
            Stop::Zero => self.function.set_register(register.into(), 0),
            Stop::Slow(looks) => {
                let function = self.function.clone();
                let act = move || {
                    function.set_register(runs.into(), 0);
                    function.set_register(register.into(), THRESHOLDS);
                };
                self.time.after(STOP_INTERVAL * looks, Box::new(act));
            }
        }
        let stop = StopBit {
            queue: Some(match way {
                Way::Receive => QueueName::Receive(queue),
                Way::Send => QueueName::Send(queue),
            }),
            register,
            stop: NonZeroU32::new(ENABLE).unwrap(),
            alive: NonZeroU32::new(THRESHOLDS).unwrap(),
            deadline: STOP_DEADLINE,
            interval: STOP_INTERVAL,
            settle: STOP_INTERVAL,
        };
        Ok(self.window.wait_stopped(&*self.time, &stop)?)
    }
}

/// Every register of every queue.
pub(super) fn queue_registers() -> impl Iterator<Item = u32> {
    WAYS.into_iter().flat_map(|way| {
        (0..QUEUES).flat_map(move |queue| (0..6).map(move |n| base(way, queue) + 4 * n))
    })
}

fn software_reset(window: &Window, _: &dyn Clock) -> Result<(), NoAnswer> {
    let register = SOFTWARE;
    match window.read(Reg::<u32>::at(register)) {
        1 => return Ok(()),
        2 => return Err(NoAnswer::Gone { register, value: 0 }),
        3 => std::panic::resume_unwind(Box::new("on purpose")),
        _ => {}
    }
    for register in queue_registers().chain([CANARY.register, STATUS]) {
        window.write(Reg::<u32>::at(register), 0);
    }
    Ok(())
}

impl Provider for Scripted {
    fn name(&self) -> &'static str {
        self.script.note("name");
        "scripted"
    }

    fn part(&self) -> &'static str {
        self.script.note("part");
        "none"
    }

    fn limits(&self) -> Limits {
        self.script.note("limits");
        Limits {
            queues: QUEUES,
            longest_frame: FRAME,
            ring_entries: 1024,
            address_mask: u32::MAX.into(),
            buffer_step: FRAME,
        }
    }

    fn formats(&self) -> Formats {
        self.script.note("formats");
        Formats::Advanced
    }

    fn restarts(&self) -> Option<Arc<AtomicU32>> {
        self.script.note("restarts");
        None
    }

    fn has_rss(&self) -> bool {
        self.script.note("has_rss");
        true
    }

    fn bring_up(&mut self, config: &Config) -> Result<(), ProviderError> {
        if fails(Some(&mut self.script.called("bring_up").failing_bring_ups)) {
            return Err(ProviderError::Gone {
                device: "fake".into(),
                register: "STATUS",
                value: 0,
            });
        }
        queue_registers().for_each(|register| self.write(register, 0));
        self.write(STATUS, ALIVE);
        let mut state = self.script.state();
        state.rss = config.rss;
        state.tables.clear();
        Ok(())
    }

    fn longest_received(&self) -> u32 {
        self.script.note("longest_received");
        FRAME
    }

    fn mac(&self) -> MacAddress {
        self.script.note("mac");
        MacAddress([2, 0, 0, 0, 0, 1])
    }

    fn link(&mut self) -> Link {
        self.script.note("link");
        let status = self.window.read(Reg::<u32>::at(STATUS));
        Link {
            up: status == ALIVE,
            speed: 1000,
            full_duplex: true,
        }
    }

    fn wait_link(&mut self, _: Duration) -> Link {
        self.script.note("wait_link");
        self.link()
    }

    fn set_promiscuous(&mut self, _: bool) {
        self.script.note("set_promiscuous");
    }

    fn set_rss(&mut self, rss: &Rss) {
        self.script.called("set_rss").rss = Some(*rss);
        self.write(HASH, rss.types.bits());
    }

    fn set_rss_table(&mut self, table: &Table) {
        self.script.called("set_rss_table").tables.push(*table);
        self.look_for_losses("a table");
    }

    fn start_rx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.start("start_rx", Way::Receive, queue, ring)
    }

    fn stop_rx(&mut self, queue: u32) -> Result<Stopped, NotStopped> {
        self.stop("stop_rx", Way::Receive, queue)
    }

    fn start_tx(&mut self, queue: u32, ring: &RingSpec) -> Result<Doorbell, ProviderError> {
        self.start("start_tx", Way::Send, queue, ring)
    }

    fn stop_tx(&mut self, queue: u32) -> Result<Stopped, NotStopped> {
        self.stop("stop_tx", Way::Send, queue)
    }

    fn canary(&self) -> Canary {
        self.script.note("canary");
        CANARY
    }

    fn software_reset(&self) -> SoftwareReset {
        self.script.note("software_reset");
        software_reset
    }

    fn statistics(&mut self) -> Statistics {
        self.script.note("statistics");
        Statistics::default()
    }

    fn check_alive(&mut self) -> Result<(), NoAnswer> {
        self.script.note("check_alive");
        Ok(())
    }

    fn is_paused(&mut self) -> bool {
        self.script.note("is_paused");
        false
    }

    fn rx_position(&mut self, _: u32) -> Option<Position> {
        self.script.note("rx_position");
        None
    }

    fn tx_position(&mut self, _: u32) -> Option<Position> {
        self.script.note("tx_position");
        None
    }

    fn route_rx_interrupt(&mut self, queue: u32, _: u32) -> Option<(Doorbell, u32)> {
        self.script.note("route_rx_interrupt");
        let bell = self.window.doorbell(Reg::<u32>::at(IRQ_MASK))?;
        Some((bell, 1 << queue))
    }

    fn quiesce(&mut self) {
        self.script.note("quiesce");
        self.write(STATUS, 0);
    }
}
