//! Epochs: what a barrier call has ordered, so that its caller can learn later when it is durable.
//!
//! A barrier call ends an epoch: it has the next number. Epochs are durable in the order of their
//! numbers. Over a device that keeps order nothing waits for them, so their state is derived: an epoch is
//! durable when a transaction is, or when the device has been flushed since.
//!
//! Owns the epochs that are perhaps not durable. Invariants:
//! - numbers ascend in `pending`, and so do the transactions that settle them: the flush of such a
//!   transaction begins after all writes of the epoch were submitted as ordered ones;
//! - a device with native barriers may complete a transaction while an earlier ordered write can still
//!   fail. Only a flush, which fails then, settles data in place there;
//! - of neighbours that the same transaction settles only the newest is kept, so there are few; an
//!   older one counts as durable a little later than it is.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};

use fjord_block::lock::{Mutex, Rank};
use fjord_format::Tid;

use crate::error::Result;
use crate::fs::FsInner;

/// What a barrier call ([`crate::File::fbarrier`]) has put in order: everything written to its file
/// before, and all earlier epochs. Of two epochs of a mount the later is greater, and durable no earlier; those of
/// two mounts have no order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch {
    mount: u64,
    number: u64,
}

impl Epoch {
    /// The epoch of this number of the mount with this identity: what [`Epoch::mount`] and [`Epoch::number`] gave,
    /// perhaps in another process.
    pub fn from_parts(mount: u64, number: u64) -> Epoch {
        Epoch { mount, number }
    }

    /// Identity of its mount, chosen at random when that began.
    pub fn mount(self) -> u64 {
        self.mount
    }

    /// Its number, from 1.
    pub fn number(self) -> u64 {
        self.number
    }
}

impl PartialOrd for Epoch {
    fn partial_cmp(&self, other: &Epoch) -> Option<Ordering> {
        (self.mount == other.mount).then(|| self.number.cmp(&other.number))
    }
}

/// An epoch that is perhaps not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    number: u64,
    /// The newest transaction that its promise needs; `None` if a flush is enough.
    needs: Option<Tid>,
    /// The transaction whose end shows that it is durable; `None` if only a flush does.
    settled_by: Option<Tid>,
}

/// An epoch that is durable with a barrier of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Behind {
    number: u64,
    barrier: u64,
}

/// Guarded by [`Epochs::state`].
#[derive(Debug, Default)]
struct State {
    /// The last number given out.
    last: u64,
    /// The newest epoch that is known to be durable.
    durable: u64,
    /// Those behind it; oldest first.
    pending: VecDeque<Pending>,
    /// The same where the policy orders: a mount has one kind or the other.
    behind: VecDeque<Behind>,
}

impl State {
    /// Drops what is durable.
    fn settle(&mut self, durable_barrier: u64, is_committed: impl Fn(Tid) -> bool) {
        while let Some(&Behind { number, barrier }) = self.behind.front()
            && barrier <= durable_barrier
        {
            self.behind.pop_front();
            self.durable = self.durable.max(number);
        }
        let is_durable = |pending: &Pending| pending.settled_by.is_some_and(&is_committed);
        let durable = self.pending.iter().rposition(is_durable);
        self.drop_first(durable.map_or(0, |index| index + 1));
    }

    /// The first `count` pending epochs are durable.
    fn drop_first(&mut self, count: usize) {
        if let Some(newest) = self.pending.drain(..count).next_back() {
            self.durable = self.durable.max(newest.number);
        }
    }

    /// The device has been flushed since epoch `flushed` ended, and what epoch `wanted` needs is durable.
    fn flushed(&mut self, flushed: u64, wanted: u64, is_committed: impl Fn(Tid) -> bool) {
        self.durable = self.durable.max(wanted);
        let needs_more = |pending: &Pending| {
            pending.number > flushed || pending.needs.is_some_and(|tid| !is_committed(tid))
        };
        let done = self.pending.iter().position(needs_more).unwrap_or(self.pending.len());
        self.drop_first(done);
    }

    /// The oldest pending epoch that includes epoch `number`; `None` if that is durable.
    fn pending_for(&self, number: u64) -> Option<Pending> {
        let index = self.pending.partition_point(|pending| pending.number < number);
        self.pending.get(index).filter(|_| number > self.durable).copied()
    }

    /// Ends an epoch of which nothing is left to make durable but what is older.
    fn add_durable(&mut self) -> u64 {
        self.last += 1;
        match (self.pending.back_mut(), self.behind.back_mut()) {
            (Some(newest), _) => newest.number = self.last,
            (_, Some(newest)) => newest.number = self.last,
            (None, None) => self.durable = self.last,
        }
        self.last
    }

    /// Ends an epoch that is durable with this barrier of the journal, which is no older than those before.
    fn add_behind(&mut self, barrier: u64) -> u64 {
        self.last += 1;
        let number = self.last;
        let newest = self
            .behind
            .back()
            .filter(|newest| newest.barrier == barrier || self.behind.len() >= BEHIND_MAX);
        if newest.is_some() {
            self.behind.pop_back();
        }
        self.behind.push_back(Behind { number, barrier });
        number
    }

    fn add(&mut self, needs: Option<Tid>, settled_by: Option<Tid>) -> u64 {
        self.last += 1;
        let number = self.last;
        let (mut needs, mut settled_by) = (needs, settled_by);
        let newer = |one: Tid, other: Tid| if one.newer_than(other) { one } else { other };
        if let Some(newest) = self.pending.back() {
            // A transaction that was dispatched before an older epoch does not settle that one.
            settled_by = settled_by.zip(newest.settled_by).map(|(own, older)| newer(own, older));
            needs = match (needs, newest.needs) {
                (Some(own), Some(older)) => Some(newer(own, older)),
                (own, older) => own.or(older),
            };
            if newest.settled_by == settled_by {
                self.pending.pop_back();
            }
        }
        self.pending.push_back(Pending { number, needs, settled_by });
        number
    }
}

/// Most epochs of the journal's barriers that are kept apart; beyond, the newest one stands for several.
const BEHIND_MAX: usize = 4096;

/// The epochs of a mount.
pub(crate) struct Epochs {
    /// Identity of the mount.
    mount: u64,
    state: Mutex<State>,
    /// A transaction is durable only after all earlier ordered writes have succeeded.
    commits_tell: bool,
}

impl Epochs {
    /// `commits_tell`: a transaction is durable only after all earlier ordered writes have succeeded, as
    /// over a device without native barriers.
    pub(crate) fn new(commits_tell: bool) -> Epochs {
        let state = Mutex::new(Rank::Epochs, State::default());
        // The standard library's source of randomness.
        Epochs { mount: RandomState::new().build_hasher().finish(), state, commits_tell }
    }

    /// Ends an epoch of which nothing is left to make durable but what is older.
    pub(super) fn end_durable(&self) -> Epoch {
        self.epoch(self.state.lock().add_durable())
    }

    fn epoch(&self, number: u64) -> Epoch {
        Epoch { mount: self.mount, number }
    }

    /// The number of an epoch of this mount that has ended.
    ///
    /// # Errors
    /// `EINVAL` for any other.
    fn number(&self, epoch: Epoch) -> Result<u64> {
        let ended = 1..=self.state.lock().last;
        if epoch.mount != self.mount || !ended.contains(&epoch.number) {
            return Err(rustix::io::Errno::INVAL.into());
        }
        Ok(epoch.number)
    }

    /// Ends an epoch that a barrier of the journal has.
    pub(super) fn end_barrier(&self, fs: &FsInner, barrier: u64) -> Epoch {
        let durable = fs.journal().durable_barrier();
        let mut state = self.state.lock();
        state.settle(durable, |_| false);
        self.epoch(match barrier <= durable {
            true => state.add_durable(),
            false => state.add_behind(barrier),
        })
    }

    /// Ends an epoch that transaction `tid` has.
    pub(super) fn end(&self, fs: &FsInner, tid: Tid) -> Epoch {
        self.add(fs, Some(tid), Some(tid))
    }

    /// Ends an epoch with data in place, which have been submitted as ordered writes. It also needs
    /// transaction `needs`; the flush of `settled_by` begins after the writes.
    pub(super) fn end_in_place(&self, fs: &FsInner, needs: Option<Tid>, settled_by: Tid) -> Epoch {
        self.add(fs, needs, self.commits_tell.then_some(settled_by))
    }

    fn add(&self, fs: &FsInner, needs: Option<Tid>, settled_by: Option<Tid>) -> Epoch {
        let mut state = self.state.lock();
        state.settle(0, |tid| fs.journal().is_committed(tid));
        self.epoch(state.add(needs, settled_by))
    }
}

/// Whether an epoch is durable, as far as is known: `false` may be out of date.
///
/// # Errors
/// `EINVAL` for an epoch that has not ended, or of another mount.
pub(crate) fn is_durable(fs: &FsInner, epoch: Epoch) -> Result<bool> {
    fs.epochs.number(epoch).map(|number| is_number_durable(fs, number))
}

fn is_number_durable(fs: &FsInner, number: u64) -> bool {
    let mut state = fs.epochs.state.lock();
    state.settle(fs.journal().durable_barrier(), |tid| fs.journal().is_committed(tid));
    number <= state.durable
}

/// Makes an epoch durable.
///
/// # Errors
/// As [`is_durable`]; errors of the journal and the device, of earlier epochs, too.
pub(crate) fn wait_durable(fs: &FsInner, epoch: Epoch) -> Result<()> {
    fs.check_alive()?;
    let number = fs.epochs.number(epoch)?;
    make_durable(fs, number).inspect_err(|error| fs.note_write_error(error))
}

fn make_durable(fs: &FsInner, number: u64) -> Result<()> {
    if is_number_durable(fs, number) {
        return Ok(());
    }
    fs.journal().make_barriers_durable()?;
    if is_number_durable(fs, number) {
        return Ok(());
    }
    let needs = fs.epochs.state.lock().pending_for(number).and_then(|pending| pending.needs);
    if let Some(tid) = needs {
        fs.journal().commit(tid)?;
    }
    if is_number_durable(fs, number) {
        return Ok(());
    }
    // Its own data, or those of an older epoch, are in place.
    let flushed = fs.epochs.state.lock().last;
    fs.flush_device()?;
    let is_committed = |tid| fs.journal().is_committed(tid);
    fs.epochs.state.lock().flushed(flushed, number, is_committed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(state: &State) -> Vec<u64> {
        state.pending.iter().map(|pending| pending.number).collect()
    }

    #[test]
    fn neighbours_that_end_together_are_one() {
        let mut state = State::default();
        assert_eq!(state.add(Some(Tid(5)), Some(Tid(5))), 1);
        assert_eq!(state.add(None, Some(Tid(6))), 2);
        assert_eq!(state.add(None, Some(Tid(6))), 3);
        assert_eq!(numbers(&state), [1, 3]);
        assert_eq!(state.pending_for(2).map(|pending| pending.number), Some(3));
        state.settle(0, |tid| Tid(5).at_least(tid));
        assert_eq!(numbers(&state), [3]);
        assert_eq!((state.durable, state.pending_for(1)), (1, None));
    }

    #[test]
    fn barriers_of_the_journal_settle_in_order() {
        let mut state = State::default();
        assert_eq!([7, 7, 9].map(|barrier| state.add_behind(barrier)), [1, 2, 3]);
        state.settle(6, |_| false);
        assert_eq!(state.durable, 0);
        state.settle(8, |_| false);
        assert_eq!((state.durable, state.behind.len()), (2, 1));
        assert_eq!((state.add_durable(), state.durable), (4, 2), "behind the third");
        state.settle(9, |_| false);
        assert_eq!((state.durable, state.behind.len()), (4, 0));
        for barrier in 10..20_000 {
            state.add_behind(barrier);
        }
        assert_eq!(state.behind.len(), BEHIND_MAX);
        state.settle(20_000, |_| false);
        assert_eq!((state.durable, state.last), (state.last, 4 + 20_000 - 10));
    }

    #[test]
    fn only_epochs_that_have_ended_have_numbers() {
        let epochs = Epochs::new(false);
        let ended = epochs.end_durable();
        assert_eq!(epochs.number(ended).ok(), Some(1));
        for number in [0, 2, u64::MAX] {
            assert!(epochs.number(Epoch { number, ..ended }).is_err(), "{number}");
        }
        assert!(epochs.number(Epochs::new(false).end_durable()).is_err(), "another mount");
    }

    #[test]
    fn what_is_durable_stays_so() {
        let mut state = State::default();
        assert_eq!((state.add_durable(), state.durable), (1, 1));
        state.add(None, Some(Tid(6)));
        assert_eq!((state.add_durable(), state.durable), (3, 1), "behind the second");
        state.settle(0, |tid| Tid(6).at_least(tid));
        assert_eq!(state.durable, 3);
        state.add(None, Some(Tid(7)));
        assert_eq!((state.pending_for(3), state.durable), (None, 3));
    }

    #[test]
    fn a_transaction_dispatched_before_an_older_epoch_settles_none() {
        let mut state = State::default();
        state.add(Some(Tid(5)), Some(Tid(5)));
        state.add(None, Some(Tid(6)));
        state.add(Some(Tid(5)), Some(Tid(5)));
        state.settle(0, |tid| Tid(5).at_least(tid));
        assert_eq!(numbers(&state), [3], "the second is in place, behind transaction 5");
        state.settle(0, |tid| Tid(6).at_least(tid));
        assert_eq!(numbers(&state), []);
    }

    #[test]
    fn a_newer_epoch_needs_what_an_older_one_needs() {
        let mut state = State::default();
        state.add(Some(Tid(7)), Some(Tid(7)));
        state.add(None, Some(Tid(8)));
        assert_eq!(state.pending.back().and_then(|pending| pending.needs), Some(Tid(7)));
    }

    #[test]
    fn only_a_flush_settles_what_no_transaction_tells() {
        let mut state = State::default();
        state.add(None, None);
        state.add(Some(Tid(7)), Some(Tid(7)));
        state.add(None, None);
        state.settle(0, |_| true);
        assert_eq!((numbers(&state), state.durable), (vec![3], 0));
        assert_eq!(state.pending_for(2).and_then(|pending| pending.needs), Some(Tid(7)));
        // The third ended after the flush had begun.
        state.flushed(2, 2, |_| true);
        assert_eq!((numbers(&state), state.durable), (vec![3], 2));
        state.flushed(3, 3, |_| true);
        assert_eq!((numbers(&state), state.durable), (vec![], 3));
    }
}
