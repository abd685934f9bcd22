//! Numbered frames: which are on their way, and which of those that come back nobody sent.

use std::collections::BTreeSet;

use failstop::dma::frame::Frame;
use failstop::port::Port;
use failstop::provider::MacAddress;

/// Bytes of each, without the frame check sequence.
pub(crate) const LEN: usize = 64;
/// Where the number stands, behind the header.
const NUMBER: usize = 14;
/// Local experimental ethertype 1 of IEEE 802.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// The frames of one device.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    mac: [u8; 6],
    sent: u32,
    received: u64,
    /// Of those received, how many a scenario asked for already.
    taken: u64,
    wrong: u64,
    owed: BTreeSet<u32>,
    /// Those that were on their way when the device broke: they may come, once, or not.
    given_up: BTreeSet<u32>,
}

impl Frames {
    /// Frames that a device with this address sends to itself.
    pub(crate) fn of(mac: MacAddress) -> Self {
        Self {
            mac: mac.0,
            ..Self::default()
        }
    }

    /// Frames that did not come back, and that no break excuses.
    pub(crate) fn owed(&self) -> usize {
        self.owed.len()
    }

    pub(crate) const fn sent(&self) -> u64 {
        self.sent as u64
    }

    pub(crate) const fn received(&self) -> u64 {
        self.received
    }

    /// Frames that came back with other bytes, or again.
    pub(crate) const fn wrong(&self) -> u64 {
        self.wrong
    }

    /// Whether so many came that nobody asked for yet.
    pub(crate) fn taken(&self, frames: u32) -> bool {
        self.received >= self.taken + u64::from(frames)
    }

    /// Somebody asked for so many, as far as they came.
    pub(crate) fn take(&mut self, frames: u32) {
        self.taken = self.received.min(self.taken + u64::from(frames));
    }

    /// What is on its way may be lost.
    pub(crate) fn give_up(&mut self) {
        self.given_up.append(&mut self.owed);
    }

    fn bytes(&self, number: u32) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..6].copy_from_slice(&self.mac);
        bytes[6..12].copy_from_slice(&self.mac);
        bytes[12..NUMBER].copy_from_slice(&ETHERTYPE);
        bytes[NUMBER..NUMBER + 4].copy_from_slice(&number.to_le_bytes());
        for (at, byte) in bytes.iter_mut().enumerate().skip(NUMBER + 4) {
            *byte = (number as u8).wrapping_mul(31).wrapping_add(at as u8);
        }
        bytes
    }

    /// Sends up to so many; how many the queue took.
    pub(crate) fn send(&mut self, port: &mut Port, frames: usize) -> usize {
        let Some(mut burst) = port.take_frames(frames) else {
            return 0;
        };
        for (frame, number) in burst.iter_mut().zip(self.sent..) {
            // It is shorter than any frame of a port.
            let _ = frame.fill(&self.bytes(number));
        }
        let sent = port.tx_burst(&mut burst);
        let next = self.sent.wrapping_add(sent as u32);
        self.owed.extend(self.sent..next);
        self.sent = next;
        sent
    }

    /// Takes up to so many that came, and looks at them; how many.
    pub(crate) fn collect(&mut self, port: &mut Port, frames: usize) -> usize {
        let Some(mut burst) = port.take_frames(frames) else {
            return 0;
        };
        let received = port.rx_burst(&mut burst);
        burst[..received].iter().for_each(|frame| self.look(frame));
        received
    }

    fn look(&mut self, frame: &Frame) {
        self.received += 1;
        let mut bytes = [0; LEN];
        let whole = frame.copy_to(&mut bytes) == LEN && frame.len() as usize == LEN;
        let mut number = [0; 4];
        number.copy_from_slice(&bytes[NUMBER..NUMBER + 4]);
        let number = u32::from_le_bytes(number);
        let known = self.owed.remove(&number) || self.given_up.remove(&number);
        if !whole || !known || bytes != self.bytes(number) {
            self.wrong += 1;
        }
    }
}
