//! The NIC under the kernel's own driver.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use super::offloads;
use crate::fixture::Outcome;

/// Which NIC it is: the PCI address of a function that is bound to a kernel driver.
const VARIABLE: &str = "FAILSTOP_KERNEL_NIC";
/// How long its link may take to come up.
const LINK: Duration = Duration::from_secs(20);

/// A network interface of the kernel. Dropped, it is switched off again; its offloads and IPv6 stay
/// off.
#[derive(Debug)]
pub(super) struct KernelNic {
    /// Its name, such as `eth0`.
    pub(super) name: String,
    /// Its station address.
    pub(super) mac: [u8; 6],
}

impl KernelNic {
    /// The interface that the environment names, with its link up, and silent: without addresses
    /// of any kind, so that the kernel has nothing to say. What is sent is on the wire as the
    /// kernel's captures show it.
    pub(super) fn silent() -> Result<Self, Failed> {
        let function = env::var(VARIABLE)
            .map_err(|_| format!("{VARIABLE} names the PCI function of the kernel's NIC"))?;
        let name = interface_of(&function)?;
        let folder = sysfs(&name);
        let address = fs::read_to_string(folder.join("address"))?;
        let nic = Self {
            mac: parse_mac(address.trim()).ok_or("the interface has no MAC address")?,
            name,
        };
        nic.ip(&["link", "set", "dev", &nic.name, "down"])?;
        nic.ip(&["addr", "flush", "dev", &nic.name])?;
        // IPv6 speaks unasked. A kernel without it has no such file.
        let ipv6 = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", nic.name);
        if Path::new(&ipv6).exists() {
            fs::write(ipv6, "1")?;
        }
        offloads::switch_off(&nic.name)?;
        nic.ip(&["link", "set", "dev", &nic.name, "up"])?;
        let end = Instant::now() + LINK;
        while fs::read_to_string(folder.join("carrier")).is_ok_and(|carrier| carrier.trim() != "1")
        {
            if Instant::now() > end {
                return Err(format!("{}: no link within {LINK:?}", nic.name).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(nic)
    }

    /// Gives it an address, with prefix length.
    pub(super) fn set_address(&self, address: &str) -> Outcome {
        self.ip(&["addr", "add", address, "dev", &self.name])
    }

    /// Takes its addresses: the kernel falls silent.
    pub(super) fn take_addresses(&self) -> Outcome {
        self.ip(&["addr", "flush", "dev", &self.name])
    }

    fn ip(&self, words: &[&str]) -> Outcome {
        run(Command::new("ip").args(words)).map(drop)
    }
}

impl Drop for KernelNic {
    fn drop(&mut self) {
        let down = || self.ip(&["link", "set", "dev", &self.name, "down"]);
        if let Err(error) = self.take_addresses().and_then(|()| down()) {
            eprintln!("{}: {error:?}", self.name);
        }
    }
}

/// Runs a command; its output, if it succeeds.
pub(super) fn run(command: &mut Command) -> Result<Output, Failed> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!(
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
    .into())
}

fn sysfs(interface: &str) -> PathBuf {
    Path::new("/sys/class/net").join(interface)
}

/// The name of a PCI function's network interface.
fn interface_of(function: &str) -> Result<String, Failed> {
    let folder = format!("/sys/bus/pci/devices/{function}/net");
    let entry = fs::read_dir(&folder)
        .map_err(|error| format!("{folder}: {error}; is {function} bound to its kernel driver?"))?
        .next()
        .ok_or_else(|| format!("{folder} is empty"))??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<_> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect::<Option<_>>()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_is_six_bytes() {
        assert_eq!(
            parse_mac("52:54:00:fa:11:20"),
            Some([0x52, 0x54, 0, 0xfa, 0x11, 0x20])
        );
        assert_eq!(parse_mac("52:54:00:fa:11"), None);
        assert_eq!(parse_mac(""), None);
    }
}
