//! T2: the suite in guests under QEMU, behind real kernel VFIO. Each case is a process of its own
//! in the guest; each machine boots once, and its kernel's log is judged at the end.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use failstop_tests::cases::{Case, Needs};
use failstop_tests::kernel::Machine;
use failstop_tests::kernel::outside::ASK;
use failstop_tests::plan::{PLANS, Plan, Reset, variable};
use libtest_mimic::{Arguments, Failed, Trial};
use xtask::protocol::Run;
use xtask::vm::{Boot, Guest, Setup, topologies};

/// How long one case may take in a guest without hardware virtualization.
const CASE: Duration = Duration::from_secs(180);
/// How long a guest may live.
const LIFETIME: Duration = Duration::from_secs(1500);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Two guests at a time: one alone leaves much of two cores idle, since a case waits a lot.
    arguments.test_threads = Some(2);
    libtest_mimic::run(&arguments, interleaved()).exit_code()
}

/// The trials of all machines, in an order by which two threads that take them one after another
/// work on two machines. A machine's own stay in order.
fn interleaved() -> Vec<Trial> {
    let mut lanes = [Vec::new(), Vec::new()];
    for plan in PLANS {
        let shorter = usize::from(lanes[1].len() < lanes[0].len());
        lanes[shorter].extend(trials(plan));
    }
    let [one, other] = lanes.map(Vec::into_iter);
    let (mut one, mut other) = (one.fuse(), other.fuse());
    std::iter::from_fn(|| {
        let pair = [one.next(), other.next()];
        pair.iter().any(Option::is_some).then_some(pair)
    })
    .flatten()
    .flatten()
    .collect()
}

fn trials(plan: &'static Plan) -> Vec<Trial> {
    let guest = Arc::new(SharedGuest {
        plan,
        turn: Mutex::new(()),
        waiting: AtomicUsize::new(0),
        running: Mutex::new(None),
    });
    let mut trials = Vec::new();
    for iommu in plan.iommu {
        for case in plan.cases() {
            let guest = guest.clone();
            let name = format!("{plan}/{iommu}/{}", case.name);
            trials.push(Trial::test(name, move || {
                guest.alone(|guest| guest.case(case, iommu))
            }));
        }
        if plan.runs_tool() {
            let guest = guest.clone();
            let name = format!("{plan}/{iommu}/failstop_run_ends_with_clean_accounts");
            trials.push(Trial::test(name, move || {
                guest.alone(|guest| guest.tool_run(iommu))
            }));
        }
        for reset in plan.resets {
            let guest = guest.clone();
            let name = format!(
                "{plan}/{iommu}/a_break_in_mid_traffic_of_{}_is_recovered_from_by_{}",
                reset.role, reset.proven
            );
            trials.push(Trial::test(name, move || {
                guest.alone(|guest| guest.tool_break(iommu, reset))
            }));
        }
    }
    for name in plan.kernel_cases() {
        let guest = guest.clone();
        let title = format!("{plan}/{name}");
        trials.push(Trial::test(title, move || {
            guest.alone(|guest| guest.kernel_case(&name))
        }));
    }
    let name = format!("{plan}/the_kernel_logged_no_iommu_fault_and_no_bug");
    trials.push(Trial::test(name, move || guest.end()));
    trials
}

/// A guest that the trials of one machine share; booted by the first of them.
struct SharedGuest {
    plan: &'static Plan,
    /// Held by the case that runs: a machine has one device under test.
    turn: Mutex<()>,
    /// Cases that run or wait for their turn.
    waiting: AtomicUsize,
    running: Mutex<Option<Arc<Guest>>>,
}

/// Counts one in until dropped, also by a panic.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl SharedGuest {
    /// Runs a case while no other of this machine does.
    fn alone(&self, case: impl FnOnce(&Self) -> Result<(), Failed>) -> Result<(), Failed> {
        let _counted = Counted::new(&self.waiting);
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        case(self)
    }

    fn get(&self) -> Result<Arc<Guest>, Failed> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(guest) = &*running {
            return Ok(guest.clone());
        }
        let topology = topologies::find(self.plan.topology).map_err(words)?;
        let boot = Boot::new(self.plan.kernel.parse().map_err(words)?, topology)
            .file(env!("CARGO_BIN_EXE_failstop-suite"))
            .and_then(|boot| boot.file(env!("CARGO_BIN_EXE_failstop-kernel-suite")))
            .and_then(|boot| boot.file(failstop_tests::tool::path()?))
            .map_err(words)?
            .env("RUST_BACKTRACE", "1")
            .env("FAILSTOP_TOPOLOGY", self.plan.topology)
            .lifetime(LIFETIME);
        let boot = match self.plan.words() {
            Some(words) => boot.append(words),
            None => boot,
        };
        let guest = Arc::new(boot.start(setup()?).map_err(words)?);
        *running = Some(guest.clone());
        Ok(guest)
    }

    /// Runs a line of shell, and fails with what it printed unless it succeeds.
    fn succeeds(&self, run: &Run) -> Result<String, Failed> {
        let finished = self.get()?.run(run).map_err(words)?;
        if !finished.success() {
            return Err(finished.text().into());
        }
        Ok(String::from_utf8_lossy(&finished.stdout).into_owned())
    }

    /// Runs one test of a test program; a filter that matches nothing would pass too.
    fn one_test(&self, run: &Run) -> Result<(), Failed> {
        let output = self.succeeds(run)?;
        if output.contains("1 passed") {
            Ok(())
        } else {
            Err(output.into())
        }
    }

    /// Runs one kernel case, which binds what it needs.
    fn kernel_case(&self, name: &str) -> Result<(), Failed> {
        let run = Run::new(["failstop-kernel-suite", "--exact", name]).timeout(CASE);
        if self.plan.machine != Some(Machine::BadHost) {
            return self.one_test(&run);
        }
        // A case of this machine asks for what only we can do.
        let guest = self.get()?;
        let (mut told, mut done) = (String::new(), 0);
        let mut failed = None;
        let running = guest.spawn(&run).map_err(words)?;
        let finished = running.wait_with(|is_error, bytes| {
            if is_error {
                return;
            }
            told += &String::from_utf8_lossy(bytes);
            let asks = told
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            let asked: Vec<&str> = asks.filter_map(|line| line.strip_prefix(ASK)).collect();
            for ask in &asked[done..] {
                if let Err(error) = obey(&guest, ask.trim()) {
                    failed = Some(error);
                }
            }
            done = asked.len();
        });
        let finished = finished.map_err(words)?;
        match failed {
            Some(error) => Err(error),
            None if finished.success() && told.contains("1 passed") => Ok(()),
            None => Err(finished.text().into()),
        }
    }

    /// Runs one case of the suite.
    fn case(&self, case: &Case, iommu: &str) -> Result<(), Failed> {
        if case.needs != Needs::LinkDown {
            return self.suite(case.name, iommu, &[]);
        }
        self.set_link(false)?;
        let outcome = self.suite(case.name, iommu, &[("FAILSTOP_LINK_DOWN", "1")]);
        self.set_link(true)?;
        outcome
    }

    /// Takes the link of the device under test up or down.
    fn set_link(&self, up: bool) -> Result<(), Failed> {
        let arguments = serde_json::json!({"name": self.plan.device, "up": up});
        let mut qmp = self.get()?.qmp().map_err(words)?;
        qmp.execute("set_link", arguments).map_err(words)?;
        Ok(())
    }

    /// The same, with more variables in its environment.
    fn suite(&self, name: &str, iommu: &str, more: &[(&str, &str)]) -> Result<(), Failed> {
        let device = self.plan.device_variable();
        // To start the tool takes longer here than most cases do.
        let line = format!(
            "{{ [ -e /sys/bus/pci/drivers/vfio-pci/${device} ] || failstop bind ${device} >&2; }} && \
             FAILSTOP_DEVICE=${device} failstop-suite --exact {name}"
        );
        let run = Run::shell(line).env("FAILSTOP_IOMMU", iommu).timeout(CASE);
        let run = more
            .iter()
            .fold(run, |run, (name, value)| run.env(*name, *value));
        self.one_test(&run)
    }

    /// The main job, as a person runs it.
    fn tool_run(&self, iommu: &str) -> Result<(), Failed> {
        let device = self.plan.device_variable();
        let line = format!(
            "failstop bind ${device} >&2 && failstop run ${device} --seconds 2 --json --iommu {iommu}"
        );
        let json = self.succeeds(&Run::shell(line).timeout(CASE))?;
        let report = failstop_tests::report::check_clean(&json)?;
        if report.transport != iommu {
            return Err(format!("asked for {iommu}: {json}").into());
        }
        Ok(())
    }

    /// A break by the person who runs it, and the recovery (R10).
    fn tool_break(&self, iommu: &str, reset: &Reset) -> Result<(), Failed> {
        let device = variable(reset.role);
        // Every function of the group has to be out of its kernel driver's hands; a lone one is
        // bound twice.
        let mut lines = format!(
            "set -e; failstop bind ${} >&2; failstop bind ${device} >&2; \
             methods=/sys/bus/pci/devices/${device}/reset_method; before=$(cat $methods); ",
            self.plan.device_variable()
        );
        if let Some(only) = reset.only {
            lines += &format!("echo {only} > $methods; ");
        }
        lines += &format!(
            "failstop run ${device} --seconds 3 --break-after 1 --json --iommu {iommu} || code=$?; \
             echo \"$before\" > $methods; exit $code"
        );
        let json = self.succeeds(&Run::shell(lines).timeout(CASE))?;
        failstop_tests::report::check_recovered(&json, reset.proven, reset.not_believed)?;
        Ok(())
    }

    /// Judges the kernel's log, after every case that was begun before.
    fn end(&self) -> Result<(), Failed> {
        // Whoever was begun just before this has had the time to say so.
        std::thread::sleep(Duration::from_millis(200));
        while self.waiting.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        let Some(guest) = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        else {
            return Err("no case of this machine ran, so that its log says nothing".into());
        };
        let guest = Arc::into_inner(guest).ok_or("the guest is still in use")?;
        let log = guest.shut_down().map_err(words)?.kernel_log;
        let mut faults = log.iommu_faults();
        if self.plan.machine == Some(Machine::BadHost) {
            if faults.is_empty() {
                return Err("the IOMMU logged no fault of the ring that was unmapped".into());
            }
            // A case has judged them.
            faults.clear();
        }
        let bad: Vec<_> = faults.into_iter().chain(log.kernel_bugs()).collect();
        if bad.is_empty() {
            Ok(())
        } else {
            Err(format!("{bad:#?}").into())
        }
    }
}

/// Does what a case asks its host for.
fn obey(guest: &Guest, ask: &str) -> Result<(), Failed> {
    let mut qmp = guest.qmp().map_err(words)?;
    let (verb, rest) = ask.split_once(' ').ok_or("an order without a word")?;
    match verb {
        "device_del" => {
            let id = serde_json::json!({ "id": rest });
            qmp.execute("device_del", id).map_err(words)?;
        }
        "monitor" => {
            let said = qmp.monitor(rest).map_err(words)?;
            if said.contains("rror:") {
                return Err(said.into());
            }
        }
        _ => return Err(format!("nobody knows how to `{ask}`").into()),
    }
    Ok(())
}

fn words(error: impl std::fmt::Display) -> Failed {
    format!("{error:#}").into()
}

fn setup() -> Result<&'static Setup, Failed> {
    static SETUP: OnceLock<Result<Setup, String>> = OnceLock::new();
    let setup = SETUP.get_or_init(|| Setup::ensure().map_err(|error| format!("{error:#}")));
    setup.as_ref().map_err(|error| error.clone().into())
}
