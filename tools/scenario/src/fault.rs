//! What can go wrong, as values. [`TABLE`](crate::table::TABLE) says of each what it does, how it is
//! written and what ends it.

use std::fmt;
use std::time::Duration;

use crate::errno::Errno;
use crate::words::words;

/// How a queue is stuck.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Stuck {
    /// It issues no DMA.
    pub quiet: bool,
    /// CTRL.RST ends it, not only a function level reset.
    pub until_rst: bool,
}

words! {
    /// Where DMA outside what was given goes.
    Outside {
        /// Reads of addresses far away.
        Read = "read",
        /// Writes to addresses far away.
        Write = "write",
        /// Reads and writes next to what was given: where guard pages are.
        Guard = "guard",
    }
}

words! {
    /// Which event a storm of interrupts fires.
    Storm {
        /// Every MSI-X vector.
        MsiX = "msix",
        /// The error event.
        Error = "error",
        /// The request to give the function back.
        Request = "request",
    }
}

words! {
    /// In which state the server leaves eventfds that it shares with its client.
    Block {
        /// Filled to the brim: one more signal blocks.
        Full = "full",
        /// Read empty: taking a signal blocks.
        Empty = "empty",
    }
}

words! {
    /// A kind of vfio-user message.
    MessageType {
        /// Agreement on a version.
        Version = "version",
        /// DMA_MAP.
        Map = "map",
        /// DMA_UNMAP.
        Unmap = "unmap",
        /// DEVICE_GET_INFO.
        Info = "info",
        /// DEVICE_GET_REGION_INFO.
        RegionInfo = "region-info",
        /// DEVICE_GET_IRQ_INFO.
        IrqInfo = "irq-info",
        /// DEVICE_SET_IRQS.
        SetIrqs = "irqs",
        /// REGION_READ, of whatever region.
        Read = "read",
        /// REGION_WRITE, of whatever region.
        Write = "write",
        /// REGION_READ or REGION_WRITE of configuration space.
        Config = "config",
        /// DEVICE_RESET.
        Reset = "reset",
    }
}

/// Which messages a fault of the server concerns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Messages {
    /// Those of this type; every one but the version's when none is named.
    pub of: Option<MessageType>,
    /// The first of them only.
    pub once: bool,
}

impl Messages {
    /// Every message.
    pub const ALL: Self = Self {
        of: None,
        once: false,
    };
}

/// What can go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "the table says what each is")]
pub enum Fault {
    RxQueueStuck(Stuck),
    TxQueueStuck(Stuck),
    SlowStop(Duration),
    Lie,
    BusMasterIgnored,
    BusMasterReadback,
    LateDone(Duration),
    DataAfterStop(Duration),
    DmaOutside(Option<Outside>),
    DmaRewrite,
    RxStalls,
    TxStalls,
    CompletionIndex,
    CompletionLong(u16),
    CompletionEmpty,
    CompletionType {
        no_eop: bool,
    },
    CompletionTwice,
    CompletionUnposted,
    CompletionNoData,
    CompletionShuffled,
    CompletionBackwards,
    CompletionAhead,
    CompletionOnes,
    /// Gone, all-ones; for so long, or for ever.
    Gone(Option<Duration>),
    /// Gone, zero; for so long, or for ever.
    GoneZero(Option<Duration>),
    PendingStuck,
    FlrFails(Errno),
    FlrHangs,
    FlrNoop,
    NoFlr,
    RstNoop,
    MasterStuckLinkDown,
    StatsWrap,
    StatsBackwards,
    LinkFlaps(Duration),
    SelfReset {
        notice: bool,
    },
    IrqStorm(Storm),
    IrqNone,
    IrqWrongVector,
    IrqBlock(Block),
    ServerSlow(Duration),
    ServerHangs(Messages),
    ServerError(Errno, Messages),
    ServerDies(Option<MessageType>),
    ServerShort(Messages),
    ServerReorder,
    ServerTwice,
    ServerDrip,
    ServerAsks,
    ServerForks,
    TruncateDma,
    TruncateBar,
}

impl Fault {
    /// The name by which the table has it. Of two faults of one name only the latest counts.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RxQueueStuck(_) => "rxq-stuck",
            Self::TxQueueStuck(_) => "txq-stuck",
            Self::SlowStop(_) => "slow",
            Self::Lie => "lie",
            Self::BusMasterIgnored => "bme-ignored",
            Self::BusMasterReadback => "bme-readback",
            Self::LateDone(_) => "late-dd",
            Self::DataAfterStop(_) => "data-after-stop",
            Self::DmaOutside(_) => "dma-outside",
            Self::DmaRewrite => "dma-rewrite",
            Self::RxStalls => "rx-stalls",
            Self::TxStalls => "tx-stalls",
            Self::CompletionIndex => "cq-index",
            Self::CompletionLong(_) => "cq-long",
            Self::CompletionEmpty => "cq-empty",
            Self::CompletionType { .. } => "cq-type",
            Self::CompletionTwice => "cq-twice",
            Self::CompletionUnposted => "cq-unposted",
            Self::CompletionNoData => "cq-nodata",
            Self::CompletionShuffled => "cq-shuffled",
            Self::CompletionBackwards => "cq-backwards",
            Self::CompletionAhead => "cq-ahead",
            Self::CompletionOnes => "cq-ones",
            Self::Gone(_) => "gone",
            Self::GoneZero(_) => "gone-zero",
            Self::PendingStuck => "pending-stuck",
            Self::FlrFails(_) => "flr-fails",
            Self::FlrHangs => "flr-hangs",
            Self::FlrNoop => "flr-noop",
            Self::NoFlr => "no-flr",
            Self::RstNoop => "rst-noop",
            Self::MasterStuckLinkDown => "master-stuck-linkdown",
            Self::StatsWrap => "stats-wrap",
            Self::StatsBackwards => "stats-backwards",
            Self::LinkFlaps(_) => "link-flaps",
            Self::SelfReset { .. } => "self-reset",
            Self::IrqStorm(_) => "irq-storm",
            Self::IrqNone => "irq-none",
            Self::IrqWrongVector => "irq-wrong-vector",
            Self::IrqBlock(_) => "irq-block",
            Self::ServerSlow(_) => "server-slow",
            Self::ServerHangs(_) => "server-hangs",
            Self::ServerError(..) => "server-error",
            Self::ServerDies(_) => "server-dies",
            Self::ServerShort(_) => "server-short",
            Self::ServerReorder => "server-reorder",
            Self::ServerTwice => "server-twice",
            Self::ServerDrip => "server-drip",
            Self::ServerAsks => "server-asks",
            Self::ServerForks => "server-forks",
            Self::TruncateDma => "truncate-dma",
            Self::TruncateBar => "truncate-bar",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::RxQueueStuck(stuck) | Self::TxQueueStuck(stuck) => {
                f.write_str(if stuck.quiet { ":quiet" } else { "" })?;
                f.write_str(if stuck.until_rst { ":rst" } else { "" })
            }
            Self::SlowStop(time)
            | Self::LateDone(time)
            | Self::LinkFlaps(time)
            | Self::ServerSlow(time)
            | Self::Gone(Some(time))
            | Self::GoneZero(Some(time)) => write!(f, ":{}", time.as_millis()),
            Self::DataAfterStop(time) => write!(f, ":{}", time.as_micros()),
            Self::DmaOutside(Some(place)) => write!(f, ":{place}"),
            Self::CompletionLong(length) => write!(f, ":{length}"),
            Self::CompletionType { no_eop: true } => f.write_str(":no-eop"),
            Self::SelfReset { notice: true } => f.write_str(":notice"),
            Self::FlrFails(errno) => write!(f, ":{errno}"),
            Self::IrqStorm(storm) => write!(f, ":{storm}"),
            Self::IrqBlock(block) => write!(f, ":{block}"),
            Self::ServerError(errno, messages) => write!(f, ":{errno}{messages}"),
            Self::ServerHangs(messages) | Self::ServerShort(messages) => write!(f, "{messages}"),
            Self::ServerDies(Some(of)) => write!(f, ":{of}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(of) = self.of {
            write!(f, ":{of}")?;
        }
        f.write_str(if self.once { ":once" } else { "" })
    }
}
