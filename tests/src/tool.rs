//! The tool, as a person runs it: clean runs, bad input, signals.

use std::env;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};

use crate::fixture::{Outcome, ensure, ensure_eq};
use crate::report::{self, Queue, Report};

mod signals;

/// A case, by name.
type ToolCase = (&'static str, fn() -> Outcome);

const CASES: &[ToolCase] = &[
    ("run_ends_with_clean_accounts", clean_run),
    ("run_says_what_the_ledger_says", run_in_words),
    (
        "run_with_large_frames_ends_with_clean_accounts",
        large_frames,
    ),
    ("run_with_16_queues_moves_frames_over_each", sixteen_queues),
    (
        "a_break_of_four_queues_is_a_gap_for_each",
        four_queues_broken_and_recovered,
    ),
    (
        "a_device_that_is_refused_is_a_report_with_the_error",
        refused_in_json,
    ),
    (
        "what_broke_a_fenced_device_is_read_before_the_last_attempt",
        first_cause_first,
    ),
    (
        "files_and_sockets_that_make_no_sense_are_usage_errors",
        nonsense_in_files,
    ),
    (
        "a_break_in_mid_traffic_is_a_gap_that_is_recovered_from",
        broken_and_recovered,
    ),
    ("a_break_is_told_step_by_step", broken_in_words),
    ("memory_left_in_quarantine_is_exit_code_4", quarantined),
    ("a_fenced_device_with_clean_accounts_is_exit_code_5", fenced),
    (
        "an_emulator_that_dies_has_let_go_of_everything_and_exit_code_5",
        dead,
    ),
    (
        "a_queue_that_does_not_stop_is_recovered_from_and_exit_code_0",
        recovered,
    ),
    (
        "a_break_that_was_survived_is_told_as_text_too",
        survived_in_words,
    ),
    (
        "what_was_tried_on_a_device_that_is_not_recovered_is_told_once",
        told_once,
    ),
    (
        "frames_lost_after_a_recovery_are_lost",
        lost_after_a_recovery,
    ),
    ("messages_that_nobody_can_read_change_nothing", unheard),
    ("output_that_nobody_reads_changes_no_exit_code", unread),
    (
        "a_report_that_cannot_be_written_hides_no_memory_that_is_kept",
        unwritten,
    ),
    ("nonsense_on_the_command_line_is_a_usage_error", nonsense),
    ("info_tells_what_a_server_serves", info_served),
    ("a_device_that_does_not_exist_is_named", no_such_device),
    ("a_function_that_does_not_exist_is_named", no_such_function),
    ("a_socket_that_does_not_exist_is_named", no_such_socket),
    ("a_file_that_is_no_server_is_named", not_a_server),
    ("a_server_that_never_answers_is_given_up", silent_server),
    ("a_server_that_dies_in_mid_message_is_named", dying_server),
    ("the_emulator_does_not_outlive_the_tool", no_orphans),
];

/// The cases, as tests.
pub fn trials() -> Vec<Trial> {
    CASES
        .iter()
        .chain(signals::CASES)
        .map(|&(name, case)| Trial::test(format!("tool/{name}"), case))
        .collect()
}

/// The tool's executable, built: it belongs to another package, for which cargo promises no path.
///
/// # Errors
///
/// What cargo said.
pub fn path() -> Result<&'static Path, std::io::Error> {
    static TOOL: Mutex<Option<&'static Path>> = Mutex::new(None);
    let mut tool = TOOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = *tool {
        return Ok(path);
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // As the tests are built, so that nothing is compiled twice.
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--workspace", "--bin", "failstop"])
        .args(["--profile", "test", "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(std::io::Error::other(said));
    }
    let path = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| Some(message["executable"].as_str()?.to_owned()))
        .find(|path| path.ends_with("/failstop"));
    let path = path.ok_or_else(|| std::io::Error::other("cargo built no failstop"))?;
    let path: &'static Path = Box::leak(PathBuf::from(path).into_boxed_path());
    *tool = Some(path);
    Ok(path)
}

fn failstop(arguments: &[&str]) -> Result<Output, Failed> {
    Ok(Command::new(path()?)
        .args(arguments)
        .stdin(Stdio::null())
        .output()?)
}

fn text(output: &Output) -> String {
    format!(
        "{}{}[{}]",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        output.status
    )
}

/// Runs the tool, which must end with `code` and say every one of `parts`.
fn fails_with(arguments: &[&str], code: i32, parts: &[&str]) -> Outcome {
    let output = failstop(arguments)?;
    let said = text(&output);
    ensure_eq(output.status.code(), Some(code), &said)?;
    for part in parts {
        ensure(said.contains(part), || {
            format!("does not say `{part}`: {said}")
        })?;
    }
    ensure(!said.contains("panicked"), || said.clone())
}

fn clean(arguments: &[&str]) -> Result<Report, Failed> {
    let output = failstop(arguments)?;
    ensure_eq(output.status.code(), Some(0), &text(&output))?;
    Ok(report::check_clean(&String::from_utf8_lossy(
        &output.stdout,
    ))?)
}

fn clean_run() -> Outcome {
    let report = clean(&["run", "--seconds", "1", "--json"])?;
    ensure_eq(report.device.as_str(), "emu:82576", "device")?;
    ensure_eq(report.provider.as_str(), "igb", "provider")?;
    ensure_eq(report.transport.as_str(), "vfio-user", "transport")?;
    ensure_eq(report.stray_dma, Some(0), "stray DMA")?;
    ensure_eq(report.rx_bytes, report.rx_packets * 60, "bytes")
}

fn run_in_words() -> Outcome {
    let output = failstop(&["run", "--seconds", "0.2"])?;
    let said = text(&output);
    for part in [
        "before:",
        "receive queue gone",
        "memory region gone",
        "after: 0 bytes live, 0 bytes quarantined",
    ] {
        ensure(said.contains(part), || {
            format!("does not say `{part}`: {said}")
        })?;
    }
    Ok(())
}

fn large_frames() -> Outcome {
    let report = clean(&["run", "--seconds", "0.5", "--size", "9000", "--json"])?;
    ensure_eq(report.rx_bytes, report.rx_packets * 9000, "bytes")
}

fn sixteen_queues() -> Outcome {
    let report = clean(&["run", "--seconds", "1", "--queues", "16", "--json"])?;
    each_queue_moved(&report, 16)?;
    // Rings, frames and port of each.
    ensure_eq(report.ledger.peak_mappings, 16 * 3, "mappings")
}

fn each_queue_moved(report: &Report, queues: u32) -> Outcome {
    let numbers: Vec<u32> = report.queues.iter().map(|queue| queue.queue).collect();
    ensure_eq(numbers, (0..queues).collect(), "queue pairs")?;
    let idle = report.queues.iter().find(|queue| queue.rx_packets == 0);
    ensure(idle.is_none(), || format!("moved nothing: {idle:?}"))?;
    let sum = |count: fn(&Queue) -> u64| report.queues.iter().map(count).sum::<u64>();
    ensure_eq(sum(|one| one.rx_packets), report.rx_packets, "received")?;
    ensure_eq(sum(|one| one.tx_packets), report.tx_packets, "sent")?;
    ensure_eq(sum(|one| one.lost_packets), report.lost_packets, "lost")
}

fn four_queues_broken_and_recovered() -> Outcome {
    let output = failstop(&[
        "run",
        "--seconds",
        "1",
        "--break-after",
        "0.4",
        "--queues",
        "4",
        "--json",
    ])?;
    ensure_eq(output.status.code(), Some(0), &text(&output))?;
    let json = String::from_utf8_lossy(&output.stdout);
    each_queue_moved(&report::check_recovered(&json, "server", None)?, 4)
}

fn refused_in_json() -> Outcome {
    let output = failstop(&["run", "emu:82576,fault=gone@open", "--json"])?;
    ensure_eq(output.status.code(), Some(3), &text(&output))?;
    let report: Report = serde_json::from_slice(&output.stdout)?;
    ensure_eq(report.exit, 3, "exit in the report")?;
    ensure_eq(
        report.device.as_str(),
        "emu:82576,fault=gone@open",
        "device",
    )?;
    let error = report.error.ok_or("no error in the report")?;
    ensure(
        text(&output).contains(&format!("failstop: {error}")),
        || text(&output),
    )
}

fn first_cause_first() -> Outcome {
    let output = failstop(&["run", "emu:82576,fault=gone@1000", "--seconds", "0.3"])?;
    let said = text(&output);
    ensure_eq(output.status.code(), Some(5), &said)?;
    let report = String::from_utf8_lossy(&output.stdout);
    let (before, after) = report
        .split_once("another attempt to stop it")
        .ok_or_else(|| said.clone())?;
    ensure(before.contains("generation 1: broken, because"), || {
        said.clone()
    })?;
    ensure(before.contains("mark_broken     done\n"), || said.clone())?;
    ensure(!after.contains("broken, because"), || said.clone())?;
    ensure(said.contains("start its server again"), || said.clone())?;
    ensure(!said.contains("power-cycle"), || said.clone())
}

fn nonsense_in_files() -> Outcome {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("notes");
    std::fs::write(&file, [0xFF, 0xFE])?;
    let name = file.to_str().ok_or("a folder without a name")?;
    fails_with(&["replay", name], 2, &[name, "no text"])?;
    fails_with(&["replay", "/nonexistent/file"], 2, &["/nonexistent/file"])?;
    fails_with(&["emulate", "--socket", name], 2, &[name, "no socket"])?;
    let iommu = ["run", "emu:82576", "--iommu", "iommufd"];
    fails_with(&iommu, 2, &["PCI function"])
}

/// Somebody breaks the device, which is recovered under a port that goes on (R10) (R11).
fn broken_and_recovered() -> Outcome {
    let arguments = ["run", "--seconds", "1", "--break-after", "0.4", "--json"];
    let output = failstop(&arguments)?;
    ensure_eq(output.status.code(), Some(0), &text(&output))?;
    let json = String::from_utf8_lossy(&output.stdout);
    let report = report::check_recovered(&json, "server", None)?;
    ensure_eq(report.stray_dma, Some(0), "stray DMA")
}

fn broken_in_words() -> Outcome {
    let output = failstop(&["run", "--seconds", "0.4", "--break-after", "0.2"])?;
    let said = text(&output);
    for part in [
        "generation 1: broken, because it was asked for",
        "bus_master_off  done",
        "revoked: the function is stopped and every mapping is gone",
        "us  brought_up",
        "us  requeued",
        "recovered: generation 2",
        "after: 0 bytes live, 0 bytes quarantined",
    ] {
        ensure(said.contains(part), || {
            format!("does not say `{part}`: {said}")
        })?;
    }
    Ok(())
}

fn quarantined() -> Outcome {
    // Nobody says that the memory was let go of.
    let report = ends_with("emu:82576,fault=server-hangs@1000", 4)?;
    ensure(report.ledger.quarantined_bytes > 0, || {
        format!("{report:?}")
    })?;
    let kept: u64 = report.kept.iter().map(|kept| kept.bytes).sum();
    ensure_eq(kept, report.ledger.quarantined_bytes, "bytes that are kept")?;
    let revocation = report.revocation.ok_or("nothing was revoked")?;
    ensure_eq(revocation.verdict.as_str(), "quarantined", "the verdict")
}

/// Every mapping is taken from a device that will not let go of bus mastering, so that its memory
/// goes back: there is no switch for it (C9).
fn fenced() -> Outcome {
    let report = ends_with("emu:82576,fault=bme-readback@1000", 5)?;
    ensure_eq(report.recovered, false, "recovered")?;
    revoked(&report)
}

/// Its end is proof to who started it (R3).
fn dead() -> Outcome {
    let report = ends_with("emu:82576,fault=server-dies@1000", 5)?;
    ensure_eq(report.ledger.quarantined_bytes, 0, "quarantined bytes")?;
    ensure_eq(report.ledger.live_bytes, 0, "live bytes")
}

/// The ladder stops what did not stop by itself, and the device goes on (R10).
fn recovered() -> Outcome {
    let report = ends_with("emu:82576,fault=rxq-stuck", 0)?;
    ensure_eq(report.recovered, true, "recovered")?;
    revoked(&report)
}

fn survived_in_words() -> Outcome {
    let device = "emu:82576,fault=rxq-stuck@destroy=1";
    let parts = [
        "a queue did not stop",
        "bus_master_off  done",
        "revoked: the function is stopped",
        "us  brought_up",
    ];
    fails_with(&["run", device, "--seconds", "0.3"], 0, &parts)
}

fn told_once() -> Outcome {
    let device = "emu:82576,fault=gone@1000";
    let output = failstop(&["run", device, "--seconds", "0.3"])?;
    ensure_eq(output.status.code(), Some(5), &text(&output))?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure_eq(why.lines().count(), 1, &why)?;
    ensure(why.contains("start its server again"), || why.to_string())?;
    let report = String::from_utf8_lossy(&output.stdout);
    for (part, times) in [
        ("broken, because", 1),
        ("another attempt to stop it", 1),
        ("were on their way when the device was broken", 1),
        // The name stands in the headings.
        ("vfio-user:", 2),
    ] {
        ensure_eq(report.matches(part).count(), times, &report)?;
    }
    Ok(())
}

/// What was sent after the gap was under way at no break.
fn lost_after_a_recovery() -> Outcome {
    let device = "emu:82576,fault=rx-stalls@bme-on=2+frames=200";
    let output = failstop(&[
        "run",
        device,
        "--seconds",
        "0.8",
        "--break-after",
        "0.2",
        "--json",
    ])?;
    ensure_eq(output.status.code(), Some(1), &text(&output))?;
    let report: Report = serde_json::from_slice(&output.stdout)?;
    ensure_eq(report.recovered, true, "recovered")
}

fn unheard() -> Outcome {
    let full = || std::fs::File::options().write(true).open("/dev/full");
    for (device, exit) in [
        ("emu:82576,fault=server-dies@1000", 5),
        ("emu:82576,fault=gone@open", 3),
    ] {
        let output = Command::new(path()?)
            .args(["run", device, "--seconds", "0.3", "--json"])
            .stderr(full()?)
            .output()?;
        ensure_eq(output.status.code(), Some(exit), device)?;
        let report: Report = serde_json::from_slice(&output.stdout)?;
        ensure_eq(i32::from(report.exit), exit, "exit in the report")?;
    }
    Ok(())
}

fn unread() -> Outcome {
    for json in [&["--json"][..], &[]] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let status = Command::new(path()?)
            .args(["run", "emu:82576,fault=server-hangs@1000"])
            .args(["--seconds", "0.3"])
            .args(json)
            .stdout(writer)
            .stderr(Stdio::null())
            .status()?;
        ensure_eq(status.code(), Some(4), &format!("{json:?}"))?;
    }
    Ok(())
}

/// The other codes do not say that anything is left (R3).
fn unwritten() -> Outcome {
    let output = Command::new(path()?)
        .args(["run", "emu:82576,fault=server-hangs@1000"])
        .args(["--seconds", "0.3", "--json"])
        .stdout(std::fs::File::options().write(true).open("/dev/full")?)
        .output()?;
    let said = text(&output);
    ensure_eq(output.status.code(), Some(4), &said)?;
    ensure(said.contains("standard output cannot be written"), || said)
}

fn revoked(report: &Report) -> Outcome {
    ensure_eq(report.ledger.quarantined_bytes, 0, "quarantined bytes")?;
    ensure_eq(report.ledger.live_bytes, 0, "live bytes")?;
    ensure_eq(report.stray_dma, Some(0), "stray DMA")?;
    let revocation = report.revocation.as_ref();
    let revocation = revocation.ok_or("nothing was revoked")?;
    ensure_eq(revocation.verdict.as_str(), "revoked", "the verdict")
}

/// Runs on a device that misbehaves; every request ends once all the same.
fn ends_with(device: &str, exit: u8) -> Result<Report, Failed> {
    let output = failstop(&["run", device, "--seconds", "0.5", "--json"])?;
    ensure_eq(output.status.code(), Some(exit.into()), &text(&output))?;
    let report: Report = serde_json::from_slice(&output.stdout)?;
    ensure_eq(report.exit, exit, "exit in the report")?;
    let c = &report.completions;
    ensure(c.add_up(), || format!("requests do not add up: {c:?}"))?;
    Ok(report)
}

fn nonsense() -> Outcome {
    fails_with(&["run", "eth0"], 2, &["0000:01:00.0", "emu:82576"])?;
    fails_with(&["run", "emu:rtl8139"], 2, &["emu:82576"])?;
    fails_with(
        &["run", "emu:82576,fault=no-such-fault"],
        2,
        &["no-such-fault"],
    )?;
    fails_with(&["run", "--seconds", "forever"], 2, &["forever"])?;
    fails_with(&["run", "--seconds", "-1"], 2, &[])?;
    fails_with(&["run", "--size", "1"], 2, &["60"])?;
    fails_with(&["run", "--queues", "17"], 2, &["16"])?;
    fails_with(&["run", "--break-after", "9"], 2, &["--seconds"])?;
    fails_with(&["run", "--iommu", "magic"], 2, &["container"])?;
    fails_with(&["bind", "--", "-1"], 2, &[])?;
    fails_with(&[], 2, &["run"])
}

fn info_served() -> Outcome {
    let output = failstop(&["info", "emu:82576", "--json"])?;
    ensure_eq(output.status.code(), Some(0), &text(&output))?;
    let info: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure_eq(&info["id"], &"8086:10c9".into(), "id")?;
    ensure_eq(&info["class"], &"020000".into(), "class")?;
    ensure_eq(&info["reset_methods"][0], &"server".into(), "reset")?;
    ensure_eq(
        &info["strength"]["verdict"],
        &"server's word".into(),
        "strength",
    )?;
    let without = failstop(&["info", "emu:82576,fault=no-flr"])?;
    let said = text(&without);
    ensure(said.contains("the server offers none"), || said.clone())
}

fn no_such_device() -> Outcome {
    fails_with(&["info", "ffff:ff:1f.7"], 3, &["ffff:ff:1f.7"])?;
    fails_with(&["bind", "ffff:ff:1f.7"], 3, &["ffff:ff:1f.7"])
}

fn no_such_function() -> Outcome {
    fails_with(&["run", "ffff:ff:1f.7"], 3, &["ffff:ff:1f.7"])
}

fn no_such_socket() -> Outcome {
    fails_with(
        &["run", "vfio-user:/nonexistent/socket"],
        3,
        &["/nonexistent/socket"],
    )
}

fn not_a_server() -> Outcome {
    fails_with(&["run", "vfio-user:/dev/null"], 3, &["/dev/null"])
}

fn silent_server() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("silent");
    // Connections are taken by the kernel, and nobody answers.
    let _listener = UnixListener::bind(&path)?;
    let name = format!("vfio-user:{}", path.display());
    let start = Instant::now();
    fails_with(&["run", &name], 3, &["silent"])?;
    ensure(start.elapsed() < Duration::from_secs(30), || {
        "gave up too late".into()
    })
}

fn dying_server() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("dying");
    let listener = UnixListener::bind(&path)?;
    let server = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut hello = [0; 16];
        stream.read_exact(&mut hello)?;
        // Half a header.
        stream.write_all(&hello[..7])
    });
    let name = format!("vfio-user:{}", path.display());
    fails_with(&["run", &name], 3, &["dying"])?;
    Ok(server.join().map_err(|_| "the server panicked")??)
}

fn no_orphans() -> Outcome {
    let mut child = Command::new(path()?)
        .args(["run", "--seconds", "600"])
        .stdout(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_millis(1000));
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
    let emulator: u32 = children()?
        .split_whitespace()
        .next()
        .ok_or("no emulator was started")?
        .parse()?;
    child.kill()?;
    child.wait()?;
    let end = Instant::now() + Duration::from_secs(10);
    let stat = format!("/proc/{emulator}/stat");
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        ensure(Instant::now() < end, || {
            format!("process {emulator} lives on")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
