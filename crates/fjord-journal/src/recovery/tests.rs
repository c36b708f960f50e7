//! Walks every row of the decision table on a forged log.
//!
//! The logs are put together from `fjord-format`'s builders, not by the commit code, so that
//! they can be wrong in one place.

use std::sync::Arc;

use fjord_block::{Device, DeviceExt, MemDevice};
use fjord_format::jbd2::fast_commit::{FastCommitWriter, Record};
use fjord_format::jbd2::{
    BlockHeader, BlockType, ChecksumVersion, CommitBlock, DescriptorBuilder, Incompat, LogFormat,
    MAGIC, RevokeBuilder, Superblock, crc32_be, data_checksum,
};
use fjord_format::types::{BlockNo, InodeNo, LogicalBlock, Tid};

use super::decide::Row;
use super::{Case, Outcome, scan_cases};
use crate::error::JournalError;
use crate::map::JournalMap;

const BLOCK_SIZE: usize = 1024;
const JOURNAL: u64 = 100;
const LEN: u32 = 1400;
const DEVICE_BLOCKS: u64 = JOURNAL + LEN as u64 + 20;
const SEC: u64 = 1_000_000;

/// A log in the making.
struct Forge {
    image: Vec<u8>,
    superblock: Superblock,
    /// Journal block that the next piece goes to.
    at: u32,
    tid: Tid,
    commit_sec: u64,
    crc: u32,
    /// Journal blocks of the last descriptor and of the last revoke or commit block.
    descriptor_at: u32,
    other_at: u32,
    /// What the home blocks must hold after recovery.
    wanted: Vec<(u64, u8)>,
}

impl Forge {
    fn new(checksum: ChecksumVersion) -> Forge {
        let mut superblock = Superblock::new(BLOCK_SIZE as u32, LEN, *b"fedcba9876543210");
        superblock.set_checksum_version(checksum);
        superblock.s_feature_incompat |= Incompat::REVOKE | Incompat::BIT64;
        superblock.s_sequence = Tid(7);
        superblock.s_start = 1;
        Forge {
            image: vec![0; DEVICE_BLOCKS as usize * BLOCK_SIZE],
            superblock,
            at: 1,
            tid: Tid(7),
            commit_sec: SEC,
            crc: !0,
            descriptor_at: 0,
            other_at: 0,
            wanted: Vec::new(),
        }
    }

    fn format(&self) -> LogFormat {
        self.superblock.log_format()
    }

    fn block_mut(&mut self, at: u32) -> &mut [u8] {
        let start = (JOURNAL as usize + at as usize) * BLOCK_SIZE;
        &mut self.image[start..start + BLOCK_SIZE]
    }

    fn append(&mut self, block: &[u8]) -> u32 {
        let at = self.at;
        self.block_mut(at).copy_from_slice(block);
        self.at += 1;
        if self.at == self.superblock.log_end() {
            self.at = self.superblock.s_first;
        }
        at
    }

    /// A descriptor and blocks that are filled with one byte each.
    fn blocks(&mut self, homes: &[(u64, u8)]) {
        let copies = homes.iter().map(|&(home, fill)| (home, vec![fill; BLOCK_SIZE], false));
        self.copies(&copies.collect::<Vec<_>>());
    }

    fn copies(&mut self, copies: &[(u64, Vec<u8>, bool)]) {
        let format = self.format();
        let mut descriptor = vec![0; BLOCK_SIZE];
        let mut builder = DescriptorBuilder::new(&format, self.tid, &mut descriptor).unwrap();
        for (home, copy, escaped) in copies {
            let checksum = data_checksum(&format, self.tid, copy);
            builder.push(BlockNo(*home), *escaped, checksum).unwrap();
        }
        builder.finish().unwrap();
        self.crc = crc32_be(self.crc, &descriptor);
        self.descriptor_at = self.append(&descriptor);
        for (_, copy, _) in copies {
            self.crc = crc32_be(self.crc, copy);
            self.append(copy);
        }
    }

    fn revokes(&mut self, homes: &[u64]) {
        let format = self.format();
        let mut block = vec![0; BLOCK_SIZE];
        let mut builder = RevokeBuilder::new(&format, self.tid, &mut block).unwrap();
        homes.iter().for_each(|&home| builder.push(BlockNo(home)).unwrap());
        builder.finish();
        self.other_at = self.append(&block);
    }

    fn commit(&mut self) {
        let commit = CommitBlock {
            sequence: self.tid,
            commit_sec: self.commit_sec,
            commit_nsec: 0,
            transaction_crc: self.crc,
        };
        let mut block = vec![0; BLOCK_SIZE];
        commit.encode(&self.format(), &mut block).unwrap();
        self.other_at = self.append(&block);
        self.tid = self.tid.next();
        self.crc = !0;
    }

    /// A whole transaction; its blocks must be there after recovery.
    fn good(&mut self, homes: &[(u64, u8)]) {
        self.blocks(homes);
        self.commit();
        self.wanted.extend(homes);
    }

    /// Breaks a block of the log in a place that only a checksum notices.
    fn spoil(&mut self, at: u32, offset: usize) {
        self.block_mut(at)[offset] ^= 0xff;
    }

    /// Puts a valid superblock in front.
    fn seal(&mut self) {
        let bytes = self.superblock.encode();
        self.block_mut(0)[..bytes.len()].copy_from_slice(&bytes);
    }

    fn device(&self) -> MemDevice {
        let device = MemDevice::new(self.image.len() as u64);
        device.write_all_at(0, &self.image).unwrap();
        device
    }
}

fn forged(checksum: ChecksumVersion, build: impl FnOnce(&mut Forge)) -> Forge {
    let mut forge = Forge::new(checksum);
    build(&mut forge);
    forge
}

fn with_async(forge: &mut Forge) {
    forge.superblock.s_feature_incompat |= Incompat::ASYNC_COMMIT;
}

fn fast_commit(tid: Tid) -> Vec<u8> {
    let mut writer = FastCommitWriter::new(BLOCK_SIZE, tid, true);
    let len = 3;
    writer.push(&Record::DelRange { ino: InodeNo(12), logical: LogicalBlock(1), len }).unwrap();
    writer.finish().unwrap()
}

/// Rows about the superblock. The forge is sealed afterwards unless the row is about a
/// superblock that cannot be sealed.
fn superblock_row(case: Case) -> Option<Forge> {
    use ChecksumVersion::{None as Plain, V3};
    Some(match case {
        Case::Clean => forged(V3, |forge| {
            forge.blocks(&[(3, 1)]);
            forge.commit();
            forge.superblock.s_start = 0;
        }),
        Case::EmptyLog => forged(V3, |_| ()),
        Case::BadSuperblock => forged(V3, |forge| {
            forge.seal();
            forge.block_mut(0)[0x30] ^= 1;
        }),
        Case::UnknownFeature => forged(Plain, |forge| {
            forge.superblock.s_feature_incompat |= Incompat::from_bits_retain(0x80);
        }),
        Case::BadGeometry => forged(Plain, |forge| forge.superblock.s_start = LEN),
        Case::VersionOne => forged(Plain, |forge| {
            forge.superblock.s_feature_incompat = Incompat::empty();
            forge.good(&[(3, 1)]);
            forge.superblock.version = fjord_format::jbd2::Version::V1;
        }),
        Case::ErrorRecorded => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.superblock.s_errno = -5;
        }),
        _ => return None,
    })
}

/// Rows about where the log ends.
fn end_row(case: Case) -> Option<Forge> {
    use ChecksumVersion::{None as Plain, V3};
    Some(match case {
        Case::NoHeader | Case::Complete | Case::ReadError => {
            forged(Plain, |forge| forge.good(&[(3, 1), (4, 2)]))
        }
        Case::StaleSequence => forged(Plain, |forge| {
            forge.good(&[(3, 1)]);
            forge.tid = Tid(5);
            forge.blocks(&[(4, 9)]);
            forge.commit();
        }),
        Case::UnknownBlockType => forged(Plain, |forge| {
            forge.good(&[(3, 1)]);
            let mut block = vec![0; BLOCK_SIZE];
            let header = BlockHeader { block_type: BlockType::Commit, sequence: forge.tid };
            header.encode(&mut block).unwrap();
            block[7] = 77;
            forge.append(&block);
        }),
        Case::TornTransaction => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
        }),
        Case::Wrapped => forged(V3, |forge| {
            forge.at = LEN - 2;
            forge.superblock.s_start = LEN - 2;
            forge.good(&[(3, 1), (4, 2), (5, 3)]);
            forge.good(&[(6, 4)]);
        }),
        Case::WholeLap => forged(V3, |forge| {
            for _ in 1..LEN {
                forge.revokes(&[3]);
            }
        }),
        Case::TornLap => forged(Plain, |forge| torn_in_a_full_log(forge, &[0; 512])),
        _ => return None,
    })
}

/// Fills the log with transactions, up to one that just fits and lacks its commit block. Its
/// descriptor is torn: it ends with `old`, where it has tags of its own.
fn torn_in_a_full_log(forge: &mut Forge, old: &[u8]) {
    let tags = (BLOCK_SIZE - old.len() - 28) / forge.format().tag_bytes() + 8;
    let filled = LEN - 2 - tags as u32;
    let first: Vec<_> =
        (3..=3 + u64::from((filled - forge.at) % 3)).map(|home| (home, 1)).collect();
    forge.good(&first);
    while forge.at < filled {
        forge.good(&[(6, 2)]);
    }
    forge.blocks(&(0..tags).map(|tag| (20 + tag as u64, 9)).collect::<Vec<_>>());
    forge.wanted.push((20, 0));
    let at = forge.descriptor_at;
    forge.block_mut(at)[BLOCK_SIZE - old.len()..].copy_from_slice(old);
}

/// Rows about checksums.
fn checksum_row(case: Case) -> Option<Forge> {
    use ChecksumVersion::{V1, V2, V3};
    Some(match case {
        Case::BadDescriptorTorn => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.spoil(forge.descriptor_at, 900);
        }),
        Case::BadDescriptorStale => forged(V2, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.spoil(forge.descriptor_at, 900);
            forge.commit_sec = SEC - 1;
            forge.commit();
        }),
        Case::BadDescriptorCommitted => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.revokes(&[4]);
            forge.spoil(forge.other_at, 900);
            forge.commit();
        }),
        Case::PartialCommitBlock => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.spoil(forge.other_at, 700);
        }),
        Case::CommitWithoutChecksum => forged(V1, |forge| {
            forge.good(&[(3, 1)]);
            let at = forge.other_at;
            forge.block_mut(at)[12..20].fill(0);
        }),
        Case::BadCommitStale => forged(V1, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.commit_sec = SEC - 1;
            forge.crc = 1;
            forge.commit();
        }),
        Case::BadCommit => forged(V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.commit();
            forge.spoil(forge.other_at, 17);
        }),
        Case::AsyncCommitTorn => forged(V3, |forge| {
            with_async(forge);
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.spoil(forge.at - 1, 5);
            forge.commit();
        }),
        Case::AsyncCommitCorrupt => forged(V1, |forge| {
            with_async(forge);
            forge.good(&[(3, 1)]);
            forge.blocks(&[(4, 9)]);
            forge.spoil(forge.at - 1, 5);
            forge.commit();
            forge.good(&[(5, 3)]);
        }),
        Case::BadDataChecksum => forged(V2, |forge| {
            forge.blocks(&[(3, 1)]);
            forge.spoil(forge.at - 1, 5);
            forge.commit();
            forge.good(&[(4, 2)]);
        }),
        _ => return None,
    })
}

/// Rows about what the transactions contain.
fn content_row(case: Case) -> Option<Forge> {
    use ChecksumVersion::{None as Plain, V3};
    let refused = |home| forged(V3, |forge| forge.good(&[(3, 1), (home, 2)]));
    Some(match case {
        Case::Revoked => forged(V3, |forge| {
            forge.blocks(&[(3, 9), (4, 9)]);
            forge.commit();
            // By a later transaction, and by the same one; a wrong checksum does not matter.
            forge.revokes(&[3, 4, 5]);
            forge.blocks(&[(5, 9), (6, 1)]);
            forge.spoil(forge.at - 2, 5);
            forge.commit();
            forge.wanted = vec![(3, 0), (4, 0), (5, 0), (6, 1)];
        }),
        Case::RevokedBefore => forged(V3, |forge| {
            forge.blocks(&[(3, 9)]);
            forge.commit();
            forge.revokes(&[3]);
            forge.commit();
            forge.good(&[(3, 1)]);
        }),
        Case::Superseded => forged(V3, |forge| {
            forge.blocks(&[(3, 9)]);
            forge.commit();
            forge.good(&[(3, 1)]);
        }),
        Case::Escaped => forged(V3, |forge| {
            let mut copy = vec![5; BLOCK_SIZE];
            copy[..4].fill(0);
            forge.copies(&[(3, copy, true)]);
            forge.commit();
        }),
        Case::OutsideDevice => refused(DEVICE_BLOCKS),
        Case::InsideJournal => refused(JOURNAL + 5),
        Case::BadRevokeCount => forged(Plain, |forge| {
            forge.revokes(&[3]);
            let at = forge.other_at;
            forge.block_mut(at)[12..16].copy_from_slice(&5000u32.to_be_bytes());
            forge.commit();
        }),
        Case::NoFastCommit | Case::FastCommit | Case::BadFastCommit => forged(V3, |forge| {
            forge.superblock.s_feature_incompat |= Incompat::FAST_COMMIT;
            forge.good(&[(3, 1)]);
            let stale = case == Case::NoFastCommit;
            let tid = if stale { Tid(forge.tid.0 - 1) } else { forge.tid };
            let at = forge.superblock.fast_commit_area().start;
            forge.block_mut(at).copy_from_slice(&fast_commit(tid));
            if case == Case::BadFastCommit {
                forge.block_mut(at)[4] = 1;
            }
        }),
        _ => return None,
    })
}

fn row(case: Case) -> Forge {
    let rows = [superblock_row, end_row, checksum_row, content_row];
    let mut forge = rows.iter().find_map(|row| row(case)).expect("every row has a forged log");
    if case != Case::BadSuperblock {
        forge.seal();
    }
    forge
}

fn map() -> JournalMap {
    JournalMap::contiguous(BlockNo(JOURNAL), LEN).unwrap()
}

#[test]
fn every_row_of_the_table_is_reached_and_does_what_it_says() {
    for &case in Case::ALL {
        let forge = row(case);
        let memory = forge.device();
        if case == Case::ReadError {
            let start = (JOURNAL + 1) * BLOCK_SIZE as u64;
            memory.faults().fail_range(None, start..start + 1, 5);
        }
        let device: Arc<dyn Device> = Arc::new(memory);
        let scanned = scan_cases(&device, &map(), BLOCK_SIZE);
        if case.outcome() == Outcome::Refuse {
            let refusal = scanned.expect_err(case.reason());
            assert_eq!(refusal.case, case, "{}", refusal.error);
            assert!(!refusal.error.to_string().is_empty());
            continue;
        }
        let plan = scanned.unwrap_or_else(|refusal| panic!("{case:?}: {}", refusal.error));
        assert!(plan.report().cases.contains(&case), "{case:?}: {:?}", plan.report().cases);
        for &(home, fill) in &forge.wanted {
            let overlay = plan.read(BlockNo(home)).unwrap();
            assert_eq!(overlay.map_or(0, |contents| contents[9]), fill, "{case:?}: block {home}");
        }
        let report = plan.apply().unwrap();
        for &(home, fill) in &forge.wanted {
            let contents = device.read_buf(home * BLOCK_SIZE as u64, BLOCK_SIZE).unwrap();
            assert!(contents.iter().all(|&byte| byte == fill), "{case:?}: block {home}");
        }
        assert_eq!(report.was_dirty, case.outcome() != Outcome::Nothing || case == Case::EmptyLog);
        if case == Case::Escaped {
            let contents = device.read_buf(3 * BLOCK_SIZE as u64, BLOCK_SIZE).unwrap();
            assert_eq!(contents[..5], [&MAGIC.to_be_bytes()[..], &[5]].concat());
        }
        let again = scan_cases(&device, &map(), BLOCK_SIZE).unwrap();
        if case == Case::FastCommit {
            // Still there, and now all that the log has.
            assert_eq!(report.fast_commit_records.len(), 1);
            assert_eq!(again.report().fast_commit_records, report.fast_commit_records);
            assert_eq!((again.report().transactions, again.report().next_tid), (0, forge.tid));
            continue;
        }
        assert!(!again.report().was_dirty, "{case:?}");
        // No ID that the log has seen, finished or torn, is used again.
        let fresh = again.report().next_tid.newer_than(forge.tid);
        assert!(fresh || case == Case::Clean, "{case:?}");
    }
}

/// A flag of a tag says that the descriptor ends there, or goes on: the walk takes something else for
/// the commit block, and the log seems to end. The commit block shows that it does not.
#[test]
fn a_wrong_tag_does_not_hide_a_commit() {
    // Header, then the low byte of the flags of the first tag (big-endian, behind the number).
    const FLAGS: usize = 12 + 7;
    for homes in [&[(4, 9), (5, 8)][..], &[(4, 9)]] {
        let mut forge = forged(ChecksumVersion::V3, |forge| {
            forge.good(&[(3, 1)]);
            forge.blocks(homes);
            let at = forge.descriptor_at;
            forge.block_mut(at)[FLAGS] ^= 8;
            forge.commit();
        });
        forge.seal();
        let device: Arc<dyn Device> = Arc::new(forge.device());
        let refusal = scan_cases(&device, &map(), BLOCK_SIZE).expect_err("it is damaged");
        assert_eq!(refusal.case, Case::BadDescriptorCommitted, "{}", refusal.error);
    }
}

/// Bytes 60 to 63 of a commit block are padding of the kernel's structure. They came with the fields,
/// in one sector: what stands there is damage, not the rest of an older block.
#[test]
fn damaged_padding_of_a_commit_block_is_no_partial_block() {
    for padding in 60..64 {
        for is_async in [false, true] {
            let mut forge = forged(ChecksumVersion::V3, |forge| {
                if is_async {
                    with_async(forge);
                }
                forge.good(&[(3, 1)]);
                forge.spoil(forge.other_at, padding);
                forge.good(&[(4, 2)]);
            });
            forge.seal();
            let device: Arc<dyn Device> = Arc::new(forge.device());
            let refusal = scan_cases(&device, &map(), BLOCK_SIZE).expect_err("it is damaged");
            let row = if is_async { Case::AsyncCommitCorrupt } else { Case::BadCommit };
            assert_eq!(refusal.case, row, "byte {padding}: {}", refusal.error);
        }
    }
}

/// The end of a descriptor with as many tags as it can hold.
fn full_descriptor(format: &LogFormat) -> Vec<u8> {
    let mut block = vec![0; BLOCK_SIZE];
    let mut builder = DescriptorBuilder::new(format, Tid(1), &mut block).unwrap();
    while builder.has_room() {
        builder.push(BlockNo(3), false, 0).unwrap();
    }
    builder.finish().unwrap();
    block.split_off(512)
}

/// The tags after the torn part lead the walk past the start of the log. A power cut does that as long
/// as there is no commit block; with one, the log is damaged.
#[test]
fn a_torn_descriptor_in_a_full_log_ends_it_unless_it_is_committed() {
    use ChecksumVersion::{None as Plain, V1, V2, V3};
    for checksum in [Plain, V1, V2, V3] {
        let long = full_descriptor(&Forge::new(checksum).format());
        for (old, is_async) in [(vec![0; 512], false), (long.clone(), false), (long, true)] {
            let mut forge = forged(checksum, |forge| {
                if is_async {
                    with_async(forge);
                }
                torn_in_a_full_log(forge, &old);
            });
            forge.seal();
            let transactions = forge.tid.0 - 7;
            let device: Arc<dyn Device> = Arc::new(forge.device());
            let plan = scan_cases(&device, &map(), BLOCK_SIZE)
                .unwrap_or_else(|refusal| panic!("{checksum:?}: {}", refusal.error));
            let with_checksums = matches!(checksum, V2 | V3);
            let row = if with_checksums { Case::BadDescriptorTorn } else { Case::TornLap };
            assert!(plan.report().cases.contains(&row), "{checksum:?}: {:?}", plan.report().cases);
            assert_eq!(plan.report().transactions, transactions, "{checksum:?}");
            plan.apply().unwrap();
            for &(home, fill) in &forge.wanted {
                let contents = device.read_buf(home * BLOCK_SIZE as u64, BLOCK_SIZE).unwrap();
                assert!(contents.iter().all(|&byte| byte == fill), "{checksum:?}: block {home}");
            }
            forge.commit();
            let device: Arc<dyn Device> = Arc::new(forge.device());
            let scanned = scan_cases(&device, &map(), BLOCK_SIZE);
            if is_async {
                // The commit block may have overtaken the descriptor.
                assert_eq!(scanned.unwrap().report().transactions, transactions, "{checksum:?}");
                continue;
            }
            let refusal = scanned.expect_err("a flush was before the commit block");
            let row = if with_checksums { Case::BadDescriptorCommitted } else { Case::WholeLap };
            assert_eq!(refusal.case, row, "{checksum:?}: {}", refusal.error);
        }
    }
}

/// Each defect of a superblock, alone and with each set of others.
#[test]
fn a_superblock_has_one_row_of_refusal() {
    const CHECKSUM: usize = 0xfc;
    let rows: &[Row<[bool; 6]>] = &[
        (Some(Case::BadGeometry), |&[map, read, magic, feature, checksum, geometry]| {
            map || geometry && !(read || magic || feature || checksum)
        }),
        (Some(Case::ReadError), |&[map, read, ..]| !map && read),
        (Some(Case::BadSuperblock), |&[map, read, magic, feature, checksum, _]| {
            !map && !read && (magic || checksum && !feature)
        }),
        (Some(Case::UnknownFeature), |&[map, read, magic, feature, ..]| {
            !map && !read && !magic && feature
        }),
        (None, |defects| !defects.contains(&true)),
    ];
    for bits in 0..1u32 << 6 {
        let defects: [bool; 6] = std::array::from_fn(|index| bits >> index & 1 != 0);
        let [off_device, unreadable, magic, feature, checksum, geometry] = defects;
        let mut forge = forged(ChecksumVersion::V3, |forge| forge.good(&[(3, 1)]));
        if feature {
            forge.superblock.s_feature_incompat |= Incompat::from_bits_retain(0x80);
        }
        if geometry {
            forge.superblock.s_start = LEN;
        }
        forge.seal();
        forge.block_mut(0)[0] ^= u8::from(magic);
        forge.block_mut(0)[CHECKSUM] ^= u8::from(checksum);
        let memory = forge.device();
        if unreadable {
            let start = JOURNAL * BLOCK_SIZE as u64;
            memory.faults().fail_range(None, start..start + 1, 5);
        }
        let len = if off_device { LEN + 900 } else { LEN };
        let map = JournalMap::contiguous(BlockNo(JOURNAL), len).unwrap();
        let device: Arc<dyn Device> = Arc::new(memory);
        let found = scan_cases(&device, &map, BLOCK_SIZE).err().map(|refusal| refusal.case);
        let applying: Vec<_> = rows.iter().filter(|(_, applies)| applies(&defects)).collect();
        assert_eq!(applying.len(), 1, "{defects:?}");
        assert_eq!(found, applying[0].0, "{defects:?}");
    }
}

#[test]
fn rows_are_numbered_without_gaps_and_explained() {
    for (index, case) in Case::ALL.iter().enumerate() {
        assert_eq!(usize::from(case.number()), index + 1);
        assert!(case.reason().ends_with('.'));
    }
}

#[test]
fn the_documentation_has_the_same_table() {
    let docs = include_str!("../../../../docs/on-disk.md");
    for case in Case::ALL {
        let (number, outcome, reason) = (case.number(), case.outcome(), case.reason());
        let line = format!("| {number} | {case:?} | {outcome:?} | {reason} |");
        assert!(docs.contains(&line), "docs/on-disk.md lacks: {line}");
    }
}

#[test]
fn block_size_mismatch_and_a_journal_off_the_device_are_refused() {
    let mut forge = Forge::new(ChecksumVersion::V3);
    forge.seal();
    let device: Arc<dyn Device> = Arc::new(forge.device());
    let wide = JournalMap::contiguous(BlockNo(JOURNAL / 4), LEN / 4).unwrap();
    assert_eq!(scan_cases(&device, &wide, 4096).unwrap_err().case, Case::BadGeometry);
    let off = JournalMap::contiguous(BlockNo(JOURNAL), LEN + 900).unwrap();
    assert_eq!(scan_cases(&device, &off, BLOCK_SIZE).unwrap_err().case, Case::BadGeometry);
    let odd = scan_cases(&device, &map(), 1000).unwrap_err();
    assert!(matches!(odd.error, JournalError::Usage(_)));
}

proptest::proptest! {
    /// Mutated logs: a typed answer or a replay, never a panic, and no write into the journal.
    #[test]
    fn hostile_logs_never_panic(
        version in 0usize..4,
        fast in proptest::bool::ANY,
        hits in proptest::collection::vec((0u32..16, 0usize..BLOCK_SIZE, 1u8..), 1..8),
        reseal in proptest::bool::ANY,
    ) {
        use ChecksumVersion::{None as Plain, V1, V2, V3};
        let mut forge = Forge::new([Plain, V1, V2, V3][version]);
        if fast {
            forge.superblock.s_feature_incompat |= Incompat::FAST_COMMIT;
        }
        forge.good(&[(3, 1), (4, 2)]);
        forge.revokes(&[4]);
        forge.good(&[(5, 3)]);
        forge.good(&[(3, 4)]);
        forge.seal();
        for (at, offset, value) in hits {
            forge.block_mut(at)[offset % if at == 0 { 0x60 } else { BLOCK_SIZE }] ^= value;
        }
        if reseal {
            // With a valid checksum again, so that the mutation gets past it.
            let bytes = forge.block_mut(0).to_vec();
            let seed = fjord_format::checksum::SEED_START;
            let crc = fjord_format::checksum::crc32c_with_hole(seed, &bytes, 0xfc, 4).unwrap();
            forge.block_mut(0)[0xfc..0x100].copy_from_slice(&crc.to_be_bytes());
        }
        let device: Arc<dyn Device> = Arc::new(forge.device());
        if let Ok(plan) = scan_cases(&device, &map(), BLOCK_SIZE) {
            let report = plan.apply().unwrap();
            proptest::prop_assert!(report.replayed_blocks < 100);
        }
    }
}
