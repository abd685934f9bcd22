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
    pub payload_errors: u64,
    pub completions: Completions,
    pub ledger: Ledger,
    pub revocation: serde_json::Value,
    pub recovered: bool,
    pub stray_dma: Option<u64>,
    pub exit: u8,
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

/// Reads a report and makes sure that it tells of a clean run with traffic.
///
/// # Errors
///
/// What is not clean.
pub fn check_clean(json: &str) -> Result<Report, String> {
    let report: Report =
        serde_json::from_str(json).map_err(|error| format!("{error} in {json}"))?;
    let c = &report.completions;
    let wrong = [
        (report.rx_packets == 0, "no packets"),
        (report.rx_packets != report.tx_packets, "packets were lost"),
        (report.rx_bytes != report.tx_bytes, "bytes were lost"),
        (report.payload_errors != 0, "payload errors"),
        (
            c.posted != c.success + c.error + c.flushed,
            "requests do not add up",
        ),
        (
            c.success != report.rx_packets + report.tx_packets,
            "completions and packets differ",
        ),
        (report.ledger.live_bytes != 0, "bytes are live"),
        (
            report.ledger.quarantined_bytes != 0,
            "bytes are quarantined",
        ),
        (report.ledger.peak_mappings == 0, "nothing was ever mapped"),
        (!report.revocation.is_null(), "something was revoked"),
        (
            report.stray_dma.is_some_and(|stray| stray != 0),
            "stray DMA",
        ),
        (report.exit != 0, "exit code"),
    ];
    match wrong.iter().find(|(is, _)| *is) {
        Some((_, what)) => Err(format!("{what}: {json}")),
        None => Ok(report),
    }
}
