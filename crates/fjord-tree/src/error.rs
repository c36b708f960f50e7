//! Errors of copying trees into and out of images.

use fjord::{Fs, INDEX_FULL};
use fjord_mkfs::MkfsError;
use rustix::io::Errno;
use thiserror::Error;

use crate::host::DEPTH_MAX;
use crate::tar::error::TarError;

/// Limits of a list of entries: lines, and bytes of a line.
const LISTED_MAX: usize = 10_000;
const LINE_BYTES_MAX: usize = 1024;
/// Bytes of a long path that a message shows.
const SHOWN_BYTES_MAX: usize = 200;

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
    /// The index of a directory.
    Index,
    /// Nothing: the file system that holds the image is full.
    Below,
}

impl Full {
    pub(crate) fn of(fs: &Fs) -> Full {
        let found = fs.statfs();
        if fs.stats().full_below_since.is_some() {
            return Full::Below;
        }
        let last = fs.stats().events.pop();
        if last.is_some_and(|event| event.message.ends_with(INDEX_FULL)) {
            return Full::Index;
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
            Full::Index => f.write_str(
                "the index of its directory is full: make the image with -O large_dir or with larger blocks \
                 (mkfs -b 4096), or use several directories",
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
         {block_size} bytes{}", if *block_size < 4096 { "; make the image with larger blocks (mkfs -b 4096)" } else { "; exclude it" }
    )]
    LinkTooLong {
        /// Path of the entry.
        path: String,
        /// Bytes of a block.
        block_size: u32,
    },
    /// Directories lie deeper in each other than a copy goes.
    #[error(
        "{path}: directories more than {levels_max} levels deep are not supported; copy the deeper \
         ones on their own, or make the image from a tar file (mkfs --from-tar)"
    )]
    TooDeep {
        /// Path of the first directory that is too deep, cut where it is long.
        path: String,
        /// The limit.
        levels_max: usize,
    },
    /// The image cannot give an entry, or cannot take it.
    #[error("{path}: {source}{}", limit(source))]
    Engine {
        /// Path of the entry.
        path: String,
        /// What failed.
        source: fjord::Error,
    },
}

/// The limit of ext4 that an entry exceeds, and what to do; nothing for other errors.
pub fn limit(source: &fjord::Error) -> &'static str {
    if source.is(Errno::NAMETOOLONG) {
        "; ext4 has names of 255 bytes at most: rename it in the source, or exclude it"
    } else if source.is(Errno::FBIG) {
        "; a file of ext4 has 4,294,967,295 blocks at most (16 TiB with blocks of 4 KiB), and fewer without \
         the feature extent: make the image with larger blocks, split the file, or exclude it"
    } else {
        ""
    }
}

/// What an error at one entry means for a copy of many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The source or the format of the target does not permit the entry; the others are copied.
    Unkept,
    /// The entry cannot be copied; the others are.
    Failed,
    /// The others would fail too.
    Ends,
}

impl TreeError {
    pub(crate) fn effect(&self) -> Effect {
        match self {
            TreeError::Source { .. } | TreeError::LinkTooLong { .. } => Effect::Unkept,
            TreeError::InTheWay { .. } | TreeError::TooDeep { .. } => Effect::Failed,
            // Limits of ext4: the length of a file, the number of its names.
            TreeError::Engine { source, .. }
                if source.is(Errno::FBIG) || source.is(Errno::MLINK) =>
            {
                Effect::Unkept
            }
            TreeError::Target { source, .. } => match Errno::from_io_error(source) {
                Some(
                    Errno::NAMETOOLONG
                    | Errno::INVAL
                    | Errno::ILSEQ
                    | Errno::FBIG
                    | Errno::MLINK
                    | Errno::OPNOTSUPP,
                ) => Effect::Unkept,
                Some(Errno::ACCESS | Errno::PERM | Errno::TXTBSY | Errno::BUSY) => Effect::Failed,
                _ => Effect::Ends,
            },
            _ => Effect::Ends,
        }
    }

    /// A directory at `path` that lies too deep.
    pub(crate) fn too_deep(path: &[u8]) -> TreeError {
        let mut shown = crate::builder::shown(&path[..path.len().min(SHOWN_BYTES_MAX)]);
        if path.len() > SHOWN_BYTES_MAX {
            shown.push('…');
        }
        TreeError::TooDeep { path: shown, levels_max: DEPTH_MAX }
    }
}

/// Adds the text of an error to `unkept` or `failed`.
///
/// # Errors
/// The same, if it ends the copy.
pub(crate) fn list_or_end(
    error: TreeError,
    unkept: &mut Vec<String>,
    failed: &mut Vec<String>,
) -> Result<()> {
    let text = match &error {
        TreeError::Source { path, source } => format!("{path}: cannot be read: {source}"),
        error => error.to_string(),
    };
    match error.effect() {
        Effect::Unkept => list(unkept, text),
        Effect::Failed => list(failed, text),
        Effect::Ends => return Err(error),
    }
    Ok(())
}

/// Adds a line to a list for people, unless it is long already.
pub(crate) fn list(lines: &mut Vec<String>, mut what: String) {
    if lines.len() > LISTED_MAX {
        return;
    }
    if lines.len() == LISTED_MAX {
        "more, which are not listed".clone_into(&mut what);
    }
    let mut len = what.len().min(LINE_BYTES_MAX);
    while !what.is_char_boundary(len) {
        len -= 1;
    }
    what.truncate(len);
    lines.push(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hostile tree has as many entries that fail as it likes, with paths as long as it likes.
    #[test]
    fn lists_for_people_are_bounded() {
        let mut lines = Vec::new();
        for _ in 0..3 * LISTED_MAX {
            list(&mut lines, "é".repeat(LINE_BYTES_MAX));
        }
        assert_eq!(lines.len(), LISTED_MAX + 1);
        assert!(lines.iter().all(|line| line.len() <= LINE_BYTES_MAX));
        assert_eq!(lines.last().map(String::as_str), Some("more, which are not listed"));
    }
}
