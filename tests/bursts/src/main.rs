//! Our side of `cargo xtask bench --only bursts`: bursts between two ports of this machine, each between two readings of the
//! time-stamp counter, in a guest where that counts instructions. The other side, with the same frames, the same waits and
//! the same lines on standard output, is `tests/peers/dpdk_burst.c`.
//!
//! ```text
//! failstop-bursts DEVICE PEER ROUNDS
//! ```
//!
//! | a line | says |
//! | --- | --- |
//! | `clock BETWEEN LOOP` | ticks of nothing between two readings, and of a million turns of two instructions |
//! | `ticks PATH BURST TICKS:TIMES ...` | how often a whole burst took so many ticks, nothing subtracted |
//!
//! A burst is what an application calls: [`Port::rx_burst`], [`Port::tx_burst`], one after the other to forward. The device is
//! waited for outside of it, and a burst that is not whole does not count.

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use failstop::device::Device;
use failstop::dma::frame::Frame;
use failstop::open;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;

mod clock;

use clock::timed;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Frames of a burst.
const BURSTS: [usize; 4] = [1, 8, 32, 64];
const MOST: usize = 64;
/// Polls that find nothing.
const EMPTY: u32 = 4096;
/// Bursts of [`MOST`] before anything is counted: the rings are gone round twice.
const WARM_UP: u32 = 16;
/// Bytes of a frame, without its check sequence.
const BYTES: usize = 60;
/// How long frames may be under way. It costs no time where time is counted in instructions.
const WAIT: Duration = Duration::from_micros(100);
const PATIENCE: Duration = Duration::from_secs(10);
/// Waits until a burst is given up.
const TRIES: u32 = 1000;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let result = match &words[..] {
        [device, peer, rounds] => run(device, peer, rounds),
        _ => Err("say DEVICE PEER ROUNDS".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failstop-bursts: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(device: &str, peer: &str, rounds: &str) -> Outcome {
    let rounds = rounds.parse()?;
    let [sent, swapped] = [(1, 2), (2, 1)].map(|(to, from)| frame(to, from));
    let (near, far) = (open(device)?, open(peer)?);
    for device in [&near, &far] {
        if !device.wait_link(PATIENCE).up {
            return Err("the link does not come up".into());
        }
    }
    println!("clock {} {}", clock::between(), clock::million_turns());
    let mut pair = Pair {
        near: End::open(&near)?,
        far: End::open(&far)?,
    };
    pair.poll();
    for _ in 0..WARM_UP {
        pair.pass(MOST, forward, &sent)?;
    }
    for burst in BURSTS {
        pair.send_and_receive(burst, rounds, &sent)?;
        pair.forward("io", burst, rounds, forward, &sent)?;
        pair.forward("macswap", burst, rounds, forward_swapped, &swapped)?;
    }
    drop(pair);
    for device in [near, far] {
        if let Some(cause) = device.close().broken {
            return Err(format!("the device broke: {cause}").into());
        }
    }
    Ok(())
}

fn open(name: &str) -> Outcome<Device> {
    let transport = open::transport(&name.parse()?, Default::default(), &[])?;
    let config = Config {
        promiscuous: true,
        ..Config::default()
    };
    Ok(Device::open(transport, &config)?)
}

/// What is sent from one of two stations to the other: of a local experiment's type (IEEE Std 802).
fn frame(to: u8, from: u8) -> [u8; BYTES] {
    let mut frame = [0; BYTES];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, to]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, from]);
    frame[12..14].copy_from_slice(&[0x88, 0xB5]);
    frame
}

/// A port, and frames to exchange with it.
struct End {
    port: Port,
    frames: Vec<Frame>,
}

impl End {
    fn open(device: &Device) -> Outcome<Self> {
        let mut port = Port::open(device, &PortConfig::default())?;
        let frames = port.take_frames(MOST).ok_or("no frames")?;
        Ok(Self { port, frames })
    }

    /// Sends a burst of frames that are like this one; its ticks.
    fn send(&mut self, burst: usize, bytes: &[u8; BYTES]) -> Outcome<u64> {
        let frames = &mut self.frames[..burst];
        for frame in frames.iter_mut() {
            frame.fill(bytes)?;
        }
        let (ticks, sent) = send(&mut self.port, frames);
        if sent < burst {
            return Err(format!("{sent} of {burst} frames were sent").into());
        }
        Ok(ticks)
    }

    /// Takes a burst by `take`, in pieces if it comes in pieces; the ticks, if it was whole. What is taken in must be like
    /// `expected`.
    fn take(
        &mut self,
        burst: usize,
        take: Take,
        expected: Option<&[u8; BYTES]>,
    ) -> Outcome<Option<u64>> {
        let mut taken = 0;
        for _ in 0..TRIES {
            thread::sleep(WAIT);
            let (ticks, found) = take(&mut self.port, &mut self.frames[..burst - taken]);
            if let Some(expected) = expected {
                self.frames[..found]
                    .iter()
                    .try_for_each(|frame| like(frame, expected))?;
            }
            if found == burst {
                return Ok(Some(ticks));
            }
            taken += found;
            if taken == burst {
                return Ok(None);
            }
        }
        Err(format!("{taken} of {burst} frames came").into())
    }
}

fn like(frame: &Frame, expected: &[u8; BYTES]) -> Outcome {
    let mut bytes = [0; BYTES];
    frame.copy_to(&mut bytes);
    if frame.len() as usize != BYTES || bytes != *expected {
        return Err(format!("another frame came than was sent: {bytes:02x?}").into());
    }
    Ok(())
}

/// Takes what is there, and does something with it; ticks, and how many frames.
type Take = fn(&mut Port, &mut [Frame]) -> (u64, usize);

#[inline(never)]
fn send(port: &mut Port, frames: &mut [Frame]) -> (u64, usize) {
    timed(|| port.tx_burst(frames))
}

#[inline(never)]
fn receive(port: &mut Port, frames: &mut [Frame]) -> (u64, usize) {
    timed(|| port.rx_burst(frames))
}

#[inline(never)]
fn forward(port: &mut Port, frames: &mut [Frame]) -> (u64, usize) {
    timed(|| {
        let received = port.rx_burst(frames);
        port.tx_burst(&mut frames[..received])
    })
}

#[inline(never)]
fn forward_swapped(port: &mut Port, frames: &mut [Frame]) -> (u64, usize) {
    timed(|| {
        let received = port.rx_burst(frames);
        let frames = &mut frames[..received];
        swap_addresses(frames);
        port.tx_burst(frames)
    })
}

/// Exchanges each frame's destination and source, 6 bytes each, up to a frame that has none: which is not received.
#[inline(always)]
fn swap_addresses(frames: &mut [Frame]) {
    for frame in frames {
        let Some(mut head) = frame.head::<12>() else {
            return;
        };
        let (a, b, c) = (head.word::<0>(), head.word::<4>(), head.word::<8>());
        head.set_word::<0>(b >> 16 | c << 16);
        head.set_word::<4>(c >> 16 | a << 16);
        head.set_word::<8>(a >> 16 | b << 16);
    }
}

/// Two ports, each other's peers.
struct Pair {
    near: End,
    far: End,
}

impl Pair {
    fn poll(&mut self) {
        let mut ticks = Ticks::default();
        for _ in 0..EMPTY {
            let (took, found) = receive(&mut self.far.port, &mut self.far.frames[..32]);
            if found == 0 {
                ticks.add(took);
            }
        }
        ticks.print("empty", 1);
    }

    fn send_and_receive(&mut self, burst: usize, rounds: u32, bytes: &[u8; BYTES]) -> Outcome {
        let (mut sent, mut received) = (Ticks::default(), Ticks::default());
        for _ in 0..rounds {
            sent.add(self.near.send(burst, bytes)?);
            received.extend(self.far.take(burst, receive, Some(bytes))?);
        }
        sent.print("tx", burst);
        received.print("rx", burst);
        Ok(())
    }

    fn forward(
        &mut self,
        path: &str,
        burst: usize,
        rounds: u32,
        by: Take,
        back: &[u8; BYTES],
    ) -> Outcome {
        let mut ticks = Ticks::default();
        for _ in 0..rounds {
            ticks.extend(self.pass(burst, by, back)?);
        }
        ticks.print(path, burst);
        Ok(())
    }

    /// Sends a burst, which comes back as `back`; the far end's ticks, if it was whole.
    fn pass(&mut self, burst: usize, by: Take, back: &[u8; BYTES]) -> Outcome<Option<u64>> {
        self.near.send(burst, &frame(1, 2))?;
        let ticks = self.far.take(burst, by, None)?;
        self.near.take(burst, receive, Some(back))?;
        Ok(ticks)
    }
}

/// How often something took so many ticks.
#[derive(Default)]
struct Ticks(BTreeMap<u64, u32>);

impl Ticks {
    fn add(&mut self, ticks: u64) {
        *self.0.entry(ticks).or_default() += 1;
    }

    fn extend(&mut self, ticks: Option<u64>) {
        ticks.into_iter().for_each(|ticks| self.add(ticks));
    }

    fn print(&self, path: &str, burst: usize) {
        print!("ticks {path} {burst}");
        for (ticks, times) in &self.0 {
            print!(" {ticks}:{times}");
        }
        println!();
    }
}
