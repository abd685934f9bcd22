//! A fake sysfs tree in a temporary directory, for tests.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::Sysfs;
use crate::address::Address;

/// The tree, with a kernel that knows `driver_override`, `unbind` and `drivers_probe`.
///
/// A function's file `default_driver` names the driver that the kernel would choose, and `refuses`
/// one whose probe fails.
pub(super) struct Tree {
    root: TempDir,
}

impl Tree {
    pub(super) fn new() -> Self {
        let tree = Self {
            root: tempfile::tempdir().unwrap(),
        };
        for path in ["sys/bus/pci/devices", "sys/bus/pci/drivers", "dev/vfio"] {
            fs::create_dir_all(tree.path(path)).unwrap();
        }
        fs::write(tree.path("sys/bus/pci/drivers_probe"), "").unwrap();
        tree
    }

    pub(super) fn sysfs(&self) -> Sysfs {
        Sysfs {
            write: kernel_write,
            ..Sysfs::under(self.root.path())
        }
    }

    pub(super) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.path().join(relative)
    }

    /// An 82576 with that class, bound to a driver, in a group; bus mastering off.
    pub(super) fn function(
        &self,
        address: &str,
        class: u32,
        driver: Option<&str>,
        group: Option<u32>,
    ) -> Address {
        fs::create_dir_all(self.device(address)).unwrap();
        self.file(address, "vendor", "0x8086\n");
        self.file(address, "device", "0x10c9\n");
        self.file(address, "class", &format!("{class:#08x}\n"));
        self.file(address, "driver_override", "(null)\n");
        self.command(address, 0x0103);
        if let Some(driver) = driver {
            self.driver(driver);
            self.link(address, "driver", &format!("../../drivers/{driver}"));
        }
        if let Some(group) = group {
            let members = self.path(format!("sys/kernel/iommu_groups/{group}/devices"));
            fs::create_dir_all(&members).unwrap();
            fs::write(members.join(address), "").unwrap();
            self.link(
                address,
                "iommu_group",
                &format!("../../../../kernel/iommu_groups/{group}"),
            );
        }
        address.parse().unwrap()
    }

    pub(super) fn driver(&self, name: &str) {
        let path = self.path("sys/bus/pci/drivers").join(name);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("unbind"), "").unwrap();
    }

    pub(super) fn command(&self, address: &str, word: u16) {
        let mut config = [0u8; 64];
        config[4..6].copy_from_slice(&word.to_le_bytes());
        fs::write(self.device(address).join("config"), config).unwrap();
    }

    pub(super) fn interface(&self, address: &str, name: &str, up: bool) {
        let path = self.device(address).join("net").join(name);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("flags"), if up { "0x1003\n" } else { "0x1002\n" }).unwrap();
    }

    pub(super) fn file(&self, address: &str, name: &str, text: &str) {
        fs::write(self.device(address).join(name), text).unwrap();
    }

    pub(super) fn link(&self, address: &str, name: &str, target: &str) {
        symlink(target, self.device(address).join(name)).unwrap();
    }

    pub(super) fn device(&self, address: &str) -> PathBuf {
        self.path("sys/bus/pci/devices").join(address)
    }
}

/// What the kernel does when a file is written.
fn kernel_write(path: &Path, text: &str) -> io::Result<()> {
    fs::File::options().write(true).truncate(true).open(path)?;
    fs::write(path, text)?;
    let bus = path
        .ancestors()
        .find(|directory| directory.ends_with("bus/pci"))
        .expect("tests write below bus/pci only");
    let device = bus.join("devices").join(text);
    match path.file_name().and_then(|name| name.to_str()) {
        Some("unbind") => fs::remove_file(device.join("driver")),
        Some("drivers_probe") => probe(&device),
        _ => Ok(()),
    }
}

fn probe(device: &Path) -> io::Result<()> {
    let text = |name| {
        fs::read_to_string(device.join(name))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let wanted = match text("driver_override") {
        none if none.is_empty() || none == "(null)" => text("default_driver"),
        wanted => wanted,
    };
    let free = !device.join("driver").is_symlink();
    if free && !wanted.is_empty() && wanted != text("refuses") {
        symlink(format!("../../drivers/{wanted}"), device.join("driver"))?;
    }
    Ok(())
}
