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

/// All of `items` in a long run; else `check` or `default` of them, evenly spread and turned by `seed`, so that runs
/// with different seeds have different ones.
pub fn some_of<T: Clone>(items: &[T], check: usize, default: usize, seed: u64) -> Vec<T> {
    let count =
        pick(check, default, items.len()).clamp(usize::from(!items.is_empty()), items.len());
    spread(items, count, seed)
}

fn spread<T: Clone>(items: &[T], count: usize, seed: u64) -> Vec<T> {
    let length = items.len();
    let turn = if length == 0 { 0 } else { (seed % length as u64) as usize };
    let mut places: Vec<usize> =
        (0..count).map(|index| (index * length / count + turn) % length).collect();
    places.sort_unstable();
    places.into_iter().map(|place| items[place].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_items_are_distinct_and_reach_all() {
        let items: Vec<u64> = (0..7).collect();
        let mut reached = std::collections::BTreeSet::new();
        for seed in 0..7 {
            let some = spread(&items, 3, seed);
            assert_eq!(some.len(), 3);
            assert!(some.windows(2).all(|pair| pair[0] < pair[1]), "{some:?}");
            reached.extend(some);
        }
        assert_eq!(reached.len(), 7);
        assert_eq!(spread(&items, 7, 5), items);
        assert!(spread::<u64>(&[], 0, 5).is_empty());
    }
}
