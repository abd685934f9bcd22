//! When a fault begins: after moments that the device sees by itself, so that a phase of the
//! driver's life is told without a word between driver and test.
//!
//! A trigger is `MOMENT[=N][+MOMENT[=N]...]`: the N-th time that the first happens, then the N-th
//! time after that that the second does, and so on. Counting starts when the fault is added. A bare
//! number is so many frames sent; no trigger, or `now`, is at once.
//!
//! | moment | it happens when |
//! | --- | --- |
//! | `frames` | the device has sent a frame |
//! | `open`, `detach` | a client came, or went |
//! | `message` | the client sent a command |
//! | `access` | any region is read or written |
//! | `init-reset` | CTRL.RST is written |
//! | `init-nvm` | EECD is read, or EERD written |
//! | `init-address` | the first receive address is read |
//! | `init-phy` | MDIC is written |
//! | `init-enable` | the receiver is switched on |
//! | `rx-start`, `rx-stop`, `tx-start`, `tx-stop` | a queue with a ring is told to |
//! | `destroy` | a queue with a ring is told to stop, of either direction |
//! | `bme-on`, `bme-off` | bus mastering is switched |
//! | `pending-read` | Device Status, with Transactions Pending, is read |
//! | `reset` | a function level reset is asked for, by register or by message |
//! | `canary-read` | FCTTV is read, where drivers see whether a reset happened |
//! | `map`, `unmap` | the client maps or unmaps memory |
//! | `random=SEED/PERMILLE` | at an access, with this probability, by this seed |
//!
//! A fault begins before the moment that it waited for has its effect.

use std::fmt;
use std::str::FromStr;

/// Something that a device sees happen. Its word stands in the table above.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "the table above says what each is")]
pub enum Moment {
    Frames,
    Open,
    Detach,
    Message,
    Access,
    InitReset,
    InitNvm,
    InitAddress,
    InitPhy,
    InitEnable,
    RxStart,
    RxStop,
    TxStart,
    TxStop,
    Destroy,
    MasterOn,
    MasterOff,
    PendingRead,
    Reset,
    CanaryRead,
    Map,
    Unmap,
    /// At an access, with this probability.
    Random {
        /// Where the sequence of numbers starts.
        seed: u64,
        /// Of a thousand, from 1 on.
        per_mille: u16,
    },
}

impl Moment {
    /// Every moment that needs nothing but its name.
    pub const NAMED: [(&'static str, Self); 22] = [
        ("frames", Self::Frames),
        ("open", Self::Open),
        ("detach", Self::Detach),
        ("message", Self::Message),
        ("access", Self::Access),
        ("init-reset", Self::InitReset),
        ("init-nvm", Self::InitNvm),
        ("init-address", Self::InitAddress),
        ("init-phy", Self::InitPhy),
        ("init-enable", Self::InitEnable),
        ("rx-start", Self::RxStart),
        ("rx-stop", Self::RxStop),
        ("tx-start", Self::TxStart),
        ("tx-stop", Self::TxStop),
        ("destroy", Self::Destroy),
        ("bme-on", Self::MasterOn),
        ("bme-off", Self::MasterOff),
        ("pending-read", Self::PendingRead),
        ("reset", Self::Reset),
        ("canary-read", Self::CanaryRead),
        ("map", Self::Map),
        ("unmap", Self::Unmap),
    ];
}

/// So many times a moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Count {
    /// What is waited for.
    pub at: Moment,
    /// How often it must happen, from 1 on. Of a random moment, once.
    pub n: u32,
}

/// What a fault waits for, in this order; one that waits for nothing begins at once.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Trigger(pub Vec<Count>);

impl Trigger {
    /// At once.
    #[must_use]
    pub const fn now() -> Self {
        Self(Vec::new())
    }

    /// After the N-th time of one moment; at once when `n` is 0.
    #[must_use]
    pub fn after(at: Moment, n: u32) -> Self {
        if n == 0 {
            Self::now()
        } else {
            Self(vec![Count { at, n }])
        }
    }

    /// Whether it waits for nothing.
    #[must_use]
    pub fn is_now(&self) -> bool {
        self.0.is_empty()
    }
}

/// A trigger that cannot be understood.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{0}' is no moment: a number of frames, now, random=SEED/PERMILLE, or MOMENT[=N] with {names}",
    names = Moment::NAMED.map(|(name, _)| name).join(", ")
)]
pub struct NoMoment(pub String);

impl FromStr for Trigger {
    type Err = NoMoment;

    fn from_str(text: &str) -> Result<Self, NoMoment> {
        let mut counts = Vec::new();
        for part in text.split('+') {
            let part = part.trim();
            if part != "now" && part.parse() != Ok(0u32) {
                counts.push(count(part).ok_or_else(|| NoMoment(part.to_owned()))?);
            }
        }
        Ok(Self(counts))
    }
}

fn count(text: &str) -> Option<Count> {
    let frames = |n| Count {
        at: Moment::Frames,
        n,
    };
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    if name == "random" {
        let (seed, per_mille) = value?.split_once('/')?;
        let (seed, per_mille) = (seed.parse().ok()?, per_mille.parse().ok()?);
        let at = Moment::Random { seed, per_mille };
        return (1..=1000)
            .contains(&per_mille)
            .then_some(Count { at, n: 1 });
    }
    match Moment::NAMED.iter().find(|(word, _)| *word == name) {
        Some((_, at)) => {
            let n = value.map_or(Some(1), |n| n.parse().ok())?;
            (n > 0).then_some(Count { at: *at, n })
        }
        None => text.parse().ok().map(frames),
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_now() {
            return f.write_str("now");
        }
        for (i, count) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("+")?;
            }
            write!(f, "{count}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            Moment::Frames => return write!(f, "{}", self.n),
            Moment::Random { seed, per_mille } => return write!(f, "random={seed}/{per_mille}"),
            _ => {}
        }
        let name = Moment::NAMED.iter().find(|(_, at)| *at == self.at);
        f.write_str(name.map_or("", |(name, _)| name))?;
        match self.n {
            1 => Ok(()),
            n => write!(f, "={n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_count_follows_the_first() {
        let trigger: Trigger = "bme-on+unmap=2".parse().unwrap();
        let counts = [(Moment::MasterOn, 1), (Moment::Unmap, 2)].map(|(at, n)| Count { at, n });
        assert_eq!(trigger.0, counts);
    }

    #[test]
    fn a_bare_number_is_frames() {
        assert_eq!("100".parse(), Ok(Trigger::after(Moment::Frames, 100)));
        assert_eq!(
            "frames=100".parse(),
            Ok(Trigger::after(Moment::Frames, 100))
        );
    }

    #[test]
    fn now_and_no_frames_wait_for_nothing() {
        assert_eq!("now".parse(), Ok(Trigger::now()));
        assert_eq!("0".parse(), Ok(Trigger::now()));
        assert_eq!("00".parse(), Ok(Trigger::now()));
    }

    #[test]
    fn nonsense_is_refused_and_names_the_words() {
        for text in [
            "",
            "soon",
            "destroy=0",
            "destroy=x",
            "random",
            "random=1/0",
            "a+now",
            "-1",
        ] {
            assert!(text.parse::<Trigger>().is_err(), "{text}");
        }
        let error = "soon".parse::<Trigger>().unwrap_err().to_string();
        assert!(error.contains("init-phy"), "{error}");
    }
}
