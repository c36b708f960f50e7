//! Recovery: replays the log after a crash, or refuses it with a reason.
//!
//! [`scan`] reads the whole log and decides, without a write; [`Plan::apply`] writes the surviving
//! blocks to their home locations, flushes, and marks the log empty. This can be repeated after a
//! crash, because the log stays valid until that mark is durable.
//!
//! Only the caller can apply fast commits: the log is then left without transactions but not marked
//! clean, so that the area stays valid until the transaction that applies it has committed.
//!
//! Every decision is a row of the table in [`Case`]; `recovery/tests.rs` walks all rows. A row also
//! says where fjord is stricter than Linux: fjord refuses before any write, where Linux replays a
//! part and then refuses.

mod cases;
mod decide;
mod plan;
mod reader;
mod report;
mod scan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use fjord_block::{Buf, Device, DeviceExt};
use fjord_format::FormatError;
use fjord_format::jbd2::{Incompat, Superblock};

use crate::error::{JournalError, Result};
use crate::log::Log;
use crate::map::JournalMap;
use crate::options::JournalOptions;
use crate::stats::Counters;

pub use cases::{Case, Outcome};
pub use plan::{LoggedBlock, LoggedTransaction, Plan};
pub use report::RecoveryReport;

use cases::Refusal;

/// Reads the log and decides what to replay; writes nothing. A read-only mount uses the plan as an
/// overlay ([`Plan::read`]).
pub fn scan(device: &Arc<dyn Device>, map: &JournalMap, block_size: usize) -> Result<Plan> {
    scan_cases(device, map, block_size).map_err(|refusal| {
        let case = refusal.case;
        tracing::warn!("recovery refused by rule {}: {}", case.number(), case.reason());
        refusal.error
    })
}

/// Replays the log if it is dirty and leaves it empty and durable. Writes nothing if the log is
/// clean or refused.
pub fn recover(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<RecoveryReport> {
    scan(device, map, block_size)?.apply()
}

/// [`scan`], with the row of the table for a refusal.
pub(crate) fn scan_cases(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<Plan, Refusal> {
    let loaded = load_superblock(device, map, block_size);
    let (superblock, block) =
        loaded.map_err(|refusal| match is_marked(device, map, block_size) {
            Ok(true) => Refusal { error: JournalError::Marked(Box::new(refusal.error)), ..refusal },
            _ => refusal,
        })?;
    let scan = scan::Scan::new(device, map, superblock.clone(), block);
    scan.run().map_err(|refusal| {
        let error = refusal.error.under_mark_of(&superblock);
        Refusal { error, ..refusal }
    })
}

/// Discards all i-transactions: clears the ijournal mark, durably, so that e2fsck, Linux and fjord
/// use the log alone. Returns whether the mark was set. In a superblock with a wrong checksum only the
/// mark is cleared, and the checksum stays wrong: e2fsck can then repair the journal.
///
/// # Errors
/// `Format` for a superblock that is invalid in other ways, `BadMap`, and those of the device.
pub fn drop_i_transactions(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<bool> {
    let loaded = load_superblock(device, map, block_size).map_err(|refusal| refusal.error);
    let (mut superblock, block) = match loaded {
        Err(JournalError::Format { source: FormatError::Checksum { .. }, .. }) => {
            return clear_mark_alone(device, map, block_size);
        }
        loaded => loaded?,
    };
    if superblock.ijournal().is_none() {
        return Ok(false);
    }
    superblock.set_ijournal(None);
    let log = Log::new(device.clone(), map.clone(), superblock, block, false, None);
    log.write_superblock(&Counters::default(), true, |_| ())?;
    Ok(true)
}

/// Clears the mark in a superblock whose checksum is wrong.
fn clear_mark_alone(device: &Arc<dyn Device>, map: &JournalMap, block_size: usize) -> Result<bool> {
    let (offset, mut block) = read_first_block(device, map, block_size)?;
    if !Superblock::clear_ijournal_in(&mut block) {
        return Ok(false);
    }
    let written = device.write_all_at(offset, &block).and_then(|()| device.flush());
    written.map_err(JournalError::io("writing the journal superblock"))?;
    Ok(true)
}

/// Whether the ijournal mark is set, with which e2fsck and Linux refuse the image; also in a superblock with
/// a wrong checksum. Writes nothing.
///
/// # Errors
/// As [`drop_i_transactions`].
pub fn is_marked(device: &Arc<dyn Device>, map: &JournalMap, block_size: usize) -> Result<bool> {
    match read_superblock(device, map, block_size) {
        Ok((superblock, _)) => Ok(superblock.ijournal().is_some()),
        Err(JournalError::Format { source: FormatError::Checksum { .. }, .. }) => {
            let (_, mut block) = read_first_block(device, map, block_size)?;
            Ok(Superblock::clear_ijournal_in(&mut block))
        }
        Err(error) => Err(error),
    }
}

/// The journal's first block, and where it lies on the device, in bytes.
fn read_first_block(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<(u64, Vec<u8>)> {
    let (start, _) = map.run(0)?;
    let offset = start.0.saturating_mul(block_size as u64);
    let mut block = vec![0; block_size];
    device
        .read_exact_at(offset, &mut block)
        .map_err(JournalError::io("reading the journal superblock"))?;
    Ok((offset, block))
}

/// Reads and checks the journal superblock; returns it with the block it lies in.
pub(crate) fn read_superblock(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<(Superblock, Buf)> {
    load_superblock(device, map, block_size).map_err(|refusal| refusal.error)
}

fn load_superblock(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    block_size: usize,
) -> Result<(Superblock, Buf), Refusal> {
    let refuse_map = |error| Refusal { case: Case::BadGeometry, error };
    check_map(device, map, block_size).map_err(refuse_map)?;
    let (start, _) = map.run(0).map_err(refuse_map)?;
    let offset = start.0.saturating_mul(block_size as u64);
    let block = device.read_buf(offset, block_size).map_err(|source| Refusal {
        case: Case::ReadError,
        error: JournalError::Io { what: "reading the journal superblock", source },
    })?;
    let refuse =
        |case| move |source| Refusal { case, error: JournalError::Format { at: 0, source } };
    let superblock = Superblock::decode(&block).map_err(|source| {
        let unknown = matches!(source, fjord_format::FormatError::Incompatible { .. });
        refuse(if unknown { Case::UnknownFeature } else { Case::BadSuperblock })(source)
    })?;
    let geometry = superblock.check(block_size as u32, u64::from(map.blocks()));
    geometry.map_err(refuse(Case::BadGeometry))?;
    Ok((superblock, block.into()))
}

/// Checks that the journal lies on the device and that the block size is valid.
fn check_map(device: &Arc<dyn Device>, map: &JournalMap, block_size: usize) -> Result<()> {
    if !(1024..=65536).contains(&block_size) || !block_size.is_power_of_two() {
        return Err(JournalError::Usage(format!("block size {block_size}")));
    }
    let device_blocks = device.size_bytes() / block_size as u64;
    match map.last_block() {
        Some(last) if last.0 < device_blocks => Ok(()),
        Some(last) => {
            let detail = format!("its block {last} is past the end of the device");
            Err(JournalError::BadMap(detail))
        }
        None => Err(JournalError::BadMap("it has no blocks".into())),
    }
}

/// Changes to the superblock of an empty log on open: version 2, the requested features, no feature
/// that only recovery must understand. `pending`: fast commits have not been applied, so that they
/// stay valid.
pub(crate) fn apply_features(superblock: &mut Superblock, options: &JournalOptions, pending: bool) {
    superblock.upgrade_to_v2();
    if options.bit64 {
        superblock.s_feature_incompat |= Incompat::BIT64;
    }
    if let Some(version) = options.checksum {
        superblock.set_checksum_version(version);
    }
    superblock.s_feature_incompat.remove(Incompat::ASYNC_COMMIT);
    superblock.s_feature_incompat.set(Incompat::FAST_COMMIT, pending);
}
