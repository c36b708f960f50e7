//! State of the chunks of an image during a snapshot copy: free, taken, safe.
//!
//! Invariants: a chunk is taken by one thread, which reads it; a safe chunk has been taken and its
//! bytes of the snapshot are in memory or in the copy, so it may change. The bytes of a chunk that
//! is not safe do not change.

use std::ops::Range;

/// The smallest chunk, as a power of two: larger than a block, because each chunk costs a read.
const CHUNK_BITS_MIN: u32 = 16;
/// The most chunks; two bits each.
const CHUNK_COUNT_MAX: u64 = 1 << 24;

/// State of the chunks of one image.
pub(super) struct Chunks {
    chunk_bits: u32,
    size_bytes: u64,
    taken: Vec<u64>,
    safe: Vec<u64>,
    unsafe_count: u64,
}

impl Chunks {
    /// All chunks free, for an image of `size_bytes`.
    pub(super) fn new(size_bytes: u64) -> Chunks {
        let mut chunk_bits = CHUNK_BITS_MIN;
        while size_bytes >> chunk_bits > CHUNK_COUNT_MAX {
            chunk_bits += 1;
        }
        let count = size_bytes.div_ceil(1 << chunk_bits);
        // At most CHUNK_COUNT_MAX + 1 bits.
        let words = count.div_ceil(64) as usize;
        Chunks {
            chunk_bits,
            size_bytes,
            taken: vec![0; words],
            safe: vec![0; words],
            unsafe_count: count,
        }
    }

    fn count(&self) -> u64 {
        self.size_bytes.div_ceil(1 << self.chunk_bits)
    }

    /// Chunks that a range in bytes touches, also in part.
    fn touched(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.size_bytes).div_ceil(1 << self.chunk_bits);
        (range.start >> self.chunk_bits).min(end)..end
    }

    /// A range of chunks in bytes.
    fn bytes(&self, chunks: &Range<u64>) -> Range<u64> {
        chunks.start << self.chunk_bits..(chunks.end << self.chunk_bits).min(self.size_bytes)
    }

    fn has(bits: &[u64], chunk: u64) -> bool {
        // The chunk is in the image, so the word exists; other chunks are never taken.
        bits.get((chunk / 64) as usize).is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    }

    fn set(bits: &mut [u64], chunk: u64) {
        if let Some(word) = bits.get_mut((chunk / 64) as usize) {
            *word |= 1 << (chunk % 64);
        }
    }

    /// Whether all of the range may change.
    pub(super) fn are_safe(&self, offset: u64, len: u64) -> bool {
        self.unsafe_count == 0
            || self
                .touched(&(offset..offset.saturating_add(len)))
                .all(|chunk| Self::has(&self.safe, chunk))
    }

    /// Whether everything may change.
    pub(super) fn all_safe(&self) -> bool {
        self.unsafe_count == 0
    }

    /// The first byte at or after `offset` in a free chunk.
    pub(super) fn next_free(&self, offset: u64) -> Option<u64> {
        let mut chunk = offset >> self.chunk_bits;
        while chunk < self.count() {
            // Whole words first: most of a large image is copied in order.
            let word = self.taken.get((chunk / 64) as usize)?;
            let free = !word >> (chunk % 64);
            if free == 0 {
                chunk = (chunk / 64 + 1) * 64;
                continue;
            }
            chunk += u64::from(free.trailing_zeros());
            return (chunk < self.count()).then(|| (chunk << self.chunk_bits).max(offset));
        }
        None
    }

    /// Takes the first free chunks of a range: contiguous, up to `max_bytes` but at least one.
    /// Returns the range in bytes.
    pub(super) fn take(&mut self, range: Range<u64>, max_bytes: u64) -> Option<Range<u64>> {
        let touched = self.touched(&range);
        let start = touched.clone().find(|chunk| !Self::has(&self.taken, *chunk))?;
        let limit = start + (max_bytes >> self.chunk_bits).max(1);
        let mut end = start;
        while end < touched.end.min(limit) && !Self::has(&self.taken, end) {
            Self::set(&mut self.taken, end);
            end += 1;
        }
        Some(self.bytes(&(start..end)))
    }

    /// Marks taken chunks as safe.
    pub(super) fn set_safe(&mut self, range: &Range<u64>) {
        for chunk in self.touched(range) {
            if !Self::has(&self.safe, chunk) {
                Self::set(&mut self.safe, chunk);
                self.unsafe_count = self.unsafe_count.saturating_sub(1);
            }
        }
    }

    /// Marks free chunks in a hole of the image as safe: they need no copy.
    pub(super) fn skip_hole(&mut self, hole: Range<u64>) {
        let first = hole.start.div_ceil(1 << self.chunk_bits);
        let end =
            if hole.end >= self.size_bytes { self.count() } else { hole.end >> self.chunk_bits };
        // Words at a time: the hole may be most of a large image.
        let mut at = first;
        while at < end {
            let next = ((at / 64 + 1) * 64).min(end);
            let mask = (u64::MAX >> (64 - (next - at))) << (at % 64);
            let index = (at / 64) as usize;
            let (Some(taken), Some(safe)) = (self.taken.get_mut(index), self.safe.get_mut(index))
            else {
                return;
            };
            let free = mask & !*taken;
            *taken |= free;
            *safe |= free;
            self.unsafe_count = self.unsafe_count.saturating_sub(u64::from(free.count_ones()));
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 1 << CHUNK_BITS_MIN;

    #[test]
    fn each_chunk_is_taken_once_and_becomes_safe() {
        let mut chunks = Chunks::new(200 * CHUNK + 100);
        assert_eq!(chunks.next_free(0), Some(0));
        assert_eq!(chunks.take(CHUNK + 5..CHUNK + 6, u64::MAX), Some(CHUNK..2 * CHUNK));
        assert_eq!(chunks.take(CHUNK + 5..CHUNK + 6, u64::MAX), None);
        assert_eq!(chunks.take(0..3 * CHUNK, u64::MAX), Some(0..CHUNK), "up to the next taken one");
        assert_eq!(
            chunks.take(10 * CHUNK..30 * CHUNK, 3 * CHUNK + 1),
            Some(10 * CHUNK..13 * CHUNK)
        );
        chunks.set_safe(&(10 * CHUNK..13 * CHUNK));
        assert!(!chunks.are_safe(0, 1));
        chunks.set_safe(&(0..CHUNK));
        assert!(chunks.are_safe(0, CHUNK) && !chunks.are_safe(CHUNK - 1, 2));
        assert_eq!(chunks.next_free(0), Some(2 * CHUNK));
        // The last one is shorter than the others.
        assert_eq!(
            chunks.take(199 * CHUNK..u64::MAX, u64::MAX),
            Some(199 * CHUNK..200 * CHUNK + 100)
        );
        assert_eq!(chunks.next_free(199 * CHUNK), None);
        while let Some(at) = chunks.next_free(0) {
            let taken = chunks.take(at..u64::MAX, u64::MAX).unwrap();
            chunks.set_safe(&taken);
        }
        assert!(!chunks.all_safe(), "two were taken and not read yet");
        chunks.set_safe(&(0..u64::MAX));
        assert!(chunks.all_safe() && chunks.are_safe(0, u64::MAX));
    }

    #[test]
    fn a_hole_makes_only_whole_and_free_chunks_safe() {
        let mut chunks = Chunks::new(10 * CHUNK + 1);
        chunks.take(4 * CHUNK..5 * CHUNK, u64::MAX);
        chunks.skip_hole(CHUNK - 1..6 * CHUNK + 1);
        let safe: Vec<u64> = (0..11).filter(|n| chunks.are_safe(n * CHUNK, 1)).collect();
        assert_eq!(safe, [1, 2, 3, 5]);
        // A hole that ends with the image has its last chunk.
        chunks.skip_hole(9 * CHUNK..10 * CHUNK + 1);
        assert!(chunks.are_safe(9 * CHUNK, CHUNK + 1));
        assert!(Chunks::new(0).all_safe());
    }

    #[test]
    fn chunks_of_huge_images_are_larger() {
        let chunks = Chunks::new(1 << 44);
        assert!(chunks.count() <= CHUNK_COUNT_MAX);
        assert_eq!(chunks.next_free((1 << 44) - 1), Some((1 << 44) - 1));
        assert_eq!(chunks.next_free(1 << 44), None);
    }
}
