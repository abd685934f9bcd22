//! Every fault that there is: how it is written, what it does, what ends it. Help texts are printed
//! from here, and so is the list that the control socket gives.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use crate::errno::Errno;
use crate::fault::{Block, Fault, Messages, Storm, Stuck};
use crate::words::Words;

/// What ends a fault, beside taking it back (`clear-faults`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ends {
    /// Nothing. Where DMA or a queue is concerned, what is under way ends with the reset that the
    /// text names, and begins again at the next occasion.
    Never,
    /// A function level reset that works.
    FunctionReset,
    /// It happens once.
    Once,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name that options and scenarios use.
    pub name: &'static str,
    /// What may follow the name, as it is written; empty when nothing may.
    pub arguments: &'static str,
    /// What it does, for people.
    pub text: &'static str,
    /// What ends it.
    pub ends: Ends,
    parse: fn(&mut Words<'_>) -> Option<Fault>,
}

impl Entry {
    /// The form in which it is written: its name, and in capitals and brackets its arguments.
    #[must_use]
    pub fn form(&self) -> String {
        format!("{}{}", self.name, self.arguments)
    }

    pub(crate) fn parse(&self, words: &mut Words<'_>) -> Option<Fault> {
        (self.parse)(words)
    }
}

/// The line of a fault.
#[must_use]
pub fn entry(fault: &Fault) -> Option<&'static Entry> {
    TABLE.iter().find(|entry| entry.name == fault.name())
}

/// The names of all faults, with commas.
#[must_use]
pub fn names() -> String {
    let names: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
    names.join(", ")
}

/// The table for people, a fault a line.
#[must_use]
pub fn help() -> String {
    let widest = TABLE.iter().map(|entry| entry.form().len()).max();
    let mut text = String::from("Faults, as NAME[:ARG...][@TRIGGER]:\n");
    for entry in TABLE {
        let width = widest.unwrap_or_default();
        // Writing to a string does not fail.
        let ends = match entry.ends {
            Never => "",
            FunctionReset => "; a function level reset ends it",
            Once => "; once",
        };
        let _ = writeln!(text, "  {:width$}  {}{ends}", entry.form(), entry.text);
    }
    text.push_str(
        "\nTriggers: now; N (frames sent); MOMENT[=N], and with + what comes after it \
         (bme-on+unmap=2);\nrandom=SEED/PERMILLE. Moments: ",
    );
    let moments = crate::trigger::Moment::NAMED.map(|(name, _)| name);
    text.push_str(&moments.join(", "));
    text.push_str(".\nTypes of messages (TYPE): ");
    let types: Vec<&str> = crate::fault::MessageType::ALL
        .iter()
        .map(|t| t.word())
        .collect();
    text.push_str(&types.join(", "));
    text.push('.');
    text
}

const fn line(
    name: &'static str,
    arguments: &'static str,
    ends: Ends,
    text: &'static str,
    parse: fn(&mut Words<'_>) -> Option<Fault>,
) -> Entry {
    Entry {
        name,
        arguments,
        text,
        ends,
        parse,
    }
}

fn ms(words: &mut Words<'_>) -> Option<Duration> {
    words
        .parse::<u32>()
        .map(|ms| Duration::from_millis(ms.into()))
}

fn us(words: &mut Words<'_>) -> Option<Duration> {
    words
        .parse::<u32>()
        .map(|us| Duration::from_micros(us.into()))
}

/// An argument that may be missing, but not wrong.
fn maybe<T: FromStr>(words: &mut Words<'_>) -> Option<Option<T>> {
    if words.is_empty() {
        Some(None)
    } else {
        words.parse().map(Some)
    }
}

fn stuck(words: &mut Words<'_>) -> Stuck {
    Stuck {
        quiet: words.flag("quiet"),
        until_rst: words.flag("rst"),
    }
}

fn maybe_ms(words: &mut Words<'_>) -> Option<Option<Duration>> {
    let ms: Option<u32> = maybe(words)?;
    Some(ms.map(|ms| Duration::from_millis(ms.into())))
}

fn messages(words: &mut Words<'_>) -> Messages {
    Messages {
        of: words.optional(),
        once: words.flag("once"),
    }
}

use Ends::{FunctionReset, Never, Once};

/// Every fault.
pub const TABLE: &[Entry] = &[
    line(
        "rxq-stuck",
        "[:quiet][:rst]",
        Never,
        "a receive queue told to stop keeps ENABLE and goes on writing (quiet: does nothing), until FLR (rst: or CTRL.RST)",
        |w| Some(Fault::RxQueueStuck(stuck(w))),
    ),
    line(
        "txq-stuck",
        "[:quiet][:rst]",
        Never,
        "a transmit queue told to stop keeps ENABLE and goes on reading and writing back, as rxq-stuck",
        |w| Some(Fault::TxQueueStuck(stuck(w))),
    ),
    line(
        "slow",
        ":MS",
        Never,
        "a queue told to stop keeps ENABLE and DMA for MS milliseconds",
        |w| ms(w).map(Fault::SlowStop),
    ),
    line(
        "lie",
        "",
        Never,
        "a queue told to stop reads as stopped and goes on with DMA, until FLR",
        |_| Some(Fault::Lie),
    ),
    line(
        "bme-ignored",
        "",
        Never,
        "queues that run when bus mastering goes off go on with DMA, until FLR or CTRL.RST",
        |_| Some(Fault::BusMasterIgnored),
    ),
    line(
        "bme-readback",
        "",
        Never,
        "Bus Master Enable reads as set, whatever was written",
        |_| Some(Fault::BusMasterReadback),
    ),
    line(
        "late-dd",
        ":MS",
        Never,
        "completions are written MS milliseconds late, also after stop and master off; a reset drops them",
        |w| ms(w).map(Fault::LateDone),
    ),
    line(
        "data-after-stop",
        ":US",
        Never,
        "payload and completions land US microseconds after a stop was acknowledged; a reset drops them",
        |w| us(w).map(Fault::DataAfterStop),
    ),
    line(
        "dma-outside",
        "[:read|write|guard]",
        Never,
        "DMA each millisecond to addresses that it was never given, far away or next to those it was",
        |w| maybe(w).map(Fault::DmaOutside),
    ),
    line(
        "dma-rewrite",
        "",
        Never,
        "a received descriptor and its frame's header change 20 us after their completion",
        |_| Some(Fault::DmaRewrite),
    ),
    line(
        "rx-stalls",
        "",
        FunctionReset,
        "frames are counted and never written",
        |_| Some(Fault::RxStalls),
    ),
    line(
        "tx-stalls",
        "",
        FunctionReset,
        "no transmit descriptor is taken",
        |_| Some(Fault::TxStalls),
    ),
    line(
        "cq-index",
        "",
        Never,
        "head registers read beyond the ring",
        |_| Some(Fault::CompletionIndex),
    ),
    line(
        "cq-long",
        ":BYTES",
        Never,
        "received frames say that they have so many bytes",
        |w| w.parse().map(Fault::CompletionLong),
    ),
    line(
        "cq-empty",
        "",
        Never,
        "received frames say that they have 0 bytes",
        |_| Some(Fault::CompletionEmpty),
    ),
    line(
        "cq-type",
        "[:no-eop]",
        Never,
        "received frames have reserved packet and hash types (no-eop: lack their end)",
        |w| {
            Some(Fault::CompletionType {
                no_eop: w.flag("no-eop"),
            })
        },
    ),
    line(
        "cq-twice",
        "",
        Never,
        "a received frame is completed in two descriptors",
        |_| Some(Fault::CompletionTwice),
    ),
    line(
        "cq-unposted",
        "",
        Never,
        "a completion also marks the descriptor at the tail, which was not posted",
        |_| Some(Fault::CompletionUnposted),
    ),
    line(
        "cq-nodata",
        "",
        Never,
        "received frames are completed and not written",
        |_| Some(Fault::CompletionNoData),
    ),
    line(
        "cq-shuffled",
        "",
        Never,
        "descriptors are written back in random order",
        |_| Some(Fault::CompletionShuffled),
    ),
    line(
        "cq-backwards",
        "",
        Never,
        "head registers run backwards",
        |_| Some(Fault::CompletionBackwards),
    ),
    line(
        "cq-ahead",
        "",
        Never,
        "completions and head registers run two descriptors past the tail",
        |_| Some(Fault::CompletionAhead),
    ),
    line(
        "cq-ones",
        "",
        Never,
        "descriptors are written back as all-ones",
        |_| Some(Fault::CompletionOnes),
    ),
    line(
        "gone",
        "[:MS]",
        Never,
        "reads return all-ones, writes are lost, no DMA; after MS milliseconds it is back as it was",
        |w| maybe_ms(w).map(Fault::Gone),
    ),
    line(
        "gone-zero",
        "[:MS]",
        Never,
        "the same, and reads return zero",
        |w| maybe_ms(w).map(Fault::GoneZero),
    ),
    line(
        "pending-stuck",
        "",
        Never,
        "Transactions Pending reads as set",
        |_| Some(Fault::PendingStuck),
    ),
    line(
        "flr-fails",
        "[:ERRNO]",
        Never,
        "function level resets do nothing; by message they fail (EIO)",
        |w| Some(Fault::FlrFails(maybe(w)?.unwrap_or(Errno::EIO))),
    ),
    line(
        "flr-hangs",
        "",
        Never,
        "a function level reset never ends: the message has no answer, the function reads all-ones from then on",
        |_| Some(Fault::FlrHangs),
    ),
    line(
        "flr-noop",
        "",
        Never,
        "function level resets claim success and reset nothing; queues that run go on with DMA",
        |_| Some(Fault::FlrNoop),
    ),
    line(
        "no-flr",
        "",
        Never,
        "the function has no reset: no FLR capability, No_Soft_Reset, no reset by message",
        |_| Some(Fault::NoFlr),
    ),
    line(
        "rst-noop",
        "",
        Never,
        "CTRL.RST clears itself and resets nothing; queues that run go on with DMA",
        |_| Some(Fault::RstNoop),
    ),
    line(
        "master-stuck-linkdown",
        "",
        Never,
        "with the link down STATUS.GIO_MASTER_ENABLE stays set after master disable",
        |_| Some(Fault::MasterStuckLinkDown),
    ),
    line(
        "stats-wrap",
        "",
        Never,
        "statistics stand just below their end and wrap",
        |_| Some(Fault::StatsWrap),
    ),
    line(
        "stats-backwards",
        "",
        Never,
        "statistics are not cleared by reading, and run backwards",
        |_| Some(Fault::StatsBackwards),
    ),
    line(
        "link-flaps",
        ":MS",
        Never,
        "the link goes down and up each MS milliseconds",
        |w| ms(w).filter(|time| !time.is_zero()).map(Fault::LinkFlaps),
    ),
    line(
        "self-reset",
        "[:notice]",
        Once,
        "all registers go to their defaults, by themselves (notice: and the error event fires)",
        |w| {
            Some(Fault::SelfReset {
                notice: w.flag("notice"),
            })
        },
    ),
    line(
        "irq-storm",
        "[:msix|error|request]",
        Never,
        "every vector, the error event or the request event fires all the time",
        |w| Some(Fault::IrqStorm(maybe(w)?.unwrap_or(Storm::MsiX))),
    ),
    line("irq-none", "", Never, "no interrupt is sent", |_| {
        Some(Fault::IrqNone)
    }),
    line(
        "irq-wrong-vector",
        "",
        Never,
        "interrupts are sent by the next vector",
        |_| Some(Fault::IrqWrongVector),
    ),
    line(
        "irq-block",
        "[:full|empty]",
        Never,
        "the client's eventfds are made blocking and those of interrupts kept full, or all of them empty",
        |w| Some(Fault::IrqBlock(maybe(w)?.unwrap_or(Block::Full))),
    ),
    line(
        "server-slow",
        ":MS",
        Never,
        "the server answers each message after MS milliseconds",
        |w| ms(w).map(Fault::ServerSlow),
    ),
    line(
        "server-hangs",
        "[:TYPE][:once]",
        Never,
        "the server does not answer, without TYPE nor take, messages; the device goes on",
        |w| Some(Fault::ServerHangs(messages(w))),
    ),
    line(
        "server-error",
        "[:ERRNO][:TYPE][:once]",
        Never,
        "the server refuses commands with this errno (EIO)",
        |w| {
            let errno = w.optional().unwrap_or(Errno::EIO);
            Some(Fault::ServerError(errno, messages(w)))
        },
    ),
    line(
        "server-dies",
        "[:TYPE]",
        Once,
        "the server ends (TYPE: at such a message, before it answers)",
        |w| maybe(w).map(Fault::ServerDies),
    ),
    line(
        "server-short",
        "[:TYPE][:once]",
        Never,
        "replies are cut to half of their payload",
        |w| Some(Fault::ServerShort(messages(w))),
    ),
    line(
        "server-reorder",
        "",
        Never,
        "each second reply is held back until the next was sent, or 5 ms",
        |_| Some(Fault::ServerReorder),
    ),
    line(
        "server-twice",
        "",
        Never,
        "each reply is sent twice",
        |_| Some(Fault::ServerTwice),
    ),
    line(
        "server-drip",
        "",
        Never,
        "replies are sent a byte each 100 ms",
        |_| Some(Fault::ServerDrip),
    ),
    line(
        "server-asks",
        "",
        Never,
        "the server floods its client with commands of its own",
        |_| Some(Fault::ServerAsks),
    ),
    line(
        "server-forks",
        "",
        Once,
        "a child of the server keeps the largest file that is mapped and writes to it each millisecond (process only)",
        |_| Some(Fault::ServerForks),
    ),
    line(
        "truncate-dma",
        "",
        Never,
        "the server cuts short the files of mappings that it is sent",
        |_| Some(Fault::TruncateDma),
    ),
    line(
        "truncate-bar",
        "",
        Never,
        "the server offers BAR 0 to be mapped, and cuts its file short",
        |_| Some(Fault::TruncateBar),
    ),
];

#[cfg(test)]
mod tests;
