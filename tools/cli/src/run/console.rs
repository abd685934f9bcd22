//! What a run says while it goes on, and at its end.

use std::io::{self, Write};

use failstop::device::{CloseReport, RecoverError};
use failstop::dma::ledger::{Ledger, Line};

use super::report::{Kept, Report};
use crate::breaking::Broken;

/// Where text goes, unless one JSON object is asked for.
pub(super) struct Console<'a> {
    pub(super) out: &'a mut dyn Write,
    pub(super) quiet: bool,
}

impl Console<'_> {
    pub(super) fn say(&mut self, text: &str) -> io::Result<()> {
        if self.quiet {
            Ok(())
        } else {
            writeln!(self.out, "{text}")
        }
    }
}

/// What the ladder did, and what came after it.
pub(super) fn say_broken(broken: &Broken, console: &mut Console<'_>) -> io::Result<()> {
    if let Some(report) = &broken.revocation {
        console.say(report.to_string().trim_end())?;
    }
    match &broken.recovered {
        Ok(generation) => {
            if let Some(report) = &broken.recovery {
                console.say(report.to_string().trim_end())?;
            }
            console.say(&format!(
                "recovered: {generation} began {} ms after the break",
                broken.gap.as_millis()
            ))
        }
        Err(error) => console.say(&format!("not recovered: {}", headline(error))),
    }
}

/// Why there was no recovery; what was tried is in the report that follows.
pub(super) fn headline(error: &RecoverError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

pub(super) fn ledger_line(ledger: &Ledger) -> String {
    let totals = ledger.totals();
    format!(
        "{} bytes live in {} mappings, {} bytes quarantined",
        totals.live_bytes, totals.live_mappings, totals.quarantined_bytes
    )
}

/// Says what a run came to; the recovery of a device that broke by itself, too.
pub(super) fn say_end(
    report: &Report,
    closed: &CloseReport,
    by_itself: bool,
    console: &mut Console<'_>,
) -> io::Result<()> {
    if by_itself && report.recovered {
        // Nobody has heard of it yet.
        if let Some(revocation) = &report.revocation {
            console.say(revocation.to_string().trim_end())?;
        }
        if let Some(recovery) = &report.recovery {
            console.say(recovery.to_string().trim_end())?;
        }
    }
    console.say(&format!(
        "sent {} frames, received {}, {} with errors",
        report.tx_packets, report.rx_packets, report.payload_errors
    ))?;
    for queue in &report.queues {
        console.say(&format!(
            "  queue pair {}: sent {}, received {}, {} with errors",
            queue.queue, queue.tx_packets, queue.rx_packets, queue.payload_errors
        ))?;
    }
    if report.recovered || report.lost_packets > 0 {
        console.say(&format!(
            "  {} were on their way when the device was broken",
            report.lost_packets
        ))?;
    }
    let c = &closed.completions;
    console.say(&format!(
        "requests: {} posted = {} successful + {} in error + {} flushed",
        c.posted, c.success, c.error, c.flushed
    ))?;
    let t = &closed.totals;
    console.say(&format!(
        "after: {} bytes live, {} bytes quarantined; at most {} bytes in {} mappings",
        t.live_bytes, t.quarantined_bytes, t.peak_bytes, t.peak_mappings
    ))?;
    if let Some(stray) = report.stray_dma {
        console.say(&format!(
            "the device tried {stray} accesses outside its mappings"
        ))?;
    }
    if let Some(cause) = &closed.broken {
        console.say(&format!("the device was broken: {cause}"))?;
    }
    let mut told = &[][..];
    if let Some(report) = &closed.revocation {
        console.say(report.to_string().trim_end())?;
        told = &report.quarantined;
    }
    // The ladder has told of what it kept.
    let same = |line: &Line, other: &Line| {
        (line.iova, line.len, line.owner) == (other.iova, other.len, other.owner)
    };
    let untold = |line: &&Line| !told.iter().any(|other| same(line, other));
    for line in closed.left.iter().filter(untold) {
        console.say(&Kept::from(line).to_string())?;
    }
    Ok(())
}
