//! Errors of moving trees in and out of images.

use fjord_mkfs::MkfsError;
use thiserror::Error;

/// Result of moving a tree.
pub type Result<T, E = TreeError> = std::result::Result<T, E>;

/// Why a tree could not be moved.
#[derive(Debug, Error)]
pub enum TreeError {
    /// The contents or the options make no sense.
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
    /// The image cannot take an entry.
    #[error("cannot put {path} into the image: {source}{}", advice(source))]
    Engine {
        /// Path of the entry.
        path: String,
        /// What failed.
        source: fjord::Error,
    },
}

fn advice(error: &fjord::Error) -> &'static str {
    if error.is(rustix::io::Errno::NOSPC) {
        "; make the image larger, ask for more inodes, or, for an extended attribute larger than a \
         block, for larger blocks (-b 4096)"
    } else {
        ""
    }
}

impl From<std::io::Error> for TreeError {
    fn from(source: std::io::Error) -> Self {
        TreeError::Source { path: "the tar stream".to_owned(), source }
    }
}
