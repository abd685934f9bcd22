//! What a run comes to, as `--json` prints it.

use std::fmt;
use std::ops::Add;

use failstop::device::{CloseReport, Glance, RecoveryReport, Seen};
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

/// What is known of the device of a run that ends at once.
pub(crate) enum Known {
    /// There was none.
    NotOpen,
    /// It was opened, and its accounts could not be read.
    Unread,
    Read(Seen),
}

impl Known {
    /// What is seen of it now; `glance` is of the one that was opened.
    pub(crate) fn of(glance: Option<&Glance>) -> Self {
        match glance {
            None => Self::NotOpen,
            Some(glance) => glance.look().map_or(Self::Unread, Self::Read),
        }
    }
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

    /// Fills in what the device's accounts say, now that it is closed, and judges the run.
    pub(super) fn judge(&mut self, closed: &CloseReport, went_on: bool) -> Exit {
        self.completions = closed.completions.into();
        self.ledger = closed.totals.into();
        self.kept = closed.left.iter().map(Kept::from).collect();
        if closed.revocation.is_some() {
            self.revocation.clone_from(&closed.revocation);
        }
        let all_there = self.rx_packets + self.lost_packets == self.tx_packets;
        let exit = if closed.totals.quarantined_bytes > 0 || closed.totals.live_bytes > 0 {
            Exit::Quarantined
        } else if closed.broken.is_some() {
            Exit::Fenced
        } else if self.payload_errors > 0 || !all_there || !went_on {
            Exit::Wrong
        } else {
            Exit::Clean
        };
        self.exit = exit as u8;
        exit
    }

    /// The run ends here and now, because of `why`: what was counted is what is known without it.
    pub(crate) fn cut_short(&mut self, known: Known, why: &str) -> Exit {
        let (exit, state) = match known {
            Known::NotOpen => (Exit::NotUsable, "no device was in use".to_owned()),
            Known::Unread => (
                Exit::Quarantined,
                "the device's accounts were not read, and what it may reach is kept until this process is gone".to_owned(),
            ),
            Known::Read(seen) => self.seen(&seen),
        };
        self.error = Some(format!("ended at once by {why}: {state}"));
        self.exit = exit as u8;
        exit
    }

    /// Fills in what was seen of a device whose run did not come to its end; the exit, and what state
    /// the device is in.
    fn seen(&mut self, seen: &Seen) -> (Exit, String) {
        self.completions = seen.completions.into();
        self.ledger = seen.totals.into();
        self.kept = seen.left.iter().map(Kept::from).collect();
        let broken = match &seen.broken {
            Some(cause) => format!("broken ({cause})"),
            None => "not broken".to_owned(),
        };
        let t = &seen.totals;
        if t.live_bytes + t.quarantined_bytes > 0 {
            let state = format!(
                "the device is {broken}; {} bytes in {} mappings and {} bytes in quarantine have no ground to be \
                 released, and are kept until this process is gone",
                t.live_bytes, t.live_mappings, t.quarantined_bytes
            );
            return (Exit::Quarantined, state);
        }
        let state = format!("the device is {broken}; nothing is mapped for it, nor in quarantine");
        match seen.broken {
            Some(_) => (Exit::Fenced, state),
            None => (Exit::Wrong, state),
        }
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

#[cfg(test)]
mod tests {
    use failstop::queues::lifecycle::Cause;

    use super::*;

    fn cut_short(known: Known) -> (Exit, String) {
        let mut report = Report::default();
        let exit = report.cut_short(known, "a test");
        assert_eq!(report.exit, exit as u8);
        (exit, report.error.unwrap())
    }

    fn seen(totals: Totals, broken: Option<Cause>) -> Known {
        Known::Read(Seen {
            totals,
            left: Vec::new(),
            completions: Completions::default(),
            broken,
        })
    }

    #[test]
    fn who_did_not_read_the_accounts_does_not_say_that_nothing_is_kept() {
        let (exit, error) = cut_short(Known::Unread);
        assert_eq!(exit, Exit::Quarantined);
        assert!(error.contains("accounts were not read"), "{error}");
        assert!(error.contains("kept until this process is gone"), "{error}");
    }

    #[test]
    fn memory_in_quarantine_is_kept_whether_the_device_is_there_or_not() {
        let totals = Totals {
            quarantined_bytes: 4096,
            ..Totals::default()
        };
        let (exit, error) = cut_short(seen(totals, Some(Cause::User)));
        assert_eq!(exit, Exit::Quarantined);
        assert!(error.contains("4096 bytes in quarantine"), "{error}");
    }

    #[test]
    fn accounts_with_nothing_in_them_are_what_the_device_was() {
        let (fenced, _) = cut_short(seen(Totals::default(), Some(Cause::User)));
        let (wrong, error) = cut_short(seen(Totals::default(), None));
        assert_eq!((fenced, wrong), (Exit::Fenced, Exit::Wrong));
        assert!(error.contains("nothing is mapped for it"), "{error}");
    }
}
