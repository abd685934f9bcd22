//! Scenarios that are kept, and what is said of those that do not hold.

use std::fs;
use std::path::{Path, PathBuf};

use failstop_emulator::Emulator;
use failstop_replay::{Failure, Played, Why, keep, replay};
use failstop_scenario::Scenario;
use failstop_scenario::step::Verdict;

fn play(text: &str) -> Result<Played, Failure> {
    let scenario: Scenario = text.parse().unwrap();
    replay(&scenario, &Emulator::on_threads)
}

fn kept() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/scenarios");
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn every_kept_scenario_ends_as_it_says() {
    let paths = kept();
    assert!(!paths.is_empty());
    for path in paths {
        let played = play(&fs::read_to_string(&path).unwrap());
        assert!(played.is_ok(), "{}: {played:#?}", path.display());
    }
}

#[test]
fn a_scenario_that_expects_nothing_ends_as_it_ends() {
    let played =
        play("failstop scenario 1\non emulated 82576\nopen\nport\nsend 9\nreceive 9\nbreak\n");
    let Ok(Played::Ended(ending)) = played else {
        panic!("{played:?}")
    };
    assert_eq!((ending.sent, ending.received, ending.exit), (9, 9, 5));
    assert!(ending.told.contains("revoked"), "{}", ending.told);
}

#[test]
fn what_is_not_as_expected_names_the_step_and_what_it_is() {
    let played =
        play("failstop scenario 1\non emulated 82576\nopen\nbreak\nrecover\nexpect ok 0\n");
    let Err(Failure::Step { number, why, .. }) = played else {
        panic!("{played:?}")
    };
    assert_eq!(number, 4);
    assert!(matches!(why, Why::Unexpected { .. }), "{why}");
    assert!(
        why.to_string().contains("expect revoked recovered 0"),
        "{why}"
    );
}

#[test]
fn a_step_that_means_nothing_on_a_device_is_refused() {
    for text in [
        "failstop scenario 1\non emulated 82576\nopen\ndevice writes\n",
        "failstop scenario 1\non emulated 82576\nport\n",
        "failstop scenario 1\non scripted server\nport\n",
        "failstop scenario 1\non scripted server\ncreate 9 pd\n",
    ] {
        let played = play(text);
        assert!(
            matches!(played, Err(Failure::Step { .. })),
            "{text}: {played:?}"
        );
    }
}

#[test]
fn a_failure_that_is_kept_is_the_same_when_it_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let text = "failstop scenario 1\non emulated 82576\nopen\nexpect refused 3\n";
    let scenario: Scenario = text.parse().unwrap();
    let path = keep(&scenario, "some", folder.path()).unwrap();
    let again: Scenario = fs::read_to_string(path).unwrap().parse().unwrap();
    assert_eq!(again, scenario);
    let failed = replay(&again, &Emulator::on_threads);
    assert!(
        matches!(failed, Err(Failure::Step { number: 2, .. })),
        "{failed:?}"
    );
}

#[test]
fn a_device_that_cannot_be_reached_is_refused() {
    let played = play("failstop scenario 1\non device vfio-user:/no/such/socket\nopen\nport\n");
    let Ok(Played::Ended(ending)) = played else {
        panic!("{played:?}")
    };
    assert_eq!((ending.verdict, ending.exit), (Verdict::Refused, 3));
}
