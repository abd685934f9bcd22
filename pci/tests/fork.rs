//! What a child of fork has of the devices of its parent: nothing (R12).
//!
//! A program of its own: fork takes only the calling thread along, and the test harness has
//! several. One test, so that nothing else runs while it forks.
#![expect(unsafe_code, reason = "forks")]

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use failstop_pci::transport::vfio_user::wire::{self, Capabilities, Command, DeviceInfo, Version};
use failstop_pci::transport::vfio_user::{Client, Options, socket};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use zerocopy::IntoBytes;

/// Answers what a client asks when it opens a device: a PCI function without regions.
fn serve(peer: &OwnedFd) {
    use std::os::fd::AsFd;
    let mut asked = Vec::new();
    for command in [Command::Version, Command::DeviceGetInfo] {
        let (header, _) = socket::receive(peer.as_fd(), 1 << 16, 0, None, &mut asked).unwrap();
        assert_eq!(header.command, command.number());
        let payload = match command {
            Command::Version => wire::encode_version(
                Version {
                    major: wire::MAJOR,
                    minor: wire::MINOR,
                },
                &Capabilities::default(),
            ),
            _ => DeviceInfo {
                argsz: 16,
                flags: wire::DeviceFlags::PCI.bits(),
                num_regions: 0,
                num_irqs: 0,
            }
            .as_bytes()
            .to_vec(),
        };
        let reply = wire::encode(&header.reply(payload.len()), &payload, &[]);
        socket::send(peer.as_fd(), &reply, &[], None).unwrap();
    }
}

/// The last reference stops the device (R12).
#[test]
fn c39_a_child_of_fork_does_not_keep_the_device_alive() {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let number = mine.as_raw_fd();
    let theirs = OwnedFd::from(theirs);
    let server = std::thread::spawn(move || {
        serve(&theirs);
        theirs
    });
    let client = Client::from_socket(mine.into(), "vfio-user:test", Options::default()).unwrap();
    let theirs = server.join().unwrap();

    // The child lives until the parent closes its end.
    let (wait, go) = nix::unistd::pipe().unwrap();
    // SAFETY: the child makes system calls only, and ends.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            drop(go);
            // SAFETY: asks for flags.
            let flags = unsafe { libc::fcntl(number, libc::F_GETFL) };
            let _ = nix::unistd::read(&wait, &mut [0]);
            // SAFETY: ends the child without the harness's own ends.
            unsafe { libc::_exit(i32::from(flags & libc::O_PATH == 0)) }
        }
        ForkResult::Parent { child } => {
            drop(client);
            // The connection ends although the child lives.
            let mut theirs = UnixStream::from(theirs);
            theirs
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            let mut rest = Vec::new();
            let ended = theirs.read_to_end(&mut rest);
            ended.expect("the child keeps the connection open");
            assert!(rest.is_empty());
            drop(go);
            let status = waitpid(child, None).unwrap();
            assert_eq!(
                status,
                WaitStatus::Exited(child, 0),
                "the child had the socket"
            );
        }
    }
}
