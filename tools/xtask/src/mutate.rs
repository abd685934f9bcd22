//! `cargo xtask mutate`: breaks the contract on purpose, and wants a test that goes red for each.
//!
//! A mutation is a patch in `tests/mutations`; its first line says what it breaks and cites the rule. Each is
//! applied alone to a copy of the work tree, and the tests of T0 run there: first the one that the patch's
//! second line names, if that is still red then those of the package that it touches, then of the packages that
//! use it, to the first that is red. A mutation that no test notices *survives*: a test is missing. One that does
//! not apply or does not compile says nothing and is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::iter;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

mod compiling;
mod packages;

use crate::rules;
pub(crate) use compiling::{check, that_do_not_compile};
use packages::{Package, Packages};

/// The mutations, from the top of the repository.
const FOLDER: &str = "tests/mutations";
/// Where copy, build and logs are, from the top of the repository.
const WORK: &str = "target/mutate";
/// How long the tests of one package may run: a test that waits for ever noticed the mutation too.
const DEADLINE: Duration = Duration::from_secs(300);
/// How long one test may.
const DEADLINE_OF_ONE: Duration = Duration::from_secs(90);
/// What the line begins with that names the test which noticed a mutation when it was last recorded.
const NOTICED_BY: &str = "# Noticed by ";
/// How long a build may take, on a slow machine from nothing.
const BUILD_DEADLINE: Duration = Duration::from_secs(1800);

/// How often the tests of one package are run when one is red that is not when it runs alone.
const ATTEMPTS: usize = 3;

/// One way to break the contract.
#[derive(Clone, Debug)]
pub(crate) struct Mutation {
    /// The patch's name without its ending.
    pub(crate) name: String,
    /// What it breaks, with the rule.
    pub(crate) title: String,
    /// The test that is tried first.
    noticed_by: Option<Test>,
    /// The files that it changes, from the top of the repository.
    touches: Vec<PathBuf>,
}

/// A test, as `cargo test` finds it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Test {
    package: String,
    /// Arguments that select its program.
    target: String,
    name: String,
}

impl Test {
    /// Of `PACKAGE TARGET: NAME`.
    fn parse(text: &str) -> Option<Self> {
        let (program, name) = text.split_once(": ")?;
        let (package, target) = program.split_once(' ')?;
        Some(Self {
            package: package.to_owned(),
            target: target.to_owned(),
            name: name.trim_end().to_owned(),
        })
    }

    fn target(&self) -> Vec<String> {
        self.target.split(' ').map(str::to_owned).collect()
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.package, self.target, self.name)
    }
}

impl Mutation {
    fn read(patch: &Path) -> Result<Self> {
        let text = fs::read_to_string(patch)?;
        let name = patch.file_stem().unwrap_or_default().to_string_lossy();
        let title = text.lines().next().and_then(|line| line.strip_prefix("# "));
        let title =
            title.with_context(|| format!("{name}: the first line must say what it breaks"))?;
        ensure!(
            !rules::in_comment(title).is_empty(),
            "{name}: the first line cites no rule"
        );
        let noticed_by = text
            .lines()
            .find_map(|line| Test::parse(line.strip_prefix(NOTICED_BY)?));
        let touches: Vec<PathBuf> = text
            .lines()
            .filter_map(|line| line.strip_prefix("+++ b/"))
            .map(PathBuf::from)
            .collect();
        ensure!(!touches.is_empty(), "{name} changes nothing");
        Ok(Self {
            name: name.into_owned(),
            title: title.to_owned(),
            noticed_by,
            touches,
        })
    }
}

/// All mutations, by name.
pub(crate) fn list(root: &Path) -> Result<Vec<Mutation>> {
    let entries = fs::read_dir(root.join(FOLDER)).with_context(|| FOLDER.to_owned())?;
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "patch")
    });
    paths.sort();
    paths.iter().map(|path| Mutation::read(path)).collect()
}

/// What became of a mutation.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Outcome {
    /// A test went red.
    Killed(Test),
    /// Something else ended the tests.
    Stopped(String),
    /// Every test passed.
    Survived,
    /// The patch fits no more: what git said.
    DoesNotApply(String),
    /// No test ran.
    DoesNotCompile,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(test) => write!(f, "killed by {test}"),
            Self::Stopped(how) => write!(f, "killed: {how}"),
            Self::Survived => f.write_str("SURVIVED: no test notices it"),
            Self::DoesNotApply(why) => write!(f, "DOES NOT APPLY: {why}"),
            Self::DoesNotCompile => f.write_str("DOES NOT COMPILE"),
        }
    }
}

/// What is known of the tests without any mutation: red says something only where they are green.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unmutated {
    /// Nothing: they are run first.
    Unknown,
    /// They were run on this very tree, and all passed.
    Green,
}

/// A mutation that was tried.
pub(crate) struct Tried {
    name: String,
    outcome: Outcome,
    time: Duration,
}

impl Tried {
    /// Whether a test went red.
    pub(crate) fn is_killed(&self) -> bool {
        matches!(self.outcome, Outcome::Killed(_) | Outcome::Stopped(_))
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, seconds) = (&self.name, self.time.as_secs());
        write!(f, "{name:<40} {seconds:>4} s  {}", self.outcome)
    }
}

/// Runs all mutations, or those whose name contains one of `only`; or lists them. `record` writes into each
/// patch which test noticed it.
///
/// # Errors
///
/// As [`try_all`]; when a patch cannot be written.
pub(crate) fn main(only: &[String], list_only: bool, record: bool) -> Result<ExitCode> {
    if list_only {
        for mutation in chosen(&rules::root(), only)? {
            println!("{:<40} {}", mutation.name, mutation.title);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let tried = try_all(only, Unmutated::Unknown)?;
    if record {
        for mutation in &tried {
            if let Outcome::Killed(test) = &mutation.outcome {
                write_down(&rules::root(), &mutation.name, test)?;
            }
        }
    }
    println!();
    for mutation in &tried {
        println!("{mutation}");
    }
    let killed = tried.iter().filter(|mutation| mutation.is_killed());
    let (killed, all) = (killed.count(), tried.len());
    println!("{killed} of {all} mutations killed");
    Ok(if killed == all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Tries the mutations, or those whose name contains one of `only`.
///
/// # Errors
///
/// When a patch is malformed, the tests are red without any mutation, or cargo or git cannot be run.
pub(crate) fn try_all(only: &[String], unmutated: Unmutated) -> Result<Vec<Tried>> {
    let root = rules::root();
    let mutations = chosen(&root, only)?;
    // A build of one crate and a run of one test keep one processor busy.
    let together = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let copies = (0..together.min(mutations.len())).map(|number| Copy::of(&root, number));
    let copies: Vec<Copy> = copies.collect::<Result<_>>()?;
    if let (Unmutated::Unknown, Some(copy)) = (unmutated, copies.first()) {
        copy.baseline(&mutations)?;
    }
    let left = Mutex::new(mutations.iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut tried = thread::scope(|scope| {
        let workers: Vec<_> = copies
            .iter()
            .map(|copy| {
                scope.spawn(|| {
                    iter::from_fn(next)
                        .map(|mutation| copy.tried(mutation))
                        .collect::<Result<Vec<_>>>()
                })
            })
            .collect();
        let mut tried = Vec::new();
        for worker in workers {
            let some = worker.join();
            tried.extend(some.unwrap_or_else(|_| bail!("a thread that tried mutations panicked"))?);
        }
        Ok::<_, anyhow::Error>(tried)
    })?;
    tried.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(tried)
}

/// Says in the patch which test noticed it.
fn write_down(root: &Path, name: &str, test: &Test) -> Result<()> {
    let path = root.join(FOLDER).join(format!("{name}.patch"));
    let patch = fs::read_to_string(&path)?;
    let mut text = String::new();
    for (number, line) in patch.lines().enumerate() {
        if !line.starts_with(NOTICED_BY) {
            text += line;
            text.push('\n');
        }
        if number == 0 {
            text += &format!("{NOTICED_BY}{test}\n");
        }
    }
    if text != patch {
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn chosen(root: &Path, only: &[String]) -> Result<Vec<Mutation>> {
    let mut mutations = list(root)?;
    if !only.is_empty() {
        mutations.retain(|mutation| only.iter().any(|part| mutation.name.contains(part)));
        ensure!(
            !mutations.is_empty(),
            "no mutation is named like {}",
            only.join(", ")
        );
    }
    Ok(mutations)
}

/// A copy of the work tree, with a build of its own that lasts from run to run.
struct Copy {
    work: PathBuf,
    packages: Packages,
}

impl Copy {
    /// Copies what differs, so that cargo builds only that. Several, by their numbers, are of no concern to
    /// each other.
    fn of(root: &Path, number: usize) -> Result<Self> {
        let work = match number {
            0 => root.join(WORK),
            _ => root.join(WORK).join(number.to_string()),
        };
        let tree = work.join("tree");
        let mut known = BTreeMap::new();
        for name in work_tree_files(root)? {
            let Ok(bytes) = fs::read(root.join(&name)) else {
                // Deleted, and not yet in a commit.
                continue;
            };
            let to = tree.join(&name);
            if fs::read(&to).ok().as_ref() != Some(&bytes) {
                fs::create_dir_all(to.parent().context("a file has a folder")?)?;
                fs::write(&to, &bytes)?;
            }
            known.insert(to, ());
        }
        let mut there = Vec::new();
        files_below(&tree, &mut there)?;
        for path in there.iter().filter(|path| !known.contains_key(*path)) {
            fs::remove_file(path)?;
        }
        let packages = Packages::read(&tree)?;
        Ok(Self { work, packages })
    }

    fn tree(&self) -> PathBuf {
        self.work.join("tree")
    }

    /// Without a mutation every test must pass, or red says nothing.
    fn baseline(&self, mutations: &[Mutation]) -> Result<()> {
        let touched = mutations.iter().flat_map(|mutation| &mutation.touches);
        for package in self.packages.affected_by(touched)? {
            eprintln!("without a mutation: {}", package.name);
            let log = self.work.join("baseline.log");
            let built = self.build(package, &package.targets, &log)?;
            ensure!(
                built,
                "{} does not build without a mutation: {}",
                package.name,
                log.display()
            );
            if let Some(outcome) = self.red_twice(package, &log)? {
                bail!("without a mutation: {outcome}: {}", log.display());
            }
        }
        Ok(())
    }

    fn tried(&self, mutation: &Mutation) -> Result<Tried> {
        let started = Instant::now();
        let outcome = self.try_out(mutation)?;
        let tried = Tried {
            name: mutation.name.clone(),
            outcome,
            time: started.elapsed(),
        };
        eprintln!("{tried}");
        Ok(tried)
    }

    fn try_out(&self, mutation: &Mutation) -> Result<Outcome> {
        let before: Vec<(PathBuf, Vec<u8>)> = mutation
            .touches
            .iter()
            .filter_map(|path| Some((path.clone(), fs::read(self.tree().join(path)).ok()?)))
            .collect();
        if before.len() < mutation.touches.len() {
            return Ok(Outcome::DoesNotApply("a file is not there".into()));
        }
        if let Some(why) = self.apply(mutation)? {
            return Ok(Outcome::DoesNotApply(why));
        }
        let outcome = self.red_test(mutation);
        for (path, bytes) in before {
            fs::write(self.tree().join(path), bytes)?;
        }
        outcome
    }

    fn red_test(&self, mutation: &Mutation) -> Result<Outcome> {
        let log = self.work.join(format!("{}.log", mutation.name));
        drop(fs::remove_file(&log));
        if let Some(test) = &mutation.noticed_by
            && let Some(package) = self.packages.named(&test.package)
        {
            if self.build(package, &test.target(), &log)? && self.red_alone(test, &log)? {
                return Ok(Outcome::Killed(test.clone()));
            }
            eprintln!("{}: {test} does not notice it any more", mutation.name);
        }
        for package in self.packages.affected_by(&mutation.touches)? {
            if !self.build(package, &package.targets, &log)? {
                return Ok(Outcome::DoesNotCompile);
            }
            if let Some(outcome) = self.red_twice(package, &log)? {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Survived)
    }

    /// What a test is that is red, and is when it runs alone again: on a busy machine one may fail for
    /// want of time, which says nothing of the mutation.
    fn red_twice(&self, package: &Package, log: &Path) -> Result<Option<Outcome>> {
        for _ in 0..ATTEMPTS {
            match self.test(package, &package.targets, &[], DEADLINE, log)? {
                None => return Ok(None),
                Some(Red::Test { target, name }) => {
                    let package = package.name.clone();
                    let test = Test {
                        package,
                        target,
                        name,
                    };
                    if self.red_alone(&test, log)? {
                        return Ok(Some(Outcome::Killed(test)));
                    }
                    eprintln!("{test} was red once, and is not looked at");
                }
                Some(other) => {
                    return Ok(Some(Outcome::Stopped(format!("{}: {other}", package.name))));
                }
            }
        }
        Ok(None)
    }

    /// Whether a test that is built is red when it runs alone.
    fn red_alone(&self, test: &Test, log: &Path) -> Result<bool> {
        let Some(package) = self.packages.named(&test.package) else {
            return Ok(false);
        };
        let only = ["--exact", &test.name];
        let red = self.test(package, &test.target(), &only, DEADLINE_OF_ONE, log)?;
        Ok(red.is_some())
    }

    /// Applies a patch. What git said, if it does not fit.
    fn apply(&self, mutation: &Mutation) -> Result<Option<String>> {
        let output = Command::new("git")
            .args(["apply", "--whitespace=nowarn"])
            // The copy's own, which fits it, whatever is edited meanwhile.
            .arg(Path::new(FOLDER).join(format!("{}.patch", mutation.name)))
            // As outside of any repository: inside one, git would look for the files at its top.
            .env("GIT_CEILING_DIRECTORIES", &self.work)
            .current_dir(self.tree())
            .output()
            .context("cannot run git")?;
        let said = String::from_utf8_lossy(&output.stderr);
        Ok((!output.status.success()).then(|| said.trim().replace('\n', "; ")))
    }

    fn build(&self, package: &Package, targets: &[String], log: &Path) -> Result<bool> {
        let mut command = self.cargo(package, targets);
        command.arg("--no-run");
        let status = run(command, log, BUILD_DEADLINE)?;
        let status = status.context("a build did not end")?;
        Ok(status.success())
    }

    /// Runs tests, which are built. What was red first.
    fn test(
        &self,
        package: &Package,
        targets: &[String],
        arguments: &[&str],
        deadline: Duration,
        log: &Path,
    ) -> Result<Option<Red>> {
        let already = fs::metadata(log).map_or(0, |metadata| metadata.len());
        let mut command = self.cargo(package, targets);
        command.args(["--", "--quiet"]).args(arguments);
        let status = run(command, log, deadline)?;
        let output = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        let output = output.get(usize::try_from(already)?..).unwrap_or(&output);
        Ok(match status {
            Some(status) if status.success() => None,
            Some(_) => Some(first_red(output).unwrap_or(Red::Process)),
            None => Some(first_endless(output).unwrap_or(Red::Endless)),
        })
    }

    fn cargo(&self, package: &Package, targets: &[String]) -> Command {
        let mut command = self.cargo_of("test");
        command.args(["--package", &package.name]).args(targets);
        command
    }

    fn cargo_of(&self, what: &str) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .arg(what)
            .current_dir(self.tree())
            .env("CARGO_TARGET_DIR", self.work.join("target"))
            // Each is built once and run for seconds.
            .env("CARGO_PROFILE_TEST_DEBUG", "0")
            // Optimised incremental builds, of which one was ended in the middle, may not link.
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_TERM_COLOR", "never")
            .env_remove("RUSTFLAGS");
        command
    }
}

/// What tells a mutation.
#[derive(PartialEq, Eq, Debug)]
enum Red {
    /// A test that failed, and the arguments that select its program.
    Test { target: String, name: String },
    /// A test program that ended without naming a test.
    Process,
    /// Tests that did not end.
    Endless,
}

impl fmt::Display for Red {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Test { name, .. } => write!(f, "{name} is red"),
            Self::Process => f.write_str("a test process died"),
            Self::Endless => f.write_str("the tests did not end"),
        }
    }
}

/// The first test that failed, from what cargo and test programs print in their short form.
fn first_red(output: &str) -> Option<Red> {
    first(output, |line| {
        let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
        Some(name.strip_suffix(" stdout").unwrap_or(name))
    })
}

/// The first test of which its program said that it takes long.
fn first_endless(output: &str) -> Option<Red> {
    first(output, |line| {
        let (name, _) = line.split_once(" has been running for over ")?;
        name.rsplit_once("test ").map(|(_, name)| name)
    })
}

/// The first test that a line names, and the program that it is of.
fn first<'a>(output: &'a str, named: impl Fn(&'a str) -> Option<&'a str>) -> Option<Red> {
    let mut target = None;
    for line in output.lines() {
        if let Some(program) = line.trim_start().strip_prefix("Running ") {
            target = target_of(program);
        }
        if let Some(name) = named(line) {
            let (target, name) = (target?, name.to_owned());
            return Some(Red::Test { target, name });
        }
    }
    None
}

/// The arguments that select the program of which cargo says that it is running it.
fn target_of(program: &str) -> Option<String> {
    let source = program.split(" (").next()?;
    if source == "unittests src/lib.rs" {
        return Some("--lib".to_owned());
    }
    let name = source.strip_prefix("tests/")?;
    let name = name.strip_suffix("/main.rs").unwrap_or(name);
    Some(format!(
        "--test {}",
        name.strip_suffix(".rs").unwrap_or(name)
    ))
}

/// Runs a command with all that it prints in `log`. Nothing when it did not end in time and was ended.
fn run(mut command: Command, log: &Path, deadline: Duration) -> Result<Option<ExitStatus>> {
    let output = File::options().create(true).append(true).open(log)?;
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        // So that its children can be ended with it.
        .process_group(0);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let end = Instant::now() + deadline;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            killpg(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGKILL)?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Every file of the work tree that is in the repository, or would be with the next commit.
fn work_tree_files(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names = String::from_utf8(output.stdout).context("a file's name is no text")?;
    Ok(names.split_terminator('\0').map(str::to_owned).collect())
}

fn files_below(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files_below(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_red_test_is_named_with_its_program() {
        let output = |running: &str| {
            format!(
                "     Running {running} (target/debug/deps/x-1)\n\nrunning 2 tests\n.F\nfailures:\n\n\
                 ---- rx::c1_stops stdout ----\n\nthread panicked\n---- other stdout ----\n"
            )
        };
        for (running, target) in [
            ("unittests src/lib.rs", "--lib"),
            ("tests/revoke.rs", "--test revoke"),
            ("tests/model/main.rs", "--test model"),
        ] {
            let (target, name) = (target.to_owned(), "rx::c1_stops".to_owned());
            assert_eq!(
                first_red(&output(running)),
                Some(Red::Test { target, name })
            );
        }
        assert_eq!(first_red("error: test failed\n"), None);
    }

    #[test]
    fn a_test_that_does_not_end_is_named() {
        let output = "     Running tests/ladder.rs (target/debug/deps/x-1)\n\nrunning 2 tests\n\
                      ..test c40_a_sleeper_is_woken has been running for over 60 seconds\n";
        let (target, name) = ("--test ladder".into(), "c40_a_sleeper_is_woken".into());
        assert_eq!(first_endless(output), Some(Red::Test { target, name }));
        assert_eq!(first_endless("running 2 tests\n..\n"), None);
    }

    #[test]
    fn what_noticed_a_mutation_is_written_down_once() {
        let folder = tempfile::tempdir().unwrap();
        let patches = folder.path().join(FOLDER);
        fs::create_dir_all(&patches).unwrap();
        let path = patches.join("01-a.patch");
        let diff = "--- a/pci/src/a.rs\n+++ b/pci/src/a.rs\n@@ -1 +1 @@\n-a\n+b\n";
        fs::write(&path, format!("# Skips it (R4.2)\n{diff}")).unwrap();
        for test in ["failstop-pci --lib: a::b", "failstop-dma --test revoke: c"] {
            write_down(folder.path(), "01-a", &Test::parse(test).unwrap()).unwrap();
            let text = format!("# Skips it (R4.2)\n# Noticed by {test}\n{diff}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            let read = Mutation::read(&path).unwrap().noticed_by.unwrap();
            assert_eq!(read.to_string(), test);
        }
    }

    #[test]
    fn a_patch_must_say_what_it_breaks() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let path = folder.path().join("01-a.patch");
            fs::write(&path, text).unwrap();
            Mutation::read(&path)
        };
        let diff = "--- a/pci/src/a.rs\n+++ b/pci/src/a.rs\n@@ -1 +1 @@\n-a\n+b\n";
        let mutation = read(&format!("# Skips it (R4.2)\n{diff}")).unwrap();
        assert_eq!(
            (mutation.name.as_str(), mutation.title.as_str()),
            ("01-a", "Skips it (R4.2)")
        );
        assert_eq!(mutation.touches, [Path::new("pci/src/a.rs")]);
        for text in [
            diff,
            "# Skips it (R4.2)\n",
            "# Skips it\n--- a/b\n+++ b/b\n",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_ended_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & wait"]);
        let status = run(
            command,
            &folder.path().join("log"),
            Duration::from_millis(100),
        )
        .unwrap();
        assert_eq!(status, None);
    }

    #[test]
    fn the_repositorys_mutations_are_well_formed_and_apply() {
        let root = rules::root();
        let mutations = list(&root).unwrap();
        assert!(!mutations.is_empty());
        for mutation in mutations {
            let name = &mutation.name;
            for path in &mutation.touches {
                assert!(root.join(path).is_file(), "{name}: {}", path.display());
            }
            let applies = Command::new("git")
                .args(["apply", "--check", "--whitespace=nowarn"])
                .arg(root.join(FOLDER).join(format!("{name}.patch")))
                .current_dir(&root)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&applies.stderr);
            assert!(applies.status.success(), "{name}: {said}");
        }
    }
}
