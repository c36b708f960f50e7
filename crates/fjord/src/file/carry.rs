//! Carried data: dirty pages in an i-transaction, with deferred writes.
//!
//! The pages get their blocks and extents as in any fsync, under a handle, but their writes go
//! to the queue of deferred writes (`fs.deferred`): they are submitted when somebody waits for
//! them, at the latest the commit of the transaction that holds the extents, to which their
//! tickets are attached. Until then the pages count as being written (`writeback`), so that
//! they stay cached, and a page that is carried again only replaces what is to be written.
//!
//! Invariants: a deferred run is in the inode's `InFlight::deferred` until its write is complete;
//! an inode with such runs is on the list of carriers, which keeps it in memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fjord_block::lock::{Mutex, MutexGuard, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Ticket};
use fjord_format::{BlockNo, Tid};
use fjord_journal::Handle;
use rustix::io::Errno;
use smallvec::SmallVec;

use super::writeback::{self, Place, WriteRun};
use crate::cache::page::DirtyPage;
use crate::error::{Error, Result};
use crate::file::truncate::note_growth;
use crate::fs::FsInner;
use crate::inode::{InFlight, Inode, InodeState, Instance, disk};
use crate::map;

/// Bytes that deferred writes may hold back; beyond, the oldest are submitted.
const DEFERRED_BYTES_MAX: u64 = 8 << 20;
/// How much is submitted at a time.
const DEFERRED_BYTES_STEP: u64 = 1 << 20;
/// Carriers from which on those that are done are looked for.
const CARRIERS_MANY: usize = 1024;

/// A run of pages whose write waits.
#[derive(Debug)]
pub(crate) struct DeferredRun {
    pub(crate) ticket: Ticket,
    /// First page.
    pub(crate) lblk: u32,
    /// How many.
    pub(crate) len: u32,
    /// The block of the first page.
    start: BlockNo,
    /// The first transaction that waits for it.
    tid: Tid,
}

impl DeferredRun {
    fn contains(&self, lblk: u32) -> bool {
        lblk.wrapping_sub(self.lblk) < self.len
    }
}

/// Number of shards of [`Carriers`]. An inode is in one, so that two files seldom meet.
const SHARDS: usize = 16;

/// Inodes with deferred runs.
pub(crate) struct Carriers {
    /// Each a leaf lock; never two at a time.
    shards: [Mutex<HashMap<Instance, Arc<Inode>>>; SHARDS],
    /// Inodes in all of them.
    len: AtomicUsize,
}

impl Default for Carriers {
    fn default() -> Carriers {
        let shard = |_| Mutex::new(Rank::Carriers, HashMap::new());
        Carriers { shards: std::array::from_fn(shard), len: AtomicUsize::new(0) }
    }
}

impl Carriers {
    fn shard(&self, inode: &Inode) -> MutexGuard<'_, HashMap<Instance, Arc<Inode>>> {
        self.shards[inode.ino.0 as usize % SHARDS].lock()
    }

    /// Adds an inode unless it is there; returns how many there are.
    fn add(&self, inode: &Arc<Inode>) -> usize {
        if let Entry::Vacant(vacant) = self.shard(inode).entry(inode.instance()) {
            vacant.insert(inode.clone());
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        self.len.load(Ordering::Relaxed)
    }

    fn remove(&self, inode: &Inode) {
        if self.shard(inode).remove(&inode.instance()).is_some() {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn all(&self) -> Vec<Arc<Inode>> {
        let inodes =
            |shard: &Mutex<HashMap<_, Arc<Inode>>>| shard.lock().values().cloned().collect();
        self.shards.iter().flat_map(|shard| -> Vec<Arc<Inode>> { inodes(shard) }).collect()
    }
}

/// What [`carry`] has done.
pub(crate) struct Carried {
    /// Where each page belongs, and its content.
    pub(crate) data: Vec<(BlockNo, Buf)>,
    /// The inode's bytes after that.
    pub(crate) image: Vec<u8>,
}

/// Gives the dirty pages of the inode, at most `max` of which there are, their places and
/// queues their writes. The caller holds the writeback and the state lock.
///
/// # Errors
/// `ENOSPC`, I/O and journal errors; the pages are dirty again if a retry may succeed.
pub(crate) fn carry(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    state: &mut InodeState,
    max: usize,
) -> Result<Carried> {
    let taken = inode.pages.take_dirty(0..u64::MAX, max);
    let pages: SmallVec<[(u32, Buf); 4]> =
        taken.iter().map(|page| (page.lblk, page.buf.clone())).collect();
    let (again, fresh) = split_deferred(fs, inode, in_flight, state, taken)?;
    let runs = writeback::place(fs, inode, state, fresh)?;
    let changes = runs.iter().filter(|run| run.place != Place::Written).count() as u32;
    let credits = map::credits_insert(fs, changes) + disk::STORE_CREDITS;
    let handle = fs.start(credits).inspect_err(|_| {
        writeback::take_back(fs, inode, &runs);
    })?;
    let (recorded, image) = record(fs, &handle, inode, in_flight, state, &runs, &again)?;
    handle.stop();
    if recorded < runs.len() {
        writeback::take_back(fs, inode, &runs[recorded..]);
        fs.carriers.add(inode);
        return Err(Errno::NOSPC.into());
    }
    let waiting_bytes = fs.deferred.bytes();
    if fs.carriers.add(inode) > CARRIERS_MANY || waiting_bytes > DEFERRED_BYTES_MAX {
        // A little at a time: the writes of a caller of fsync must not queue after many others.
        let step_bytes = DEFERRED_BYTES_STEP.min(waiting_bytes);
        fs.deferred.shrink_to(waiting_bytes.min(DEFERRED_BYTES_MAX) - step_bytes);
    }
    let mut data = Vec::with_capacity(pages.len());
    for (lblk, buf) in pages {
        let place = match runs.iter().find(|run| lblk.wrapping_sub(run.lblk) < run.len()) {
            Some(run) => BlockNo(run.phys.0 + u64::from(lblk - run.lblk)),
            None => home(fs, inode, state, lblk)?,
        };
        data.push((place, buf));
    }
    Ok(Carried { data, image })
}

/// The block that a page has in the map.
fn home(fs: &FsInner, inode: &Inode, state: &InodeState, lblk: u32) -> Result<BlockNo> {
    match map::lookup(fs, inode, state, lblk, 1)?.kind {
        map::MapKind::Written(block) => Ok(block),
        other => Err(Error::corrupt("page cache", format!("page {lblk} waits for {other:?}"))),
    }
}

/// Replaces the content of deferred writes by that of pages which are carried again. Returns
/// the tickets of those, and the pages that need a write of their own.
fn split_deferred(
    fs: &FsInner,
    inode: &Inode,
    in_flight: &mut InFlight,
    state: &InodeState,
    taken: Vec<DirtyPage>,
) -> Result<(Vec<Ticket>, Vec<DirtyPage>)> {
    if in_flight.deferred.is_empty() {
        return Ok((Vec::new(), taken));
    }
    let lblks: SmallVec<[u32; 8]> = taken.iter().map(|page| page.lblk).collect();
    let (mut again, mut fresh) = (Vec::new(), Vec::new());
    for page in taken {
        let before = in_flight.deferred.range(..=page.lblk).next_back();
        let Some((&at, run)) = before.filter(|(_, run)| run.contains(page.lblk)) else {
            fresh.push(page);
            continue;
        };
        let offset = fs.byte_offset(home(fs, inode, state, page.lblk)?);
        if fs.deferred.replace(offset, page.buf.clone()) {
            again.push(run.ticket.clone());
            continue;
        }
        // It has been submitted: its write must not meet the next one of the block.
        let result = run.ticket.wait();
        let written = run.lblk..run.lblk + run.len;
        in_flight.deferred.remove(&at);
        for lblk in written.filter(|lblk| !lblks.contains(lblk)) {
            inode.pages.end_writeback(lblk, 1);
        }
        result?;
        fresh.push(page);
    }
    Ok((again, fresh))
}

/// Inserts the extents, moves the on-disk size on and attaches the writes. Returns how many runs
/// are in the map, not all if it has no room for more, and the inode's bytes.
fn record(
    fs: &Arc<FsInner>,
    handle: &Handle,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    state: &mut InodeState,
    runs: &[WriteRun],
    again: &[Ticket],
) -> Result<(usize, Vec<u8>)> {
    let mut recorded = 0;
    for run in runs {
        match writeback::insert_run(fs, handle, inode, state, run) {
            Err(error) if error.is(Errno::NOSPC) => break,
            inserted => inserted?,
        }
        recorded += 1;
        let ticket = fs.deferred.add(fs.byte_offset(run.phys), run.bufs.clone());
        if !planted(Bug::InlineDataNotCommitted) {
            handle.attach_data(ticket.clone());
        }
        let (lblk, len, start, tid) = (run.lblk, run.len(), run.phys, handle.tid());
        let run = DeferredRun { ticket, lblk, len, start, tid };
        in_flight.deferred.insert(run.lblk, run);
    }
    for ticket in again {
        handle.attach_data(ticket.clone());
    }
    // No page is dirty any more, so all of the size is there to be seen; or what comes before.
    let end = runs.get(recorded).map(|run| fs.byte_offset(BlockNo(run.lblk.into())));
    let size = end.map_or(state.size, |end| end.min(state.size));
    if state.disk.size < size {
        state.disk.size = size;
        note_growth(inode, state, handle.tid());
    }
    inode.touch_tid(handle.changes(), true);
    let image = disk::store_image(fs, handle, inode, state)?;
    Ok((recorded, image))
}

/// Lets go of all runs of a file that is being deleted, by a transaction that is running, in which it has no links.
/// What that transaction or an older one waits for is written without the file, which is over before the blocks are
/// used again. What only the running one waits for is not written: no crash shows the file with its commit, and none
/// without it needs more than the i-transactions.
pub(crate) fn forget(fs: &FsInner, in_flight: &mut InFlight, running: Tid) {
    for run in std::mem::take(&mut in_flight.deferred).into_values() {
        if run.tid == running {
            fs.deferred.cancel(fs.byte_offset(run.start), &run.ticket);
        }
    }
}

/// Lets go of the runs whose writes are complete.
///
/// # Errors
/// The first error of such a write.
fn reap(inode: &Inode, in_flight: &mut InFlight) -> Result<()> {
    let mut first = Ok(());
    in_flight.deferred.retain(|_, run| match run.ticket.result() {
        None => true,
        Some(result) => {
            inode.pages.end_writeback(run.lblk, run.len);
            if let Err(error) = result
                && first.is_ok()
            {
                first = Err(error.into());
            }
            false
        }
    });
    first
}

/// Lets go of inodes whose deferred writes are complete. Waits for nothing.
pub(crate) fn reap_all(fs: &FsInner) {
    for inode in fs.carriers.all() {
        let Some(mut in_flight) = inode.writeback.try_lock() else { continue };
        if let Err(error) = reap(&inode, &mut in_flight) {
            inode.wb_errors.fetch_add(1, Ordering::AcqRel);
            fs.note_write_error(&error);
        }
        if in_flight.deferred.is_empty() {
            fs.carriers.remove(&inode);
        }
    }
}

/// As [`reap_all`], if there are so many that it pays.
pub(crate) fn reap_many(fs: &FsInner) {
    if fs.carriers.len.load(Ordering::Relaxed) > CARRIERS_MANY {
        reap_all(fs);
    }
}

#[cfg(test)]
mod tests {
    use fjord_block::DeviceExt;

    use super::*;
    use crate::inode::table;
    use crate::testing::TestFs;

    /// A deleted inode stays on the list until somebody looks at it; the new one of its number may
    /// have deferred writes before that.
    #[test]
    fn two_inodes_of_a_number_can_be_carriers() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let old = test.create("file");
        let new = table::detached(&test.fs, old.ino, old.state.read().disk.clone());
        let carriers = Carriers::default();
        assert_eq!([carriers.add(&old), carriers.add(&new), carriers.add(&new)], [1, 2, 2]);
    }

    /// The commit of an older transaction shows the file, so it has to find its data.
    #[test]
    fn only_what_no_commit_shows_is_not_written() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let fs = &test.fs;
        let offset = fs.byte_offset(BlockNo(3000));
        let add = |lblk: u32| {
            let start = BlockNo(3000 + 2 * u64::from(lblk));
            let ticket = fs.deferred.add(fs.byte_offset(start), vec![Buf::from_slice(&[7; 1024])]);
            DeferredRun { ticket, lblk, len: 1, start, tid: Tid(4 + lblk) }
        };
        let deferred = [0, 1].map(|lblk| (lblk, add(lblk))).into();
        let mut in_flight = InFlight { deferred, ..InFlight::default() };
        let tickets: Vec<Ticket> =
            in_flight.deferred.values().map(|run| run.ticket.clone()).collect();
        forget(fs, &mut in_flight, Tid(5));
        assert!(in_flight.deferred.is_empty());
        assert_eq!(tickets[1].result(), Some(Ok(())));
        assert!(!tickets[0].is_done(), "transaction 4 waits for it");
        tickets[0].wait().unwrap();
        assert_eq!(fs.deferred.bytes(), 0);
        let mut bytes = [0; 1024];
        fs.device.read_exact_at(offset, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
        test.finish();
    }
}
