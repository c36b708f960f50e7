//! What a workload sent to the device, read from the requests alone: which commit each belongs to,
//! and which commit has the size of which file.

use std::collections::BTreeMap;

use fjord_block::{MemImage, Request};
use fjord_testkit::gate_device::Record;

use crate::rig::{BLOCK_BYTES, file_of_page, size_of};

const MAGIC: u32 = 0xC03B_3998;
const COMMIT_BLOCK: u32 = 2;
const SUPERBLOCK_V2: u32 = 4;
/// Bytes of the journal of the image.
const LOG_BYTES: u64 = 4 << 20;
/// Bytes of an inode on disk.
const INODE_BYTES: usize = 256;
const MODE_REGULAR: u16 = 0x8000;

/// Purpose of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Log blocks or the commit block of the commit with this sequence.
    Log(u32),
    /// Data of a file.
    Data(usize),
    /// The journal superblock.
    JournalStart,
    Flush,
    Other,
}

/// The commits of a workload.
#[derive(Debug)]
pub(crate) struct Log {
    /// Of each request.
    pub(crate) purposes: Vec<Purpose>,
    /// Sequence to the request with the commit block.
    pub(crate) commit_blocks: BTreeMap<u32, usize>,
    /// File to the first sequence whose log blocks have its full size.
    pub(crate) commit_of: BTreeMap<usize, u32>,
}

impl Log {
    pub(crate) fn read(image: &MemImage, records: &[Record], file_count: usize) -> Log {
        let start = journal_start(image);
        let mut log = Log {
            purposes: Vec::new(),
            commit_blocks: BTreeMap::new(),
            commit_of: BTreeMap::new(),
        };
        // Offset of each descriptor, revoke or commit block to its sequence.
        let mut headers: BTreeMap<u64, u32> = BTreeMap::new();
        for (index, record) in records.iter().enumerate() {
            let Request::Write { offset, bufs, .. } = &record.request else {
                log.purposes.push(Purpose::Flush);
                continue;
            };
            let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
            if !(start..start + LOG_BYTES).contains(offset) {
                let purpose = file_of_page(&bytes).map_or(Purpose::Other, Purpose::Data);
                log.purposes.push(purpose);
                continue;
            }
            let mut purpose = Purpose::Other;
            for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
                let at = offset + (number * BLOCK_BYTES) as u64;
                purpose = match header(block) {
                    Some((SUPERBLOCK_V2, _)) if at == start => Purpose::JournalStart,
                    Some((kind, sequence)) => {
                        headers.insert(at, sequence);
                        if kind == COMMIT_BLOCK {
                            log.commit_blocks.entry(sequence).or_insert(index);
                        }
                        Purpose::Log(sequence)
                    }
                    // An escaped, plain or overwritten block behind a descriptor.
                    None => match headers.range(..=at).next_back() {
                        Some((_, &sequence)) => {
                            log.note_inodes(block, sequence, file_count);
                            Purpose::Log(sequence)
                        }
                        None => Purpose::Other,
                    },
                };
            }
            log.purposes.push(purpose);
        }
        log
    }

    /// Notes the files whose inode with its full size is in a log block.
    fn note_inodes(&mut self, block: &[u8], sequence: u32, file_count: usize) {
        for inode in block.chunks_exact(INODE_BYTES) {
            let mode = u16::from_le_bytes([inode[0], inode[1]]);
            let size = u32::from_le_bytes([inode[4], inode[5], inode[6], inode[7]]);
            if mode & 0xF000 != MODE_REGULAR {
                continue;
            }
            let file = (0..file_count).find(|&file| size_of(file) == u64::from(size));
            if let Some(file) = file {
                self.commit_of.entry(file).or_insert(sequence);
            }
        }
    }
}

/// Kind and sequence of a block of the journal.
fn header(block: &[u8]) -> Option<(u32, u32)> {
    let word = |at: usize| Some(u32::from_be_bytes(block.get(at..at + 4)?.try_into().ok()?));
    (word(0)? == MAGIC).then_some((word(4)?, word(8)?))
}

/// Byte offset of the journal, which is in one piece.
fn journal_start(image: &MemImage) -> u64 {
    let mut block = [0; 12];
    let is_superblock = |at: &u64| {
        image.read_at(*at, &mut block).is_ok()
            && header(&block).is_some_and(|(kind, _)| kind == SUPERBLOCK_V2)
    };
    let mut blocks = (0..image.size_bytes()).step_by(BLOCK_BYTES);
    blocks.find(is_superblock).expect("a journal")
}
