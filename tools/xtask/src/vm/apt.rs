//! Debian packages, by the host's apt with a root of its own.
//!
//! apt is told to keep lists, archives and status in the cache, and that nothing is installed, so its solver names all that
//! a package needs. It reads our sources, not the host's, and needs no privileges. Packages are downloaded and unpacked,
//! never installed: no maintainer script runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::cache::{Cache, key};

/// The release whose QEMU, tools and kernels we use. Its backports have the QEMU that can attach an emulated device.
const RELEASE: &str = "trixie";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A repository: where it is, and one of its suites.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    uri: String,
    suite: String,
}

/// apt with a root of its own.
#[derive(Debug)]
pub(super) struct Apt {
    root: PathBuf,
    /// The suite whose packages win, other things being equal.
    target: String,
}

impl Apt {
    /// The packages of the Debian release that guests are made from, signed with the host's keys or those in `keyring`.
    pub(super) fn guests(cache: &Cache, keyring: Option<&Path>) -> Result<Self> {
        require_tools()?;
        let uri = match std::env::var("FAILSTOP_DEBIAN_MIRROR") {
            Ok(uri) if !uri.is_empty() => uri,
            _ => host_sources()?
                .into_iter()
                .find(|source| host_is_debian() && !source.suite.contains('-'))
                .context(
                    "the host's apt has no Debian archive to fetch QEMU and guest kernels from: set FAILSTOP_DEBIAN_MIRROR \
                     to the URI of a Debian mirror (the part before /dists), and install the package debian-archive-keyring",
                )?
                .uri,
        };
        let backports = format!("{RELEASE}-backports");
        let suites = [RELEASE, &backports].map(|suite| Source {
            uri: uri.clone(),
            suite: suite.into(),
        });
        Self::open(
            cache,
            &suites,
            Some(keyring.unwrap_or(KEYRING.as_ref())),
            &backports,
        )
    }

    /// The packages of the host's own release, for libraries that host programs are linked with.
    pub(super) fn host(cache: &Cache) -> Result<Self> {
        require_tools()?;
        let sources = host_sources()?;
        let target = sources
            .first()
            .context("the host's apt has no package sources")?
            .suite
            .clone();
        Self::open(cache, &sources, None, &target)
    }

    fn open(
        cache: &Cache,
        sources: &[Source],
        keyring: Option<&Path>,
        target: &str,
    ) -> Result<Self> {
        let lines = source_lines(sources, keyring);
        let root = cache.path(format!("apt/{}", key([lines.as_str()])));
        for folder in [
            "etc/preferences.d",
            "etc/trusted.gpg.d",
            "etc/apt.conf.d",
            "state/lists/partial",
            "cache/archives/partial",
            "log",
        ] {
            fs::create_dir_all(root.join(folder))
                .with_context(|| format!("cannot create {}", root.display()))?;
        }
        fs::write(root.join("status"), "")?;
        fs::write(root.join("sources.list"), lines)?;
        fs::write(
            root.join("apt.conf"),
            configuration(&root, keyring.is_some(), &host_acquire_options()?),
        )?;
        Ok(Self {
            root,
            target: target.into(),
        })
    }

    /// Fetches the lists of packages.
    pub(super) fn update(&self) -> Result<()> {
        run(
            self.tool("apt-get").args(["update", "-q"]),
            "cannot fetch Debian's package lists (is there a network?)",
        )?;
        Ok(())
    }

    /// The version of `package` that would be fetched.
    pub(super) fn version(&self, package: &str) -> Result<String> {
        let text = run(
            self.tool("apt-cache")
                .args(["show", "--no-all-versions", package]),
            "cannot look the package up",
        )?;
        field(&text, "Version").with_context(|| format!("{} has no package {package}", self.target))
    }

    /// What `package` depends on, as apt's record says it.
    pub(super) fn depends(&self, package: &str) -> Result<String> {
        let text = run(
            self.tool("apt-cache")
                .args(["show", "--no-all-versions", package]),
            "cannot look the package up",
        )?;
        field(&text, "Depends").with_context(|| format!("package {package} depends on nothing"))
    }

    /// Downloads `packages` and all that they need; the archives' paths.
    pub(super) fn download_with_dependencies(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let archives = self.root.join("cache/archives");
        clear(&archives)?;
        let mut command = self.tool("apt-get");
        command
            .args(["install", "-q", "-y", "--download-only"])
            .args(packages);
        run(
            &mut command,
            &format!("cannot download {}", packages.join(", ")),
        )?;
        list(&archives)
    }

    /// Downloads `packages` alone; the archives' paths.
    pub(super) fn download(&self, packages: &[String]) -> Result<Vec<PathBuf>> {
        let archives = self.root.join("cache/archives");
        clear(&archives)?;
        let mut command = self.tool("apt-get");
        command
            .current_dir(&archives)
            .args(["download", "-q"])
            .args(packages);
        run(
            &mut command,
            &format!("cannot download {}", packages.join(", ")),
        )?;
        list(&archives)
    }

    /// Removes the archives that were downloaded.
    pub(super) fn clean(&self) -> Result<()> {
        clear(&self.root.join("cache/archives"))
    }

    fn tool(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command
            .env("APT_CONFIG", self.root.join("apt.conf"))
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["-t", &self.target]);
        command
    }
}

/// Unpacks archives into `folder`.
pub(super) fn unpack(archives: &[PathBuf], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for archive in archives {
        run(
            Command::new("dpkg-deb").arg("-x").arg(archive).arg(folder),
            &format!("cannot unpack {}", archive.display()),
        )?;
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed.
pub(super) fn run(command: &mut Command, problem: &str) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{problem}: cannot run {:?}", command.get_program()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{problem}\n{command:?} ended with {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(text)
}

fn require_tools() -> Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "the QEMU tier needs an x86-64 host: the QEMU that it fetches is built for one"
    );
    for tool in ["apt-get", "apt-config", "dpkg-deb"] {
        let found = Command::new(tool)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success());
        ensure!(
            found,
            "the QEMU tier fetches QEMU and kernels with apt, and {tool} was not found: it needs a Debian or Ubuntu host"
        );
    }
    Ok(())
}

fn host_is_debian() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    release.lines().any(|line| line == "ID=debian")
}

/// The host's own package sources, its release's main suite first. apt itself reads its files.
fn host_sources() -> Result<Vec<Source>> {
    let release =
        fs::read_to_string("/etc/os-release").context("cannot tell which system this is")?;
    let codename = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or_default()
        .trim_matches('"');
    let mut command = Command::new("apt-get");
    command.args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]);
    let text = run(&mut command, "cannot read the host's package sources")?;
    Ok(sources_of_release(&text, codename))
}

/// Picks from apt's list of index files the suites of release `codename`: itself, -updates, -security.
fn sources_of_release(text: &str, codename: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let [uri, suite, "main"] = line.split(' ').collect::<Vec<_>>()[..] else {
            continue;
        };
        let source = Source {
            uri: uri.trim_end_matches('/').into(),
            suite: suite.into(),
        };
        let ours = suite == codename
            || suite
                .strip_prefix(codename)
                .is_some_and(|rest| ["-updates", "-security"].contains(&rest));
        if ours && !sources.contains(&source) {
            sources.push(source);
        }
    }
    sources.sort_by_key(|source| source.suite.len());
    sources
}

fn source_lines(sources: &[Source], keyring: Option<&Path>) -> String {
    let signed = keyring
        .map(|path| format!("[signed-by={}] ", path.display()))
        .unwrap_or_default();
    sources
        .iter()
        .map(|source| format!("deb {signed}{} {} main\n", source.uri, source.suite))
        .collect()
}

/// How the host's apt reaches the network: proxies, retries, certificates.
fn host_acquire_options() -> Result<String> {
    let dump = run(
        Command::new("apt-config").arg("dump"),
        "cannot read the host's apt configuration",
    )?;
    let wanted = |line: &&str| {
        ["Acquire::http", "Acquire::https", "Acquire::Retries"]
            .iter()
            .any(|start| line.starts_with(start))
    };
    Ok(dump
        .lines()
        .filter(wanted)
        .map(|line| format!("{line}\n"))
        .collect())
}

/// Our apt's configuration. The host's is not read, since its hooks are made for the host's state.
fn configuration(root: &Path, own_keys: bool, acquire: &str) -> String {
    let root = root.display();
    let trusted = if own_keys {
        format!("{root}/etc/trusted.gpg.d")
    } else {
        "/etc/apt/trusted.gpg.d".into()
    };
    format!(
        r#"Dir::State "{root}/state";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
Dir::Log "{root}/log";
Dir::Etc "{root}/etc";
Dir::Etc::SourceList "{root}/sources.list";
Dir::Etc::SourceParts "-";
Dir::Etc::TrustedParts "{trusted}";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
APT::Update::Error-Mode "any";
{acquire}"#
    )
}

/// The first value of a field in apt's records.
fn field(records: &str, name: &str) -> Option<String> {
    records.lines().find_map(|line| {
        line.strip_prefix(name)?
            .strip_prefix(": ")
            .map(str::to_owned)
    })
}

fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut archives: Vec<_> = fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    archives.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    archives.sort();
    ensure!(
        !archives.is_empty(),
        "apt downloaded nothing into {}",
        folder.display()
    );
    Ok(archives)
}

fn clear(folder: &Path) -> Result<()> {
    for path in fs::read_dir(folder)?.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "deb") {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_the_release_itself_first_and_nothing_foreign() {
        let text = "http://mirror/debian-security/ old-security main\nhttp://mirror/debian/ old main\n\
                    http://mirror/debian/ old contrib\nhttp://elsewhere/ nodistro main\nhttp://mirror/debian/ old-backports main\n";
        let source = |uri: &str, suite: &str| Source {
            uri: uri.into(),
            suite: suite.into(),
        };
        let expected = [
            source("http://mirror/debian", "old"),
            source("http://mirror/debian-security", "old-security"),
        ];
        assert_eq!(sources_of_release(text, "old"), expected);
    }

    #[test]
    fn sources_name_their_keyring() {
        let sources = [Source {
            uri: "http://mirror/debian".into(),
            suite: "new".into(),
        }];
        assert_eq!(
            source_lines(&sources, Some("/keys.gpg".as_ref())),
            "deb [signed-by=/keys.gpg] http://mirror/debian new main\n"
        );
        assert_eq!(
            source_lines(&sources, None),
            "deb http://mirror/debian new main\n"
        );
    }

    #[test]
    fn field_is_the_first_of_that_name() {
        let records =
            "Package: linux\nVersion: 7.3\nDepends: a, b\n\nPackage: linux\nVersion: 6.12\n";
        assert_eq!(field(records, "Version").as_deref(), Some("7.3"));
        assert_eq!(field(records, "Ver"), None);
    }
}
