//! What a NIC does for the kernel's stack, switched off: frames are then on the wire as a capture
//! shows them.
#![expect(
    unsafe_code,
    reason = "the ioctl behind ethtool has no safe wrapper that works without netlink"
)]

use std::ffi::c_char;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Commands of linux/ethtool.h that switch an offload: its name and `ETHTOOL_S*`.
const OFFLOADS: &[(&str, u32)] = &[
    // The checksum of what is sent: a capture shows frames before the NIC fills it in.
    ("tx checksum", 0x17),
    // Segmentation and aggregation: a capture shows many frames as one.
    ("tcp segmentation", 0x1f),
    ("generic segmentation", 0x24),
    ("generic receive", 0x2c),
];

/// Switches every offload of the interface off that changes what a capture shows.
///
/// # Errors
///
/// The kernel's, with the offload's name. One that the interface does not have is off.
pub(super) fn switch_off(interface: &str) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    for &(name, command) in OFFLOADS {
        match set(&socket, interface, Value { command, data: 0 }) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            other => other.map_err(|error| {
                io::Error::new(error.kind(), format!("{name} offload: {error}"))
            })?,
        }
    }
    Ok(())
}

fn set(socket: &UdpSocket, interface: &str, mut value: Value) -> io::Result<()> {
    let mut name = [0; libc::IFNAMSIZ];
    // One byte stays zero, as the kernel wants it.
    for (to, from) in name[..libc::IFNAMSIZ - 1].iter_mut().zip(interface.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    let mut request = libc::ifreq {
        ifr_name: name,
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_data: (&raw mut value).cast(),
        },
    };
    // SAFETY: SIOCETHTOOL takes an `ifreq` whose data points to a structure that begins with a
    // command; those of OFFLOADS read an `ethtool_value`. Both live until the call returns.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
