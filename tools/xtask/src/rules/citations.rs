//! How code and tests cite rules and cases: `[R4.2]`, `(R3.3)`, `(C5, C6)`, `fn c6_...`.

use std::fmt;
use std::str::FromStr;

/// The name of a rule (`R4`), of a part of one (`R4.2`) or of a case (`C6`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Id {
    /// A rule, or with a number that is not zero a part of it.
    Rule(u32, u32),
    /// A case.
    Case(u32),
}

impl Id {
    /// The rule that this is a part of.
    pub(crate) fn whole(self) -> Option<Self> {
        match self {
            Self::Rule(rule, part) if part > 0 => Some(Self::Rule(rule, 0)),
            _ => None,
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule, 0) => write!(f, "R{rule}"),
            Self::Rule(rule, part) => write!(f, "R{rule}.{part}"),
            Self::Case(case) => write!(f, "C{case}"),
        }
    }
}

/// A text that is no [`Id`].
#[derive(Debug)]
pub(crate) struct NotAnId;

impl FromStr for Id {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let (kind, number) = text.split_at_checked(1).ok_or(NotAnId)?;
        match (kind, number.split_once('.')) {
            ("R", None) => Ok(Self::Rule(parse(number)?, 0)),
            ("R", Some((rule, part))) => Ok(Self::Rule(parse(rule)?, parse(part)?)),
            ("C", None) => Ok(Self::Case(parse(number)?)),
            _ => Err(NotAnId),
        }
    }
}

/// A number above zero, in digits only.
fn parse(digits: &str) -> Result<u32, NotAnId> {
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NotAnId);
    }
    digits
        .parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or(NotAnId)
}

/// The citations in a comment, each with its place in the text: brackets that hold nothing but names.
pub(crate) fn in_comment(text: &str) -> Vec<(usize, Id)> {
    let mut found = Vec::new();
    for (open, close) in [('[', ']'), ('(', ')')] {
        for (start, _) in text.match_indices(open) {
            let inside = &text[start + 1..];
            let Some(end) = inside.find([open, close]) else {
                continue;
            };
            if !inside[end..].starts_with(close) {
                continue;
            }
            let names = inside[..end].split([',', ' ']).filter(|word| {
                // A list may break over lines of a comment.
                !matches!(word.trim(), "" | "and" | "//" | "///" | "//!")
            });
            let ids: Result<Vec<Id>, _> = names.map(|name| name.trim().parse()).collect();
            found.extend(ids.into_iter().flatten().map(|id| (start, id)));
        }
    }
    found
}

/// What the name of a test cites: `c6_unmap_...`, `r10_recovery_...`, `r4_2_bus_master_...`.
pub(crate) fn in_name(name: &str) -> Option<Id> {
    // Tables of tests may put a path before the name.
    let name = name.rsplit(['/', ':']).next()?;
    let mut words = name.split('_');
    let first = words.next()?;
    let (kind, number) = first.split_at_checked(1)?;
    match kind {
        "c" => Some(Id::Case(parse(number).ok()?)),
        "r" => {
            let part = words.next().and_then(|word| parse(word).ok());
            Some(Id::Rule(parse(number).ok()?, part.unwrap_or(0)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cited(text: &str) -> String {
        let ids = in_comment(text).into_iter().map(|(_, id)| id.to_string());
        ids.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn brackets_that_hold_only_names_cite() {
        assert_eq!(cited("// as promised (R4.2)."), "R4.2");
        assert_eq!(cited("// (C28) and more [R12]"), "R12 C28");
        assert_eq!(cited("/// both (R1, C44)"), "R1 C44");
        assert_eq!(cited("// three (C5, C6 and\n    // C7)"), "C5 C6 C7");
    }

    #[test]
    fn other_text_cites_nothing() {
        for text in [
            "// R4 says",
            "// (see R4)",
            "/// [`R4`]",
            "// rows[R1 + 2]",
            "// (R)",
            "// (R0) (R4.)",
            "// (R+1)",
            "// (R4",
        ] {
            assert_eq!(cited(text), "", "{text}");
        }
    }

    #[test]
    fn a_tests_name_cites_its_case() {
        assert_eq!(in_name("c6_unmap_of_a_part"), Some(Id::Case(6)));
        assert_eq!(in_name("fault/c1_a_queue"), Some(Id::Case(1)));
        assert_eq!(in_name("r10_recovery_is_last"), Some(Id::Rule(10, 0)));
        assert_eq!(in_name("r4_2_is_read_back"), Some(Id::Rule(4, 2)));
        for name in ["a_test", "c_6", "crc32_is_right", "c6x_y", "réseau", ""] {
            assert_eq!(in_name(name), None, "{name}");
        }
    }
}
