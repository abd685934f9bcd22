//! Reaching a server that listens at a path.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use super::client::Options;
use super::error::ConnectError;

/// Connects a stream socket to the server at `path`, within the deadline of `options`.
pub(super) fn dial(path: &Path, name: &str, options: &Options) -> Result<OwnedFd, ConnectError> {
    let failed = |errno: Errno| match errno {
        Errno::ENOENT | Errno::ENOTDIR => ConnectError::NoSocket { path: path.into() },
        Errno::ECONNREFUSED => ConnectError::Refused { path: path.into() },
        Errno::EACCES | Errno::EPERM => ConnectError::Permission { path: path.into() },
        Errno::EAGAIN | Errno::ETIMEDOUT => ConnectError::NoAnswer {
            name: name.to_owned(),
            deadline: options.deadline,
        },
        errno => ConnectError::Socket {
            name: name.to_owned(),
            source: errno.into(),
        },
    };
    let address = UnixAddr::new(path).map_err(failed)?;
    let socket = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(failed)?;
    // A server with a full backlog would block us; the send timeout bounds connect, too (unix(7)).
    let micros = i64::try_from(options.deadline.as_micros()).unwrap_or(i64::MAX);
    let timeout = TimeVal::microseconds(micros.clamp(1, 1_000_000 * 86_400));
    setsockopt(&socket, sockopt::SendTimeout, &timeout).map_err(failed)?;
    loop {
        match connect(socket.as_fd().as_raw_fd(), &address) {
            Err(Errno::EINTR) => {}
            result => return result.map(|()| socket).map_err(failed),
        }
    }
}
