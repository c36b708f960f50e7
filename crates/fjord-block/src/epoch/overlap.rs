//! Overlap of requests. Owns the index of all requests that are not done.
//!
//! Invariant: a request that is not aligned to the device's blocks counts for the whole 4096-byte
//! pages it touches, because a backend does read-modify-write on those.

use std::collections::BTreeSet;

use super::types::{Io, IoKind, RequestId};

const PAGE_BYTES: u64 = 4096;
/// Longer requests are kept separately, so that the search for short ones is short.
const LONG_BYTES: u64 = 1 << 20;

/// The bytes that a request counts for: start and end.
type Span = (u64, u64);

/// All requests that are not done, by offset.
#[derive(Clone, Debug, Hash)]
pub(super) struct Overlaps {
    logical_block_size: u64,
    /// Start, end, request; at most `LONG_BYTES` long.
    short: BTreeSet<(u64, u64, RequestId)>,
    long: BTreeSet<(u64, u64, RequestId)>,
}

impl Overlaps {
    pub(super) fn new(logical_block_size: u32) -> Self {
        let logical_block_size = u64::from(logical_block_size);
        Overlaps { logical_block_size, short: BTreeSet::new(), long: BTreeSet::new() }
    }

    /// Whether it covers whole blocks of the device.
    pub(super) fn is_aligned(&self, io: &Io) -> bool {
        io.offset.is_multiple_of(self.logical_block_size)
            && io.len.is_multiple_of(self.logical_block_size)
    }

    /// None for an empty range.
    fn span(&self, io: &Io) -> Option<Span> {
        if io.kind == IoKind::Flush || io.len == 0 {
            return None;
        }
        let end = io.offset.saturating_add(io.len);
        if self.is_aligned(io) {
            return Some((io.offset, end));
        }
        let page_end = end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        Some((io.offset - io.offset % PAGE_BYTES, page_end))
    }

    /// The requests that share bytes with `io`.
    pub(super) fn find(&self, io: &Io) -> Vec<RequestId> {
        let Some((start, end)) = self.span(io) else { return Vec::new() };
        if self.short.is_empty() && self.long.is_empty() {
            return Vec::new();
        }
        let from = start.saturating_sub(LONG_BYTES);
        let near = self.short.range((from, 0, RequestId(0))..(end, 0, RequestId(0)));
        let far = self.long.range(..(end, 0, RequestId(0)));
        near.chain(far).filter(|(_, other_end, _)| *other_end > start).map(|(.., id)| *id).collect()
    }

    pub(super) fn insert(&mut self, id: RequestId, io: &Io) {
        if let Some((start, end)) = self.span(io) {
            self.side(start, end).insert((start, end, id));
        }
    }

    pub(super) fn remove(&mut self, id: RequestId, io: &Io) {
        if let Some((start, end)) = self.span(io) {
            self.side(start, end).remove(&(start, end, id));
        }
    }

    fn side(&mut self, start: u64, end: u64) -> &mut BTreeSet<(u64, u64, RequestId)> {
        if end - start <= LONG_BYTES { &mut self.short } else { &mut self.long }
    }
}
