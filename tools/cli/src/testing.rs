//! A fake sysfs for the tests of `list` and `info`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use failstop::pci::sysfs::Sysfs;
use tempfile::TempDir;

pub(crate) struct Tree {
    root: TempDir,
}

impl Tree {
    pub(crate) fn empty() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("sys/bus/pci/devices")).unwrap();
        Self { root }
    }

    /// An 82576 with interface eth0 under igb, in one group with a function that is no network
    /// controller and a bus master.
    pub(crate) fn with_82576() -> Self {
        let tree = Self::empty();
        tree.function("0000:01:00.0", "0x020000", "igb", 0x0103);
        tree.function("0000:01:00.1", "0x010601", "e1000e", 0x0107);
        fs::create_dir_all(tree.device("0000:01:00.0").join("net/eth0")).unwrap();
        fs::write(tree.device("0000:01:00.0").join("reset_method"), "flr pm\n").unwrap();
        tree
    }

    pub(crate) fn sysfs(&self) -> Sysfs {
        Sysfs::under(self.root.path())
    }

    pub(crate) fn config(&self, address: &str, bytes: &[u8]) {
        fs::write(self.device(address).join("config"), bytes).unwrap();
    }

    fn device(&self, address: &str) -> PathBuf {
        self.root.path().join("sys/bus/pci/devices").join(address)
    }

    fn function(&self, address: &str, class: &str, driver: &str, command: u16) {
        let device = self.device(address);
        let members = self.root.path().join("sys/kernel/iommu_groups/6/devices");
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(&members).unwrap();
        fs::write(members.join(address), "").unwrap();
        for (name, text) in [("vendor", "0x8086"), ("device", "0x10c9"), ("class", class)] {
            fs::write(device.join(name), text).unwrap();
        }
        let mut config = [0u8; 64];
        config[4..6].copy_from_slice(&command.to_le_bytes());
        self.config(address, &config);
        symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
        symlink(
            "../../../../kernel/iommu_groups/6",
            device.join("iommu_group"),
        )
        .unwrap();
    }
}
