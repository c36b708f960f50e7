//! Bits of one group in memory: searching runs of clear bits, and sparse sets of bits.
//!
//! Owns no file-system state. Invariant: no function indexes past the words it is given,
//! whatever the numbers; bits past the end of the words count as set.

use std::ops::Range;

const WORD_BITS: u32 = u64::BITS;

/// Mask of the bits of `word` that lie in `range`.
fn word_mask(word: u32, range: &Range<u32>) -> u64 {
    let base = word * WORD_BITS;
    let from = range.start.saturating_sub(base).min(WORD_BITS);
    let to = range.end.saturating_sub(base).min(WORD_BITS);
    if from >= to {
        return 0;
    }
    (u64::MAX >> (WORD_BITS - (to - from))) << from
}

/// The words that `range` touches.
fn words_of(range: &Range<u32>) -> Range<u32> {
    if range.is_empty() { 0..0 } else { range.start / WORD_BITS..range.end.div_ceil(WORD_BITS) }
}

/// First bit at or after `from` and before `end` that is `set`; `end` if there is none.
fn next_bit(words: &[u64], from: u32, end: u32, set: bool) -> u32 {
    let flip = if set { 0 } else { u64::MAX };
    let mut at = from;
    while at < end {
        let word = words.get((at / WORD_BITS) as usize).map_or(u64::MAX, |w| *w) ^ flip;
        let rest = word >> (at % WORD_BITS);
        if rest != 0 {
            return (at + rest.trailing_zeros()).min(end);
        }
        at = (at / WORD_BITS + 1) * WORD_BITS;
    }
    end
}

/// Length of the run of clear bits from `from` on, at most up to `end`.
pub(crate) fn clear_run(words: &[u64], from: u32, end: u32) -> u32 {
    if from >= end { 0 } else { next_bit(words, from, end, true) - from }
}

/// First run of clear bits that begins at or after `from`, up to `end`.
pub(crate) fn next_clear_run(words: &[u64], from: u32, end: u32) -> Option<Range<u32>> {
    let start = next_bit(words, from, end, false);
    (start < end).then(|| start..next_bit(words, start, end, true))
}

/// What a search for room found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Search {
    /// The first run of at least the wanted length, else the longest; may be longer than
    /// wanted.
    pub(crate) run: Option<Range<u32>>,
    /// Length of the longest run, when all were looked at.
    pub(crate) longest: Option<u32>,
}

/// Searches `0..end` for `want` clear bits in a row, from `goal` on and then from the start.
pub(crate) fn search(words: &[u64], end: u32, goal: u32, want: u32) -> Search {
    let mut best: Option<Range<u32>> = None;
    for part in [goal.min(end)..end, 0..end] {
        let mut at = part.start;
        while let Some(run) = next_clear_run(words, at, part.end) {
            at = run.end;
            let len = run.end - run.start;
            if len >= want {
                return Search { run: Some(run), longest: None };
            }
            if best.as_ref().is_none_or(|b| len > b.end - b.start) {
                best = Some(run);
            }
        }
    }
    let longest = Some(best.as_ref().map_or(0, |b| b.end - b.start));
    Search { run: best, longest }
}

/// The part of a bitmap of which [`load`] with this offset makes the words that `range`
/// touches, and the offset: the number of the first bit there.
pub(crate) fn part<'a>(bitmap: &'a [u8], range: &Range<u32>) -> (&'a [u8], u32) {
    let words = words_of(range);
    let to = (words.end as usize * 8).min(bitmap.len());
    let from = (words.start as usize * 8).min(to);
    (&bitmap[from..to], words.start * WORD_BITS)
}

/// Copies a bitmap as it lies on disk into `words`, which gets the right length.
pub(crate) fn load(bitmap: &[u8], words: &mut Vec<u64>) {
    words.clear();
    let chunks = bitmap.chunks_exact(8);
    let rest = chunks.remainder();
    words.extend(chunks.map(|chunk| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    }));
    if !rest.is_empty() {
        let mut bytes = [0xff; 8];
        bytes[..rest.len()].copy_from_slice(rest);
        words.push(u64::from_le_bytes(bytes));
    }
}

/// A set of bits that is empty most of the time and costs nothing then.
#[derive(Debug, Default)]
pub(crate) struct SparseBits {
    words: Option<Box<[u64]>>,
    count: u32,
}

impl SparseBits {
    /// How many bits are set.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Adds the bits of `range`; `capacity` is the number of bits of the group. Returns
    /// how many were not in the set before.
    pub(crate) fn insert(&mut self, range: Range<u32>, capacity: u32) -> u32 {
        let size = capacity.div_ceil(WORD_BITS) as usize;
        let words = self.words.get_or_insert_with(|| vec![0; size].into_boxed_slice());
        let mut added = 0;
        for index in words_of(&range) {
            if let Some(word) = words.get_mut(index as usize) {
                let mask = word_mask(index, &range);
                added += (mask & !*word).count_ones();
                *word |= mask;
            }
        }
        self.count += added;
        added
    }

    /// Takes the bits of `range` out. Returns how many were in the set.
    pub(crate) fn remove(&mut self, range: Range<u32>) -> u32 {
        let Some(words) = self.words.as_mut() else { return 0 };
        let mut removed = 0;
        for index in words_of(&range) {
            if let Some(word) = words.get_mut(index as usize) {
                let mask = word_mask(index, &range);
                removed += (mask & *word).count_ones();
                *word &= !mask;
            }
        }
        self.count -= removed;
        if self.count == 0 {
            self.words = None;
        }
        removed
    }

    /// The first bit at or after `from` that is not in the set.
    pub(crate) fn next_missing(&self, from: u32) -> u32 {
        let Some(words) = self.words.as_ref() else { return from };
        next_bit(words, from, words.len() as u32 * WORD_BITS, false).max(from)
    }

    /// Whether one of the bits of `range` is in the set.
    pub(crate) fn intersects(&self, range: Range<u32>) -> bool {
        let Some(words) = self.words.as_ref() else { return false };
        words_of(&range).any(|index| {
            words.get(index as usize).is_some_and(|word| word & word_mask(index, &range) != 0)
        })
    }

    /// Adds this set from bit `offset` on, which begins a word, to `into`, save the bits of
    /// `except`.
    pub(crate) fn add_to(&self, into: &mut [u64], offset: u32, except: &Range<u32>) {
        let Some(words) = self.words.as_ref() else { return };
        let first = offset / WORD_BITS;
        let words = words.iter().skip(first as usize);
        for ((index, word), target) in (first..).zip(words).zip(into) {
            *target |= *word & !word_mask(index, except);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_takes_the_goal_first_then_the_first_that_fits_then_the_longest() {
        let mut bitmap = vec![0xffu8; 32];
        for (start, len) in [(10, 4), (60, 10), (130, 3)] {
            fjord_format::bitmap::clear_range(&mut bitmap, start, len);
        }
        let mut words = Vec::new();
        load(&bitmap, &mut words);
        assert_eq!(search(&words, 256, 0, 4).run, Some(10..14));
        assert_eq!(search(&words, 256, 62, 4).run, Some(62..70));
        assert_eq!(search(&words, 256, 100, 4).run, Some(10..14));
        assert_eq!(search(&words, 256, 0, 100), Search { run: Some(60..70), longest: Some(10) });
        assert_eq!(search(&words, 256, 300, 1).run, Some(10..14));
        assert_eq!(search(&words, 5, 0, 1), Search { run: None, longest: Some(0) });
    }

    #[test]
    fn bits_past_the_end_count_as_set() {
        let words = [0u64; 1];
        assert_eq!(clear_run(&words, 0, 200), 64);
        let mut loaded = Vec::new();
        load(&[0; 3], &mut loaded);
        assert_eq!(clear_run(&loaded, 0, 200), 24);
    }

    #[test]
    fn sparse_bits_count_what_changes() {
        let mut set = SparseBits::default();
        assert_eq!(set.insert(60..70, 128), 10);
        assert_eq!(set.insert(65..75, 128), 5);
        assert_eq!(set.next_missing(60), 75);
        assert_eq!(set.next_missing(59), 59);
        let mut words = [0u64; 2];
        set.add_to(&mut words, 0, &(62..64));
        assert_eq!(words[0].count_ones(), 2);
        let mut second = [0u64; 1];
        set.add_to(&mut second, 64, &(62..66));
        assert_eq!(second[0].count_ones(), 9);
        assert_eq!(set.remove(0..128), 15);
        assert_eq!(set.count(), 0);
        assert_eq!(set.next_missing(3), 3);
    }
}
