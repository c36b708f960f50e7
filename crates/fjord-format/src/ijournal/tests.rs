//! Round trips, torn writes and forged bytes.

use super::*;
use crate::error::FormatError;
use crate::types::{BlockNo, InodeNo, Tid};
use proptest::prelude::*;

const FORMAT: AreaFormat = AreaFormat { block_size: 1024, uuid: [7; 16], nonce: 0x1234_5678_9abc };

const ORDER: Order = Order { barrier: 6, newest: Tid(10), behind_newest: 8, behind_older: 7 };

/// An i-transaction, its blocks as they go to the area, and what they must decode to.
fn sample(data_fill: u8, data_bytes: usize) -> (Vec<u8>, ITransaction) {
    let mut builder = Builder::new(&FORMAT, Tid(9), 77, InodeNo(14));
    let mut payload = Vec::new();
    let mut put = |place: Place, content: &[u8]| {
        let Place::Payload { escaped } = place else { return };
        let mut block = content.to_vec();
        if escaped {
            block[..4].fill(0);
        }
        payload.extend_from_slice(&block);
    };
    builder.inode(InodeNo(13), &[3; 256]).unwrap();
    builder.entry(InodeNo(2), InodeNo(13), 2, b"dir").unwrap();
    builder.inode(InodeNo(14), &[4; 256]).unwrap();
    builder.entry(InodeNo(13), InodeNo(14), 1, b"a name").unwrap();
    let mut extents = vec![5; 1024];
    extents[..4].copy_from_slice(&MAGIC.to_le_bytes());
    put(builder.extent_block(BlockNo(1 << 40), &extents).unwrap(), &extents);
    builder.superseded(BlockNo(90), 3).unwrap();
    let mut data = vec![0; 1024];
    data[..data_bytes].fill(data_fill);
    put(builder.data(BlockNo(88), &data).unwrap(), &data);
    let total = builder.total_blocks();
    let mut blocks = builder.finish(&ORDER).unwrap();
    blocks.extend_from_slice(&payload);
    assert_eq!(blocks.len(), total as usize * 1024);
    let wanted = ITransaction {
        tid: Tid(9),
        sub_id: 77,
        ino: InodeNo(14),
        order: ORDER,
        inodes: vec![
            InodeImage { ino: InodeNo(13), bytes: vec![3; 256] },
            InodeImage { ino: InodeNo(14), bytes: vec![4; 256] },
        ],
        entries: vec![
            Entry { parent: InodeNo(2), child: InodeNo(13), file_type: 2, name: b"dir".to_vec() },
            Entry {
                parent: InodeNo(13),
                child: InodeNo(14),
                file_type: 1,
                name: b"a name".to_vec(),
            },
        ],
        extent_blocks: vec![ExtentBlock { home: BlockNo(1 << 40), content: extents }],
        data: vec![DataBlock { home: BlockNo(88), content: data }],
        superseded: vec![Superseded { home: BlockNo(90), count: 3 }],
    };
    (blocks, wanted)
}

#[test]
fn what_is_built_is_read() {
    let (blocks, wanted) = sample(6, 1024);
    assert_eq!(ITransaction::decode(&FORMAT, &blocks).unwrap(), wanted);
    let header = Header::decode(&FORMAT, &blocks).unwrap();
    assert_eq!((header.header_blocks, header.total_blocks), (1, 3));
    assert_eq!(wanted.inode(InodeNo(14)).unwrap().bytes, [4; 256]);
}

#[test]
fn a_small_change_takes_one_block() {
    let mut builder = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12));
    builder.inode(InodeNo(12), &[1; 256]).unwrap();
    builder.entry(InodeNo(2), InodeNo(12), 1, b"x").unwrap();
    let mut data = vec![0; 1024];
    data[..300].fill(9);
    assert_eq!(builder.data(BlockNo(50), &data).unwrap(), Place::Header);
    assert_eq!(builder.data(BlockNo(51), &[0; 1024]).unwrap(), Place::Header);
    let blocks = builder.finish(&Order::default()).unwrap();
    assert_eq!(blocks.len(), 1024);
    let read = ITransaction::decode(&FORMAT, &blocks).unwrap();
    assert_eq!(read.data[0], DataBlock { home: BlockNo(50), content: data });
    assert_eq!(read.data[1], DataBlock { home: BlockNo(51), content: vec![0; 1024] });
}

#[test]
fn long_headers_take_several_blocks() {
    let mut builder = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12));
    for ino in 20..40 {
        builder.inode(InodeNo(ino), &[1; 256]).unwrap();
    }
    let blocks = builder.finish(&Order::default()).unwrap();
    assert_eq!(blocks.len(), 6 * 1024);
    assert_eq!(ITransaction::decode(&FORMAT, &blocks).unwrap().inodes.len(), 20);
    let mut builder = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12));
    for ino in 0..300 {
        builder.inode(InodeNo(ino), &[1; 256]).unwrap();
    }
    assert!(matches!(builder.finish(&Order::default()), Err(FormatError::NoRoom { .. })));
    let size = Size::new(&FORMAT).inode(256);
    assert_eq!(size.total_blocks(), Some(1));
    assert_eq!((0..300).fold(size, |size, _| size.inode(256)).total_blocks(), None);
    assert_eq!(size.inode(1 << 16).total_blocks(), None);
}

#[test]
fn any_wrong_bit_is_noticed() {
    let (blocks, _) = sample(6, 1024);
    for at in 0..blocks.len() {
        let mut torn = blocks.clone();
        torn[at] ^= 0x10;
        assert!(ITransaction::decode(&FORMAT, &torn).is_err(), "byte {at}");
    }
    for sector in blocks.chunks(512).enumerate().map(|(index, _)| index * 512) {
        let mut torn = blocks.clone();
        torn[sector..sector + 512].fill(0);
        assert!(ITransaction::decode(&FORMAT, &torn).is_err(), "sector {sector}");
    }
    assert!(ITransaction::decode(&FORMAT, &blocks[..2048]).is_err());
}

#[test]
fn another_use_of_the_areas_does_not_count() {
    let (blocks, _) = sample(6, 100);
    let later = AreaFormat { nonce: 1, ..FORMAT };
    assert_eq!(Header::decode(&later, &blocks), None);
    let other = AreaFormat { uuid: [8; 16], ..FORMAT };
    assert!(ITransaction::decode(&other, &blocks).is_err());
}

#[test]
fn names_that_no_directory_holds_are_refused() {
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'n'; 256]] {
        let mut builder = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12));
        builder.entry(InodeNo(2), InodeNo(12), 1, name).unwrap();
        let blocks = builder.finish(&Order::default()).unwrap();
        assert!(ITransaction::decode(&FORMAT, &blocks).is_err(), "{name:?}");
    }
}

#[test]
fn the_table() {
    let table = AreaTable { uuid: [7; 16], area_count: 4, area_blocks: 256 };
    let mut block = vec![1; 1024];
    table.encode(&mut block).unwrap();
    assert!(AreaTable::is_table(&block));
    assert_eq!(AreaTable::decode(&block, &[7; 16]).unwrap(), table);
    assert_eq!(table.total_blocks(), 1025);
    assert!(AreaTable::decode(&block, &[8; 16]).is_err());
    assert!(AreaTable::decode(&block[..63], &[7; 16]).is_err());
    for at in 0..64 {
        let mut spoilt = block.clone();
        spoilt[at] ^= 1;
        assert!(AreaTable::decode(&spoilt, &[7; 16]).is_err(), "byte {at}");
    }
    for (area_count, area_blocks) in [(0, 256), (257, 256), (1, 15), (256, u32::MAX)] {
        let table = AreaTable { uuid: [7; 16], area_count, area_blocks };
        assert!(table.encode(&mut block).is_err());
    }
}

proptest! {
    /// However the records come, and whatever fits into the header.
    #[test]
    fn no_more_blocks_than_counted(
        inodes in 0usize..6,
        names in proptest::collection::vec(1usize..256, 0..6),
        data in proptest::collection::vec((0usize..1025, any::<bool>()), 0..80),
    ) {
        let mut builder = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12));
        let mut size = Size::new(&FORMAT);
        for _ in 0..inodes {
            builder.inode(InodeNo(12), &[1; 250]).unwrap();
            size = size.inode(250);
        }
        for &len in &names {
            builder.entry(InodeNo(2), InodeNo(12), 1, &vec![b'n'; len]).unwrap();
            size = size.entry(len);
        }
        for (at, &(used, is_node)) in data.iter().enumerate() {
            let mut block = vec![0; 1024];
            block[..used.min(1024)].fill(9);
            match is_node {
                true => builder.extent_block(BlockNo(at as u64), &block).unwrap(),
                false => builder.data(BlockNo(at as u64), &block).unwrap(),
            };
            size = size.blocks(1);
        }
        builder.superseded(BlockNo(3), 4).unwrap();
        let total_blocks = builder.total_blocks();
        prop_assert!(total_blocks <= size.superseded(1).total_blocks().unwrap());
        prop_assert!(builder.check().is_ok());
    }

    /// Records that pass the checksum but were never built: nothing panics, and nothing grows
    /// beyond what was given.
    #[test]
    fn forged_records(bytes in proptest::collection::vec(any::<u8>(), 0..900), used in 0u32..1100) {
        let mut blocks = vec![0; 3072];
        let built = Builder::new(&FORMAT, Tid(1), 1, InodeNo(12)).finish(&Order::default()).unwrap();
        blocks[..1024].copy_from_slice(&built);
        blocks[FIXED_BYTES..FIXED_BYTES + bytes.len()].copy_from_slice(&bytes);
        // Small kinds and lengths, so that records are met at all.
        for record in blocks[FIXED_BYTES..1024].chunks_mut(20) {
            record[0] %= 8;
            record[1..].iter_mut().take(1).for_each(|byte| *byte = 0);
            if let Some(byte) = record.get_mut(3) {
                *byte = 0;
            }
        }
        blocks[at::HEADER_BYTES..at::HEADER_BYTES + 4].copy_from_slice(&used.to_le_bytes());
        blocks[at::TOTAL_BLOCKS] = 3;
        let checksum = FORMAT.header_checksum(&blocks[..1024]);
        blocks[at::CHECKSUM..at::CHECKSUM + 4].copy_from_slice(&checksum.to_le_bytes());
        if let Ok(read) = ITransaction::decode(&FORMAT, &blocks) {
            prop_assert!(read.inodes.len() + read.entries.len() <= 1024);
        }
    }
}
