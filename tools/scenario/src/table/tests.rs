//! The table keeps what it says.

use super::*;
use crate::fault::MessageType;
use crate::spec::Spec;

/// Every text that a form allows, with an example of each argument in capitals.
fn expand(form: &str) -> Vec<String> {
    let Some(open) = form.find('[') else {
        return vec![examples(form)];
    };
    let close = open + form[open..].find(']').unwrap();
    let (before, inside, after) = (&form[..open], &form[open + 1..close], &form[close + 1..]);
    let mut texts = Vec::new();
    for rest in expand_rest(after) {
        texts.push(format!("{}{rest}", examples(before)));
        for choice in inside.trim_start_matches(':').split('|') {
            texts.push(format!("{}:{}{rest}", examples(before), examples(choice)));
        }
    }
    texts
}

fn expand_rest(rest: &str) -> Vec<String> {
    if rest.is_empty() {
        vec![String::new()]
    } else {
        expand(rest)
    }
}

fn examples(text: &str) -> String {
    [
        ("MS", "20"),
        ("US", "300"),
        ("BYTES", "9000"),
        ("ERRNO", "12"),
        ("TYPE", "unmap"),
    ]
    .into_iter()
    .fold(text.to_owned(), |text, (name, example)| {
        text.replace(name, example)
    })
}

#[test]
fn every_form_parses_in_all_its_variants_and_survives_being_written() {
    for entry in TABLE {
        for text in expand(&entry.form()) {
            let spec: Spec = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(spec.fault.name(), entry.name);
            let written = spec.to_string();
            assert_eq!(
                written.parse::<Spec>().as_ref(),
                Ok(&spec),
                "{text} -> {written}"
            );
        }
    }
}

#[test]
fn no_name_is_there_twice() {
    let mut names: Vec<&str> = TABLE.iter().map(|entry| entry.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
}

#[test]
fn the_help_names_every_fault_and_every_type() {
    let help = help();
    for entry in TABLE {
        assert!(help.contains(&entry.form()), "{}", entry.name);
    }
    for of in MessageType::ALL {
        assert!(help.contains(of.word()), "{of}");
    }
}

#[test]
fn no_name_has_a_comma_or_an_at_sign() {
    for entry in TABLE {
        assert!(!entry.form().contains([',', '@', ' ']), "{}", entry.name);
    }
}
