//! The replay plan of a scan, and its execution.
//!
//! Invariants: each block is written once, with its newest copy that is not revoked;
//! the superblock is written only after all of them are durable.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Device, DeviceExt};
use fjord_format::ijournal::{AreaTable, ITransaction};
use fjord_format::jbd2::{IjournalMark, MAGIC, Superblock};
use fjord_format::types::{BlockNo, Tid};

use super::reader::LogReader;
use super::report::RecoveryReport;
use crate::area;
use crate::error::{JournalError, Result};
use crate::log::{Log, home_requests, wait_all};
use crate::map::JournalMap;
use crate::stats::Counters;

/// Memory for blocks while they are replayed, in bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Changes a block before it is written.
pub(crate) type Fit = fn(&dyn Device, BlockNo, &mut [u8]);

/// A copy of a block in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedBlock {
    /// Its home location.
    pub home: BlockNo,
    /// Journal block that holds the copy.
    pub at: u32,
    /// Its first word was escaped.
    pub escaped: bool,
}

/// A complete transaction in the log, as found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedTransaction {
    /// Its ID.
    pub tid: Tid,
    /// Journal block where it starts.
    pub start: u32,
    /// Its blocks, in log order, revoked ones included.
    pub blocks: Vec<LoggedBlock>,
    /// The blocks that it revokes.
    pub revokes: Vec<BlockNo>,
    /// When it was committed: seconds since 1970 and nanoseconds.
    pub committed_at: (u64, u32),
}

/// A replay plan. Made by [`scan`](super::scan).
#[derive(Debug)]
pub struct Plan {
    pub(super) device: Arc<dyn Device>,
    pub(super) map: JournalMap,
    pub(super) superblock: Superblock,
    pub(super) superblock_block: Buf,
    pub(super) transactions: Vec<LoggedTransaction>,
    pub(super) replay: BTreeMap<BlockNo, LoggedBlock>,
    pub(super) report: RecoveryReport,
    /// Journal block after the last complete transaction.
    pub(super) log_end: u32,
}

impl Plan {
    /// The report; `replayed_blocks` is the number of blocks that [`Plan::apply`] will write.
    pub fn report(&self) -> &RecoveryReport {
        &self.report
    }

    /// The complete transactions, oldest first.
    pub fn transactions(&self) -> &[LoggedTransaction] {
        &self.transactions
    }

    /// The journal superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Journal block after the last complete transaction; less than the start of the log if the
    /// log wraps.
    pub fn log_end(&self) -> u32 {
        self.log_end
    }

    /// The areas after the log, if any. Reads the device.
    pub fn area_table(&self) -> Result<Option<AreaTable>> {
        area::read_table(&self.device, &self.map, &self.superblock)
            .map_err(|error| error.under_mark_of(&self.superblock))
    }

    /// The i-transactions newer than the last commit, by sub-transaction ID. Reads the device if
    /// the ijournal mark is set.
    pub fn i_transactions(&self) -> Result<Vec<ITransaction>> {
        self.scan_areas().map(|found| found.transactions)
    }

    /// As [`Plan::i_transactions`], with what is known of others.
    pub(crate) fn scan_areas(&self) -> Result<area::Found> {
        if self.superblock.ijournal().is_none() {
            return Ok(area::Found::default());
        }
        let Some(table) = self.area_table()? else {
            let detail = "its superblock has the ijournal mark, but there is no area table";
            return Err(JournalError::BadMap(detail.into()).under_mark_of(&self.superblock));
        };
        let committed = self.report.committed;
        area::scan(&self.device, &self.map, &self.superblock, &table, committed)
            .map_err(|error| error.under_mark_of(&self.superblock))
    }

    /// The contents that replay would write to a block, if any. Read-only mounts call this before
    /// they read the device.
    pub fn read(&self, home: BlockNo) -> Result<Option<Buf>> {
        let Some(source) = self.replay.get(&home) else { return Ok(None) };
        let mut reader = self.reader();
        load(&mut reader, source).map(Some)
    }

    /// Writes the blocks to their home locations and marks the log empty, both durably. Can be
    /// repeated after a failure or a crash at any point. With pending fast commits the log is not
    /// marked clean: its start is then the block of the transaction that will apply them.
    pub fn apply(self) -> Result<RecoveryReport> {
        self.apply_fitted(None, None)
    }

    /// As [`Plan::apply`]; `fit` may change the blocks before they are written, `last` is written
    /// when the others are durable.
    pub(crate) fn apply_fitted(
        self,
        fit: Option<Fit>,
        last: Option<BlockNo>,
    ) -> Result<RecoveryReport> {
        let committed = self.report.committed;
        // The start of the recovery of i-transactions is recorded: its own transaction gets a later
        // ID, and unless that is in the log, validity is judged by the commits before.
        let mark = self
            .superblock
            .ijournal()
            .map(|mark| IjournalMark { recovering_after: Some(committed), ..mark });
        let mark = if planted(Bug::RecoveryNotMarked) { self.superblock.ijournal() } else { mark };
        if !self.report.was_dirty && mark == self.superblock.ijournal() {
            return Ok(self.report);
        }
        let block_size = self.superblock.s_blocksize as usize;
        let mut reader = self.reader();
        // In log order, so that the log is read once, front to back.
        let mut sources: Vec<_> = self.replay.values().copied().collect();
        sources.sort_by_key(|source| (Some(source.home) == last, source.at));
        let others = sources.iter().take_while(|source| Some(source.home) != last).count();
        let (others, last) = sources.split_at(others);
        let batches = others.chunks((BATCH_BYTES / block_size).max(1));
        for batch in batches.chain((!last.is_empty()).then_some(last)) {
            if batch == last && !planted(Bug::ReplayNotFlushed) {
                self.device.flush().map_err(JournalError::io("flushing replayed blocks"))?;
            }
            let load = |source: LoggedBlock| {
                let mut content = load(&mut reader, &source)?;
                if let Some(fit) = fit {
                    fit(&*self.device, source.home, content.make_mut());
                }
                Ok((source.home, content))
            };
            let blocks = batch.iter().copied().map(load).collect::<Result<Vec<_>>>()?;
            let requests = home_requests(block_size, blocks, Class::Sync);
            wait_all(&self.device.submit(requests), "replaying the journal")?;
        }
        if !planted(Bug::ReplayNotFlushed) {
            self.device.flush().map_err(JournalError::io("flushing replayed blocks"))?;
        }
        let sequence = self.report.next_tid;
        let pending = !self.report.fast_commit_records.is_empty();
        let keep = pending && !planted(Bug::FastCommitMarkedClean);
        let start = if keep { self.log_end } else { 0 };
        let log =
            Log::new(self.device, self.map, self.superblock, self.superblock_block, false, None);
        log.write_superblock(&Counters::default(), true, |superblock| {
            superblock.s_start = start;
            superblock.s_sequence = sequence;
            superblock.set_ijournal(mark);
        })?;
        Ok(self.report)
    }

    fn reader(&self) -> LogReader<'_> {
        let block_size = self.superblock.s_blocksize as usize;
        LogReader::new(&self.device, &self.map, block_size, self.superblock.log_end())
    }
}

fn load(reader: &mut LogReader<'_>, source: &LoggedBlock) -> Result<Buf> {
    let mut contents = Buf::from_slice(reader.block(source.at)?);
    if source.escaped && !planted(Bug::EscapeNotUndone) {
        contents.make_mut()[..4].copy_from_slice(&MAGIC.to_be_bytes());
    }
    Ok(contents)
}
