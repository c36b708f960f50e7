//! Runs: pages that are contiguous in the file and on the device.
//!
//! Owns the choice of blocks for dirty pages: those that the map has, or new ones near the block
//! before. Invariant: a picked block is of one run until the run is recorded in the map, or given up.

use std::collections::VecDeque;
use std::ops::Range;

use fjord_block::{Buf, Class, Order, Request};
use fjord_format::BlockNo;

use crate::alloc::{Goal, Run};
use crate::cache::page::DirtyPage;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{self, MapKind};

/// Target of a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::file) enum Place {
    /// Blocks picked for it, not in the map yet; `reserved` of them were reserved.
    New { reserved: u32 },
    /// Blocks in the map, marked unwritten.
    Unwritten,
    /// Blocks in the map.
    Written,
}

/// Pages that are contiguous in the file and on the device.
pub(in crate::file) struct WriteRun {
    pub(in crate::file) lblk: u32,
    pub(in crate::file) phys: BlockNo,
    pub(in crate::file) place: Place,
    pub(in crate::file) bufs: Vec<Buf>,
}

impl WriteRun {
    pub(in crate::file) fn len(&self) -> u32 {
        // A batch has some thousand pages at most.
        self.bufs.len() as u32
    }

    /// Its write.
    pub(super) fn request(&self, fs: &FsInner, order: Order, class: Class) -> Request {
        let bufs = self.bufs.clone();
        Request::Write { offset: fs.byte_offset(self.phys), bufs, order, fua: false, class }
    }

    /// Some of its pages.
    pub(super) fn part(&self, pages: Range<u32>) -> WriteRun {
        WriteRun {
            lblk: self.lblk + pages.start,
            phys: BlockNo(self.phys.0 + u64::from(pages.start)),
            place: match self.place {
                Place::New { reserved: 0 } => Place::New { reserved: 0 },
                Place::New { .. } => Place::New { reserved: pages.end - pages.start },
                other => other,
            },
            bufs: self.bufs[pages.start as usize..pages.end as usize].to_vec(),
        }
    }
}

/// Splits `pages` into runs that are contiguous in the file and on the device. On an error all of them are dirty
/// again.
pub(in crate::file) fn place(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    pages: Vec<DirtyPage>,
) -> Result<Vec<WriteRun>> {
    let mut runs: Vec<WriteRun> = Vec::new();
    let mut rest: VecDeque<DirtyPage> = pages.into();
    while let Some(first) = rest.front() {
        let (lblk, delalloc) = (first.lblk, first.delalloc);
        let want = rest
            .iter()
            .zip(lblk..)
            .take_while(|(page, expected)| page.lblk == *expected && page.delalloc == delalloc)
            .count() as u32;
        let target = if delalloc {
            let before = runs.last().filter(|run| run.lblk.checked_add(run.len()) == Some(lblk));
            let behind = before.and_then(|run| run.phys.checked_add(u64::from(run.len())));
            pick(fs, inode, state, (lblk, want), behind)
                .map(|run| (run, Place::New { reserved: run.len }))
        } else {
            existing(fs, inode, state, lblk, want)
        };
        // Before anything depends on it. The disk below may be full.
        let roomy = target.and_then(|(run, place)| {
            fs.ensure_room(run.start, u64::from(run.len))
                .inspect_err(|_| give_up(fs, run, place))?;
            Ok((run, place))
        });
        let (run, place) = match roomy {
            Ok(found) => found,
            Err(error) => {
                take_back(fs, inode, &runs);
                rest.iter().for_each(|page| inode.pages.undo_writeback(page.lblk, 1));
                return Err(error);
            }
        };
        let bufs = rest.drain(..run.len as usize).map(|page| page.buf).collect();
        runs.push(WriteRun { lblk, phys: run.start, place, bufs });
    }
    Ok(runs)
}

/// Releases the blocks of a run that will not be written.
fn give_up(fs: &FsInner, run: Run, place: Place) {
    if matches!(place, Place::New { .. }) {
        fs.unpick(run);
    }
}

/// Marks the pages of runs dirty again that are not being written.
pub(in crate::file) fn take_back(fs: &FsInner, inode: &Inode, runs: &[WriteRun]) {
    for run in runs {
        give_up(fs, Run { start: run.phys, len: run.len() }, run.place);
        inode.pages.undo_writeback(run.lblk, run.len());
    }
}

/// Picks blocks for new data: after the block before it, which is not mapped yet if it was picked
/// just now.
fn pick(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    (lblk, want): (u32, u32),
    behind: Option<BlockNo>,
) -> Result<Run> {
    let goal = match behind {
        Some(block) => Goal::behind(fs, inode, state, block),
        None => Goal::for_file(fs, inode, state, lblk)?,
    };
    fs.pick_for_file(state, goal, lblk, want)
}

/// The blocks that a run of pages has already.
fn existing(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    want: u32,
) -> Result<(Run, Place)> {
    let found = map::lookup(fs, inode, state, lblk, want)?;
    Ok(match found.kind {
        MapKind::Written(start) => (Run { start, len: found.len }, Place::Written),
        MapKind::Unwritten(start) => (Run { start, len: found.len }, Place::Unwritten),
        MapKind::Hole => {
            let run = pick(fs, inode, state, (lblk, found.len.min(want)), None)?;
            (run, Place::New { reserved: 0 })
        }
    })
}
