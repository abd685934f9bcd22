//! The failstop command.
fn main() {}
