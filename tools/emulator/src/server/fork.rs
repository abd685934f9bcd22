//! The fault `server-forks`: a child of the server keeps what its client shared, and goes on writing
//! there when the server itself does as it was told.
#![expect(
    unsafe_code,
    reason = "fork, and writes to memory that others write too"
)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::unistd::{ForkResult, fork, pipe};

/// Bytes between two writes.
const STRIDE: usize = 1024;
/// What is written: recognisable.
const BYTE: u8 = 0xD6;
/// Milliseconds between two writes.
const PERIOD: libc::c_int = 1;

/// Shared memory, as this process has it mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    /// Its first byte.
    pub(super) start: *mut u8,
    /// Bytes.
    pub(super) len: usize,
}

/// A child that writes; it ends when this is dropped, or this process ends.
#[derive(Debug)]
pub(super) struct Child {
    _leash: OwnedFd,
    pid: nix::unistd::Pid,
}

impl Child {
    /// Starts a child that writes a byte into `shared` each millisecond.
    ///
    /// # Errors
    ///
    /// When the kernel gives no process or pipe.
    pub(super) fn start(shared: Shared) -> io::Result<Self> {
        let (watched, leash) = pipe()?;
        // SAFETY: the child calls nothing but poll, dup2, close_range and _exit, all of which are
        // async-signal-safe, and allocates nothing.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self {
                _leash: leash,
                pid: child,
            }),
            ForkResult::Child => write_on(shared, watched.as_raw_fd()),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It ends by itself too; nothing is lost when it has.
        let _ended = nix::sys::signal::kill(self.pid, nix::sys::signal::Signal::SIGKILL);
        let _status = nix::sys::wait::waitpid(self.pid, None);
    }
}

/// What the child does until nobody holds the other end of `watched`.
fn write_on(memory: Shared, watched: libc::c_int) -> ! {
    // SAFETY: both are descriptors of this process, which no Rust value of the child uses again.
    unsafe { libc::dup2(watched, 0) };
    // SAFETY: closes the copies of the server's sockets and of the leash, which would else seem to
    // be alive for as long as the child is.
    unsafe { libc::close_range(1, libc::c_uint::MAX, 0) };
    let mut turn = 0usize;
    loop {
        let mut poll = libc::pollfd {
            fd: 0,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one initialised structure, for the time of the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, PERIOD) };
        if ready != 0 {
            // SAFETY: ends the child without running what belongs to its parent.
            unsafe { libc::_exit(0) };
        }
        turn = turn.wrapping_add(1);
        let at = turn.wrapping_mul(STRIDE) % memory.len.max(1);
        if at < memory.len {
            // SAFETY: inside the mapping, which is this process's own copy and is never unmapped in
            // it; its file is sealed against shrinking, or it would not have been mapped.
            let byte = unsafe { memory.start.add(at) };
            // SAFETY: as above. Volatile, because others read and write it at the same time.
            unsafe { byte.write_volatile(BYTE) };
        }
    }
}
