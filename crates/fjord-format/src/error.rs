//! Errors of decoding and encoding.
//!
//! Invariant: a decoder returns one of these for any input; it never panics.

use thiserror::Error;

/// Result of a format operation.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// Why bytes could not be decoded or a value could not be encoded.
///
/// `structure` names the on-disk structure ("superblock", "extent node"); the caller knows
/// where it was read from and what can be done, and adds that.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// A field has a value that the format does not allow.
    #[error("{structure} is corrupt: {detail}")]
    Corrupt {
        /// Which structure.
        structure: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// The stored checksum is not the computed one.
    #[error("{structure} has a wrong checksum (stored {stored:#x}, computed {computed:#x})")]
    Checksum {
        /// Which structure.
        structure: &'static str,
        /// The value found.
        stored: u32,
        /// The value that the bytes call for.
        computed: u32,
    },
    /// The magic number is another one: this is not such a structure at all.
    #[error("{structure} has the wrong magic number {found:#x}")]
    BadMagic {
        /// Which structure was expected.
        structure: &'static str,
        /// The value found.
        found: u32,
    },
    /// The buffer is shorter than the structure.
    #[error("{structure} needs {need_bytes} bytes, but the buffer has {got_bytes}")]
    Truncated {
        /// Which structure.
        structure: &'static str,
        /// Bytes that the structure takes.
        need_bytes: usize,
        /// Bytes that there are.
        got_bytes: usize,
    },
    /// The image uses a feature or variant that fjord does not know.
    #[error("the image needs {feature}, which fjord does not support; use Linux's own ext4")]
    Incompatible {
        /// Name of the feature or variant.
        feature: String,
    },
    /// The structure has no room for what is to be put in.
    #[error("{structure} has no room: {need} wanted, {capacity} possible")]
    NoRoom {
        /// Which structure.
        structure: &'static str,
        /// Entries or bytes asked for.
        need: u64,
        /// Entries or bytes that it can hold.
        capacity: u64,
    },
    /// The caller asked for something that the format cannot express.
    #[error("{0}")]
    Usage(String),
}

impl FormatError {
    /// Shorthand for [`FormatError::Corrupt`].
    pub fn corrupt(structure: &'static str, detail: impl Into<String>) -> FormatError {
        FormatError::Corrupt { structure, detail: detail.into() }
    }

    /// Errs with [`FormatError::Checksum`] unless both values are the same.
    pub fn check_checksum(structure: &'static str, stored: u32, computed: u32) -> Result<()> {
        if stored == computed {
            Ok(())
        } else {
            Err(FormatError::Checksum { structure, stored, computed })
        }
    }

    /// Errs with [`FormatError::Truncated`] when `bytes` is shorter than `need_bytes`.
    pub fn check_len(structure: &'static str, bytes: &[u8], need_bytes: usize) -> Result<()> {
        if bytes.len() >= need_bytes {
            Ok(())
        } else {
            Err(FormatError::Truncated { structure, need_bytes, got_bytes: bytes.len() })
        }
    }
}
