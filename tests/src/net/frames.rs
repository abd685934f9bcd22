//! Captures: taken from the kernel, read, compared.

use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::{Scope, ScopedJoinHandle};

use libtest_mimic::Failed;
use pcap_file::pcap::PcapReader;
use smoltcp::phy::{self, Device, Medium, PcapMode, PcapWriter, RawSocket, RxToken};
use smoltcp::time::{Duration, Instant};

use crate::fixture::Outcome;

/// Bytes of the shortest frame of Ethernet, frame check sequence not counted: the kernel hands over
/// shorter ones, and the NIC pads them with zeros.
const SHORTEST: usize = 60;
/// How many bytes the kernel keeps for a new socket until they are read.
const BACKLOG: &str = "/proc/sys/net/core/rmem_default";
/// How many that shall be: more than passes while the capturing thread is not scheduled.
const BACKLOG_BYTES: &str = "67108864";

/// A capture of an interface of the kernel, by a thread of its own.
pub(super) struct Capture<'scope, 'env> {
    stop: &'env AtomicBool,
    thread: ScopedJoinHandle<'scope, std::io::Result<Vec<u8>>>,
}

impl<'scope, 'env> Capture<'scope, 'env> {
    /// Captures what passes the interface, until `stop` is set; from when this returns.
    pub(super) fn start(
        scope: &'scope Scope<'scope, 'env>,
        interface: &'env str,
        stop: &'env AtomicBool,
    ) -> Result<Self, Failed> {
        let usual = fs::read(BACKLOG)?;
        fs::write(BACKLOG, BACKLOG_BYTES)?;
        let (ready, started) = channel();
        let thread = scope.spawn(move || {
            let socket = RawSocket::new(interface, Medium::Ethernet)?;
            let fd = socket.as_raw_fd();
            let mut pcap = Vec::new();
            let mut tap = PcapWriter::new(socket, &mut pcap, PcapMode::RxOnly);
            let _ = ready.send(());
            loop {
                let last = stop.load(Ordering::Acquire);
                while let Some((frame, _)) = tap.receive(Instant::now()) {
                    frame.consume(|_| ());
                }
                if last {
                    break;
                }
                phy::wait(fd, Some(Duration::from_millis(10)))?;
            }
            drop(tap);
            Ok(pcap)
        });
        // It fails when the thread ended already, which then says why.
        let _ = started.recv();
        fs::write(BACKLOG, usual)?;
        Ok(Self { stop, thread })
    }

    /// Ends the capture: what passed, as pcap.
    pub(super) fn stop(self) -> Result<Vec<u8>, Failed> {
        self.stop.store(true, Ordering::Release);
        let pcap = self.thread.join().map_err(|_| "the capture panicked")??;
        Ok(pcap)
    }
}

/// The frames of a capture.
pub(super) fn read(pcap: &[u8]) -> Result<Vec<Vec<u8>>, Failed> {
    let mut reader = PcapReader::new(pcap)?;
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet?.data.into_owned());
    }
    Ok(frames)
}

/// The frames of `captured` that the station `source` sent, as they are on the wire.
pub(super) fn sent_by(source: [u8; 6], captured: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut frames = captured;
    frames.retain(|frame| frame.get(6..12) == Some(&source));
    for frame in &mut frames {
        frame.resize(frame.len().max(SHORTEST), 0);
    }
    frames
}

/// Fails unless both are the same frames in the same order.
pub(super) fn ensure_same(received: &[Vec<u8>], sent: &[Vec<u8>]) -> Outcome {
    let differ = received.iter().zip(sent).position(|(a, b)| a != b);
    if let Some(at) = differ {
        return Err(format!(
            "frame {at} of {} that the kernel sent is\n{:02x?}\nframe {at} of {} that the port received is\n{:02x?}",
            sent.len(), sent[at], received.len(), received[at],
        )
        .into());
    }
    if received.len() == sent.len() {
        return Ok(());
    }
    let (sent, received) = (sent.len(), received.len());
    Err(format!(
        "the kernel sent {sent} frames, the port received {received}; they agree as far as both go"
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_frames_are_compared_as_the_wire_carries_them() {
        let source = [2, 0, 0, 0, 0, 1];
        let frame = |source: [u8; 6], len| {
            let mut frame = vec![7; len];
            frame[6..12].copy_from_slice(&source);
            frame
        };
        let captured = vec![frame(source, 42), frame([2; 6], 60), frame(source, 100)];
        let sent = sent_by(source, captured);
        assert_eq!(sent.iter().map(Vec::len).collect::<Vec<_>>(), [60, 100]);
        assert_eq!(sent[0][41..44], [7, 0, 0]);
    }

    #[test]
    fn a_missing_frame_and_a_changed_one_are_differences() {
        let frames = [vec![1; 60], vec![2; 60]];
        assert!(ensure_same(&frames, &frames).is_ok());
        assert!(ensure_same(&frames[..1], &frames).is_err());
        assert!(ensure_same(&frames, &frames[..1]).is_err());
        assert!(ensure_same(&[vec![1; 60], vec![3; 60]], &frames).is_err());
    }
}
