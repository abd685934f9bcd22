//! An unpacked set of packages, and how to run programs from it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A folder that holds packages with every library that they need, their C library included.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn at(root: PathBuf) -> Self {
        Self { root }
    }

    pub(super) fn path(&self, inside: &str) -> PathBuf {
        self.root.join(inside)
    }

    /// A command that runs `program` with the tree's own loader and libraries, whatever the host's are.
    pub(super) fn command(&self, program: &str) -> Result<Command> {
        let mut words = self.words(program)?.into_iter();
        let mut command = Command::new(words.next().expect("the loader comes first"));
        command.args(words);
        Ok(command)
    }

    fn words(&self, program: &str) -> Result<Vec<PathBuf>> {
        let program = ["usr/bin", "usr/sbin", "bin"]
            .map(|folder| self.root.join(folder).join(program))
            .into_iter()
            .find(|path| path.exists())
            .with_context(|| format!("{} has no program {program}", self.root.display()))?;
        let libraries = self.path("usr/lib/x86_64-linux-gnu");
        let loader = libraries.join("ld-linux-x86-64.so.2");
        ensure!(loader.exists(), "{} has no loader", self.root.display());
        Ok(vec![loader, "--library-path".into(), libraries, program])
    }

    /// Puts a script named after each of `programs` into `folder`, so that a build that looks in `PATH` finds them.
    pub(super) fn write_wrappers(
        &self,
        folder: &Path,
        programs: &[&str],
        environment: &[(&str, PathBuf)],
    ) -> Result<()> {
        fs::create_dir_all(folder)?;
        let exports: String = environment
            .iter()
            .map(|(name, value)| format!("export {name}={}\n", quoted(value)))
            .collect();
        for program in programs {
            let words: Vec<_> = self.words(program)?.iter().map(quoted).collect();
            let path = folder.join(program);
            fs::write(
                &path,
                format!("#!/bin/sh\n{exports}exec {} \"$@\"\n", words.join(" ")),
            )?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }
}

/// A word as the shell wants it.
fn quoted(word: impl AsRef<OsStr>) -> String {
    format!(
        "'{}'",
        word.as_ref().to_string_lossy().replace('\'', r"'\''")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_survive_the_shell() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }

    #[test]
    fn a_program_runs_by_the_trees_own_loader() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("usr/lib/x86_64-linux-gnu");
        fs::create_dir_all(&libraries).unwrap();
        fs::create_dir_all(folder.path().join("usr/bin")).unwrap();
        fs::write(libraries.join("ld-linux-x86-64.so.2"), "").unwrap();
        fs::write(folder.path().join("usr/bin/flex"), "").unwrap();
        let tree = Tree::at(folder.path().into());
        let command = tree.command("flex").unwrap();
        assert_eq!(
            command.get_program(),
            libraries.join("ld-linux-x86-64.so.2")
        );
        assert_eq!(
            command.get_args().last().unwrap(),
            folder.path().join("usr/bin/flex")
        );
        assert!(tree.command("bison").is_err());
    }
}
