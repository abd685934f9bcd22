//! What the emulator counts, as tests and people read it over the control socket.

use serde::{Deserialize, Serialize};

/// How many addresses of stray accesses are kept: the latest.
pub const KEPT_ADDRESSES: usize = 16;

/// What the device did, since it was made or since the counters were reset.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceCounters {
    /// Frames sent, by wire or loopback.
    pub tx_frames: u64,
    /// Bytes of them, without frame check sequence.
    pub tx_bytes: u64,
    /// Frames written to memory.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Frames that arrived and were not written: filtered, too long, no link, queue off, no room.
    pub rx_dropped: u64,
    /// Interrupt messages sent.
    pub interrupts: u64,
    /// Reads that were aborted; each wedged a queue.
    pub aborts: u64,
    /// CTRL.RST.
    pub software_resets: u64,
    /// Function level resets that happened, by DevCtl, by the server's reset command, or when a
    /// client went.
    pub function_resets: u64,
    /// Returns from D3hot.
    pub power_ups: u64,
    /// Accesses that a fault made after a queue was told to stop.
    pub runaway_accesses: u64,
}

/// DMA that reached memory.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct DmaCounters {
    /// Read requests.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
}

/// DMA outside what the client had mapped at that moment: never performed.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct StrayDma {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Where the latest ones went, oldest first.
    pub addresses: Vec<u64>,
    /// Requests to mappings that came without a descriptor: mapped, but out of our reach. Not
    /// stray.
    pub unreachable: u64,
}

impl StrayDma {
    /// Requests of both kinds.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.reads + self.writes
    }

    pub(crate) fn note(&mut self, iova: u64, len: usize, write: bool) {
        if write {
            self.writes += 1;
        } else {
            self.reads += 1;
        }
        self.bytes += len as u64;
        if self.addresses.len() == KEPT_ADDRESSES {
            self.addresses.remove(0);
        }
        self.addresses.push(iova);
    }
}

/// DMA that faults made: after a stop, late, or to where nothing was ever given. It is part of what
/// [`DmaCounters`] and [`StrayDma`] count.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct RogueDma {
    /// Accesses that met no mapping: the translation layer did not perform them.
    pub blocked: u64,
    /// Accesses that met another mapping than the one that they were meant for: an old address in
    /// somebody else's memory.
    pub reached: u64,
    /// Accesses to the mapping that they were meant for, while it still was there.
    pub late: u64,
}

/// What became of an access that a fault made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// [`RogueDma::blocked`].
    Blocked,
    /// [`RogueDma::reached`].
    Reached,
    /// [`RogueDma::late`].
    Late,
    /// No access: a mark that the control socket's `phase` made.
    Phase,
}

/// A line of the log of accesses that faults made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogEntry {
    /// Its number, from 0 since the device was made.
    pub n: u64,
    /// Microseconds since the device was made.
    pub us: u64,
    /// What made it (`rx 0`, `tx 3`, `late`, `outside` ...), or the word of a mark.
    pub what: String,
    /// Whether it wrote.
    pub write: bool,
    /// Where.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// The mapping that it was meant for, if there was one.
    pub meant: Option<u64>,
    /// The mapping that it met, if there was one.
    pub met: Option<u64>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What the client has mapped, and what it asked for.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerCounters {
    /// Clients served, the present one included.
    pub clients: u64,
    /// Messages handled.
    pub messages: u64,
    /// Commands answered with an error.
    pub refused: u64,
    /// Mappings now.
    pub mappings: u64,
    /// Bytes mapped now.
    pub mapped_bytes: u64,
    /// Most mappings at once.
    pub peak_mappings: u64,
    /// Frames that the wire lost because its queue was full.
    pub wire_dropped: u64,
}

/// Everything.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// The device.
    pub device: DeviceCounters,
    /// DMA that reached memory.
    pub dma: DmaCounters,
    /// DMA that did not.
    pub stray: StrayDma,
    /// DMA that faults made.
    pub rogue: RogueDma,
    /// The server.
    pub server: ServerCounters,
    /// Whether the function may issue requests now.
    pub bus_master: bool,
    /// Whether STATUS says that the link is up.
    pub link: bool,
    /// Queues that are enabled or cannot be stopped now, receive then transmit.
    pub queues: (u32, u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_stray_addresses_are_kept() {
        let mut stray = StrayDma::default();
        for iova in 0..20 {
            stray.note(iova, 8, true);
        }
        assert_eq!((stray.total(), stray.addresses.len()), (20, KEPT_ADDRESSES));
        assert_eq!(stray.addresses.last(), Some(&19));
    }

    #[test]
    fn stats_survive_json() {
        let stats = Stats {
            link: true,
            ..Stats::default()
        };
        let json = serde_json::to_string(&stats).unwrap();
        assert_eq!(serde_json::from_str::<Stats>(&json).unwrap(), stats);
    }
}
