//! The bytes of a file as a value.
//!
//! Owns [`Content`]: a size and the 4096-byte blocks that are not zero, shared between clones.
//!
//! Invariant: no block is past the size, bytes past the size are zero, and blocks of zeros are
//! omitted; so two values are equal if a reader sees equal contents.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Bytes of a block of [`Content`].
pub const BLOCK_BYTES: u64 = 4096;

type Block = [u8; BLOCK_BYTES as usize];
static ZEROS: Block = [0; BLOCK_BYTES as usize];

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SavedContent", into = "SavedContent")]
pub struct Content {
    size_bytes: u64,
    blocks: BTreeMap<u64, Arc<Block>>,
}

/// A content in a file: its size and the blocks that are not zero.
#[derive(Serialize, Deserialize)]
struct SavedContent {
    size_bytes: u64,
    blocks: Vec<(u64, Vec<u8>)>,
}

impl From<Content> for SavedContent {
    fn from(content: Content) -> SavedContent {
        let blocks = content.blocks.iter().map(|(number, block)| (*number, block.to_vec()));
        SavedContent { size_bytes: content.size_bytes, blocks: blocks.collect() }
    }
}

impl From<SavedContent> for Content {
    fn from(saved: SavedContent) -> Content {
        let mut content = Content::default();
        for (number, bytes) in &saved.blocks {
            content.write(number.saturating_mul(BLOCK_BYTES), bytes);
        }
        content.set_size(saved.size_bytes);
        content
    }
}

impl Content {
    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The block with this number; zeros where there is none.
    pub fn block(&self, number: u64) -> &Block {
        self.blocks.get(&number).map_or(&ZEROS, |block| block)
    }

    /// Numbers of the blocks that are not zero.
    pub fn blocks(&self) -> impl Iterator<Item = u64> {
        self.blocks.keys().copied()
    }

    /// Writes, and grows if need be.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.size_bytes = self.size_bytes.max(offset + data.len() as u64);
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK_BYTES) as usize;
            let take = (BLOCK_BYTES as usize - from).min(data.len() - done);
            self.change(at / BLOCK_BYTES, |block| {
                block[from..from + take].copy_from_slice(&data[done..done + take]);
            });
            done += take;
        }
    }

    fn change(&mut self, number: u64, edit: impl FnOnce(&mut Block)) {
        let block = self.blocks.entry(number).or_insert_with(|| Arc::new(ZEROS));
        edit(Arc::make_mut(block));
        if **block == ZEROS {
            self.blocks.remove(&number);
        }
    }

    /// Zeros from `start` to `end`, without growing.
    pub fn zero(&mut self, start: u64, end: u64) {
        let numbers: Vec<u64> = self
            .blocks
            .range(start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES))
            .map(|b| *b.0)
            .collect();
        for number in numbers {
            let base = number * BLOCK_BYTES;
            let from = (start.max(base) - base) as usize;
            let to = (end.min(base + BLOCK_BYTES) - base) as usize;
            self.change(number, |block| block[from..to].fill(0));
        }
    }

    /// Cuts off, or grows with zeros.
    pub fn set_size(&mut self, size_bytes: u64) {
        self.zero(size_bytes, self.size_bytes.max(size_bytes));
        self.size_bytes = size_bytes;
    }

    /// All bytes; for files of moderate size.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size_bytes as usize];
        for (number, block) in &self.blocks {
            let at = (number * BLOCK_BYTES) as usize;
            let take = block.len().min(bytes.len() - at);
            bytes[at..at + take].copy_from_slice(&block[..take]);
        }
        bytes
    }

    /// A content of these bytes.
    pub fn from_slice(bytes: &[u8]) -> Content {
        let mut content = Content::default();
        content.write(0, bytes);
        content
    }

    /// Takes a range out.
    pub fn collapse(&mut self, offset: u64, len: u64) {
        let mut bytes = self.to_vec();
        bytes.drain(offset as usize..(offset + len) as usize);
        *self = Content::from_slice(&bytes);
    }

    /// Puts zeros in between.
    pub fn insert(&mut self, offset: u64, len: u64) {
        let mut bytes = self.to_vec();
        bytes.splice(offset as usize..offset as usize, std::iter::repeat_n(0, len as usize));
        *self = Content::from_slice(&bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_like_bytes() {
        let mut content = Content::default();
        let mut bytes = vec![0; 10_000];
        bytes[3000..9000].fill(7);
        content.write(3000, &[7; 6000]);
        content.set_size(10_000);
        assert_eq!(content.to_vec(), bytes);
        content.zero(4000, 8200);
        bytes[4000..8200].fill(0);
        assert_eq!(content.to_vec(), bytes);
        assert_eq!(content, Content::from_slice(&bytes));
        content.collapse(4096, 4096);
        bytes.drain(4096..8192);
        assert_eq!(content.to_vec(), bytes);
        content.insert(0, 4096);
        assert_eq!(content.to_vec()[4096..], bytes);
        content.set_size(5000);
        content.set_size(10_000);
        assert!(content.to_vec()[5000..].iter().all(|byte| *byte == 0));
    }
}
