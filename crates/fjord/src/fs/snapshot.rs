//! Snapshots: a copy of the image in the state that a crash would leave, then recovered.
//!
//! Owns what the engine adds to [`Device::snapshot_to`]: everything is written and committed first,
//! so that the copy has it and its log is short; and the copy is recovered. Invariant: the copy of
//! an image that needs neither is not written to.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use fjord_block::{Device, FileOptions, SnapshotOptions, SnapshotReport};
use fjord_format::geometry::Geometry;

use crate::error::{Error, Result};
use crate::fs::mmp::Mmp;
use crate::fs::mount::Purpose;
use crate::fs::{FsInner, mount, recover};
use crate::image_name::ImageName;
use crate::options::MountOptions;

impl FsInner {
    /// See [`crate::Fs::snapshot_to`].
    pub(crate) fn snapshot_to(
        self: &Arc<Self>,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport> {
        if !self.options.read_only && !self.has_log() {
            return Err(Error::Usage(
                "a snapshot of an image without a journal is not supported while it is mounted for \
                 writing; unmount it, or mount it read-only, and try again"
                    .into(),
            ));
        }
        self.sync()?;
        Ok(self.device.snapshot_to(out, options)?)
    }
}

/// See [`crate::snapshot::copy_image`].
pub(crate) fn copy_image(
    image: &Path,
    out: &File,
    options: &SnapshotOptions<'_>,
) -> Result<SnapshotReport> {
    let device = open(image, true)?;
    let raw = mount::read_torn_superblock(&*device, &recovered())?;
    Mmp::check_unused(&device, &raw, &Geometry::from_superblock(&raw)?)?;
    Ok(device.snapshot_to(out, options)?)
}

/// See [`crate::snapshot::settle`].
pub(crate) fn settle(copy: &Path) -> Result<()> {
    let device = open(copy, false)?;
    let raw = mount::read_torn_superblock(&*device, &recovered())?;
    Mmp::clear(&device, &raw, &Geometry::from_superblock(&raw)?)?;
    recover::on_device(&device, &recovered(), Purpose::RecoveryOfCopy).map(drop)
}

fn recovered() -> MountOptions {
    MountOptions { read_only: true, recover_before_read_only: true, ..MountOptions::default() }
}

fn open(path: &Path, read_only: bool) -> Result<Arc<dyn Device>> {
    // The holes of a log that nobody is about to use stay holes.
    let options = FileOptions { read_only, takes_room: false, ..FileOptions::default() };
    ImageName::parse(path).open(&options, false)
}
