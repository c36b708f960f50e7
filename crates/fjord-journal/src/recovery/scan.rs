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

use super::cases::{Case, Outcome, Refusal};
use super::decide::{
    AsyncTail, Commit, CommitForm, Contents, FastCommits, Header, HeaderKind, LoggedCopy,
    Revocation, RevokedBy, Tail,
};
use super::plan::{LoggedBlock, LoggedTransaction, Plan};
use super::reader::LogReader;
use super::report::RecoveryReport;
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
        self.report.was_dirty = self.superblock.s_start != 0;
        if !self.report.was_dirty {
            self.note_contents();
            self.report.next_tid = self.tid.next();
            self.report.committed = self.committed();
            return Ok(self.into_plan(BTreeMap::new()));
        }
        self.walk()?;
        self.drop_torn_async();
        self.complete.pop_if(|_| planted(Bug::LastCommitIgnored));
        self.note_contents();
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
            let Some(block) = self.next_block()? else { return self.end(true, &pending) };
            let (header, block_type) = header_of(&block, self.tid);
            if let Some(case) = header.decide() {
                self.note(case);
                return self.end(false, &pending);
            }
            let goes_on = match block_type {
                Some(BlockType::Descriptor) => self.descriptor(here, &block, &mut pending)?,
                Some(BlockType::Revoke) => {
                    self.revokes(here, &block, &mut pending);
                    true
                }
                _ => {
                    if !self.commit(here, &block, &mut pending)? {
                        return Ok(());
                    }
                    self.tid = self.tid.next();
                    pending = Pending::new(self.tid, self.at);
                    true
                }
            };
            if !goes_on {
                return self.end(true, &pending);
            }
        }
    }

    /// The walk has ended without a commit block of `pending`; `lapped` as in [`Tail`].
    fn end(&mut self, lapped: bool, pending: &Pending) -> Step<()> {
        let checksums = self.format.has_block_checksums();
        let bad_block = pending.bad_block.is_some();
        let doubtful = bad_block || lapped && pending.begun && !checksums;
        let committed = doubtful && !self.is_async() && self.finds_commit()?;
        let tail = Tail { lapped, begun: pending.begun, checksums, bad_block, committed };
        let Some(case) = tail.decide() else { return Ok(()) };
        if case.outcome() != Outcome::Refuse {
            self.note(case);
            return Ok(());
        }
        let (at, detail) = match &pending.bad_block {
            Some((at, detail)) => (*at, detail.clone()),
            None => (self.at, "the log has no end".to_owned()),
        };
        Err(self.corrupt(case, at, detail))
    }

    /// Whether a commit block of the expected transaction is anywhere in the log: a wrong descriptor
    /// may have led the scan past it. Checksum v1 is over the blocks of a transaction, which a wrong
    /// descriptor does not tell: only its type is checked.
    fn finds_commit(&mut self) -> Step<bool> {
        let last_sec = self.complete.last().map_or(0, |(last, _)| last.committed_at.0);
        for at in self.superblock.s_first..self.superblock.log_end() {
            let block = self.reader.block(at).map_err(read_error)?;
            let header = BlockHeader { block_type: BlockType::Commit, sequence: self.tid };
            if BlockHeader::decode(block) != Some(header) {
                continue;
            }
            let valid = CommitBlock::decode(block).is_ok_and(|commit| {
                commit.commit_sec >= last_sec
                    && CommitBlock::verify(&self.format, block, commit.transaction_crc).is_ok()
            });
            if valid {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// `false` when its tags lead the walk once around the log.
    fn descriptor(&mut self, here: u32, block: &[u8], pending: &mut Pending) -> Step<bool> {
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
                let Some(copy) = self.next_block()? else { return Ok(false) };
                if with_crc {
                    pending.crc = jbd2::crc32_be(pending.crc, &copy);
                }
                let verify = !planted(Bug::ChecksumsNotVerified);
                if verify && !tag.matches(&self.format, self.tid, &copy) {
                    pending.bad_data.insert(at);
                }
            } else if !self.step() {
                return Ok(false);
            }
            let escaped = tag.flags.contains(TagFlags::ESCAPE);
            pending.transaction.blocks.push(LoggedBlock { home: tag.block, at, escaped });
        }
        Ok(true)
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
        let verified = CommitBlock::verify(&self.format, block, pending.crc);
        let finding = Commit {
            bad_block: pending.bad_block.is_some(),
            stale: commit.commit_sec < last_sec,
            checksum_holds: verified.is_ok(),
            is_async: self.is_async(),
            failed_before: self.async_failed.is_some(),
            bad_revoke: pending.bad_revoke.is_some(),
        };
        match finding.decide() {
            Some(Case::AsyncCommitTorn) => {
                // A commit after it proves that it is not.
                self.async_failed = Some(self.tid);
                return Ok(true);
            }
            Some(case) if case.outcome() == Outcome::End => {
                self.note(case);
                return Ok(false);
            }
            Some(case) if case.outcome() == Outcome::Refuse => {
                return Err(self.refuse_commit(case, here, pending, verified.err()));
            }
            _ => {}
        }
        self.note_commit_form(block);
        self.note(Case::Complete);
        self.log_end = self.at;
        let mut done = std::mem::replace(pending, Pending::new(self.tid, self.at));
        done.transaction.committed_at = (commit.commit_sec, commit.commit_nsec);
        self.complete.push((done.transaction, done.bad_data));
        Ok(true)
    }

    fn refuse_commit(
        &self,
        case: Case,
        here: u32,
        pending: &Pending,
        wrong: Option<fjord_format::FormatError>,
    ) -> Refusal {
        let block = match case {
            Case::BadRevokeCount => pending.bad_revoke.clone(),
            Case::BadDescriptorCommitted => pending.bad_block.clone(),
            _ => None,
        };
        let (tid, (at, detail)) = match (self.async_failed, block) {
            (Some(failed), _) => {
                (failed, (here, format!("a later transaction is committed (block {here})")))
            }
            (None, Some(block)) => (self.tid, block),
            (None, None) => {
                (self.tid, (here, wrong.map_or_else(String::new, |error| error.to_string())))
            }
        };
        Refusal { case, error: JournalError::Corrupt { tid, at, detail } }
    }

    /// Records the row if the commit block was valid only by a special rule.
    fn note_commit_form(&mut self, block: &[u8]) {
        let rest = block.get(CommitBlock::HEAD_BYTES..).unwrap_or_default();
        let form = CommitForm {
            checksum: self.format.checksum,
            no_checksum: block.get(HEADER_BYTES) == Some(&0),
            rest_used: rest.iter().any(|&byte| byte != 0),
        };
        form.decide().into_iter().for_each(|case| self.note(case));
    }

    fn is_async(&self) -> bool {
        self.superblock.s_feature_incompat.contains(Incompat::ASYNC_COMMIT)
    }

    /// Under async commit, blocks of the last transaction may be missing.
    fn drop_torn_async(&mut self) {
        let bad_data = self.complete.last().is_some_and(|(_, bad_data)| !bad_data.is_empty());
        let (is_async, failed) = (self.is_async(), self.async_failed.is_some());
        let Some(case) = (AsyncTail { is_async, failed, bad_data }).decide() else { return };
        self.note(case);
        if let Some(failed) = self.async_failed {
            self.tid = failed;
        } else if let Some((torn, _)) = self.complete.pop() {
            self.tid = torn.tid;
            self.log_end = torn.start;
        }
    }

    fn note_contents(&mut self) {
        let contents =
            Contents { dirty: self.report.was_dirty, complete: !self.complete.is_empty() };
        contents.decide().into_iter().for_each(|case| self.note(case));
    }

    fn check_fast_commits(&mut self) -> Step<()> {
        let area = self.superblock.fast_commit_area();
        let expected = (!planted(Bug::FastCommitTidNotChecked)).then_some(self.tid);
        let mut finding = FastCommits { area: !area.is_empty(), unknown: false, records: false };
        let mut scan = FastCommitScan::new(expected);
        for at in area {
            let block = self.reader.block(at).map_err(read_error)?;
            match scan.push_block(block) {
                Ok(true) => {}
                Ok(false) => break,
                Err(source) => {
                    finding.unknown = true;
                    let case = finding.decide().unwrap_or(Case::BadFastCommit);
                    return Err(self.refuse_format(case, at, source));
                }
            }
        }
        self.report.fast_commits = scan.commit_count();
        self.report.fast_commit_records = scan.into_records();
        finding.records = !self.report.fast_commit_records.is_empty();
        finding.decide().into_iter().for_each(|case| self.note(case));
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
        let by = match revoked.get(&home).filter(|_| !planted(Bug::RevokesIgnored)) {
            None => RevokedBy::Nothing,
            Some(&by) if tid.newer_than(by) => RevokedBy::Earlier,
            Some(_) => RevokedBy::SameOrLater,
        };
        let Some(case) = (Revocation { by }).decide() else { return false };
        self.note(case);
        let is_revoked = case.outcome() == Outcome::Skip;
        self.report.revoked_blocks += usize::from(is_revoked);
        is_revoked
    }

    fn check_block(&mut self, block: &LoggedBlock, tid: Tid, bad_data: &HashSet<u32>) -> Step<()> {
        let device_blocks = self.device.size_bytes() / self.format.block_size as u64;
        let copy = LoggedCopy {
            checksum_holds: !bad_data.contains(&block.at),
            outside: block.home.0 >= device_blocks,
            in_journal: self.map.contains(block.home),
        };
        let Some(case) = copy.decide() else {
            if block.escaped {
                self.note(Case::Escaped);
            }
            return Ok(());
        };
        let home = block.home;
        let detail = match case {
            Case::OutsideDevice => format!("block {home} is past the end of the device"),
            Case::InsideJournal => format!("block {home} belongs to the journal"),
            _ => format!("the copy of block {home} has a wrong checksum"),
        };
        Err(Refusal { case, error: JournalError::Corrupt { tid, at: block.at, detail } })
    }

    /// Reads the next block of the log and advances; `None` as the `false` of [`Self::step`].
    fn next_block(&mut self) -> Step<Option<Vec<u8>>> {
        let at = self.at;
        if !self.step() {
            return Ok(None);
        }
        self.reader.block(at).map(|block| Some(block.to_vec())).map_err(read_error)
    }

    /// Advances by a block, wrapping at the end of the log. `false` if the walk has already read as
    /// many blocks as the log has, and the first one again, which ends a full log.
    fn step(&mut self) -> bool {
        let (first, end) = (self.superblock.s_first, self.superblock.log_end());
        if self.passed > end - first {
            return false;
        }
        self.passed += 1;
        self.at += 1;
        if self.at >= end {
            self.at = first;
            self.note(Case::Wrapped);
        }
        true
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

/// The finding about a block where a header of transaction `tid` must stand, and its type.
fn header_of(block: &[u8], tid: Tid) -> (Header, Option<BlockType>) {
    let decoded = BlockHeader::decode(block);
    let kind = match decoded.map(|header| header.block_type) {
        Some(BlockType::SuperblockV1 | BlockType::SuperblockV2) => HeaderKind::Superblock,
        Some(BlockType::Descriptor | BlockType::Revoke | BlockType::Commit) => HeaderKind::Log,
        None if block.starts_with(&MAGIC.to_be_bytes()) => HeaderKind::Unknown,
        None => HeaderKind::NoMagic,
    };
    let expected = decoded.is_some_and(|it| it.sequence == tid || planted(Bug::SequenceNotChecked));
    (Header { kind, expected }, decoded.map(|header| header.block_type))
}
