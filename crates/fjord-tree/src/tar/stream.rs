//! Reads tar streams: ustar, GNU and pax headers with their extensions.
//!
//! Invariants: extended records are cut by their stated length, never at line ends, because
//! attribute values are binary; nothing is allocated by an unchecked length; a stream that ends
//! without its end mark is an error, since it may be half of one.
//!
//! Formats: POSIX.1 `pax`, and the GNU tar manual, "Tar Internals".

use std::io::{self, Read};

use fjord::Timespec;

const BLOCK: usize = 512;
/// Longest extended header, in bytes: room for many attributes of 64 KiB.
const EXTENDED_BYTES_MAX: u64 = 16 << 20;
/// Most pieces of one sparse file.
const SPARSE_PIECES_MAX: usize = 1 << 20;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TarKind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
    /// Nothing that belongs into a file system, such as a volume label.
    Other(u8),
}

/// One entry, extensions applied. Its data is read with [`TarReader::read_data`].
#[derive(Debug)]
pub(crate) struct TarEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: TarKind,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Timespec,
    pub(crate) atime: Option<Timespec>,
    pub(crate) device: (u32, u32),
    /// Size of the file in bytes.
    pub(crate) size: u64,
    /// Where the data goes: offset and length of each piece, in order.
    pub(crate) pieces: Vec<(u64, u64)>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Names of extended records that say something fjord does not take over.
    pub(crate) ignored: Vec<String>,
}

/// A tar stream.
pub(crate) struct TarReader<R> {
    inner: R,
    data_left: u64,
    padding: u64,
    global: Vec<(Vec<u8>, Vec<u8>)>,
}

fn bad(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("bad tar stream: {}", message.into()))
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(inner: R) -> TarReader<R> {
        TarReader { inner, data_left: 0, padding: 0, global: Vec::new() }
    }

    /// Reads data of the entry that came last; 0 at its end.
    pub(crate) fn read_data(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = self.data_left.min(buf.len() as u64) as usize;
        if want == 0 {
            return Ok(0);
        }
        self.inner.read_exact(&mut buf[..want]).map_err(at_end)?;
        self.data_left -= want as u64;
        Ok(want)
    }

    fn skip_rest(&mut self) -> io::Result<()> {
        let rest = self.data_left.saturating_add(self.padding);
        (self.data_left, self.padding) = (0, 0);
        let skipped = io::copy(&mut self.inner.by_ref().take(rest), &mut io::sink())?;
        if skipped < rest { Err(at_end(io::ErrorKind::UnexpectedEof.into())) } else { Ok(()) }
    }

    fn block(&mut self) -> io::Result<[u8; BLOCK]> {
        let mut block = [0; BLOCK];
        self.inner.read_exact(&mut block).map_err(at_end)?;
        Ok(block)
    }

    fn begin_data(&mut self, size: u64) {
        self.data_left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// The data of an extension, whole.
    fn extension(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > EXTENDED_BYTES_MAX {
            return Err(bad(format!("an extended header of {size} bytes")));
        }
        self.begin_data(size);
        let mut data = vec![0; size as usize];
        self.read_data(&mut data)?;
        self.skip_rest()?;
        Ok(data)
    }

    /// The next entry, or `None` at the end mark.
    pub(crate) fn next_entry(&mut self) -> io::Result<Option<TarEntry>> {
        self.skip_rest()?;
        let (mut records, mut long_path, mut long_link) = (self.global.clone(), None, None);
        loop {
            let header = self.block()?;
            if header == [0; BLOCK] {
                return Ok(None);
            }
            check_sum(&header)?;
            let size = number(&header[124..136])?;
            match header[156] {
                b'x' => records.extend(parse_records(&self.extension(size)?)?),
                b'g' => {
                    let global = parse_records(&self.extension(size)?)?;
                    self.global.extend(global.iter().cloned());
                    records.extend(global);
                }
                b'L' => long_path = Some(text(&self.extension(size)?)),
                b'K' => long_link = Some(text(&self.extension(size)?)),
                _ => {
                    let mut entry = self.entry(&header, size, &records)?;
                    let has = |key: &[u8]| records.iter().any(|(name, _)| name == key);
                    if let Some(path) = long_path.filter(|_| !has(b"path")) {
                        entry.path = path;
                    }
                    if let Some(link) = long_link.filter(|_| !has(b"linkpath")) {
                        entry.link = link;
                    }
                    return Ok(Some(entry));
                }
            }
        }
    }

    fn entry(
        &mut self,
        header: &[u8; BLOCK],
        header_size: u64,
        records: &[(Vec<u8>, Vec<u8>)],
    ) -> io::Result<TarEntry> {
        let id = |bytes: &[u8]| {
            u32::try_from(number(bytes)?).map_err(|_| bad("a user or group ID over 32 bits"))
        };
        let kind = kind(header[156], header);
        let is_device = matches!(kind, TarKind::CharDevice | TarKind::BlockDevice);
        let mut entry = TarEntry {
            path: header_path(header),
            link: text(&header[157..257]),
            kind,
            mode: (number(&header[100..108])? & 0o7777) as u16,
            uid: id(&header[108..116])?,
            gid: id(&header[116..124])?,
            mtime: Timespec { sec: signed_number(&header[136..148])?, nsec: 0 },
            atime: None,
            device: if is_device {
                (id(&header[329..337])?, id(&header[337..345])?)
            } else {
                (0, 0)
            },
            size: header_size,
            pieces: Vec::new(),
            xattrs: Vec::new(),
            ignored: Vec::new(),
        };
        let mut sparse = PaxSparse::default();
        let mut stored = header_size;
        for (key, value) in records {
            apply_record(&mut entry, &mut sparse, &mut stored, key, value)?;
        }
        if !matches!(entry.kind, TarKind::File | TarKind::Other(_)) {
            stored = 0;
        }
        entry.size = stored;
        if header[156] == b'S' {
            (entry.pieces, entry.size) = self.gnu_sparse(header)?;
            self.begin_data(stored);
        } else {
            self.begin_data(stored);
            sparse.apply(&mut entry, self)?;
        }
        check_pieces(&entry, self.data_left)?;
        Ok(entry)
    }

    /// The map of an old GNU sparse file, which goes on in blocks behind the header.
    fn gnu_sparse(&mut self, header: &[u8; BLOCK]) -> io::Result<(Vec<(u64, u64)>, u64)> {
        let mut pieces = Vec::new();
        push_pieces(&header[386..482], &mut pieces)?;
        let mut more = header[482] != 0;
        while more {
            let block = self.block()?;
            push_pieces(&block[..504], &mut pieces)?;
            more = block[504] != 0;
        }
        Ok((pieces, number(&header[483..495])?))
    }

    /// The map that a pax sparse file of version 1.0 begins with.
    fn sparse_head(&mut self) -> io::Result<Vec<(u64, u64)>> {
        let mut lines = Lines { reader: self, block: [0; BLOCK], at: BLOCK };
        let count = lines.number()?;
        if count > SPARSE_PIECES_MAX as u64 {
            return Err(bad(format!("a sparse file of {count} pieces")));
        }
        (0..count).map(|_| Ok((lines.number()?, lines.number()?))).collect()
    }
}

/// Decimal numbers, one per line, in whole blocks of an entry's data.
struct Lines<'a, R> {
    reader: &'a mut TarReader<R>,
    block: [u8; BLOCK],
    at: usize,
}

impl<R: Read> Lines<'_, R> {
    fn number(&mut self) -> io::Result<u64> {
        let mut value: u64 = 0;
        loop {
            if self.at == BLOCK {
                if self.reader.read_data(&mut self.block)? < BLOCK {
                    return Err(bad("a sparse map ends early"));
                }
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            value = match byte {
                b'\n' => return Ok(value),
                b'0'..=b'9' => value
                    .checked_mul(10)
                    .and_then(|value| value.checked_add(u64::from(byte - b'0')))
                    .ok_or_else(|| bad("a sparse map with a number over 64 bits"))?,
                _ => return Err(bad("a sparse map that is no list of numbers")),
            };
        }
    }
}

/// What extended records say of a sparse file.
#[derive(Default)]
struct PaxSparse {
    version: (u64, u64),
    real_size: Option<u64>,
    pieces: Vec<(u64, u64)>,
    offset: u64,
}

impl PaxSparse {
    fn apply<R: Read>(self, entry: &mut TarEntry, reader: &mut TarReader<R>) -> io::Result<()> {
        let stored = entry.size;
        if self.version == (1, 0) {
            entry.pieces = reader.sparse_head()?;
        } else if self.real_size.is_some() {
            entry.pieces = self.pieces;
        } else {
            entry.pieces = vec![(0, stored)];
        }
        entry.size = self.real_size.unwrap_or(stored);
        Ok(())
    }
}

fn at_end(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => bad("it ends early; was it cut off, or is it compressed?"),
        _ => error,
    }
}

/// Pieces in order, inside the file, and as many bytes as the entry stores.
fn check_pieces(entry: &TarEntry, stored: u64) -> io::Result<()> {
    let mut end = 0;
    let mut total: u64 = 0;
    for (offset, len) in &entry.pieces {
        let piece_end = offset.checked_add(*len).filter(|piece_end| *piece_end <= entry.size);
        match piece_end {
            Some(piece_end) if *offset >= end => end = piece_end,
            _ => return Err(bad("a sparse file whose pieces overlap or lie outside")),
        }
        total += len;
    }
    if total > stored && entry.kind == TarKind::File {
        return Err(bad("a sparse file with less data than its map says"));
    }
    Ok(())
}

fn push_pieces(bytes: &[u8], pieces: &mut Vec<(u64, u64)>) -> io::Result<()> {
    for pair in bytes.as_chunks::<24>().0 {
        if pair[0] == 0 {
            break;
        }
        pieces.push((number(&pair[..12])?, number(&pair[12..])?));
    }
    if pieces.len() > SPARSE_PIECES_MAX {
        return Err(bad("a sparse file of too many pieces"));
    }
    Ok(())
}

fn kind(flag: u8, header: &[u8; BLOCK]) -> TarKind {
    match flag {
        // Before ustar, a name with a slash at its end was a directory.
        0 if header_path(header).ends_with(b"/") => TarKind::Directory,
        0 | b'0' | b'7' | b'S' => TarKind::File,
        b'1' => TarKind::HardLink,
        b'2' => TarKind::Symlink,
        b'3' => TarKind::CharDevice,
        b'4' => TarKind::BlockDevice,
        b'5' => TarKind::Directory,
        b'6' => TarKind::Fifo,
        other => TarKind::Other(other),
    }
}

fn header_path(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = text(&header[..100]);
    // Only POSIX headers have a prefix; GNU ones keep other things there.
    let prefix = if &header[257..263] == b"ustar\0" { text(&header[345..500]) } else { vec![] };
    if prefix.is_empty() { name } else { [prefix, name].join(&b'/') }
}

fn text(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes[..end].to_vec()
}

fn check_sum(header: &[u8; BLOCK]) -> io::Result<()> {
    let stored = number(&header[148..156])?;
    let sum = |value: fn(u8) -> i64| -> i64 {
        let blanks = 8 * i64::from(b' ');
        header[..148].iter().chain(&header[156..]).map(|byte| value(*byte)).sum::<i64>() + blanks
    };
    // Some old programs added the bytes as signed ones.
    let sums = [sum(i64::from), sum(|byte| i64::from(byte as i8))];
    if sums.iter().any(|sum| u64::try_from(*sum) == Ok(stored)) {
        return Ok(());
    }
    Err(bad("a header with a wrong checksum; is it compressed, or no tar file?"))
}

/// An octal or (first bit set) big-endian binary field.
fn number(field: &[u8]) -> io::Result<u64> {
    u64::try_from(signed_number(field)?).map_err(|_| bad("a negative number"))
}

fn signed_number(field: &[u8]) -> io::Result<i64> {
    let too_large = || bad("a number over 63 bits");
    if field[0] & 0x80 != 0 {
        let start = if field[0] & 0x40 != 0 { -1 } else { i64::from(field[0] & 0x3f) };
        return field[1..].iter().try_fold(start, |value, byte| {
            let shifted = value.checked_mul(256).ok_or_else(too_large)?;
            shifted.checked_add(i64::from(*byte)).ok_or_else(too_large)
        });
    }
    let digits = field.iter().skip_while(|byte| **byte == b' ');
    digits.take_while(|byte| !matches!(**byte, 0 | b' ')).try_fold(0i64, |value, byte| {
        if !(b'0'..=b'7').contains(byte) {
            return Err(bad("a field that is no octal number"));
        }
        let shifted = value.checked_mul(8).ok_or_else(too_large)?;
        Ok(shifted + i64::from(byte - b'0'))
    })
}

/// Records of the form `LENGTH KEY=VALUE\n`.
fn parse_records(mut data: &[u8]) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let malformed = || bad("a malformed extended record");
    let mut records = Vec::new();
    while data.first().is_some_and(|byte| *byte != 0) {
        let blank = data.iter().position(|byte| *byte == b' ').ok_or_else(malformed)?;
        let len = decimal(&data[..blank]).ok_or_else(malformed)?;
        let len = usize::try_from(len).map_err(|_| malformed())?;
        let record = data.get(blank + 1..len).ok_or_else(malformed)?;
        let record = record.strip_suffix(b"\n").ok_or_else(malformed)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
        records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        data = &data[len..];
    }
    Ok(records)
}

fn decimal(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

fn apply_record(
    entry: &mut TarEntry,
    sparse: &mut PaxSparse,
    stored: &mut u64,
    key: &[u8],
    value: &[u8],
) -> io::Result<()> {
    let name = || String::from_utf8_lossy(key).into_owned();
    let malformed = || bad(format!("a malformed record {}", name()));
    let whole = || decimal(value).ok_or_else(malformed);
    let id = || u32::try_from(whole()?).map_err(|_| malformed());
    match key {
        b"path" | b"GNU.sparse.name" => entry.path = value.to_vec(),
        b"linkpath" => entry.link = value.to_vec(),
        b"size" => *stored = whole()?,
        b"uid" => entry.uid = id()?,
        b"gid" => entry.gid = id()?,
        b"mtime" => entry.mtime = parse_time(value).ok_or_else(malformed)?,
        b"atime" => entry.atime = Some(parse_time(value).ok_or_else(malformed)?),
        b"SCHILY.devmajor" => entry.device.0 = id()?,
        b"SCHILY.devminor" => entry.device.1 = id()?,
        b"GNU.sparse.major" => sparse.version.0 = whole()?,
        b"GNU.sparse.minor" => sparse.version.1 = whole()?,
        b"GNU.sparse.realsize" | b"GNU.sparse.size" => sparse.real_size = Some(whole()?),
        b"GNU.sparse.offset" => sparse.offset = whole()?,
        b"GNU.sparse.numbytes" => sparse.pieces.push((sparse.offset, whole()?)),
        b"GNU.sparse.map" => {
            let numbers: Option<Vec<u64>> = value.split(|b| *b == b',').map(decimal).collect();
            let numbers = numbers.ok_or_else(malformed)?;
            sparse.pieces = numbers.as_chunks::<2>().0.iter().map(|p| (p[0], p[1])).collect();
        }
        b"ctime" | b"uname" | b"gname" | b"comment" | b"hdrcharset" | b"GNU.sparse.numblocks" => {}
        _ => match key.strip_prefix(b"SCHILY.xattr.") {
            Some(attribute) => {
                // A later record replaces an earlier one of the same name.
                entry.xattrs.retain(|(have, _)| have != attribute);
                entry.xattrs.push((attribute.to_vec(), value.to_vec()));
            }
            None => entry.ignored.push(name()),
        },
    }
    Ok(())
}

/// Seconds since 1970 with a fraction: `1700000000.25`, `-1.5`.
fn parse_time(value: &[u8]) -> Option<Timespec> {
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
    }

    #[test]
    fn records_are_cut_by_length() {
        let data = b"14 a=1\n2 b=3\n\n10 path=x\n\n";
        let records = parse_records(&data[..24]).expect("well-formed");
        assert_eq!(records[0], (b"a".to_vec(), b"1\n2 b=3\n".to_vec()));
        assert_eq!(records[1], (b"path".to_vec(), b"x".to_vec()));
        for bad in [
            &b"5 a=1\n"[..],
            b"6 a=1",
            b"99 a=1\n",
            b"x a=1\n",
            b"6 abc\n",
            b"18446744073709551615 a",
        ] {
            assert!(parse_records(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn numbers_of_both_kinds() {
        assert_eq!(number(b"0000644\0").ok(), Some(0o644));
        assert_eq!(number(b"   644 \0").ok(), Some(0o644));
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0]).ok(), Some(3 << 32));
        assert_eq!(signed_number(&[0xff; 12]).ok(), Some(-1));
        assert!(number(&[0xff; 12]).is_err());
        assert!(number(b"12a").is_err());
        assert!(signed_number(&[0xbf; 12]).is_err());
    }

    #[test]
    fn garbage_is_an_error() {
        for bytes in [&[1u8; 512][..], &[0xff; 700], b"short", b""] {
            assert!(TarReader::new(bytes).next_entry().is_err());
        }
    }
}
