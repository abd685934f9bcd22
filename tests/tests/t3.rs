//! T3: the emulated 82576 as a PCI function of a guest (QEMU's `vfio-user-pci`). First the guest
//! kernel's own igb driver has it, against an 82574 under QEMU's own model: a judge of the emulator
//! that nobody here wrote. Then our driver has it, by the guest's kernel VFIO, and the emulator says
//! what its DMA met. Last, in a guest of their own, the matrix of faults: each cell is played in the
//! guest, whose way to the emulator's control socket is a serial port. A landing plays some of them;
//! all are played with `FAILSTOP_FULL` set.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use failstop_emulator::{Cable, Emulator, Options, Running};
use failstop_tests::adversary::cell::NotSeen;
use failstop_tests::adversary::guest::{self, CELLS, CONTROL, PREFIX};
use failstop_tests::adversary::plays::{Play, plays};
use failstop_tests::adversary::print::{self, Results};
use failstop_tests::adversary::table::{Table, Tier};
use failstop_tests::cases::{CASES, Needs};
use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;
use xtask::protocol::Run;
use xtask::vm::{Boot, Finished, Guest, Setup, topologies};

/// How long one step may take in a guest without hardware virtualization.
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// How long each cell but the first may take: many times what it does.
const CELL_LIMIT: Duration = Duration::from_secs(20);
/// Cells that one process in the guest plays: so many that its start costs little, so few that it is
/// seen how they get on.
const TOGETHER: usize = 12;
const LIFETIME: Duration = Duration::from_secs(1200);
/// The same, for all cells.
const CELLS_LIFETIME: Duration = Duration::from_secs(7200);
/// The serial port that leads to the emulator's control socket.
const CONTROL_PORT: &str = "failstop.emulator";
/// The cells that a landing plays: one for each way in which a device is not what it should be.
const LANDING: &[&str] = &[
    "rxq-stuck/destroy-rq",
    "txq-stuck/destroy-sq",
    "slow:500/destroy-rq",
    "lie/destroy-rq",
    "late-dd:20/close",
    "bme-ignored/ladder@bme-off",
    "bme-readback/destroy-mr",
    "dma-outside/traffic",
    "tx-stalls/traffic",
    "cq-long:4000/traffic",
    "gone/ladder@reset",
    "gone-zero:300/traffic",
    "flr-hangs/ladder@bme-off",
    "flr-noop/ladder@bme-off",
    "flr-noop+rst-noop/close",
    "irq-none/recovery",
];

/// The emulated function under the kernel's igb, the 82574 in a network of its own, so that traffic
/// between them has to take the wire. Prints facts, one a line.
const KERNEL_DRIVER: &str = r#"
unshare -n sleep 1000 </dev/null >/dev/null 2>&1 &
peer=$!
sleep 1
for name in $(ls /sys/class/net); do
    case $(readlink /sys/class/net/$name/device/driver) in
        */igb) ours=$name ;;
        */e1000e) theirs=$name ;;
    esac
done
echo "driver $(basename $(readlink /sys/class/net/$ours/device/driver))"
ip link set $theirs netns $peer
there="nsenter -t $peer -n"
$there ip addr add 10.9.0.2/24 dev $theirs
$there ip link set $theirs up
ip addr add 10.9.0.1/24 dev $ours
ip link set $ours up
for try in 1 2 3 4 5 6 7 8 9 10; do
    [ "$(cat /sys/class/net/$ours/carrier)" = 1 ] && break
    sleep 1
done
echo "carrier $(cat /sys/class/net/$ours/carrier)"
ping -c 1 -w 20 10.9.0.2 >/dev/null
ping -c 20 -i 0.1 10.9.0.2 | grep 'packets received'
mkdir -p /srv
dd if=/dev/urandom of=/srv/file bs=65536 count=256 2>/dev/null
$there httpd -p 80 -h /srv
httpd -p 80 -h /srv
echo "sent $(sha256sum </srv/file)"
echo "pulled $(wget -q -O - http://10.9.0.2/file | sha256sum)"
echo "pushed $($there wget -q -O - http://10.9.0.1/file | sha256sum)"
echo "errors $(cat /sys/class/net/$ours/statistics/rx_errors)"
ip link set $ours down
kill $peer
"#;

/// Gives the function to vfio-pci, once.
const TAKE: &str = r#"
device=$(ls -d /sys/bus/pci/devices/0000:01:00.0)
if [ "$(basename $(readlink $device/driver))" != vfio-pci ]; then
    echo vfio-pci >$device/driver_override
    [ -e $device/driver ] && echo 0000:01:00.0 >$device/driver/unbind
    echo 0000:01:00.0 >/sys/bus/pci/drivers_probe
fi
"#;

/// What a trial does with the machine.
type Step = Box<dyn FnOnce(&Machine) -> Result<(), Failed> + Send>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // All of it happens in one guest.
    arguments.test_threads = Some(1);
    let machine = Arc::new(Machine::default());
    let mut trials = Vec::new();
    let mut trial = |name: String, run: Step| {
        let machine = machine.clone();
        trials.push(Trial::test(name, move || run(&machine)));
    };
    for (name, expected) in [
        ("the_kernel_s_own_igb_driver_binds", "driver igb"),
        (
            "the_kernel_s_own_igb_driver_brings_the_link_up",
            "carrier 1",
        ),
        (
            "the_kernel_s_own_igb_driver_answers_every_ping",
            "20 packets transmitted, 20 packets received",
        ),
        (
            "the_kernel_s_own_igb_driver_counts_no_receive_error",
            "errors 0",
        ),
    ] {
        trial(
            name.into(),
            Box::new(move |machine| {
                let facts = machine.kernel_driver()?;
                if facts.contains(expected) {
                    Ok(())
                } else {
                    Err(format!("no `{expected}` in:\n{facts}").into())
                }
            }),
        );
    }
    trial(
        "the_kernel_s_own_igb_driver_moves_16_mib_unchanged_each_way".into(),
        Box::new(|machine| {
            let facts = machine.kernel_driver()?;
            let hash = |name: &str| facts.lines().find_map(|line| line.strip_prefix(name));
            match (hash("sent "), hash("pulled "), hash("pushed ")) {
                (Some(sent), Some(pulled), Some(pushed)) if sent == pulled && sent == pushed => {
                    Ok(())
                }
                _ => Err(format!("hashes differ:\n{facts}").into()),
            }
        }),
    );
    for case in CASES
        .iter()
        .filter(|case| matches!(case.needs, Needs::Loopback | Needs::Rss | Needs::KernelVfio))
    {
        trial(
            format!("vfio/{}", case.name),
            Box::new(|machine| machine.case(case.name)),
        );
    }
    trial(
        "no_access_left_the_mappings_and_the_kernel_logged_no_fault".into(),
        Box::new(Machine::end),
    );
    let table = match Table::read() {
        Ok(table) => table,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let cells = Arc::new(Cells::default());
    trials.extend(matrix(&table, &cells, &arguments));
    let conclusion = libtest_mimic::run(&arguments, trials);
    let results = &cells.results;
    print::keep(env!("CARGO_TARGET_TMPDIR"), &table, results, Tier::T3);
    conclusion.exit_code()
}

/// The matrix's cells, and what must be true after them.
fn matrix(table: &Table, cells: &Arc<Cells>, arguments: &Arguments) -> Vec<Trial> {
    let full = std::env::var_os("FAILSTOP_FULL").is_some();
    let chosen = |play: &Play| full || LANDING.contains(&&*play.title());
    let mut trials = Vec::new();
    let mut wanted = Vec::new();
    for play in plays(table, Tier::T3).into_iter().filter(chosen) {
        let (cells, play) = (cells.clone(), Arc::new(play));
        let name = format!("{PREFIX}{}", play.title());
        let this = play.clone();
        let trial = Trial::test(name, move || {
            this.end(cells.play(&this.title()), &cells.results)
        });
        if !arguments.is_filtered_out(&trial) {
            wanted.push(play);
        }
        trials.push(trial);
    }
    // Nobody else sets it.
    let _ = cells.wanted.set(wanted);
    let cells = cells.clone();
    trials.push(Trial::test(
        format!("{PREFIX}and_the_kernel_has_logged_no_bug"),
        move || cells.end(),
    ));
    trials
}

/// The guest in which the matrix is played, booted by the first cell and after each that took it
/// along, and what came of them.
#[derive(Default)]
struct Cells {
    machine: Mutex<Option<(Guest, Running)>>,
    /// What is played, in this order.
    wanted: OnceLock<Vec<Arc<Play>>>,
    /// What the guest has told of cells whose turn is still to come, by title.
    told: Mutex<BTreeMap<String, Result<String, NotSeen>>>,
    results: Mutex<Results>,
}

impl Cells {
    /// What came of a cell: played now, with those after it.
    fn play(&self, title: &str) -> Result<String, NotSeen> {
        let told = || self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let before = told().remove(title);
        if let Some(result) = before {
            return result;
        }
        let titles = self.together(title);
        let finished = self.run(&titles)?;
        let output = String::from_utf8_lossy(&finished.stdout);
        let mut told = told();
        for title in &titles {
            if let Some(result) = guest::told(&output, title) {
                told.insert(title.clone(), result);
            } else {
                // Here it ended; those behind it are played by another process.
                told.insert(title.clone(), Err(finished.text().into()));
                break;
            }
        }
        if let (false, Some(last)) = (finished.success(), titles.last()) {
            let ended = |result: &mut Result<_, _>| {
                if result.is_ok() {
                    *result = Err(finished.text().into());
                }
            };
            told.entry(last.clone()).and_modify(ended);
        }
        let result = told.remove(title);
        result.unwrap_or_else(|| Err("nobody played it".into()))
    }

    /// The titles of this cell and of those that the same process plays after it.
    fn together(&self, title: &str) -> Vec<String> {
        let wanted = self.wanted.get().map_or(&[][..], Vec::as_slice);
        let behind = wanted.iter().skip_while(|play| play.title() != title);
        let mut titles = Vec::new();
        for play in behind.take(TOGETHER) {
            titles.push(play.title());
            if play.leaves_calls() {
                break;
            }
        }
        titles
    }

    /// Has the guest play cells.
    fn run(&self, titles: &[String]) -> Result<Finished, NotSeen> {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        if machine.is_none() {
            *machine = Some(boot_for_cells()?);
        }
        let Some((guest, _)) = &*machine else {
            return Err("there is no guest".into());
        };
        let run = Run::shell(format!("{TAKE}\nfailstop-suite {PREFIX}"))
            .env("FAILSTOP_DEVICE", "0000:01:00.0")
            .env(CELLS, titles.join(" "))
            .timeout(STEP_LIMIT + CELL_LIMIT * titles.len() as u32);
        let finished = guest.run(&run).map_err(words);
        let hangs = finished
            .as_ref()
            .map_or(true, |finished| finished.exit.timed_out);
        if hangs {
            // Nobody knows what state it is in.
            *machine = None;
        }
        Ok(finished?)
    }

    fn end(&self) -> Result<(), Failed> {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((guest, _emulator)) = machine.take() else {
            return Ok(());
        };
        let log = guest.shut_down().map_err(words)?.kernel_log;
        let bugs = log.kernel_bugs();
        if bugs.is_empty() {
            Ok(())
        } else {
            Err(format!("{bugs:#?}").into())
        }
    }
}

fn boot_for_cells() -> Result<(Guest, Running), Failed> {
    let emulator = Emulator::on_threads(&Options::default())?;
    let control = emulator.control_path();
    let topology = topologies::find("vfio-user").map_err(words)?;
    let guest = Boot::new("small".parse().map_err(words)?, topology)
        .file(env!("CARGO_BIN_EXE_failstop-suite"))
        .map_err(words)?
        .env("RUST_BACKTRACE", "1")
        .env(CONTROL, CONTROL_PORT)
        .socket("emulated", emulator.socket_path())
        .qemu([
            "-chardev".to_owned(),
            format!("socket,id=emulator,path={}", control.display()),
            "-device".to_owned(),
            format!("virtserialport,bus=serial.0,chardev=emulator,name={CONTROL_PORT}"),
        ])
        .lifetime(CELLS_LIFETIME)
        .start(&Setup::ensure().map_err(words)?)
        .map_err(words)?;
    Ok((guest, emulator))
}

/// A guest, the emulator behind it and the directory of the wire between its two functions.
struct Parts {
    guest: Guest,
    emulator: Running,
    _wire: TempDir,
}

/// The machine that every trial shares; booted by the first of them.
#[derive(Default)]
struct Machine {
    parts: Mutex<Option<Parts>>,
    kernel_driver: OnceLock<Result<String, String>>,
}

impl Machine {
    fn with<T>(&self, act: impl FnOnce(&mut Parts) -> Result<T, Failed>) -> Result<T, Failed> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.is_none() {
            *parts = Some(boot()?);
        }
        parts
            .as_mut()
            .map_or_else(|| Err("there is no guest".into()), act)
    }

    /// Runs a command in the guest and returns what it printed.
    fn run(&self, run: &Run) -> Result<String, Failed> {
        let finished = self.with(|parts| parts.guest.run(run).map_err(words))?;
        if finished.success() {
            Ok(String::from_utf8_lossy(&finished.stdout).into_owned())
        } else {
            Err(finished.text().into())
        }
    }

    /// What the kernel's driver does with the function: found out once, judged by several trials.
    fn kernel_driver(&self) -> Result<String, Failed> {
        let facts = self.kernel_driver.get_or_init(|| {
            self.run(&Run::shell(KERNEL_DRIVER).timeout(STEP_LIMIT))
                .map_err(|failed| failed.message().unwrap_or("it failed").to_owned())
        });
        facts.clone().map_err(Failed::from)
    }

    /// Runs one case of the suite by the guest's kernel VFIO.
    fn case(&self, name: &str) -> Result<(), Failed> {
        let line = format!("{TAKE}\nfailstop-suite --exact {name}");
        let run = Run::shell(line)
            .env("FAILSTOP_DEVICE", "0000:01:00.0")
            .timeout(STEP_LIMIT);
        let output = self.run(&run)?;
        // A filter that matches nothing would pass too.
        if output.contains("1 passed") {
            Ok(())
        } else {
            Err(output.into())
        }
    }

    fn end(&self) -> Result<(), Failed> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut parts) = parts.take() else {
            return Err("no trial of this machine ran".into());
        };
        let stats = parts.emulator.stats()?;
        if stats.stray.total() != 0 || stats.device.rx_frames == 0 {
            return Err(format!("{stats:#?}").into());
        }
        let log = parts.guest.shut_down().map_err(words)?.kernel_log;
        let bad: Vec<_> = log
            .iommu_faults()
            .into_iter()
            .chain(log.kernel_bugs())
            .collect();
        if bad.is_empty() {
            Ok(())
        } else {
            Err(format!("{bad:#?}").into())
        }
    }
}

fn boot() -> Result<Parts, Failed> {
    let wire = tempfile::tempdir()?;
    let (ours, qemus) = (wire.path().join("emulator"), wire.path().join("qemu"));
    let options = Options {
        cable: Cable::Datagram {
            local: ours.clone(),
            remote: qemus.clone(),
        },
        ..Options::default()
    };
    let emulator = Emulator::on_threads(&options)?;
    let topology = topologies::find("vfio-user").map_err(words)?;
    let guest = Boot::new("small".parse().map_err(words)?, topology)
        .file(env!("CARGO_BIN_EXE_failstop-suite"))
        .map_err(words)?
        .env("RUST_BACKTRACE", "1")
        .socket("emulated", emulator.socket_path())
        .wire("kernel-nic", qemus, ours)
        .lifetime(LIFETIME)
        .start(&Setup::ensure().map_err(words)?)
        .map_err(words)?;
    Ok(Parts {
        guest,
        emulator,
        _wire: wire,
    })
}

fn words(error: impl std::fmt::Display) -> Failed {
    format!("{error:#}").into()
}
