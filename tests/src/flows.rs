//! Flows over many queues: packets whose queue the test can tell, and threads that move them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::dma::frame::Frame;
use failstop::port::{Port, PortConfig};
use failstop::provider::{Config, MacAddress};
use failstop::queues::completions::Completions;
use failstop::rss::{HashTypes, MICROSOFT_KEY, Rss, Table};
use libtest_mimic::Failed;

use crate::fixture::{Fixture, Outcome, ensure};

/// Queue pairs of the part under test, and its threads.
pub const QUEUES: u32 = 16;
/// Threads that the queue pairs are shared out to.
pub const THREADS: usize = 4;
/// Enough of them that each queue has some.
pub const FLOWS: u32 = 256;
/// Frames of one burst.
const BURST: usize = 16;
/// Frames that may be under way at once: all of them may be for one queue, and none is dropped.
const WINDOW: u64 = 192;
/// How long nothing may come.
const PATIENCE: Duration = Duration::from_secs(30);
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Small: 16 of them have 12 MB.
#[must_use]
pub fn port_config() -> PortConfig {
    PortConfig {
        rx_entries: 256,
        tx_entries: 64,
        frame_size: 2048,
        spare_frames: 64,
    }
}

/// Every packet is hashed with its ports.
#[must_use]
pub fn rss() -> Rss {
    Rss {
        types: HashTypes::all(),
        ..Rss::default()
    }
}

/// Opens the fixture's device in loopback with RSS.
///
/// # Errors
///
/// When that fails.
pub fn open(fixture: &Fixture) -> Result<Device, Failed> {
    fixture.open_with(&Config {
        loopback: true,
        rss: Some(rss()),
        ..Config::default()
    })
}

/// The flow with number `n`: TCP or UDP, over IPv4 or IPv6, with addresses and ports of its own.
#[derive(Clone, Copy, Debug)]
pub struct Flow(pub u32);

impl Flow {
    fn protocol(self) -> u8 {
        if self.0 & 1 == 0 { TCP } else { UDP }
    }

    /// Source and destination address.
    fn addresses(self) -> Vec<u8> {
        let [_, _, high, low] = self.0.to_be_bytes();
        if self.0 & 2 == 0 {
            vec![10, 1, high, low, 10, 2, 7, low.wrapping_mul(3)]
        } else {
            let mut addresses = vec![0; 32];
            addresses[..2].copy_from_slice(&[0xfd, 0x01]);
            addresses[14..18].copy_from_slice(&[high, low, 0xfd, 0x02]);
            addresses[31] = low.wrapping_mul(5);
            addresses
        }
    }

    /// Source and destination port.
    fn ports(self) -> [u8; 4] {
        let source = (1024 + self.0 * 7) as u16;
        let [a, b] = source.to_be_bytes();
        [a, b, 0x1f, 0x90]
    }

    /// What the device hashes.
    #[must_use]
    pub fn input(self) -> Vec<u8> {
        [self.addresses(), self.ports().to_vec()].concat()
    }

    /// Which entry of the table it leads to.
    #[must_use]
    pub fn entry(self) -> usize {
        (toeplitz(&MICROSOFT_KEY, &self.input()) & 0x7F) as usize
    }

    /// A frame of it to ourselves that carries `id`.
    fn frame(self, mac: MacAddress, id: u64) -> Vec<u8> {
        let mut segment = self.ports().to_vec();
        if self.protocol() == TCP {
            // Sequence numbers, 20 bytes of header, ACK.
            segment.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 4, 0, 0, 0, 0, 0]);
        } else {
            segment.extend_from_slice(&[0, 8 + 16, 0, 0]);
        }
        segment.extend_from_slice(&id.to_be_bytes());
        segment.extend_from_slice(&u64::from(self.0).to_be_bytes());
        let addresses = self.addresses();
        let mut bytes = [mac.0, mac.0].concat();
        if addresses.len() == 8 {
            let length = (20 + segment.len()) as u16;
            let [a, b] = length.to_be_bytes();
            let mut header = vec![0x45, 0, a, b, 0, 0, 0x40, 0, 64, self.protocol(), 0, 0];
            header.extend_from_slice(&addresses);
            let sum = header.chunks_exact(2).fold(0u32, |sum, pair| {
                sum + u32::from(u16::from_be_bytes([pair[0], pair[1]]))
            });
            let sum = !((sum & 0xFFFF) + (sum >> 16)) as u16;
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            bytes.extend_from_slice(&[0x08, 0x00]);
            bytes.extend(header);
        } else {
            let [a, b] = (segment.len() as u16).to_be_bytes();
            bytes.extend_from_slice(&[0x86, 0xDD, 0x60, 0, 0, 0, a, b, self.protocol(), 64]);
            bytes.extend(addresses);
        }
        bytes.extend(segment);
        bytes.resize(bytes.len().max(60), 0);
        bytes
    }
}

/// The number and the flow that a frame carries: the last 16 bytes of its payload.
fn read(frame: &Frame) -> Option<(u64, Flow)> {
    let mut bytes = [0; 128];
    let len = frame.copy_to(&mut bytes);
    let (start, flag) = match bytes.get(12..14)? {
        [0x08, 0x00] => (14 + 20, bytes[14 + 9]),
        [0x86, 0xDD] => (14 + 40, bytes[14 + 6]),
        _ => return None,
    };
    let at = start + if flag == TCP { 20 } else { 8 };
    let word = |at: usize| -> Option<u64> {
        let word = bytes[..len.min(bytes.len())].get(at..at + 8)?;
        Some(u64::from_be_bytes(word.try_into().ok()?))
    };
    Some((word(at)?, Flow(u32::try_from(word(at + 8)?).ok()?)))
}

/// The Toeplitz hash, a bit at a time, as its definition has it: for each bit of the input that is
/// set, the 32 bits of the key that begin at its place.
#[must_use]
pub fn toeplitz(key: &[u8], input: &[u8]) -> u32 {
    let bit = |bytes: &[u8], at: usize| bytes[at / 8] >> (7 - at % 8) & 1;
    let mut hash = 0u32;
    for at in 0..input.len() * 8 {
        if bit(input, at) == 1 {
            let window = (0..32).fold(0u32, |word, n| word << 1 | u32::from(bit(key, at + n)));
            hash ^= window;
        }
    }
    hash
}

/// Where a flow has to arrive; none where any of the ports will do.
pub type Expected<'a> = dyn Fn(Flow) -> Option<u32> + Sync + 'a;

/// The queue that the table names for a flow.
pub fn by(table: Table) -> impl Fn(Flow) -> Option<u32> + Sync {
    move |flow| Some(table.0[flow.entry()].into())
}

/// A number of frames that are to come back, each once and where its flow belongs.
pub struct Round<'a> {
    mac: MacAddress,
    flows: Vec<Flow>,
    expected: &'a Expected<'a>,
    /// The first number: frames with lesser ones are an earlier round's.
    first: u64,
    total: u64,
    next: AtomicU64,
    received: AtomicU64,
    seen: Vec<AtomicU8>,
    wrong: Mutex<Vec<String>>,
    over: AtomicBool,
}

impl<'a> Round<'a> {
    /// `total` frames of `flows`, numbered from `first` on.
    #[must_use]
    pub fn new(
        device: &Device,
        flows: Vec<Flow>,
        (first, total): (u64, u64),
        expected: &'a Expected<'a>,
    ) -> Self {
        Self {
            mac: device.mac(),
            flows,
            expected,
            first,
            total,
            next: AtomicU64::new(0),
            received: AtomicU64::new(0),
            seen: (0..total).map(|_| AtomicU8::new(0)).collect(),
            wrong: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    /// Moves them over `ports`, shared out to threads.
    ///
    /// # Errors
    ///
    /// Which frames came wrong, twice, or not at all.
    pub fn go(&self, ports: &mut [Port]) -> Outcome {
        let share = ports.len().div_ceil(THREADS).max(1);
        thread::scope(|scope| {
            for mine in ports.chunks_mut(share) {
                scope.spawn(move || self.serve(mine));
            }
        });
        self.judge()
    }

    /// One thread's part.
    pub fn serve(&self, ports: &mut [Port]) {
        let mut frames: Vec<(Vec<Frame>, usize)> = Vec::new();
        for port in &mut *ports {
            let Some(own) = port.take_frames(BURST) else {
                return self.complain("a port has no frames".into());
            };
            frames.push((own, BURST));
        }
        let mut last = Instant::now();
        while self.received.load(Ordering::Relaxed) < self.total {
            let before = self.received.load(Ordering::Relaxed);
            for (port, (own, sent)) in ports.iter_mut().zip(&mut frames) {
                if *sent == own.len() && self.claim(own) {
                    *sent = 0;
                }
                if *sent < own.len() {
                    *sent += port.tx_burst(&mut own[*sent..]);
                    continue;
                }
                let received = port.rx_burst(own);
                for frame in &own[..received] {
                    self.take(port.number(), frame);
                }
            }
            if self.received.load(Ordering::Relaxed) > before {
                last = Instant::now();
            } else if last.elapsed() > PATIENCE {
                self.over.store(true, Ordering::Relaxed);
                return;
            } else {
                thread::yield_now();
            }
        }
    }

    /// Fills frames with the next numbers, for a caller who sends them himself.
    pub fn fill(&self, frames: &mut [Frame]) {
        self.claim(frames);
    }

    /// Fills frames with the next numbers, if that many may be under way.
    fn claim(&self, frames: &mut [Frame]) -> bool {
        let burst = frames.len() as u64;
        let received = self.received.load(Ordering::Relaxed);
        let claimed = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                let end = next + burst;
                (end <= self.total && end.saturating_sub(received) <= WINDOW).then_some(end)
            });
        let Ok(start) = claimed else { return false };
        for (frame, n) in frames.iter_mut().zip(start..) {
            let flow = self.flows[n as usize % self.flows.len()];
            if frame.fill(&flow.frame(self.mac, self.first + n)).is_err() {
                self.complain("a frame has no room".into());
            }
        }
        true
    }

    fn take(&self, queue: u32, frame: &Frame) {
        let Some((id, flow)) = read(frame) else {
            return self.complain(format!("queue {queue}: not a frame of ours"));
        };
        let Some(n) = id.checked_sub(self.first) else {
            return;
        };
        match self.seen.get(n as usize) {
            Some(seen) if seen.fetch_add(1, Ordering::Relaxed) == 0 => {
                self.received.fetch_add(1, Ordering::Relaxed);
            }
            Some(_) => self.complain(format!("frame {n} came twice")),
            None => self.complain(format!("frame {n} was never sent")),
        }
        match (self.expected)(flow) {
            Some(expected) if expected != queue => self.complain(format!(
                "frame {n} of {flow:?} came to queue {queue}, not {expected}"
            )),
            _ => {}
        }
    }

    fn complain(&self, what: String) {
        if let Ok(mut wrong) = self.wrong.lock() {
            wrong.push(what);
        }
    }

    /// Frames that came.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Whether somebody gave up waiting.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether every frame came once, where it belongs.
    ///
    /// # Errors
    ///
    /// When not.
    pub fn judge(&self) -> Outcome {
        let wrong = self.wrong.lock().map_err(|_| "a thread panicked")?;
        ensure(wrong.is_empty(), || {
            let few: Vec<_> = wrong.iter().take(5).map(String::as_str).collect();
            format!("{} complaints: {}", wrong.len(), few.join("; "))
        })?;
        let received = self.received.load(Ordering::Relaxed);
        ensure(received == self.total, || {
            format!("{received} of {} frames came back", self.total)
        })
    }
}

/// Every flow.
#[must_use]
pub fn all() -> Vec<Flow> {
    (0..FLOWS).map(Flow).collect()
}

/// Moves frames of every flow, whatever becomes of them, until `stop` says so.
pub fn blast(mac: MacAddress, ports: &mut [Port], stop: &AtomicBool) {
    let mut n = 0;
    let mut frames: Vec<Vec<Frame>> = ports
        .iter_mut()
        .map(|port| port.take_frames(BURST).unwrap_or_default())
        .collect();
    while !stop.load(Ordering::Relaxed) {
        for (port, frames) in ports.iter_mut().zip(&mut frames) {
            for frame in frames.iter_mut() {
                n += 1;
                // Too long never: 2 KiB hold it.
                let _ = frame.fill(&Flow(n % FLOWS).frame(mac, 0));
            }
            port.tx_burst(frames);
            port.rx_burst(frames);
        }
        thread::yield_now();
    }
}

/// Bursts until every port was carried to its device's present life `times` in all.
///
/// # Errors
///
/// When one is not.
pub fn carry(ports: &mut [Port], times: u64) -> Outcome {
    let end = Instant::now() + PATIENCE;
    for port in ports {
        let mut frames = port.take_frames(1).ok_or("no frame")?;
        while port.carried().times < times {
            port.rx_burst(&mut frames);
            ensure(Instant::now() < end, || {
                format!("port {} is not carried", port.number())
            })?;
        }
    }
    Ok(())
}

/// The accounts of all of them.
pub fn completions(ports: &mut [Port]) -> Completions {
    let each = ports.iter_mut().map(Port::completions);
    each.fold(Completions::default(), |sum, one| sum + one)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Microsoft's verification suite: destination and its port last.
    #[test]
    fn the_hash_is_the_published_one() {
        let v4 = |source: [u8; 4], destination: [u8; 4], ports: [u16; 2]| {
            let [a, b] = ports.map(u16::to_be_bytes);
            let addresses = [source, destination].concat();
            let all = [&addresses[..], &a, &b].concat();
            [addresses, all].map(|input| toeplitz(&MICROSOFT_KEY, &input))
        };
        assert_eq!(
            v4([66, 9, 149, 187], [161, 142, 100, 80], [2794, 1766]),
            [0x323e_8fc2, 0x51cc_c178]
        );
        assert_eq!(
            v4([199, 92, 111, 2], [65, 69, 140, 83], [14230, 4739]),
            [0xd718_262a, 0xc626_b0ea]
        );
        assert_eq!(
            v4([24, 19, 198, 95], [12, 22, 207, 184], [12898, 38024]),
            [0xd2d0_a5de, 0x5c2b_394a]
        );
        // 3ffe:2501:200:1fff::7 to 3ffe:2501:200:3::1, 2794 to 1766.
        let mut v6 = vec![
            0x3f, 0xfe, 0x25, 0x01, 0x02, 0x00, 0x1f, 0xff, 0, 0, 0, 0, 0, 0, 0, 7,
        ];
        v6.extend([
            0x3f, 0xfe, 0x25, 0x01, 0x02, 0x00, 0x00, 0x03, 0, 0, 0, 0, 0, 0, 0, 1,
        ]);
        assert_eq!(toeplitz(&MICROSOFT_KEY, &v6), 0x2cc1_8cd5);
        v6.extend([0x0a, 0xea, 0x06, 0xe6]);
        assert_eq!(toeplitz(&MICROSOFT_KEY, &v6), 0x4020_7d3d);
    }

    #[test]
    fn every_queue_has_flows_of_every_kind() {
        let table = Table::even(QUEUES);
        for queue in 0..QUEUES as u8 {
            let own = all()
                .into_iter()
                .filter(|flow| table.0[flow.entry()] == queue);
            let kinds = own.fold([0; 4], |mut kinds, flow| {
                kinds[flow.0 as usize & 3] += 1;
                kinds
            });
            assert!(kinds.iter().sum::<u32>() >= 4, "queue {queue}: {kinds:?}");
        }
    }
}
