//! The synchronisation that breaking a device rests on: the standard library's, or loom's when the
//! models run (`--cfg failstop_loom`; plain `cfg(loom)` would change dependencies too).

#[cfg(failstop_loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
#[cfg(not(failstop_loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
