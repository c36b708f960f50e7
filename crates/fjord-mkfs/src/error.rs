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
    /// The size is too small for the parameters; a larger one would do.
    #[error("{0}")]
    TooSmall(String),
    /// A structure cannot hold what the parameters call for.
    #[error("these parameters make no valid file system: {0}")]
    Format(#[from] FormatError),
}

pub(crate) fn usage(message: impl Into<String>) -> MkfsError {
    MkfsError::Usage(message.into())
}

pub(crate) fn too_small(message: impl Into<String>) -> MkfsError {
    MkfsError::TooSmall(message.into())
}
