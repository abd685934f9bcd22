//! What is on the other end of the cable: nothing, a port in the same process, or a Unix datagram
//! socket as QEMU's `-netdev dgram` speaks. Nobody waits for anybody: a frame that finds no room is
//! lost and counted, as on Ethernet. The kernel lets a datagram socket hold some ten frames, fewer
//! than one segmented packet makes, so frames wait here for room there.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Frames under way to a port.
const QUEUE: usize = 1024;
/// Frames that wait for room at a datagram socket.
const WAITING: usize = 512;
/// The longest frame that a datagram is taken for, in bytes.
const LONGEST: usize = 16 << 10;

/// One direction of a cable in this process. The lock is held for a push or a pop, never while a
/// frame is handled: two ports that send to each other cannot wait for each other.
#[derive(Debug)]
struct Direction {
    frames: Mutex<VecDeque<Vec<u8>>>,
    wake: OwnedFd,
}

impl Direction {
    fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            frames: Mutex::new(VecDeque::new()),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        }))
    }

    fn push(&self, frame: &[u8]) -> bool {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        if frames.len() >= QUEUE {
            return false;
        }
        let first = frames.is_empty();
        frames.push_back(frame.to_vec());
        drop(frames);
        if first {
            let _full = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
        true
    }

    fn pop(&self) -> Option<Vec<u8>> {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = frames.pop_front();
        if frame.is_none() {
            // Under the lock, so that a push that comes next wakes again.
            let _empty = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        frame
    }
}

/// The other end.
#[derive(Debug)]
enum End {
    Nothing,
    Port {
        to: Arc<Direction>,
        from: Arc<Direction>,
    },
    Datagram {
        socket: UnixDatagram,
        local: PathBuf,
        remote: PathBuf,
        scratch: Vec<u8>,
        waiting: VecDeque<Vec<u8>>,
    },
}

/// A port's end of a cable.
#[derive(Debug)]
pub struct Wire {
    end: End,
    dropped: u64,
}

impl Wire {
    /// No cable.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            end: End::Nothing,
            dropped: 0,
        }
    }

    /// A cable between two ports of this process.
    ///
    /// # Errors
    ///
    /// When no eventfd can be made.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = (Direction::new()?, Direction::new()?);
        let end = |to: &Arc<Direction>, from: &Arc<Direction>| Self {
            end: End::Port {
                to: Arc::clone(to),
                from: Arc::clone(from),
            },
            dropped: 0,
        };
        Ok((end(&a, &b), end(&b, &a)))
    }

    /// A cable to whoever is bound to `remote`: `-netdev dgram` with `local.path` and
    /// `remote.path` the other way round. A socket file left over at `local` is replaced.
    ///
    /// # Errors
    ///
    /// When the socket cannot be bound.
    pub fn datagram(local: &Path, remote: &Path) -> io::Result<Self> {
        match std::fs::remove_file(local) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixDatagram::bind(local)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            end: End::Datagram {
                socket,
                local: local.to_owned(),
                remote: remote.to_owned(),
                scratch: vec![0; LONGEST],
                waiting: VecDeque::new(),
            },
            dropped: 0,
        })
    }

    /// Whether a cable is plugged in.
    #[must_use]
    pub const fn is_connected(&self) -> bool {
        !matches!(self.end, End::Nothing)
    }

    /// Frames lost for want of room or of a receiver.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Sets the count of lost frames to 0.
    pub const fn reset_counters(&mut self) {
        self.dropped = 0;
    }

    /// Sends a frame.
    pub fn send(&mut self, frame: &[u8]) {
        let sent = match &mut self.end {
            End::Nothing => false,
            End::Port { to, .. } => to.push(frame),
            End::Datagram { waiting, .. } if waiting.len() >= WAITING => false,
            End::Datagram { waiting, .. } => {
                waiting.push_back(frame.to_vec());
                true
            }
        };
        self.dropped += u64::from(!sent);
        self.flush();
    }

    /// Sends frames that wait for room, as far as there is some. True when some still wait: nothing
    /// tells when there is room, so this is called again after a while.
    pub fn flush(&mut self) -> bool {
        let End::Datagram {
            socket,
            remote,
            waiting,
            ..
        } = &mut self.end
        else {
            return false;
        };
        while let Some(frame) = waiting.front() {
            match socket.send_to(frame, remote.as_path()) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // Nobody is there.
                Err(_) => self.dropped += 1,
            }
            waiting.pop_front();
        }
        false
    }

    /// The next frame that came in, if one did.
    pub fn receive(&mut self) -> Option<Vec<u8>> {
        match &mut self.end {
            End::Nothing => None,
            End::Port { from, .. } => from.pop(),
            End::Datagram {
                socket, scratch, ..
            } => {
                let len = socket.recv(scratch).ok()?;
                Some(scratch[..len].to_vec())
            }
        }
    }

    /// What becomes readable when a frame comes in.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.end {
            End::Nothing => None,
            End::Port { from, .. } => Some(from.wake.as_fd()),
            End::Datagram { socket, .. } => Some(socket.as_fd()),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let End::Datagram { local, .. } = &self.end {
            // Somebody else may have removed it already.
            let _gone = std::fs::remove_file(local);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_crosses_a_pair_in_order() {
        let (mut a, mut b) = Wire::pair().unwrap();
        a.send(&[1; 60]);
        a.send(&[2; 60]);
        assert_eq!(b.receive(), Some(vec![1; 60]));
        assert_eq!(b.receive(), Some(vec![2; 60]));
        assert_eq!(b.receive(), None);
    }

    #[test]
    fn a_full_cable_loses_frames_and_blocks_nobody() {
        let (mut a, _b) = Wire::pair().unwrap();
        for _ in 0..=QUEUE {
            a.send(&[0; 60]);
        }
        assert_eq!(a.dropped(), 1);
    }

    #[test]
    fn frames_wait_for_room_at_a_slow_receiver() {
        let directory = tempfile::tempdir().unwrap();
        let (left, right) = (directory.path().join("l"), directory.path().join("r"));
        let mut a = Wire::datagram(&left, &right).unwrap();
        let mut b = Wire::datagram(&right, &left).unwrap();
        for n in 0..100 {
            a.send(&[n; 60]);
        }
        let mut received = 0;
        while let Some(frame) = b.receive() {
            assert_eq!(frame[0], received);
            received += 1;
            a.flush();
        }
        assert_eq!((received, a.dropped()), (100, 0));
    }

    #[test]
    fn datagrams_go_both_ways() {
        let directory = tempfile::tempdir().unwrap();
        let (left, right) = (directory.path().join("l"), directory.path().join("r"));
        let mut a = Wire::datagram(&left, &right).unwrap();
        a.send(&[0; 60]);
        assert_eq!(a.dropped(), 1, "nobody is there yet");
        let mut b = Wire::datagram(&right, &left).unwrap();
        a.send(&[1; 60]);
        b.send(&[2; 70]);
        assert_eq!(
            (b.receive(), a.receive()),
            (Some(vec![1; 60]), Some(vec![2; 70]))
        );
        drop(a);
        assert!(!left.exists());
    }
}
