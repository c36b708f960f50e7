//! FITRIM: discards free blocks.
//!
//! Owns the walk over free runs. Invariants: a run is busy while its discard is in flight, so it is
//! not written meanwhile; blocks whose free has not committed are not discarded; an allocation that
//! finds nothing waits for the group being trimmed.

use std::ops::Range;
use std::sync::atomic::Ordering;

use fjord_block::Request;
use fjord_format::types::{BlockNo, GroupNo};
use rustix::io::Errno;

use super::bits;
use crate::error::Result;
use crate::fs::FsInner;

/// Discards in flight at the most.
const BATCH: usize = 256;

impl FsInner {
    /// Discards free runs of at least `min_len` bytes that begin in the `len` bytes from
    /// `start` on, and returns the count of bytes discarded.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the device cannot, `EINVAL` for a range outside the file system or
    /// runs longer than a group; corruption and I/O errors.
    pub(crate) fn trim(&self, start: u64, len: u64, min_len: u64) -> Result<u64> {
        if !self.device.capabilities().discard {
            return Err(Errno::OPNOTSUPP.into());
        }
        let block_size = u64::from(self.geo.block_size);
        let min_blocks = min_len.div_ceil(block_size).max(1);
        let first = (start / block_size).max(self.geo.first_data_block.0);
        let end = (start.saturating_add(len) / block_size).min(self.geo.block_count);
        let past_end = start / block_size >= self.geo.block_count;
        if past_end || min_blocks > u64::from(self.geo.blocks_per_group) || len < block_size {
            return Err(Errno::INVAL.into());
        }
        let min_blocks = min_blocks as u32;
        let mut trimmed = 0;
        let mut at = first;
        while at < end {
            let Some((group, bit)) = self.geo.cluster_in_group(BlockNo(at)) else { break };
            let group_end = at.saturating_add(self.blocks_to_group_end(BlockNo(at)));
            // At most the blocks of a group.
            let bits = bit..bit + (group_end.min(end) - at) as u32;
            trimmed += u64::from(self.trim_group(group, bits, min_blocks)?);
            at = group_end;
        }
        Ok(trimmed.saturating_mul(block_size))
    }

    fn trim_group(&self, group: GroupNo, within: Range<u32>, min_blocks: u32) -> Result<u32> {
        let cell = self.groups.cell(group)?;
        if cell.is_damaged() || cell.is_trimmed() || cell.free.load(Ordering::Relaxed) < min_blocks
        {
            return Ok(0);
        }
        let whole = within == (0..self.geo.clusters_in_group(group)) && min_blocks == 1;
        let _trimming = self.groups.trim_lock.lock();
        // A later free clears the mark.
        cell.set_trimmed(whole);
        let runs = self
            .hold_free_runs(group, &within, min_blocks)
            .inspect_err(|_| cell.set_trimmed(false))?;
        let result = self.discard_runs(group, &runs);
        let mut guard = cell.lock.lock();
        let overlay = guard.get_or_insert_default();
        for run in &runs {
            cell.unpin(overlay, run.start, run.end - run.start);
        }
        drop(guard);
        result.inspect_err(|_| cell.set_trimmed(false))?;
        Ok(runs.iter().map(|run| run.end - run.start).sum())
    }

    /// Makes the free runs of a group busy.
    fn hold_free_runs(
        &self,
        group: GroupNo,
        within: &Range<u32>,
        min_blocks: u32,
    ) -> Result<Vec<Range<u32>>> {
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        let overlay = guard.get_or_insert_default();
        let desc = self.read_desc(group)?;
        let found = self.block_bitmap(group, cell, &desc)?;
        let mut words = Vec::new();
        bits::load(&found.contents(), &mut words);
        overlay.busy.add_to(&mut words, 0, &(0..0));
        let mut runs = Vec::new();
        let mut at = within.start;
        while let Some(run) = bits::next_clear_run(&words, at, within.end) {
            at = run.end;
            if run.end - run.start >= min_blocks {
                overlay.busy.insert(run.clone(), self.geo.clusters_per_group);
                cell.free.fetch_sub(run.end - run.start, Ordering::Relaxed);
                runs.push(run);
            }
        }
        Ok(runs)
    }

    fn discard_runs(&self, group: GroupNo, runs: &[Range<u32>]) -> Result<()> {
        for batch in runs.chunks(BATCH) {
            let requests = batch.iter().map(|run| Request::Discard {
                offset: self.byte_offset(self.geo.cluster_first_block(group, run.start)),
                len: u64::from(run.end - run.start) * u64::from(self.geo.block_size),
            });
            for ticket in self.device.submit(requests.collect()) {
                ticket.wait()?;
            }
        }
        Ok(())
    }
}
