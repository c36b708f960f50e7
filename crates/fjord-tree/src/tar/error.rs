//! Errors of tar streams.

use std::io;

use thiserror::Error;

use super::compress::{CompressError, seems_to_be};
use crate::builder::shown;

/// Errors of tar streams.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TarError {
    /// It cannot be read.
    #[error("cannot read: {0}")]
    Read(io::Error),
    /// What comes through a pipe cannot be kept to be read a second time.
    #[error(
        "cannot keep the stream in {dir} until its size is known: {source}; set TMPDIR to a \
         directory with free space, or give the size of the image (--size)"
    )]
    Spool {
        /// The directory for temporary files.
        dir: String,
        /// What failed.
        source: io::Error,
    },
    /// It cannot be unpacked.
    #[error(transparent)]
    Compressed(#[from] CompressError),
    /// It has no bytes at all.
    #[error("the stream is empty; did the program that makes it fail?")]
    Empty,
    /// Its first bytes are no header of an entry.
    #[error("not a tar stream{}", advice(start))]
    NotTar {
        /// The first bytes.
        start: [u8; 8],
    },
    /// It ends within an entry.
    #[error("the stream ends early, after {at} bytes, in {entry}; was it cut off?")]
    Cut {
        /// Bytes that were read, unpacked.
        at: u64,
        /// The entry, or what else ends too early.
        entry: String,
    },
    /// Bytes after its end mark that are no entry.
    #[error(
        "the bytes after the end mark of the stream, at {at}, are not an entry; remove them (head \
         -c {at})"
    )]
    Trailing {
        /// Where they are, unpacked.
        at: u64,
    },
    /// An invalid header.
    #[error("bad header, after {at} bytes: {reason}")]
    Header {
        /// Where the header is, unpacked.
        at: u64,
        /// The error.
        reason: HeaderError,
    },
    /// An entry that cannot be copied.
    #[error("{path}: {reason}")]
    Entry {
        /// Its name in the stream.
        path: String,
        /// The error.
        reason: EntryError,
    },
}

fn advice(start: &[u8; 8]) -> String {
    match seems_to_be(start) {
        Some((what, how)) => format!(
            " but {what}, which is not supported; unpack it first: {how} FILE | fjord \
             mkfs --from-tar - IMAGE"
        ),
        None => "; give one, plain or compressed with gzip, zstd or xz".to_owned(),
    }
}

/// Errors of a header.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The sum of its bytes is not the one that it states.
    #[error("its checksum is wrong")]
    Checksum,
    /// A field is no number.
    #[error("its {0} is not a number")]
    Number(&'static str),
    /// A number is too large for what it counts, or negative.
    #[error("its {0} is out of range")]
    Range(&'static str),
    /// An extended record has a length that does not fit it, or no value.
    #[error("an extended record is malformed")]
    Record,
    /// An extended record has a value that cannot be.
    #[error("the extended record {0} has a malformed value")]
    Value(String),
    /// Extended headers that are longer than any use.
    #[error("it is extended by {bytes} bytes; at most {max} are read")]
    ExtendedSize {
        /// What it states.
        bytes: u64,
        /// What is read.
        max: u64,
    },
    /// A name that is longer than any use.
    #[error("a name of {bytes} bytes; at most {max} are read")]
    NameSize {
        /// What it has.
        bytes: usize,
        /// What is read.
        max: usize,
    },
    /// More attributes than a file can have.
    #[error("more than {0} extended attributes")]
    Attributes(usize),
    /// An extended header with no entry after it.
    #[error("it extends an entry that does not follow")]
    Orphan,
    /// A sparse file whose map makes no sense.
    #[error("the map of a sparse file {0}")]
    Sparse(&'static str),
}

/// Errors of an entry.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EntryError {
    /// It has no name.
    #[error("an entry without a name")]
    NoName,
    /// Its name would lead outside.
    #[error("names with '..' are refused; make the tar file without them")]
    DotDot,
    /// Its name or target has a byte that no name can have.
    #[error("a name with a zero byte")]
    ZeroByte,
    /// A link without a target.
    #[error("a link to nothing")]
    NoTarget,
    /// It lies below something that is no directory.
    #[error("is below {0}, which an earlier entry made a non-directory")]
    BelowFile(String),
    /// Something else than a directory where the image needs lost+found.
    #[error("lost+found of the root must be a directory; exclude this entry")]
    LostFound,
    /// A hard link to what is not there.
    #[error(
        "a hard link to {0}, which is not earlier in the stream; make a tar file with both names"
    )]
    MissingTarget(String),
    /// A hard link to an excluded member whose content was not kept.
    #[error(
        "a hard link to {0}, which is excluded, and whose content is not available any more: exclude \
         this name too, or read the tar stream from a file"
    )]
    ExcludedTarget(String),
    /// A hard link to a directory.
    #[error("a hard link to {0}, which is a directory")]
    LinkToDirectory(String),
    /// Symbolic links that lead in a circle, or too many.
    #[error("too many symbolic links on the way")]
    LinkLoop,
    /// A device number that ext4 cannot hold.
    #[error("the device number {0}, {1} does not fit ext4: at most 4095, 1048575")]
    Device(u32, u32),
    /// An access list that cannot be read.
    #[error("the access list {0} is malformed")]
    AccessList(&'static str),
    /// A whiteout that removes nothing that has a name.
    #[error("a whiteout without a name")]
    Whiteout,
}

/// A name for messages, without the middle of a very long one.
pub(super) fn short(name: &[u8]) -> String {
    const END_BYTES: usize = 200;
    if name.len() <= 2 * END_BYTES {
        return shown(name);
    }
    let (start, end) = (&name[..END_BYTES], &name[name.len() - END_BYTES..]);
    format!("{}...{}", shown(start), shown(end))
}

impl From<io::Error> for TarError {
    fn from(error: io::Error) -> TarError {
        error.downcast::<CompressError>().map_or_else(TarError::Read, TarError::Compressed)
    }
}
