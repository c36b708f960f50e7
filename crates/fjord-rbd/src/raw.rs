//! An image with nothing of fjord between the caller and librbd: what benchmarks compare with.
//!
//! Owns the image. A call ends when the cluster has acknowledged it; nothing is queued, counted, or locked.

use std::fmt;
use std::io;
use std::sync::Arc;

use fjord_block::OpenError;

use crate::image::Image;
use crate::name::RbdName;
use crate::pool::Pool;

/// An open image.
pub struct RawImage(Image);

impl fmt::Debug for RawImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawImage({})", self.0.name.path().display())
    }
}

impl RawImage {
    /// Opens an image of a URL.
    ///
    /// # Errors
    /// `Remote`.
    pub fn open(url: &str) -> Result<RawImage, OpenError> {
        let name = RbdName::parse(url)?;
        let pool = Arc::new(Pool::connect(&name)?);
        Image::open(pool, name, false).map(RawImage)
    }

    /// Size in bytes.
    ///
    /// # Errors
    /// That of librbd.
    pub fn size_bytes(&self) -> io::Result<u64> {
        self.0.size_bytes().map_err(|code| io::Error::from_raw_os_error(-code))
    }

    /// Writes all of `data`; returns when it is stable.
    ///
    /// # Errors
    /// That of librbd.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }

    /// Fills `data`.
    ///
    /// # Errors
    /// That of librbd.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, data)
    }
}
