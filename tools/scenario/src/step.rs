//! The steps of a scenario, each a line.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::errno::Errno;
use crate::spec::{ParseError, Spec};
use crate::words::{Words, words};

words! {
    /// What can be created and destroyed.
    Object {
        /// Protection domain.
        Pd = "pd",
        /// Memory region.
        Mr = "mr",
        /// Completion queue.
        Cq = "cq",
        /// Receive queue.
        Rq = "rq",
        /// Send queue.
        Sq = "sq",
    }
}

words! {
    /// A direction.
    Way {
        /// Into memory.
        Receive = "rx",
        /// Out of memory.
        Send = "tx",
    }
}

words! {
    /// What a function that is gone reads as.
    Reading {
        /// As hardware does.
        AllOnes = "all-ones",
        /// As QEMU and virtual functions do.
        Zero = "zero",
    }
}

words! {
    /// What a scripted device's own reset does.
    Software {
        /// It resets.
        Works = "works",
        /// It resets nothing.
        Nothing = "nothing",
        /// It gets no answer.
        NoAnswer = "no-answer",
        /// It panics.
        Panics = "panics",
    }
}

/// What a scripted queue does when it is told to stop.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stop {
    /// It is busy, so many times.
    Busy(u32),
    /// It stops after so many looks.
    Slow(u32),
    /// It never stops.
    Never,
    /// Its register reads as of a function that is gone.
    Reads(Reading),
}

/// What a scripted reset of the function does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reset {
    /// It claims success and resets nothing.
    Nothing,
    /// It resets, and bus mastering is on afterwards.
    RestoresMaster,
    /// It fails.
    Fails(Errno),
}

/// What a scripted device will do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Script {
    /// A queue told to stop.
    Stop(Way, u32, Stop),
    /// The next start of a queue of this direction fails.
    Start(Way),
    /// The next bring-up fails.
    BringUp,
    /// Bus mastering reads as on.
    ReadsAsMaster,
    /// The next reset of the function.
    Reset(Reset),
    /// The device's own reset, from now on.
    Software(Software),
    /// Configuration space reads so, this many times, or for ever.
    Config(Reading, Option<u32>),
}

/// What the host answers to the next unmap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unmap {
    /// Another operation is under way.
    Busy,
    /// Nothing is mapped there.
    Absent,
    /// Less than asked for was unmapped.
    Partial,
    /// It fails.
    Fails(Errno),
}

/// What became of memory and device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// Nothing broke.
    Ok,
    /// The device could not be opened.
    Refused,
    /// It broke: what became of memory, then of the device.
    Broke(Memory, After),
}

words! {
    /// What became of memory.
    Memory {
        /// All of it was released.
        Revoked = "revoked",
        /// Some of it is kept.
        Quarantined = "quarantined",
    }
}

words! {
    /// What became of a device that broke.
    After {
        /// It works again.
        Recovered = "recovered",
        /// It stays off.
        Fenced = "fenced",
        /// It was closed.
        Closed = "closed",
    }
}

/// One step. Kits are sets of objects on one queue of each direction, by number.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Step {
    /// Something goes wrong from here on.
    Fault(Spec),
    /// Takes all faults back.
    ClearFaults,
    /// Opens the device.
    Open,
    /// Opens a port: a queue of each direction, and frames.
    Port,
    /// Recovers the device.
    Recover,
    /// Closes the device.
    Close,
    /// Time passes.
    Wait(Duration),
    /// Creates an object.
    Create(u32, Object),
    /// Destroys an object.
    Destroy(u32, Object),
    /// Destroys an object if nothing uses it.
    TryDestroy(u32, Object),
    /// Posts so many frames to be sent.
    Post(u32, u32),
    /// Asks for so many received frames.
    Poll(u32, u32),
    /// Takes completions of sent frames.
    Reap(u32),
    /// Sends so many frames through the port.
    Send(u32),
    /// Receives so many frames through the port.
    Receive(u32),
    /// A scripted device receives so many frames.
    DeviceReceives(u32, u32),
    /// A scripted device sends so many frames.
    DeviceSends(u32, u32),
    /// A scripted device writes into every buffer that it was given.
    DeviceWrites,
    /// A scripted device writes wherever it can.
    DeviceWritesEverywhere,
    /// A scripted device writes a word that it should not into a descriptor.
    DeviceLies(u32, u32, u64),
    /// What a scripted device will do.
    Script(Script),
    /// A scripted device does as it should again.
    Heal,
    /// The N-th map from now fails.
    MapFails(u32, Errno),
    /// What the next unmap does.
    Unmap(Unmap),
    /// Breaks the device.
    Break,
    /// Breaks the device, and holds its revocation up until something waits for it.
    BreakAndHold,
    /// What must have become of all this, and the exit code.
    Expect(Verdict, u8),
}

/// A line that is no step.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StepError {
    /// It has no form that a step has.
    #[error(
        "'{0}' is no step, or has other arguments; the forms stand at the top of tools/scenario/src/lib.rs"
    )]
    Form(String),
    /// It names a fault that cannot be understood.
    #[error(transparent)]
    Fault(#[from] ParseError),
}

impl Step {
    /// Reads a line without comment.
    ///
    /// # Errors
    ///
    /// [`StepError`].
    pub fn parse(line: &str) -> Result<Self, StepError> {
        let all: Vec<&str> = line.split_whitespace().collect();
        let mut words = Words::new(&all);
        if words.flag("fault") {
            return Ok(Self::Fault(Spec::from_words(words.rest())?));
        }
        parse(&mut words)
            .filter(|_| words.is_empty())
            .ok_or_else(|| StepError::Form(line.trim().to_owned()))
    }
}

fn parse(w: &mut Words<'_>) -> Option<Step> {
    Some(match w.word()? {
        "clear-faults" => Step::ClearFaults,
        "open" => Step::Open,
        "port" => Step::Port,
        "recover" => Step::Recover,
        "close" => Step::Close,
        "wait" => Step::Wait(Duration::from_millis(w.parse::<u32>()?.into())),
        "create" => Step::Create(w.parse()?, w.parse()?),
        "destroy" => Step::Destroy(w.parse()?, w.parse()?),
        "try-destroy" => Step::TryDestroy(w.parse()?, w.parse()?),
        "post" => Step::Post(w.parse()?, w.parse()?),
        "poll" => Step::Poll(w.parse()?, w.parse()?),
        "reap" => Step::Reap(w.parse()?),
        "send" => Step::Send(w.parse()?),
        "receive" => Step::Receive(w.parse()?),
        "device" => match w.word()? {
            "receives" => Step::DeviceReceives(w.parse()?, w.parse()?),
            "sends" => Step::DeviceSends(w.parse()?, w.parse()?),
            "writes" => Step::DeviceWrites,
            "writes-everywhere" => Step::DeviceWritesEverywhere,
            "lies" => Step::DeviceLies(w.parse()?, w.parse()?, w.hexadecimal()?),
            _ => return None,
        },
        "script" => Step::Script(script(w)?),
        "heal" => Step::Heal,
        "host" => match w.word()? {
            "map-fails" => Step::MapFails(w.parse().filter(|n| *n > 0)?, w.parse()?),
            "unmap" => Step::Unmap(match w.word()? {
                "busy" => Unmap::Busy,
                "absent" => Unmap::Absent,
                "partial" => Unmap::Partial,
                "fails" => Unmap::Fails(w.parse()?),
                _ => return None,
            }),
            _ => return None,
        },
        "break" => Step::Break,
        "break-and-hold" => Step::BreakAndHold,
        "expect" => {
            let verdict = if w.flag("ok") {
                Verdict::Ok
            } else if w.flag("refused") {
                Verdict::Refused
            } else {
                Verdict::Broke(w.parse()?, w.parse()?)
            };
            Step::Expect(verdict, w.parse()?)
        }
        _ => return None,
    })
}

fn script(w: &mut Words<'_>) -> Option<Script> {
    Some(match w.word()? {
        "stop" => {
            let (way, queue) = (w.parse()?, w.parse()?);
            let stop = if let Some(reading) = w.optional() {
                Stop::Reads(reading)
            } else {
                match w.word()? {
                    "busy" => Stop::Busy(w.parse()?),
                    "slow" => Stop::Slow(w.parse()?),
                    "never" => Stop::Never,
                    _ => return None,
                }
            };
            Script::Stop(way, queue, stop)
        }
        "start" => Script::Start(w.parse()?),
        "bring-up" => Script::BringUp,
        "reads-as-master" => Script::ReadsAsMaster,
        "reset" => Script::Reset(match w.word()? {
            "nothing" => Reset::Nothing,
            "restores-master" => Reset::RestoresMaster,
            "fails" => Reset::Fails(w.parse()?),
            _ => return None,
        }),
        "software" => Script::Software(w.parse()?),
        "config" => {
            let reading = w.parse()?;
            let reads = if w.is_empty() { None } else { Some(w.parse()?) };
            Script::Config(reading, reads)
        }
        _ => return None,
    })
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(spec) if spec.trigger.is_now() => write!(f, "fault {}", spec.fault),
            Self::Fault(spec) => write!(f, "fault {} @ {}", spec.fault, spec.trigger),
            Self::ClearFaults => f.write_str("clear-faults"),
            Self::Open => f.write_str("open"),
            Self::Port => f.write_str("port"),
            Self::Recover => f.write_str("recover"),
            Self::Close => f.write_str("close"),
            Self::Wait(time) => write!(f, "wait {}", time.as_millis()),
            Self::Create(kit, object) => write!(f, "create {kit} {object}"),
            Self::Destroy(kit, object) => write!(f, "destroy {kit} {object}"),
            Self::TryDestroy(kit, object) => write!(f, "try-destroy {kit} {object}"),
            Self::Post(kit, n) => write!(f, "post {kit} {n}"),
            Self::Poll(kit, n) => write!(f, "poll {kit} {n}"),
            Self::Reap(kit) => write!(f, "reap {kit}"),
            Self::Send(n) => write!(f, "send {n}"),
            Self::Receive(n) => write!(f, "receive {n}"),
            Self::DeviceReceives(kit, n) => write!(f, "device receives {kit} {n}"),
            Self::DeviceSends(kit, n) => write!(f, "device sends {kit} {n}"),
            Self::DeviceWrites => f.write_str("device writes"),
            Self::DeviceWritesEverywhere => f.write_str("device writes-everywhere"),
            Self::DeviceLies(kit, slot, word) => write!(f, "device lies {kit} {slot} {word:#x}"),
            Self::Script(script) => write!(f, "script {script}"),
            Self::Heal => f.write_str("heal"),
            Self::MapFails(n, errno) => write!(f, "host map-fails {n} {errno}"),
            Self::Unmap(unmap) => match unmap {
                Unmap::Busy => f.write_str("host unmap busy"),
                Unmap::Absent => f.write_str("host unmap absent"),
                Unmap::Partial => f.write_str("host unmap partial"),
                Unmap::Fails(errno) => write!(f, "host unmap fails {errno}"),
            },
            Self::Break => f.write_str("break"),
            Self::BreakAndHold => f.write_str("break-and-hold"),
            Self::Expect(verdict, exit) => write!(f, "expect {verdict} {exit}"),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Refused => f.write_str("refused"),
            Self::Broke(memory, after) => write!(f, "{memory} {after}"),
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stop(way, queue, stop) => {
                write!(f, "stop {way} {queue} ")?;
                match stop {
                    Stop::Busy(n) => write!(f, "busy {n}"),
                    Stop::Slow(n) => write!(f, "slow {n}"),
                    Stop::Never => f.write_str("never"),
                    Stop::Reads(reading) => write!(f, "{reading}"),
                }
            }
            Self::Start(way) => write!(f, "start {way}"),
            Self::BringUp => f.write_str("bring-up"),
            Self::ReadsAsMaster => f.write_str("reads-as-master"),
            Self::Reset(reset) => match reset {
                Reset::Nothing => f.write_str("reset nothing"),
                Reset::RestoresMaster => f.write_str("reset restores-master"),
                Reset::Fails(errno) => write!(f, "reset fails {errno}"),
            },
            Self::Software(how) => write!(f, "software {how}"),
            Self::Config(reading, reads) => {
                write!(f, "config {reading}")?;
                reads.map_or(Ok(()), |reads| write!(f, " {reads}"))
            }
        }
    }
}
