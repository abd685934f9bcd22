//! Bursts and completions.
#![forbid(unsafe_code)]
