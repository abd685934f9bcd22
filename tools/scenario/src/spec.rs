//! A fault and when it begins: `NAME[:ARG[:ARG]][@TRIGGER]`, without commas, at which device names
//! are split.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::fault::Fault;
use crate::table::{TABLE, names};
use crate::trigger::{NoMoment, Trigger};
use crate::words::Words;

/// A fault, and when it begins.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    /// What goes wrong.
    pub fault: Fault,
    /// When.
    pub trigger: Trigger,
}

impl From<Fault> for Spec {
    /// At once.
    fn from(fault: Fault) -> Self {
        Self {
            fault,
            trigger: Trigger::now(),
        }
    }
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
    #[error("fault '{spec}' is not of the form '{form}[@TRIGGER]'")]
    Arguments {
        /// What was asked for.
        spec: String,
        /// What would do.
        form: String,
    },
    /// The trigger makes no sense.
    #[error("fault '{spec}' never begins: {why}")]
    Trigger {
        /// What was asked for.
        spec: String,
        /// Why not.
        why: NoMoment,
    },
}

impl Spec {
    /// Reads a fault whose parts are words of a line: `NAME ARG ... @ TRIGGER`.
    ///
    /// # Errors
    ///
    /// [`ParseError`].
    pub fn from_words(words: &[&str]) -> Result<Self, ParseError> {
        let text = words.join(":");
        let text = text.replace(":@", "@").replace("@:", "@");
        text.replace(":+", "+").replace("+:", "+").parse()
    }
}

impl FromStr for Spec {
    type Err = ParseError;

    fn from_str(spec: &str) -> Result<Self, ParseError> {
        let (what, trigger) = match spec.split_once('@') {
            Some((what, trigger)) => (what, Some(trigger)),
            None => (spec, None),
        };
        let parts: Vec<&str> = what.split(':').map(str::trim).collect();
        let name = parts.first().copied().unwrap_or_default();
        let entry = TABLE
            .iter()
            .find(|entry| entry.name == name)
            .ok_or_else(|| ParseError::Name {
                name: name.to_owned(),
            })?;
        let mut words = Words::new(parts.get(1..).unwrap_or_default());
        let fault = entry
            .parse(&mut words)
            .filter(|_| words.is_empty())
            .ok_or_else(|| ParseError::Arguments {
                spec: spec.to_owned(),
                form: entry.form(),
            })?;
        let trigger = match trigger {
            Some(trigger) => trigger.trim().parse().map_err(|why| ParseError::Trigger {
                spec: spec.to_owned(),
                why,
            })?,
            None => Trigger::now(),
        };
        Ok(Self { fault, trigger })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fault)?;
        if self.trigger.is_now() {
            Ok(())
        } else {
            write!(f, "@{}", self.trigger)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Stuck;

    #[test]
    fn an_unknown_moment_lists_the_known_ones() {
        let error = "gone@nope".parse::<Spec>().unwrap_err().to_string();
        assert!(error.contains("'nope'"), "{error}");
        for (name, _) in crate::trigger::Moment::NAMED {
            assert!(error.contains(name), "{name}: {error}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = "rxq-stuk".parse::<Spec>().unwrap_err().to_string();
        assert!(error.contains("rxq-stuck"), "{error}");
    }

    #[test]
    fn arguments_that_a_fault_does_not_take_are_refused_and_the_form_is_told() {
        for text in [
            "lie:1",
            "slow",
            "slow:x",
            "server-error:99999",
            "rxq-stuck:loud",
            "slow:-1",
        ] {
            let error = text.parse::<Spec>().unwrap_err();
            assert!(
                matches!(error, ParseError::Arguments { .. }),
                "{text}: {error}"
            );
        }
        let error = "slow".parse::<Spec>().unwrap_err().to_string();
        assert!(error.contains("slow:MS"), "{error}");
    }

    #[test]
    fn words_of_a_line_are_the_same_as_one_word() {
        let words = ["rxq-stuck", "quiet", "@", "destroy=2"];
        assert_eq!(
            Spec::from_words(&words),
            "rxq-stuck:quiet@destroy=2".parse()
        );
    }

    #[test]
    fn a_trigger_that_makes_no_sense_is_no_fault() {
        assert!(matches!(
            "gone@soon".parse::<Spec>(),
            Err(ParseError::Trigger { .. })
        ));
    }

    #[test]
    fn a_fault_without_a_trigger_begins_at_once() {
        let spec: Spec = "rxq-stuck".parse().unwrap();
        assert_eq!(spec, Fault::RxQueueStuck(Stuck::default()).into());
    }
}
