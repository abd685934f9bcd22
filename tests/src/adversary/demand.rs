//! What the contract demands of the driver when a device, its server or its host is like this.
//!
//! Rules only: from what a faulty device truly is ([`Truth`]) and when it is so to the end that it
//! must come to. Nothing here looks at the driver, and nothing was written from what it does.
//!
//! What a device must come to is asked in this order:
//!
//! 1. Can the fault show itself in this phase at all? Else the cell is empty.
//! 2. Is the device broken? By a stop that is refused or not answered (R3.1, R5), by an impossible
//!    value (R8), by an unmap that is not exact (R2, C5, C6), by an error that the bus or the device
//!    reports (C16, C18), by evidence of a hang (R11, C19), by a look that finds nobody there (C32,
//!    C47). Silence and wrong counters are none of these (R11, C45).
//! 3. Is it *stopped*? Bus mastering was seen off and a reset is proven (R4).
//! 4. Is its memory out of reach? Every mapping is exactly unmapped, by a server that answers or an
//!    IOMMU (R3, R4.6); or it is stopped and nothing is mapped any more.
//! 5. May it live again? When it is stopped, or by the provider's own reset once nothing is mapped
//!    (R4.5, R10).

use std::collections::BTreeSet;

use failstop_scenario::fault::MessageType;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::table::{Cell, NotApplicable, NotInTable, Phase, Tier, Verdict, Word, words};

words! {
    /// What has to be there for a fault to show itself.
    Needs {
        /// The function.
        Function = "function",
        /// A queue that runs, or ran.
        Queue = "queue",
        /// Frames that pass.
        Frames = "frames",
        /// Bus mastering.
        Master = "master",
        /// A mapping that is made or undone.
        Mapping = "mapping",
        /// Registers that only its setting up touches.
        BringUp = "bring-up",
    }
}

words! {
    /// Whether reads of its registers are its own.
    Answers {
        /// They are.
        Always = "always",
        /// They are not: it is gone, or whoever serves it does not answer.
        Never = "never",
        /// They are again before an owner who tries to recover it has given up.
        Again = "again",
    }
}

words! {
    /// What a queue does that is told to stop.
    Stop {
        /// It stops, in time.
        Honest = "honest",
        /// It says so, and goes on.
        Lies = "lies",
        /// It stops when the provider's deadline passes.
        AtTheEdge = "at-the-edge",
        /// It does not stop, or too late.
        Never = "never",
    }
}

words! {
    /// Of which queues.
    Way {
        /// All.
        Both = "both",
        /// Receive queues.
        Receive = "receive",
        /// Send queues.
        Send = "send",
    }
}

words! {
    /// What Bus Master Enable does.
    BusMaster {
        /// It stops DMA, and reads as it was written.
        Works = "works",
        /// It reads as set.
        ReadsSet = "reads-set",
    }
}

words! {
    /// What becomes of a reset that the kernel or the server is asked for.
    Reset {
        /// It resets.
        Works = "works",
        /// It is refused, or there is none, or it says success and does nothing: never proven.
        Unproven = "unproven",
        /// It does not return.
        Hangs = "hangs",
    }
}

words! {
    /// What becomes of the provider's own reset.
    OwnReset {
        /// It resets.
        Works = "works",
        /// It does nothing.
        Nothing = "nothing",
    }
}

words! {
    /// What becomes of an unmap.
    Unmap {
        /// The mapping is gone, and the answer says so.
        Exact = "exact",
        /// The answer is an error, or a size that is not the mapping's: it may be there.
        Inexact = "inexact",
        /// The answer is that there is no such mapping.
        Absent = "absent",
    }
}

words! {
    /// What becomes of a map.
    Map {
        /// It is there.
        Works = "works",
        /// It is refused.
        Refused = "refused",
    }
}

words! {
    /// What its completions are like.
    Completions {
        /// As they should be.
        True = "true",
        /// They say what cannot be.
        Impossible = "impossible",
        /// They say what could be, of frames that are not what was sent.
        Spoilt = "spoilt",
        /// They run over the tail: what cannot be, and, when one meets a slot that was posted meanwhile, a
        /// frame that was not written.
        Overrun = "overrun",
    }
}

impl Completions {
    /// Whether a frame may have other bytes than were sent, with nothing on the ring that tells.
    #[must_use]
    pub fn may_spoil(self) -> bool {
        matches!(self, Self::Spoilt | Self::Overrun)
    }
}

words! {
    /// What tells of it by itself.
    Evidence {
        /// Nothing.
        Nothing = "nothing",
        /// The bus's or the device's error event.
        Error = "error",
        /// The same, again and again, in every life that it finds.
        Errors = "errors",
        /// Somebody wants the function back.
        Request = "request",
        /// Frames are counted, or work is outstanding, and nothing moves.
        Stall = "stall",
        /// Its registers are at their defaults.
        Reset = "reset",
        /// The same, and the device's error event.
        ResetTold = "reset-told",
    }
}

words! {
    /// Who serves it.
    Server {
        /// Whoever should.
        Good = "good",
        /// One that ends.
        Dies = "dies",
        /// One that answers no message of some types, or none at all, or so that the answer is none.
        Silent = "silent",
        /// One that refuses, answers late, or does what it should not, each message being answered.
        Answers = "answers",
        /// One that answers, and takes registers back that it offered, at a moment of its own. Who reads
        /// them later finds nobody there (C14, C32), and fails if he is bringing the device up then.
        Hampers = "hampers",
    }
}

words! {
    /// Where it is made.
    By {
        /// By the emulated device or its server.
        Emulator = "emulator",
        /// By the server, when it is a process of its own.
        Process = "process",
        /// By the host: in front of the transport, or by an event.
        Host = "host",
    }
}

/// What a faulty device truly is. All of it is as it should be, unless it is said.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
#[expect(missing_docs, reason = "each type says what it is about")]
pub struct Truth {
    pub needs: Needs,
    pub answers: Answers,
    pub stop: Stop,
    pub way: Way,
    pub bus_master: BusMaster,
    pub reset: Reset,
    pub own_reset: OwnReset,
    pub map: Map,
    pub unmap: Unmap,
    pub completions: Completions,
    pub evidence: Evidence,
    pub server: Server,
    /// What a silent server does not answer; empty for everything.
    pub silent: Silence,
    pub by: By,
}

impl Default for Truth {
    fn default() -> Self {
        Self {
            needs: Needs::Function,
            answers: Answers::Always,
            stop: Stop::Honest,
            way: Way::Both,
            bus_master: BusMaster::Works,
            reset: Reset::Works,
            own_reset: OwnReset::Works,
            map: Map::Works,
            unmap: Unmap::Exact,
            completions: Completions::True,
            evidence: Evidence::Nothing,
            server: Server::Good,
            silent: Silence::default(),
            by: By::Emulator,
        }
    }
}

/// Types of messages that are not answered.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Silence(pub Vec<MessageType>);

impl<'de> Deserialize<'de> for Silence {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let words = Vec::<String>::deserialize(from)?;
        let types = words.into_iter().map(|word| {
            let parsed = word.parse();
            parsed.map_err(|_| D::Error::custom(NotInTable(word)))
        });
        types.collect::<Result<_, _>>().map(Self)
    }
}

/// The demanded cell.
#[must_use]
pub fn demanded(truth: &Truth, phase: Phase, tier: Tier) -> Cell {
    // A kernel has more than the function's own reset: power management, and the bus (R4.5).
    let by_kernel = tier == Tier::T3 && truth.reset == Reset::Unproven;
    let truth = &Truth {
        reset: if by_kernel { Reset::Works } else { truth.reset },
        ..truth.clone()
    };
    if let Some(why) = untouched(truth, phase, tier) {
        return Cell::NotApplicable(why);
    }
    let mut words = match phase {
        Phase::Run => run(truth),
        Phase::Start => start(truth),
        _ => ends(truth, phase),
    };
    // A kernel waits for one that is back soon, in an open and in a reset of the ladder's (R12).
    if tier == Tier::T3 && truth.answers == Answers::Again {
        words.extend(match phase {
            Phase::Init => Some(Word::Ok),
            Phase::Close => Some(Word::RevokedClosed),
            _ => None,
        });
    }
    let verdicts = words.into_iter().flat_map(|word| {
        let overran = moves(truth, phase)
            && truth.completions == Completions::Overrun
            && word == Word::RevokedRecovered;
        let exits = [Some(exit(word, truth, phase)), overran.then_some(1)];
        exits
            .into_iter()
            .flatten()
            .map(move |exit| Verdict { word, exit })
    });
    Cell::OneOf(verdicts.collect())
}

/// Whether frames pass that the fault can spoil.
fn moves(truth: &Truth, phase: Phase) -> bool {
    match phase {
        Phase::Traffic | Phase::Run => true,
        Phase::Start => !is_spent(truth),
        _ => false,
    }
}

/// The code of `failstop run`: what is kept back comes first, then a device that nobody can use.
fn exit(word: Word, truth: &Truth, phase: Phase) -> u8 {
    let spoils = truth.completions == Completions::Spoilt;
    match word {
        // Wrong payload is seen by checksums, which no rule of the contract is about.
        Word::Ok if spoils && moves(truth, phase) => 1,
        // Closed as whoever runs it wished.
        Word::Ok | Word::RevokedRecovered => 0,
        Word::RevokedClosed if truth.evidence != Evidence::Request => 0,
        Word::Refused => 3,
        Word::QuarantinedRecovered | Word::QuarantinedFenced => 4,
        // Somebody else wished it.
        Word::RevokedFenced | Word::RevokedClosed => 5,
    }
}

/// Why a fault cannot show itself in a phase.
fn untouched(truth: &Truth, phase: Phase, tier: Tier) -> Option<NotApplicable> {
    use NotApplicable as Na;
    // A completion queue and a protection domain are ours alone on a NIC (R5: their destroy is
    // refused by children, never by a device).
    if matches!(phase, Phase::DestroyCq | Phase::DestroyPd) {
        return Some(Na::Software);
    }
    if tier == Tier::T3 {
        match (truth.by, truth.server) {
            (By::Process, _)
            | (_, Server::Dies | Server::Silent | Server::Answers | Server::Hampers) => {
                return Some(Na::QemuWaits);
            }
            (By::Host, _) => return Some(Na::OnT2),
            _ => {}
        }
        if !matches!(
            truth.evidence,
            Evidence::Nothing | Evidence::Stall | Evidence::Reset
        ) {
            return Some(Na::QemuTakes);
        }
        if matches!(phase, Phase::Run | Phase::Start) {
            return Some(Na::NotByTool);
        }
        // The kernel resets it before it gives anybody its file, and waits there for an answer.
        if phase == Phase::Init && truth.reset == Reset::Hangs {
            return Some(Na::KernelWaits);
        }
    }
    match (truth.by, phase) {
        (By::Process, Phase::Run | Phase::Start) => {}
        (By::Process, _) => return Some(Na::OwnProcess),
        (By::Host, Phase::Run | Phase::Start) => return Some(Na::NotByTool),
        _ => {}
    }
    let in_phase = match (truth.needs, phase) {
        (Needs::BringUp, Phase::Init | Phase::Recovery | Phase::Start) => None,
        (Needs::BringUp, _) => Some(Na::NotAsked),
        (_, Phase::Run | Phase::Start) => None,
        // Its queues have gone, or are not there yet: bus mastering is off until the first (R10).
        (Needs::Queue, Phase::Init | Phase::Idle | Phase::DestroyMr | Phase::Recovery) => {
            Some(Na::NoQueue)
        }
        (Needs::Master, Phase::Init | Phase::Idle | Phase::Recovery) => Some(Na::NotMaster),
        (
            Needs::Frames,
            Phase::Init
            | Phase::Idle
            | Phase::DestroyRq
            | Phase::DestroySq
            | Phase::DestroyMr
            | Phase::Recovery,
        ) => Some(Na::NoFrame),
        // An open maps nothing; nothing is unmapped without an object.
        (Needs::Mapping, Phase::Init | Phase::Idle | Phase::Traffic) => Some(Na::NotAsked),
        _ => None,
    };
    in_phase.or_else(|| {
        let never =
            truth.server == Server::Silent && !truth.silent.0.is_empty() && !is_asked(truth, phase);
        never.then_some(Na::NotAsked)
    })
}

/// Whether a message that a silent server does not answer is sent in this phase: which messages the
/// life of a device takes, from the protocol and the contract.
fn is_asked(truth: &Truth, phase: Phase) -> bool {
    let silent = &truth.silent.0;
    phase == Phase::Start
        || silent.is_empty()
        || silent.iter().any(|of| asked(*of).contains(&phase))
}

fn asked(of: MessageType) -> &'static [Phase] {
    use Phase::{
        Close, DestroyMr, DestroyRq, DestroySq, Idle, Init, Ladder, Recovery, Run, Traffic,
    };
    match of {
        // A connection is made once.
        MessageType::Version
        | MessageType::Info
        | MessageType::RegionInfo
        | MessageType::IrqInfo => &[Init],
        // The port's memory in its next life.
        MessageType::Map => &[Recovery],
        // Rings, regions, and all of it in the ladder (R4.6).
        MessageType::Unmap => &[DestroyRq, DestroySq, DestroyMr, Ladder, Close, Run],
        // Routed at open, disabled by the ladder, enabled for the next life.
        MessageType::SetIrqs => &[Init, Ladder, Recovery, Close],
        // A supervisor's looks.
        MessageType::Read => &[
            Init, Idle, Traffic, DestroyRq, DestroySq, DestroyMr, Ladder, Recovery, Close, Run,
        ],
        // An idle close writes registers. A doorbell that is not taken is silence (R11).
        MessageType::Write => &[
            Init, Idle, DestroyRq, DestroySq, DestroyMr, Ladder, Recovery, Close, Run,
        ],
        // An idle close writes the command word.
        MessageType::Config => &[
            Init, Idle, DestroyRq, DestroySq, DestroyMr, Ladder, Recovery, Close, Run,
        ],
        // An idle close resets; recovery rests on what the ladder has proven.
        MessageType::Reset => &[
            Init, Idle, DestroyRq, DestroySq, DestroyMr, Ladder, Close, Run,
        ],
    }
}

/// How a device may end in a phase; more than one word only where the truth is at an edge.
fn ends(truth: &Truth, phase: Phase) -> BTreeSet<Word> {
    // Each event breaks the life that it finds (C16); the next life begins on a verdict of its own
    // (R10), until whoever supervises it has tried as often as his policy says. The fault is taken back
    // when a life is seen to have begun: before that, or after.
    if truth.evidence == Evidence::Errors && phase != Phase::Close {
        return BTreeSet::from([Word::RevokedRecovered, Word::RevokedFenced]);
    }
    if truth.evidence == Evidence::Request {
        // Revoked, unmapped and closed, whatever is held (C15).
        return BTreeSet::from([Word::RevokedClosed]);
    }
    let hampers = truth.server == Server::Hampers;
    if phase == Phase::Init {
        let may_fail = hampers.then_some(Word::Refused);
        return may_fail.into_iter().chain([opened(truth)]).collect();
    }
    if hampers && matches!(phase, Phase::Ladder | Phase::Recovery) {
        return BTreeSet::from([Word::RevokedRecovered, Word::RevokedFenced]);
    }
    let silent = truth.server == Server::Silent || truth.server == Server::Dies;
    if silent {
        return BTreeSet::from([unanswered(truth, phase)]);
    }
    match broken(truth, phase) {
        Broken::No => BTreeSet::from([Word::Ok]),
        Broken::Yes => BTreeSet::from([verdict(truth, phase)]),
        Broken::Either => BTreeSet::from([Word::Ok, verdict(truth, phase)]),
    }
}

/// What an open comes to (R10, R13; C43: what the last user left behind must be seen to have ended).
fn opened(truth: &Truth) -> Word {
    let there = truth.answers == Answers::Always && truth.bus_master == BusMaster::Works;
    let reset = match truth.reset {
        Reset::Works => true,
        Reset::Unproven => truth.own_reset == OwnReset::Works,
        Reset::Hangs => false,
    };
    let told = !matches!(truth.server, Server::Dies | Server::Silent);
    match (there && reset && told, truth.evidence) {
        (false, _) => Word::Refused,
        (true, Evidence::Error) => Word::RevokedRecovered,
        (true, Evidence::Request) => Word::RevokedClosed,
        (true, _) => Word::Ok,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    No,
    Either,
    Yes,
}

fn broken(truth: &Truth, phase: Phase) -> Broken {
    let destroy = matches!(
        phase,
        Phase::DestroyRq | Phase::DestroySq | Phase::DestroyMr
    );
    if matches!(phase, Phase::Ladder | Phase::Recovery | Phase::Close) {
        return Broken::Yes;
    }
    // Looked at all the time by whoever supervises it, with reads that show it alive (C32, C47).
    let is_gone = truth.answers != Answers::Always;
    // An idle close, which ends each of these phases, does not believe a command word that does not
    // read back (R4.2).
    let stays_master = truth.bus_master == BusMaster::ReadsSet && (destroy || phase == Phase::Idle);
    let reports = matches!(
        truth.evidence,
        Evidence::Error | Evidence::Errors | Evidence::Reset | Evidence::ResetTold
    );
    let hangs = truth.evidence == Evidence::Stall && phase == Phase::Traffic;
    let impossible = matches!(
        truth.completions,
        Completions::Impossible | Completions::Overrun
    ) && phase == Phase::Traffic;
    let unmaps = truth.unmap != Unmap::Exact && destroy;
    if is_gone || stays_master || reports || hangs || impossible || unmaps {
        return Broken::Yes;
    }
    let told = match phase {
        Phase::DestroyRq => truth.way != Way::Send,
        Phase::DestroySq => truth.way != Way::Receive,
        _ => false,
    };
    match truth.stop {
        Stop::Never if told => Broken::Yes,
        Stop::AtTheEdge if told => Broken::Either,
        // A reading is a ground, and the only one there is: from a liar the translation protects.
        _ => Broken::No,
    }
}

/// The ladder's verdict, and what follows it.
fn verdict(truth: &Truth, phase: Phase) -> Word {
    // The ladder that went before was a good device's; so was its verdict.
    let proven_before = phase == Phase::Recovery;
    // One that is back in time is judged as if it had been there, unless nobody waits for it.
    let there = match truth.answers {
        Answers::Always => true,
        Answers::Never => false,
        Answers::Again => phase != Phase::Close,
    };
    let off = there && truth.bus_master == BusMaster::Works;
    let stopped = off && (truth.reset == Reset::Works || proven_before);
    // Without an object nothing is mapped.
    let unmapped = truth.unmap == Unmap::Exact || proven_before || phase == Phase::Idle;
    // No second reset while one is outstanding (R4), so that a hung one leaves none to be proven.
    let by_software =
        off && truth.own_reset == OwnReset::Works && truth.reset == Reset::Unproven && unmapped;
    // A stopped function whose mapping is certainly gone reaches nothing. One that may still be
    // mapped is reached by the next life (C5, C6).
    let released = unmapped || (stopped && truth.unmap == Unmap::Absent);
    let lives = stopped || by_software;
    match (released, lives) {
        (true, true) if phase == Phase::Close => Word::RevokedClosed,
        (true, true) => Word::RevokedRecovered,
        (true, false) => Word::RevokedFenced,
        (false, true) if phase != Phase::Close => Word::QuarantinedRecovered,
        (false, _) => Word::QuarantinedFenced,
    }
}

/// With a server that keeps silent.
///
/// It is believed for what it answered, and for nothing else (R1): an unmap that it acknowledged is a
/// ground, whatever it kept to itself (R3.2); one that it did not is none. So it is asked for the
/// unmaps all the same after silence about a reset, configuration space or interrupts: those steps of
/// the ladder are timed out, and the ladder goes on (R4, C35). One that does not answer about a
/// register or a mapping hangs: what is mapped then stays until whoever spawned it sees its end (R3).
///
/// Nobody is stopped, and none can be brought up, who does not answer (R4, R10).
fn unanswered(truth: &Truth, phase: Phase) -> Word {
    let only = |of| truth.silent.0 == [of];
    // The rest goes on (C35).
    if only(MessageType::Reset) {
        let like = Truth {
            reset: Reset::Hangs,
            server: Server::Answers,
            ..truth.clone()
        };
        return match broken(&like, phase) {
            Broken::No => Word::Ok,
            _ => verdict(&like, phase),
        };
    }
    let is_asked_on = match truth.silent.0[..] {
        [MessageType::Config | MessageType::SetIrqs] => true,
        // The ladder's first are of configuration space.
        [MessageType::Read | MessageType::Write] => phase == Phase::Ladder,
        _ => false,
    };
    let is_mapped = match phase {
        Phase::Idle => false,
        // The queues have gone, and the region goes before anything else is asked.
        Phase::DestroyMr => truth.silent.0.is_empty() || only(MessageType::Unmap),
        // Queues are stopped by registers, and all is unmapped, before the command word is written.
        Phase::DestroyRq | Phase::DestroySq | Phase::Close => !only(MessageType::Config),
        // Everything was released before; a map that is not answered may be there (R2).
        Phase::Recovery => only(MessageType::Map),
        _ => true,
    };
    if is_mapped && !is_asked_on {
        return Word::QuarantinedFenced;
    }
    // Bus mastering and the reset were answered; only who wants to live again needs interrupts.
    if only(MessageType::SetIrqs) && phase == Phase::Close {
        return Word::RevokedClosed;
    }
    Word::RevokedFenced
}

/// A whole run: the worst of what its parts come to, in the order of its exit codes.
fn run(truth: &Truth) -> BTreeSet<Word> {
    // Whoever spawned the server sees its end, which is the end of everything that it had (R3).
    if truth.server == Server::Dies {
        return BTreeSet::from([Word::RevokedFenced]);
    }
    let parts = [
        Phase::Traffic,
        Phase::DestroyRq,
        Phase::DestroySq,
        Phase::DestroyMr,
    ];
    let parts: Vec<BTreeSet<Word>> = parts
        .into_iter()
        .filter(|part| {
            untouched(truth, *part, Tier::T1).is_none_or(|why| why == NotApplicable::OwnProcess)
        })
        .map(|part| ends(truth, part))
        .collect();
    // Doorbells that are not taken are seen to hang (R11), and the ladder's first write is of
    // configuration space; or a destroy waits for a register first: whichever comes first.
    if truth.silent.0 == [MessageType::Write] {
        return BTreeSet::from([Word::RevokedFenced, Word::QuarantinedFenced]);
    }
    // What is certain in one part is not undone by another.
    let least = parts
        .iter()
        .filter_map(|part| part.iter().map(badness).min())
        .max();
    let worst = parts
        .iter()
        .flatten()
        .filter(|word| Some(badness(word)) >= least);
    worst.copied().collect()
}

/// A whole run whose fault is there first: an open comes before all else.
fn start(truth: &Truth) -> BTreeSet<Word> {
    if is_spent(truth) {
        return BTreeSet::from([Word::Ok]);
    }
    // An open maps nothing, and a port without memory is none: refused, unless what nobody answered
    // may be mapped (R2: attributed from before the call).
    if truth.map == Map::Refused {
        return BTreeSet::from([Word::Refused]);
    }
    if truth.silent.0 == [MessageType::Map] {
        return BTreeSet::from([Word::QuarantinedFenced]);
    }
    let opened = match untouched(truth, Phase::Init, Tier::T1) {
        Some(_) => BTreeSet::from([Word::Ok]),
        None => ends(truth, Phase::Init),
    };
    if opened == BTreeSet::from([Word::Refused]) {
        return opened;
    }
    let refused = opened.into_iter().filter(|word| *word == Word::Refused);
    match untouched(truth, Phase::Run, Tier::T1) {
        Some(_) => refused.chain([Word::Ok]).collect(),
        None => refused.chain(run(truth)).collect(),
    }
}

/// What happens once has happened before anybody opened the device.
fn is_spent(truth: &Truth) -> bool {
    matches!(truth.evidence, Evidence::Reset | Evidence::ResetTold) || truth.by == By::Process
}

fn badness(word: &Word) -> u8 {
    match word {
        Word::Ok => 0,
        Word::RevokedRecovered => 1,
        Word::RevokedClosed => 2,
        Word::QuarantinedRecovered => 3,
        Word::RevokedFenced => 4,
        Word::Refused => 5,
        Word::QuarantinedFenced => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(truth: &Truth, phase: Phase) -> String {
        demanded(truth, phase, Tier::T1).to_string()
    }

    #[test]
    fn a_good_device_breaks_nothing_and_is_recovered_from_a_break() {
        let good = Truth::default();
        for phase in [
            Phase::Init,
            Phase::Idle,
            Phase::Traffic,
            Phase::DestroyRq,
            Phase::Run,
        ] {
            assert_eq!(word(&good, phase), "ok 0");
        }
        assert_eq!(word(&good, Phase::Ladder), "revoked recovered 0");
        assert_eq!(word(&good, Phase::Close), "revoked closed 0");
    }

    #[test]
    fn no_ground_no_release() {
        let truth = Truth {
            unmap: Unmap::Inexact,
            reset: Reset::Unproven,
            ..Truth::default()
        };
        assert_eq!(word(&truth, Phase::Ladder), "quarantined fenced 4");
    }

    #[test]
    fn a_hung_reset_is_not_followed_by_another() {
        let truth = Truth {
            reset: Reset::Hangs,
            ..Truth::default()
        };
        assert_eq!(word(&truth, Phase::Ladder), "revoked fenced 5");
    }

    #[test]
    fn the_providers_own_reset_is_enough_to_live_again_only_once_nothing_is_mapped() {
        let software = Truth {
            reset: Reset::Unproven,
            ..Truth::default()
        };
        assert_eq!(word(&software, Phase::Ladder), "revoked recovered 0");
        let mapped = Truth {
            unmap: Unmap::Inexact,
            ..software
        };
        assert_eq!(word(&mapped, Phase::Ladder), "quarantined fenced 4");
    }
}
