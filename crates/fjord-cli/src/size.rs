//! Sizes with units, as text.

/// Parses `512`, `64K`, `1.5G`, `16TiB`: binary multiples.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let expected =
        || format!("{text:?} is not a size: write a number with K, M, G or T, such as 64M");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return Err(expected()),
    };
    let bytes = match number.parse::<u64>() {
        Ok(n) => n.checked_mul(1 << shift),
        Err(_) => {
            let fraction = number.parse::<f64>().map_err(|_| expected())?;
            let bytes = fraction * (1u64 << shift) as f64;
            (bytes.is_finite() && bytes < u64::MAX as f64).then_some(bytes as u64)
        }
    };
    bytes.ok_or_else(|| format!("{text:?} is larger than any image"))
}

/// Writes a count of bytes with a unit, with one decimal.
pub(crate) fn show(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("64k", 65536), ("1.5G", 3 << 29), ("16TiB", 16 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes));
        }
        for text in ["", "x", "1X", "1.2.3", "99999999999P", "-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(show(1023), "1023 B");
        assert_eq!(show(3 << 29), "1.5 GiB");
    }
}
