//! An image with nothing of fjord between the caller and librbd: what benchmarks compare with.
//!
//! Owns the image. A call ends when the cluster has acknowledged it; nothing is queued, counted, or locked.

use std::sync::Arc;

use fjord_block::OpenError;

use crate::image::Image;
use crate::name::RbdName;
use crate::pool::Pool;

/// An open image.
pub struct RawImage(Image);

impl std::fmt::Debug for RawImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    pub fn size_bytes(&self) -> std::io::Result<u64> {
        self.0.size_bytes().map_err(|code| std::io::Error::from_raw_os_error(-code))
    }

    /// Writes all of `data`; returns when it is stable.
    ///
    /// # Errors
    /// That of librbd.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let (rbd, handle) = self.0.raw();
        // SAFETY: the image is open, and the buffer lives until the call returns.
        let code = unsafe { (rbd.rbd_write)(handle, offset, data.len(), data.as_ptr().cast()) };
        done(code, data.len())
    }

    /// Fills `data`.
    ///
    /// # Errors
    /// That of librbd.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> std::io::Result<()> {
        let (rbd, handle) = self.0.raw();
        // SAFETY: as above.
        let code = unsafe { (rbd.rbd_read)(handle, offset, data.len(), data.as_mut_ptr().cast()) };
        done(code, data.len())
    }
}

/// What librbd returned for a request of `len` bytes.
fn done(code: isize, len: usize) -> std::io::Result<()> {
    match usize::try_from(code) {
        Ok(count) if count == len => Ok(()),
        Ok(_) => Err(std::io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(std::io::Error::from_raw_os_error(code.unsigned_abs() as i32)),
    }
}
