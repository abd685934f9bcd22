//! Our side: smoltcp on a port, with a recording of all that the port receives.

use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;
use failstop::smoltcp::{PortDevice, STANDARD_FRAME};
use libtest_mimic::Failed;
use smoltcp::iface::{self, Interface, SocketSet};
use smoltcp::phy::{PcapMode, PcapWriter};
use smoltcp::time;
use smoltcp::wire::{EthernetAddress, IpCidr, Ipv4Address};

use super::OUR_ADDRESS;
use crate::fixture::{Fixture, ensure};

/// How long the stack may sleep while others, whom it cannot hear, decide what comes next.
const TICK: time::Duration = time::Duration::from_millis(10);
/// How long a wire is quiet when all is said.
const QUIET: Duration = Duration::from_millis(300);

/// Opens the device on its wire, not in loopback, and waits for its link. It receives whatever is
/// on the wire, as the capture on the other side does.
pub(super) fn open(fixture: &Fixture) -> Result<Device, Failed> {
    let config = Config {
        promiscuous: true,
        ..Config::default()
    };
    let device = fixture.open_with(&config)?;
    let link = device.wait_link(Duration::from_secs(20));
    ensure(link.up, || format!("link {link}"))?;
    Ok(device)
}

/// A TCP/IP stack on a port of a device.
pub(super) struct Stack<'a> {
    device: &'a Device,
    phy: PcapWriter<PortDevice, &'a mut Vec<u8>>,
    interface: Interface,
    /// Its sockets.
    pub(super) sockets: SocketSet<'a>,
}

impl<'a> Stack<'a> {
    /// A stack on a new port of `device`, which records what it receives, as pcap.
    pub(super) fn new(device: &'a Device, recording: &'a mut Vec<u8>) -> Result<Self, Failed> {
        let port = Port::open(device, &PortConfig::default())?;
        let phy = PortDevice::new(port, STANDARD_FRAME)?;
        let mut phy = PcapWriter::new(phy, recording, PcapMode::RxOnly);
        let mut config = iface::Config::new(EthernetAddress::from(device.mac()).into());
        config.random_seed = 1;
        let mut interface = Interface::new(config, &mut phy, time::Instant::now());
        let address: Ipv4Address = OUR_ADDRESS.parse()?;
        let mut added = Ok(());
        interface.update_ip_addrs(|addresses| {
            added = addresses.push(IpCidr::new(address.into(), 24));
        });
        added.map_err(|_| "no room for an address")?;
        Ok(Self {
            device,
            phy,
            interface,
            sockets: SocketSet::new(Vec::new()),
        })
    }

    /// Serves the stack until `step` says that all is done, at most `limit`.
    pub(super) fn run(
        &mut self,
        limit: Duration,
        mut step: impl FnMut(&mut SocketSet<'a>) -> Result<bool, Failed>,
    ) -> Result<(), Failed> {
        let end = Instant::now() + limit;
        loop {
            let now = time::Instant::now();
            self.interface.poll(now, &mut self.phy, &mut self.sockets);
            if step(&mut self.sockets)? {
                self.phy.get_mut().flush();
                return Ok(());
            }
            if let Some(cause) = self.device.broken() {
                return Err(format!("the device is broken: {cause}").into());
            }
            if Instant::now() > end {
                return Err(format!("not done within {limit:?}").into());
            }
            let delay = self.interface.poll_delay(now, &self.sockets);
            let delay = delay.map_or(TICK, |delay| delay.min(TICK));
            self.phy.get_mut().wait(Some(delay))?;
        }
    }

    /// Serves the stack until nothing was received for a while.
    pub(super) fn settle(&mut self) -> Result<(), Failed> {
        let mut last = self.received();
        let mut since = Instant::now();
        loop {
            self.run(QUIET, |_| Ok(true))?;
            self.phy.get_mut().wait(Some(TICK))?;
            let now = self.received();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() > QUIET {
                return Ok(());
            }
        }
    }

    /// Frames that the port received.
    fn received(&mut self) -> u64 {
        self.phy.get_mut().port().rq().completions().success
    }
}
