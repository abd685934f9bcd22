//! Debian's kernel as a guest kernel: its image, and the few of its modules that tests need, unpacked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::apt::{self, Apt, run};
use super::cache::{Cache, key, remove};
use super::tree::Tree;

/// The modules to load; what they depend on comes along.
const MODULES: &[&str] = &[
    "vfio_iommu_type1",
    "vfio-pci",
    "igb",
    "igbvf",
    "e1000e",
    "virtio_net",
    "9pnet_virtio",
    "9p",
    "tun",
    "veth",
    "aer_inject",
];

/// The start of the cache entry's name; the version follows.
pub(super) fn prefix() -> String {
    format!("kernels/debian-{}-", key(MODULES.iter().copied()))
}

/// Fetches the kernel, unless the cache has it.
pub(super) fn ensure(cache: &Cache, apt: &Apt, tree: &Tree) -> Result<()> {
    if !super::setup::entries(cache, &prefix()).is_empty() {
        return Ok(());
    }
    let release = release(&apt.depends("linux-image-amd64")?)?;
    cache.entry(&format!("{}{release}", prefix()), |folder| {
        eprintln!("fetching Debian's kernel {release}");
        let unpacked = folder.join("packages");
        apt::unpack(&apt.download(&packages(apt, &release))?, &unpacked)?;
        let (boot, modules) = (
            format!("boot/vmlinuz-{release}"),
            format!("usr/lib/modules/{release}"),
        );
        let image = [unpacked.join(&modules).join("vmlinuz"), unpacked.join(boot)]
            .into_iter()
            .find(|path| path.is_file());
        fs::copy(
            image.context("the kernel's package has no vmlinuz where one was expected")?,
            folder.join("image"),
        )?;
        let modules = [
            unpacked.join(&modules),
            unpacked.join("lib/modules").join(&release),
        ]
        .into_iter()
        .find(|path| path.is_dir());
        take_modules(
            &modules.context("the kernel's package has no modules where some were expected")?,
            folder,
            tree,
        )?;
        remove(&unpacked)
    })?;
    Ok(())
}

/// The release that the meta-package stands for, `7.3.4+deb13-amd64`.
fn release(depends: &str) -> Result<String> {
    let images = depends
        .split(", ")
        .filter_map(|package| package.split(' ').next()?.strip_prefix("linux-image-"));
    let release = images
        .into_iter()
        .find(|release| release.starts_with(|first: char| first.is_ascii_digit()));
    Ok(release
        .with_context(|| format!("linux-image-amd64 names no kernel; it depends on {depends}"))?
        .to_owned())
}

/// The packages of a release: newer ones are split in three.
fn packages(apt: &Apt, release: &str) -> Vec<String> {
    let split =
        ["linux-base", "linux-binary", "linux-modules"].map(|part| format!("{part}-{release}"));
    if split.iter().all(|package| apt.version(package).is_ok()) {
        split.into()
    } else {
        vec![format!("linux-image-{release}")]
    }
}

/// Unpacks the wanted modules into `folder/modules` and writes their order.
fn take_modules(from: &Path, folder: &Path, tree: &Tree) -> Result<()> {
    let mut available = BTreeMap::new();
    index(&from.join("kernel"), &mut available)?;
    fs::create_dir(folder.join("modules"))?;
    let mut loader = Loader {
        available,
        done: BTreeSet::new(),
        order: Vec::new(),
    };
    for name in MODULES {
        loader.take(name, &mut |name, path| {
            let contents = contents(path, tree)?;
            fs::write(folder.join("modules").join(format!("{name}.ko")), &contents)?;
            Ok(dependencies(&contents))
        })?;
    }
    let order: String = loader
        .order
        .iter()
        .map(|name| format!("{name}.ko\n"))
        .collect();
    fs::write(folder.join("modules.order"), order)?;
    Ok(())
}

struct Loader {
    available: BTreeMap<String, PathBuf>,
    done: BTreeSet<String>,
    order: Vec<String>,
}

impl Loader {
    /// Takes a module after those that it depends on. `read` unpacks one and says what it depends on.
    fn take(
        &mut self,
        name: &str,
        read: &mut dyn FnMut(&str, &Path) -> Result<Vec<String>>,
    ) -> Result<()> {
        let name = canonical(name);
        if !self.done.insert(name.clone()) {
            return Ok(());
        }
        // A driver that is no module is built in.
        let Some(path) = self.available.get(&name).cloned() else {
            return Ok(());
        };
        for dependency in read(&name, &path)? {
            self.take(&dependency, read)?;
        }
        self.order.push(name);
        Ok(())
    }
}

/// A module's name as the kernel spells it.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Finds every module below `folder`.
fn index(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .flatten()
    {
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            index(&path, found)?;
        } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            found.insert(canonical(name), path);
        }
    }
    Ok(())
}

/// A module's bytes; on the host, xz takes a tenth of the time that it would take in an emulated guest.
fn contents(path: &Path, tree: &Tree) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    }
    let unpacked = tempfile::NamedTempFile::new()?;
    let mut command = tree.command("xz")?;
    command.arg("-dc").arg(path).stdout(unpacked.reopen()?);
    run(&mut command, &format!("cannot unpack {}", path.display()))?;
    Ok(fs::read(unpacked.path())?)
}

/// What a module's own record says that it depends on: a string `depends=a,b` in its .modinfo section.
fn dependencies(module: &[u8]) -> Vec<String> {
    let strings = module.split(|&byte| byte == 0);
    let list = strings
        .filter_map(|string| string.strip_prefix(b"depends="))
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(list)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_read_from_the_meta_package() {
        let split = "linux-base-amd64 (= 7.3.4-1), linux-image-7.3.4+deb13-amd64 (= 7.3.4-1), linux-modules-amd64 (= 7.3.4-1)";
        assert_eq!(release(split).unwrap(), "7.3.4+deb13-amd64");
        assert!(release("linux-base").is_err());
    }

    #[test]
    fn dependencies_are_read_from_modinfo() {
        assert_eq!(
            dependencies(b"\x7fELF\0license=GPL\0depends=dca,i2c-algo-bit\0name=igb\0"),
            ["dca", "i2c-algo-bit"]
        );
        assert_eq!(
            dependencies(b"\x7fELF\0depends=\0name=dca\0"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn modules_come_after_what_they_depend_on_and_once() {
        let module = |name: &str| (name.to_owned(), PathBuf::from(name));
        let available = ["igb", "dca", "i2c_algo_bit", "e1000e"].map(module).into();
        let mut loader = Loader {
            available,
            done: BTreeSet::new(),
            order: Vec::new(),
        };
        let mut read = |name: &str, _: &Path| -> Result<Vec<String>> {
            Ok(if name == "igb" {
                vec!["dca".into(), "i2c-algo-bit".into(), "builtin".into()]
            } else {
                Vec::new()
            })
        };
        for name in ["igb", "dca", "e1000e"] {
            loader.take(name, &mut read).unwrap();
        }
        assert_eq!(loader.order, ["dca", "i2c_algo_bit", "igb", "e1000e"]);
    }
}
