//! Errors of copying trees into and out of images.

use fjord::Fs;
use fjord_mkfs::MkfsError;
use thiserror::Error;

use crate::tar::error::TarError;

/// Result of moving a tree.
pub type Result<T, E = TreeError> = std::result::Result<T, E>;

/// The resource that is used up in a full image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Blocks.
    Space {
        /// Bytes of the file system.
        total_bytes: u64,
        /// Bytes that are free and not kept for the superuser; too few.
        available_bytes: u64,
    },
    /// Inodes.
    Inodes {
        /// Inodes of the file system.
        total: u64,
    },
    /// Nothing: the file system that holds the image is full.
    Below,
}

impl Full {
    pub(crate) fn of(fs: &Fs) -> Full {
        let found = fs.statfs();
        if fs.stats().full_below_since.is_some() {
            return Full::Below;
        }
        if found.files_free == 0 {
            return Full::Inodes { total: found.files };
        }
        let bytes = |blocks: u64| blocks.saturating_mul(found.block_size.into());
        Full::Space {
            total_bytes: bytes(found.blocks),
            available_bytes: bytes(found.blocks_available),
        }
    }
}

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Full::Space { total_bytes, available_bytes } => write!(
                f,
                "no space left in the image ({} KiB, {} KiB of them available): use a larger image, or \
                 remove files from it",
                total_bytes >> 10,
                available_bytes >> 10
            ),
            Full::Inodes { total } => write!(
                f,
                "all {total} inodes of the image are in use: make an image with more inodes \
                 (mkfs -N COUNT), or remove files from it"
            ),
            Full::Below => f.write_str(
                "the file system that holds the image is full: free space there, or put the image \
                 elsewhere",
            ),
        }
    }
}

/// Errors of copying a tree.
#[derive(Debug, Error)]
pub enum TreeError {
    /// The contents or the options are invalid.
    #[error("{0}")]
    Usage(String),
    /// The image cannot be formatted with these options.
    #[error(transparent)]
    Mkfs(#[from] MkfsError),
    /// The contents cannot be read.
    #[error("cannot read {path}: {source}")]
    Source {
        /// Path in the source.
        path: String,
        /// What failed.
        source: std::io::Error,
    },
    /// A tar stream cannot be read, or has what cannot be put into an image.
    #[error("{name}: {source}")]
    Tar {
        /// Name of the stream.
        name: String,
        /// What is wrong with it.
        source: TarError,
    },
    /// The copy cannot be written.
    #[error("cannot write {path}: {source}")]
    Target {
        /// Path of the copy.
        path: String,
        /// What failed.
        source: std::io::Error,
    },
    /// The existing file of that name cannot be replaced.
    #[error("{path}: {what} exists there; remove it first")]
    InTheWay {
        /// Path of the entry.
        path: String,
        /// What has the name.
        what: &'static str,
    },
    /// The image has no room.
    #[error("cannot put {path} into the image: {of}")]
    Full {
        /// Path of the entry.
        path: String,
        /// What it has no more of.
        of: Full,
    },
    /// The extended attributes of a file do not fit beside each other.
    #[error(
        "cannot put {path} into the image: its attribute {name} ({bytes} bytes) does not fit in a \
         block of {block_size} bytes with the others: make the image with larger blocks (mkfs -b \
         4096) or with the feature ea_inode (mkfs -O ea_inode)"
    )]
    AttributesTooLarge {
        /// Path of the entry.
        path: String,
        /// Name of the attribute.
        name: String,
        /// Its length in bytes.
        bytes: usize,
        /// Bytes of a block.
        block_size: u32,
    },
    /// The names and extended attributes of directories, which are set last, are too many to keep.
    #[error(
        "{path}: the extended attributes of all directories together are larger than {} MiB, which \
         is not supported; exclude some",
        max_bytes >> 20
    )]
    DirectoryAttributes {
        /// Path of the directory that is one too many.
        path: String,
        /// What is kept, in bytes.
        max_bytes: usize,
    },
    /// The target of a symbolic link does not fit.
    #[error(
        "cannot put {path} into the image: the target of a symbolic link must fit in a block of \
         {block_size} bytes; make the image with larger blocks (mkfs -b 4096)"
    )]
    LinkTooLong {
        /// Path of the entry.
        path: String,
        /// Bytes of a block.
        block_size: u32,
    },
    /// The image cannot give an entry, or cannot take it.
    #[error("{path}: {source}")]
    Engine {
        /// Path of the entry.
        path: String,
        /// What failed.
        source: fjord::Error,
    },
}
