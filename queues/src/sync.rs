//! The synchronisation that breaking a device rests on. The models in `tests/loom.rs` compile what is
//! built on it a second time, with loom's in its place.

pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
