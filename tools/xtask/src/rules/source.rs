//! What a source file holds for the table of rules: its citations, and its tests.
//!
//! A file is read as tokens, not as items: tests inside macros (`proptest!`) look like all others
//! then, and what lies between two tokens is a comment.

use std::collections::BTreeSet;
use std::ops::Range;
use std::str::FromStr;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::citations::{self, Id};

/// A citation and the line of the file that it stands in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Citation {
    pub(crate) id: Id,
    pub(crate) line: usize,
}

/// A function with a body.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) line: usize,
    /// It has an attribute that makes it a test, and none that ignores it.
    pub(crate) is_test: bool,
    /// What its documentation, the comments in it and its name cite.
    pub(crate) cites: BTreeSet<Id>,
}

/// A row of a table of tests: the name of a test, and the function that is run.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) function: String,
    pub(crate) line: usize,
}

/// A source file.
#[derive(Default, Debug)]
pub(crate) struct Source {
    /// Citations in comments outside of everything that is compiled for tests only.
    pub(crate) code: Vec<Citation>,
    /// All citations in comments.
    pub(crate) all: Vec<Citation>,
    pub(crate) functions: Vec<Function>,
    /// Rows of tables of tests: of `cases!`, and of constants named `CASES`.
    pub(crate) rows: Vec<Row>,
    /// Modules in files of their own that are compiled for tests only.
    pub(crate) test_modules: Vec<String>,
}

impl Source {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let tokens = TokenStream::from_str(text).map_err(|error| anyhow!("{error}"))?;
        let mut walk = Walk::default();
        walk.items(tokens.clone());
        let mut comments = Vec::new();
        let mut end = 0;
        spans(tokens, &mut |span| {
            if text[span.clone()].starts_with("//") || text[span.clone()].starts_with("/*") {
                comments.push(span.clone());
            }
            comments.push(end..span.start.max(end));
            end = end.max(span.end);
        });
        comments.push(end..text.len());
        comments.retain(|comment| !comment.is_empty());
        // A documentation comment is several tokens.
        comments.dedup();
        let mut cited: Vec<(usize, Id)> = comments
            .into_iter()
            .flat_map(|comment| {
                let found = citations::in_comment(&text[comment.clone()]).into_iter();
                found.map(move |(place, id)| (comment.start + place, id))
            })
            .collect();
        cited.sort();
        cited.dedup();

        let line = |place: usize| text[..place].matches('\n').count() + 1;
        let citation = |&(place, id): &(usize, Id)| Citation {
            id,
            line: line(place),
        };
        let outside_tests =
            |(place, _): &&(usize, Id)| !walk.tests.iter().any(|span| span.contains(place));
        let functions = walk.functions.iter().map(|found| Function {
            name: found.name.clone(),
            line: line(found.place),
            is_test: found.is_test,
            cites: cited
                .iter()
                .filter(|(place, _)| found.span.contains(place))
                .map(|&(_, id)| id)
                .chain(citations::in_name(&found.name))
                .collect(),
        });
        let rows = walk.rows.iter().map(|(place, name, function)| Row {
            name: name.clone(),
            function: function.clone(),
            line: line(*place),
        });
        Ok(Self {
            code: cited.iter().filter(outside_tests).map(citation).collect(),
            all: cited.iter().map(citation).collect(),
            functions: functions.collect(),
            rows: rows.collect(),
            test_modules: walk.test_modules,
        })
    }
}

/// Calls `each` with the bytes of every token, in order.
fn spans(tokens: TokenStream, each: &mut impl FnMut(Range<usize>)) {
    for token in tokens {
        if let TokenTree::Group(group) = token {
            each(group.span_open().byte_range());
            spans(group.stream(), each);
            each(group.span_close().byte_range());
        } else {
            each(token.span().byte_range());
        }
    }
}

struct FoundFunction {
    name: String,
    place: usize,
    span: Range<usize>,
    is_test: bool,
}

/// A walk through the items of a file, those in modules, functions and macros included.
#[derive(Default)]
struct Walk {
    functions: Vec<FoundFunction>,
    rows: Vec<(usize, String, String)>,
    /// What is compiled for tests only.
    tests: Vec<Range<usize>>,
    test_modules: Vec<String>,
}

/// What the attributes before an item say.
#[derive(Default)]
struct Attributes {
    start: Option<usize>,
    test: bool,
    ignored: bool,
    for_tests: bool,
}

impl Attributes {
    fn take(&mut self, attribute: &TokenStream) {
        let words = words(attribute);
        let path = words.iter().take_while(|word| !word.starts_with('('));
        match path.last().map(String::as_str) {
            Some("test") => self.test = true,
            Some("ignore") => self.ignored = true,
            Some("cfg") => {
                let condition = &words[1..];
                self.for_tests |= condition.iter().any(|word| word == "test")
                    && !condition.iter().any(|word| word == "not");
            }
            _ => {}
        }
    }
}

/// The names in a stream of tokens, `(` and `=` where their like stand.
fn words(tokens: &TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    for token in tokens.clone() {
        match token {
            TokenTree::Ident(ident) => found.push(ident.to_string()),
            TokenTree::Punct(punct) if punct.as_char() == '=' => found.push("(".into()),
            TokenTree::Group(group) => {
                found.push("(".into());
                found.extend(words(&group.stream()));
            }
            _ => {}
        }
    }
    found
}

impl Walk {
    fn items(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut attributes = Attributes::default();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let start = token.span().byte_range().start;
            match (token, tokens.get(at + 1), tokens.get(at + 2)) {
                (TokenTree::Punct(hash), Some(TokenTree::Group(attribute)), _)
                    if hash.as_char() == '#' && attribute.delimiter() == Delimiter::Bracket =>
                {
                    attributes.start.get_or_insert(start);
                    attributes.take(&attribute.stream());
                    at += 2;
                    continue;
                }
                (TokenTree::Ident(word), Some(TokenTree::Ident(name)), _) if word == "fn" => {
                    let name = name.to_string();
                    let body = find(&tokens, at, |token| {
                        is_group(token, Delimiter::Brace) || is_punct(token, ';')
                    });
                    if let Some((body, TokenTree::Group(group))) = body {
                        let span =
                            attributes.start.unwrap_or(start)..group.span_close().byte_range().end;
                        if attributes.test || attributes.for_tests {
                            self.tests.push(span.clone());
                        }
                        self.functions.push(FoundFunction {
                            name,
                            place: start,
                            span,
                            is_test: attributes.test && !attributes.ignored,
                        });
                        self.items(group.stream());
                        at = body;
                    }
                    attributes = Attributes::default();
                }
                (TokenTree::Ident(word), Some(TokenTree::Ident(name)), body) if word == "mod" => {
                    if let Some(TokenTree::Group(group)) = body {
                        if attributes.for_tests {
                            self.tests.push(start..group.span_close().byte_range().end);
                        }
                        self.items(group.stream());
                    } else if attributes.for_tests {
                        self.test_modules.push(name.to_string());
                    }
                    attributes = Attributes::default();
                    at += 2;
                }
                (TokenTree::Ident(word), Some(TokenTree::Ident(name)), _)
                    if word == "const" && name == "CASES" =>
                {
                    let end = find(&tokens, at, |token| is_punct(token, ';'));
                    let end = end.map_or(tokens.len(), |(end, _)| end);
                    for token in &tokens[at..end] {
                        self.pairs(token);
                    }
                    // Its value may be a `cases!`, which the walk meets next.
                    at += 1;
                }
                (TokenTree::Ident(name), Some(bang), Some(TokenTree::Group(group)))
                    if name == "cases" && is_punct(bang, '!') =>
                {
                    self.names(group.stream());
                    at += 2;
                }
                (TokenTree::Group(group), ..) => {
                    self.items(group.stream());
                    // A visibility such as `pub(crate)` is between the attributes and their item.
                    if group.delimiter() == Delimiter::Brace {
                        attributes = Attributes::default();
                    }
                }
                (token, ..) if is_punct(token, ';') => attributes = Attributes::default(),
                _ => {}
            }
            at += 1;
        }
    }

    /// The pairs of a name and a function in a table of tests, however deep.
    fn pairs(&mut self, token: &TokenTree) {
        let TokenTree::Group(group) = token else {
            return;
        };
        let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
        if let [TokenTree::Literal(name), comma, path @ ..] = &tokens[..]
            && is_punct(comma, ',')
            && let Some(function) = path.iter().rev().find_map(ident)
        {
            let text = name.to_string();
            if let Some(name) = text
                .strip_prefix('"')
                .and_then(|text| text.strip_suffix('"'))
            {
                self.rows.push((
                    group.span_open().byte_range().start,
                    name.to_owned(),
                    function,
                ));
            }
        }
        for token in &tokens {
            self.pairs(token);
        }
    }

    /// The names in the innermost braces of `cases!`.
    fn names(&mut self, tokens: TokenStream) {
        for token in tokens {
            let TokenTree::Group(group) = token else {
                continue;
            };
            for token in group.stream() {
                if let TokenTree::Ident(name) = token {
                    let place = name.span().byte_range().start;
                    self.rows.push((place, name.to_string(), name.to_string()));
                }
            }
        }
    }
}

fn find(
    tokens: &[TokenTree],
    from: usize,
    is: impl Fn(&TokenTree) -> bool,
) -> Option<(usize, &TokenTree)> {
    (from..).zip(&tokens[from..]).find(|(_, token)| is(token))
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

fn is_group(token: &TokenTree, delimiter: Delimiter) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == delimiter)
}

fn ident(token: &TokenTree) -> Option<String> {
    match token {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Source {
        Source::parse(text).unwrap()
    }

    fn lines(citations: &[Citation]) -> Vec<(String, usize)> {
        let pair = |citation: &Citation| (citation.id.to_string(), citation.line);
        citations.iter().map(pair).collect()
    }

    fn tests(source: &Source) -> Vec<(&str, Vec<String>)> {
        let tests = source.functions.iter().filter(|function| function.is_test);
        tests
            .map(|test| {
                let cites = test.cites.iter().map(Id::to_string).collect();
                (test.name.as_str(), cites)
            })
            .collect()
    }

    #[test]
    fn comments_of_every_kind_cite_with_their_line() {
        let source = parse(
            "//! The file (R1).\n/// Ünicode before it (R2).\nfn f() {\n    g(); // at the end [R3.1]\n}\n/* and [C4] */\n",
        );
        let expected = [("R1", 1), ("R2", 2), ("R3.1", 4), ("C4", 6)];
        let expected: Vec<_> = expected.map(|(id, line)| (id.to_owned(), line)).into();
        assert_eq!(lines(&source.code), expected);
    }

    #[test]
    fn strings_cite_nothing() {
        let source =
            parse("const A: &str = \"as (R1) says // [R2]\";\nconst B: [R3; 1] = f(C4);\n");
        assert_eq!(source.all, []);
    }

    #[test]
    fn what_is_compiled_for_tests_only_is_no_code() {
        let source = parse(
            "#[cfg(test)]\nmod tests {\n    // (R1)\n}\n/// (R2)\n#[test]\nfn t() {}\n#[cfg(test)]\nmod other;\n\
             #[cfg(not(test))]\nmod code { /* (R3) */ }\n",
        );
        assert_eq!(lines(&source.code), [("R3".to_owned(), 11)]);
        assert_eq!(source.test_modules, ["other"]);
    }

    #[test]
    fn a_test_cites_by_name_documentation_and_body() {
        let source =
            parse("/// It holds (R2).\n#[test]\nfn c6_part() {\n    // (R3.1)\n}\n// (R5)\n");
        assert_eq!(
            tests(&source),
            [("c6_part", vec!["R2".into(), "R3.1".into(), "C6".into()])]
        );
    }

    #[test]
    fn tests_inside_macros_and_modules_are_found() {
        let source = parse(
            "mod m { /// (R9)\n #[test] pub(crate) fn o() {} proptest! {\n #![proptest_config(x)]\n /// (R8)\n #[test]\n fn p(x in any::<u8>()) { } } }\n\
             loom::model! { #[tokio::test] async fn q() {} }",
        );
        assert_eq!(
            tests(&source),
            [
                ("o", vec!["R9".to_owned()]),
                ("p", vec!["R8".to_owned()]),
                ("q", Vec::new())
            ]
        );
    }

    #[test]
    fn ignored_tests_and_helpers_are_no_tests() {
        let source = parse(
            "#[test]\n#[ignore = \"slow\"]\nfn c1_a() {}\nfn c2_b() {}\n#[cfg(test)]\nfn c3_c() {}\n#[inline] fn c4_d();#[x] struct S;",
        );
        assert_eq!(tests(&source), []);
    }

    #[test]
    fn an_attribute_belongs_to_the_next_item_only() {
        let source =
            parse("trait T {\n #[test]\n fn a();\n fn c1_b() {}\n}\n#[test]\nuse x;\nfn c2_c() {}");
        assert_eq!(tests(&source), []);
    }

    #[test]
    fn rows_of_tables_are_found() {
        let source = parse(
            "pub const CASES: &[Case] = cases! {\n Loopback: life {\n c1_a,\n b,\n }\n};\n\
             const CASES: &[(&str, F)] = &[(\"c2_c\", run), (\n\"d\",\nm::go,\n)];\nconst OTHER: &[(&str, F)] = &[(\"c3_e\", f)];",
        );
        let rows: Vec<_> = source
            .rows
            .iter()
            .map(|row| (row.name.as_str(), row.function.as_str(), row.line))
            .collect();
        assert_eq!(
            rows,
            [
                ("c1_a", "c1_a", 3),
                ("b", "b", 4),
                ("c2_c", "run", 7),
                ("d", "go", 7)
            ]
        );
    }

    #[test]
    fn what_is_no_source_is_an_error() {
        assert!(Source::parse("fn f( {").is_err());
    }
}
