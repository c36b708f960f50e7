//! Order by prefix: which i-transactions come behind which barriers.
//!
//! Owns the rule by which recovery drops i-transactions. Invariant: what is dropped depends on the
//! i-transactions found and the last commit only, so that a second recovery drops the same.

use std::collections::{BTreeMap, HashSet};

use super::ITransaction;
use crate::types::Tid;

/// Place of an i-transaction among barriers. Barriers of a transaction count from 1; those of transactions
/// that have committed need no count, since the commit has all that they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Its own number among the barriers of its transaction; 0: it is none.
    pub barrier: u32,
    /// The newest transaction that barriers before it belong to.
    pub newest: Tid,
    /// Number of the last barrier of `newest` before it, itself included; 0: there is none.
    pub behind_newest: u32,
    /// The same for the transaction before `newest`. There are no barriers before it of others that are not
    /// durable.
    pub behind_older: u32,
}

impl Order {
    /// Transactions of the barriers before it, with the number of the last one of each.
    fn behind(&self) -> [(Tid, u32); 2] {
        [(self.newest, self.behind_newest), (Tid(self.newest.0.wrapping_sub(1)), self.behind_older)]
    }
}

/// For each i-transaction whether it comes behind a barrier that is not among them. All are newer than
/// `committed`.
pub fn behind_gaps(transactions: &[ITransaction], committed: Tid) -> Vec<bool> {
    let mut found: BTreeMap<u32, HashSet<u32>> = BTreeMap::new();
    for transaction in transactions.iter().filter(|it| it.order.barrier != 0) {
        found.entry(transaction.tid.0).or_default().insert(transaction.order.barrier);
    }
    // Of each transaction the barriers up to the first that is missing.
    let whole =
        |numbers: &HashSet<u32>| (1..).take_while(|number| numbers.contains(number)).count();
    let whole: BTreeMap<u32, usize> =
        found.iter().map(|(&tid, numbers)| (tid, whole(numbers))).collect();
    let has_all = |(tid, last): (Tid, u32)| {
        last == 0
            || !tid.newer_than(committed)
            || whole.get(&tid.0).is_some_and(|&whole| whole >= last as usize)
    };
    transactions.iter().map(|it| !it.order.behind().into_iter().all(has_all)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::InodeNo;

    fn transaction(tid: u32, barrier: u32, newest: u32, behind: [u32; 2]) -> ITransaction {
        let [behind_newest, behind_older] = behind;
        let order = Order { barrier, newest: Tid(newest), behind_newest, behind_older };
        ITransaction::empty(Tid(tid), 0, InodeNo(12), order)
    }

    #[test]
    fn all_count_up_to_the_first_gap() {
        let barriers = [1, 2, 4, 5].map(|number| transaction(9, number, 9, [number, 0]));
        assert_eq!(behind_gaps(&barriers, Tid(8)), [false, false, true, true]);
        let between = [transaction(9, 0, 9, [2, 0]), transaction(9, 0, 9, [3, 0])];
        let all = [&barriers[..], &between].concat();
        assert_eq!(behind_gaps(&all, Tid(8))[4..], [false, true]);
        assert_eq!(behind_gaps(&between, Tid(8)), [true, true]);
    }

    #[test]
    fn barriers_of_committed_transactions_are_there() {
        let behind_both = transaction(10, 1, 10, [1, 3]);
        let of_older = [1, 3].map(|number| transaction(9, number, 9, [number, 0]));
        let all = [&of_older[..], std::slice::from_ref(&behind_both)].concat();
        assert_eq!(behind_gaps(&all, Tid(8)), [false, true, true], "the second of 9 is missing");
        assert_eq!(behind_gaps(&[behind_both], Tid(9)), [false]);
    }

    #[test]
    fn without_barriers_nothing_is_dropped() {
        let transactions = [5, 6].map(|tid| transaction(tid, 0, 0, [0, 0]));
        assert_eq!(behind_gaps(&transactions, Tid(4)), [false, false]);
    }

    #[test]
    fn numbers_of_transactions_go_round() {
        let around = transaction(0, 1, 0, [1, 1]);
        assert_eq!(behind_gaps(std::slice::from_ref(&around), Tid(u32::MAX)), [false]);
        assert_eq!(behind_gaps(&[around], Tid(u32::MAX - 1)), [true]);
    }
}
