//! The vfio-user client against a server that nobody here wrote, and against servers that lie,
//! hang and die.

mod connecting;
mod interop;
mod memory;
mod replies;
mod silence;
mod support;
mod threads;
