//! Barrier calls under `ijournal`: an i-transaction that nobody waits for.
//!
//! Steps, in the calling thread:
//!
//! 1. as for an fsync, but all dirty data is carried, so that nothing has to be written to its place;
//! 2. the i-transaction gets the next number among barriers, and is submitted, at once or with the next ones
//!    ([`AreaWriter::submit_barrier`]). There is no flush, and no wait.
//!
//! If it refers to data that was written to its place, and that no flush has covered, it is held back until the
//! next round of barriers, which begins with a flush ([`Journal::make_barriers_durable`]).
//!
//! A crash that loses it loses everything that came behind: i-transactions, since recovery drops them, and data in
//! place, since it waits for it. A commit has all that the barriers before it have.
//!
//! Needs an fsync where an i-transaction cannot describe the changes (see [`super`]), for data that is too large
//! to carry, and if areas or the budget of recovery are full.
//!
//! "Barrier-Enabled IO Stack for Flash Storage" (FAST '18), section 4, has the promise; the way is fjord's own
//! (`docs/decisions/`).
//!
//! [`AreaWriter::submit_barrier`]: fjord_journal::AreaWriter::submit_barrier
//! [`Journal::make_barriers_durable`]: fjord_journal::Journal::make_barriers_durable

use std::sync::Arc;

use super::{Ijournal, Prepared, Purpose, Stop, begin, cpu};
use crate::error::Error;
use crate::file::carry;
use crate::fs::FsInner;
use crate::fsync::Fallback;
use crate::inode::Inode;
use crate::inode::carried::HeldBarrier;
use crate::map;

/// Most bytes of dirty data that a barrier carries.
const DATA_BYTES_MAX: u64 = 1 << 20;

/// Most dirty pages that a barrier carries.
pub(super) fn pages_max(fs: &FsInner) -> usize {
    let pages = DATA_BYTES_MAX / u64::from(fs.geo.block_size);
    usize::try_from(pages).unwrap_or(usize::MAX).min(map::runs_per_handle(fs) as usize)
}

impl Ijournal {
    /// Puts the file's state in order. Returns the number of the barrier that has it.
    pub(super) fn order_alone(
        &self,
        fs: &Arc<FsInner>,
        inode: &Arc<Inode>,
        datasync: bool,
    ) -> Result<u64, Stop> {
        let (chain, mut in_flight) = begin(fs, inode)?;
        if inode.pages.dirty_count() > pages_max(fs) {
            return Err(Fallback::TooLarge.into());
        }
        let durable = fs.journal().durable_barrier();
        if let Some(mark) = inode.state.write().carried.settle_held(durable) {
            inode.in_place.record_flush(mark);
        }
        let in_place = inode.in_place.owed();
        let purpose = Purpose::Order { owes_flush: in_place.is_some() };
        let prepared = self.prepare(fs, inode, &mut in_flight, &chain, datasync, purpose)?;
        let Some(prepared) = prepared else {
            // It is durable, or an earlier barrier has it, unless that was lost.
            fs.journal().check_running().map_err(Error::from)?;
            return Ok(fs.journal().last_barrier());
        };
        // Under the lock: i-transactions of a file are numbered in the order in which they were built.
        let number = submit(fs, inode, prepared, in_place)?;
        drop(in_flight);
        chain.logged();
        carry::reap_many(fs);
        Ok(number)
    }
}

fn submit(
    fs: &Arc<FsInner>,
    inode: &Inode,
    prepared: Prepared<'_>,
    in_place: Option<u64>,
) -> Result<u64, Stop> {
    let Prepared { writer, transaction, data_bytes, superseded, flush_before, .. } = prepared;
    let is_held = in_place.is_some() || flush_before.is_some() || !superseded.is_empty();
    let Some(barrier) = writer.submit_barrier(cpu(), transaction, is_held)? else {
        return Err(Fallback::LogFull.into());
    };
    drop(writer);
    fs.fsync_counters.logged(u64::from(barrier.blocks), data_bytes);
    inode.set_logged(prepared.touches);
    let mut state = inode.state.write();
    // Whatever comes later of this file is behind it.
    state.carried.end();
    if is_held {
        let (number, in_place) = (barrier.number, in_place.unwrap_or(0));
        state.carried.hold(HeldBarrier { number, in_place, unflushed: flush_before, superseded });
    }
    drop(state);
    if barrier.wants_commit || prepared.wants_commit {
        fs.threads.want_commit();
    }
    Ok(barrier.number)
}
