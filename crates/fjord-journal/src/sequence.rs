//! The number of a commit.

use fjord_format::types::Tid;

/// Number of a commit in the log: without gaps, in the order of commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sequence(pub(crate) Tid);

impl Sequence {
    /// The one after it.
    pub(crate) fn next(self) -> Sequence {
        Sequence(self.0.next())
    }

    /// Whether it is `other` or comes after it.
    pub(crate) fn at_least(self, other: Sequence) -> bool {
        self.0.at_least(other.0)
    }
}
