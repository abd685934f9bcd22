//! What a sequence is made of, and how it is written (`failstop_scenario`).

use failstop_pci::testing::{Reading, ResetScript};
use failstop_pci::transport::Unmapped;
use failstop_scenario::step as written;
use nix::errno::Errno;

use super::scripted::{QUEUES, RX, Software, Stop, Way};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    Pd,
    Mr,
    Cq,
    Rq,
    Sq,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Step {
    Create(usize, Of),
    TryDestroy(usize, Of),
    Destroy(usize, Of),
    /// Sends so many frames.
    Post(usize, usize),
    /// Asks for so many frames.
    Poll(usize, usize),
    Reap(usize),
    DeviceReceives(usize, u32),
    DeviceSends(usize, u32),
    /// Into every buffer that it was given.
    DeviceWrites,
    /// Wherever it can.
    DeviceWritesEverywhere,
    /// A word that it should not write, into a descriptor.
    DeviceLies(usize, u32, u64),
    Break,
    /// Breaks it, and holds the ladder up in its first act, until something waits for it.
    BreakAndHold,
    Recover,
    Close,
    Fault(Fault),
    /// No more faults.
    Heal,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Fault {
    Stop(Way, u32, Stop),
    Start(Way),
    Map(Errno),
    Unmap(Unmapped),
    Reset(ResetScript),
    Software(Software),
    Gone(Reading, u64),
    ReadsAsMaster,
    BringUp,
}

impl Of {
    const fn written(self) -> written::Object {
        match self {
            Self::Pd => written::Object::Pd,
            Self::Mr => written::Object::Mr,
            Self::Cq => written::Object::Cq,
            Self::Rq => written::Object::Rq,
            Self::Sq => written::Object::Sq,
        }
    }

    const fn read(object: written::Object) -> Self {
        match object {
            written::Object::Pd => Self::Pd,
            written::Object::Mr => Self::Mr,
            written::Object::Cq => Self::Cq,
            written::Object::Rq => Self::Rq,
            written::Object::Sq => Self::Sq,
        }
    }
}

/// A kit's number, if there is such a kit.
fn kit(number: u32) -> Option<usize> {
    (number < QUEUES).then_some(number as usize)
}

fn few(frames: u32) -> Option<usize> {
    // What one burst may ask for; more is never there.
    (frames <= 1024).then_some(frames as usize)
}

impl Step {
    /// As a line of a scenario.
    pub(crate) fn written(&self) -> written::Step {
        use written::Step as W;
        match *self {
            Self::Create(kit, of) => W::Create(kit as u32, of.written()),
            Self::TryDestroy(kit, of) => W::TryDestroy(kit as u32, of.written()),
            Self::Destroy(kit, of) => W::Destroy(kit as u32, of.written()),
            Self::Post(kit, frames) => W::Post(kit as u32, frames as u32),
            Self::Poll(kit, frames) => W::Poll(kit as u32, frames as u32),
            Self::Reap(kit) => W::Reap(kit as u32),
            Self::DeviceReceives(kit, frames) => W::DeviceReceives(kit as u32, frames),
            Self::DeviceSends(kit, frames) => W::DeviceSends(kit as u32, frames),
            Self::DeviceWrites => W::DeviceWrites,
            Self::DeviceWritesEverywhere => W::DeviceWritesEverywhere,
            Self::DeviceLies(kit, slot, word) => W::DeviceLies(kit as u32, slot, word),
            Self::Break => W::Break,
            Self::BreakAndHold => W::BreakAndHold,
            Self::Recover => W::Recover,
            Self::Close => W::Close,
            Self::Heal => W::Heal,
            Self::Fault(ref fault) => fault.written(),
        }
    }

    /// The step that a line stands for; none where it is no step of this device.
    pub(crate) fn of(line: &written::Step) -> Option<Self> {
        use written::Step as W;
        Some(match *line {
            W::Create(number, of) => Self::Create(kit(number)?, Of::read(of)),
            W::TryDestroy(number, of) => Self::TryDestroy(kit(number)?, Of::read(of)),
            W::Destroy(number, of) => Self::Destroy(kit(number)?, Of::read(of)),
            W::Post(number, frames) => Self::Post(kit(number)?, few(frames)?),
            W::Poll(number, frames) => Self::Poll(kit(number)?, few(frames)?),
            W::Reap(number) => Self::Reap(kit(number)?),
            W::DeviceReceives(number, frames) => Self::DeviceReceives(kit(number)?, frames),
            W::DeviceSends(number, frames) => Self::DeviceSends(kit(number)?, frames),
            W::DeviceWrites => Self::DeviceWrites,
            W::DeviceWritesEverywhere => Self::DeviceWritesEverywhere,
            W::DeviceLies(number, slot, word) if slot < RX => {
                Self::DeviceLies(kit(number)?, slot, word)
            }
            W::Break => Self::Break,
            W::BreakAndHold => Self::BreakAndHold,
            W::Recover => Self::Recover,
            W::Close => Self::Close,
            W::Heal => Self::Heal,
            ref other => Self::Fault(Fault::of(other)?),
        })
    }
}

impl Way {
    const fn written(self) -> written::Way {
        match self {
            Self::Receive => written::Way::Receive,
            Self::Send => written::Way::Send,
        }
    }

    const fn of(way: written::Way) -> Self {
        match way {
            written::Way::Receive => Self::Receive,
            written::Way::Send => Self::Send,
        }
    }
}

/// Both languages number errors as Linux does.
fn errno(errno: Errno) -> failstop_scenario::Errno {
    failstop_scenario::Errno::new(errno as i32).unwrap_or(failstop_scenario::Errno::EIO)
}

fn reading(reading: Reading) -> written::Reading {
    match reading {
        Reading::AllOnes => written::Reading::AllOnes,
        Reading::Zero => written::Reading::Zero,
    }
}

impl Fault {
    fn written(&self) -> written::Step {
        use written::{Script, Software as S, Stop as W};
        let script = match *self {
            Self::Stop(way, queue, stop) => {
                let stop = match stop {
                    Stop::Acknowledges => W::Busy(0),
                    Stop::Busy(times) => W::Busy(times),
                    Stop::Slow(looks) => W::Slow(looks),
                    Stop::Never => W::Never,
                    Stop::AllOnes => W::Reads(written::Reading::AllOnes),
                    Stop::Zero => W::Reads(written::Reading::Zero),
                };
                Script::Stop(way.written(), queue, stop)
            }
            Self::Start(way) => Script::Start(way.written()),
            Self::Map(error) => return written::Step::MapFails(1, errno(error)),
            Self::Unmap(outcome) => {
                return written::Step::Unmap(match outcome {
                    Unmapped::Busy => written::Unmap::Busy,
                    Unmapped::Absent => written::Unmap::Absent,
                    Unmapped::Partial { .. } => written::Unmap::Partial,
                    Unmapped::Failed(error) => written::Unmap::Fails(errno(error)),
                    // Never told to: it is what an unmap does anyway.
                    _ => written::Unmap::Busy,
                });
            }
            Self::Reset(ref script) => Script::Reset(match script {
                ResetScript::RestoresMaster => written::Reset::RestoresMaster,
                ResetScript::Fails(error) => written::Reset::Fails(errno(*error)),
                _ => written::Reset::Nothing,
            }),
            Self::Software(how) => Script::Software(match how {
                Software::Works => S::Works,
                Software::ResetsNothing => S::Nothing,
                Software::NoAnswer => S::NoAnswer,
                Software::Panics => S::Panics,
            }),
            Self::Gone(how, reads) => {
                let reads = u32::try_from(reads).ok();
                Script::Config(reading(how), reads)
            }
            Self::ReadsAsMaster => Script::ReadsAsMaster,
            Self::BringUp => Script::BringUp,
        };
        written::Step::Script(script)
    }

    fn of(line: &written::Step) -> Option<Self> {
        use written::{Script, Software as S, Stop as W};
        let error = |errno: failstop_scenario::Errno| Errno::from_raw(errno.number());
        Some(match *line {
            written::Step::MapFails(1, errno) => Self::Map(error(errno)),
            written::Step::Unmap(outcome) => Self::Unmap(match outcome {
                written::Unmap::Busy => Unmapped::Busy,
                written::Unmap::Absent => Unmapped::Absent,
                written::Unmap::Partial => Unmapped::Partial { bytes: 0 },
                written::Unmap::Fails(errno) => Unmapped::Failed(error(errno)),
            }),
            written::Step::Script(script) => match script {
                Script::Stop(way, queue, stop) if queue < QUEUES => {
                    let stop = match stop {
                        W::Busy(0) => Stop::Acknowledges,
                        W::Busy(times) => Stop::Busy(times),
                        W::Slow(looks) => Stop::Slow(looks),
                        W::Never => Stop::Never,
                        W::Reads(written::Reading::AllOnes) => Stop::AllOnes,
                        W::Reads(written::Reading::Zero) => Stop::Zero,
                    };
                    Self::Stop(Way::of(way), queue, stop)
                }
                Script::Stop(..) => return None,
                Script::Start(way) => Self::Start(Way::of(way)),
                Script::BringUp => Self::BringUp,
                Script::ReadsAsMaster => Self::ReadsAsMaster,
                Script::Reset(how) => Self::Reset(match how {
                    written::Reset::Nothing => ResetScript::ResetsNothing,
                    written::Reset::RestoresMaster => ResetScript::RestoresMaster,
                    written::Reset::Fails(errno) => ResetScript::Fails(error(errno)),
                }),
                Script::Software(how) => Self::Software(match how {
                    S::Works => Software::Works,
                    S::Nothing => Software::ResetsNothing,
                    S::NoAnswer => Software::NoAnswer,
                    S::Panics => Software::Panics,
                }),
                Script::Config(how, reads) => {
                    let reading = match how {
                        written::Reading::AllOnes => Reading::AllOnes,
                        written::Reading::Zero => Reading::Zero,
                    };
                    Self::Gone(reading, reads.map_or(u64::MAX, u64::from))
                }
            },
            _ => return None,
        })
    }
}
