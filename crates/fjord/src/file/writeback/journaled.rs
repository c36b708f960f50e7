//! `data=journal`: pages go into the running transaction instead of to their place.
//!
//! With the mount option they do so in the call that writes them, so that after a crash every file is as it was at
//! one point in the order of all calls. Files that only have the flag (chattr +j) wait for writeback, like any other.
//!
//! Owns the handles of pages. Invariants:
//! - what a call has written is in one handle with the size and the times that it gives, up to
//!   [`blocks_per_handle`]; a longer write is several, in order;
//! - the size on disk does not pass bytes that no transaction has.
//!
//! Guard: the inode's state lock alone, since pages are never on their way to the device.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::BlockNo;
use fjord_journal::Handle;
use rustix::io::Errno;

use super::BATCH_PAGES;
use super::extents::insert_run;
use super::runs::{Place, WriteRun, place, take_back};
use crate::cache::page::DirtyPage;
use crate::error::Result;
use crate::file::truncate::shown_size;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk};
use crate::map;
use crate::options::DataMode;

/// Whether this file's data goes through the journal.
pub(crate) fn journals_data(fs: &FsInner, state: &InodeState) -> bool {
    state.is_file()
        && fs.has_log()
        && (fs.options.data == DataMode::Journal || disk::has_journal_data_flag(&state.disk))
}

/// Whether its data enters a transaction in the call that writes it.
fn journals_at_once(fs: &FsInner, state: &InodeState) -> bool {
    fs.options.data == DataMode::Journal && journals_data(fs, state)
}

/// Blocks of file data that one handle takes at the most: a quarter of what a transaction may hold.
fn blocks_per_handle(fs: &FsInner) -> u32 {
    (fs.journal().credits_max() / 4).max(1)
}

/// Puts what a call has just written into the running transaction, with the size and the times. Does nothing where
/// data is written back later.
///
/// # Errors
/// Journal errors, damage. Not `ENOSPC`: pages that find no block for a map stay dirty, and are tried again.
pub(in crate::file) fn journal_at_once(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
) -> Result<()> {
    if !journals_at_once(fs, state) || planted(Bug::JournaledDataLate) {
        return Ok(());
    }
    loop {
        let pages = inode.pages.take_dirty(0..u64::MAX, BATCH_PAGES);
        if pages.is_empty() {
            break;
        }
        let shown = shown_size(fs, inode, state, state.disk.size);
        match journal_pages(fs, inode, state, pages, shown) {
            Err(error) if error.is(Errno::NOSPC) => return Ok(()),
            result => result?,
        }
    }
    if state.dirty {
        let handle = fs.start(disk::STORE_CREDITS)?;
        inode.touch_tid(handle.changes(), true);
        disk::store(fs, &handle, inode, state)?;
        handle.stop();
    }
    Ok(())
}

/// Puts the pages into the running transaction; with the last of them the file may show `shown_size` bytes.
pub(super) fn journal_pages(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    pages: Vec<DirtyPage>,
    shown_size: u64,
) -> Result<()> {
    let runs = place(fs, inode, state, pages)?;
    let limit = blocks_per_handle(fs);
    let parts: Vec<WriteRun> = runs.into_iter().flat_map(|run| split(run, limit)).collect();
    let mut left = &parts[..];
    while !left.is_empty() {
        let count = fitting(fs, left, limit);
        let (now, later) = left.split_at(count);
        journal_runs(fs, inode, state, now, shown_size).inspect_err(|error| {
            if error.is(Errno::NOSPC) {
                take_back(fs, inode, later);
            }
        })?;
        left = later;
    }
    Ok(())
}

/// Parts of at most `limit` blocks.
fn split(run: WriteRun, limit: u32) -> Vec<WriteRun> {
    if run.len() <= limit {
        return vec![run];
    }
    let starts = (0..run.len()).step_by(limit as usize);
    starts.map(|start| run.part(start..(start + limit).min(run.len()))).collect()
}

fn has_blocks(run: &WriteRun) -> bool {
    run.place == Place::Written
}

/// How many runs fit a handle with at most `limit` blocks of data; at least one.
fn fitting(fs: &FsInner, runs: &[WriteRun], limit: u32) -> usize {
    let inserts_max = map::runs_per_handle(fs);
    let (mut blocks, mut inserts) = (0, 0);
    let fits = |run: &&WriteRun| {
        blocks += run.len();
        inserts += u32::from(!has_blocks(run));
        blocks <= limit && inserts <= inserts_max
    };
    runs.iter().take_while(fits).count().max(1)
}

/// Credits of a handle that logs runs, for the pages and the map.
pub(in crate::file) fn credits_for_journal(fs: &FsInner, runs: &[WriteRun]) -> u32 {
    let inserts = runs.iter().filter(|run| !has_blocks(run)).count() as u32;
    let for_map = if inserts == 0 { 0 } else { map::credits_insert(fs, inserts) };
    for_map + runs.iter().map(WriteRun::len).sum::<u32>()
}

/// Takes a page, if it is dirty, of a file whose data is logged in the call that changes it: for [`journal_run`].
pub(in crate::file) fn take_for_journal(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u64,
) -> Result<Vec<WriteRun>> {
    if !journals_at_once(fs, state) {
        return Ok(Vec::new());
    }
    let pages = inode.pages.take_dirty(lblk..lblk + 1, 1);
    place(fs, inode, state, pages)
}

/// Logs a run in an open handle; the caller stores the inode. On `ENOSPC` nothing of it is logged, and it is dirty
/// again.
pub(in crate::file) fn journal_run(
    fs: &Arc<FsInner>,
    handle: &Handle,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    run: &WriteRun,
) -> Result<()> {
    insert_run(fs, handle, inode, state, run).inspect_err(|error| {
        if error.is(Errno::NOSPC) {
            take_back(fs, inode, std::slice::from_ref(run));
        }
    })?;
    for (page, block) in run.bufs.iter().zip(run.phys.0..) {
        let buffer = fs.meta.create_data(BlockNo(block), page);
        // Shared until one of the two changes.
        handle.get_write(&buffer)?.replace(page.clone());
    }
    inode.pages.end_writeback(run.lblk, run.len());
    Ok(())
}

/// Logs runs in one handle, and the size up to `shown_size`. On `ENOSPC` those before are logged, and the others
/// dirty again.
fn journal_runs(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    runs: &[WriteRun],
    shown_size: u64,
) -> Result<()> {
    let handle = fs.start(credits_for_journal(fs, runs) + disk::STORE_CREDITS)?;
    let mut result = Ok(());
    for (index, run) in runs.iter().enumerate() {
        result = journal_run(fs, &handle, inode, state, run);
        match &result {
            Ok(()) => {}
            Err(error) if error.is(Errno::NOSPC) => {
                take_back(fs, inode, &runs[index + 1..]);
                break;
            }
            Err(_) => return result,
        }
        let end = (u64::from(run.lblk) + u64::from(run.len())) * u64::from(fs.geo.block_size);
        state.disk.size = state.disk.size.max(end.min(shown_size).min(state.size));
    }
    inode.touch_tid(handle.changes(), true);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    result
}
