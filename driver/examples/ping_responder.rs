//! Answers ARP and ping on a network function:
//!
//! ```sh
//! failstop bind 0000:01:00.0
//! cargo run --release -p failstop --features smoltcp --example ping_responder -- 0000:01:00.0 192.0.2.2/24
//! ```
//!
//! and from the machine at the other end of the cable, `ping 192.0.2.2`. Ctrl-C ends it; the kernel
//! then stops the function.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use failstop::device::Device;
use failstop::name::DeviceName;
use failstop::open::{IommuChoice, transport};
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::smoltcp::{PortDevice, STANDARD_FRAME};
use smoltcp::iface::{self, Interface, SocketSet};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpCidr};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, address] = arguments.as_slice() else {
        bail!("usage: ping_responder DEVICE ADDRESS/PREFIX, such as 0000:01:00.0 192.0.2.2/24");
    };
    let name: DeviceName = name.parse()?;
    let address: IpCidr = address
        .parse()
        .map_err(|()| anyhow!("`{address}` is no IPv4 address with a prefix length"))?;

    let device = Device::open(
        transport(&name, IommuChoice::default(), &[])?,
        &Config::default(),
    )?;
    let link = device.wait_link(Duration::from_secs(10));
    println!(
        "{}, {}: {address} at {}, link {link}",
        device.name(),
        device.part(),
        device.mac()
    );

    let port = Port::open(&device, &PortConfig::default())?;
    let mut phy = PortDevice::new(port, STANDARD_FRAME)?;
    let config = iface::Config::new(EthernetAddress::from(device.mac()).into());
    let mut interface = Interface::new(config, &mut phy, Instant::now());
    interface.update_ip_addrs(|addresses| {
        addresses.push(address).expect("it is the first of them");
    });

    // The interface itself answers ARP and echo requests.
    let mut sockets = SocketSet::new(Vec::new());
    while device.broken().is_none() {
        let now = Instant::now();
        interface.poll(now, &mut phy, &mut sockets);
        phy.wait(interface.poll_delay(now, &sockets))?;
    }
    let cause = device.broken().context("it is broken")?;
    bail!("{} is broken: {cause}", device.name())
}
