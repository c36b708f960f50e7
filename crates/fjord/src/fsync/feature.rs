//! The image's feature `fast_commit`, which the policy of the name needs.

use fjord_format::features::Compat;

use crate::error::{Error, Result};
use crate::vfs::Fs;

impl Fs {
    /// Whether the image has the feature `fast_commit`.
    pub fn has_fast_commit(&self) -> bool {
        self.0.sb.snapshot().features().compat.contains(Compat::FAST_COMMIT)
    }

    /// Sets or clears the feature `fast_commit`; later mounts have a fast-commit area or not.
    /// The area takes its blocks from the end of the log.
    ///
    /// # Errors
    /// `Usage` for an image without a journal, or with one too short for an area; I/O errors.
    pub fn set_fast_commit(&self, on: bool) -> Result<()> {
        let fs = &self.0;
        fs.check_writable()?;
        if !fs.has_log() {
            return Err(Error::Usage("the image has no journal, so it has no fast commits".into()));
        }
        if on == self.has_fast_commit() {
            return Ok(());
        }
        if on && fs.journal().size_fast_commit_area()? == 0 {
            return Err(Error::Usage(
                "the journal is too short for a fast-commit area; make a longer one with tune2fs \
                 -O ^has_journal and -J size=32"
                    .into(),
            ));
        }
        let handle = fs.start(1)?;
        fs.change_superblock(&handle, |raw| {
            let mut features = raw.features();
            features.compat.set(Compat::FAST_COMMIT, on);
            raw.set_features(&features);
        })?;
        handle.stop();
        fs.commit()
    }
}
