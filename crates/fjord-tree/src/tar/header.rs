//! Header blocks: fields by name, numbers in octal and base 256, and which format has what.
//!
//! Invariant: no field is trusted; a number that does not fit what it counts is an error.
//!
//! Formats: POSIX.1 `pax` (ustar), the GNU tar manual, "Tar Internals", star(5) (xstar).

use super::error::HeaderError;

/// Bytes of a block: a header is one, and data are padded to them.
pub(crate) const BLOCK: usize = 512;

pub(crate) type Result<T, E = HeaderError> = std::result::Result<T, E>;

/// Who may have written a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Before ustar, or unknown.
    Old,
    /// POSIX: ustar and pax.
    Ustar,
    /// GNU, which has no prefix of names.
    Gnu,
    /// star, whose prefix is shorter.
    Star,
}

/// A header block.
#[derive(Clone, Copy)]
pub(crate) struct Header(pub(crate) [u8; BLOCK]);

impl Header {
    pub(crate) fn is_zero(&self) -> bool {
        self.0 == [0; BLOCK]
    }

    pub(crate) fn format(&self) -> Format {
        match &self.0[257..265] {
            b"ustar  \0" => Format::Gnu,
            magic if magic.starts_with(b"ustar\0") => {
                if &self.0[508..] == b"tar\0" {
                    Format::Star
                } else {
                    Format::Ustar
                }
            }
            _ => Format::Old,
        }
    }

    /// Fails unless the checksum fits.
    pub(crate) fn check_sum(&self) -> Result<()> {
        let stored = number("checksum", &self.0[148..156]).map_err(|_| HeaderError::Checksum)?;
        let sum = |value: fn(u8) -> i64| -> i64 {
            let blanks = 8 * i64::from(b' ');
            self.0[..148].iter().chain(&self.0[156..]).map(|byte| value(*byte)).sum::<i64>()
                + blanks
        };
        // Some old programs added the bytes as signed ones.
        let sums = [sum(i64::from), sum(|byte| i64::from(byte as i8))];
        let fits = sums.iter().any(|sum| u64::try_from(*sum) == Ok(stored));
        if fits { Ok(()) } else { Err(HeaderError::Checksum) }
    }

    pub(crate) fn type_flag(&self) -> u8 {
        self.0[156]
    }

    pub(crate) fn path(&self) -> Vec<u8> {
        let name = text(&self.0[..100]);
        let prefix = match self.format() {
            Format::Ustar => text(&self.0[345..500]),
            Format::Star if self.star_sparse() => &[],
            Format::Star => text(&self.0[345..476]),
            Format::Gnu | Format::Old => &[],
        };
        if prefix.is_empty() { name.to_vec() } else { [prefix, name].join(&b'/') }
    }

    pub(crate) fn link(&self) -> Vec<u8> {
        text(&self.0[157..257]).to_vec()
    }

    pub(crate) fn mode(&self) -> Result<u16> {
        Ok((number("mode", &self.0[100..108])? & 0o7777) as u16)
    }

    pub(crate) fn uid(&self) -> Result<u32> {
        id("user ID", &self.0[108..116])
    }

    pub(crate) fn gid(&self) -> Result<u32> {
        id("group ID", &self.0[116..124])
    }

    /// Bytes of data after the header.
    pub(crate) fn size(&self) -> Result<u64> {
        number("size", &self.0[124..136])
    }

    pub(crate) fn mtime(&self) -> Result<i64> {
        signed_number("time", &self.0[136..148])
    }

    /// Last access, which only star writes here.
    pub(crate) fn atime(&self) -> Result<Option<i64>> {
        if self.format() != Format::Star || self.0[476] == 0 {
            return Ok(None);
        }
        signed_number("access time", &self.0[476..488]).map(Some)
    }

    /// Names of the owner and the group; empty where there are none.
    pub(crate) fn owner_names(&self) -> (&[u8], &[u8]) {
        match self.format() {
            Format::Old => (&[], &[]),
            _ => (text(&self.0[265..297]), text(&self.0[297..329])),
        }
    }

    /// Major and minor number of a device.
    pub(crate) fn device(&self) -> Result<(u32, u32)> {
        let part = |bytes| id("device number", bytes);
        Ok((part(&self.0[329..337])?, part(&self.0[337..345])?))
    }

    /// Whether a sparse file has star's map rather than GNU's.
    pub(crate) fn star_sparse(&self) -> bool {
        self.format() == Format::Star && self.type_flag() == b'S'
    }
}

/// A field up to its first zero byte.
pub(crate) fn text(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

fn id(field: &'static str, bytes: &[u8]) -> Result<u32> {
    u32::try_from(number(field, bytes)?).map_err(|_| HeaderError::Range(field))
}

/// A field that is not negative.
pub(crate) fn number(field: &'static str, bytes: &[u8]) -> Result<u64> {
    u64::try_from(signed_number(field, bytes)?).map_err(|_| HeaderError::Range(field))
}

/// An octal or (first bit set) big-endian binary field.
pub(crate) fn signed_number(field: &'static str, bytes: &[u8]) -> Result<i64> {
    let out_of_range = || HeaderError::Range(field);
    if bytes[0] & 0x80 != 0 {
        let start = if bytes[0] & 0x40 != 0 { -1 } else { i64::from(bytes[0] & 0x3f) };
        return bytes[1..].iter().try_fold(start, |value, byte| {
            let shifted = value.checked_mul(256).ok_or_else(out_of_range)?;
            shifted.checked_add(i64::from(*byte)).ok_or_else(out_of_range)
        });
    }
    let digits = bytes.iter().skip_while(|byte| **byte == b' ');
    digits.take_while(|byte| !matches!(**byte, 0 | b' ')).try_fold(0i64, |value, byte| {
        if !(b'0'..=b'7').contains(byte) {
            return Err(HeaderError::Number(field));
        }
        let shifted = value.checked_mul(8).ok_or_else(out_of_range)?;
        Ok(shifted + i64::from(byte - b'0'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_both_kinds() {
        let number = |bytes: &[u8]| number("field", bytes).ok();
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"77777777777 "), Some(0o77777777777));
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0]), Some(3 << 32));
        assert_eq!(number(&[0xff; 12]), None);
        assert_eq!(number(b"12a"), None);
        let signed = |bytes: &[u8]| signed_number("field", bytes).ok();
        assert_eq!(signed(&[0xff; 12]), Some(-1));
        let early = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 0];
        assert_eq!(signed(&early), Some(-(1 << 31)));
        assert_eq!(signed(&[0xbf; 12]), None);
    }

    #[test]
    fn checksums_of_signed_bytes_count_too() {
        let mut header = Header([0; BLOCK]);
        header.0[0] = 0xff;
        for sum in [255 + 256, 256 - 1] {
            header.0[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            assert!(header.check_sum().is_ok());
        }
        header.0[148..156].copy_from_slice(b"000001\0 ");
        assert!(header.check_sum().is_err());
    }
}
