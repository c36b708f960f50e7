//! Times as inodes hold them: 32 bits of seconds, and in the extra word two more bits of
//! seconds and 30 of nanoseconds.
//!
//! Invariant: `nsec` is below one billion after decoding, whatever the bytes.

/// Two bits that count how often the signed 32-bit seconds have wrapped.
const EPOCH_MASK: u32 = 3;
const EPOCH_BITS: u32 = 2;
const NSEC_MAX: u32 = 999_999_999;
/// Earliest time that can be stored, in seconds since 1970.
pub const SECONDS_MIN: i64 = i32::MIN as i64;
/// Latest time that can be stored with the extra word, in seconds since 1970.
pub const SECONDS_MAX: i64 = i32::MAX as i64 + (3 << 32);
/// Latest time that can be stored without the extra word, in seconds since 1970.
pub const SECONDS_MAX_32BIT: i64 = i32::MAX as i64;

/// A point in time since 1970 (UTC).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since 1970, negative before.
    pub sec: i64,
    /// Nanoseconds within the second, always counted forward.
    pub nsec: u32,
}

impl Timestamp {
    /// Decodes the low word and, where the inode has one, the extra word.
    pub fn from_disk(seconds_lo: u32, extra: Option<u32>) -> Timestamp {
        let sec = i64::from(seconds_lo as i32);
        match extra {
            None => Timestamp { sec, nsec: 0 },
            Some(extra) => Timestamp {
                sec: sec + (i64::from(extra & EPOCH_MASK) << 32),
                nsec: (extra >> EPOCH_BITS).min(NSEC_MAX),
            },
        }
    }

    /// The low word and the extra word (0 when there is no room for it), the time clamped to
    /// the range that can be stored.
    pub fn to_disk(self, has_extra: bool) -> (u32, u32) {
        if !has_extra {
            return (self.sec.clamp(SECONDS_MIN, SECONDS_MAX_32BIT) as i32 as u32, 0);
        }
        let sec = self.sec.clamp(SECONDS_MIN, SECONDS_MAX);
        let low = sec as i32;
        let epoch = ((sec - i64::from(low)) >> 32) as u32 & EPOCH_MASK;
        (low as u32, epoch | self.nsec.min(NSEC_MAX) << EPOCH_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_epochs() {
        // The corners of the table in the kernel's documentation.
        let cases = [
            (-0x8000_0000, 0x8000_0000, 0),
            (-1, 0xffff_ffff, 0),
            (0, 0, 0),
            (0x7fff_ffff, 0x7fff_ffff, 0),
            (0x8000_0000, 0x8000_0000, 1),
            (0x1_0000_0000, 0, 1),
            (0x2_7fff_ffff, 0x7fff_ffff, 2),
            (0x3_7fff_ffff, 0x7fff_ffff, 3),
        ];
        for (sec, low, extra) in cases {
            assert_eq!(Timestamp { sec, nsec: 0 }.to_disk(true), (low, extra), "{sec:#x}");
            assert_eq!(Timestamp::from_disk(low, Some(extra)).sec, sec);
        }
    }

    #[test]
    fn out_of_range_is_clamped() {
        let far = Timestamp { sec: i64::MAX, nsec: 5 };
        assert_eq!(far.to_disk(false), (0x7fff_ffff, 0));
        let (low, extra) = far.to_disk(true);
        assert_eq!(Timestamp::from_disk(low, Some(extra)).sec, SECONDS_MAX);
        assert_eq!(Timestamp::from_disk(0, Some(u32::MAX)).nsec, NSEC_MAX);
    }

    proptest! {
        #[test]
        fn round_trip(sec in SECONDS_MIN..=SECONDS_MAX, nsec in 0..=NSEC_MAX) {
            let time = Timestamp { sec, nsec };
            let (low, extra) = time.to_disk(true);
            prop_assert_eq!(Timestamp::from_disk(low, Some(extra)), time);
        }
    }
}
