//! A small seeded generator, so that a printed seed reruns a test on any later version of any
//! dependency.
//!
//! Invariant: the sequence of a seed never changes.

/// SplitMix64: 64 bits of state, full period.
#[derive(Debug, Clone)]
pub struct Rng(u64);

/// One SplitMix64 output for a given state; also used as a hash of small integers.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Rng {
    /// A generator started from `seed`.
    pub fn new(seed: u64) -> Self {
        Rng(mix(seed))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let out = mix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        out
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next_u64() % bound }
    }

    /// A number in `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low))
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One element of a non-empty slice.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    /// A length whose magnitude is uniform: small sizes are as likely as large ones.
    pub fn magnitude(&mut self, max: u64) -> u64 {
        let bits = 64 - max.max(1).leading_zeros() as u64;
        let shift = self.range(0, bits + 1);
        self.below((1u64 << shift.min(62)).min(max) + 1)
    }
}

/// Fills `out` with the test pattern of `seed` for the file range that starts at `offset`.
///
/// Each byte depends on the seed and its absolute offset only, so any part can be checked alone.
/// No byte of a pattern is zero, so that lost data cannot pass for a hole.
pub fn pattern(seed: u64, offset: u64, out: &mut [u8]) {
    let mut done = 0;
    while done < out.len() {
        let at = offset.wrapping_add(done as u64);
        let word = (mix(seed ^ mix(at / 8)) | 0x0101_0101_0101_0101).to_le_bytes();
        let from = (at % 8) as usize;
        let count = (8 - from).min(out.len() - done);
        out[done..done + count].copy_from_slice(&word[from..from + count]);
        done += count;
    }
}

/// The pattern as a new vector.
pub fn pattern_vec(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    pattern(seed, offset, &mut out);
    out
}

/// The seed of a randomised test: `FJORD_SEED` if set, else `default`. Prints it either way.
pub fn seed_from_env(test: &str, default: u64) -> u64 {
    let seed = std::env::var("FJORD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default);
    println!("{test}: seed {seed} (rerun with FJORD_SEED={seed})");
    seed
}
