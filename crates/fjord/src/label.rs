//! The label of an image (`s_volume_name`).

use rustix::io::Errno;

use crate::error::Result;
use crate::vfs::Fs;

/// Longest label in bytes.
pub const LABEL_BYTES_MAX: usize = 16;

impl Fs {
    /// The label, without the zeros that fill its field; empty if there is none.
    pub fn label(&self) -> Vec<u8> {
        self.superblock().volume_name().to_vec()
    }

    /// Sets the label, durably.
    ///
    /// # Errors
    /// `EINVAL` for one of more than [`LABEL_BYTES_MAX`] bytes, or with a zero byte; `EROFS`; journal and
    /// I/O errors.
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        let fs = &self.0;
        fs.check_writable()?;
        if label.len() > LABEL_BYTES_MAX || label.contains(&0) {
            return Err(Errno::INVAL.into());
        }
        let mut field = [0; LABEL_BYTES_MAX];
        field[..label.len()].copy_from_slice(label);
        if !fs.has_log() {
            return fs.write_superblock_now(|raw| raw.s_volume_name = field);
        }
        let handle = fs.start(1)?;
        fs.change_superblock(&handle, |raw| raw.s_volume_name = field)?;
        handle.stop();
        fs.commit()
    }
}
