//! Inputs that reach deep, made by hand: what the corpus begins with.
//!
//! They are files too (`corpus/TARGET/`), so that a fuzzer needs nothing but the folder;
//! `tests/corpus.rs` keeps both the same.

use std::os::unix::net::UnixStream;
use std::thread;

use failstop::igb::bits::Mdi;
use failstop::igb::descriptors::{RxDone, RxErrors, RxStatus, TxData, TxDone};
use failstop::igb::phy::CONTROL as PHY_CONTROL;
use failstop::igb::registers as reg;
use failstop::intel::bits::Control;
use failstop_emulator::emulator::DEFAULT_MAC;
use failstop_emulator::server::connection::Connection;
use failstop_emulator::server::handler::{Outcome, Service};
use failstop_emulator::server::wire::Wire;
use failstop_pci::transport::vfio_user::wire::{
    Capabilities, Command, DeviceInfo, DmaFlags, DmaMap, DmaUnmap, Flags, Header, IrqInfo, IrqSet,
    IrqSetFlags, MAJOR, MINOR, RegionAccess, RegionInfo, Version, encode, encode_version,
};
use failstop_scenario::TABLE;
use zerocopy::IntoBytes;

use crate::client;

/// A legacy transmit descriptor's DD (82574 datasheet, §7.2.10.1).
const LEGACY_SENT: u64 = 1 << 32;

/// A file of the corpus: its name, and what is in it.
pub type Seed = (String, Vec<u8>);

/// The seeds of a target, by its name; none for one that does not exist.
#[must_use]
pub fn of(target: &str) -> Vec<Seed> {
    match target {
        "capabilities" => capabilities(),
        "igb-rings" => rings(
            RxDone::new(RxStatus::DD | RxStatus::EOP, RxErrors::empty(), 60, 0).0,
            RxDone::new(RxStatus::DD | RxStatus::EOP, RxErrors::RXE, 60, 0).0,
            TxDone::DONE.0,
        ),
        "e1000e-rings" => rings(3 | 60 << 32, 3 | 1 << 31 | 60 << 32, LEGACY_SENT),
        "igb-device" => device(3 | 60 << 32, TxDone::DONE.0),
        "e1000e-device" => device(3 | 60 << 32, LEGACY_SENT),
        "vfio-user-client" => client_sessions(),
        "emulator" => emulator_sessions(),
        "pcap" => captures(),
        "scenario" => scenarios(),
        "names" => names(),
        "command-line" => command_lines(),
        _ => Vec::new(),
    }
}

fn seed(name: &str, bytes: impl Into<Vec<u8>>) -> Seed {
    (name.to_owned(), bytes.into())
}

/// A real 82576's lists, as a public `lspci -xxxx` shows them: offset, bytes.
const REAL_82576: [(usize, &[u8]); 17] = [
    (0x00, &[0x86, 0x80, 0xc9, 0x10, 0x07, 0x04, 0x10, 0x00]),
    (0x34, &[0x40]),
    (0x40, &[0x01, 0x50, 0x23, 0xc8, 0x00, 0x20, 0x00, 0x1a]),
    (0x50, &[0x05, 0x70, 0x80, 0x01]),
    (0x70, &[0x11, 0xa0, 0x09, 0x80, 0x03, 0, 0, 0, 0x03, 0x20]),
    (0xa0, &[0x10, 0x00, 0x02, 0x00, 0xc2, 0x8c, 0x00, 0x10]),
    (0xa8, &[0x30, 0x28, 0x19, 0x00, 0x41, 0x6c, 0x03, 0x00]),
    (0xb0, &[0x42, 0x00, 0x41, 0x10]),
    (0xc4, &[0x1f]),
    (0x100, &[0x01, 0x00, 0x01, 0x14]),
    (0x10c, &[0x11, 0x20, 0x06, 0x00]),
    (0x140, &[0x03, 0x00, 0x01, 0x15, 0xe0, 0x46]),
    (0x150, &[0x0e, 0x00, 0x01, 0x16, 0x00, 0x01]),
    (0x160, &[0x10, 0x00, 0x01, 0x00]),
    (0x168, &[0x09, 0, 0, 0, 0x08, 0, 0x08, 0]),
    (0x170, &[0x01, 0, 0, 0, 0x80, 0x01, 0x02, 0]),
    (0x178, &[0, 0, 0xca, 0x10, 0x53, 0x05]),
];

fn capabilities() -> Vec<Seed> {
    let mut real = vec![0; 0x1a0];
    for (at, bytes) in REAL_82576 {
        real[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let change = |at: usize, bytes: &[u8]| {
        let mut space = real.clone();
        space[at..at + bytes.len()].copy_from_slice(bytes);
        space
    };
    vec![
        seed("82576", real.clone()),
        seed("standard-only", change(0xa0, &[0x09, 0x00, 0x20])),
        seed("cyclic", change(0xa1, &[0x40])),
        seed("cut-off", change(0xa1, &[0xfc])),
        seed("extended-cyclic", change(0x162, &[0x01, 0x10])),
        seed(
            "ats",
            change(0x160, &[0x0f, 0x00, 0x01, 0x00, 0, 0, 0, 0x80]),
        ),
        seed("gone", vec![0xff; 256]),
    ]
}

/// A command of a byte, and what it takes.
fn command(into: &mut Vec<u8>, number: u8, what: &[&[u8]]) {
    into.push(number);
    what.iter().for_each(|part| into.extend_from_slice(part));
}

fn rings(received: u64, in_error: u64, sent: u64) -> Vec<Seed> {
    let write = |into: &mut Vec<u8>, at: u8, word: u64| {
        command(into, 0, &[&[at], &word.to_le_bytes()]);
    };
    let burst = |into: &mut Vec<u8>, count: u8, len: u16| {
        command(into, 5, &[&[count], &len.to_le_bytes()]);
    };
    let mut rx = vec![0];
    for round in 0..3 {
        (0..8).for_each(|at| write(&mut rx, round * 8 + at, received));
        burst(&mut rx, 8, 0);
    }
    write(&mut rx, 8, in_error);
    burst(&mut rx, 8, 0);
    rx.push(9);
    rx.push(9);
    let mut tx = vec![1];
    for round in 0..3 {
        burst(&mut tx, 8, 60);
        write(&mut tx, round * 8 + 7, sent);
        tx.push(7);
    }
    let (mut long, mut gap) = (vec![0], vec![0]);
    write(&mut long, 0, received | 0xffff << 32);
    burst(&mut long, 4, 0);
    write(&mut gap, 0, received);
    write(&mut gap, 15, received);
    burst(&mut gap, 4, 0);
    let mut ones = vec![0];
    write(&mut ones, 0, u64::MAX);
    burst(&mut ones, 4, 0);
    vec![
        seed("receives", rx),
        seed("sends", tx),
        seed("long", long),
        seed("gap", gap),
        seed("ones", ones),
    ]
}

fn device(received: u64, sent: u64) -> Vec<Seed> {
    let write = |into: &mut Vec<u8>, ring: u8, at: u8, word: u64| {
        command(into, ring * 3, &[&[at], &word.to_le_bytes()]);
    };
    let (rx, tx) = ([4, 0, 0], [4, 121, 0]);
    let traffic = |into: &mut Vec<u8>| {
        for round in 0..3 {
            (0..4).for_each(|at| write(into, 0, round * 4 + at, received));
            command(into, 5, &[&rx]);
            command(into, 5, &[&tx]);
            write(into, 1, round * 4 + 3, sent);
        }
    };
    let mut moves = vec![0];
    traffic(&mut moves);
    let mut recovers = moves.clone();
    recovers.extend([8, 9, 10]);
    traffic(&mut recovers);
    recovers.extend([12, 11]);
    let mut gone = moves.clone();
    gone.extend([13, 8, 1, 8, 9, 9]);
    let mut lies = vec![0];
    write(&mut lies, 0, 0, received | 0xffff << 32);
    command(&mut lies, 5, &[&rx]);
    lies.push(9);
    let mut bent = vec![2];
    for (register, value) in [(0x0008u32, 0u32), (0x5400, u32::MAX)] {
        bent.extend(((register / 4) as u16).to_le_bytes());
        bent.extend(value.to_le_bytes());
    }
    traffic(&mut bent);
    vec![
        seed("moves", moves),
        seed("recovers", recovers),
        seed("gone", gone),
        seed("lies", lies),
        seed("bent", bent),
    ]
}

/// What our emulator answers to our client.
fn client_sessions() -> Vec<Seed> {
    let answers = record().unwrap_or_default();
    let with = |options: u8| [&[options][..], &answers].concat();
    let mut refused = with(0);
    // The first answer, to the version, is an error.
    if let Some(flags) = refused.get_mut(1 + 8) {
        *flags |= Flags::ERROR.bits() as u8;
    }
    vec![
        seed("session", with(0)),
        seed("no-files", with(client::NO_FILES)),
        seed("refused", refused),
    ]
}

/// Runs a whole session of [`client::connect`] with the emulator, and keeps what the emulator says.
fn record() -> Option<Vec<u8>> {
    let (ours, theirs) = UnixStream::pair().ok()?;
    let driver = thread::spawn(move || client::connect(ours.into()));
    let mut service = Service::new(DEFAULT_MAC, Wire::none()).ok()?;
    let mut connection = Connection::new(theirs).ok()?;
    service.attach();
    let mut said = Vec::new();
    while connection.fill().is_ok() {
        while let Ok(Some(message)) = connection.next_message() {
            if let Outcome::Reply(bytes, fd) = service.handle(message) {
                said.extend_from_slice(&bytes);
                // The client ends the session, not we.
                let _ = connection.send(bytes, fd);
            }
        }
        thread::yield_now();
    }
    let _ = driver.join();
    Some(said)
}

/// A client's messages, one after the other.
#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    id: u16,
}

impl Stream {
    fn say(&mut self, command: Command, body: &[u8], data: &[u8]) {
        self.id += 1;
        let header = Header::command(self.id, command, Flags::empty(), body.len() + data.len());
        self.bytes.extend(encode(&header, body, data));
    }

    fn version(&mut self) {
        let capabilities = Capabilities {
            max_msg_fds: 8,
            max_data_xfer_size: 1 << 20,
            max_dma_maps: 65_535,
            pgsizes: 4096,
        };
        let version = Version {
            major: MAJOR,
            minor: MINOR,
        };
        self.say(
            Command::Version,
            &encode_version(version, &capabilities),
            &[],
        );
    }

    fn describe(&mut self) {
        let info = DeviceInfo {
            argsz: 16,
            flags: 0,
            num_regions: 0,
            num_irqs: 0,
        };
        self.say(Command::DeviceGetInfo, info.as_bytes(), &[]);
        for index in 0..9 {
            let info = RegionInfo {
                argsz: 256,
                flags: 0,
                index,
                cap_offset: 0,
                size: 0,
                offset: 0,
            };
            self.say(Command::DeviceGetRegionInfo, info.as_bytes(), &[]);
        }
        for index in 0..5 {
            let info = IrqInfo {
                argsz: 16,
                flags: 0,
                index,
                count: 0,
            };
            self.say(Command::DeviceGetIrqInfo, info.as_bytes(), &[]);
        }
    }

    fn interrupts(&mut self, index: u32, count: u32) {
        let set = IrqSet {
            argsz: 20,
            flags: (IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER).bits(),
            index,
            start: 0,
            count,
        };
        self.say(Command::DeviceSetIrqs, set.as_bytes(), &[]);
    }

    fn map(&mut self, address: u64, size: u64) {
        let map = DmaMap {
            argsz: 32,
            flags: (DmaFlags::READ | DmaFlags::WRITE).bits(),
            offset: 0,
            address,
            size,
        };
        self.say(Command::DmaMap, map.as_bytes(), &[]);
    }

    fn unmap(&mut self, address: u64, size: u64) {
        let unmap = DmaUnmap {
            argsz: 24,
            flags: 0,
            address,
            size,
        };
        self.say(Command::DmaUnmap, unmap.as_bytes(), &[]);
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let access = RegionAccess {
            offset,
            region,
            count: data.len() as u32,
        };
        self.say(Command::RegionWrite, access.as_bytes(), data);
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) {
        let access = RegionAccess {
            offset,
            region,
            count,
        };
        self.say(Command::RegionRead, access.as_bytes(), &[]);
    }

    fn set(&mut self, register: u32, value: u32) {
        self.write(0, register.into(), &value.to_le_bytes());
    }
}

/// Where the client's memory is.
const MEMORY: u64 = 0x10_0000;
/// Bytes of it.
const BYTES: u64 = 0x1_0000;
/// Configuration space.
const CONFIG: u32 = 7;

/// A driver's bring-up, in PHY loopback, over memory that holds nothing but descriptors of 60 bytes.
fn traffic(stream: &mut Stream) {
    stream.version();
    stream.map(MEMORY, BYTES);
    stream.write(CONFIG, 4, &[6, 0]);
    stream.set(reg::MDIC.offset(), Mdi::write(PHY_CONTROL, 0x4140).bits());
    let forced =
        Control::SLU | Control::FRCSPD | Control::FRCDPLX | Control::SPEED_1000 | Control::FD;
    stream.set(reg::CTRL.offset(), forced.bits());
    for (base, high, len) in [
        (
            reg::RDBAL.offset(),
            reg::RDBAH.offset(),
            reg::RDLEN.offset(),
        ),
        (
            reg::TDBAL.offset(),
            reg::TDBAH.offset(),
            reg::TDLEN.offset(),
        ),
    ] {
        stream.set(base, MEMORY as u32);
        stream.set(high, 0);
        stream.set(len, 32 * 16);
    }
    // One buffer of 2 KiB (SRRCTL, §8.10.2), ENABLE (bit 25), RXEN and promiscuous, TXEN and PSP.
    stream.set(reg::SRRCTL.offset(), 0x0200_0002);
    stream.set(reg::RXDCTL.offset(), 1 << 25);
    stream.set(reg::TXDCTL.offset(), 1 << 25);
    stream.set(reg::RCTL.offset(), 1 << 1 | 1 << 3 | 1 << 26);
    stream.set(reg::TCTL.offset(), 1 << 1 | 1 << 3);
    stream.set(reg::RDT.offset(), 31);
    stream.set(reg::TDT.offset(), 8);
    stream.read(0, reg::RDH.offset().into(), 4);
    stream.read(0, reg::TDH.offset().into(), 4);
    stream.set(reg::TDT.offset(), 16);
}

fn emulator_sessions() -> Vec<Seed> {
    let descriptor = TxData::whole(MEMORY + 0x1000, 60, true).words();
    let mut pattern = Vec::new();
    for _ in 0..2 {
        descriptor
            .iter()
            .for_each(|word| pattern.extend(word.to_le_bytes()));
    }
    let input = |options: u8, fault: u8, stream: &Stream| {
        [&[options, fault][..], &pattern, &stream.bytes].concat()
    };
    let mut whole = Stream::default();
    traffic(&mut whole);
    let mut describes = Stream::default();
    describes.version();
    describes.describe();
    describes.interrupts(2, 3);
    describes.interrupts(3, 1);
    describes.interrupts(4, 1);
    describes.read(CONFIG, 0, 64);
    describes.read(CONFIG, 0x100, 64);
    describes.read(1, 0, 256);
    describes.read(3, 0, 16);
    describes.say(Command::DeviceReset, &[], &[]);
    let mut after = Stream::default();
    traffic(&mut after);
    after.unmap(MEMORY, BYTES);
    after.set(reg::TDT.offset(), 24);
    after.map(MEMORY, BYTES / 2);
    after.set(reg::RXDCTL.offset(), 0);
    after.set(reg::TXDCTL.offset(), 0);
    after.set(reg::CTRL.offset(), Control::RST.bits());
    after.write(CONFIG, 4, &[2, 0]);
    after.say(Command::DeviceReset, &[], &[]);
    let mut seeds = vec![
        seed("traffic", input(0, 0, &whole)),
        seed("traffic-by-calls", input(2, 0, &whole)),
        seed("describes", input(0, 0, &describes)),
        seed("unmapped-under-it", input(0, 0, &after)),
    ];
    for (number, entry) in (1..).zip(TABLE) {
        let name = format!("fault-{}", entry.name);
        seeds.push((name, input(0, number, &after)));
    }
    seeds
}

/// The header of a capture of Ethernet frames, of microseconds (the format's documentation of libpcap).
const PCAP: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, 1];

fn captures() -> Vec<Seed> {
    let mut little = PCAP.as_bytes().to_vec();
    for len in [60u32, 1514, 60] {
        let packet = [1, 2, len, len];
        little.extend_from_slice(packet.as_bytes());
        little.resize(little.len() + len as usize, 0x5a);
    }
    let mut cut = little.clone();
    cut.truncate(cut.len() - 7);
    let mut long = PCAP.as_bytes().to_vec();
    long.extend_from_slice([1, 2, u32::MAX, u32::MAX].as_bytes());
    let big: Vec<u8> = [0xa1b2_3c4du32, 0x0002_0004, 0, 0, 65_535, 1, 1, 2, 4, 4, 0]
        .iter()
        .flat_map(|word| word.to_be_bytes())
        .collect();
    vec![
        seed("frames", little),
        seed("cut", cut),
        seed("long", long),
        seed("big-endian-nanoseconds", big),
    ]
}

fn scenarios() -> Vec<Seed> {
    let scripted = "\
failstop scenario 1
on scripted server
seed 17
create 0 pd
create 0 mr
create 0 cq
create 0 rq
create 0 sq
post 0 4
poll 0 8
reap 0
device receives 0 3
device sends 0 2
device writes
device writes-everywhere
device lies 0 1 0xffff000000000003
script stop rx 0 busy 3
script stop tx 1 never
script start rx
script bring-up
script reads-as-master
script reset fails EIO
script software no-answer
script config all-ones 12
host map-fails 1 ENOMEM
host unmap partial
heal
break-and-hold
recover
try-destroy 0 sq
destroy 0 rq
close
";
    let mut emulated = String::from("failstop scenario 1\non emulated 82576\nopen\nport\n");
    for entry in TABLE {
        let arguments = ["", ":1", ":100"];
        let spec = arguments.iter().map(|text| format!("{}{text}", entry.name));
        let mut known = spec.filter(|text| text.parse::<failstop_scenario::Spec>().is_ok());
        if let Some(text) = known.next() {
            emulated += &format!("fault {text} @ bme-on+destroy=2 # {}\n", entry.text);
        }
    }
    emulated += "send 100\nreceive 100\nwait 20\nbreak\nrecover\nclear-faults\nclose\nexpect revoked recovered 0\n";
    vec![
        seed("scripted", scripted),
        seed("emulated", emulated),
        seed(
            "device",
            "failstop scenario 1\non device 0000:01:00.0\nopen\nexpect refused 3\n",
        ),
        seed(
            "step",
            "fault server-error:EIO:unmap:once @ random=17/3+frames=100",
        ),
    ]
}

fn names() -> Vec<Seed> {
    let texts = [
        "0000:01:00.0",
        "ffff:ff:1f.7",
        "vfio-user:/run/nic.sock",
        "auto",
        "container",
        "server-error:EIO:unmap:once@random=17/3+frames=100",
        "rxq-stuck:quiet:rst@destroy=2",
        "bme-on+bme-off+reset=3",
        "ENOMEM",
        "12",
    ];
    let numbered = texts.iter().enumerate();
    numbered
        .map(|(number, text)| seed(&format!("{number:02}"), *text))
        .collect()
}

fn command_lines() -> Vec<Seed> {
    let run = [
        "failstop",
        "run",
        "emu:82576,fault=rxq-stuck@100,fault=gone:5",
    ];
    let options = ["--seconds", "0.5", "--break-after", "0.1", "--size", "1514"];
    vec![
        seed("run", [&run[..], &options, &["--json"]].concat().join("\n")),
        seed("list", "failstop\nlist\n--all"),
        seed("info", "failstop\ninfo\n0000:01:00.0\n--registers"),
        seed("bind", "failstop\nbind\n0000:01:00.0"),
        seed("help", "failstop\nhelp\nrun"),
        seed(
            "emulator",
            "failstop-emulator\n--socket\n/run/nic\n--control\n/run/control\n--mac\n02:00:00:00:00:01\n\
             --wire\ndgram:/run/a:/run/b\n--fault\nlie@destroy",
        ),
    ]
}
