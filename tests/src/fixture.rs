//! What a case is run on.

use std::env;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use failstop::device::{CloseReport, Device};
use failstop::dma::frame::Frame;
use failstop::name::DeviceName;
use failstop::open::{self, IommuChoice};
use failstop::pci::transport::Transport;
use failstop::port::Port;
use failstop::provider::Config;
use libtest_mimic::Failed;

/// How a case ends: it holds, or why not.
pub type Outcome = Result<(), Failed>;

/// Fails the case unless `holds`.
///
/// # Errors
///
/// The message, when it does not.
pub fn ensure(holds: bool, message: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(message().into()) }
}

/// Fails the case unless both are equal.
///
/// # Errors
///
/// A message with both, when they are not.
pub fn ensure_eq<T: PartialEq + std::fmt::Debug>(found: T, expected: T, what: &str) -> Outcome {
    ensure(found == expected, || {
        format!("{what}: found {found:?}, expected {expected:?}")
    })
}

/// The device that a case drives.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// Its name.
    pub device: DeviceName,
    /// How to reach the IOMMU, where there is one.
    pub iommu: IommuChoice,
}

impl Fixture {
    /// The device that the environment names: `FAILSTOP_DEVICE`, and `FAILSTOP_IOMMU` (auto,
    /// container or iommufd).
    ///
    /// # Errors
    ///
    /// When it names none.
    pub fn from_environment() -> Result<Self, Failed> {
        let device =
            env::var("FAILSTOP_DEVICE").map_err(|_| "FAILSTOP_DEVICE names the device to test")?;
        let iommu = env::var("FAILSTOP_IOMMU").unwrap_or_else(|_| "auto".to_owned());
        Ok(Self {
            device: device.parse()?,
            iommu: iommu.parse()?,
        })
    }

    /// Reaches the device.
    ///
    /// # Errors
    ///
    /// When that fails.
    pub fn transport(&self) -> Result<Arc<dyn Transport>, Failed> {
        Ok(open::transport(&self.device, self.iommu, &[])?)
    }

    /// Opens the device in loopback.
    ///
    /// # Errors
    ///
    /// When that fails.
    pub fn open(&self) -> Result<Device, Failed> {
        self.open_with(&Config {
            loopback: true,
            ..Config::default()
        })
    }

    /// Opens the device as `config` says.
    ///
    /// # Errors
    ///
    /// When that fails.
    pub fn open_with(&self, config: &Config) -> Result<Device, Failed> {
        Ok(Device::open(self.transport()?, config)?)
    }
}

/// Closes a device and makes sure that nothing of it is left and every request ended once.
///
/// # Errors
///
/// What is left.
pub fn close_clean(device: Device) -> Result<CloseReport, Failed> {
    let report = device.close();
    ensure_eq(report.left.clone(), Vec::new(), "ledger after close")?;
    ensure_eq(report.totals.live_bytes, 0, "live bytes after close")?;
    ensure_eq(report.broken.clone(), None, "broken")?;
    let c = report.completions;
    ensure_eq(
        c.posted,
        c.success + c.error + c.flushed,
        "posted = success + error + flushed",
    )?;
    Ok(report)
}

/// A frame of `len` bytes to the device itself, filled from `seed`.
#[must_use]
pub fn self_addressed(device: &Device, len: usize, seed: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(&device.mac().0);
    bytes.extend_from_slice(&device.mac().0);
    bytes.extend_from_slice(&[0x88, 0xB5]);
    bytes.extend((bytes.len()..len).map(|at| (at as u8).wrapping_mul(7).wrapping_add(seed)));
    bytes
}

/// Sends `bytes` as one frame.
///
/// # Errors
///
/// When there is no frame or no room.
pub fn send(port: &mut Port, bytes: &[u8]) -> Outcome {
    let mut frame = port.take_frame().ok_or("no frame to send")?;
    frame.fill(bytes)?;
    let sent = port.tx_burst(std::slice::from_mut(&mut frame));
    ensure_eq(sent, 1, "frames sent")
}

/// Receives one frame's bytes, waiting for it a while.
///
/// # Errors
///
/// When none comes.
pub fn receive(port: &mut Port) -> Result<Vec<u8>, Failed> {
    let mut frames: Vec<Frame> = port.take_frames(1).ok_or("no frame to receive into")?;
    let end = Instant::now() + Duration::from_secs(5);
    while port.rx_burst(&mut frames) == 0 {
        if Instant::now() > end {
            return Err("no frame came within 5 s".into());
        }
        std::thread::yield_now();
    }
    let mut bytes = vec![0; frames[0].len() as usize];
    frames[0].copy_to(&mut bytes);
    Ok(bytes)
}

/// Large pages in reserve, in a guest of the QEMU tier; given back when dropped.
///
/// QEMU's NICs drop a frame whose buffer is not contiguous in the guest's memory, which a buffer of
/// more than a base page often is not.
#[derive(Debug)]
pub struct LargePages {
    former: Option<String>,
}

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

impl LargePages {
    /// Reserves `pages` of 2 MiB, if this is such a guest.
    ///
    /// # Errors
    ///
    /// When the guest does not have them.
    pub fn in_guest(pages: u32) -> Result<Self, Failed> {
        if env::var_os("FAILSTOP_TOPOLOGY").is_none() {
            return Ok(Self { former: None });
        }
        let former = fs::read_to_string(RESERVED)?;
        fs::write(RESERVED, pages.to_string())?;
        let reserved = Self {
            former: Some(former),
        };
        let got: u32 = fs::read_to_string(RESERVED)?.trim().parse()?;
        ensure(got >= pages, || {
            format!("{got} of {pages} large pages could be reserved")
        })?;
        Ok(reserved)
    }
}

impl Drop for LargePages {
    fn drop(&mut self) {
        if let Some(former) = &self.former
            && let Err(error) = fs::write(RESERVED, former.trim())
        {
            eprintln!("{RESERVED} was not restored: {error}");
        }
    }
}
