//! Every input of the corpus, and every one that ever made a target panic, as an ordinary test: on the
//! stable toolchain, without libFuzzer.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use failstop_fuzz::{TARGETS, Target, seeds};

fn folder(kind: &str, target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(kind)
        .join(target.name)
}

/// The files of a folder that may not be there.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = fs::read(&path).unwrap();
        (path, bytes)
    };
    paths.into_iter().map(read).collect()
}

/// Runs them all; how deep the deepest came, and which made it panic.
fn run(target: &Target, inputs: &[(PathBuf, Vec<u8>)]) -> (u64, Vec<String>) {
    let (mut deepest, mut failed) = (0, Vec::new());
    for (path, bytes) in inputs {
        match catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))) {
            Ok(depth) => deepest = deepest.max(depth),
            Err(_) => failed.push(path.display().to_string()),
        }
    }
    (deepest, failed)
}

#[test]
fn no_input_of_the_corpus_makes_a_target_panic_and_one_of_each_reaches_deep() {
    let mut complaints = Vec::new();
    for target in TARGETS {
        let inputs = files(&folder("corpus", target));
        let (deepest, failed) = run(target, &inputs);
        complaints.extend(failed);
        let (name, least) = (target.name, target.depth);
        if deepest < least {
            complaints.push(format!("{name} comes {deepest} deep, not {least}"));
        }
    }
    assert_eq!(complaints, [""; 0]);
}

#[test]
fn inputs_that_once_made_a_target_panic_do_so_no_more() {
    for target in TARGETS {
        let (_, failed) = run(target, &files(&folder("crashes", target)));
        assert_eq!(failed, [""; 0], "{}", target.name);
    }
}

/// With `FAILSTOP_FUZZ_SEEDS=write` it makes them so.
#[test]
fn the_corpus_holds_every_seed_as_it_is_made_now() {
    let write = std::env::var("FAILSTOP_FUZZ_SEEDS").is_ok_and(|word| word == "write");
    for target in TARGETS {
        let folder = folder("corpus", target);
        let seeds = seeds::of(target.name);
        assert!(!seeds.is_empty(), "{}", target.name);
        for (name, bytes) in seeds {
            let path = folder.join(name);
            if write {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            let found = fs::read(&path).unwrap_or_default();
            assert!(found == bytes, "{} is another", path.display());
        }
    }
}
