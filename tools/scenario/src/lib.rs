//! The one language in which failures are told: faults of a device and its server, when they begin,
//! and what a program does meanwhile. Command lines, the emulator's control socket, recorded
//! failures and generated tests all speak it.
//!
//! A scenario is a sequence, so it is written one step a line: it diffs, it comments, and it shrinks
//! by leaving lines out.
//!
//! ```text
//! failstop scenario 1                     # the first line
//! on emulated 82576                       # or: on scripted server|kernel|nothing, on device 0000:01:00.0
//! seed 17                                 # optional: what is random below derives from it
//! fault rxq-stuck @ destroy=2             # from here on: see fault::TABLE and Trigger
//! open | port | recover | close           # of the device under test
//! wait MS
//! create K OBJECT | destroy K OBJECT | try-destroy K OBJECT     # kit K; pd, mr, cq, rq, sq
//! post K N | poll K N | reap K | send N | receive N             # frames
//! device receives K N | device sends K N                        # what a scripted device does
//! device writes | device writes-everywhere | device lies K SLOT WORD
//! script stop rx|tx QUEUE busy N|slow N|never|all-ones|zero     # what a scripted device will do
//! script start rx|tx | script bring-up | script reads-as-master
//! script reset nothing|restores-master|fails ERRNO
//! script software works|nothing|no-answer|panics
//! script config all-ones|zero [READS]
//! host map-fails N ERRNO                                        # the N-th map from now
//! host unmap busy|absent|partial|fails ERRNO                    # the next unmap
//! break | break-and-hold | heal | clear-faults
//! expect VERDICT EXIT                     # ok, refused, revoked recovered, quarantined fenced ...
//! ```
//!
//! Whatever parses is written back by `Display` in one form, which parses to the same.
//!
//! ```
//! use failstop_scenario::{Scenario, Spec};
//!
//! let spec: Spec = "rxq-stuck:quiet@destroy=2".parse()?;
//! assert_eq!(spec.to_string(), "rxq-stuck:quiet@destroy=2");
//!
//! let text = "failstop scenario 1\non emulated 82576\nfault gone @ bme-on+bme-off\nbreak\n";
//! let scenario: Scenario = text.parse()?;
//! assert_eq!(scenario.to_string().parse::<Scenario>()?, scenario);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod errno;
pub mod fault;
pub mod scenario;
pub mod spec;
pub mod step;
pub mod table;
pub mod trigger;
mod words;

pub use errno::Errno;
pub use fault::Fault;
pub use scenario::{On, Scenario, ScenarioError};
pub use spec::{ParseError, Spec};
pub use step::Step;
pub use table::{Entry, TABLE};
pub use trigger::{Count, Moment, Trigger};
pub use words::NoSuchWord;
