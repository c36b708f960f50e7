//! Maps of sparse files: old GNU and star ones in headers, pax ones of three versions.
//!
//! Invariants: the pieces of a map that is accepted are in order, do not overlap, lie inside the
//! file, and no map has more than [`PIECES_MAX`].

use super::error::HeaderError;
use super::header::{BLOCK, Header, Result, number};
use super::pax::decimal;

/// Most pieces of one sparse file.
pub(crate) const PIECES_MAX: usize = 1 << 20;
/// Bytes of one piece in a header: an offset and a length.
const PIECE_BYTES: usize = 24;

/// Where data go: offset and length, in bytes.
pub(crate) type Piece = (u64, u64);

/// What a header says of a sparse file.
pub(crate) struct HeaderMap {
    pub(crate) pieces: Vec<Piece>,
    /// Size of the file with its holes.
    pub(crate) real_size: u64,
    /// Whether the map goes on in the next block.
    pub(crate) goes_on: bool,
}

/// The map in the header of an old GNU or a star sparse file.
pub(crate) fn header_map(header: &Header) -> Result<HeaderMap> {
    let bytes = &header.0;
    let (map, goes_on, real_size) = if header.star_sparse() {
        (&bytes[356..452], bytes[355], &bytes[452..464])
    } else {
        (&bytes[386..482], bytes[482], &bytes[483..495])
    };
    let mut pieces = Vec::new();
    push_pieces(map, &mut pieces)?;
    let real_size = number("size with holes", real_size)?;
    Ok(HeaderMap { pieces, real_size, goes_on: goes_on != 0 })
}

/// Appends what a further block of a header's map has; says whether another follows.
pub(crate) fn further_pieces(block: &[u8; BLOCK], pieces: &mut Vec<Piece>) -> Result<bool> {
    const MAP_BYTES: usize = 21 * PIECE_BYTES;
    push_pieces(&block[..MAP_BYTES], pieces)?;
    Ok(block[MAP_BYTES] != 0)
}

fn push_pieces(map: &[u8], pieces: &mut Vec<Piece>) -> Result<()> {
    for pair in map.as_chunks::<PIECE_BYTES>().0 {
        if pair[0] == 0 {
            break;
        }
        let (offset, len) = pair.split_at(PIECE_BYTES / 2);
        pieces.push((number("map of holes", offset)?, number("map of holes", len)?));
    }
    if pieces.len() > PIECES_MAX {
        return Err(HeaderError::Sparse("has too many pieces"));
    }
    Ok(())
}

/// What extended records say of a sparse file.
#[derive(Default)]
pub(crate) struct PaxSparse {
    version: (u64, u64),
    /// Size of the file with its holes.
    pub(crate) real_size: Option<u64>,
    /// The map, unless the data begin with it.
    pub(crate) pieces: Vec<Piece>,
    offset: u64,
}

impl PaxSparse {
    /// Takes over one record whose key begins with `GNU.sparse.`; false when it is unknown.
    pub(crate) fn record(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        let malformed = || HeaderError::Value(String::from_utf8_lossy(key).into_owned());
        let whole = || decimal(value).ok_or_else(malformed);
        match key {
            b"GNU.sparse.major" => self.version.0 = whole()?,
            b"GNU.sparse.minor" => self.version.1 = whole()?,
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.real_size = Some(whole()?),
            b"GNU.sparse.offset" => self.offset = whole()?,
            b"GNU.sparse.numbytes" => self.pieces.push((self.offset, whole()?)),
            b"GNU.sparse.numblocks" => {}
            b"GNU.sparse.map" => {
                let numbers = value.split(|byte| *byte == b',').take(2 * PIECES_MAX + 1);
                let numbers: Option<Vec<u64>> = numbers.map(decimal).collect();
                let numbers = numbers.ok_or_else(malformed)?;
                if numbers.len() > 2 * PIECES_MAX {
                    return Err(HeaderError::Sparse("has too many pieces"));
                }
                let (pairs, rest) = numbers.as_chunks::<2>();
                if !rest.is_empty() {
                    return Err(malformed());
                }
                self.pieces = pairs.iter().map(|[offset, len]| (*offset, *len)).collect();
            }
            _ => return Ok(false),
        }
        if self.pieces.len() > PIECES_MAX {
            return Err(HeaderError::Sparse("has too many pieces"));
        }
        Ok(true)
    }

    /// Whether the data begin with the map (version 1.0).
    pub(crate) fn map_in_data(&self) -> Result<bool> {
        match self.version {
            (0, _) => Ok(false),
            (1, 0) => Ok(true),
            _ => Err(HeaderError::Sparse("has a version that is not known")),
        }
    }
}

/// The map that data begin with: decimal numbers, one per line, in whole blocks.
#[derive(Default)]
pub(crate) struct DataMap {
    count: Option<u64>,
    numbers: Vec<u64>,
    current: Option<u64>,
}

impl DataMap {
    /// Takes over a block; says whether the map is whole.
    pub(crate) fn block(&mut self, block: &[u8; BLOCK]) -> Result<bool> {
        for byte in block {
            if *byte == b'\n' {
                let value = self.current.take();
                if self.number(value.ok_or(HeaderError::Sparse("has an empty line"))?)? {
                    return Ok(true);
                }
                continue;
            }
            let digit = match byte {
                b'0'..=b'9' => u64::from(byte - b'0'),
                _ => return Err(HeaderError::Sparse("is no list of numbers")),
            };
            let shifted = self.current.unwrap_or(0).checked_mul(10);
            let value = shifted.and_then(|value| value.checked_add(digit));
            self.current = Some(value.ok_or(HeaderError::Sparse("has a number over 64 bits"))?);
        }
        Ok(false)
    }

    fn number(&mut self, value: u64) -> Result<bool> {
        match self.count {
            None if value > PIECES_MAX as u64 => {
                return Err(HeaderError::Sparse("has too many pieces"));
            }
            None => self.count = Some(value),
            Some(_) => self.numbers.push(value),
        }
        Ok(self.count.is_some_and(|count| self.numbers.len() as u64 == 2 * count))
    }

    pub(crate) fn pieces(self) -> Vec<Piece> {
        self.numbers.as_chunks::<2>().0.iter().map(|[offset, len]| (*offset, *len)).collect()
    }
}

/// Fails unless pieces are in order, inside the file, and have no more bytes than are stored.
pub(crate) fn check_pieces(pieces: &[Piece], size: u64, stored: u64) -> Result<()> {
    let mut end = 0;
    let mut total: u64 = 0;
    for (offset, len) in pieces {
        match offset.checked_add(*len).filter(|piece_end| *piece_end <= size) {
            Some(piece_end) if *offset >= end => end = piece_end,
            _ => return Err(HeaderError::Sparse("has pieces that overlap or lie outside")),
        }
        // Pieces that do not overlap have fewer bytes than the file.
        total += len;
    }
    if total > stored {
        return Err(HeaderError::Sparse("has more data than the entry"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_data(text: &str) -> Option<(bool, Vec<Piece>)> {
        let mut map = DataMap::default();
        let mut whole = false;
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        for block in bytes.as_chunks::<BLOCK>().0 {
            whole = map.block(block).ok()?;
        }
        Some((whole, map.pieces()))
    }

    #[test]
    fn maps_in_data() {
        assert_eq!(in_data("0\n"), Some((true, vec![])));
        assert_eq!(in_data("2\n0\n5\n4096\n10\n"), Some((true, vec![(0, 5), (4096, 10)])));
        for bad in ["1\n5\n", "x\n", "\n", "1\n99999999999999999999\n", "2000000\n"] {
            assert_eq!(in_data(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn maps_that_cannot_be() {
        assert!(check_pieces(&[(0, 5), (10, 5)], 15, 10).is_ok());
        assert!(check_pieces(&[(0, 5), (4, 5)], 15, 10).is_err());
        assert!(check_pieces(&[(10, 6)], 15, 10).is_err());
        assert!(check_pieces(&[(u64::MAX, 2)], u64::MAX, 10).is_err());
        assert!(check_pieces(&[(0, 11)], 15, 10).is_err());
        let mut sparse = PaxSparse::default();
        assert!(sparse.record(b"GNU.sparse.map", b"0,1,2").is_err());
        assert!(sparse.record(b"GNU.sparse.map", b"0,-1").is_err());
        assert!(!sparse.record(b"GNU.sparse.other", b"1").expect("no error"));
    }
}
