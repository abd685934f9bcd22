//! The emulator as a process, and our own driver on two of its ports.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::name::DeviceName;
use failstop::open::{self, IommuChoice};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop_emulator::control::Client;
use failstop_emulator::{Cable, Emulator, Options, Running};
use failstop_pci::transport::Transport;

const PROGRAM: &str = env!("CARGO_BIN_EXE_failstop-emulator");

fn process(options: &Options) -> Running {
    Emulator::in_process(Path::new(PROGRAM), &[], options).unwrap()
}

fn transport(path: &Path) -> Arc<dyn Transport> {
    let name = DeviceName::VfioUser(path.to_owned());
    open::transport(&name, IommuChoice::default(), &[]).unwrap()
}

fn open(path: &Path, loopback: bool) -> Device {
    let config = Config {
        loopback,
        promiscuous: true,
        ..Config::default()
    };
    Device::open(transport(path), &config).unwrap()
}

/// Sends `bytes` `count` times, and counts what arrives at the other port until it is as many.
fn pass(from: &mut Port, to: &mut Port, bytes: &[u8], count: usize) -> usize {
    let mut empty = to.take_frames(32).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let (mut sent, mut received) = (0, 0);
    while received < count && Instant::now() < end {
        // No more under way than have a descriptor that waits for them, however slow this thread is.
        if sent < count && sent - received < 128 {
            let mut frame = from.take_frame().unwrap();
            frame.fill(bytes).unwrap();
            sent += from.tx_burst(std::slice::from_mut(&mut frame));
        }
        received += to.rx_burst(&mut empty);
    }
    received
}

#[test]
fn a_process_serves_at_once_and_its_directory_goes_with_it() {
    let emulator = process(&Options::default());
    let directory = emulator.socket_path().parent().unwrap().to_owned();
    let device = open(&emulator.socket_path(), true);
    assert_eq!(device.close().left, []);
    emulator.stop();
    assert!(!directory.exists());
}

#[test]
fn faults_reach_a_process_from_its_start() {
    let options = Options {
        faults: vec![
            "server-slow:1".parse().unwrap(),
            "gone@1000000".parse().unwrap(),
        ],
        mac: Some([2, 0, 0, 0, 0, 9]),
        ..Options::default()
    };
    let emulator = process(&options);
    assert_eq!(
        open(&emulator.socket_path(), true).mac().0,
        [2, 0, 0, 0, 0, 9]
    );
}

#[test]
fn server_dies_ends_the_process() {
    let mut emulator = process(&Options::default());
    emulator.fault("server-dies").unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while emulator.stats().is_ok() && Instant::now() < end {}
    assert!(emulator.stats().is_err());
}

/// As a tool starts it: with sockets that it inherits, in a folder that it removes.
fn inheriting(folder: &Path, socket: UnixListener, control: UnixListener) -> Child {
    Command::new(PROGRAM)
        .args(["--inherited", "--remove"])
        .arg(folder)
        .stdin(Stdio::from(OwnedFd::from(socket)))
        .stdout(Stdio::from(OwnedFd::from(control)))
        .spawn()
        .unwrap()
}

#[test]
fn a_process_ends_when_its_leash_is_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let bind = |name| UnixListener::bind(directory.path().join(name)).unwrap();
    let (socket, control) = (bind("port0"), bind("control"));
    let mut child = inheriting(directory.path(), socket, control);
    let mut client = Client::connect(&directory.path().join("control")).unwrap();
    client.request("leash").unwrap();
    drop(client);
    assert!(child.wait().unwrap().success());
    assert!(!directory.path().exists());
}

/// Who took the leash and died at once reads no answer: writing it fails.
#[test]
fn a_process_ends_when_who_took_its_leash_is_gone_before_the_answer() {
    let directory = tempfile::tempdir().unwrap();
    let bind = |name| UnixListener::bind(directory.path().join(name)).unwrap();
    let (socket, control) = (bind("port0"), bind("control"));
    // Queued before anybody listens, and closed.
    let mut client = UnixStream::connect(directory.path().join("control")).unwrap();
    client.write_all(b"leash\n").unwrap();
    drop(client);
    let mut child = inheriting(directory.path(), socket, control);
    assert!(child.wait().unwrap().success());
    assert!(!directory.path().exists());
}

#[test]
fn nonsense_on_the_command_line_is_usage() {
    let status = Command::new(PROGRAM)
        .args(["--socket", "/nonexistent", "--mac", "nonsense"])
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn two_ports_that_send_to_each_other_do_not_deadlock() {
    let options = Options {
        cable: Cable::Pair,
        ..Options::default()
    };
    let mut emulator = process(&options);
    let (left, right) = (
        open(&emulator.socket_path(), false),
        open(&emulator.second_socket_path(), false),
    );
    assert!(left.wait_link(Duration::from_secs(5)).up);
    assert!(right.wait_link(Duration::from_secs(5)).up);
    let sizes = PortConfig::default();
    let (mut a, mut b) = (
        Port::open(&left, &sizes).unwrap(),
        Port::open(&right, &sizes).unwrap(),
    );
    let frame = [0x02; 60];
    assert_eq!(pass(&mut a, &mut b, &frame, 2000), 2000);
    assert_eq!(pass(&mut b, &mut a, &frame, 2000), 2000);
    drop((a, b));
    assert_eq!(left.close().left, []);
    assert_eq!(right.close().left, []);
    let (first, second) = (emulator.stats().unwrap(), emulator.second_stats().unwrap());
    assert_eq!((first.stray.total(), second.stray.total()), (0, 0));
}

#[test]
fn without_a_control_socket_it_serves_until_it_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nic");
    let mut child = Command::new(PROGRAM)
        .arg("--socket")
        .arg(&socket)
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !socket.exists() && Instant::now() < end {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(200));
    let ended = child.try_wait().unwrap();
    let opened = ended.is_none().then(|| open(&socket, true).close());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ended.is_none(), "it ended by itself: {ended:?}");
    assert_eq!(opened.unwrap().left, []);
}
