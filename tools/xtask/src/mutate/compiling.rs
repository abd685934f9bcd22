//! Whether every mutation compiles still: one that does not says nothing, and would be found out by the long
//! runs only. Many at once, each where none before it has changed the same lines, since a landing has no time
//! for each alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Copy, FOLDER, Mutation, list, run};
use crate::rules;

/// How long the compiler may take for one set, on a slow machine.
const DEADLINE: Duration = Duration::from_secs(600);

/// Prints which mutations do not compile.
///
/// # Errors
///
/// As [`that_do_not_compile`].
pub(crate) fn check() -> Result<ExitCode> {
    let bad = that_do_not_compile()?;
    for name in &bad {
        println!("{name} does not compile");
    }
    Ok(match bad.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// The mutations that do not compile. Those that do not apply are a test's business.
///
/// # Errors
///
/// When a patch is malformed, or cargo or git cannot be run.
pub(crate) fn that_do_not_compile() -> Result<Vec<String>> {
    let root = rules::root();
    let mutations = list(&root)?;
    let copy = Copy::of(&root, 0)?;
    let mut sets: Vec<Vec<&Mutation>> = vec![mutations.iter().collect()];
    let mut bad = Vec::new();
    while let Some(set) = sets.pop() {
        let (set, later) = copy.compile(&set)?;
        if let Some(left) = later.first() {
            ensure!(
                !set.members.is_empty(),
                "{} does not apply ({FOLDER})",
                left.name
            );
            sets.push(later);
        }
        match set.members.as_slice() {
            _ if set.compiles => {}
            [alone] => bad.push(alone.name.clone()),
            // One of them, or they contradict each other.
            several => {
                let (some, others) = several.split_at(several.len() / 2);
                sets.extend([some.to_vec(), others.to_vec()]);
            }
        }
    }
    Ok(bad)
}

/// Mutations that were compiled together.
struct Set<'a> {
    members: Vec<&'a Mutation>,
    compiles: bool,
}

impl Copy {
    /// Compiles those that apply one after the other, and says which do not.
    fn compile<'a>(&self, mutations: &[&'a Mutation]) -> Result<(Set<'a>, Vec<&'a Mutation>)> {
        let mut before: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        let touched: BTreeSet<&PathBuf> = mutations.iter().flat_map(|m| &m.touches).collect();
        for path in touched {
            let path = self.tree().join(path);
            let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            before.push((path, bytes));
        }
        let (mut members, mut later) = (Vec::new(), Vec::new());
        for mutation in mutations {
            match self.apply(mutation)? {
                None => members.push(*mutation),
                Some(_) => later.push(*mutation),
            }
        }
        let compiles = self.check(&members);
        for (path, bytes) in before {
            fs::write(path, bytes)?;
        }
        let compiles = compiles?;
        Ok((Set { members, compiles }, later))
    }

    fn check(&self, mutations: &[&Mutation]) -> Result<bool> {
        let touched = mutations.iter().flat_map(|mutation| &mutation.touches);
        let mut command = self.cargo_of("check");
        for package in self.packages.of(touched)? {
            command.args(["--package", package]);
        }
        // What it uses was compiled for clippy, there.
        command.env("CARGO_TARGET_DIR", rules::root().join("target"));
        let log = self.work.join("compiling.log");
        let status = run(command, &log, DEADLINE)?.context("the compiler did not end")?;
        Ok(status.success())
    }
}
