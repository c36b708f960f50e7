//! Round trips and hostile input. What Linux writes is read by the tests of recovery.

use proptest::prelude::*;

use super::*;
use crate::types::Tid;

fn entry(name: &[u8]) -> EntryRecord {
    EntryRecord { parent: InodeNo(2), ino: InodeNo(13), name: name.to_vec() }
}

fn extent(logical: u32, len: u32, start: u64, unwritten: bool) -> Record {
    let extent = Extent { logical: LogicalBlock(logical), len, start: BlockNo(start), unwritten };
    Record::AddRange { ino: InodeNo(13), extent }
}

fn all_kinds() -> Vec<Record> {
    vec![
        Record::Inode { ino: InodeNo(13), bytes: (0..160).map(|n| n as u8).collect() },
        Record::Create(entry(b"a")),
        extent(0, 32768, (1 << 48) - 1, false),
        extent(40_000, 32767, 7, true),
        extent(u32::MAX - 1, 1, 1, true),
        Record::DelRange { ino: InodeNo(13), logical: LogicalBlock(9), len: u32::MAX },
        Record::Link(entry(&[b'n'; 255])),
        Record::Unlink(entry(b"..x")),
        Record::Inode { ino: InodeNo(u32::MAX), bytes: vec![7; 256] },
    ]
}

fn written(block_size: usize, tid: u32, first: bool, records: &[Record]) -> Vec<u8> {
    let mut writer = FastCommitWriter::new(block_size, Tid(tid), first);
    for record in records {
        writer.push(record).unwrap();
    }
    let blocks = writer.block_count();
    let bytes = writer.finish().unwrap();
    assert!(bytes.len().is_multiple_of(block_size) && bytes.len() / block_size >= blocks);
    bytes
}

fn scan(block_size: usize, tid: u32, bytes: &[u8]) -> (u32, Vec<Record>) {
    let mut scan = FastCommitScan::new(Tid(tid));
    for block in bytes.chunks(block_size) {
        if !scan.push_block(block).unwrap() {
            break;
        }
    }
    (scan.commit_count(), scan.into_records())
}

#[test]
fn several_commits_round_trip_in_every_block_size() {
    for block_size in [1024, 4096, 65536] {
        let many: Vec<Record> = std::iter::repeat_n(all_kinds(), 40).flatten().collect();
        let mut area = written(block_size, 5, true, &all_kinds());
        area.extend(written(block_size, 5, false, &many));
        area.extend(written(block_size, 5, false, &[]));
        // What an earlier transaction left.
        area.extend(written(block_size, 4, false, &all_kinds()));
        let (commits, records) = scan(block_size, 5, &area);
        assert_eq!(commits, 4, "the empty one in front of the first counts too");
        assert_eq!(records, [all_kinds(), many].concat());
    }
}

#[test]
fn the_head_and_its_empty_commit_lie_in_one_sector() {
    let area = written(4096, 5, true, &all_kinds());
    for kept in (512..4096).step_by(512) {
        for rest in [0u8, 0xff, 9] {
            let mut torn = area.clone();
            torn[kept..].fill(rest);
            let (commits, records) = scan(4096, 5, &torn);
            // All records may lie in front of the tear, but the tail's bytes tell.
            assert!(commits == 1 && records.is_empty() || records == all_kinds(), "{kept}");
        }
    }
}

#[test]
fn only_the_expected_transaction_counts() {
    let area = written(1024, 5, true, &all_kinds());
    assert_eq!(scan(1024, 6, &area).0, 0);
    assert_eq!(scan(1024, 4, &area).0, 0);
    assert!(starts_with_head(&area) && !starts_with_head(&[0; 16]) && !starts_with_head(&[9]));
}

#[test]
fn a_changed_byte_ends_the_area() {
    let area = written(1024, 5, true, &all_kinds());
    let whole = scan(1024, 5, &area);
    assert_eq!(whole.1, all_kinds());
    let tail = area.len() - 1024 + written(1024, 5, false, &[]).len();
    for at in HEAD_TAG_BYTES + 12..area.len().min(tail) {
        let mut bad = area.clone();
        bad[at] ^= 0x10;
        let (commits, records) = scan(1024, 5, &bad);
        // Behind the CRC of the tail nothing is covered, as in Linux.
        assert!(commits == 1 && records.is_empty() || records == all_kinds(), "byte {at}");
    }
}

#[test]
fn unknown_features_are_refused_and_not_dropped() {
    let mut area = written(1024, 5, true, &all_kinds());
    area[4] = 1;
    let said = FastCommitScan::new(Tid(5)).push_block(&area[..1024]).unwrap_err().to_string();
    assert!(said.contains("0x1"), "{said}");
    assert!(!FastCommitScan::new(Tid(6)).push_block(&area[..1024]).unwrap());
}

#[test]
fn what_the_format_cannot_hold_is_refused() {
    let mut writer = FastCommitWriter::new(1024, Tid(1), true);
    let too_long = [extent(0, 32769, 1, false), extent(0, 32768, 1, true), extent(0, 0, 1, false)];
    for bad in too_long {
        assert!(matches!(writer.push(&bad), Err(FormatError::Usage(_))), "{bad:?}");
    }
    assert!(writer.push(&extent(0, 1, 1 << 48, false)).is_err());
    assert!(writer.push(&Record::Create(entry(b""))).is_err());
    assert!(writer.push(&Record::Create(entry(&[b'n'; 256]))).is_err());
    let large = Record::Inode { ino: InodeNo(12), bytes: vec![0; 1024] };
    assert!(matches!(writer.push(&large), Err(FormatError::NoRoom { .. })));
}

proptest! {
    #[test]
    fn hostile_areas_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        tags in prop::collection::vec((0u16..11, 0u16..300), 0..20),
    ) {
        let mut area = written(1024, 5, true, &all_kinds());
        area.extend(&bytes);
        let mut at = 24;
        for (tag, len) in tags {
            if let Some(place) = area.get_mut(at..at + 4) {
                place[..2].copy_from_slice(&tag.to_le_bytes());
                place[2..].copy_from_slice(&len.to_le_bytes());
            }
            at += 4 + usize::from(len);
        }
        let mut scan = FastCommitScan::new(Tid(5));
        for block in area.chunks(1024) {
            if !matches!(scan.push_block(block), Ok(true)) {
                break;
            }
        }
        prop_assert!(scan.into_records().len() <= area.len() / 4);
        let _ = FastCommitScan::new(Tid(5)).push_block(&bytes);
    }
}
