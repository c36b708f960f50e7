//! Images in memory that share what is equal.
//!
//! Owns [`Image`]: 4096-byte pieces in chunks of 64, both counted references, so that a clone
//! costs a reference per 256 KiB and two images of one run differ in few chunks. Pieces and
//! chunks remember their hash.
//!
//! Invariant: a piece of zeros and a missing piece are the same, to `==`, to the hash and to
//! [`Image::changed_pieces`] alike.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a piece.
pub const PIECE_BYTES: usize = 4096;
const CHUNK_PIECES: usize = 64;
const CHUNK_BYTES: u64 = (PIECE_BYTES * CHUNK_PIECES) as u64;
static ZEROS: [u8; PIECE_BYTES] = [0; PIECE_BYTES];

#[derive(Clone)]
struct Piece {
    data: Box<[u8; PIECE_BYTES]>,
    hash: OnceLock<u64>,
}

impl Piece {
    fn zeroed() -> Piece {
        Piece { data: Box::new([0; PIECE_BYTES]), hash: OnceLock::new() }
    }

    /// The hash of the contents; 0 for zeros.
    fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| if *self.data == ZEROS { 0 } else { xxh3_64(&self.data[..]) | 1 })
    }
}

#[derive(Clone)]
struct Chunk {
    pieces: [Option<Arc<Piece>>; CHUNK_PIECES],
    hash: OnceLock<u64>,
}

impl Chunk {
    fn empty() -> Chunk {
        Chunk { pieces: [const { None }; CHUNK_PIECES], hash: OnceLock::new() }
    }

    fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| {
            let parts = self.pieces.iter().enumerate().map(|(index, piece)| {
                let hash = piece.as_ref().map_or(0, |piece| piece.hash());
                spread(index as u64, hash)
            });
            parts.fold(0, u64::wrapping_add)
        })
    }
}

/// A hash of a hash at a place; 0 stays 0.
fn spread(place: u64, hash: u64) -> u64 {
    if hash == 0 { 0 } else { fjord_testkit::rng::mix(hash ^ fjord_testkit::rng::mix(place)) }
}

/// The contents of a device; cheap to clone, changes do not show in clones.
#[derive(Clone, Serialize, Deserialize)]
#[serde(from = "SavedImage", into = "SavedImage")]
pub struct Image {
    size_bytes: u64,
    chunks: Vec<Option<Arc<Chunk>>>,
}

/// An image in a file: its size, and the pieces that are not zero.
#[derive(Serialize, Deserialize)]
struct SavedImage {
    size_bytes: u64,
    pieces: Vec<(u64, Vec<u8>)>,
}

impl From<Image> for SavedImage {
    fn from(image: Image) -> SavedImage {
        let pieces = image.changed_pieces(&Image::new(image.size_bytes)).into_iter();
        let pieces = pieces.filter_map(|number| Some((number, image.piece(number)?.data.to_vec())));
        SavedImage { size_bytes: image.size_bytes, pieces: pieces.collect() }
    }
}

impl From<SavedImage> for Image {
    fn from(saved: SavedImage) -> Image {
        let mut image = Image::new(saved.size_bytes);
        for (number, bytes) in &saved.pieces {
            image.write(number.saturating_mul(PIECE_BYTES as u64), bytes);
        }
        image
    }
}

impl Image {
    /// An image of zeros.
    pub fn new(size_bytes: u64) -> Image {
        let count = usize::try_from(size_bytes.div_ceil(CHUNK_BYTES)).unwrap_or(usize::MAX);
        Image { size_bytes, chunks: vec![None; count] }
    }

    /// The contents of a file.
    pub fn from_file(path: &Path) -> Result<Image> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let size = file.metadata()?.len();
        let mut image = Image::new(size);
        let mut data = vec![0; CHUNK_BYTES as usize];
        let mut at = 0;
        while at < size {
            // Holes of sparse files are passed over.
            at = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
                Ok(start) => start / CHUNK_BYTES * CHUNK_BYTES,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let len = (size - at).min(CHUNK_BYTES) as usize;
            file.read_exact_at(&mut data[..len], at)?;
            image.write(at, &data[..len]);
            at += CHUNK_BYTES;
        }
        Ok(image)
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn piece(&self, number: u64) -> Option<&Arc<Piece>> {
        let chunk = self.chunks.get(number as usize / CHUNK_PIECES)?.as_ref()?;
        chunk.pieces[number as usize % CHUNK_PIECES].as_ref()
    }

    /// Copies bytes from `offset` on; beyond the end are zeros.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for_pieces(offset, data.len(), |number, start, range| match self.piece(number) {
            Some(piece) => {
                let end = start + range.len();
                data[range].copy_from_slice(&piece.data[start..end]);
            }
            None => data[range].fill(0),
        });
    }

    /// Overwrites bytes from `offset` on; what lies beyond the end is dropped.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for_pieces(offset, data.len(), |number, start, range| {
            let data = &data[range];
            let old = self.piece(number);
            if old.is_none() && data.iter().all(|byte| *byte == 0) {
                return;
            }
            let Some(slot) = self.chunks.get_mut(number as usize / CHUNK_PIECES) else { return };
            let chunk = Arc::make_mut(slot.get_or_insert_with(|| Arc::new(Chunk::empty())));
            chunk.hash = OnceLock::new();
            let piece = &mut chunk.pieces[number as usize % CHUNK_PIECES];
            let piece = Arc::make_mut(piece.get_or_insert_with(|| Arc::new(Piece::zeroed())));
            piece.hash = OnceLock::new();
            piece.data[start..start + data.len()].copy_from_slice(data);
        });
    }

    /// Fills a range with zeros: whole chunks and pieces are dropped.
    pub fn zero(&mut self, offset: u64, len: u64) {
        let mut at = offset;
        let end = offset.saturating_add(len).min(self.size_bytes);
        while at < end {
            if at.is_multiple_of(CHUNK_BYTES) && end - at >= CHUNK_BYTES {
                self.chunks[(at / CHUNK_BYTES) as usize] = None;
                at += CHUNK_BYTES;
                continue;
            }
            let take = (PIECE_BYTES as u64 - at % PIECE_BYTES as u64).min(end - at);
            let number = at / PIECE_BYTES as u64;
            if self.piece(number).is_some() && take == PIECE_BYTES as u64 {
                self.drop_piece(number);
            } else if self.piece(number).is_some() {
                self.write(at, &ZEROS[..take as usize]);
            }
            at += take;
        }
    }

    fn drop_piece(&mut self, number: u64) {
        let slot = self.chunks.get_mut(number as usize / CHUNK_PIECES);
        if let Some(chunk) = slot.and_then(Option::as_mut) {
            let chunk = Arc::make_mut(chunk);
            chunk.hash = OnceLock::new();
            chunk.pieces[number as usize % CHUNK_PIECES] = None;
        }
    }

    /// A hash of all contents; equal images have equal hashes.
    pub fn hash(&self) -> u64 {
        let parts = self.chunks.iter().enumerate().map(|(index, chunk)| {
            spread(!(index as u64), chunk.as_ref().map_or(0, |chunk| chunk.hash()))
        });
        parts.fold(self.size_bytes, u64::wrapping_add)
    }

    /// Numbers of the pieces in which two images of one size differ.
    pub fn changed_pieces(&self, other: &Image) -> Vec<u64> {
        let mut changed = Vec::new();
        for (index, (a, b)) in self.chunks.iter().zip(&other.chunks).enumerate() {
            let same = match (a, b) {
                (None, None) => true,
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                _ => false,
            };
            if same {
                continue;
            }
            for inner in 0..CHUNK_PIECES {
                let of = |chunk: &Option<Arc<Chunk>>| -> Option<Arc<Piece>> {
                    chunk.as_ref().and_then(|chunk| chunk.pieces[inner].clone())
                };
                let same = match (of(a), of(b)) {
                    (None, None) => true,
                    (Some(a), Some(b)) => Arc::ptr_eq(&a, &b) || a.data == b.data,
                    (Some(one), None) | (None, Some(one)) => one.hash() == 0,
                };
                if !same {
                    changed.push((index * CHUNK_PIECES + inner) as u64);
                }
            }
        }
        changed
    }

    /// Makes `file`, which holds `before`, hold this image.
    pub fn patch_file(&self, file: &File, before: &Image) -> Result<()> {
        let mut data = [0; PIECE_BYTES];
        for number in self.changed_pieces(before) {
            let offset = number * PIECE_BYTES as u64;
            let len = (self.size_bytes - offset).min(PIECE_BYTES as u64) as usize;
            self.read(offset, &mut data);
            file.write_all_at(&data[..len], offset)?;
        }
        Ok(())
    }

    /// Writes the image to a new sparse file.
    pub fn write_to_file(&self, path: &Path) -> Result<()> {
        let file =
            File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        file.set_len(self.size_bytes)?;
        self.patch_file(&file, &Image::new(self.size_bytes))
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Image) -> bool {
        self.size_bytes == other.size_bytes && self.changed_pieces(other).is_empty()
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} bytes, {:016x})", self.size_bytes, self.hash())
    }
}

/// Calls `f(piece, start in the piece, range of the data)` for each piece of an extent.
fn for_pieces(offset: u64, len: usize, mut f: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = offset + done as u64;
        let start = (at % PIECE_BYTES as u64) as usize;
        let take = (PIECE_BYTES - start).min(len - done);
        f(at / PIECE_BYTES as u64, start, done..done + take);
        done += take;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_holes_are_equal() {
        let mut a = Image::new(1 << 20);
        let b = a.clone();
        a.write(5000, b"x");
        assert_ne!(a, b);
        assert_eq!(a.changed_pieces(&b), [1]);
        a.write(5000, b"\0");
        assert_eq!(a, b);
        assert_eq!(a.hash(), b.hash());
    }

    #[test]
    fn zeros_are_as_if_nothing_was_written() {
        let empty = Image::new(2 << 20);
        let mut full = empty.clone();
        full.write(0, &vec![7; 2 << 20]);
        let mut a = full.clone();
        // From inside a piece over whole pieces and chunks into another piece.
        a.zero(3 * CHUNK_BYTES - 5000, 2 * CHUNK_BYTES + 10_000);
        let mut bytes = vec![0; 2 << 20];
        a.read(0, &mut bytes);
        let (start, end) = (3 * CHUNK_BYTES as usize - 5000, 5 * CHUNK_BYTES as usize + 5000);
        assert!(bytes[start..end].iter().all(|byte| *byte == 0));
        assert!(bytes[..start].iter().chain(&bytes[end..]).all(|byte| *byte == 7));
        a.zero(0, 2 << 20);
        assert_eq!(a.hash(), empty.hash());
        assert_ne!(full.hash(), empty.hash());
    }

    #[test]
    fn clones_keep_their_contents() {
        let mut a = Image::new(1 << 20);
        a.write(4000, &[7; 300]);
        let b = a.clone();
        a.zero(4100, 100);
        let mut bytes = [0; 300];
        b.read(4000, &mut bytes);
        assert_eq!(bytes, [7; 300]);
        a.read(4000, &mut bytes);
        assert_eq!((bytes[99], bytes[100], bytes[199], bytes[200]), (7, 0, 0, 7));
        assert_ne!(a.hash(), b.hash());
    }

    #[test]
    fn the_place_counts() {
        let mut a = Image::new(1 << 20);
        let mut b = a.clone();
        a.write(0, b"x");
        b.write(4096, b"x");
        assert_ne!(a.hash(), b.hash());
    }
}
