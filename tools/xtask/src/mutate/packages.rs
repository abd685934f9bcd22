//! Which packages a change reaches, and which of their tests belong to T0.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::tiers::{SUITE, TIERS};

/// Packages that are no part of the driver and its tests.
const OTHERS: &[&str] = &[
    "xtask",
    "failstop-cli",
    "failstop-emulator",
    "failstop-fuzz",
    "failstop-replay",
    "failstop-scenario",
];

/// A package and what of it is tested.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Package {
    pub(super) name: String,
    folder: PathBuf,
    uses: BTreeSet<String>,
    /// Arguments of `cargo test` that select its tests of T0.
    pub(super) targets: Vec<String>,
}

/// The packages whose tests notice mutations, in an order in which each comes after those that it uses.
#[derive(Debug)]
pub(super) struct Packages(Vec<Package>);

impl Packages {
    /// Asks cargo about the workspace in `folder`.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(folder)
            .output()
            .context("cannot run cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Self::from_metadata(&serde_json::from_slice(&output.stdout)?)
    }

    fn from_metadata(metadata: &Value) -> Result<Self> {
        let top = Path::new(
            metadata["workspace_root"]
                .as_str()
                .context("no workspace")?,
        );
        let mut packages = Vec::new();
        for package in array(&metadata["packages"]) {
            let name = package["name"]
                .as_str()
                .context("a package without a name")?;
            if OTHERS.contains(&name) {
                continue;
            }
            let manifest = Path::new(package["manifest_path"].as_str().context("no manifest")?);
            let folder = manifest.parent().context("a manifest has a folder")?;
            let uses = array(&package["dependencies"]).filter_map(|used| used["name"].as_str());
            packages.push(Package {
                name: name.to_owned(),
                folder: folder.strip_prefix(top)?.to_owned(),
                uses: uses.map(str::to_owned).collect(),
                targets: targets(package, name),
            });
        }
        packages.retain(|package| !package.targets.is_empty());
        Ok(Self(sorted(packages)))
    }

    pub(super) fn named(&self, name: &str) -> Option<&Package> {
        self.0.iter().find(|package| package.name == name)
    }

    /// The names of the packages that hold these files.
    pub(super) fn of<'a>(
        &self,
        files: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<BTreeSet<&str>> {
        let mut names = BTreeSet::new();
        for file in files {
            let package = self
                .0
                .iter()
                .find(|package| file.starts_with(&package.folder));
            let package = package
                .with_context(|| format!("{} belongs to no package with tests", file.display()))?;
            names.insert(package.name.as_str());
        }
        Ok(names)
    }

    /// The packages that hold these files, and then those that use them.
    pub(super) fn affected_by<'a>(
        &self,
        files: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<Vec<&Package>> {
        let mut names = self.of(files)?;
        let mut affected = Vec::new();
        for package in &self.0 {
            let uses = package
                .uses
                .iter()
                .any(|used| names.contains(used.as_str()));
            if names.contains(package.name.as_str()) || uses {
                names.insert(&package.name);
                affected.push(package);
            }
        }
        Ok(affected)
    }
}

/// The tests of T0 of a package: none, if it has none.
fn targets(package: &Value, name: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for target in array(&package["targets"]) {
        let (kind, own) = (
            target["kind"][0].as_str(),
            target["name"].as_str().unwrap_or_default(),
        );
        let needs_nothing = array(&target["required-features"]).next().is_none();
        match kind {
            Some("lib") if name != SUITE => targets.push("--lib".to_owned()),
            Some("test") if needs_nothing && !(name == SUITE && TIERS.contains(&own)) => {
                targets.extend(["--test".to_owned(), own.to_owned()]);
            }
            _ => {}
        }
    }
    targets
}

/// Those first that use none of the others.
fn sorted(mut packages: Vec<Package>) -> Vec<Package> {
    let mut done: Vec<Package> = Vec::new();
    while !packages.is_empty() {
        let waits = |package: &Package| {
            packages
                .iter()
                .any(|other| package.uses.contains(&other.name) && other.name != package.name)
        };
        // Packages that test each other would wait for ever: any order does for them.
        let next = packages
            .iter()
            .position(|package| !waits(package))
            .unwrap_or(0);
        done.push(packages.remove(next));
    }
    done
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages() -> Packages {
        let package = |name: &str, folder: &str, uses: &[&str], targets: Value| {
            let uses: Vec<_> = uses
                .iter()
                .map(|name| serde_json::json!({"name": name}))
                .collect();
            serde_json::json!({"name": name, "manifest_path": format!("/x/{folder}/Cargo.toml"),
                "dependencies": uses, "targets": targets})
        };
        let lib = || serde_json::json!([{"kind": ["lib"], "name": "l"}]);
        let tests = serde_json::json!([
            {"kind": ["lib"], "name": "l"},
            {"kind": ["test"], "name": "t1"},
            {"kind": ["test"], "name": "model"},
            {"kind": ["test"], "name": "guests", "required-features": ["guests"]},
        ]);
        let metadata = serde_json::json!({"workspace_root": "/x", "packages": [
            package(SUITE, "tests", &["top"], tests),
            package("top", "top", &["low", "serde"], lib()),
            package("low", "low", &[], lib()),
            package("xtask", "tools/xtask", &["low"], lib()),
        ]});
        Packages::from_metadata(&metadata).unwrap()
    }

    fn affected(file: &str) -> Vec<String> {
        let packages = packages();
        let affected = packages.affected_by([&PathBuf::from(file)]).unwrap();
        affected
            .iter()
            .map(|package| package.name.clone())
            .collect()
    }

    #[test]
    fn a_change_reaches_the_packages_above_it_in_order() {
        assert_eq!(affected("low/src/a.rs"), ["low", "top", SUITE]);
        assert_eq!(affected("top/src/a.rs"), ["top", SUITE]);
    }

    #[test]
    fn of_the_suite_only_what_is_no_tier_is_run() {
        let packages = packages();
        assert_eq!(packages.0[2].targets, ["--test", "model"]);
    }

    #[test]
    fn a_file_of_no_tested_package_is_an_error() {
        assert!(
            packages()
                .affected_by([&PathBuf::from("tools/xtask/src/a.rs")])
                .is_err()
        );
    }
}
