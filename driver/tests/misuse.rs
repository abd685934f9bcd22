//! What the contract forbids and the types can see does not compile.
//!
//! Each program of `misuse/` breaks one rule; beside it stands what the compiler says. A newer compiler may say it in
//! other words: look whether it still refuses for the same reason, and take its words over with
//! `TRYBUILD=overwrite cargo test --package failstop --test misuse`.
#![forbid(unsafe_code)]

/// Release without a proof, forged proofs, handles after their destroy, one queue on two threads (C4) (R3) (R3.1) (R5) (R11).
#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/misuse/*.rs");
}
