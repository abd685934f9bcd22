//! Receive side scaling: which receive queue takes which flow.
//!
//! The device hashes addresses and ports of a received packet ([`HashTypes`] says of which packets)
//! with a key, and the low 7 bits of the hash name an entry of the indirection table, which names a
//! queue (82576 §7.1.2.8). What is not hashed goes to queue 0.
//!
//! A device spreads what it receives when it is opened with [`Config::rss`](crate::provider::Config):
//! the 82576 must not be told so while it receives. Key, hash types and table can be changed later,
//! by [`Device::set_rss`], and stay as they are across a recovery.
//!
//! # Queues that are not there
//!
//! A table entry that named a queue which does not run would lose its flows without a word. So the
//! device is never given one: an entry whose queue does not run names another of the queues that the
//! table names and that run, in turn, until its own queue starts. Where none of those runs, any that
//! runs stands in. A queue leaves the table before it is stopped, and enters it once its descriptors
//! are posted. Frames that were on their way to a queue that goes are that queue's, and go with it; no
//! other queue loses any.
//!
//! The hash itself is not handed out with a frame: the data path does not look at that word.

use bitflags::bitflags;
use thiserror::Error;

use crate::device::{Device, DeviceError};
use crate::provider::Provider;

/// Bytes of a key: a Toeplitz hash uses 4 more than what it hashes, 36 for IPv6 with ports.
pub const KEY_BYTES: usize = 40;
/// Entries of an indirection table.
pub const TABLE_ENTRIES: usize = 128;

/// The key of Microsoft's RSS verification suite, which most drivers use unless told otherwise. It
/// is public: whoever can choose addresses and ports can choose the queue. Use a random one where
/// that matters.
pub const MICROSOFT_KEY: [u8; KEY_BYTES] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

bitflags! {
    /// Which packets are hashed, and over what. A packet of several kinds counts as the most
    /// specific that is set; its addresses are always part.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct HashTypes: u32 {
        /// IPv4: both addresses.
        const IPV4 = 1 << 0;
        /// TCP over IPv4: addresses and ports.
        const TCP_IPV4 = 1 << 1;
        /// UDP over IPv4: addresses and ports. The later fragments of a datagram have no ports:
        /// they are hashed otherwise and may take another queue.
        const UDP_IPV4 = 1 << 2;
        /// IPv6: both addresses.
        const IPV6 = 1 << 3;
        /// TCP over IPv6: addresses and ports.
        const TCP_IPV6 = 1 << 4;
        /// UDP over IPv6: addresses and ports; as [`HashTypes::UDP_IPV4`].
        const UDP_IPV6 = 1 << 5;
    }
}

impl Default for HashTypes {
    /// Everything but UDP's ports, as Linux's igb does.
    fn default() -> Self {
        Self::IPV4 | Self::TCP_IPV4 | Self::IPV6 | Self::TCP_IPV6
    }
}

/// Which queue each value of a hash's low 7 bits leads to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Table(pub [u8; TABLE_ENTRIES]);

impl Table {
    /// Queues 0 to `queues` - 1 in turn. `queues` is at least 1 and at most 128: what is outside
    /// counts as the nearer of both.
    #[must_use]
    pub fn even(queues: u32) -> Self {
        let queues = queues.clamp(1, TABLE_ENTRIES as u32) as usize;
        Self(std::array::from_fn(|entry| (entry % queues) as u8))
    }

    /// One bit for each queue that it names.
    fn named(&self) -> u64 {
        let bit = |queue: &u8| 1u64.checked_shl((*queue).into()).unwrap_or(0);
        self.0.iter().map(bit).fold(0, |named, bit| named | bit)
    }
}

/// How received frames are spread over receive queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rss {
    /// The hash's key.
    pub key: [u8; KEY_BYTES],
    /// What is hashed.
    pub types: HashTypes,
    /// Which queue takes what. Without one, the queues of the last
    /// [`Port::open_many`](crate::port::Port::open_many) in turn; all that the part has, where nobody
    /// called it.
    pub table: Option<Table>,
}

impl Default for Rss {
    fn default() -> Self {
        Self {
            key: MICROSOFT_KEY,
            types: HashTypes::default(),
            table: None,
        }
    }
}

/// Frames are not spread like that. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RssError {
    /// The part, or this driver's provider for it, has no RSS.
    #[error("{device}: {part} has no RSS in this driver: open it without, and use its queue 0")]
    Unsupported {
        /// The function's name.
        device: String,
        /// The part.
        part: &'static str,
    },
    /// The device was opened without RSS, which cannot be turned on while it receives.
    #[error("{device}: opened without RSS: open it with `Config {{ rss: Some(..), .. }}`")]
    Off {
        /// The function's name.
        device: String,
    },
    /// The table names a queue that the part does not have.
    #[error(
        "{device}: entry {entry} of the RSS table names queue {queue}, the part has {queues}, numbered from 0"
    )]
    NoSuchQueue {
        /// The function's name.
        device: String,
        /// Which entry, from 0.
        entry: usize,
        /// The queue that it names.
        queue: u8,
        /// How many the part has.
        queues: u32,
    },
    /// Nothing would be hashed, so that everything would go to queue 0.
    #[error("{device}: no hash types are set: name at least one, or open the device without RSS")]
    NoHashTypes {
        /// The function's name.
        device: String,
    },
    /// The device is closed.
    #[error("{device}: closed; open it again")]
    Closed {
        /// The function's name.
        device: String,
    },
    /// A child of fork has copies of its parent's objects, and no device.
    #[error("{device}: it is driven by the process that this one was forked from")]
    Child {
        /// The function's name.
        device: String,
    },
}

impl Rss {
    /// Whether a part with `queues` receive queues can be told so.
    pub(crate) fn check(&self, device: &str, queues: u32) -> Result<(), RssError> {
        if self.types.is_empty() {
            let device = device.to_owned();
            return Err(RssError::NoHashTypes { device });
        }
        let entries = self.table.iter().flat_map(|table| table.0).enumerate();
        match entries
            .into_iter()
            .find(|(_, queue)| u32::from(*queue) >= queues)
        {
            None => Ok(()),
            Some((entry, queue)) => Err(RssError::NoSuchQueue {
                device: device.to_owned(),
                entry,
                queue,
                queues,
            }),
        }
    }
}

/// The Toeplitz hash of `input`: what the device computes of a packet's source address, destination
/// address, source port and destination port, big-endian and without gaps; the ports where its
/// [`HashTypes`] say so. For whoever wants to know which queue a flow takes: the low 7 bits of the
/// hash are the entry of the [`Table`]. What is beyond 36 bytes has no key, and does not count.
#[must_use]
pub fn toeplitz(key: &[u8; KEY_BYTES], input: &[u8]) -> u32 {
    let mut hash = 0;
    for (at, byte) in input.iter().enumerate() {
        let Some(window) = key.get(at..at + 5) else {
            break;
        };
        let window = window
            .iter()
            .fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
        for bit in 0..8 {
            if byte >> (7 - bit) & 1 != 0 {
                hash ^= (window >> (8 - bit)) as u32;
            }
        }
    }
    hash
}

/// What a device is told, in whichever life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Settings {
    pub(crate) rss: Rss,
    /// How many queues take part where no table says which.
    pub(crate) over: u32,
}

impl Settings {
    fn wanted(&self) -> Table {
        self.rss.table.unwrap_or_else(|| Table::even(self.over))
    }
}

/// What one life of a device was told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) settings: Settings,
    /// One bit for each receive queue that has its descriptors.
    pub(crate) running: u64,
}

impl Spread {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            running: 0,
        }
    }

    pub(crate) fn tell(&self, provider: &mut dyn Provider) {
        if let Some(table) = self.table() {
            provider.set_rss_table(&table);
        }
    }

    /// The table that the device gets: the one that is wanted, without queues that do not run. The
    /// same for the same queues, in whichever order they started. None while no queue runs: there is
    /// nothing that could be lost.
    pub(crate) fn table(&self) -> Option<Table> {
        let wanted = self.settings.wanted();
        // Where none of the table's queues runs, any that does: what the device has may name one that
        // is about to be stopped.
        let there = match self.running & wanted.named() {
            0 => self.running,
            there => there,
        };
        let stands_in: Vec<u8> = (0..64).filter(|queue| there >> queue & 1 != 0).collect();
        if stands_in.is_empty() {
            return None;
        }
        let mut turn = stands_in.iter().cycle();
        let mut queue = |wanted: u8| match there >> wanted & 1 {
            0 => turn.next().copied().unwrap_or(wanted),
            _ => wanted,
        };
        Some(Table(wanted.0.map(&mut queue)))
    }
}

impl Device {
    /// How received frames are spread; none of a device that was opened without RSS, and in a child of
    /// fork, which has no device.
    #[must_use]
    pub fn rss(&self) -> Option<Rss> {
        // First: a lock may be held by a thread that only the parent has.
        self.check_ours().ok()?;
        let settings = self.inner.rss();
        settings.map(|settings| settings.rss)
    }

    /// Spreads received frames otherwise, from any thread and in traffic: a frame that is on its way
    /// takes the old way or the new. A broken device is told with its next life.
    ///
    /// # Errors
    ///
    /// [`RssError`]; nothing has changed then.
    pub fn set_rss(&self, rss: &Rss) -> Result<(), RssError> {
        self.check_ours()?;
        rss.check(self.name(), self.limits().queues)?;
        self.change_rss(|settings| settings.rss = *rss)
    }

    /// Without a table, queues 0 to `queues` - 1 take part.
    pub(crate) fn spread_over(&self, queues: u32) -> Result<(), RssError> {
        self.change_rss(|settings| settings.over = queues)
    }

    /// Whether it spreads what it receives.
    pub(crate) fn check_spreads(&self) -> Result<(), RssError> {
        self.check_ours()?;
        match self.inner.rss().is_some() {
            true => Ok(()),
            false => Err(RssError::Off {
                device: self.name().to_owned(),
            }),
        }
    }

    pub(crate) fn check_ours(&self) -> Result<(), RssError> {
        if self.inner.is_ours() {
            return Ok(());
        }
        Err(RssError::Child {
            device: self.name().to_owned(),
        })
    }

    fn change_rss(&self, change: impl FnOnce(&mut Settings)) -> Result<(), RssError> {
        self.check_ours()?;
        if let Err(DeviceError::Closed { device }) = self.life().check() {
            return Err(RssError::Closed { device });
        }
        let mut kept = self.inner.rss();
        let settings = kept.as_mut().ok_or_else(|| RssError::Off {
            device: self.name().to_owned(),
        })?;
        change(settings);
        // Not held while the device is told: a recovery asks for it, and waits for nobody's access.
        drop(kept);
        self.inner.tell_rss();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(table: Option<Table>, over: u32, running: &[u32]) -> Option<Table> {
        let rss = Rss {
            table,
            ..Rss::default()
        };
        let mut spread = Spread::new(Settings { rss, over });
        spread.running = running.iter().map(|queue| 1 << queue).sum();
        spread.table()
    }

    fn spread(table: Option<Table>, over: u32, running: &[u32]) -> [u8; TABLE_ENTRIES] {
        told(table, over, running).unwrap().0
    }

    fn share(table: &[u8], queue: u8) -> usize {
        table.iter().filter(|&&named| named == queue).count()
    }

    #[test]
    fn queues_that_run_take_turns() {
        let table = spread(None, 16, &(0..16).collect::<Vec<_>>());
        assert_eq!(
            table[..18],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1]
        );
        assert_eq!(table, Table::even(16).0);
    }

    #[test]
    fn no_entry_names_a_queue_that_does_not_run() {
        let table = spread(None, 4, &[0, 2]);
        assert_eq!(share(&table, 0) + share(&table, 2), TABLE_ENTRIES);
        assert_eq!(share(&table, 0), share(&table, 2));
    }

    #[test]
    fn a_queue_that_goes_moves_no_entry_of_another() {
        let (before, after) = (spread(None, 4, &[0, 1, 2, 3]), spread(None, 4, &[0, 1, 3]));
        let moved = before.iter().zip(after).filter(|(was, is)| **was != *is);
        assert!(moved.into_iter().all(|(was, _)| *was == 2));
    }

    #[test]
    fn a_queue_that_the_table_leaves_out_stands_in_for_none() {
        let table = spread(Some(Table::even(2)), 16, &[1, 5]);
        assert_eq!(table, [1; TABLE_ENTRIES]);
    }

    #[test]
    fn without_any_queue_the_device_is_told_nothing() {
        assert_eq!(told(None, 4, &[]), None);
    }

    #[test]
    fn where_no_queue_of_the_table_runs_those_that_run_stand_in() {
        assert_eq!(spread(None, 4, &[7]), [7; TABLE_ENTRIES]);
        let table = spread(Some(Table([9; TABLE_ENTRIES])), 16, &[0, 1]);
        assert_eq!(share(&table, 0), share(&table, 1));
    }

    #[test]
    fn a_table_with_a_queue_too_many_is_refused_by_name() {
        let rss = Rss {
            table: Some(Table::even(16)),
            ..Rss::default()
        };
        assert_eq!(rss.check("nic", 16), Ok(()));
        assert_eq!(
            rss.check("nic", 8).unwrap_err().to_string(),
            "nic: entry 8 of the RSS table names queue 8, the part has 8, numbered from 0"
        );
    }

    // Microsoft's verification suite, "Verifying the RSS hash calculation".
    #[test]
    fn the_hash_is_the_published_one() {
        let addresses = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(toeplitz(&MICROSOFT_KEY, &addresses), 0x323e_8fc2);
        let ports = [0x0a, 0xea, 0x06, 0xe6];
        let input = [&addresses[..], &ports].concat();
        assert_eq!(toeplitz(&MICROSOFT_KEY, &input), 0x51cc_c178);
    }

    #[test]
    fn hashing_nothing_is_refused() {
        let rss = Rss {
            types: HashTypes::empty(),
            ..Rss::default()
        };
        assert!(matches!(
            rss.check("nic", 16),
            Err(RssError::NoHashTypes { .. })
        ));
    }
}
