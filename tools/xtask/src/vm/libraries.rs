//! The shared libraries that a program needs, as the host's loader finds them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The libraries of `program`, the loader included; none for a static program or a script.
pub(super) fn of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .env("LC_ALL", "C")
        .arg(program)
        .output()
        .context("cannot run ldd (package libc-bin)")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    if text.contains("not a dynamic executable") || complaint.contains("not a dynamic executable") {
        return Ok(Vec::new());
    }
    if !output.status.success() {
        bail!("ldd cannot read {}: {complaint}", program.display());
    }
    parse(&text).with_context(|| format!("cannot send {} to a guest", program.display()))
}

/// Reads what ldd prints.
pub(super) fn parse(text: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in text.lines().map(str::trim) {
        let path = match line.split_once(" => ") {
            Some((name, "not found")) => bail!("the host has no library {name}"),
            Some((_, rest)) => rest,
            None => line,
        };
        let path = path.split(" (").next().unwrap_or_default();
        // The rest is the kernel's own library, which is no file, or the words "statically linked".
        if path.starts_with('/') {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_takes_files_and_leaves_the_vdso() {
        let text = "\tlinux-vdso.so.1 (0x00007ffc6d5f1000)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f0a3c000000)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f0a3c3f4000)\n";
        let expected = [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ]
        .map(PathBuf::from);
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn parse_of_a_static_program_is_empty() {
        assert_eq!(
            parse("\tstatically linked\n").unwrap(),
            Vec::<PathBuf>::new()
        );
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = parse("\tlibmissing.so.1 => not found\n").unwrap_err();
        assert!(error.to_string().contains("libmissing.so.1"));
    }

    #[test]
    fn this_very_test_needs_a_loader() {
        let libraries = of(&std::env::current_exe().unwrap()).unwrap();
        assert!(
            libraries
                .iter()
                .any(|path| path.to_string_lossy().contains("ld-linux")),
            "{libraries:?}"
        );
    }
}
