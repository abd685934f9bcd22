//! The guest's first file system: busybox, the agent, modules, and the files that the host sends along.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use cpio::newc;

use super::libraries;

/// Programs larger than this are sent without their debugging symbols.
const STRIP_ABOVE: u64 = 4 << 20;

/// What an archive will hold, by path without the leading slash; folders come before what is in them.
#[derive(Debug, Default)]
pub(super) struct Initramfs {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
enum Entry {
    Folder { mode: u32 },
    Link { target: String },
    Bytes { mode: u32, contents: Vec<u8> },
    File { mode: u32, host: PathBuf },
}

impl Initramfs {
    /// Adds a folder and those above it.
    pub(super) fn folder(&mut self, path: &str, mode: u32) {
        self.parents(path);
        self.entries.insert(inside(path), Entry::Folder { mode });
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entries.insert(
            inside(path),
            Entry::Link {
                target: target.into(),
            },
        );
    }

    /// Adds a file with these contents.
    pub(super) fn bytes(&mut self, path: &str, mode: u32, contents: impl Into<Vec<u8>>) {
        self.parents(path);
        self.entries.insert(
            inside(path),
            Entry::Bytes {
                mode,
                contents: contents.into(),
            },
        );
    }

    /// Adds a copy of a file of the host with its permission bits.
    pub(super) fn file(&mut self, path: &str, host: &Path) -> Result<()> {
        let metadata = fs::metadata(host)
            .with_context(|| format!("cannot send {} to the guest", host.display()))?;
        anyhow::ensure!(
            metadata.is_file(),
            "cannot send {} to the guest: it is not a file",
            host.display()
        );
        self.parents(path);
        self.entries.insert(
            inside(path),
            Entry::File {
                mode: metadata.permissions().mode() & 0o777,
                host: host.into(),
            },
        );
        Ok(())
    }

    /// Adds a copy of a file of the host; if it is a program, with the libraries that it needs.
    pub(super) fn program(&mut self, path: &str, host: &Path) -> Result<()> {
        self.file(path, host)?;
        if !is_elf(host)? {
            return Ok(());
        }
        for library in libraries::of(host)? {
            self.file(&library.to_string_lossy(), &library)?;
        }
        if fs::metadata(host)?.len() > STRIP_ABOVE
            && let Some(contents) = stripped(host)
        {
            self.bytes(path, 0o755, contents);
        }
        Ok(())
    }

    fn parents(&mut self, path: &str) {
        let ancestors = Path::new(path)
            .ancestors()
            .skip(1)
            .map(|path| inside(&path.to_string_lossy()));
        for folder in ancestors.filter(|path| !path.is_empty()) {
            self.entries
                .entry(folder)
                .or_insert(Entry::Folder { mode: 0o755 });
        }
    }

    /// Writes the archive, in the "newc" form that kernels take.
    pub(super) fn write(&self, mut writer: impl Write) -> Result<()> {
        for (index, (path, entry)) in self.entries.iter().enumerate() {
            let (kind, mode) = match entry {
                Entry::Folder { mode } => (newc::ModeFileType::Directory, *mode),
                Entry::Link { .. } => (newc::ModeFileType::Symlink, 0o777),
                Entry::Bytes { mode, .. } | Entry::File { mode, .. } => {
                    (newc::ModeFileType::Regular, *mode)
                }
            };
            let contents = match entry {
                Entry::Folder { .. } => Vec::new(),
                Entry::Link { target } => target.clone().into_bytes(),
                Entry::Bytes { contents, .. } => contents.clone(),
                Entry::File { host, .. } => {
                    fs::read(host).with_context(|| format!("cannot read {}", host.display()))?
                }
            };
            let inode = u32::try_from(index).context("too many files for an initramfs")?;
            let length = u32::try_from(contents.len())
                .with_context(|| format!("{path} is too large for an initramfs"))?;
            let header = newc::Builder::new(path)
                .ino(inode)
                .mode(mode)
                .set_mode_file_type(kind)
                .nlink(1);
            let mut file = header.write(&mut writer, length);
            file.write_all(&contents)?;
            file.finish()?;
        }
        newc::trailer(&mut writer)?.flush()?;
        Ok(())
    }
}

fn inside(path: &str) -> String {
    path.trim_start_matches('/').to_owned()
}

fn is_elf(path: &Path) -> Result<bool> {
    use std::io::Read;
    let mut magic = [0; 4];
    let mut file =
        fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(file.read_exact(&mut magic).is_ok() && magic == *b"\x7fELF")
}

/// A program without its debugging symbols; `None` where the host cannot strip it, which only costs memory.
fn stripped(host: &Path) -> Option<Vec<u8>> {
    let output = tempfile::NamedTempFile::new().ok()?;
    let status = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .arg(output.path())
        .arg(host)
        .status()
        .ok()?;
    status.success().then(|| fs::read(output.path()).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(initramfs: &Initramfs) -> Vec<u8> {
        let mut bytes = Vec::new();
        initramfs.write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn folders_come_before_their_contents() {
        let mut initramfs = Initramfs::default();
        initramfs.bytes("/etc/failstop.env", 0o644, "A=1\n");
        initramfs.link("/bin", "busybox");
        let bytes = archive(&initramfs);
        let mut names = Vec::new();
        let mut reader = &bytes[..];
        loop {
            let mut entry = newc::Reader::new(reader).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            let mut contents = String::new();
            std::io::Read::read_to_string(&mut entry, &mut contents).unwrap();
            names.push((
                entry.entry().name().to_owned(),
                entry.entry().mode(),
                contents,
            ));
            reader = entry.finish().unwrap();
        }
        let expected = [
            ("bin", 0o120_777, "busybox"),
            ("etc", 0o40_755, ""),
            ("etc/failstop.env", 0o100_644, "A=1\n"),
        ];
        assert_eq!(
            names,
            expected.map(|(name, mode, contents)| (name.to_owned(), mode, contents.to_owned()))
        );
    }

    #[test]
    fn the_archive_begins_as_kernels_want_it() {
        let mut initramfs = Initramfs::default();
        initramfs.folder("/tmp", 0o1777);
        assert!(archive(&initramfs).starts_with(b"070701"));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Initramfs::default()
            .program("/failstop/x", Path::new("/no/such/program"))
            .unwrap_err();
        assert!(error.to_string().contains("/no/such/program"));
    }
}
