//! QEMU's command line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::accelerator::Accelerator;
use super::topologies::{Iommu, Model, Place, Topology, Wire};
use crate::protocol::PORT;

/// What every guest's kernel is told. On a busy host an emulated processor stands still for a while now and then; the checks
/// that take this for broken hardware are off: the timer's at boot, which ends in a panic, and the watchdogs for lockups.
const KERNEL_WORDS: &str = "console=ttyS0 panic=-1 quiet intel_iommu=on no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1 log_buf_len=1M";

/// A machine to start.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    pub(super) accelerator: Accelerator,
    pub(super) topology: &'a Topology,
    pub(super) kernel: &'a Path,
    pub(super) initramfs: &'a Path,
    /// Words for the kernel's command line besides those that every guest has.
    pub(super) append: &'a [String],
    pub(super) memory_mib: u32,
    pub(super) cpus: u32,
    /// Where devices of [`Model::VfioUser`] listen, by role.
    pub(super) sockets: &'a BTreeMap<String, PathBuf>,
    /// The datagram sockets of functions on [`Wire::Datagrams`], by role: ours, the peer's.
    pub(super) wires: &'a BTreeMap<String, (PathBuf, PathBuf)>,
    /// The agent's socket; somebody listens there.
    pub(super) agent: &'a Path,
    /// Where QEMU is to listen for QMP.
    pub(super) qmp: &'a Path,
    pub(super) console: Console<'a>,
    /// More words for QEMU.
    pub(super) extra: &'a [String],
}

/// Where the guest's serial console goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Console<'a> {
    /// Into a file.
    File(&'a Path),
    /// The terminal that QEMU is started on.
    Terminal,
}

impl Machine<'_> {
    /// The words of the command line.
    pub(super) fn arguments(&self) -> Result<Vec<String>> {
        let mut words = Words::default();
        self.base(&mut words);
        self.consoles(&mut words);
        // The IOMMU comes before the devices that it translates for.
        match self.topology.iommu {
            Iommu::None => {}
            Iommu::Intel { address_bits } => {
                let bits = address_bits
                    .map(|bits| format!(",aw-bits={bits}"))
                    .unwrap_or_default();
                words.pair(
                    "-device",
                    format!("intel-iommu,intremap=on,caching-mode=on{bits}"),
                );
            }
        }
        for (index, root_port) in self.topology.ports.iter().enumerate() {
            let (port, slot) = (index + 1, 0x10 + index);
            // QEMU's model of Intel's port has no access control services, its own has.
            let model = if root_port.isolates {
                "pcie-root-port"
            } else {
                "ioh3420"
            };
            words.pair(
                "-device",
                format!("{model},id=rp{port},bus=pcie.0,addr={slot:#x},chassis={port},slot={port}"),
            );
        }
        for place in self.topology.places() {
            self.function(&place, &mut words)?;
        }
        words.0.extend(self.extra.iter().cloned());
        Ok(words.0)
    }

    fn base(&self, words: &mut Words) {
        let memory = format!("{}M", self.memory_mib);
        words.flag("-nodefaults");
        words.flag("-no-user-config");
        words.flag("-no-reboot");
        words.pair("-run-with", "exit-with-parent=on");
        words.pair("-accel", self.accelerator.words());
        if let Some(count) = self.accelerator.instruction_count() {
            words.pair("-icount", count);
        }
        words.pair("-cpu", "max");
        words.pair("-smp", self.cpus.to_string());
        words.pair("-m", memory.clone());
        if self.topology.shares_memory() {
            words.pair(
                "-object",
                format!("memory-backend-memfd,id=ram,size={memory},share=on"),
            );
            words.pair("-M", "q35,kernel-irqchip=split,memory-backend=ram");
        } else {
            words.pair("-M", "q35,kernel-irqchip=split");
        }
        // Hot reset of a root port's bus, and surprise removal, need PCIe's own hotplug; with ACPI's, Linux finds no slot to reset.
        words.pair(
            "-global",
            "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
        );
        words.pair("-display", "none");
        words.pair("-kernel", self.kernel.display().to_string());
        words.pair("-initrd", self.initramfs.display().to_string());
        let mut append: Vec<_> = KERNEL_WORDS.split_whitespace().collect();
        append.extend(self.append.iter().map(String::as_str));
        words.pair("-append", append.join(" "));
    }

    fn consoles(&self, words: &mut Words) {
        match self.console {
            Console::File(path) => words.pair("-serial", format!("file:{}", path.display())),
            Console::Terminal => words.pair("-serial", "mon:stdio"),
        }
        words.pair("-device", "virtio-serial-pci,id=serial,bus=pcie.0,addr=0x3");
        words.pair(
            "-chardev",
            format!("socket,id=agent,path={}", self.agent.display()),
        );
        words.pair(
            "-device",
            format!("virtserialport,bus=serial.0,chardev=agent,name={PORT}"),
        );
        words.pair(
            "-qmp",
            format!("unix:{},server=on,wait=off", self.qmp.display()),
        );
    }

    fn function(&self, place: &Place, words: &mut Words) -> Result<()> {
        let (role, port, number) = (place.function.role, place.port, place.number);
        let at = format!(
            "bus=rp{port},addr=0.{number},id={role}{}",
            if place.multifunction {
                ",multifunction=on"
            } else {
                ""
            }
        );
        let net = self.netdev(place, words);
        let ethernet = format!(
            "mac={}{}",
            place.mac(),
            net.map(|id| format!(",netdev={id}")).unwrap_or_default()
        );
        // With ARI, a kernel finds functions by following each one's pointer to the next, and does not scan.
        let next = if place.number == 0 && place.multifunction {
            ",x-pcie-ari-nextfn-1=on"
        } else {
            ""
        };
        match place.function.model {
            Model::Igb => words.pair("-device", format!("igb,{at},{ethernet}{next}")),
            Model::E1000e => words.pair("-device", format!("e1000e,{at},{ethernet}")),
            Model::VirtioNet => {
                words.pair(
                    "-device",
                    format!("virtio-net-pci,{at},{ethernet},iommu_platform=on,disable-legacy=on"),
                );
            }
            Model::VfioUser => {
                let path = self.sockets.get(role).with_context(|| {
                    format!("topology {}: the device {role} is emulated by another process: say where it listens (--socket {role}=PATH)", self.topology.name)
                })?;
                let device = serde_json::json!({
                    "driver": "vfio-user-pci", "bus": format!("rp{port}"), "addr": format!("0.{number}"), "id": role,
                    "socket": {"type": "unix", "path": path},
                });
                words.pair("-device", device.to_string());
            }
        }
        Ok(())
    }

    /// The network back end of a function, if it has one.
    fn netdev(&self, place: &Place, words: &mut Words) -> Option<String> {
        let id = format!("net-{}", place.function.role);
        match place.function.wire {
            Wire::Nothing => return None,
            Wire::Hub(hub) => words.pair("-netdev", format!("hubport,id={id},hubid={hub}")),
            Wire::Datagrams => {
                let (ours, theirs) = self.wires.get(place.function.role)?;
                let end =
                    |name, path: &Path| format!("{name}.type=unix,{name}.path={}", path.display());
                words.pair(
                    "-netdev",
                    format!(
                        "dgram,id={id},{},{}",
                        end("local", ours),
                        end("remote", theirs)
                    ),
                );
            }
        }
        Some(id)
    }
}

#[derive(Default)]
struct Words(Vec<String>);

impl Words {
    fn flag(&mut self, word: &str) {
        self.0.push(word.into());
    }

    fn pair(&mut self, option: &str, value: impl Into<String>) {
        self.0.extend([option.to_owned(), value.into()]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::topologies;
    use super::*;

    fn line(name: &str, sockets: &[(&str, &str)]) -> Result<String> {
        let sockets = sockets
            .iter()
            .map(|(role, path)| ((*role).to_owned(), PathBuf::from(path)))
            .collect();
        let machine = Machine {
            accelerator: Accelerator::Tcg,
            topology: topologies::find(name)?,
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            append: &["nokaslr".to_owned()],
            memory_mib: 512,
            cpus: 2,
            sockets: &sockets,
            wires: &BTreeMap::new(),
            agent: Path::new("/run/agent"),
            qmp: Path::new("/run/qmp"),
            console: Console::File(Path::new("/run/console")),
            extra: &[],
        };
        Ok(machine.arguments()?.join(" "))
    }

    #[test]
    fn the_iommu_comes_before_the_ports_and_the_ports_before_the_functions() {
        let line = line("two-igb", &[]).unwrap();
        let position = |text: &str| {
            line.find(text)
                .unwrap_or_else(|| panic!("no {text} in {line}"))
        };
        assert!(position("intel-iommu") < position("pcie-root-port"));
        assert!(position("id=rp2") < position("igb,bus=rp1"));
        assert!(
            position("hubport,id=net-igb,hubid=0") < position("igb,bus=rp1,addr=0.0,id=igb,mac=")
        );
        assert!(line.ends_with(
            "igb,bus=rp2,addr=0.0,id=igb-peer,mac=52:54:00:fa:11:20,netdev=net-igb-peer"
        ));
    }

    #[test]
    fn address_width_and_its_absence_reach_the_command_line() {
        assert!(
            line("aw39", &[])
                .unwrap()
                .contains("caching-mode=on,aw-bits=39")
        );
        assert!(
            !line("no-iommu", &[])
                .unwrap()
                .contains("-device intel-iommu")
        );
    }

    #[test]
    fn functions_of_one_slot_say_so() {
        let line = line("shared-group", &[]).unwrap();
        assert!(line.contains("igb,bus=rp1,addr=0.0,id=igb,multifunction=on"));
        assert!(line.contains("e1000e,bus=rp1,addr=0.1,id=sibling,multifunction=on"));
    }

    #[test]
    fn an_emulated_device_needs_a_socket_and_shared_memory() {
        assert!(
            line("vfio-user", &[])
                .unwrap_err()
                .to_string()
                .contains("--socket emulated=PATH")
        );
        let line = line("vfio-user", &[("emulated", "/run/nic")]).unwrap();
        assert!(line.contains("share=on") && line.contains("memory-backend=ram"));
        assert!(line.contains(r#""path":"/run/nic""#));
    }
}
