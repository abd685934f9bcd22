//! The model of the contract, and the scripted device that it looks at: those of T0.

#[expect(
    dead_code,
    reason = "sequences are made and written down where they are tested"
)]
#[path = "../../../driver/tests/model/world.rs"]
mod world;

use failstop_scenario::Step;
use failstop_scenario::scenario::Behind;

use crate::{Failure, Why};

/// Takes the steps, and then closes the device; how many there were.
pub(crate) fn play(behind: Behind, steps: &[Step]) -> Result<usize, Failure> {
    let failure = |number: usize, step: &Step, why: Why| Failure::Step {
        number,
        step: step.to_string(),
        why,
    };
    let mut world = world::World::new(behind);
    for (number, step) in (1..).zip(steps) {
        let known = world::steps::Step::of(step);
        let known = known.ok_or_else(|| failure(number, step, Why::NotHere))?;
        let taken = world.step(&known);
        taken.map_err(|breach| failure(number, step, Why::Breach(breach.to_string())))?;
    }
    let closed = world.close();
    closed.map_err(|breach| {
        failure(
            steps.len() + 1,
            &Step::Close,
            Why::Breach(breach.to_string()),
        )
    })?;
    Ok(steps.len())
}
