//! I-transactions that have no place yet: neither in an area nor among barriers.
//!
//! Owns what goes into one until it is put together. Invariant: one that has taken in a later one of the same file
//! leaves what the two would leave, one after the other.

use std::collections::BTreeMap;

use fjord_block::Buf;
use fjord_format::ijournal::{
    AreaFormat, Builder, Entry, InodeImage, Order, Place, Size, Superseded,
};
use fjord_format::types::{BlockNo, InodeNo, Tid};

use crate::error::{JournalError, Result};

/// An i-transaction that has no place yet.
#[derive(Debug)]
pub struct UnplacedITransaction {
    /// The transaction with the file's newest change; it is live until that has committed.
    pub tid: Tid,
    /// Its sub-transaction ID.
    pub sub_id: u64,
    /// The file.
    pub ino: InodeNo,
    /// The file's inode and those of new directories above it.
    pub inodes: Vec<InodeImage>,
    /// Names, topmost directory first.
    pub entries: Vec<Entry>,
    /// Runs of blocks whose data in earlier i-transactions is out of date.
    pub superseded: Vec<Superseded>,
    /// Blocks of the file's extent tree, with their homes.
    pub extent_blocks: Vec<(BlockNo, Buf)>,
    /// Blocks of the file's data, by their homes.
    pub data: BTreeMap<BlockNo, Buf>,
}

impl UnplacedITransaction {
    /// Most blocks that it takes, header included. `None` if it is too large for the format.
    pub fn blocks_max(&self, format: &AreaFormat) -> Option<u32> {
        self.size(format, self.data.len()).total_blocks()
    }

    fn size(&self, format: &AreaFormat, data_blocks: usize) -> Size {
        let size = Size::new(format);
        let size = self.inodes.iter().fold(size, |size, image| size.inode(image.bytes.len()));
        let size = self.entries.iter().fold(size, |size, entry| size.entry(entry.name.len()));
        size.superseded(self.superseded.len()).blocks(self.extent_blocks.len() + data_blocks)
    }

    /// Whether it can take in a later one. That has nothing but the state of the same file: what has names may count
    /// on those of i-transactions in between.
    pub(crate) fn can_take_in(&self, later: &UnplacedITransaction) -> bool {
        later.ino == self.ino
            && later.tid == self.tid
            && later.entries.is_empty()
            && later.superseded.is_empty()
            && later.inodes.iter().all(|image| image.ino == self.ino)
    }

    /// Most blocks that it would take with a later one that it [can take in](Self::can_take_in). `None` if that is
    /// too large for the format.
    pub(crate) fn blocks_max_with(
        &self,
        later: &UnplacedITransaction,
        format: &AreaFormat,
    ) -> Option<u32> {
        let new = later.data.keys().filter(|home| !self.data.contains_key(home)).count();
        let size = self.size(format, self.data.len() + new);
        // The later one's nodes take the place of these.
        size.blocks(later.extent_blocks.len()).total_blocks()
    }

    /// Takes in a later one. It keeps its sub-transaction ID, and so its place before those that count on its names.
    pub(crate) fn take_in(&mut self, later: UnplacedITransaction) {
        for image in later.inodes {
            match self.inodes.iter_mut().find(|own| own.ino == image.ino) {
                Some(own) => *own = image,
                None => self.inodes.push(image),
            }
        }
        self.extent_blocks = later.extent_blocks;
        self.data.extend(later.data);
    }

    /// Its blocks, of the format's size each, header first.
    pub(crate) fn put_together(self, format: &AreaFormat, order: &Order) -> Result<Vec<Buf>> {
        // Where it lies in the journal is not known yet.
        self.build(format, order).map_err(JournalError::format(0))
    }

    fn build(self, format: &AreaFormat, order: &Order) -> fjord_format::Result<Vec<Buf>> {
        let mut builder = Builder::new(format, self.tid, self.sub_id, self.ino);
        for image in &self.inodes {
            builder.inode(image.ino, &image.bytes)?;
        }
        for entry in &self.entries {
            builder.entry(entry.parent, entry.child, entry.file_type, &entry.name)?;
        }
        for run in &self.superseded {
            builder.superseded(run.home, run.count)?;
        }
        let mut payload = Vec::with_capacity(self.extent_blocks.len() + self.data.len());
        for (home, content) in self.extent_blocks {
            let place = builder.extent_block(home, &content)?;
            put(&mut payload, place, content);
        }
        for (home, content) in self.data {
            let place = builder.data(home, &content)?;
            put(&mut payload, place, content);
        }
        let header = builder.finish(order)?;
        let header = header.chunks(format.block_size);
        let mut blocks = Vec::with_capacity(header.len() + payload.len());
        blocks.extend(header.map(Buf::from_slice));
        blocks.append(&mut payload);
        Ok(blocks)
    }
}

fn put(payload: &mut Vec<Buf>, place: Place, mut content: Buf) {
    if let Place::Payload { escaped } = place {
        if escaped {
            content.make_mut()[..4].fill(0);
        }
        payload.push(content);
    }
}
