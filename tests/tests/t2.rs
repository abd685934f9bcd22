//! T2: the suite in guests under QEMU, behind real kernel VFIO. Each case is a process of its own
//! in the guest; each machine boots once, and its kernel's log is judged at the end.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use failstop_tests::plan::{PLANS, Plan};
use libtest_mimic::{Arguments, Failed, Trial};
use xtask::protocol::Run;
use xtask::vm::{Boot, Guest, Setup, topologies};

/// How long one case may take in a guest without hardware virtualization.
const CASE: Duration = Duration::from_secs(180);
/// How long a guest may live.
const LIFETIME: Duration = Duration::from_secs(1500);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One guest at a time: two cores are one guest's worth.
    arguments.test_threads = Some(1);
    let trials = PLANS.iter().flat_map(trials).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trials(plan: &'static Plan) -> Vec<Trial> {
    let guest = Arc::new(SharedGuest {
        plan,
        running: Mutex::new(None),
    });
    let mut trials = Vec::new();
    for iommu in plan.iommu {
        for case in plan.cases() {
            let guest = guest.clone();
            let name = format!("{}/{iommu}/{}", plan, case.name);
            trials.push(Trial::test(name, move || guest.case(case.name, iommu)));
        }
        if !plan.runs_tool() {
            continue;
        }
        let guest = guest.clone();
        let name = format!("{}/{iommu}/failstop_run_ends_with_clean_accounts", plan);
        trials.push(Trial::test(name, move || guest.tool_run(iommu)));
    }
    for name in plan.kernel_cases() {
        let guest = guest.clone();
        let title = format!("{}/{name}", plan);
        trials.push(Trial::test(title, move || guest.kernel_case(&name)));
    }
    let name = format!("{}/the_kernel_logged_no_iommu_fault_and_no_bug", plan);
    trials.push(Trial::test(name, move || guest.end()));
    trials
}

/// A guest that the trials of one machine share; booted by the first of them.
struct SharedGuest {
    plan: &'static Plan,
    running: Mutex<Option<Arc<Guest>>>,
}

impl SharedGuest {
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
        self.one_test(&run)
    }

    /// Runs one case of the suite.
    fn case(&self, name: &str, iommu: &str) -> Result<(), Failed> {
        let line = format!(
            "failstop bind $FAILSTOP_IGB >&2 && FAILSTOP_DEVICE=$FAILSTOP_IGB failstop-suite --exact {name}"
        );
        self.one_test(&Run::shell(line).env("FAILSTOP_IOMMU", iommu).timeout(CASE))
    }

    /// The main job, as a person runs it.
    fn tool_run(&self, iommu: &str) -> Result<(), Failed> {
        let line = format!(
            "failstop bind $FAILSTOP_IGB >&2 && failstop run $FAILSTOP_IGB --seconds 2 --json --iommu {iommu}"
        );
        let json = self.succeeds(&Run::shell(line).timeout(CASE))?;
        let report = failstop_tests::report::check_clean(&json)?;
        if report.transport != iommu {
            return Err(format!("asked for {iommu}: {json}").into());
        }
        Ok(())
    }

    fn end(&self) -> Result<(), Failed> {
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
        let bad: Vec<_> = log
            .iommu_faults()
            .into_iter()
            .chain(log.kernel_bugs())
            .collect();
        if bad.is_empty() {
            Ok(())
        } else {
            Err(format!("{bad:#?}").into())
        }
    }
}

fn words(error: impl std::fmt::Display) -> Failed {
    format!("{error:#}").into()
}

fn setup() -> Result<&'static Setup, Failed> {
    static SETUP: OnceLock<Result<Setup, String>> = OnceLock::new();
    let setup = SETUP.get_or_init(|| Setup::ensure().map_err(|error| format!("{error:#}")));
    setup.as_ref().map_err(|error| error.clone().into())
}
