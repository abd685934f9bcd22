//! What `failstop run --json` prints, and when it is clean.

use serde::Deserialize;

/// The object that `failstop run --json` prints.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Report {
    pub device: String,
    pub provider: String,
    pub transport: String,
    pub rx_packets: u64,
    pub tx_packets: u64,
    pub rx_bytes: u64,
    pub tx_bytes: u64,
    pub lost_packets: u64,
    pub payload_errors: u64,
    #[serde(default)]
    pub queues: Vec<Queue>,
    pub completions: Completions,
    pub ledger: Ledger,
    pub revocation: Option<Revocation>,
    pub recovered: bool,
    pub recovery: Option<Recovery>,
    pub stray_dma: Option<u64>,
    pub kept: Vec<Kept>,
    pub error: Option<String>,
    pub exit: u8,
}

/// Memory that is not released.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Kept {
    pub bytes: u64,
    pub iova: u64,
    pub owner: String,
    pub reason: String,
}

/// One queue pair's part.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Queue {
    pub queue: u32,
    pub rx_packets: u64,
    pub tx_packets: u64,
    pub rx_bytes: u64,
    pub tx_bytes: u64,
    pub lost_packets: u64,
    pub payload_errors: u64,
}

/// What the ladder did.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Revocation {
    pub device: String,
    pub generation: u64,
    pub cause: String,
    #[serde(default)]
    pub first: Option<Box<Revocation>>,
    pub wake_us: u64,
    pub steps: Vec<Step>,
    pub reset_method: Option<String>,
    pub verdict: String,
    pub ground: String,
    pub released_bytes: u64,
    pub quarantined_bytes: u64,
    pub flight: Vec<FlightEvent>,
    pub flight_missed: u64,
}

/// A control event of the time before.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct FlightEvent {
    pub us: u64,
    pub thread: String,
    pub event: String,
    pub text: String,
}

/// What the recovery did.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Recovery {
    pub device: String,
    pub generation: u64,
    pub steps: Vec<RecoveryStep>,
}

/// A step of the recovery.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct RecoveryStep {
    pub step: String,
    pub us: u64,
}

/// A step of the ladder.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Step {
    pub step: String,
    pub outcome: String,
    pub us: u64,
    pub note: Option<String>,
}

/// The steps of a recovery under a port that goes on.
const RECOVERY: [&str; 6] = [
    "stopped",
    "reopened",
    "brought_up",
    "armed",
    "remapped",
    "requeued",
];

impl Report {
    /// Whether the recovery's steps are all there, in order, and took some time.
    fn tells_of_recovery(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| {
            let steps = recovery.steps.iter().map(|step| &*step.step);
            recovery.generation == 2
                && steps.eq(RECOVERY)
                && recovery.steps.iter().any(|step| step.us > 0)
        })
    }

    /// What the ladder's report says of its reset.
    fn reset_note(&self) -> Option<&str> {
        let steps = &self.revocation.as_ref()?.steps;
        steps
            .iter()
            .find(|step| step.step == "reset")?
            .note
            .as_deref()
    }

    /// Whether it says that a reset by `method` returned success and reset nothing (C43).
    fn tells_of_disbelief(&self, method: &str) -> bool {
        let words = format!("{method}: returned success and is not believed");
        self.reset_note().is_some_and(|note| note.contains(&words))
    }
}

/// Requests, and how they ended.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Completions {
    pub posted: u64,
    pub success: u64,
    pub error: u64,
    pub flushed: u64,
}

impl Completions {
    /// Whether every request that was posted ended once.
    #[must_use]
    pub fn add_up(&self) -> bool {
        self.posted == self.success + self.error + self.flushed
    }
}

/// The ledger's sums, in bytes and mappings.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the README's")]
pub struct Ledger {
    pub peak_bytes: u64,
    pub peak_mappings: u64,
    pub live_bytes: u64,
    pub quarantined_bytes: u64,
}

/// The ladder's steps, in the order in which they are taken.
const STEPS: [&str; 6] = [
    "mark_broken",
    "bus_master_off",
    "detached",
    "pending_drained",
    "reset",
    "unmapped",
];

/// What must hold of every run that ended well, and what is wrong if it does not.
fn accounts(report: &Report) -> [(bool, &'static str); 9] {
    let c = &report.completions;
    [
        (report.rx_packets == 0, "no packets"),
        (
            report.rx_packets + report.lost_packets != report.tx_packets,
            "packets were lost",
        ),
        (report.payload_errors != 0, "payload errors"),
        (!c.add_up(), "requests do not add up"),
        (report.ledger.live_bytes != 0, "bytes are live"),
        (
            report.ledger.quarantined_bytes != 0,
            "bytes are quarantined",
        ),
        (report.ledger.peak_mappings == 0, "nothing was ever mapped"),
        (
            report.stray_dma.is_some_and(|stray| stray != 0),
            "stray DMA",
        ),
        (report.exit != 0, "exit code"),
    ]
}

fn check(
    json: &str,
    more: impl Fn(&Report) -> Vec<(bool, &'static str)>,
) -> Result<Report, String> {
    let report: Report =
        serde_json::from_str(json).map_err(|error| format!("{error} in {json}"))?;
    let wrong = accounts(&report).into_iter().chain(more(&report));
    match wrong.into_iter().find(|(is, _)| *is) {
        Some((_, what)) => Err(format!("{what}: {json}")),
        None => Ok(report),
    }
}

/// Reads a report and makes sure that it tells of a clean run with traffic.
///
/// # Errors
///
/// What is not clean.
pub fn check_clean(json: &str) -> Result<Report, String> {
    check(json, |report| {
        vec![
            (report.lost_packets != 0, "packets were lost"),
            (report.rx_bytes != report.tx_bytes, "bytes were lost"),
            (
                report.completions.success != report.rx_packets + report.tx_packets,
                "completions and packets differ",
            ),
            (report.revocation.is_some(), "something was revoked"),
            (report.recovered, "something was recovered from"),
            (report.recovery.is_some(), "a recovery of nothing"),
        ]
    })
}

/// Reads a report and makes sure that it tells of a device that somebody broke in mid-traffic, that
/// was stopped by a reset of `method`, and recovered. A reset by `not_believed` returned success
/// before, and the report says that it reset nothing.
///
/// # Errors
///
/// What is not so.
pub fn check_recovered(
    json: &str,
    method: &str,
    not_believed: Option<&str>,
) -> Result<Report, String> {
    check(json, |report| {
        let Some(revocation) = &report.revocation else {
            return vec![(true, "nothing was revoked")];
        };
        let steps: Vec<&str> = revocation.steps.iter().map(|step| &*step.step).collect();
        let off = revocation
            .steps
            .iter()
            .find(|step| step.step == "bus_master_off");
        vec![
            (!report.recovered, "the device was not recovered"),
            (!report.tells_of_recovery(), "the recovery's steps"),
            (revocation.generation != 1, "it broke twice"),
            (steps != STEPS, "other steps"),
            (
                off.is_none_or(|step| step.outcome != "done"),
                "bus mastering was not seen to go off",
            ),
            (revocation.verdict != "revoked", "the verdict"),
            (
                revocation.reset_method.as_deref() != Some(method),
                "another reset",
            ),
            (
                not_believed.is_some_and(|method| !report.tells_of_disbelief(method)),
                "a reset that reset nothing was believed",
            ),
            (revocation.released_bytes == 0, "nothing was released"),
            (revocation.quarantined_bytes != 0, "something was kept"),
            (
                report.completions.flushed == 0,
                "nothing was under way at the break",
            ),
        ]
    })
}
