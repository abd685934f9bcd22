//! Our own guest kernel: Debian's source, as small as it gets, with everything that we test built in.
//!
//! Debian's own kernels have neither iommufd nor VFIO's no-IOMMU mode. This one has, boots in three seconds under emulation
//! and needs no modules. Building it takes five minutes on two cores; the cache keeps it by the hash of its configuration.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::apt::{self, Apt, run};
use super::cache::{Cache, key, remove};
use super::tree::Tree;

const SOURCE: &str = "linux-source-6.12";
const CONFIGURATION: &str = include_str!("../../guest-kernel.config");
/// Changes when what this file does changes what comes out.
const RECIPE: &str = "1";
/// Programs that the kernel's build needs besides a C compiler, make and perl. They run from a tree of their own.
const TOOLS: &[&str] = &["flex", "bison", "m4", "bc", "lz4", "xz"];
const TOOL_PACKAGES: &[&str] = &["flex", "bison", "m4", "bc", "lz4", "xz-utils"];

/// The start of the cache entry's name; the version of the source follows.
pub(super) fn prefix() -> String {
    format!("kernels/small-{}-", key([SOURCE, CONFIGURATION, RECIPE]))
}

/// Builds the kernel, unless the cache has it.
pub(super) fn ensure(cache: &Cache, apt: &Apt) -> Result<()> {
    if !super::setup::entries(cache, &prefix()).is_empty() {
        return Ok(());
    }
    require_compiler()?;
    let version = apt.version(SOURCE)?;
    cache.entry(&format!("{}{version}", prefix()), |folder| {
        eprintln!("building the small guest kernel from {SOURCE} {version}: about five minutes on two cores");
        let work = folder.join("work");
        let build = Build::prepare(cache, apt, &work)?;
        build.configure()?;
        build.make(&["bzImage"])?;
        fs::copy(work.join("linux/arch/x86/boot/bzImage"), folder.join("image")).context("the build left no bzImage")?;
        fs::copy(work.join("linux/.config"), folder.join("config"))?;
        remove(&work)
    })?;
    Ok(())
}

fn require_compiler() -> Result<()> {
    for tool in ["gcc", "make", "perl", "ld", "tar"] {
        let found = Command::new(tool)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success());
        ensure!(
            found,
            "building the small guest kernel needs {tool}: install gcc, make and perl (package build-essential)"
        );
    }
    Ok(())
}

struct Build {
    source: PathBuf,
    log: PathBuf,
    /// PATH with the fetched tools first.
    path: OsString,
    /// Where libelf is, unless the host has it.
    libelf: Option<PathBuf>,
}

impl Build {
    /// Fetches source and tools into `work`.
    fn prepare(cache: &Cache, apt: &Apt, work: &Path) -> Result<Self> {
        let (tools, source, wrappers) = (work.join("tools"), work.join("linux"), work.join("bin"));
        let mut packages = TOOL_PACKAGES.to_vec();
        packages.push(SOURCE);
        apt::unpack(&apt.download_with_dependencies(&packages)?, &tools)?;
        apt.clean()?;
        let environment = [
            ("M4", wrappers.join("m4")),
            ("BISON_PKGDATADIR", tools.join("usr/share/bison")),
        ];
        Tree::at(tools.clone()).write_wrappers(&wrappers, TOOLS, &environment)?;
        let mut path = wrappers.into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());

        unpack_source(
            &tools.join(format!("usr/src/{SOURCE}.tar.xz")),
            &source,
            &path,
        )?;
        let libelf = if host_has_libelf() {
            None
        } else {
            Some(fetch_libelf(cache, &work.join("libelf"))?)
        };
        Ok(Self {
            source,
            log: work.join("build.log"),
            path,
            libelf,
        })
    }

    fn configure(&self) -> Result<()> {
        self.make(&["tinyconfig"])?;
        let mut file = fs::OpenOptions::new()
            .append(true)
            .open(self.source.join(".config"))?;
        file.write_all(CONFIGURATION.as_bytes())?;
        self.make(&["olddefconfig"])?;
        let missing = missing_options(&fs::read_to_string(self.source.join(".config"))?);
        ensure!(
            missing.is_empty(),
            "the small kernel's configuration lost {}: something that they depend on is off",
            missing.join(", ")
        );
        Ok(())
    }

    fn make(&self, targets: &[&str]) -> Result<()> {
        let jobs = std::thread::available_parallelism().map_or(2, usize::from);
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)?;
        let mut command = Command::new("make");
        command
            .current_dir(&self.source)
            .env("PATH", &self.path)
            .env("LC_ALL", "C")
            .arg("-s")
            .arg(format!("-j{jobs}"));
        // Cargo's job server is not for make's jobs, and a kernel is not built with the caller's flags.
        for variable in [
            "MAKEFLAGS",
            "MFLAGS",
            "MAKELEVEL",
            "CARGO_MAKEFLAGS",
            "CFLAGS",
            "LDFLAGS",
            "ARCH",
            "CROSS_COMPILE",
        ] {
            command.env_remove(variable);
        }
        if let Some(root) = &self.libelf {
            let libraries = root.join("lib");
            command.arg(format!(
                "LIBELF_FLAGS=-I{}",
                root.join("usr/include").display()
            ));
            command.arg(format!(
                "LIBELF_LIBS=-L{0} -lelf -Wl,-rpath,{0}",
                libraries.display()
            ));
        }
        command
            .args(targets)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let status = command.status().context("cannot run make")?;
        ensure!(
            status.success(),
            "make {} ended with {status}; the end of its output:\n{}",
            targets.join(" "),
            self.tail()
        );
        Ok(())
    }

    fn tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

/// Unpacks the source, without the largest parts that an x86 kernel without graphics and sound never reads.
fn unpack_source(archive: &Path, source: &Path, path: &OsString) -> Result<()> {
    fs::create_dir_all(source)?;
    let mut command = Command::new("tar");
    command.env("PATH", path).arg("-C").arg(source).args([
        "--strip-components=1",
        "--wildcards",
        "--wildcards-match-slash",
    ]);
    for unused in [
        "drivers/gpu/*.[ch]",
        "sound/*.[ch]",
        "drivers/media/*.[ch]",
        "tools/testing/*",
        "*.dts",
        "*.dtsi",
        "*.rst",
        "*.json",
    ] {
        command.arg(format!("--exclude=*/{unused}"));
    }
    run(
        command.arg("-xf").arg(archive),
        "cannot unpack the kernel's source",
    )?;
    Ok(())
}

fn host_has_libelf() -> bool {
    let mut command = Command::new("gcc");
    command
        .args(["-x", "c", "-", "-lelf", "-o", "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else {
        return false;
    };
    let program = b"#include <gelf.h>\nint main(void) { return (int)elf_version(EV_CURRENT); }\n";
    let written = child
        .stdin
        .take()
        .is_some_and(|mut pipe| pipe.write_all(program).is_ok());
    written && child.wait().is_ok_and(|status| status.success())
}

/// Fetches libelf for a program that the host's compiler links and the host's loader runs: from the host's own release.
fn fetch_libelf(cache: &Cache, root: &Path) -> Result<PathBuf> {
    let apt = Apt::host(cache)?;
    apt.update()?;
    let mut archives = apt.download_with_dependencies(&["libelf-dev"])?;
    // The C library must stay the host's.
    archives.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        ["libelf", "zlib1g", "libzstd"]
            .iter()
            .any(|start| name.starts_with(start))
    });
    apt::unpack(&archives, root)?;
    apt.clean()?;
    let folder = root.join("lib");
    fs::create_dir_all(&folder)?;
    // Old packages have some of them under /lib, which may be that very folder.
    for libraries in ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"] {
        for entry in fs::read_dir(root.join(libraries))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            if name.to_string_lossy().contains(".so") && entry.path().is_file() {
                fs::copy(entry.path(), folder.join(&name))?;
            }
        }
    }
    // Dangling where the library itself was under /lib.
    let link = folder.join("libelf.so");
    if !link.exists() {
        std::os::unix::fs::symlink("libelf.so.1", &link)?;
    }
    Ok(root.to_path_buf())
}

/// Options that our configuration switches on and that `config` does not have.
fn missing_options(config: &str) -> Vec<&'static str> {
    let present: std::collections::HashSet<_> = config.lines().collect();
    CONFIGURATION
        .lines()
        .filter(|line| line.ends_with("=y") && !present.contains(line))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_options_are_those_that_the_build_dropped() {
        assert_eq!(missing_options(CONFIGURATION), Vec::<&str>::new());
        let without: String = CONFIGURATION
            .lines()
            .filter(|line| *line != "CONFIG_IOMMUFD=y")
            .map(|line| format!("{line}\n"))
            .collect();
        assert_eq!(missing_options(&without), ["CONFIG_IOMMUFD=y"]);
    }

    #[test]
    fn the_kernel_has_what_the_tests_need() {
        for option in [
            "IOMMUFD",
            "VFIO_DEVICE_CDEV",
            "VFIO_NOIOMMU",
            "IGB",
            "IGBVF",
            "E1000E",
            "VIRTIO_NET",
            "VIRTIO_CONSOLE",
            "9P_FS",
            "USER_NS",
        ] {
            let line = format!("CONFIG_{option}=y");
            assert!(
                CONFIGURATION.lines().any(|present| present == line),
                "{line}"
            );
        }
    }
}
