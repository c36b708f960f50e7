//! How much of its matrices and rounds a test covers: `FJORD_TEST_SIZE`, which `cargo xtask` sets.
//!
//! Owns no state. docs/testing.md says what each size leaves out.

/// Sizes of a test run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// The smallest that means something: `cargo xtask check`.
    Check,
    /// Each kind once: `cargo xtask test`, and `cargo test`.
    Default,
    /// All: `cargo xtask test --long`.
    Long,
}

/// The size of this run.
///
/// # Panics
/// `FJORD_TEST_SIZE` has another value than `check`, `default` or `long`.
pub fn size() -> Size {
    match std::env::var("FJORD_TEST_SIZE").as_deref() {
        Ok("check") => Size::Check,
        Ok("default") | Err(_) => Size::Default,
        Ok("long") => Size::Long,
        Ok(other) => panic!("FJORD_TEST_SIZE={other}: use check, default or long"),
    }
}

/// The value for the size of this run.
pub fn pick<T>(check: T, default: T, long: T) -> T {
    match size() {
        Size::Check => check,
        Size::Default => default,
        Size::Long => long,
    }
}
