//! Contents of the device. Owns the contents as seen by reads, the contents that certainly survive,
//! and between the two the log of writes in transfer order.
//!
//! Invariants:
//! - `durable` plus all entries in order is `current`;
//! - entries leave the log only from its front, into `durable`, once the host may rely on them
//!   or the device has persisted its mapping table up to them; so an old version never covers a
//!   newer one;
//! - numbers count entries since the device was made and are never used twice.

use std::collections::VecDeque;
use std::ops::Range;

use super::core::CommandId;
use super::profile::UNIT_BYTES;
use crate::buf::Buf;
use crate::mem::MemImage;

/// Entries in the log before the device persists its mapping table by itself. Bounds the memory if
/// the host never flushes.
const MAPPED_ENTRIES_MAX: usize = 1 << 15;

/// Progress of the data of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Cached,
    Programming,
    Programmed,
}

/// What an entry writes.
#[derive(Clone, Debug)]
pub(super) enum Data {
    Bytes(Buf),
    /// So many bytes of zeroes, by the mapping table alone.
    Zeroes(u64),
}

impl Data {
    pub(super) fn len(&self) -> u64 {
        match self {
            Data::Bytes(buf) => buf.len() as u64,
            Data::Zeroes(len) => *len,
        }
    }

    /// Applies it to an image. Ranges were checked when the command was submitted.
    pub(super) fn apply(&self, image: &mut MemImage, offset: u64) {
        match self {
            Data::Bytes(buf) => image.put(offset, buf),
            Data::Zeroes(len) => image.zero(offset, *len),
        }
    }
}

/// A write of one unit at most, or a zeroed range.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) id: CommandId,
    pub(super) epoch: u64,
    pub(super) offset: u64,
    pub(super) data: Data,
    pub(super) progress: Progress,
    /// The host was told that it is durable.
    pub(super) acked: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) current: MemImage,
    pub(super) durable: MemImage,
    pub(super) entries: VecDeque<Entry>,
    /// The number of the first entry.
    first: u64,
    /// All entries before this number are programmed.
    programmed_end: u64,
    /// The epoch of the next write.
    pub(super) epoch: u64,
    /// The cache survives: what was transferred is durable.
    protected: bool,
    /// Ends of the units of transactional writeback that lie in the log; empty in other forms.
    pub(super) unit_ends: VecDeque<u64>,
    transactional: bool,
}

impl Log {
    pub(super) fn new(contents: MemImage, protected: bool, transactional: bool) -> Self {
        Log {
            durable: contents.clone(),
            current: contents,
            entries: VecDeque::new(),
            first: 0,
            programmed_end: 0,
            epoch: 0,
            protected,
            unit_ends: VecDeque::new(),
            transactional,
        }
    }

    /// The number of the next entry.
    pub(super) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// The number of the first entry.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Appends a write that was transferred. Gives its numbers.
    pub(super) fn append(&mut self, id: CommandId, units: Vec<(u64, Data)>) -> Range<u64> {
        let start = self.end();
        for (offset, data) in units {
            data.apply(&mut self.current, offset);
            let progress = match data {
                Data::Bytes(_) => Progress::Cached,
                Data::Zeroes(_) => Progress::Programmed,
            };
            let acked = self.protected;
            self.entries.push_back(Entry { id, epoch: self.epoch, offset, data, progress, acked });
        }
        let numbers = start..self.end();
        self.trim();
        numbers
    }

    /// Records the progress of an entry. Durable ones are ignored.
    pub(super) fn set_progress(&mut self, number: u64, progress: Progress) {
        let index = number.checked_sub(self.first).map(|index| index as usize);
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            entry.progress = progress;
        }
        if progress == Progress::Programmed {
            self.advance();
        }
    }

    fn advance(&mut self) {
        self.programmed_end = self.programmed_end.max(self.first);
        let done = self
            .entries
            .iter()
            .skip((self.programmed_end - self.first) as usize)
            .take_while(|entry| entry.progress == Progress::Programmed)
            .count();
        self.programmed_end += done as u64;
        self.trim();
    }

    /// All entries before this number are programmed.
    pub(super) fn programmed_end(&mut self) -> u64 {
        self.advance();
        self.programmed_end
    }

    /// The host may rely on the entries in `numbers` from now on.
    pub(super) fn acknowledge(&mut self, numbers: Range<u64>) {
        let start = numbers.start.saturating_sub(self.first) as usize;
        let end = numbers.end.saturating_sub(self.first) as usize;
        self.entries.iter_mut().take(end).skip(start).for_each(|entry| entry.acked = true);
        self.trim();
    }

    /// Moves what is certain from the front of the log to `durable`.
    fn trim(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.acked) {
            self.pop();
        }
        if self.entries.len() <= MAPPED_ENTRIES_MAX {
            return;
        }
        // A unit of transactional writeback goes whole.
        let limit = match self.transactional {
            false => self.programmed_end,
            true => {
                let whole = self.unit_ends.iter().rev().find(|end| **end <= self.programmed_end);
                whole.copied().unwrap_or(self.first)
            }
        };
        while self.first < limit {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(entry) = self.entries.pop_front() {
            entry.data.apply(&mut self.durable, entry.offset);
            self.first += 1;
        }
        while self.unit_ends.front().is_some_and(|end| *end <= self.first) {
            self.unit_ends.pop_front();
        }
    }
}

/// Splits a write into what the mapping table maps: units of [`UNIT_BYTES`], the first and the
/// last possibly shorter. A buffer that is a unit is shared: what is shared never changes.
pub(super) fn split(offset: u64, bufs: &[Buf]) -> Vec<(u64, Data)> {
    let len: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
    let mut units = Vec::with_capacity((len / UNIT_BYTES) as usize + 2);
    let mut bytes = Vec::with_capacity(UNIT_BYTES as usize);
    let mut at = offset;
    for buf in bufs {
        let is_unit = buf.len() as u64 == UNIT_BYTES && at.is_multiple_of(UNIT_BYTES);
        if is_unit && bytes.is_empty() {
            units.push((at, Data::Bytes(buf.clone())));
            at += UNIT_BYTES;
            continue;
        }
        let mut rest = &buf[..];
        while !rest.is_empty() {
            let want = (UNIT_BYTES - (at + bytes.len() as u64) % UNIT_BYTES) as usize;
            let (head, tail) = rest.split_at(want.min(rest.len()));
            bytes.extend_from_slice(head);
            rest = tail;
            if (at + bytes.len() as u64).is_multiple_of(UNIT_BYTES) {
                units.push((at, Data::Bytes(Buf::from_slice(&bytes))));
                at += bytes.len() as u64;
                bytes.clear();
            }
        }
    }
    if !bytes.is_empty() {
        units.push((at, Data::Bytes(Buf::from_slice(&bytes))));
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_split_at_units() {
        let bufs = [Buf::from_slice(&[1; 5000]), Buf::from_slice(&[2; 4000])];
        let units = split(3584, &bufs);
        let extents: Vec<_> = units.iter().map(|(at, data)| (*at, data.len())).collect();
        assert_eq!(extents, [(3584, 512), (4096, 4096), (8192, 4096), (12288, 296)]);
        let mut image = MemImage::new(16384);
        units.iter().for_each(|(at, data)| data.apply(&mut image, *at));
        let mut bytes = [0; 3];
        image.read_at(3584 + 4999, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 2]);
    }
}
