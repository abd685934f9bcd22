//! `cargo xtask rules`: which code keeps each rule of the contract, and which test shows it.
//!
//! The rules and the cases from the field stand in `tests/rules.toml`. For each the sources are asked:
//!
//! - **Code** keeps a rule where a comment cites it, alone in brackets: `[R4.2]`, `(R3.3)`, `(R1, C44)`.
//!   Only the libraries and the tool count, and nothing in them that is compiled for tests only.
//! - A **test** shows a rule or a case when its name begins with it (`c6_unmap_of_a_part_is_not_success`,
//!   `r10_...`) or when its documentation or a comment in its body cites it. A test is a function with a
//!   `#[test]` attribute that is not ignored, in a macro or not; a name in the suite's `cases!`; or a row
//!   of a table named `CASES` in the suite. A mention anywhere else is no test.
//! - A **mutation** of `tests/mutations` is listed with the rule that it breaks.
//!
//! A rule needs code and a test, a case needs a test. A case that is left to later work needs none, and
//! must not have one, so that the list stays true. A citation of what is not in the list is an error too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

mod citations;
mod source;

pub(crate) use citations::{Id, in_comment};
use source::Source;

/// The list, from the top of the repository.
const LIST: &str = "tests/rules.toml";
/// Where code keeps rules: the emulator is a test's double, and this program is none of the driver.
const CODE: &[&str] = &["pci", "dma", "queues", "driver", "tools/cli"];
/// Where tests are, besides those in [`CODE`].
const TESTS: &[&str] = &["tools/emulator", "tests"];
/// The package whose tests are functions that tables name.
const SUITE: &str = "tests";
/// Folders and files that are for tests only, whatever is in them.
const FOR_TESTS: &[&str] = &["tests", "tests.rs", "testing", "testing.rs", "benches"];
/// How many places a line of the table shows, unless it shows all.
const SHOWN: usize = 3;

/// The list as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    rules: BTreeMap<String, Entry>,
    cases: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Now(String),
    Later { title: String, later: String },
}

/// A rule or a case.
#[derive(Debug, Default)]
struct Listed {
    title: String,
    later: Option<String>,
}

type List = BTreeMap<Id, Listed>;

/// What was found for a rule or a case: places, as they are printed.
#[derive(Debug, Default)]
struct Found {
    code: BTreeSet<String>,
    tests: BTreeSet<String>,
    mutations: BTreeSet<String>,
}

/// Prints the table, and says what is missing.
///
/// # Errors
///
/// When the list or a source cannot be read. What is missing is in the exit code.
pub(crate) fn main(all: bool) -> Result<ExitCode> {
    let (text, complete) = table(all)?;
    print!("{text}");
    Ok(if complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The table, and whether nothing is missing or wrong.
///
/// # Errors
///
/// When the list or a source cannot be read.
pub(crate) fn table(all: bool) -> Result<(String, bool)> {
    let root = root();
    let list = read_list(&fs::read_to_string(root.join(LIST)).with_context(|| LIST.to_owned())?)?;
    let mut table = Table::default();
    for folder in CODE.iter().chain(TESTS) {
        let mut files = Vec::new();
        collect(&root.join(folder), &mut files)?;
        for path in files {
            let place = path.strip_prefix(&root)?.to_owned();
            table
                .read(&place, &fs::read_to_string(&path)?)
                .with_context(|| format!("cannot read {}", place.display()))?;
        }
    }
    for mutation in crate::mutate::list(&root)? {
        table.mutation(&mutation.name, &mutation.title);
    }
    let (text, wrong) = table.finish(&list, if all { usize::MAX } else { SHOWN });
    Ok((text, !wrong))
}

/// The top of the repository.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = manifest.ancestors().nth(2);
    root.expect("this package is two folders deep").to_owned()
}

fn read_list(text: &str) -> Result<List> {
    let written: Written = toml::from_str(text).with_context(|| LIST.to_owned())?;
    let mut list = List::new();
    for (name, entry) in written.rules.into_iter().chain(written.cases) {
        let id = name
            .parse()
            .ok()
            .with_context(|| format!("{LIST}: {name} is no name"))?;
        let listed = match entry {
            Entry::Now(title) => Listed { title, later: None },
            Entry::Later { title, later } => Listed {
                title,
                later: Some(later),
            },
        };
        list.insert(id, listed);
    }
    for id in list.keys() {
        let whole = id.whole();
        ensure!(
            whole.is_none_or(|whole| list.contains_key(&whole)),
            "{LIST}: {id} is a part of nothing"
        );
    }
    Ok(list)
}

/// All Rust sources below a folder, in order.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("{}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// What all sources say.
#[derive(Default)]
struct Table {
    sources: BTreeMap<PathBuf, Source>,
    mutations: Vec<(String, Vec<Id>)>,
}

impl Table {
    /// Takes in one file; `place` is its path from the top of the repository.
    fn read(&mut self, place: &Path, text: &str) -> Result<()> {
        self.sources.insert(place.to_owned(), Source::parse(text)?);
        Ok(())
    }

    /// Takes in a mutation by its title, which cites what it breaks.
    fn mutation(&mut self, name: &str, title: &str) {
        let ids = in_comment(title).into_iter().map(|(_, id)| id).collect();
        self.mutations.push((name.to_owned(), ids));
    }

    /// The table, and whether anything is missing or wrong.
    fn finish(&self, list: &List, shown: usize) -> (String, bool) {
        let found = self.found();
        let mut wrong = self.unknown(list);
        let mut text = String::new();
        for (id, listed) in list {
            let of = together(*id, &found);
            let _ = writeln!(text, "{:<5} {}", id.to_string(), listed.title);
            let is_rule = matches!(id, Id::Rule(..));
            if is_rule {
                line(&mut text, "code", &of.code, shown);
            }
            match &listed.later {
                None => line(&mut text, "test", &of.tests, shown),
                Some(why) => drop(writeln!(text, "      later {why}")),
            }
            if !of.mutations.is_empty() {
                line(&mut text, "mutation", &of.mutations, shown);
            }
            if is_rule && of.code.is_empty() {
                wrong.push(format!("{id}: no code cites it"));
            }
            match (&listed.later, of.tests.first()) {
                (None, None) => wrong.push(format!("{id}: no test shows it")),
                (Some(_), Some(test)) => wrong.push(format!(
                    "{id} is left to later work in {LIST}, but has a test: {test}"
                )),
                _ => {}
            }
        }
        let later = list
            .values()
            .filter(|listed| listed.later.is_some())
            .count();
        text.push('\n');
        for wrong in &wrong {
            let _ = writeln!(text, "MISSING: {wrong}");
        }
        let rules = list.keys().filter(|id| matches!(id, Id::Rule(..))).count();
        let _ = writeln!(
            text,
            "{rules} rules and parts of rules, {} cases of which {later} are left to later work, {} missing or wrong",
            list.len() - rules,
            wrong.len()
        );
        (text, !wrong.is_empty())
    }

    fn found(&self) -> BTreeMap<Id, Found> {
        let mut found: BTreeMap<Id, Found> = BTreeMap::new();
        let for_tests = self.for_tests();
        for (place, source) in &self.sources {
            if is_code(place) && !for_tests.iter().any(|module| place.starts_with(module)) {
                for citation in &source.code {
                    let line = format!("{}:{}", place.display(), citation.line);
                    found.entry(citation.id).or_default().code.insert(line);
                }
            }
            for test in source.functions.iter().filter(|function| function.is_test) {
                for id in &test.cites {
                    let line = format!("{} ({}:{})", test.name, place.display(), test.line);
                    found.entry(*id).or_default().tests.insert(line);
                }
            }
        }
        for (id, line) in self.rows() {
            found.entry(id).or_default().tests.insert(line);
        }
        for (name, ids) in &self.mutations {
            for id in ids {
                found.entry(*id).or_default().mutations.insert(name.clone());
            }
        }
        found
    }

    /// What the tables of the suite show: a row's name and its function both cite.
    fn rows(&self) -> Vec<(Id, String)> {
        let suite = || {
            self.sources
                .iter()
                .filter(|(place, _)| place.starts_with(SUITE))
        };
        let mut lines = Vec::new();
        for (place, source) in suite() {
            for row in &source.rows {
                // A table's functions are its own, or of modules below it.
                let module = place.with_extension("");
                let here =
                    suite().filter(|(other, _)| *other == place || other.starts_with(&module));
                let elsewhere =
                    suite().filter(|(other, _)| *other != place && !other.starts_with(&module));
                let functions = |(place, source): (&'_ PathBuf, &'_ Source)| {
                    let of_that_name = source.functions.iter().filter(|f| f.name == row.function);
                    of_that_name
                        .map(|function| (place.clone(), function.line, function.cites.clone()))
                        .collect::<Vec<_>>()
                };
                let function = here.chain(elsewhere).flat_map(functions).next();
                let (place, line, mut cites) =
                    function.unwrap_or((place.clone(), row.line, BTreeSet::new()));
                cites.extend(citations::in_name(&row.name));
                let line = format!("{} ({}:{line})", row.name, place.display());
                lines.extend(cites.into_iter().map(|id| (id, line.clone())));
            }
        }
        lines
    }

    /// Modules in files of their own that are compiled for tests only: their files, and folders.
    fn for_tests(&self) -> Vec<PathBuf> {
        let mut paths = Vec::new();
        for (place, source) in &self.sources {
            let stem = place.file_stem().unwrap_or_default();
            let folder = if ["lib", "main", "mod"].iter().any(|name| stem == *name) {
                place.parent().map(Path::to_owned).unwrap_or_default()
            } else {
                place.with_extension("")
            };
            for module in &source.test_modules {
                paths.push(folder.join(module));
                paths.push(folder.join(format!("{module}.rs")));
            }
        }
        paths
    }

    /// Citations of what the list does not have.
    fn unknown(&self, list: &List) -> Vec<String> {
        let mut unknown = Vec::new();
        for (place, source) in &self.sources {
            let comments = source
                .all
                .iter()
                .map(|citation| (citation.id, citation.line));
            let functions = source.functions.iter().filter(|function| function.is_test);
            let functions = functions.map(|test| (citations::in_name(&test.name), test.line));
            let rows = source
                .rows
                .iter()
                .map(|row| (citations::in_name(&row.name), row.line));
            let names = functions
                .chain(rows)
                .filter_map(|(id, line)| Some((id?, line)));
            for (id, line) in comments.chain(names) {
                if !list.contains_key(&id) {
                    unknown.push(format!(
                        "{}:{line} cites {id}, which {LIST} does not have",
                        place.display()
                    ));
                }
            }
        }
        for (name, ids) in &self.mutations {
            for id in ids.iter().filter(|id| !list.contains_key(id)) {
                unknown.push(format!(
                    "mutation {name} cites {id}, which {LIST} does not have"
                ));
            }
        }
        unknown
    }
}

/// Whether a file, by its path, is code that is not for tests only.
fn is_code(place: &Path) -> bool {
    let for_tests = place
        .components()
        .any(|part| FOR_TESTS.iter().any(|name| part.as_os_str() == *name));
    CODE.iter().any(|folder| place.starts_with(folder)) && !for_tests
}

/// What was found for a rule and for its parts.
fn together(id: Id, found: &BTreeMap<Id, Found>) -> Found {
    let mut sum = Found::default();
    for (other, of) in found {
        if *other == id || other.whole() == Some(id) {
            sum.code.extend(of.code.iter().cloned());
            sum.tests.extend(of.tests.iter().cloned());
            sum.mutations.extend(of.mutations.iter().cloned());
        }
    }
    sum
}

fn line(text: &mut String, word: &str, places: &BTreeSet<String>, shown: usize) {
    let mut words: Vec<&str> = places.iter().take(shown).map(String::as_str).collect();
    let more = format!("{} more", places.len().saturating_sub(shown));
    if places.is_empty() {
        words.push("MISSING");
    } else if places.len() > shown {
        words.push(&more);
    }
    let _ = writeln!(text, "      {word} {}", words.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "[rules]\nR1 = \"one\"\n\"R1.1\" = \"its part\"\n[cases]\nC1 = \"a case\"\n\
                         C2 = { title = \"another\", later = \"no device yet\" }\n";

    fn outcome(files: &[(&str, &str)]) -> (String, bool) {
        let mut table = Table::default();
        for (place, text) in files {
            table.read(Path::new(place), text).unwrap();
        }
        table.finish(&read_list(SMALL).unwrap(), SHOWN)
    }

    /// What is missing or wrong, without the word.
    fn missing(files: &[(&str, &str)]) -> Vec<String> {
        let (text, wrong) = outcome(files);
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("MISSING: "));
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        assert_eq!(wrong, !lines.is_empty());
        lines
    }

    const CODE_OF_R1: (&str, &str) = ("pci/src/a.rs", "/// Here (R1.1).\nfn f() {}\n");
    const TEST_OF_R1: (&str, &str) = (
        "dma/tests/b.rs",
        "/// It does (R1.1).\n#[test]\nfn t() {}\n#[test]\nfn c1_t() {}\n",
    );

    #[test]
    fn nothing_is_missing_where_each_has_code_and_test() {
        assert_eq!(missing(&[CODE_OF_R1, TEST_OF_R1]), Vec::<String>::new());
    }

    #[test]
    fn what_is_missing_is_named() {
        let expected = [
            "R1: no code cites it",
            "R1: no test shows it",
            "R1.1: no code cites it",
            "R1.1: no test shows it",
            "C1: no test shows it",
        ];
        assert_eq!(missing(&[]), expected);
    }

    #[test]
    fn a_mention_in_code_is_no_test() {
        let code = (
            "driver/src/a.rs",
            "/// As (C1) and (R1.1) want.\nfn c1_f() {}\n",
        );
        assert!(missing(&[code, CODE_OF_R1]).contains(&"C1: no test shows it".to_owned()));
    }

    #[test]
    fn a_mention_in_tests_and_doubles_is_no_code() {
        for place in [
            "pci/src/testing.rs",
            "pci/src/a/tests.rs",
            "tools/emulator/src/a.rs",
            "dma/tests/c.rs",
            "tests/src/a.rs",
        ] {
            let mentioned = (place, "// (R1.1)\n");
            assert_eq!(missing(&[mentioned, TEST_OF_R1]).len(), 2, "{place}");
        }
        let module = ("pci/src/sysfs.rs", "#[cfg(test)]\nmod fake;\n");
        let fake = ("pci/src/sysfs/fake.rs", "// (R1.1)\n");
        assert_eq!(missing(&[module, fake, TEST_OF_R1]).len(), 2);
    }

    #[test]
    fn a_suites_case_counts_where_its_table_names_it() {
        let function = ("tests/src/cases/life.rs", "/// (R1.1)\nfn c1_closes() {}\n");
        let table = (
            "tests/src/cases.rs",
            "const CASES: &[C] = cases! { X: life { c1_closes } };\n",
        );
        assert_eq!(missing(&[CODE_OF_R1, function]).len(), 3);
        assert_eq!(
            missing(&[CODE_OF_R1, function, table]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_row_cites_by_its_name_and_by_its_function() {
        let table = (
            "tests/src/faults.rs",
            "const CASES: &[(&str, F)] = &[(\"c1_stuck\", stuck)];\n/// (R1.1)\nfn stuck() {}\n",
        );
        assert_eq!(missing(&[CODE_OF_R1, table]), Vec::<String>::new());
    }

    #[test]
    fn a_case_left_to_later_with_a_test_is_wrong() {
        let test = ("pci/tests/a.rs", "#[test]\nfn c2_t() {}\n");
        let [wrong] = &missing(&[CODE_OF_R1, TEST_OF_R1, test])[..] else {
            panic!()
        };
        assert!(wrong.contains("c2_t (pci/tests/a.rs:2)"), "{wrong}");
    }

    #[test]
    fn a_citation_of_nothing_is_wrong() {
        let code = (
            "tools/emulator/src/a.rs",
            "// (R1.2)\n#[test]\nfn c9_t() {}\n",
        );
        let wrong = missing(&[CODE_OF_R1, TEST_OF_R1, code]);
        assert!(wrong[0].contains("a.rs:1 cites R1.2"), "{wrong:?}");
        assert!(wrong[1].contains("a.rs:3 cites C9"), "{wrong:?}");
        assert_eq!(wrong.len(), 2);
    }

    #[test]
    fn mutations_are_listed_with_what_they_break() {
        let mut table = Table::default();
        table.mutation("01-skip", "the part is skipped (R1.1)");
        let (text, _) = table.finish(&read_list(SMALL).unwrap(), SHOWN);
        assert_eq!(text.matches("mutation 01-skip").count(), 2, "{text}");
    }

    #[test]
    fn a_long_list_is_cut_and_counted() {
        let places = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
        let mut text = String::new();
        line(&mut text, "code", &places, 3);
        assert_eq!(text, "      code a, b, c, 2 more\n");
    }

    #[test]
    fn a_list_with_nonsense_is_refused() {
        for text in [
            "[rules]\nX1 = \"\"\n[cases]\n",
            "[rules]\n\"R2.1\" = \"\"\n[cases]\n",
            "[rules]\n[cases]\nC1 = 3\n",
            "[rules]\n[cases]\n[more]\n",
        ] {
            assert!(read_list(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_repositorys_list_has_every_rule_and_case() {
        let list = read_list(&fs::read_to_string(root().join(LIST)).unwrap()).unwrap();
        let expected = (1..=13)
            .map(|rule| Id::Rule(rule, 0))
            .chain((1..=47).map(Id::Case));
        for id in expected {
            assert!(list.contains_key(&id), "{id}");
        }
    }
}
