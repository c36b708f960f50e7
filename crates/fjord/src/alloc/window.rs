//! Windows: blocks kept free after a growing file, so that files that grow concurrently stay
//! contiguous.
//!
//! Owns which files get a window and its length. Invariants: a window is a hint, not a claim: its
//! blocks count as free, and other files use them if nothing else is left, so a leaked window costs
//! little; a file has at most one.

use fjord_format::types::GroupNo;

use super::pick::Request;
use super::{Goal, Run};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{InodeState, Prealloc};

/// Longest window in bytes.
const WINDOW_BYTES_MAX: u64 = 64 << 20;
/// Length of a window in multiples of the file's length: files that grow concurrently reach some
/// 130 MiB before their extents no longer fit in the inode (and fast commits fall back).
const GROWTH: u64 = 16;
/// Most of a group, and of its free blocks, that a window takes.
const GROUP_PART: u32 = 2;
const FREE_PART: u64 = 64;
/// Shortest window in bytes.
const WINDOW_BYTES_MIN: u64 = 256 << 10;

impl FsInner {
    /// Picks up to `want` blocks for a file's blocks from `lblk` on, as
    /// [`FsInner::pick_blocks`]; a file that grows gets a window.
    ///
    /// # Errors
    /// As [`FsInner::pick_blocks`].
    pub(crate) fn pick_for_file(
        &self,
        state: &mut InodeState,
        goal: Goal,
        lblk: u32,
        want: u32,
    ) -> Result<Run> {
        let window = state.prealloc.take();
        let own_window = window.and_then(|window| {
            let (group, bits) =
                self.place_of_run(Run { start: window.start, len: window.len }).ok()?;
            if window.lblk == lblk {
                return Some((group, bits));
            }
            self.drop_window(group, bits);
            None
        });
        let window_len = if goal.grows && state.is_file() { self.window_len(state) } else { 0 };
        let request = Request { want, goal, own_window: own_window.clone(), window_len };
        let picked = self.pick(&request)?;
        let Run { start, len } = picked.run;
        // The pick has replaced the own window if it was in the same group.
        if let Some((group, bits)) = own_window
            && self.geo.group_of_block(start) != Some(group)
        {
            self.drop_window(group, bits);
        }
        if picked.window_len > 0
            && let (Some(lblk), Some(start)) =
                (lblk.checked_add(len), start.checked_add(u64::from(len)))
        {
            state.prealloc = Some(Prealloc { lblk, start, len: picked.window_len });
        }
        Ok(picked.run)
    }

    /// By the length that the file has by now, within limits.
    fn window_len(&self, state: &InodeState) -> u32 {
        let bytes = state.disk.blocks_512.saturating_mul(512 * GROWTH);
        let free_bytes = self.groups.free_blocks_total() << self.geo.block_size_bits;
        let most = (free_bytes / FREE_PART).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
        let bytes = bytes.clamp(WINDOW_BYTES_MIN, most).next_power_of_two();
        // At most 64 MiB of blocks of 1 KiB and more.
        let len = (bytes >> self.geo.block_size_bits) as u32;
        len.min(self.geo.clusters_per_group / GROUP_PART)
    }

    /// Releases the file's window. Call it when the file is no longer written; omitting the call is
    /// harmless.
    pub(crate) fn discard_window(&self, state: &mut InodeState) {
        let Some(window) = state.prealloc.take() else { return };
        if let Ok((group, bits)) = self.place_of_run(Run { start: window.start, len: window.len }) {
            self.drop_window(group, bits);
        }
    }

    fn drop_window(&self, group: GroupNo, bits: std::ops::Range<u32>) {
        if let Ok(cell) = self.groups.cell(group)
            && let Some(overlay) = cell.lock.lock().as_mut()
        {
            overlay.windows.remove(bits);
            cell.note_open();
        }
    }
}
