//! Round trips of every layout, and hostile input.

use proptest::prelude::*;

use super::*;
use crate::types::BlockNo;

const UUID: [u8; 16] = *b"0123456789abcdef";

fn formats() -> Vec<LogFormat> {
    let mut all = Vec::new();
    for checksum in
        [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3]
    {
        for bit64 in [false, true] {
            for block_size in [1024, 4096, 65536] {
                let seed = checksum::uuid_seed(&UUID);
                all.push(LogFormat { block_size, bit64, checksum, seed, uuid: UUID });
            }
        }
    }
    all
}

#[test]
fn tag_sizes_are_those_of_the_kernel() {
    let sizes = |bit64| {
        [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3].map(
            |checksum| {
                LogFormat { block_size: 4096, bit64, checksum, seed: 0, uuid: UUID }.tag_bytes()
            },
        )
    };
    assert_eq!(sizes(false), [8, 8, 10, 16]);
    assert_eq!(sizes(true), [12, 12, 14, 16]);
}

#[test]
fn descriptors_round_trip_in_every_layout() {
    for format in formats() {
        let mut block = vec![0xaa; format.block_size];
        let mut builder = DescriptorBuilder::new(&format, Tid(7), &mut block).unwrap();
        let mut homes = Vec::new();
        while builder.has_room() {
            let wide = if format.bit64 { 1 << 40 } else { 0 };
            let home = BlockNo(wide + 1000 + homes.len() as u64);
            let checksum = data_checksum(&format, Tid(7), &[homes.len() as u8; 64]);
            builder.push(home, homes.len() % 3 == 0, checksum).unwrap();
            homes.push(home);
        }
        assert!(builder.push(BlockNo(1), false, 0).is_err());
        builder.finish().unwrap();
        format.verify_tail("descriptor block", &block).unwrap();
        let tags = parse_tags(&format, &block);
        assert_eq!(tags.len(), format.tags_per_descriptor());
        assert_eq!(tags.iter().map(|tag| tag.block).collect::<Vec<_>>(), homes);
        for (index, tag) in tags.iter().enumerate() {
            assert!(tag.matches(&format, Tid(7), &[index as u8; 64]));
            assert_eq!(tag.flags.contains(TagFlags::ESCAPE), index % 3 == 0);
            assert_eq!(tag.flags.contains(TagFlags::SAME_UUID), index != 0);
            assert_eq!(tag.flags.contains(TagFlags::LAST_TAG), index + 1 == tags.len());
            if format.has_block_checksums() {
                assert!(!tag.matches(&format, Tid(8), &[index as u8; 64]));
            }
        }
        if format.has_block_checksums() {
            block[20] ^= 1;
            assert!(format.verify_tail("descriptor block", &block).is_err());
        }
    }
}

#[test]
fn wide_block_numbers_need_the_64bit_feature() {
    let format = formats().into_iter().find(|format| !format.bit64).unwrap();
    let mut block = vec![0; format.block_size];
    let mut builder = DescriptorBuilder::new(&format, Tid(1), &mut block).unwrap();
    assert!(builder.push(BlockNo(1 << 32), false, 0).is_err());
    let mut block = vec![0; format.block_size];
    let mut builder = RevokeBuilder::new(&format, Tid(1), &mut block).unwrap();
    assert!(builder.push(BlockNo(1 << 32)).is_err());
}

#[test]
fn revokes_round_trip_in_every_layout() {
    for format in formats() {
        let mut block = vec![0xaa; format.block_size];
        let mut builder = RevokeBuilder::new(&format, Tid(9), &mut block).unwrap();
        let numbers: Vec<_> =
            (0..format.revokes_per_block() as u64).map(|n| BlockNo(n + 5)).collect();
        for &number in &numbers {
            builder.push(number).unwrap();
        }
        assert!(builder.push(BlockNo(1)).is_err());
        builder.finish();
        format.verify_tail("revoke block", &block).unwrap();
        assert_eq!(parse_revokes(&format, &block).unwrap(), numbers);
        put_be32(&mut block, 12, format.block_size as u32 + 1);
        assert!(parse_revokes(&format, &block).is_err());
    }
}

#[test]
fn commit_blocks_verify_whole_and_with_a_stale_rest() {
    for format in formats() {
        let mut block = vec![0xaa; format.block_size];
        let commit = CommitBlock {
            sequence: Tid(3),
            commit_sec: 1 << 33,
            commit_nsec: 5,
            transaction_crc: crc32_be(!0, b"data"),
        };
        commit.encode(&format, &mut block).unwrap();
        let crc = crc32_be(!0, b"data");
        CommitBlock::verify(&format, &block, crc).unwrap();
        let read = CommitBlock::decode(&block).unwrap();
        assert_eq!((read.sequence, read.commit_sec, read.commit_nsec), (Tid(3), 1 << 33, 5));
        block[format.block_size - 1] = 0x55;
        CommitBlock::verify(&format, &block, crc).unwrap();
        // Padding of the structure in the kernel: it counts for the checksum, as the fields do.
        for padding in 60..64 {
            let mut block = block.clone();
            block[padding] = 0x55;
            let bad = CommitBlock::verify(&format, &block, crc);
            assert_eq!(bad.is_err(), format.has_block_checksums(), "byte {padding}");
        }
        block[64] = 0x55;
        CommitBlock::verify(&format, &block, crc).unwrap();
        block[50] ^= 1;
        let bad = CommitBlock::verify(&format, &block, crc);
        assert_eq!(bad.is_err(), format.has_block_checksums());
        let other_crc = CommitBlock::verify(&format, &block, crc ^ 1);
        assert_eq!(other_crc.is_err(), format.checksum != ChecksumVersion::None);
    }
}

#[test]
fn crc32_be_matches_the_published_check_value() {
    // CRC-32/MPEG-2.
    assert_eq!(crc32_be(!0, b"123456789"), 0x0376_e6e7);
}

#[test]
fn superblocks_round_trip_and_keep_unknown_bytes() {
    let mut superblock = Superblock::new(4096, 8192, UUID);
    superblock.set_checksum_version(ChecksumVersion::V3);
    superblock.s_feature_incompat |= Incompat::BIT64 | Incompat::REVOKE;
    superblock.s_errno = -5;
    let mut bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes).unwrap().s_errno, -5);
    bytes[0x100] = 9;
    assert!(matches!(Superblock::decode(&bytes), Err(FormatError::Checksum { .. })));
    superblock.set_checksum_version(ChecksumVersion::None);
    let mut bytes = superblock.encode();
    bytes[0x100] = 9;
    assert_eq!(Superblock::decode(&bytes).unwrap().encode(), bytes);
}

#[test]
fn features_are_refused_by_name() {
    let with = |incompat| {
        let mut superblock = Superblock::new(4096, 8192, UUID);
        superblock.s_feature_incompat = incompat;
        Superblock::decode(&superblock.encode()).map(drop)
    };
    let error = with(Incompat::from_bits_retain(0x80)).unwrap_err().to_string();
    assert!(error.contains("0x80"), "{error}");
    assert!(matches!(
        with(Incompat::CSUM_V2 | Incompat::CSUM_V3),
        Err(FormatError::Corrupt { .. })
    ));
    let mut shared = Superblock::new(4096, 8192, UUID);
    shared.s_nr_users = 2;
    assert_eq!(Superblock::decode(&shared.encode()).map(|found| found.s_nr_users), Ok(2));
}

#[test]
fn the_mark_of_i_transactions() {
    for checksum in [ChecksumVersion::None, ChecksumVersion::V3] {
        let mut superblock = Superblock::new(4096, 8192, UUID);
        superblock.set_checksum_version(checksum);
        let plain = superblock.encode();
        assert_eq!(superblock.ijournal(), None);
        for recovering_after in [None, Some(Tid(0)), Some(Tid(77))] {
            let (nonce, has_barriers) = (0xfeed_0123_4567_89ab, recovering_after.is_none());
            let mark = Some(IjournalMark { nonce, has_barriers, recovering_after });
            superblock.set_ijournal(mark);
            let bytes = superblock.encode();
            assert!(bytes[512..] == plain[512..]);
            assert_eq!(Superblock::decode(&bytes).unwrap().ijournal(), mark);
        }
        superblock.set_ijournal(None);
        assert!(superblock.encode() == plain);
    }
}

/// tune2fs empties the log of a journal that it refuses, and gives it another first number.
#[test]
fn a_marked_journal_keeps_the_place_of_its_log() {
    let mut superblock = Superblock::new(4096, 8192, UUID);
    (superblock.s_sequence, superblock.s_start) = (Tid(42), 17);
    let emptied = |superblock: &Superblock| {
        let mut other = superblock.clone();
        other.set_ijournal(None);
        (other.s_sequence, other.s_start) = (Tid(1), 0);
        let mut bytes = superblock.encode();
        // s_sequence and s_start.
        bytes[0x18..0x20].copy_from_slice(&other.encode()[0x18..0x20]);
        Superblock::decode(&bytes).unwrap()
    };
    assert_eq!((emptied(&superblock).s_sequence, emptied(&superblock).s_start), (Tid(1), 0));
    let mark = IjournalMark { nonce: 5, has_barriers: false, recovering_after: None };
    superblock.set_ijournal(Some(mark));
    assert_eq!((emptied(&superblock).s_sequence, emptied(&superblock).s_start), (Tid(42), 17));
    // It follows what fjord itself writes.
    (superblock.s_sequence, superblock.s_start) = (Tid(43), 0);
    let read = Superblock::decode(&superblock.encode()).unwrap();
    assert_eq!((read.s_sequence, read.s_start), (Tid(43), 0));
}

#[test]
fn version_1_has_no_features() {
    let mut superblock = Superblock::new(1024, 1024, UUID);
    superblock.s_feature_incompat = Incompat::all();
    let mut bytes = superblock.encode();
    bytes[7] = 3;
    let mut read = Superblock::decode(&bytes).unwrap();
    assert_eq!(read.version, Version::V1);
    assert!(read.s_feature_incompat.is_empty());
    read.upgrade_to_v2();
    let read = Superblock::decode(&read.encode()).unwrap();
    assert_eq!(read.version, Version::V2);
    assert!(read.s_feature_incompat.is_empty());
}

#[test]
fn geometry_is_checked() {
    let good = Superblock::new(4096, 8192, UUID);
    good.check(4096, 8192).unwrap();
    assert!(good.check(1024, 8192).is_err());
    assert!(good.check(4096, 8191).is_err());
    let broken = |change: fn(&mut Superblock)| {
        let mut superblock = good.clone();
        change(&mut superblock);
        superblock.check(4096, 8192).is_err()
    };
    assert!(broken(|sb| sb.s_maxlen = 1023));
    assert!(broken(|sb| sb.s_first = 0));
    assert!(broken(|sb| sb.s_first = 8192));
    assert!(broken(|sb| sb.s_start = 8192));
    assert!(broken(|sb| {
        sb.s_feature_incompat |= Incompat::FAST_COMMIT;
        sb.s_num_fc_blks = 8000;
    }));
    let mut fast = good.clone();
    fast.s_feature_incompat |= Incompat::FAST_COMMIT;
    assert_eq!(fast.fast_commit_blocks(), 256);
    assert_eq!(fast.log_end(), 8192 - 256);
    assert_eq!(fast.fast_commit_area(), 8192 - 255..8192);
}

proptest! {
    #[test]
    fn hostile_blocks_never_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..4096),
        block_type in 0u32..7,
    ) {
        if bytes.len() >= 8 {
            put_be32(&mut bytes, 0, MAGIC);
            put_be32(&mut bytes, 4, block_type);
        }
        let _ = Superblock::decode(&bytes).map(|sb| (sb.check(4096, 9999), sb.fast_commit_area()));
        let _ = BlockHeader::decode(&bytes);
        let _ = fast_commit::FastCommitScan::new(Tid(1)).push_block(&bytes);
        for format in formats() {
            prop_assert!(parse_tags(&format, &bytes).len() <= bytes.len() / 8);
            let _ = parse_revokes(&format, &bytes);
            let _ = CommitBlock::verify(&format, &bytes, 0);
            let _ = CommitBlock::decode(&bytes);
            let _ = format.verify_tail("block", &bytes);
        }
    }
}
