//! Misbehaviour on demand: one table of what the emulated device and its server can be told to do
//! wrong. A fault is named on the command line (`--fault`), in a device name
//! (`emu:82576,fault=NAME[:ARGS]`), or at run time over the control socket.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use nix::errno::Errno;
use thiserror::Error;

/// What can go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A receive queue told to stop keeps ENABLE set and goes on writing, through CTRL.RST too.
    RxQueueStuck,
    /// A transmit queue told to stop keeps ENABLE set and goes on reading and writing back, through
    /// CTRL.RST too.
    TxQueueStuck,
    /// The device takes no transmit descriptor any more, until a function level reset.
    TxStalls,
    /// The device counts frames as received and writes none of them, until a function level reset.
    RxStalls,
    /// The function fell off the bus: every read returns all-ones, nothing is written, no DMA.
    Gone,
    /// The same, but reads return zero, as QEMU and virtual functions do.
    GoneZero,
    /// The server answers each message only after this time.
    Slow(Duration),
    /// The server takes messages and answers none. The device goes on.
    ServerHangs,
    /// The server refuses every command after the version with this errno.
    ServerError(Errno),
    /// The server ends: its process, or in a thread its connection and its socket.
    ServerDies,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name that options and scripts use.
    pub name: &'static str,
    /// What may follow the name after a colon; empty when nothing may.
    pub arguments: &'static str,
    /// What it does, for people.
    pub text: &'static str,
    parse: fn(Option<&str>) -> Option<Fault>,
}

/// Every fault.
pub const TABLE: &[Entry] = &[
    Entry {
        name: "rxq-stuck",
        arguments: "",
        text: "a stopped receive queue keeps ENABLE and goes on writing, through CTRL.RST too",
        parse: |arguments| plain(arguments, Fault::RxQueueStuck),
    },
    Entry {
        name: "txq-stuck",
        arguments: "",
        text: "a stopped transmit queue keeps ENABLE and goes on reading and writing back",
        parse: |arguments| plain(arguments, Fault::TxQueueStuck),
    },
    Entry {
        name: "tx-stalls",
        arguments: "",
        text: "no transmit descriptor is taken, until a function level reset",
        parse: |arguments| plain(arguments, Fault::TxStalls),
    },
    Entry {
        name: "rx-stalls",
        arguments: "",
        text: "frames are counted and never written, until a function level reset",
        parse: |arguments| plain(arguments, Fault::RxStalls),
    },
    Entry {
        name: "gone",
        arguments: "",
        text: "reads return all-ones, writes are lost, no DMA",
        parse: |arguments| plain(arguments, Fault::Gone),
    },
    Entry {
        name: "gone-zero",
        arguments: "",
        text: "reads return zero, writes are lost, no DMA",
        parse: |arguments| plain(arguments, Fault::GoneZero),
    },
    Entry {
        name: "slow",
        arguments: "MS",
        text: "the server answers each message after MS milliseconds",
        parse: |arguments| {
            let ms: u32 = arguments?.parse().ok()?;
            Some(Fault::Slow(Duration::from_millis(u64::from(ms))))
        },
    },
    Entry {
        name: "server-hangs",
        arguments: "",
        text: "the server answers no message; the device goes on",
        parse: |arguments| plain(arguments, Fault::ServerHangs),
    },
    Entry {
        name: "server-error",
        arguments: "[ERRNO]",
        text: "the server refuses every command with this errno (5, EIO)",
        parse: |arguments| {
            let errno = match arguments {
                None => Errno::EIO,
                Some(number) => Errno::from_raw(number.parse().ok()?),
            };
            (errno != Errno::UnknownErrno).then_some(Fault::ServerError(errno))
        },
    },
    Entry {
        name: "server-dies",
        arguments: "",
        text: "the server ends",
        parse: |arguments| plain(arguments, Fault::ServerDies),
    },
];

fn plain(arguments: Option<&str>, fault: Fault) -> Option<Fault> {
    arguments.is_none().then_some(fault)
}

impl Fault {
    fn same_kind(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// A fault, and when it begins: `NAME[:ARGS][@FRAMES]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spec {
    /// What goes wrong.
    pub fault: Fault,
    /// It begins when the device has sent this many frames; at once when 0.
    pub after: u64,
}

/// A fault that cannot be understood.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ParseError {
    /// There is no fault of this name.
    #[error("no fault is called '{name}'; there are {}", names())]
    Name {
        /// What was asked for.
        name: String,
    },
    /// The fault takes other arguments.
    #[error("fault '{spec}' is not of the form '{form}[@FRAMES]'")]
    Arguments {
        /// What was asked for.
        spec: String,
        /// What would do.
        form: String,
    },
}

fn names() -> String {
    let names: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
    names.join(", ")
}

impl FromStr for Spec {
    type Err = ParseError;

    fn from_str(spec: &str) -> Result<Self, ParseError> {
        let (what, after) = match spec.split_once('@') {
            Some((what, after)) => (what, Some(after)),
            None => (spec, None),
        };
        let (name, arguments) = match what.split_once(':') {
            Some((name, arguments)) => (name, Some(arguments)),
            None => (what, None),
        };
        let entry = TABLE
            .iter()
            .find(|entry| entry.name == name)
            .ok_or_else(|| ParseError::Name {
                name: name.to_owned(),
            })?;
        let wrong = || ParseError::Arguments {
            spec: spec.to_owned(),
            form: entry.to_string(),
        };
        Ok(Self {
            fault: (entry.parse)(arguments).ok_or_else(wrong)?,
            after: after.map_or(Ok(0), |n| n.parse().map_err(|_| wrong()))?,
        })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::RxQueueStuck => f.write_str("rxq-stuck"),
            Fault::TxQueueStuck => f.write_str("txq-stuck"),
            Fault::TxStalls => f.write_str("tx-stalls"),
            Fault::RxStalls => f.write_str("rx-stalls"),
            Fault::Gone => f.write_str("gone"),
            Fault::GoneZero => f.write_str("gone-zero"),
            Fault::Slow(delay) => write!(f, "slow:{}", delay.as_millis()),
            Fault::ServerHangs => f.write_str("server-hangs"),
            Fault::ServerError(errno) => write!(f, "server-error:{}", errno as i32),
            Fault::ServerDies => f.write_str("server-dies"),
        }?;
        match self.after {
            0 => Ok(()),
            frames => write!(f, "@{frames}"),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if self.arguments.is_empty() {
            Ok(())
        } else {
            write!(f, ":{}", self.arguments)
        }
    }
}

/// The faults that were asked for, and which of them have begun.
#[derive(Clone, Default, Debug)]
pub struct Faults {
    waiting: Vec<Spec>,
    active: Vec<Fault>,
}

impl Faults {
    /// Adds a fault; one of the same kind is replaced. `sent` is how many frames the device has
    /// sent.
    pub fn add(&mut self, spec: Spec, sent: u64) {
        self.waiting.retain(|old| !old.fault.same_kind(spec.fault));
        self.active.retain(|old| !old.same_kind(spec.fault));
        self.waiting.push(Spec {
            after: spec
                .after
                .saturating_add(if spec.after == 0 { 0 } else { sent }),
            ..spec
        });
        self.begin(sent);
    }

    /// What a function level reset cures.
    pub fn reset(&mut self) {
        let cured = [Fault::TxStalls, Fault::RxStalls];
        self.active.retain(|fault| !cured.contains(fault));
    }

    /// Ends and forgets all faults.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Begins what is due.
    pub fn begin(&mut self, sent: u64) {
        if self.waiting.is_empty() {
            return;
        }
        let active = &mut self.active;
        self.waiting.retain(|spec| {
            let due = spec.after <= sent;
            if due {
                active.push(spec.fault);
            }
            !due
        });
    }

    /// Whether this fault has begun.
    #[must_use]
    pub fn has(&self, fault: Fault) -> bool {
        self.active.contains(&fault)
    }

    /// The faults that have begun.
    #[must_use]
    pub fn active(&self) -> &[Fault] {
        &self.active
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_with_arguments_parses() {
        let spec: Spec = "slow:250".parse().unwrap();
        assert_eq!(spec.fault, Fault::Slow(Duration::from_millis(250)));
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = "rxq-stuk".parse::<Spec>().unwrap_err().to_string();
        assert!(error.contains("rxq-stuck"), "{error}");
    }

    #[test]
    fn arguments_that_a_fault_does_not_take_are_refused() {
        assert!("gone:1".parse::<Spec>().is_err());
        assert!("slow".parse::<Spec>().is_err());
        assert!("slow:x".parse::<Spec>().is_err());
        assert!("server-error:99999".parse::<Spec>().is_err());
    }

    #[test]
    fn a_fault_begins_after_its_frames() {
        let mut faults = Faults::default();
        faults.add("gone@10".parse().unwrap(), 5);
        faults.begin(14);
        assert!(!faults.has(Fault::Gone));
        faults.begin(15);
        assert!(faults.has(Fault::Gone));
    }

    #[test]
    fn a_spec_survives_being_written_and_read() {
        for text in ["rxq-stuck", "slow:20@100", "server-error:5", "gone-zero@7"] {
            assert_eq!(text.parse::<Spec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_fault_replaces_one_of_its_kind() {
        let mut faults = Faults::default();
        faults.add("slow:1".parse().unwrap(), 0);
        faults.add("slow:2".parse().unwrap(), 0);
        assert_eq!(faults.active(), [Fault::Slow(Duration::from_millis(2))]);
    }
}
