//! Errors of formatting.

use fjord_block::IoError;
use fjord_format::error::FormatError;
use thiserror::Error;

/// Result of formatting.
pub type Result<T, E = MkfsError> = std::result::Result<T, E>;

/// Errors of formatting. The device then has no valid file system.
#[derive(Debug, Error)]
pub enum MkfsError {
    /// The device failed.
    #[error("cannot write the image: {0}")]
    Io(#[from] IoError),
    /// Unsupported or conflicting parameters.
    #[error("{0}")]
    Usage(String),
    /// The size is too small for the parameters; a larger one would do.
    #[error("{0}")]
    TooSmall(String),
    /// The parameters exceed a limit of the format.
    #[error("these parameters give no valid file system: {0}")]
    Format(#[from] FormatError),
}

pub(crate) fn usage(message: impl Into<String>) -> MkfsError {
    MkfsError::Usage(message.into())
}

pub(crate) fn too_small(message: impl Into<String>) -> MkfsError {
    MkfsError::TooSmall(message.into())
}
