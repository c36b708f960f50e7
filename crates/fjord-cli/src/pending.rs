//! What the recovery of an image would replay and apply, for the commands that show it.

use fjord_format::{features::Incompat, superblock::RawSuperblock};
use fjord_journal::recovery::Plan;

use crate::output::counted;

/// What is to be recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    /// The superblock, the log or the ijournal mark says that recovery is due. It may be due with
    /// nothing to replay.
    pub(crate) is_due: bool,
    pub(crate) transactions: usize,
    pub(crate) fast_commits: usize,
    /// `None` if damage prevents reading them.
    pub(crate) i_transactions: Option<usize>,
}

impl Pending {
    /// What a log holds. Reads the areas if the ijournal mark is set.
    pub(crate) fn of(plan: &Plan, sb: &RawSuperblock) -> Pending {
        let report = plan.report();
        let is_marked = plan.superblock().ijournal().is_some();
        Pending {
            is_due: report.was_dirty
                || is_marked
                || sb.features().incompat.contains(Incompat::RECOVER),
            transactions: plan.transactions().len(),
            fast_commits: report.fast_commits as usize,
            i_transactions: plan.i_transactions().ok().map(|found| found.len()),
        }
    }

    /// The counts that are not 0: `3 transactions, 1 i-transaction`.
    pub(crate) fn counts(&self) -> String {
        let counts = [
            (self.transactions, "transaction"),
            (self.fast_commits, "fast commit"),
            (self.i_transactions.unwrap_or(0), "i-transaction"),
        ];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0);
        let mut words: Vec<String> = counts.map(|(count, what)| counted(count, what)).collect();
        if self.i_transactions.is_none() {
            words.push("damaged i-transactions".to_owned());
        }
        words.join(", ")
    }

    /// The answer to "Needs recovery", with what to do.
    pub(crate) fn answer(&self) -> String {
        if !self.is_due {
            return "no".to_owned();
        }
        let counts = match self.counts() {
            none if none.is_empty() => "nothing to replay".to_owned(),
            some => some,
        };
        format!("yes ({counts}); run `fjord recover`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_names_what_is_pending() {
        let clean =
            Pending { is_due: false, transactions: 0, fast_commits: 0, i_transactions: Some(0) };
        assert_eq!(clean.answer(), "no");
        let due = Pending { is_due: true, ..clean };
        assert_eq!(due.answer(), "yes (nothing to replay); run `fjord recover`");
        let some = Pending { transactions: 3, i_transactions: Some(1), ..due };
        assert_eq!(some.counts(), "3 transactions, 1 i-transaction");
        let damaged = Pending { i_transactions: None, fast_commits: 2, ..due };
        assert_eq!(damaged.counts(), "2 fast commits, damaged i-transactions");
    }
}
