//! What a run comes to, as `--json` prints it.

use std::fmt;
use std::ops::Add;

use failstop::device::{Glance, RecoveryReport};
use failstop::dma::ledger::{Line, Totals};
use failstop::ladder::RevocationReport;
use failstop::queues::completions::Completions;
use serde::Serialize;

use super::RunArgs;
use crate::exit::Exit;
use crate::flow::Moved;

/// What a run comes to: the object that `--json` prints, whatever happens.
#[derive(Serialize, Default, Clone)]
pub(crate) struct Report {
    pub(super) device: String,
    pub(super) provider: String,
    pub(super) transport: String,
    pub(super) rx_packets: u64,
    pub(super) tx_packets: u64,
    pub(super) rx_bytes: u64,
    pub(super) tx_bytes: u64,
    /// Frames that were on their way when the device was broken.
    pub(super) lost_packets: u64,
    pub(super) payload_errors: u64,
    /// What each queue pair moved, in the order of their numbers; absent where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) queues: Vec<QueueReport>,
    pub(super) completions: CompletionsReport,
    pub(super) ledger: LedgerReport,
    /// Memory that is not released, and why.
    pub(super) kept: Vec<Kept>,
    /// The revocation ladder's report, of the last life if it ran twice; null when nothing was revoked.
    pub(super) revocation: Option<RevocationReport>,
    pub(super) recovered: bool,
    /// What the recovery did, the port's part included; null when there was none.
    pub(super) recovery: Option<RecoveryReport>,
    pub(super) stray_dma: Option<u64>,
    /// Why there was no run, or no orderly end of it.
    pub(super) error: Option<String>,
    pub(super) exit: u8,
}

#[derive(Serialize, Clone)]
pub(super) struct Kept {
    bytes: u64,
    iova: u64,
    owner: String,
    reason: String,
}

impl From<&Line> for Kept {
    fn from(line: &Line) -> Self {
        Self {
            bytes: line.len,
            iova: line.iova.0,
            owner: line.owner.to_string(),
            reason: line.reason.unwrap_or("still in use").to_owned(),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  kept: {} bytes at {:#x} of {}: {}",
            self.bytes, self.iova, self.owner, self.reason
        )
    }
}

/// One queue pair's part.
#[derive(Serialize, Default, Clone)]
pub(super) struct QueueReport {
    pub(super) queue: u32,
    pub(super) rx_packets: u64,
    pub(super) tx_packets: u64,
    pub(super) rx_bytes: u64,
    pub(super) tx_bytes: u64,
    pub(super) lost_packets: u64,
    pub(super) payload_errors: u64,
}

#[derive(Serialize, Default, Clone)]
pub(super) struct CompletionsReport {
    posted: u64,
    success: u64,
    error: u64,
    flushed: u64,
}

#[derive(Serialize, Default, Clone)]
pub(super) struct LedgerReport {
    peak_bytes: u64,
    peak_mappings: u64,
    live_bytes: u64,
    quarantined_bytes: u64,
}

impl Report {
    pub(super) fn count(&mut self, each: &[Moved], size: u32) {
        let queue = |(queue, moved): (u32, &Moved)| QueueReport {
            queue,
            rx_packets: moved.received,
            tx_packets: moved.sent,
            rx_bytes: moved.received_bytes,
            tx_bytes: moved.sent * u64::from(size),
            lost_packets: moved.lost,
            payload_errors: moved.errors,
        };
        if each.len() > 1 {
            self.queues = (0..).zip(each).map(queue).collect();
        }
        let moved = each.iter().copied().fold(Moved::default(), Moved::add);
        self.tx_packets = moved.sent;
        self.rx_packets = moved.received;
        self.tx_bytes = moved.sent * u64::from(size);
        self.rx_bytes = moved.received_bytes;
        self.lost_packets = moved.lost;
        self.payload_errors = moved.errors;
    }

    /// There was no run.
    pub(super) fn refused(options: &RunArgs, error: &anyhow::Error) -> Self {
        Self {
            device: options.device.to_string(),
            error: Some(crate::explain(error)),
            exit: Exit::NotUsable as u8,
            ..Self::default()
        }
    }

    /// The run ends here and now, because of `why`: what was counted is what is known without it.
    pub(crate) fn cut_short(&mut self, glance: Option<&Glance>, why: &str) -> Exit {
        let exit = match glance.map(Glance::look) {
            None => {
                self.error = Some(format!("ended at once by {why}: no device was in use"));
                Exit::NotUsable
            }
            Some(None) => {
                // What its accounts were at last is not known here.
                self.error = Some(format!(
                    "ended at once by {why}, while the device was being closed: memory that it may reach is kept until this process is gone"
                ));
                Exit::Quarantined
            }
            Some(Some(seen)) => {
                let mapped = seen.totals.live_bytes + seen.totals.quarantined_bytes;
                let broken = match &seen.broken {
                    Some(cause) => format!("broken ({cause})"),
                    None => "not broken".to_owned(),
                };
                self.error = Some(format!(
                    "ended at once by {why}: the device is {broken} and was not closed; {} bytes in {} mappings and {} bytes \
                     in quarantine have no ground to be released, and are kept until this process is gone",
                    seen.totals.live_bytes,
                    seen.totals.live_mappings,
                    seen.totals.quarantined_bytes
                ));
                self.completions = seen.completions.into();
                self.ledger = seen.totals.into();
                self.kept = seen.left.iter().map(Kept::from).collect();
                match (mapped > 0, seen.broken.is_some()) {
                    (true, _) => Exit::Quarantined,
                    (false, true) => Exit::Fenced,
                    (false, false) => Exit::Wrong,
                }
            }
        };
        self.exit = exit as u8;
        exit
    }

    /// What a person is told of that.
    pub(crate) fn why_cut_short(&self) -> String {
        let mut text = self.error.clone().unwrap_or_default();
        for kept in &self.kept {
            text = format!("{text}\n{kept}");
        }
        text
    }
}

impl From<Completions> for CompletionsReport {
    fn from(c: Completions) -> Self {
        Self {
            posted: c.posted,
            success: c.success,
            error: c.error,
            flushed: c.flushed,
        }
    }
}

impl From<Totals> for LedgerReport {
    fn from(t: Totals) -> Self {
        Self {
            peak_bytes: t.peak_bytes,
            peak_mappings: t.peak_mappings,
            live_bytes: t.live_bytes,
            quarantined_bytes: t.quarantined_bytes,
        }
    }
}
