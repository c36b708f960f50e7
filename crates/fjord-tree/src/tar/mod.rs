//! Tar streams into images: one stream, or layers of an OCI image one above the other.
//!
//! - [`compress`]: gzip, zstd and xz.
//! - [`header`], [`pax`], [`sparse`], [`acl`]: the parts of an entry's description.
//! - [`stream`]: entries of a stream.
//! - [`input`]: files and standard input, which are read twice.
//! - [`place`]: directories and links on the way to an entry, whiteouts.
//! - [`extract`]: entries into an image.

pub(crate) mod acl;
pub(crate) mod compress;
pub(crate) mod error;
pub(crate) mod excluded;
pub(crate) mod extract;
pub(crate) mod header;
pub(crate) mod input;
pub(crate) mod pax;
mod place;
pub(crate) mod sparse;
pub(crate) mod stream;
