//! Applying i-transactions.
//!
//! They are converted to equivalent fast-commit records (an inode's image, its ranges, its names)
//! and applied as those are (`replay/fast_commit.rs`), in one transaction. Of the i-transactions of
//! an inode, the last one has its image and its map; their names are applied in the order of
//! sub-transaction IDs; so is their data, the newest of each block, if the inode still has the
//! block and no later i-transaction declares it superseded.
//!
//! Data is written between the changes and their commit, whose flush covers it: a crash before the
//! commit leaves blocks without references, or newer bytes in old blocks, and recovery starts
//! again.
//!
//! "iJournaling" (ATC '17), section 4.3; its comparison of directory blocks is here a lookup of
//! each name in the committed directory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, DeviceExt, Order, Request, Ticket};
use fjord_format::checksum;
use fjord_format::extent::{self, Extent, ExtentNode, NodeKind};
use fjord_format::ijournal::ITransaction;
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::jbd2::fast_commit::{EntryRecord, Record};
use fjord_format::types::{BlockNo, InodeNo, LogicalBlock};

use super::fast_commit::Log;
use crate::attr::FileKind;
use crate::error::Result;
use crate::fs::FsInner;
use crate::replay::{self, damaged};

/// Data that is under way at once, in bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Applies i-transactions, which come in the order of their sub-transaction IDs, and ends their
/// recovery.
///
/// # Errors
/// `Corrupt` for i-transactions that contradict each other or the file system; I/O and journal
/// errors. Nothing has changed then.
pub(crate) fn apply(fs: &Arc<FsInner>, transactions: Vec<ITransaction>) -> Result<()> {
    let journal = fs.journal();
    if !transactions.is_empty() {
        let replay = Replay::plan(fs, &transactions)?;
        replay::in_one_transaction(fs, || {
            replay.log.apply(fs)?;
            write_data(fs, replay.data)
        })?;
        tracing::info!(count = transactions.len(), "applied i-transactions");
    }
    if journal.is_recovering() {
        journal.quiesce()?;
    }
    Ok(())
}

/// What i-transactions come to.
struct Replay<'a> {
    log: Log,
    /// Data by home.
    data: BTreeMap<BlockNo, &'a [u8]>,
}

impl<'a> Replay<'a> {
    fn plan(fs: &Arc<FsInner>, transactions: &'a [ITransaction]) -> Result<Replay<'a>> {
        let mut newest: BTreeMap<InodeNo, &ITransaction> = BTreeMap::new();
        for transaction in transactions {
            newest.insert(transaction.ino, transaction);
        }
        let mut log = Log::default();
        for transaction in transactions {
            play(fs, &mut log, transaction, &newest)?;
        }
        let mut data = BTreeMap::new();
        for (&ino, transaction) in &newest {
            let extents = extents(fs, transaction)?;
            if let Some(extents) = &extents {
                let len = u32::MAX;
                log.play(fs, Record::DelRange { ino, logical: LogicalBlock(0), len })?;
                for &extent in extents {
                    log.play(fs, Record::AddRange { ino, extent })?;
                }
            }
            let alive = log.nodes.known(ino).is_some_and(|node| node.is_alive());
            if let Some(extents) = extents.filter(|_| alive) {
                let own = transactions.iter().filter(|transaction| transaction.ino == ino);
                gather_data(fs, own, &extents, &mut data)?;
            }
        }
        Ok(Replay { log, data })
    }
}

/// Takes in the inodes and names of an i-transaction. The file's inode is that of its newest
/// one, for it must be there before its name.
fn play(
    fs: &Arc<FsInner>,
    log: &mut Log,
    transaction: &ITransaction,
    newest: &BTreeMap<InodeNo, &ITransaction>,
) -> Result<()> {
    for image in &transaction.inodes {
        let latest = newest.get(&image.ino).and_then(|newest| newest.inode(image.ino));
        let bytes = latest.unwrap_or(image).bytes.clone();
        log.play(fs, Record::Inode { ino: image.ino, bytes })?;
    }
    for entry in &transaction.entries {
        log.play(
            fs,
            Record::Create(EntryRecord {
                parent: entry.parent,
                ino: entry.child,
                name: entry.name.clone(),
            }),
        )?;
    }
    Ok(())
}

/// The extents of the file as its newest i-transaction has them; `None` for a file without a
/// map.
fn extents(fs: &FsInner, transaction: &ITransaction) -> Result<Option<Vec<Extent>>> {
    let ino = transaction.ino;
    let bad = |detail: &str| damaged(format!("i-transaction of inode {ino}: {detail}"));
    let image = transaction.inode(ino).ok_or_else(|| bad("it lacks the inode"))?;
    if image.bytes.len() != usize::from(fs.geo.inode_size) {
        return Err(bad("its inode is of another size"));
    }
    let disk = DiskInode::decode(&image.bytes, &fs.geo)?;
    if FileKind::from_mode(disk.mode) != Some(FileKind::Regular) {
        return Err(bad("it is of no regular file"));
    }
    if !disk.flags.contains(InodeFlags::EXTENTS) || disk.flags.contains(InodeFlags::INLINE_DATA) {
        return Ok(None);
    }
    let mut tree = Tree {
        fs,
        seed: checksum::inode_seed(fs.geo.csum_seed, ino, disk.generation),
        changed: transaction
            .extent_blocks
            .iter()
            .map(|block| (block.home, block.content.as_slice()))
            .collect(),
        seen: HashSet::new(),
        extents: Vec::new(),
    };
    let root = ExtentNode::parse(&disk.i_block, NodeKind::Root, None, &fs.geo)?;
    tree.walk(&root)?;
    let ascending =
        tree.extents.windows(2).all(|pair| pair[0].logical_end() <= u64::from(pair[1].logical.0));
    if !ascending {
        return Err(bad("its extents are out of order"));
    }
    Ok(Some(tree.extents))
}

/// An extent tree of which some blocks are in an i-transaction and the others in their places.
struct Tree<'a> {
    fs: &'a FsInner,
    seed: u32,
    changed: HashMap<BlockNo, &'a [u8]>,
    /// Each block has one place in a tree.
    seen: HashSet<BlockNo>,
    extents: Vec<Extent>,
}

impl Tree<'_> {
    fn walk(&mut self, node: &ExtentNode<'_>) -> Result<()> {
        if node.is_leaf() {
            self.extents.extend(node.extents());
            return Ok(());
        }
        for index in node.indices() {
            let block = index.leaf;
            let fits = self.fs.geo.contains(block) && !self.fs.is_system_block(block, 1);
            if !fits || !self.seen.insert(block) {
                return Err(damaged(format!("block {block} cannot be a node of this tree")));
            }
            let content = match self.changed.get(&block) {
                Some(content) => content.to_vec(),
                None => {
                    let size = self.fs.geo.block_size as usize;
                    self.fs.device.read_buf(self.fs.byte_offset(block), size)?.to_vec()
                }
            };
            extent::verify_checksum(&content, self.seed, &self.fs.geo)?;
            let depth = node.depth().checked_sub(1);
            let child = ExtentNode::parse(&content, NodeKind::Block, depth, &self.fs.geo)?;
            self.walk(&child)?;
        }
        Ok(())
    }
}

/// The newest data of each block that the file has, from its i-transactions in their order.
fn gather_data<'a>(
    fs: &FsInner,
    own: impl Iterator<Item = &'a ITransaction>,
    extents: &[Extent],
    data: &mut BTreeMap<BlockNo, &'a [u8]>,
) -> Result<()> {
    let mut runs: Vec<(u64, u64)> = extents
        .iter()
        .filter(|extent| !extent.unwritten)
        .map(|extent| (extent.start.0, extent.start.0.saturating_add(u64::from(extent.len))))
        .collect();
    runs.sort_unstable();
    let has = |block: BlockNo| {
        let after = runs.partition_point(|run| run.0 <= block.0);
        after.checked_sub(1).is_some_and(|at| block.0 < runs[at].1)
    };
    for transaction in own {
        for run in &transaction.superseded {
            let end = BlockNo(run.home.0.saturating_add(u64::from(run.count)));
            let old: Vec<BlockNo> =
                data.range(run.home..end.max(run.home)).map(|(&b, _)| b).collect();
            for block in old {
                data.remove(&block);
            }
        }
        for block in transaction.data.iter().filter(|block| has(block.home)) {
            if block.content.len() != fs.geo.block_size as usize {
                return Err(damaged("data of another block size"));
            }
            data.insert(block.home, &block.content);
        }
    }
    Ok(())
}

/// Writes data to its place. The flush of the commit that follows covers it.
fn write_data(fs: &FsInner, data: BTreeMap<BlockNo, &[u8]>) -> Result<()> {
    if planted(Bug::InlineDataNotReplayed) {
        return Ok(());
    }
    let per_batch = (BATCH_BYTES / fs.geo.block_size as usize).max(1);
    let data: Vec<(BlockNo, &[u8])> = data.into_iter().collect();
    for batch in data.chunks(per_batch) {
        let requests = batch
            .iter()
            .map(|&(home, content)| Request::Write {
                offset: fs.byte_offset(home),
                bufs: vec![Buf::from_slice(content)],
                order: Order::Ordered,
                fua: false,
                class: Class::Sync,
            })
            .collect();
        Ticket::wait_all(&fs.device.submit(requests))?;
    }
    Ok(())
}
