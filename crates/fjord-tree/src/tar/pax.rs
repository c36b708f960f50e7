//! Extended headers: records of the form `LENGTH KEY=VALUE\n`, and what their values mean.
//!
//! Invariants: records are cut by their stated length, never at line ends, because values of
//! attributes are binary; nothing is allocated by a length that was not checked.

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use fjord::Timespec;
use percent_encoding::percent_decode;

use super::error::HeaderError;
use super::header::Result;

/// The records of an extended header: keys and values, without copies of them.
pub(crate) struct Records<'a>(pub(crate) &'a [u8]);

impl<'a> Records<'a> {
    fn cut(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        /// Room for any length that fits memory.
        const LENGTH_DIGITS_MAX: usize = 20;
        let data = self.0;
        let blank = data.iter().take(LENGTH_DIGITS_MAX).position(|byte| *byte == b' ')?;
        let len = usize::try_from(decimal(&data[..blank])?).ok()?;
        let record = data.get(blank + 1..len)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        self.0 = &data[len..];
        Some((&record[..equals], &record[equals + 1..]))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        // Some programs pad with zeros.
        if self.0.first().is_none_or(|byte| *byte == 0) {
            return None;
        }
        let record = self.cut().ok_or(HeaderError::Record);
        if record.is_err() {
            self.0 = &[];
        }
        Some(record)
    }
}

/// A number without sign or blanks.
pub(crate) fn decimal(bytes: &[u8]) -> Option<u64> {
    if !bytes.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// Seconds since 1970 with a fraction: `1700000000.25`, `-1.5`.
pub(crate) fn parse_time(value: &[u8]) -> Option<Timespec> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let sec: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nsec: u32 = digits.parse().ok()?;
    if whole.starts_with('-') && nsec != 0 {
        return Some(Timespec { sec: sec.checked_sub(1)?, nsec: 1_000_000_000 - nsec });
    }
    Some(Timespec { sec, nsec })
}

/// An attribute as libarchive writes it: the name with `%XX`, the value in base 64.
pub(crate) fn libarchive_xattr(name: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let base64 = GeneralPurpose::new(&base64::alphabet::STANDARD, LENIENT);
    Some((percent_decode(name).collect(), base64.decode(value).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_forward_from_the_second_before() {
        let time = |text: &str| parse_time(text.as_bytes()).map(|time| (time.sec, time.nsec));
        assert_eq!(time("12"), Some((12, 0)));
        assert_eq!(time("12.5"), Some((12, 500_000_000)));
        assert_eq!(time("12.0000000019"), Some((12, 1)));
        assert_eq!(time("-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time("-0.25"), Some((-1, 750_000_000)));
        assert_eq!(time("1.x"), None);
        assert_eq!(time("99999999999999999999"), None);
    }

    fn records(data: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
        Records(data).collect::<Result<_>>().ok()
    }

    #[test]
    fn records_are_cut_by_length() {
        let data = b"14 a=1\n2 b=3\n\n10 path=x\n\n";
        let found = records(&data[..24]).expect("well-formed");
        assert_eq!(found, [(&b"a"[..], &b"1\n2 b=3\n"[..]), (b"path", b"x")]);
        for bad in [
            &b"5 a=1\n"[..],
            b"6 a=1",
            b"99 a=1\n",
            b"x a=1\n",
            b"6 abc\n",
            b"+6 a=1\n",
            b"1 ",
            b"0 ",
            b"18446744073709551615 a",
            b"999999999999999999999999999999 a=1\n",
        ] {
            assert_eq!(records(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn attributes_of_libarchive() {
        let found = libarchive_xattr(b"user.a%20%3d", b"AAEC/w==");
        assert_eq!(found, Some((b"user.a =".to_vec(), vec![0, 1, 2, 255])));
        let unpadded = libarchive_xattr(b"user.x", b"AAEC/w");
        assert_eq!(unpadded, Some((b"user.x".to_vec(), vec![0, 1, 2, 255])));
        assert_eq!(libarchive_xattr(b"user.x", b"***"), None);
    }
}
