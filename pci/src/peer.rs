//! The process that serves a device and that we started: its end ends what it could reach.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::id::DeviceId;

/// A child of ours that serves a device, by a descriptor of the process (`pidfd_open(2)`): a number
/// could be another process's by now, and so could the other end of a socket.
#[derive(Debug)]
pub struct Peer {
    process: OwnedFd,
}

impl Peer {
    /// The process behind `child`, which has not been waited for.
    ///
    /// # Errors
    ///
    /// When it has ended, or the kernel gives no descriptor (before Linux 5.3).
    pub fn of(child: &mut Child) -> io::Result<Self> {
        if child.try_wait()?.is_some() {
            return Err(io::Error::other("the process has ended"));
        }
        // Not waited for, so that the number is still its own.
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
        Ok(Self { process })
    }

    /// Whether it has ended, all its threads with it.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        // POLLHUP as well, once it was waited for.
        poll(&mut polled, PollTimeout::ZERO) == Ok(1)
            && polled[0]
                .revents()
                .is_some_and(|events| events.contains(PollFlags::POLLIN))
    }
}

/// Two names of one process are not compared.
impl PartialEq for Peer {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Peer {}

/// Proof that the process which served this device, and which we started, has ended: nothing of it
/// reaches memory any more. A process that it forked may, and reaches what it was sent and nothing
/// else: no file that was sent is ever used again.
#[derive(Debug)]
#[must_use]
pub struct PeerEnded {
    device: DeviceId,
}

impl PeerEnded {
    /// The proof for the device that `peer` serves; none while it lives.
    pub(crate) fn of(peer: &Peer, device: DeviceId) -> Option<Self> {
        peer.has_ended().then_some(Self { device })
    }

    /// Which device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn cat() -> Child {
        Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_peer_that_died_has_ended_waited_for_or_not() {
        let mut child = cat();
        let peer = Peer::of(&mut child).unwrap();
        assert!(!peer.has_ended());
        assert!(PeerEnded::of(&peer, DeviceId::fresh()).is_none());
        child.kill().unwrap();
        while !peer.has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(peer.has_ended());
    }

    #[test]
    fn one_that_was_waited_for_is_no_peer() {
        let mut child = cat();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Peer::of(&mut child).is_err());
    }
}
