//! What every guest needs, fetched and built once.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::apt::{self, Apt};
use super::boot::Kernel;
use super::cache::{Cache, key, remove};
use super::tree::Tree;
use super::{debian_kernel, small_kernel};

/// Packages that guests and QEMU come from.
const PACKAGES: &[&str] = &["qemu-system-x86", "busybox-static", "xz-utils"];

/// QEMU, busybox and guest kernels, ready to use.
#[derive(Clone, Debug)]
pub struct Setup {
    pub(super) cache: Cache,
    pub(super) tree: Tree,
    kernels: Vec<(Kernel, KernelFiles)>,
}

/// A kernel's files.
#[derive(Clone, Debug)]
pub(super) struct KernelFiles {
    pub(super) image: PathBuf,
    /// Modules in the order in which they must be loaded.
    pub(super) modules: Vec<PathBuf>,
}

impl KernelFiles {
    /// Reads an entry of the cache: `image`, and for each line of `modules.order` a file under `modules/`.
    fn open(entry: &Path) -> Result<Self> {
        let order = fs::read_to_string(entry.join("modules.order")).unwrap_or_default();
        let modules = order
            .lines()
            .map(|name| entry.join("modules").join(name))
            .collect();
        let image = entry.join("image");
        ensure!(
            image.is_file(),
            "{} has no kernel image; remove that folder and try again",
            entry.display()
        );
        Ok(Self { image, modules })
    }
}

impl Setup {
    /// Everything for guests with any kernel. Fetches and builds what is not there yet; from nothing that takes minutes.
    ///
    /// # Errors
    ///
    /// When something cannot be fetched or built; the message says what the host lacks.
    pub fn ensure() -> Result<Self> {
        Self::ensure_for(&Kernel::ALL)
    }

    /// As [`ensure`](Self::ensure), for these kernels only.
    ///
    /// # Errors
    ///
    /// As [`ensure`](Self::ensure).
    pub fn ensure_for(kernels: &[Kernel]) -> Result<Self> {
        let cache = Cache::open()?;
        if let Some(setup) = Self::cached(&cache, kernels)? {
            return Ok(setup);
        }
        let _lock = cache.lock()?;
        // Another process may have done it while we waited.
        match Self::cached(&cache, kernels)? {
            Some(setup) => Ok(setup),
            None => Self::make(&cache, kernels),
        }
    }

    /// Fetches newer packages, where there are any, and builds from them.
    ///
    /// # Errors
    ///
    /// As [`ensure`](Self::ensure).
    pub fn refresh() -> Result<Self> {
        let cache = Cache::open()?;
        let _lock = cache.lock()?;
        // Without a network, what is there stays.
        apt_with_lists(&cache)?;
        remove(&cache.path(tree_name()))?;
        for kernel in Kernel::ALL {
            for entry in entries(&cache, &kernel.cache_prefix()) {
                remove(&entry)?;
            }
        }
        Self::make(&cache, &Kernel::ALL)
    }

    fn cached(cache: &Cache, kernels: &[Kernel]) -> Result<Option<Self>> {
        let tree = cache.path(tree_name());
        let mut found = Vec::new();
        for &kernel in kernels {
            match entries(cache, &kernel.cache_prefix()).pop() {
                Some(entry) => found.push((kernel, KernelFiles::open(&entry)?)),
                None => return Ok(None),
            }
        }
        Ok(tree.is_dir().then(|| Self {
            cache: cache.clone(),
            tree: Tree::at(tree),
            kernels: found,
        }))
    }

    fn make(cache: &Cache, kernels: &[Kernel]) -> Result<Self> {
        let apt = apt_with_lists(cache)?;
        let tree = Tree::at(cache.entry(&tree_name(), |folder| {
            eprintln!("fetching {}", PACKAGES.join(", "));
            apt::unpack(&apt.download_with_dependencies(PACKAGES)?, folder)
        })?);
        require_vfio_user(&tree)?;
        for kernel in kernels {
            match kernel {
                Kernel::Debian => debian_kernel::ensure(cache, &apt, &tree)?,
                Kernel::Small => small_kernel::ensure(cache, &apt)?,
            }
        }
        apt.clean()?;
        Self::cached(cache, kernels)?.context("the cache changed while it was filled")
    }

    /// The files of a kernel.
    pub(super) fn kernel(&self, kernel: Kernel) -> Result<&KernelFiles> {
        let found = self.kernels.iter().find(|(name, _)| *name == kernel);
        Ok(&found
            .with_context(|| format!("the set-up was made without the {kernel} kernel"))?
            .1)
    }

    /// QEMU's name and version, as it says them.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub fn qemu_version(&self) -> Result<String> {
        let mut command = self.tree.command("qemu-system-x86_64")?;
        let text = apt::run(command.arg("--version"), "QEMU does not run")?;
        let line = text.lines().next().unwrap_or_default();
        // "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)": the version is what people know.
        let version = line.split_whitespace().nth(3).unwrap_or(line);
        Ok(format!("QEMU {version}"))
    }

    /// One line for each thing that the set-up holds.
    pub fn describe(&self) -> Vec<String> {
        let mut lines = vec![format!("QEMU: {}", self.tree.path("").display())];
        lines.extend(self.kernels.iter().map(|(kernel, files)| {
            format!(
                "{kernel} kernel: {} ({} modules)",
                files.image.display(),
                files.modules.len()
            )
        }));
        lines
    }
}

/// apt with current lists. A host that is older than the release may lack the keys that the release is signed with; its own
/// archive has the package that brings them.
pub(super) fn apt_with_lists(cache: &Cache) -> Result<Apt> {
    let apt = Apt::guests(cache, None)?;
    let Err(error) = apt.update() else {
        return Ok(apt);
    };
    if !format!("{error:#}").contains("NO_PUBKEY") {
        return Err(error);
    }
    let keys = cache.entry("keyring", |folder| {
        let host = Apt::host(cache)?;
        host.update()?;
        apt::unpack(&host.download(&["debian-archive-keyring".into()])?, folder)
    })?;
    let apt = Apt::guests(
        cache,
        Some(&keys.join("usr/share/keyrings/debian-archive-keyring.gpg")),
    )?;
    apt.update()
        .context("even the keys of the host's newest debian-archive-keyring do not fit")?;
    Ok(apt)
}

fn tree_name() -> String {
    format!("tree-{}", key(PACKAGES.iter().copied()))
}

/// Entries of the cache whose names begin with `prefix`, oldest name first.
pub(super) fn entries(cache: &Cache, prefix: &str) -> Vec<PathBuf> {
    let path = cache.path(prefix);
    let (Some(folder), Some(start)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let start = start.to_string_lossy();
    let mut found: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&*start) && !name.ends_with(".partial")
    });
    found.sort();
    found
}

fn require_vfio_user(tree: &Tree) -> Result<()> {
    let mut command = tree.command("qemu-system-x86_64")?;
    let devices = apt::run(
        command.args(["-device", "help"]),
        "the QEMU that was fetched does not run",
    )?;
    ensure!(
        devices.contains("\"vfio-user-pci\""),
        "the QEMU that was fetched has no vfio-user-pci device; it must be 10.1 or newer"
    );
    Ok(())
}
