//! Picking free blocks, in memory only.
//!
//! Owns the search: the goal block, the goal's group, later groups with a long enough run, any free
//! blocks, the windows of other files. Invariant: a picked run is in one group, its bits are clear
//! and busy, and it is not picked again before [`FsInner::unpick`] or a free.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering;

use fjord_format::types::{BlockNo, GroupNo};
use rustix::io::Errno;

use super::bits;
use super::table::Cell;
use super::{Goal, Run};
use crate::error::{Error, Result};
use crate::fs::FsInner;

/// Bitmaps searched for a long run before a shorter one is accepted.
const LONG_RUN_TRIES: u32 = 32;
/// If there is no space for a whole window: this fraction of it, repeatedly.
const WINDOW_PARTS: [u32; 4] = [1, 2, 4, 16];
/// The same where a file begins.
const WINDOW_PARTS_OF_NEW: [u32; 1] = [16];
/// Complete searches before the file system counts as full.
const ROUNDS: u32 = 3;

thread_local! {
    /// The bits of the group being searched.
    static WORDS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Search request.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// Blocks wanted.
    pub(super) want: u32,
    /// The goal.
    pub(super) goal: Goal,
    /// The file's own window, which it may use: group and bits.
    pub(super) own_window: Option<(GroupNo, Range<u32>)>,
    /// Length of the window to open after the run, in blocks.
    pub(super) window_len: u32,
}

/// Acceptance criteria of a run.
#[derive(Debug, Clone, Copy)]
struct Standard {
    /// The first run of this length is taken, else the longest of the group.
    aim: u32,
    /// Least length.
    need: u32,
    /// Stay out of windows.
    respect_windows: bool,
    /// Most bitmaps searched without success.
    tries: u32,
}

/// A run found, and how much of a window follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Picked {
    pub(super) run: Run,
    pub(super) window_len: u32,
}

impl FsInner {
    /// Picks up to `want` free blocks (at least one) for the holder of a reservation. Only
    /// memory changes.
    ///
    /// # Errors
    /// `ENOSPC` if no block is free, which cannot happen with a reservation on an intact image;
    /// corruption and I/O errors of bitmaps.
    pub(crate) fn pick_blocks(&self, goal: Goal, want: u32) -> Result<Run> {
        let request = Request { want, goal, own_window: None, window_len: 0 };
        Ok(self.pick(&request)?.run)
    }

    /// Releases picked blocks that were not used.
    pub(crate) fn unpick(&self, run: Run) {
        let Some((group, first)) = self.geo.cluster_in_group(run.start) else { return };
        let Ok(cell) = self.groups.cell(group) else { return };
        let mut guard = cell.lock.lock();
        let count = cell.unpin(guard.get_or_insert_default(), first, run.len);
        debug_assert_eq!(count, run.len, "unpicked blocks that were not picked");
    }

    /// As [`FsInner::pick_blocks`], with a window.
    pub(super) fn pick(&self, request: &Request) -> Result<Picked> {
        let want = request.want.clamp(1, self.geo.clusters_per_group);
        let request = Request { want, ..request.clone() };
        if let Some(picked) = self.pick_at_goal(&request)? {
            return Ok(picked);
        }
        for _ in 0..ROUNDS {
            if let Some(picked) = self.pick_by_standards(&request)? {
                return Ok(picked);
            }
            // A trim may hold the last free blocks; or blocks were freed in groups already
            // searched.
            drop(self.groups.trim_lock.lock());
        }
        Err(Errno::NOSPC.into())
    }

    fn pick_by_standards(&self, request: &Request) -> Result<Option<Picked>> {
        let aim = request.want;
        let any = u32::MAX;
        if request.window_len > 0 {
            for &part in Self::window_parts(request) {
                let roomy = aim.saturating_add(request.window_len / part);
                let aim = roomy.min(self.geo.clusters_per_group);
                let standard =
                    Standard { aim, need: aim, respect_windows: true, tries: LONG_RUN_TRIES };
                if let Some(picked) = self.pick_anywhere(request, standard)? {
                    return Ok(Some(picked));
                }
            }
        }
        let standards = [
            Standard { aim, need: aim, respect_windows: true, tries: LONG_RUN_TRIES },
            Standard { aim, need: aim.div_ceil(8), respect_windows: true, tries: LONG_RUN_TRIES },
            Standard { aim, need: 1, respect_windows: true, tries: any },
            Standard { aim, need: 1, respect_windows: false, tries: any },
        ];
        for standard in standards {
            if let Some(picked) = self.pick_anywhere(request, standard)? {
                return Ok(Some(picked));
            }
        }
        Ok(None)
    }

    /// How much of a window there must be, in the order of trying. A file that begins takes the first gap with some
    /// room: most files stay small, and what the windows of small files have left lies between them. So they lie
    /// close together, and are written together.
    fn window_parts(request: &Request) -> &'static [u32] {
        let begins = request.goal.block.is_none();
        if begins { &WINDOW_PARTS_OF_NEW } else { &WINDOW_PARTS }
    }

    /// Continues after the file's last block, even by a single block.
    fn pick_at_goal(&self, request: &Request) -> Result<Option<Picked>> {
        if !request.goal.extends {
            return Ok(None);
        }
        let standard = Standard { aim: request.want, need: 1, respect_windows: true, tries: 1 };
        self.pick_in_group(request, request.goal.group, standard, true)
    }

    fn pick_anywhere(&self, request: &Request, standard: Standard) -> Result<Option<Picked>> {
        let count = self.groups.count();
        let mut tries = standard.tries;
        for step in 0..count {
            // Below 2 * count, and there are fewer than 2^31 groups of any size we can hold.
            let group = GroupNo((request.goal.group.0 % count).wrapping_add(step) % count);
            let cell = self.groups.cell(group)?;
            let has_own = request.own_window.as_ref().is_some_and(|(own, _)| *own == group);
            let is_full =
                standard.respect_windows && !has_own && !cell.may_hold_open(standard.need);
            if is_full || !may_hold(cell, standard.need) || !self.is_allowed(request, group) {
                continue;
            }
            if let Some(picked) = self.pick_in_group(request, group, standard, false)? {
                return Ok(Some(picked));
            }
            tries -= 1;
            if tries == 0 {
                break;
            }
        }
        Ok(None)
    }

    fn is_allowed(&self, request: &Request, group: GroupNo) -> bool {
        let end = self.geo.group_first_block(group).0 + u64::from(self.geo.blocks_per_group);
        !request.goal.only_32bit || end <= 1 << 32
    }

    /// Searches one group; with `exact` only right at the goal's block.
    fn pick_in_group(
        &self,
        request: &Request,
        group: GroupNo,
        standard: Standard,
        exact: bool,
    ) -> Result<Option<Picked>> {
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        if !may_hold(cell, standard.need) {
            return Ok(None);
        }
        let overlay = guard.get_or_insert_default();
        let desc = self.read_desc(group).inspect_err(|error| {
            if error.is_corrupt() {
                self.groups.set_damaged(cell);
            }
        })?;
        // A later `use_picked` writes the bitmap, too.
        if self.ensure_room(desc.block_bitmap, 1).is_err() {
            return Ok(None);
        }
        let found = self.block_bitmap(group, cell, &desc)?;
        let own = match &request.own_window {
            Some((own_group, bits)) if *own_group == group => bits.clone(),
            _ => 0..0,
        };
        let goal_bit = match request.goal.block {
            Some(block) if request.goal.group == group => {
                self.geo.cluster_in_group(block).map_or(0, |(_, bit)| bit)
            }
            _ => 0,
        };
        let mut end = self.geo.clusters_in_group(group);
        if exact {
            // More would not be taken: no need to look at it.
            let most = request.want.saturating_add(request.window_len);
            end = end.min(goal_bit.saturating_add(most));
        }
        WORDS.with_borrow_mut(|words| {
            let looked_at = if exact { goal_bit..end } else { 0..end };
            let contents = found.contents();
            let (part, offset) = bits::part(&contents, &looked_at);
            bits::load(part, words);
            overlay.busy.add_to(words, offset, &(0..0));
            if standard.respect_windows {
                overlay.windows.add_to(words, offset, &own);
            }
            let bits = if exact {
                let goal_in_part = goal_bit - offset.min(goal_bit);
                let len = bits::clear_run(words, goal_in_part, end - offset.min(end));
                (len > 0).then(|| goal_bit..goal_bit + len)
            } else {
                let search = bits::search(words, end, goal_bit, standard.aim);
                if let Some(longest) = search.longest
                    && (!standard.respect_windows || overlay.windows.count() == 0)
                {
                    cell.longest.store(longest, Ordering::Relaxed);
                } else if let Some(longest) = search.longest
                    && own.is_empty()
                {
                    cell.longest_open.store(longest, Ordering::Relaxed);
                }
                search.run.filter(|run| run.end - run.start >= standard.need)
            };
            let Some(bits) = bits else { return Ok(None) };
            let len = (bits.end - bits.start).min(request.want);
            let taken = bits.start..bits.start + len;
            let window_len = (bits.end - taken.end).min(request.window_len);
            if overlay.windows.remove(own) > 0 {
                cell.note_open();
            }
            overlay.windows.remove(taken.clone());
            if window_len > 0 {
                let window = taken.end..taken.end + window_len;
                overlay.windows.insert(window, self.geo.clusters_per_group);
            }
            overlay.busy.insert(taken.clone(), self.geo.clusters_per_group);
            cell.free.fetch_sub(len, Ordering::Relaxed);
            let start = self.geo.cluster_first_block(group, taken.start);
            Ok(Some(Picked { run: Run { start, len }, window_len }))
        })
    }
}

/// Whether the group can have a run of `need` blocks; a hint without the lock.
fn may_hold(cell: &Cell, need: u32) -> bool {
    !cell.is_damaged()
        && cell.free.load(Ordering::Relaxed) >= need
        && cell.longest.load(Ordering::Relaxed) >= need
}

impl FsInner {
    /// The group of a run and its bits in there.
    ///
    /// # Errors
    /// `Corrupt` if the run is empty, outside the file system or crosses a border.
    pub(super) fn place_of_run(&self, run: Run) -> Result<(GroupNo, Range<u32>)> {
        let bad = || {
            let Run { start: BlockNo(start), len } = run;
            Error::corrupt(
                "block number",
                format!("{len} blocks at {start} are not a run in one group"),
            )
        };
        let (group, first) = self.geo.cluster_in_group(run.start).ok_or_else(bad)?;
        let end = first.checked_add(run.len).ok_or_else(bad)?;
        if run.len == 0 || end > self.geo.clusters_in_group(group) {
            return Err(bad());
        }
        Ok((group, first..end))
    }
}
