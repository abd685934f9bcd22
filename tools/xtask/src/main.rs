//! Set-up, tests and virtual machines.
fn main() {}
