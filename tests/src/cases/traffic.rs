//! Frames, sent to ourselves.

use std::time::{Duration, Instant};

use failstop::device::Device;
use failstop::port::{Port, PortConfig};
use failstop::provider::Config;

use crate::fixture::{
    Fixture, LargePages, Outcome, close_clean, ensure, ensure_eq, receive, self_addressed, send,
};

const BURST: usize = 32;

/// Sends `total` frames in bursts and checks each that comes back.
fn pump(device: &Device, port: &mut Port, total: u64) -> Outcome {
    let mut outgoing = port.take_frames(BURST).ok_or("no frames")?;
    let mut incoming = port.take_frames(BURST).ok_or("no frames")?;
    let (mut sent, mut received) = (0, 0);
    let mut copy = vec![0; 60];
    let mut end = Instant::now() + Duration::from_secs(10);
    while received < total {
        if sent < total && sent - received < 128 {
            for (at, frame) in outgoing.iter_mut().enumerate() {
                let mut bytes = self_addressed(device, 60, 0);
                bytes[14..22].copy_from_slice(&(sent + at as u64).to_le_bytes());
                frame.fill(&bytes)?;
            }
            let count = outgoing.len().min((total - sent) as usize);
            sent += port.tx_burst(&mut outgoing[..count]) as u64;
        }
        let count = port.rx_burst(&mut incoming);
        for frame in &incoming[..count] {
            frame.copy_to(&mut copy);
            let mut bytes = self_addressed(device, 60, 0);
            bytes[14..22].copy_from_slice(&received.to_le_bytes());
            ensure(copy == bytes, || {
                format!("frame {received} came back changed")
            })?;
            received += 1;
        }
        if count > 0 {
            end = Instant::now() + Duration::from_secs(10);
        } else {
            ensure(Instant::now() < end, || {
                format!("{received} of {sent} frames came back")
            })?;
            std::thread::yield_now();
        }
    }
    Ok(())
}

pub(super) fn ten_thousand_frames_come_back_unchanged(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    pump(&device, &mut port, 10_000)?;
    let completions = port.completions();
    drop(port);
    let report = close_clean(device)?;
    ensure_eq(completions.success, 20_000, "successful requests")?;
    ensure_eq(
        report.completions.success,
        20_000,
        "successful requests after close",
    )
}

pub(super) fn every_length_comes_back_unchanged(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    for len in (60..=1518).step_by(27) {
        let bytes = self_addressed(&device, len, len as u8);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    }
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn jumbo_frames_come_back_whole(fixture: &Fixture) -> Outcome {
    let _large = LargePages::in_guest(8)?;
    let config = Config {
        loopback: true,
        longest_frame: 9000,
        ..Config::default()
    };
    let device = fixture.open_with(&config)?;
    // Few of them: some devices need room for the longest frame that they could take, 16 KiB. Not too
    // few: large pages are for 2 MiB and more, and QEMU drops what is not contiguous.
    let mut port = Port::open(
        &device,
        &PortConfig {
            rx_entries: 64,
            tx_entries: 64,
            frame_size: device.least_frame_size(),
            spare_frames: 192,
        },
    )?;
    for len in [60, 1519, 4096, 9000] {
        let bytes = self_addressed(&device, len, len as u8);
        send(&mut port, &bytes)?;
        ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    }
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn frames_that_cannot_be_sent_are_refused(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    let mut empty = port.take_frames(1).ok_or("no frame")?;
    ensure_eq(port.tx_burst(&mut empty), 0, "an empty frame sent")?;
    let pd = device.alloc_pd()?;
    let (region, mut pool) = pd.register(1, 2048)?;
    let mut foreign = pool.take().ok_or("no frame")?;
    foreign.fill(&self_addressed(&device, 60, 1))?;
    ensure_eq(
        port.tx_burst(std::slice::from_mut(&mut foreign)),
        0,
        "a foreign frame sent",
    )?;
    ensure_eq(port.sq().refused(), 2, "refusals counted")?;
    // The device is none the worse for it.
    let bytes = self_addressed(&device, 60, 2);
    send(&mut port, &bytes)?;
    ensure_eq(receive(&mut port)?, bytes, "the frame")?;
    drop((empty, foreign, pool, region, pd, port));
    close_clean(device).map(drop)
}

pub(super) fn frames_are_conserved(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let config = PortConfig::default();
    let mut port = Port::open(&device, &config)?;
    let total = config.rx_entries + config.tx_entries + config.spare_frames;
    pump(&device, &mut port, 1000)?;
    // C13: what is not in the rings can be taken, and nothing more.
    let all = port
        .take_frames(config.spare_frames as usize)
        .ok_or("frames are missing")?;
    ensure(port.take_frame().is_none(), || "a frame too many".into())?;
    ensure_eq(
        port.census().map(|census| census.total),
        Some(total),
        "frames of the region",
    )?;
    drop((all, port));
    close_clean(device).map(drop)
}

pub(super) fn the_device_counts_what_we_sent(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let mut port = Port::open(&device, &PortConfig::default())?;
    pump(&device, &mut port, 500)?;
    let counted = device.statistics();
    ensure_eq(
        counted.tx_frames,
        500,
        "frames that the device counts as sent",
    )?;
    ensure_eq(
        counted.rx_frames,
        500,
        "frames that the device counts as received",
    )?;
    drop(port);
    close_clean(device).map(drop)
}

pub(super) fn other_stations_frames_need_promiscuous_mode(fixture: &Fixture) -> Outcome {
    let stranger = |device: &Device, seed| {
        let mut bytes = self_addressed(device, 60, seed);
        bytes[..6].copy_from_slice(&[0x02, 0xFA, 0x11, 0x57, 0x0B, 0x01]);
        bytes
    };
    for promiscuous in [false, true] {
        let config = Config {
            loopback: true,
            promiscuous,
            ..Config::default()
        };
        let device = fixture.open_with(&config)?;
        let mut port = Port::open(&device, &PortConfig::default())?;
        let (other, own) = (stranger(&device, 1), self_addressed(&device, 60, 2));
        send(&mut port, &other)?;
        send(&mut port, &own)?;
        if promiscuous {
            ensure_eq(receive(&mut port)?, other, "the stranger's frame")?;
        }
        ensure_eq(receive(&mut port)?, own, "our frame")?;
        drop(port);
        close_clean(device)?;
    }
    Ok(())
}

pub(super) fn unsent_requests_are_flushed_once(fixture: &Fixture) -> Outcome {
    let device = fixture.open()?;
    let config = PortConfig::default();
    let port = Port::open(&device, &config)?;
    drop(port);
    let report = close_clean(device)?;
    // Every receive descriptor but the gap was posted, and none was used.
    ensure_eq(
        report.completions.flushed,
        u64::from(config.rx_entries) - 1,
        "flushed requests",
    )
}
