//! Making an image in a file.

use std::fs::File;
use std::path::{Path, PathBuf};

use fjord_block::{FileDevice, FileOptions};
use fjord_mkfs::{MkfsOptions, Report, format};

/// Makes an image with fjord.
pub(crate) fn make(dir: &Path, name: &str, options: &MkfsOptions) -> (PathBuf, Report) {
    let path = dir.join(name);
    File::create(&path).expect("the image file can be made");
    let device = FileDevice::open(&path, &FileOptions::default()).expect("the image opens");
    let report = format(&device, options).unwrap_or_else(|e| panic!("{name}: {e}"));
    (path, report)
}
