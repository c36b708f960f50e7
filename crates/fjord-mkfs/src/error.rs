//! Why no image came of it.

use fjord_block::IoError;
use fjord_format::error::FormatError;
use thiserror::Error;

/// Result of formatting.
pub type Result<T, E = MkfsError> = std::result::Result<T, E>;

/// Why formatting failed. The device then holds no valid file system.
#[derive(Debug, Error)]
pub enum MkfsError {
    /// The device failed.
    #[error("cannot write the image: {0}")]
    Io(#[from] IoError),
    /// The parameters cannot be had, or not together.
    #[error("{0}")]
    Usage(String),
    /// A structure cannot hold what the parameters call for.
    #[error("these parameters make no valid file system: {0}")]
    Format(#[from] FormatError),
    /// What was to go into the image cannot be read.
    #[error("cannot read {path}: {source}")]
    Source {
        /// Where, in the source.
        path: String,
        /// What failed.
        source: std::io::Error,
    },
    /// The image cannot take an entry.
    #[error("cannot put {path} into the image: {source}{}", advice(source))]
    Engine {
        /// Which entry.
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

impl From<std::io::Error> for MkfsError {
    fn from(source: std::io::Error) -> Self {
        MkfsError::Source { path: "the tar stream".to_owned(), source }
    }
}

pub(crate) fn usage(message: impl Into<String>) -> MkfsError {
    MkfsError::Usage(message.into())
}
