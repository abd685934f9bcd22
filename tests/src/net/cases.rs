//! The cases: ours in loopback, and four against the kernel.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use failstop::dma::region::Pool;
use failstop::ladder::Word;
use failstop::objects::QueueInit;
use failstop::port::{Port, PortConfig};
use failstop::queues::lifecycle::Cause;
use failstop::smoltcp::{PortDevice, STANDARD_FRAME};
use libtest_mimic::Failed;
use sha2::{Digest, Sha256};
use smoltcp::iface::SocketHandle;
use smoltcp::phy::{Device, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;

use super::frames::{self, Capture};
use super::kernel_nic::{KernelNic, run};
use super::stack::{self, Stack};
use super::{KERNEL_ADDRESS, OUR_ADDRESS};
use crate::fixture::{Fixture, Outcome, close_clean, ensure, ensure_eq, self_addressed};

/// Bytes of a stream in each direction.
const STREAM: usize = 16 << 20;
/// Where everybody on the wire hears it.
const BROADCAST: &str = "192.0.2.255:9";
/// The port on which our side listens.
const TCP_PORT: u16 = 7000;
/// Bytes that our side's socket holds in each direction: fewer frames than a ring has descriptors,
/// so that the window keeps the kernel from sending what the ring cannot take.
const WINDOW: usize = 256 << 10;
/// How long traffic may take, in a guest without hardware virtualization.
const LIMIT: Duration = Duration::from_secs(100);
/// How long the kernel's end waits for progress.
const STALLED: Duration = Duration::from_secs(20);

pub(crate) fn what_a_stack_queues_goes_out_in_order_and_comes_back(fixture: &Fixture) -> Outcome {
    // More than one batch, so that some go out by themselves and the rest when the stack listens.
    const FRAMES: u8 = 40;
    let device = fixture.open()?;
    let mut phy = PortDevice::new(Port::open(&device, &PortConfig::default())?, STANDARD_FRAME)?;
    for seed in 0..FRAMES {
        let bytes = self_addressed(&device, 60, seed);
        let token = phy.transmit(Instant::ZERO).ok_or("no room to send")?;
        token.consume(bytes.len(), |buffer| buffer.copy_from_slice(&bytes));
    }
    for seed in 0..FRAMES {
        phy.wait(Some(smoltcp::time::Duration::from_secs(5)))?;
        let (token, _) = phy.receive(Instant::ZERO).ok_or("no frame came")?;
        let bytes = token.consume(<[u8]>::to_vec);
        ensure_eq(bytes, self_addressed(&device, 60, seed), "the frame")?;
    }
    ensure_eq(phy.refused(), 0, "frames refused")?;
    drop(phy);
    close_clean(device).map(drop)
}

pub(crate) fn a_stack_needs_spare_frames(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let config = PortConfig {
        spare_frames: 0,
        ..PortConfig::default()
    };
    let port = Port::open(&device, &config)?;
    let refused = PortDevice::new(port, STANDARD_FRAME)
        .err()
        .ok_or("a stack on too few frames")?;
    ensure(refused.to_string().contains("spare_frames"), || {
        refused.to_string()
    })?;
    close_clean(device).map(drop)
}

pub(crate) fn ping_gets_100_answers(fixture: &Fixture) -> Outcome {
    let device = stack::open(fixture)?;
    let mut recording = Vec::new();
    let mut stack = Stack::new(&device, &mut recording)?;
    let nic = KernelNic::silent()?;
    nic.set_address(KERNEL_ADDRESS)?;
    ping(&mut stack)?;
    drop((stack, nic));
    close_clean(device).map(drop)
}

pub(crate) fn tcp_stream_of_16_mib_each_way_arrives_whole(fixture: &Fixture) -> Outcome {
    let device = stack::open(fixture)?;
    let mut recording = Vec::new();
    let mut stack = Stack::new(&device, &mut recording)?;
    let nic = KernelNic::silent()?;
    nic.set_address(KERNEL_ADDRESS)?;
    exchange_streams(&mut stack)?;
    drop((stack, nic));
    close_clean(device).map(drop)
}

pub(crate) fn capture_on_the_kernel_side_equals_what_the_port_received(
    fixture: &Fixture,
) -> Outcome {
    let device = stack::open(fixture)?;
    let mut recording = Vec::new();
    let mut stack = Stack::new(&device, &mut recording)?;
    let nic = KernelNic::silent()?;
    let stop = AtomicBool::new(false);
    let captured = thread::scope(|scope| {
        let capture = Capture::start(scope, &nic.name, &stop)?;
        let traffic = (|| {
            nic.set_address(KERNEL_ADDRESS)?;
            ping(&mut stack)?;
            exchange_streams(&mut stack)?;
            nic.take_addresses()?;
            stack.settle()
        })();
        // Stopped in any case: the scope waits for it.
        let captured = capture.stop();
        traffic.and(captured)
    })?;
    drop(stack);
    let sent = frames::sent_by(nic.mac, frames::read(&captured)?);
    ensure(sent.len() > STREAM / 1514, || {
        format!("{} frames in the capture", sent.len())
    })?;
    frames::ensure_same(&frames::read(&recording)?, &sent)?;
    drop(nic);
    close_clean(device).map(drop)
}

/// Memory that was DMA memory is poisoned and watched (C11); what the wire brings goes nowhere (R4.2, C3).
pub(crate) fn frames_sent_at_a_broken_device_change_no_byte(fixture: &Fixture) -> Outcome {
    const FRAMES: u32 = 64;
    const POISON: [u8; 2048] = [0xA5; 2048];
    let device = stack::open(fixture)?;
    let pd = device.alloc_pd()?;
    let (mr, mut pool) = pd.register(FRAMES, POISON.len() as u32)?;
    let poison = |pool: &mut Pool| -> Outcome {
        let frames = pool.take_many(pool.available()).ok_or("no frames")?;
        for mut frame in frames {
            frame.fill(&POISON)?;
            pool.put(frame).map_err(|_| "a frame of another region")?;
        }
        Ok(())
    };
    poison(&mut pool)?;
    let cq = device.create_cq(FRAMES)?;
    let mut rq = pd.create_rq(QueueInit {
        pd: &pd,
        cq: &cq,
        mr: &mr,
        pool: &mut pool,
        entries: FRAMES / 2,
        number: 0,
    })?;
    let nic = KernelNic::silent()?;
    nic.set_address(KERNEL_ADDRESS)?;
    let shout = UdpSocket::bind((KERNEL_ADDRESS.split('/').next().unwrap_or_default(), 0))?;
    shout.set_broadcast(true)?;
    let send = |count: u32| -> Outcome {
        for _ in 0..count {
            shout.send_to(&[0x5A; 1000], BROADCAST)?;
        }
        thread::sleep(Duration::from_millis(300));
        Ok(())
    };
    // The wire works: what is sent arrives.
    send(3)?;
    let mut frames = pool.take_many(8).ok_or("no frames")?;
    ensure(rq.burst(&mut frames) >= 3, || {
        "nothing arrives before the break".into()
    })?;
    drop(frames);
    device.break_now(Cause::User);
    let report = device.revocation().ok_or("no report")?;
    ensure_eq(report.verdict, Word::Revoked, &report.to_string())?;
    // What came before the break, and while it was under way, came; from here on nothing may.
    let mut frames = pool.take_many(8).ok_or("no frames")?;
    while rq.burst(&mut frames) > 0 {}
    drop(frames);
    let completions = rq.completions();
    ensure_eq(completions.outstanding(), 0, "outstanding requests")?;
    rq.destroy();
    poison(&mut pool)?;
    send(100)?;
    let mut bytes = [0; POISON.len()];
    for frame in pool
        .take_many(FRAMES as usize)
        .ok_or("frames are missing")?
    {
        let mut frame = frame;
        frame.set_len(POISON.len() as u32)?;
        frame.copy_to(&mut bytes);
        ensure(bytes == POISON, || "a byte changed after the break".into())?;
    }
    drop((pool, mr, cq, pd, nic));
    ensure_eq(device.close().left, Vec::new(), "ledger")
}

/// Lets the kernel's ping ask us.
fn ping(stack: &mut Stack<'_>) -> Outcome {
    let words = ["-c", "100", "-i", "0.05", "-W", "5", OUR_ADDRESS];
    let output = thread::scope(|scope| {
        let judge = scope.spawn(|| run(Command::new("ping").args(words)));
        stack.run(LIMIT, |_| Ok(judge.is_finished()))?;
        judge.join().map_err(|_| "the thread that pings panicked")?
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // The words that busybox and iputils share.
    let whole = text.contains("100 packets transmitted, 100 ") && text.contains(" 0% packet loss");
    ensure(whole, || text)
}

/// A connection from the kernel's stack to ours; both ends send [`STREAM`] bytes at once.
fn exchange_streams(stack: &mut Stack<'_>) -> Outcome {
    let (from_us, from_kernel) = (pseudo_random(1), pseudo_random(2));
    let socket = listen(stack)?;
    let mut ours = End::new(&from_us);
    let theirs = thread::scope(|scope| {
        let judge = scope.spawn(|| kernel_end(&from_kernel));
        stack.run(LIMIT, |sockets| {
            ours.serve(sockets.get_mut(socket))?;
            Ok(judge.is_finished() && ours.is_done())
        })?;
        judge
            .join()
            .map_err(|_| "the thread at the kernel's end panicked")?
    })?;
    stack.sockets.remove(socket);
    ensure_eq(ours.received, STREAM, "bytes from the kernel to us")?;
    ensure_eq(theirs.0, STREAM, "bytes from us to the kernel")?;
    ensure(ours.hash.finalize() == Sha256::digest(&from_kernel), || {
        "the kernel's bytes came to us changed".into()
    })?;
    ensure(theirs.1 == Sha256::digest(&from_us).to_vec(), || {
        "our bytes came to the kernel changed".into()
    })
}

fn pseudo_random(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; STREAM];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

fn listen(stack: &mut Stack<'_>) -> Result<SocketHandle, Failed> {
    let buffer = || tcp::SocketBuffer::new(vec![0; WINDOW]);
    let mut socket = tcp::Socket::new(buffer(), buffer());
    socket.set_timeout(Some(smoltcp::time::Duration::from_secs(30)));
    socket.listen(TCP_PORT)?;
    Ok(stack.sockets.add(socket))
}

/// Our end of a connection.
struct End<'a> {
    unsent: &'a [u8],
    received: usize,
    hash: Sha256,
}

impl<'a> End<'a> {
    fn new(unsent: &'a [u8]) -> Self {
        Self {
            unsent,
            received: 0,
            hash: Sha256::new(),
        }
    }

    fn is_done(&self) -> bool {
        self.unsent.is_empty() && self.received >= STREAM
    }

    /// Sends and receives what there is room and data for.
    fn serve(&mut self, socket: &mut tcp::Socket<'_>) -> Outcome {
        while socket.can_recv() {
            self.received += socket.recv(|bytes| {
                self.hash.update(&*bytes);
                (bytes.len(), bytes.len())
            })?;
        }
        if socket.can_send() && !self.unsent.is_empty() {
            let sent = socket.send_slice(self.unsent)?;
            self.unsent = &self.unsent[sent..];
            if self.unsent.is_empty() {
                socket.close();
            }
        }
        Ok(())
    }
}

/// The kernel's end: connects to us, sends `bytes`, and receives until our end is closed; how many
/// bytes came, and their hash.
fn kernel_end(bytes: &[u8]) -> Result<(usize, Vec<u8>), Failed> {
    let address: SocketAddr = format!("{OUR_ADDRESS}:{TCP_PORT}").parse()?;
    let mut stream = TcpStream::connect_timeout(&address, STALLED)?;
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))?;
    let mut writing = stream.try_clone()?;
    thread::scope(|scope| {
        let writer = scope.spawn(move || {
            writing.write_all(bytes)?;
            writing.shutdown(Shutdown::Write)
        });
        let (mut received, mut hash) = (0, Sha256::new());
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = stream.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            received += count;
            hash.update(&buffer[..count]);
        }
        writer.join().map_err(|_| "the writing thread panicked")??;
        Ok((received, hash.finalize().to_vec()))
    })
}
