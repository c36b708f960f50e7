//! Budget of recovery.
//!
//! Recovery applies all live i-transactions in one transaction. Invariant: the metadata blocks that
//! it may change fit in one.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_format::extent::ExtentNode;
use fjord_format::{BlockNo, InodeNo, Tid};
use smallvec::SmallVec;

use crate::fs::FsInner;

/// Recovery may take one part in this many of the log: what is freed meanwhile is not counted.
const LOG_SHARE: u64 = 2;
/// From one part in this many of that on, a commit in the background is due.
const FILL_SHARE: u64 = 2;
/// Blocks of a group: descriptor, both bitmaps.
const GROUP_BLOCKS: u64 = 3;
/// Blocks of a directory that gets an entry: itself, a leaf, an index.
const DIRECTORY_BLOCKS: u64 = 3;
/// Blocks for each block full of new entries: leaves are half empty after a split, and each comes
/// with an entry in an index.
const LEAF_BLOCKS: u64 = 3;

/// A block, or some that go together, which recovery changes once however many ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// A block of an inode table, or a node of an extent tree.
    Block(u64),
    Group(u32),
    Directory(InodeNo),
    /// A name, by its hash: one that is made again needs no more room.
    Name(u64),
}

impl Part {
    fn blocks(self) -> u64 {
        match self {
            Part::Block(_) => 1,
            Part::Group(_) => GROUP_BLOCKS,
            Part::Directory(_) => DIRECTORY_BLOCKS,
            // Names are counted in bytes.
            Part::Name(_) => 0,
        }
    }
}

/// Metadata changes of recovery for one i-transaction.
#[derive(Debug, Default)]
pub(super) struct Footprint {
    parts: SmallVec<[Part; 8]>,
    /// Names with the bytes of their entries.
    names: SmallVec<[(Part, u64); 1]>,
}

impl Footprint {
    /// An inode is stored.
    pub(super) fn inode(&mut self, fs: &FsInner, ino: InodeNo) {
        let Some(location) = fs.geo.inode_location(ino) else { return };
        let group = location.group.0;
        // Tables are told apart by group; no group has 2^32 blocks.
        let block = u64::from(group) << 32 | u64::from(location.table_block) | 1 << 63;
        self.parts.extend([Part::Group(group), Part::Block(block)]);
    }

    /// A name is made.
    pub(super) fn entry(&mut self, fs: &FsInner, parent: InodeNo, name: &[u8]) {
        self.parts.push(Part::Directory(parent));
        self.inode(fs, parent);
        let mut hasher = DefaultHasher::new();
        (parent.0, name).hash(&mut hasher);
        // Inode number, lengths, type; then the name, padded.
        self.names.push((Part::Name(hasher.finish()), 12 + name.len() as u64));
    }

    /// A block of the file's extent tree is used.
    pub(super) fn node(&mut self, fs: &FsInner, block: BlockNo) {
        self.parts.push(Part::Block(block.0));
        self.run(fs, block, 1);
    }

    /// The runs that a node of the tree maps are used, if it is a leaf.
    pub(super) fn runs(&mut self, fs: &FsInner, node: &ExtentNode<'_>) {
        for extent in node.extents().filter(|_| node.is_leaf()) {
            self.run(fs, extent.start, extent.len);
        }
    }

    fn run(&mut self, fs: &FsInner, start: BlockNo, len: u32) {
        let last = BlockNo(start.0.saturating_add(u64::from(len.saturating_sub(1))));
        for block in [start, last] {
            let part = fs.geo.group_of_block(block).map(|group| Part::Group(group.0));
            if part != self.parts.last().copied() {
                self.parts.extend(part);
            }
        }
    }
}

/// Metadata changes of recovery for the i-transactions of one transaction.
struct Spent {
    tid: Tid,
    parts: HashSet<Part>,
    part_blocks: u64,
    entry_bytes: u64,
}

impl Spent {
    fn blocks(&self, block_bytes: u64) -> u64 {
        self.part_blocks + self.entry_bytes.div_ceil(block_bytes) * LEAF_BLOCKS
    }
}

/// Outcome of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charge {
    Fits,
    /// It fits, and a commit should follow soon.
    Fills,
    /// It exceeds the budget.
    Full,
}

impl Charge {
    fn of(sum_blocks: u64, limit: u64) -> Charge {
        if sum_blocks > limit {
            Charge::Full
        } else if sum_blocks > limit / FILL_SHARE {
            Charge::Fills
        } else {
            Charge::Fits
        }
    }
}

/// Fingerprints that are remembered of what was counted.
const CHARGED_SLOTS: usize = 4096;

/// Counts the metadata changes of recovery for uncommitted transactions.
///
/// Most fsyncs change what an earlier one of the transaction has changed: these count nothing and take no lock.
pub(super) struct Budget {
    /// Written before `charged` and `sum_blocks`.
    spent: Mutex<VecDeque<Spent>>,
    /// Of each part that was counted for a transaction, a fingerprint of both, where its value puts it, until
    /// another one takes the place. Two of the same value would leave one part uncounted, once in some 2^50 fsyncs.
    charged: Box<[AtomicU64]>,
    /// Sum of `spent` when it was counted last: not less than now, but for what others count meanwhile.
    sum_blocks: AtomicU64,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            spent: Mutex::new(Rank::Budget, VecDeque::new()),
            charged: (0..CHARGED_SLOTS).map(|_| AtomicU64::new(0)).collect(),
            sum_blocks: AtomicU64::new(0),
        }
    }
}

impl Budget {
    /// Counts an i-transaction of `tid`.
    pub(super) fn charge(&self, fs: &FsInner, tid: Tid, footprint: Footprint) -> Charge {
        let limit = u64::from(fs.journal().log_len_blocks()) / LOG_SHARE;
        let parts = footprint.parts.iter().chain(footprint.names.iter().map(|(name, _)| name));
        let fingerprints: SmallVec<[u64; 8]> = parts.map(|part| fingerprint(tid, *part)).collect();
        if fingerprints.iter().all(|fingerprint| self.is_charged(*fingerprint))
            && let Charge::Fits = Charge::of(self.sum_blocks.load(Ordering::Acquire), limit)
        {
            return Charge::Fits;
        }
        let sum_blocks = self.count(fs, tid, footprint);
        for fingerprint in fingerprints {
            self.slot(fingerprint).store(fingerprint, Ordering::Release);
        }
        Charge::of(sum_blocks, limit)
    }

    /// Counts what is new, and all of it.
    fn count(&self, fs: &FsInner, tid: Tid, footprint: Footprint) -> u64 {
        let block_bytes = u64::from(fs.geo.block_size);
        let mut all = self.spent.lock();
        all.retain(|spent| !fs.journal().is_committed(spent.tid));
        let at = all.iter().position(|spent| spent.tid == tid).unwrap_or_else(|| {
            let (parts, part_blocks, entry_bytes) = (HashSet::new(), 0, 0);
            all.push_back(Spent { tid, parts, part_blocks, entry_bytes });
            all.len() - 1
        });
        if let Some(spent) = all.get_mut(at) {
            for (name, bytes) in footprint.names {
                if spent.parts.insert(name) {
                    spent.entry_bytes += bytes;
                }
            }
            for part in footprint.parts {
                if spent.parts.insert(part) {
                    spent.part_blocks += part.blocks();
                }
            }
        }
        let sum_blocks = all.iter().map(|spent| spent.blocks(block_bytes)).sum();
        self.sum_blocks.store(sum_blocks, Ordering::Release);
        sum_blocks
    }

    fn slot(&self, fingerprint: u64) -> &AtomicU64 {
        &self.charged[fingerprint as usize % CHARGED_SLOTS]
    }

    fn is_charged(&self, fingerprint: u64) -> bool {
        self.slot(fingerprint).load(Ordering::Acquire) == fingerprint
    }
}

/// Never 0, which is in an empty slot.
fn fingerprint(tid: Tid, part: Part) -> u64 {
    let mut hasher = DefaultHasher::new();
    (tid.0, part).hash(&mut hasher);
    hasher.finish() | 1 << 63
}
