//! Scans the log and decides; see the table in [`Case`].
//!
//! Invariants: writes nothing; reads each log block at most twice; memory is bounded by the
//! log's own length.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Device};
use fjord_format::jbd2::fast_commit::FastCommitScan;
use fjord_format::jbd2::{
    self, BlockHeader, BlockType, ChecksumVersion, CommitBlock, HEADER_BYTES, Incompat, LogFormat,
    MAGIC, Superblock, TagFlags, Version,
};
use fjord_format::types::{BlockNo, Tid};

use super::RecoveryReport;
use super::cases::{Case, Refusal};
use super::plan::{LoggedBlock, LoggedTransaction, Plan};
use super::reader::LogReader;
use crate::error::JournalError;
use crate::map::JournalMap;

type Step<T> = Result<T, Refusal>;

/// A scan of one log.
pub(super) struct Scan<'a> {
    device: &'a Arc<dyn Device>,
    map: &'a JournalMap,
    superblock: Superblock,
    superblock_block: Buf,
    format: LogFormat,
    reader: LogReader<'a>,
    /// Next journal block to read.
    at: u32,
    /// Number of blocks scanned.
    passed: u32,
    /// Expected transaction.
    tid: Tid,
    /// Complete transactions, each with its blocks that have a wrong checksum.
    complete: Vec<(LoggedTransaction, HashSet<u32>)>,
    /// A transaction whose checksum was wrong under async commit.
    async_failed: Option<Tid>,
    /// Journal block after the last complete transaction.
    log_end: u32,
    report: RecoveryReport,
}

/// The transaction being read.
struct Pending {
    transaction: LoggedTransaction,
    /// Blocks whose data checksum is wrong (journal block numbers).
    bad_data: HashSet<u32>,
    /// First descriptor or revoke block whose checksum is wrong, and how.
    bad_block: Option<(u32, String)>,
    /// First revoke block with an impossible count.
    bad_revoke: Option<(u32, String)>,
    crc: u32,
    /// Whether any block of it was read.
    begun: bool,
}

impl Pending {
    fn new(tid: Tid, start: u32) -> Pending {
        let blocks = Vec::new();
        let transaction =
            LoggedTransaction { tid, start, blocks, revokes: Vec::new(), committed_at: (0, 0) };
        let (bad_data, bad_block, bad_revoke) = (HashSet::new(), None, None);
        Pending { transaction, bad_data, bad_block, bad_revoke, crc: !0, begun: false }
    }
}

impl<'a> Scan<'a> {
    pub(super) fn new(
        device: &'a Arc<dyn Device>,
        map: &'a JournalMap,
        superblock: Superblock,
        superblock_block: Buf,
    ) -> Scan<'a> {
        let format = superblock.log_format();
        let reader = LogReader::new(device, map, format.block_size, superblock.s_maxlen);
        Scan {
            device,
            map,
            format,
            reader,
            at: superblock.s_start,
            passed: 0,
            tid: superblock.s_sequence,
            complete: Vec::new(),
            async_failed: None,
            log_end: superblock.s_start,
            report: RecoveryReport::default(),
            superblock,
            superblock_block,
        }
    }

    pub(super) fn run(mut self) -> Step<Plan> {
        if self.superblock.version == Version::V1 {
            self.note(Case::VersionOne);
        }
        if self.superblock.s_errno != 0 {
            self.report.errno = Some(self.superblock.s_errno);
            self.note(Case::ErrorRecorded);
        }
        if self.superblock.s_start == 0 {
            self.note(Case::Clean);
            self.report.next_tid = self.tid.next();
            self.report.committed = self.committed();
            return Ok(self.into_plan(BTreeMap::new()));
        }
        self.report.was_dirty = true;
        self.walk()?;
        if let Some(failed) = self.async_failed {
            self.note(Case::AsyncCommitTorn);
            self.tid = failed;
        }
        self.drop_torn_async();
        self.complete.pop_if(|_| planted(Bug::LastCommitIgnored));
        if self.complete.is_empty() {
            self.note(Case::EmptyLog);
        }
        self.check_fast_commits()?;
        self.report.committed = self.committed();
        let replay = self.resolve()?;
        // Linux skips the ID of the torn transaction, so that none of its blocks is taken for the
        // next one's. The transaction that applies fast commits must have that ID.
        let pending = !self.report.fast_commit_records.is_empty();
        self.report.next_tid = if pending { self.tid } else { self.tid.next() };
        Ok(self.into_plan(replay))
    }

    /// The newest transaction that supersedes i-transactions. While their recovery is in progress,
    /// an empty log starts with the recovery's own transaction.
    fn committed(&self) -> Tid {
        let before_recovery = self.superblock.ijournal().and_then(|mark| mark.recovering_after);
        match before_recovery {
            Some(tid) if self.complete.is_empty() => tid,
            _ => Tid(self.tid.0.wrapping_sub(1)),
        }
    }

    /// Reads transactions until the log ends.
    fn walk(&mut self) -> Step<()> {
        let mut pending = Pending::new(self.tid, self.at);
        loop {
            let here = self.at;
            let block = self.next_block()?;
            let header = match header_of(&block) {
                Ok(header) if header.sequence == self.tid || planted(Bug::SequenceNotChecked) => {
                    header
                }
                Ok(_) => return self.end(Case::StaleSequence, &pending),
                Err(case) => return self.end(case, &pending),
            };
            match header.block_type {
                BlockType::Descriptor => self.descriptor(here, &block, &mut pending)?,
                BlockType::Revoke => self.revokes(here, &block, &mut pending),
                BlockType::Commit => {
                    if !self.commit(here, &block, &mut pending)? {
                        return Ok(());
                    }
                    self.tid = self.tid.next();
                    pending = Pending::new(self.tid, self.at);
                }
                BlockType::SuperblockV1 | BlockType::SuperblockV2 => {
                    return self.end(Case::UnknownBlockType, &pending);
                }
            }
        }
    }

    /// The log ended for `case`; a transaction begun is torn.
    fn end(&mut self, case: Case, pending: &Pending) -> Step<()> {
        self.note(case);
        if let Some((at, detail)) = &pending.bad_block {
            if !self.is_async() && self.finds_commit()? {
                return Err(self.corrupt(Case::BadDescriptorCommitted, *at, detail.clone()));
            }
            self.note(Case::BadDescriptorTorn);
        } else if pending.begun {
            self.note(Case::TornTransaction);
        }
        Ok(())
    }

    /// Whether a valid commit block of the expected transaction is anywhere in the log: a wrong
    /// descriptor may have led the scan past it.
    fn finds_commit(&mut self) -> Step<bool> {
        let last_sec = self.complete.last().map_or(0, |(last, _)| last.committed_at.0);
        for at in self.superblock.s_first..self.superblock.log_end() {
            let block = self.reader.block(at).map_err(read_error)?;
            let is_ours = header_of(block).is_ok_and(|header| {
                header.block_type == BlockType::Commit && header.sequence == self.tid
            });
            if is_ours
                && CommitBlock::verify(&self.format, block, 0).is_ok()
                && CommitBlock::decode(block).is_ok_and(|commit| commit.commit_sec >= last_sec)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn descriptor(&mut self, here: u32, block: &[u8], pending: &mut Pending) -> Step<()> {
        pending.begun = true;
        if let Err(error) = self.format.verify_tail("descriptor block", block) {
            pending.bad_block.get_or_insert((here, error.to_string()));
        }
        let with_crc = self.format.checksum == ChecksumVersion::V1;
        if with_crc {
            pending.crc = jbd2::crc32_be(pending.crc, block);
        }
        let wants_data = self.format.checksum != ChecksumVersion::None;
        for tag in jbd2::parse_tags(&self.format, block) {
            let at = self.at;
            if wants_data {
                let copy = self.next_block()?;
                if with_crc {
                    pending.crc = jbd2::crc32_be(pending.crc, &copy);
                }
                let verify = !planted(Bug::ChecksumsNotVerified);
                if verify && !tag.matches(&self.format, self.tid, &copy) {
                    pending.bad_data.insert(at);
                }
            } else {
                self.step()?;
            }
            let escaped = tag.flags.contains(TagFlags::ESCAPE);
            pending.transaction.blocks.push(LoggedBlock { home: tag.block, at, escaped });
        }
        Ok(())
    }

    fn revokes(&mut self, here: u32, block: &[u8], pending: &mut Pending) {
        pending.begun = true;
        if let Err(error) = self.format.verify_tail("revoke block", block) {
            pending.bad_block.get_or_insert((here, error.to_string()));
        }
        match jbd2::parse_revokes(&self.format, block) {
            Ok(mut revokes) => pending.transaction.revokes.append(&mut revokes),
            Err(error) => {
                pending.bad_revoke.get_or_insert((here, error.to_string()));
            }
        }
    }

    /// A commit block of the expected transaction. `false` when the log ends with it.
    fn commit(&mut self, here: u32, block: &[u8], pending: &mut Pending) -> Step<bool> {
        let commit = CommitBlock::decode(block)
            .map_err(|source| self.refuse_format(Case::BadCommit, here, source))?;
        let last_sec = self.complete.last().map_or(0, |(last, _)| last.committed_at.0);
        let is_stale = commit.commit_sec < last_sec;
        if let Some((at, detail)) = &pending.bad_block {
            if is_stale {
                self.note(Case::BadDescriptorStale);
                return Ok(false);
            }
            if !self.is_async() {
                return Err(self.corrupt(Case::BadDescriptorCommitted, *at, detail.clone()));
            }
            return self.fail_async(here);
        }
        match CommitBlock::verify(&self.format, block, pending.crc) {
            Err(_) if is_stale => {
                self.note(Case::BadCommitStale);
                return Ok(false);
            }
            Err(_) if self.is_async() => return self.fail_async(here),
            Err(error) => return Err(self.corrupt(Case::BadCommit, here, error.to_string())),
            Ok(()) => self.note_lenient_commit(block),
        }
        if self.async_failed.is_some() {
            return self.fail_async(here);
        }
        if let Some((at, detail)) = &pending.bad_revoke {
            return Err(self.corrupt(Case::BadRevokeCount, *at, detail.clone()));
        }
        self.note(Case::Complete);
        self.log_end = self.at;
        let mut done = std::mem::replace(pending, Pending::new(self.tid, self.at));
        done.transaction.committed_at = (commit.commit_sec, commit.commit_nsec);
        self.complete.push((done.transaction, done.bad_data));
        Ok(true)
    }

    /// Records the row if the commit block was valid only by a special rule.
    fn note_lenient_commit(&mut self, block: &[u8]) {
        const FIELDS_END: usize = 60;
        match self.format.checksum {
            ChecksumVersion::V1 if block.get(HEADER_BYTES) == Some(&0) => {
                self.note(Case::CommitWithoutChecksum);
            }
            ChecksumVersion::V2 | ChecksumVersion::V3
                if block.get(FIELDS_END..).is_some_and(|rest| rest.iter().any(|&b| b != 0)) =>
            {
                self.note(Case::PartialCommitBlock);
            }
            _ => {}
        }
    }

    fn is_async(&self) -> bool {
        self.superblock.s_feature_incompat.contains(Incompat::ASYNC_COMMIT)
    }

    /// Under async commit: the first bad transaction may be torn; a commit after it proves
    /// that it is not.
    fn fail_async(&mut self, here: u32) -> Step<bool> {
        if let Some(failed) = self.async_failed {
            let detail = format!("a later transaction is committed (block {here})");
            let mut refusal = self.corrupt(Case::AsyncCommitCorrupt, here, detail);
            if let JournalError::Corrupt { tid, .. } = &mut refusal.error {
                *tid = failed;
            }
            return Err(refusal);
        }
        self.async_failed = Some(self.tid);
        Ok(true)
    }

    /// Under async commit, blocks of the last transaction may be missing.
    fn drop_torn_async(&mut self) {
        if !self.is_async() || self.async_failed.is_some() {
            return;
        }
        let torn = self.complete.pop_if(|(_, bad_data)| !bad_data.is_empty());
        if let Some((torn, _)) = torn {
            self.tid = torn.tid;
            self.log_end = torn.start;
            self.note(Case::AsyncCommitTorn);
        }
    }

    fn check_fast_commits(&mut self) -> Step<()> {
        let area = self.superblock.fast_commit_area();
        if area.is_empty() {
            return Ok(());
        }
        let expected = (!planted(Bug::FastCommitTidNotChecked)).then_some(self.tid);
        let mut scan = FastCommitScan::new(expected);
        for at in area {
            let block = self.reader.block(at).map_err(read_error)?;
            let more = scan.push_block(block).map_err(|source| Refusal {
                case: Case::BadFastCommit,
                error: JournalError::Format { at, source },
            })?;
            if !more {
                break;
            }
        }
        self.report.fast_commits = scan.commit_count();
        let records = scan.into_records();
        self.note(if records.is_empty() { Case::NoFastCommit } else { Case::FastCommit });
        self.report.fast_commit_records = records;
        Ok(())
    }

    /// Applies revokes and keeps the newest copy of each block.
    fn resolve(&mut self) -> Step<BTreeMap<BlockNo, LoggedBlock>> {
        let complete = std::mem::take(&mut self.complete);
        let mut revoked: HashMap<BlockNo, Tid> = HashMap::new();
        for (transaction, _) in &complete {
            self.report.revoke_records += transaction.revokes.len();
            for &block in &transaction.revokes {
                // Transactions come in order, so the newest revoke stays.
                revoked.insert(block, transaction.tid);
            }
        }
        let mut replay = BTreeMap::new();
        for (transaction, bad_data) in &complete {
            for block in &transaction.blocks {
                if self.is_revoked(&revoked, block.home, transaction.tid) {
                    continue;
                }
                self.check_block(block, transaction.tid, bad_data)?;
                if replay.insert(block.home, *block).is_some() {
                    self.note(Case::Superseded);
                }
            }
        }
        self.report.replayed_blocks = replay.len();
        self.report.transactions = complete.len() as u32;
        self.report.last_tid = complete.last().map(|(last, _)| last.tid);
        self.complete = complete;
        Ok(replay)
    }

    fn is_revoked(&mut self, revoked: &HashMap<BlockNo, Tid>, home: BlockNo, tid: Tid) -> bool {
        match revoked.get(&home).filter(|_| !planted(Bug::RevokesIgnored)) {
            Some(&by) if tid.newer_than(by) => {
                self.note(Case::RevokedBefore);
                false
            }
            Some(_) => {
                self.note(Case::Revoked);
                self.report.revoked_blocks += 1;
                true
            }
            None => false,
        }
    }

    fn check_block(&mut self, block: &LoggedBlock, tid: Tid, bad_data: &HashSet<u32>) -> Step<()> {
        let refuse = |case, detail| {
            let error = JournalError::Corrupt { tid, at: block.at, detail };
            Err(Refusal { case, error })
        };
        if bad_data.contains(&block.at) {
            let detail = format!("the copy of block {} has a wrong checksum", block.home);
            return refuse(Case::BadDataChecksum, detail);
        }
        let device_blocks = self.device.size_bytes() / self.format.block_size as u64;
        if block.home.0 >= device_blocks {
            let detail = format!("block {} is past the end of the device", block.home);
            return refuse(Case::OutsideDevice, detail);
        }
        if self.map.contains(block.home) {
            let detail = format!("block {} belongs to the journal", block.home);
            return refuse(Case::InsideJournal, detail);
        }
        if block.escaped {
            self.note(Case::Escaped);
        }
        Ok(())
    }

    /// Reads the next block of the log and advances.
    fn next_block(&mut self) -> Step<Vec<u8>> {
        let at = self.at;
        self.step()?;
        self.reader.block(at).map(<[u8]>::to_vec).map_err(read_error)
    }

    /// Advances by a block, wrapping at the end of the log.
    fn step(&mut self) -> Step<()> {
        let (first, end) = (self.superblock.s_first, self.superblock.log_end());
        // One more than the length of the log: in a full log, the first block, seen again, ends it.
        if self.passed > end - first {
            let detail = "the log has no end".to_owned();
            return Err(self.corrupt(Case::WholeLap, self.at, detail));
        }
        self.passed += 1;
        self.at += 1;
        if self.at >= end {
            self.at = first;
            self.note(Case::Wrapped);
        }
        Ok(())
    }

    fn note(&mut self, case: Case) {
        if !self.report.cases.contains(&case) {
            self.report.cases.push(case);
        }
    }

    fn corrupt(&self, case: Case, at: u32, detail: String) -> Refusal {
        Refusal { case, error: JournalError::Corrupt { tid: self.tid, at, detail } }
    }

    fn refuse_format(&self, case: Case, at: u32, source: fjord_format::FormatError) -> Refusal {
        Refusal { case, error: JournalError::Format { at, source } }
    }

    fn into_plan(self, replay: BTreeMap<BlockNo, LoggedBlock>) -> Plan {
        Plan {
            device: self.device.clone(),
            map: self.map.clone(),
            superblock: self.superblock,
            superblock_block: self.superblock_block,
            transactions: self.complete.into_iter().map(|(transaction, _)| transaction).collect(),
            replay,
            report: self.report,
            log_end: self.log_end,
        }
    }
}

fn read_error(error: JournalError) -> Refusal {
    Refusal { case: Case::ReadError, error }
}

/// The header of a log block, or the row for the end of the log.
fn header_of(block: &[u8]) -> Result<BlockHeader, Case> {
    match BlockHeader::decode(block) {
        Some(header) => Ok(header),
        None if block.starts_with(&MAGIC.to_be_bytes()) => Err(Case::UnknownBlockType),
        None => Err(Case::NoHeader),
    }
}
