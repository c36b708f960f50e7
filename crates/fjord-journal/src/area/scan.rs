//! Finds the valid i-transactions after a crash.
//!
//! An area is searched from its first block to its last, without a head pointer. An i-transaction
//! is valid if it has the nonce of the mark, all its checksums match, it is newer than the last commit, and no
//! barrier before it is missing. A mismatch means a torn write, for which no fsync had returned, or a partly overwritten
//! i-transaction that had committed. Damage done later looks the same, so that a warning names what is not
//! whole and newer than the last commit.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Device, DeviceExt};
use fjord_format::FormatError;
use fjord_format::ijournal::{AreaFormat, AreaTable, Header, ITransaction, behind_gaps};
use fjord_format::jbd2::Superblock;
use fjord_format::types::Tid;

use super::barriers::newest;
use crate::error::{JournalError, Result};
use crate::map::JournalMap;

/// Reads the table after the log. `None` if the journal ends with the log or the block is not a
/// table.
pub(crate) fn read_table(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    superblock: &Superblock,
) -> Result<Option<AreaTable>> {
    let at = superblock.s_maxlen;
    if map.blocks() <= at {
        return Ok(None);
    }
    let block_size = superblock.s_blocksize as usize;
    let (start, _) = map.run(at)?;
    let block = device
        .read_buf(start.0.saturating_mul(block_size as u64), block_size)
        .map_err(JournalError::io("reading the area table"))?;
    let table = match AreaTable::decode(&block, &superblock.s_uuid) {
        Ok(table) => table,
        // Without the mark the areas hold nothing valid, so an unreadable table only means that
        // they are not used.
        Err(error) if superblock.ijournal().is_none() => {
            if AreaTable::is_table(&block) {
                tracing::warn!(%error, "the journal's areas are not used");
            }
            return Ok(None);
        }
        Err(source) => return Err(JournalError::Format { at, source }),
    };
    if u64::from(map.blocks()) < u64::from(at) + table.total_blocks() {
        let detail = format!("{} areas do not fit into the journal", table.area_count);
        return Err(JournalError::Format {
            at,
            source: FormatError::corrupt("i-journal area table", detail),
        });
    }
    Ok(Some(table))
}

/// Contents of the areas after a crash.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The i-transactions newer than the last commit, by sub-transaction ID.
    pub(crate) transactions: Vec<ITransaction>,
    /// The newest transaction of those that come behind a barrier which is missing. They stay in the areas.
    pub(crate) newest_dropped: Option<Tid>,
}

/// The i-transactions newer than `committed`.
pub(crate) fn scan(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    superblock: &Superblock,
    table: &AreaTable,
    committed: Tid,
) -> Result<Found> {
    let Some(mark) = superblock.ijournal() else { return Ok(Found::default()) };
    let format = AreaFormat {
        block_size: superblock.s_blocksize as usize,
        uuid: superblock.s_uuid,
        nonce: mark.nonce,
    };
    let (mut found, mut torn_at) = (Vec::new(), Vec::new());
    for area in 0..table.area_count {
        // Bounds were checked by `read_table`.
        let first = superblock.s_maxlen + 1 + area * table.area_blocks;
        let bytes = read_blocks(device, map, format.block_size, first, table.area_blocks)?;
        scan_area(&format, first, &bytes, committed, &mut found, &mut torn_at)?;
    }
    if !torn_at.is_empty() {
        tracing::warn!(
            "i-transactions at journal blocks {torn_at:?} are not whole, and not applied: a crash has cut them \
             off, before their fsync returned, or they were damaged later"
        );
    }
    let mut newest_dropped = None;
    if mark.has_barriers && !planted(Bug::BarrierGapAccepted) {
        newest_dropped = drop_behind_gaps(&mut found, committed);
    }
    found.sort_by_key(|transaction| transaction.sub_id);
    if planted(Bug::ItransactionOrder) {
        found.reverse();
    }
    Ok(Found { transactions: found, newest_dropped })
}

/// Drops what comes behind a barrier that did not reach the device: nobody was told that it is durable.
/// Returns the newest transaction of that.
fn drop_behind_gaps(found: &mut Vec<ITransaction>, committed: Tid) -> Option<Tid> {
    let mut is_behind = behind_gaps(found, committed).into_iter();
    let dropped: Vec<Tid> =
        found.extract_if(.., |_| is_behind.next().unwrap_or_default()).map(|it| it.tid).collect();
    if !dropped.is_empty() {
        let count = dropped.len();
        tracing::info!(count, "i-transactions come behind a barrier that a crash has cut off");
    }
    newest(dropped.into_iter())
}

fn scan_area(
    format: &AreaFormat,
    first: u32,
    bytes: &[u8],
    committed: Tid,
    found: &mut Vec<ITransaction>,
    torn_at: &mut Vec<u32>,
) -> Result<()> {
    let block_size = format.block_size;
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let counts =
            |header: &Header| header.tid.newer_than(committed) || planted(Bug::ItransactionDead);
        let header = Header::decode(format, rest).filter(counts);
        let Some(header) = header else {
            at += block_size;
            continue;
        };
        match ITransaction::decode(format, rest) {
            Ok(transaction) => {
                found.push(transaction);
                at += header.total_blocks as usize * block_size;
            }
            Err(FormatError::Checksum { .. } | FormatError::Truncated { .. }) => {
                torn_at.push(first + (at / block_size) as u32);
                at += block_size;
            }
            Err(source) => {
                let at = first + (at / block_size) as u32;
                return Err(JournalError::Format { at, source });
            }
        }
    }
    Ok(())
}

fn read_blocks(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
    first: u32,
    count: u32,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; count as usize * block_size];
    let mut done = 0;
    while done < count {
        let (start, mapped) = map.run(first + done)?;
        let run = mapped.min(count - done);
        let from = done as usize * block_size;
        let part = &mut bytes[from..from + run as usize * block_size];
        device
            .read_exact_at(start.0.saturating_mul(block_size as u64), part)
            .map_err(JournalError::io("reading an area"))?;
        done += run;
    }
    Ok(bytes)
}
