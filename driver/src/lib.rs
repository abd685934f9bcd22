//! The driver.
#![forbid(unsafe_code)]

pub mod igb;
