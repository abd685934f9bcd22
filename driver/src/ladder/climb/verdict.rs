//! What a climb comes to: verdict and report.

use failstop_pci::reset::FunctionStopped;
use failstop_queues::lifecycle::Verdict;

use super::super::report::{Ground, RevocationReport, StepReport, Word};
use super::Climb;
use crate::flight::{Control, Recording};

impl Climb<'_> {
    /// The verdict, and the report of what it rests on.
    pub(super) fn judge(self, steps: Vec<StepReport>) -> (RevocationReport, Verdict) {
        // A transport that enforces nothing unmaps all the same, and nothing is released for it.
        let unmapped = self.all_unmapped
            && (self.settled.proof.is_some() || self.settled.quarantined.is_empty());
        let stopped = self.stopped.filter(FunctionStopped::is_ground_for_release);
        let ground = match (stopped.is_some(), unmapped) {
            (true, true) => Ground::StoppedAndUnmapped,
            (true, false) => Ground::Stopped,
            (false, true) => Ground::Unmapped,
            (false, false) => Ground::Nothing,
        };
        let revoked = self.settled.quarantined.is_empty() && ground != Ground::Nothing;
        let verdict = Verdict {
            proof: self.settled.proof.clone(),
            revoked,
            // A software reset alone does not keep the device from addresses that still lead somewhere;
            // and a thread of this life that still reaches a register would ring for the next.
            restartable: self.detached
                && self
                    .stopped
                    .is_some_and(|stopped| stopped.is_ground_for_release() || unmapped),
        };
        let word = if revoked {
            Word::Revoked
        } else {
            Word::Quarantined
        };
        let flight = &self.function.flight;
        flight.note(Control::State, format_args!("{word}: {ground}"));
        let Recording { events, missed } = flight.recording();
        let report = RevocationReport {
            device: self.function.transport.name().to_owned(),
            generation: self.life.generation.number(),
            cause: self.cause.to_string(),
            first: None,
            wake: self.wake,
            steps,
            reset_method: self.reset_method,
            verdict: word,
            ground,
            released_bytes: self.settled.released_bytes,
            quarantined_bytes: self.settled.quarantined.iter().map(|line| line.len).sum(),
            quarantined: self.settled.quarantined,
            flight: events,
            flight_missed: missed,
        };
        (report, verdict)
    }
}
