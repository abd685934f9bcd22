//! The folder where everything that was fetched or built is kept.
//!
//! It is `$FAILSTOP_CACHE`, or `failstop` in the user's cache folder, and not `target/`: QEMU and the kernels then outlive
//! `cargo clean` and are shared by all clones. Each entry's name ends in a hash of what it was made from. An entry is made
//! under another name and renamed, so that one that exists is whole.

use std::fs::{self, File};
use std::hash::Hasher;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

/// The cache folder.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the folder, and creates it if need be.
    pub(super) fn open() -> Result<Self> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let root = variable("FAILSTOP_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("failstop")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache/failstop")))
            .context("no place for the cache of QEMU and guest kernels: set FAILSTOP_CACHE to a folder with 2 GB free")?;
        fs::create_dir_all(&root).with_context(|| {
            format!(
                "cannot create {}; set FAILSTOP_CACHE to a folder that can be written",
                root.display()
            )
        })?;
        Ok(Self {
            root: root.canonicalize()?,
        })
    }

    /// The path of an entry, whether it exists or not.
    pub(super) fn path(&self, entry: impl AsRef<Path>) -> PathBuf {
        self.root.join(entry)
    }

    /// Waits until no other process fills the cache, and keeps others out while the value lives.
    pub(super) fn lock(&self) -> Result<Flock<File>> {
        let path = self.path("lock");
        let file =
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(lock),
            Err((file, _)) => {
                eprintln!(
                    "another process fills {}; waiting for it",
                    self.root.display()
                );
                Flock::lock(file, FlockArg::LockExclusive)
                    .map_err(|(_, error)| error)
                    .context("cannot lock the cache")
            }
        }
    }

    /// The entry `name`; if there is none, `make` fills a folder that becomes it.
    ///
    /// # Errors
    ///
    /// Those of `make`; what it left is removed.
    pub(super) fn entry(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.path(name);
        if path.is_dir() {
            return Ok(path);
        }
        let partial = self.path(format!("{name}.partial"));
        remove(&partial)?;
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create {}", partial.display()))?;
        if let Err(error) = make(&partial) {
            remove(&partial)?;
            return Err(error);
        }
        fs::rename(&partial, &path)
            .with_context(|| format!("cannot rename {} into place", partial.display()))?;
        Ok(path)
    }
}

/// Removes a folder, if it is there.
pub(super) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// A short name for `parts`, the same on every machine and in every release of the compiler.
pub(super) fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = fnv::FnvHasher::default();
    for part in parts {
        hasher.write(part.as_bytes());
        // A separator, so that ["ab", "c"] and ["a", "bc"] differ.
        hasher.write_u8(0);
    }
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path) -> Cache {
        Cache {
            root: folder.to_path_buf(),
        }
    }

    #[test]
    fn key_depends_on_where_the_parts_end() {
        assert_ne!(key(["ab", "c"]), key(["a", "bc"]));
        assert_eq!(key(["trixie", "qemu"]), key(["trixie", "qemu"]));
    }

    #[test]
    fn an_entry_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        let path = cache
            .entry("kernels/x", |path| Ok(fs::write(path.join("image"), "x")?))
            .unwrap();
        assert_eq!(fs::read_to_string(path.join("image")).unwrap(), "x");
        cache.entry("kernels/x", |_| panic!("it exists")).unwrap();
    }

    #[test]
    fn a_failed_entry_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        cache
            .entry("tree", |_| anyhow::bail!("no network"))
            .unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
