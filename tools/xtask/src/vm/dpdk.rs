//! DPDK in a guest, for measurements side by side: Debian's packages, unpacked as QEMU's are, and programs of ours compiled
//! against them.
//!
//! The compiler is the host's; headers and libraries, the C library's too, are those of the release that the packages are
//! from, so that what it makes runs in any guest, whatever the host has. In the guest all of it lives in a folder of its own,
//! with its own loader.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::apt;
use super::boot::Boot;
use super::cache::{Cache, key};
use super::libraries;
use super::setup::apt_with_lists;
use super::tree::Tree;

/// What is linked: the PMD of the 8257x family, what it needs, and the C library to link with.
const PACKAGES: &[&str] = &[
    "librte-net-e1000-25",
    "librte-mempool-ring25",
    "librte-bus-pci25",
    "libbsd-dev",
    "libc6-dev",
];
/// Taken alone: it has the headers of everything, and depends on every driver that there is.
const HEADERS: &str = "libdpdk-dev";
/// The libraries to link with. The last three are plug-ins, which nothing refers to by name.
const LIBRARIES: &[&str] = &[
    "rte_eal",
    "rte_ethdev",
    "rte_mbuf",
    "rte_mempool",
    "rte_ring",
    "rte_net",
    "rte_kvargs",
    "rte_log",
    "rte_bus_pci",
    "rte_mempool_ring",
    "rte_net_e1000",
];
/// Where it lives in the guest.
const GUEST: &str = "/dpdk";
const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// DPDK's headers and libraries.
#[derive(Clone, Debug)]
pub struct Dpdk {
    tree: Tree,
    version: String,
}

impl Dpdk {
    /// Fetches the packages unless they are there: 15 MB.
    ///
    /// # Errors
    ///
    /// When they cannot be fetched.
    pub fn ensure() -> Result<Self> {
        let cache = Cache::open()?;
        let name = format!("dpdk-{}", key(PACKAGES.iter().copied().chain([HEADERS])));
        let entry = if cache.path(&name).is_dir() {
            cache.path(&name)
        } else {
            let _lock = cache.lock()?;
            let apt = apt_with_lists(&cache)?;
            let entry = cache.entry(&name, |folder| fetch(&apt, folder))?;
            apt.clean()?;
            entry
        };
        let version = fs::read_to_string(entry.join("version")).with_context(|| {
            format!("{} is not whole; remove it and try again", entry.display())
        })?;
        Ok(Self {
            tree: Tree::at(entry),
            version,
        })
    }

    /// The version of Debian's package.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Compiles a C program, optimised for what the packages are compiled for.
    ///
    /// # Errors
    ///
    /// When there is no compiler, or the program does not compile.
    pub fn compile(&self, source: &Path, output: &Path) -> Result<()> {
        let mut command = Command::new("cc");
        command.args([
            "-std=gnu11",
            "-O3",
            "-march=corei7",
            "-Wall",
            "-Wextra",
            "-Werror",
        ]);
        command.arg(format!("--sysroot={}", self.tree.path("").display()));
        for folder in ["usr/include/dpdk", "usr/include/x86_64-linux-gnu/dpdk"] {
            command.arg("-isystem").arg(self.tree.path(folder));
        }
        command.args(["-include", "rte_config.h"]);
        command.arg(source).arg("-o").arg(output);
        command.arg(format!("-Wl,--dynamic-linker={GUEST}/lib/{LOADER}"));
        // The older of the two tags, which also holds for what the libraries themselves need.
        command.arg(format!("-Wl,--disable-new-dtags,-rpath,{GUEST}/lib"));
        command.args(["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]);
        command.args(LIBRARIES.iter().map(|library| format!("-l{library}")));
        let problem = format!(
            "cannot compile {} (is there a C compiler?)",
            source.display()
        );
        apt::run(&mut command, &problem).map(drop)
    }

    /// Sends a program that [`compile`](Self::compile) made along, with all that it needs; also the command by which it
    /// is run in the guest.
    ///
    /// # Errors
    ///
    /// When a library is missing.
    pub fn send(&self, boot: Boot, program: &Path) -> Result<(Boot, String)> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let command = format!("{GUEST}/{name}");
        let mut boot = boot.plain_file(program, command.as_str());
        for library in self.libraries_of(program)? {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            boot = boot.plain_file(&library, format!("{GUEST}/lib/{name}"));
        }
        Ok((boot, command))
    }

    /// The files that the loader opens for a program, itself included.
    fn libraries_of(&self, program: &Path) -> Result<Vec<PathBuf>> {
        let folder = self.tree.path(LIBRARY_FOLDER);
        let loader = folder.join(LOADER);
        let mut command = Command::new(&loader);
        command.arg("--library-path").arg(&folder);
        command.arg("--list").arg(program);
        let list = apt::run(&mut command, "DPDK's libraries do not load")?;
        let mut files = libraries::parse(&list)?;
        // The loader names itself by the name that the program has for it.
        files.retain(|file| file.file_name() != loader.file_name());
        files.push(loader);
        Ok(files)
    }
}

fn fetch(apt: &apt::Apt, folder: &Path) -> Result<()> {
    eprintln!("fetching DPDK");
    apt::unpack(&apt.download_with_dependencies(PACKAGES)?, folder)?;
    apt::unpack(&apt.download(&[HEADERS.into()])?, folder)?;
    // Debian's root has these; the C library's linker script goes through them.
    for name in ["lib", "lib64"] {
        let link = folder.join(name);
        if !link.exists() {
            symlink(format!("usr/{name}"), link)?;
        }
    }
    fs::write(folder.join("version"), apt.version(HEADERS)?)?;
    Ok(())
}
