//! Copies of images as of one moment: of an open one by [`Fs::snapshot_to`], of an unused one by
//! [`copy_image`]. [`settle`] makes either an ordinary clean image.
//!
//! ```no_run
//! use std::fs::File;
//! use fjord::snapshot::{self, SnapshotOptions};
//! use fjord::{Fs, MountOptions};
//!
//! let fs = Fs::open("disk.img", &MountOptions::default())?;
//! // ... the file system is in use, by other threads too ...
//! let copy = File::create_new("copy.img")?;
//! let report = fs.snapshot_to(&copy, &SnapshotOptions::default())?;
//! snapshot::settle("copy.img")?;
//! copy.sync_all()?;
//! println!("writes paused for {:?}", report.pause);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Fs::snapshot_to`]: crate::Fs::snapshot_to

use std::fs::File;
use std::path::Path;

pub use fjord_block::{Reflink, SnapshotError, SnapshotOptions, SnapshotReport};

use crate::error::Result;

/// Copies an image that is not mounted into `out`, an empty regular file open for writing. It is
/// locked meanwhile.
///
/// # Errors
/// `Open`, also when it is in use; `Usage` if it is not an ext2, ext3 or ext4 image, or if its MMP
/// block names a user; `Snapshot`. The contents of `out` are then undefined.
pub fn copy_image(
    image: impl AsRef<Path>,
    out: &File,
    options: &SnapshotOptions<'_>,
) -> Result<SnapshotReport> {
    crate::fs::snapshot::copy_image(image.as_ref(), out, options)
}

/// Makes a copy an ordinary image: recovers it, and clears its MMP block. A copy that needs neither
/// is not changed. UUID and label are those of the original.
///
/// # Errors
/// As [`crate::Fs::open`].
pub fn settle(copy: impl AsRef<Path>) -> Result<()> {
    crate::fs::snapshot::settle(copy.as_ref())
}
