//! Random lives of a device against a reference model of the contract.
//!
//! After each step: what the backend holds mapped is in the ledger (R2); nothing that was released is
//! reachable (R3); no address is handed out again before it is unmapped and the device forgot it
//! (R4.6); every posted request ends in exactly one completion, received frames in order (R7); a
//! destroy of a broken device touches nothing (R6); no table names a queue that does not run; a device that nobody broke stays well (C41, C45).
//! A watchdog ends the run when a step does not (R11).
//!
//! The address space by itself, with faults of map and unmap, has a model of its own in `dma`.

mod generate;
mod world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;
use std::{fs, process, thread};

use failstop_scenario::{On, Scenario};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use generate::steps;
use world::steps::Step;
use world::{Behind, Breach, World};

/// Steps of one life of the process.
const STEPS: usize = 200;

/// Steps taken so far, and the sequences that are under way: for the watchdog.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static UNDER_WAY: Mutex<BTreeMap<String, Vec<Step>>> = Mutex::new(BTreeMap::new());

/// Ends the process when no step ended for minutes, and says in which sequences.
fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        thread::spawn(|| {
            let mut last = u64::MAX;
            loop {
                thread::sleep(Duration::from_secs(120));
                let now = TAKEN.load(Ordering::Relaxed);
                if now == last
                    && let Ok(sequences) = UNDER_WAY.lock()
                    && !sequences.is_empty()
                {
                    eprintln!("a step does not end: {sequences:?}");
                    process::abort();
                }
                last = now;
            }
        });
    });
}

/// What is asked after each step, beside what the model asks by itself.
type Oracle<'a> = &'a dyn Fn(&World) -> Result<(), Breach>;

/// Nothing.
const NO_MORE: Oracle<'static> = &|_| Ok(());

/// Takes the steps; when one finds the contract broken, which it was.
fn run(behind: Behind, steps: &[Step], oracle: Oracle<'_>) -> Result<(), (usize, String)> {
    let name = thread::current().name().unwrap_or("model").to_owned();
    if let Ok(mut sequences) = UNDER_WAY.lock() {
        sequences.insert(name.clone(), steps.to_vec());
    }
    let mut world = World::new(behind);
    for (at, step) in steps.iter().enumerate() {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        let taken = world.step(step).and_then(|()| oracle(&world));
        taken.map_err(|error| (at, error.to_string()))?;
    }
    let end = |error: Breach| (steps.len(), error.to_string());
    world.close().map_err(end)?;
    if let Ok(mut sequences) = UNDER_WAY.lock() {
        sequences.remove(&name);
    }
    Ok(())
}

/// As few of the steps as still break the contract, and what they break.
fn shrink(
    behind: Behind,
    mut steps: Vec<Step>,
    (at, mut error): (usize, String),
    oracle: Oracle<'_>,
) -> (Vec<Step>, String) {
    steps.truncate(at + 1);
    for _ in 0..3 {
        for at in (0..steps.len()).rev() {
            let mut fewer = steps.clone();
            fewer.remove(at);
            if let Err((at, why)) = run(behind, &fewer, oracle) {
                (steps, error) = (fewer, why);
                steps.truncate(at + 1);
            }
        }
    }
    (steps, error)
}

/// Writes the steps down, for `failstop replay`.
fn keep(behind: Behind, steps: &[Step], name: &str) -> PathBuf {
    let scenario = Scenario {
        on: On::Scripted(behind),
        seed: None,
        steps: steps.iter().map(Step::written).collect(),
    };
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let folder = target.join("failures");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{name}.scenario"));
    fs::write(&path, scenario.to_string()).unwrap();
    path
}

/// Sequences of each of the four runs below: 10,000 in all.
const SEQUENCES: u32 = 2500;

fn model(behind: Behind, with_faults: bool) {
    watch();
    let asked = std::env::var("FAILSTOP_MODEL_SEQUENCES").ok();
    let sequences = asked
        .and_then(|text| text.parse().ok())
        .unwrap_or(SEQUENCES);
    let mut runner = TestRunner::default();
    let strategy = proptest::collection::vec(steps(with_faults), STEPS);
    for _ in 0..sequences {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        if let Err(found) = run(behind, &steps, NO_MORE) {
            let (steps, error) = shrink(behind, steps, found, NO_MORE);
            let path = keep(behind, &steps, &format!("model-{behind}-{}", process::id()));
            let written: Vec<_> = steps
                .iter()
                .map(|step| step.written().to_string())
                .collect();
            panic!(
                "behind {behind}: {error}\n{}\nfailstop replay {}",
                written.join("\n"),
                path.display()
            );
        }
    }
}

#[test]
fn a_device_behind_a_server_that_nothing_goes_wrong_with() {
    model(Behind::Server, false);
}

#[test]
fn a_device_behind_a_server_with_faults() {
    model(Behind::Server, true);
}

#[test]
fn a_device_behind_an_iommu_with_faults() {
    model(Behind::Kernel, true);
}

#[test]
fn a_device_that_nothing_is_enforced_against_with_faults() {
    model(Behind::Nothing, true);
}

/// The oracle is wrong on purpose: it takes a broken device for a breach.
fn never_breaks(world: &World) -> Result<(), Breach> {
    match world.is_down() {
        true => Err("the device is broken".to_owned().into()),
        false => Ok(()),
    }
}

#[test]
fn what_an_oracle_finds_is_shrunk_and_written_down_and_found_again_in_what_was_written() {
    let mut runner = TestRunner::deterministic();
    let strategy = proptest::collection::vec(steps(false), STEPS);
    let found = (0..100).find_map(|_| {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        let found = run(Behind::Server, &steps, &never_breaks).err()?;
        Some((steps, found))
    });
    let (steps, found) = found.expect("no device was broken");
    let (steps, error) = shrink(Behind::Server, steps, found, &never_breaks);
    assert_eq!(steps.len(), 1, "{steps:?}");
    let name = format!("model-on-purpose-{}", process::id());
    let path = keep(Behind::Server, &steps, &name);
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();

    let written: Scenario = text.parse().unwrap();
    assert_eq!(written.on, On::Scripted(Behind::Server));
    let again: Vec<_> = written.steps.iter().map(|s| Step::of(s).unwrap()).collect();
    let found = run(Behind::Server, &again, &never_breaks).unwrap_err();
    assert_eq!(found, (0, error));
}

#[test]
fn steps_are_read_as_they_are_written() {
    let mut runner = TestRunner::deterministic();
    let strategy = proptest::collection::vec(steps(true), 5000);
    for step in strategy.new_tree(&mut runner).unwrap().current() {
        assert_eq!(Step::of(&step.written()), Some(step));
    }
}
