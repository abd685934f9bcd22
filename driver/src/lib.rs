//! The driver.
#![forbid(unsafe_code)]
