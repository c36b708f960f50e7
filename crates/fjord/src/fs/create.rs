//! New images: format and mount.
//!
//! Owns the image file of [`crate::Fs::create`]. Invariant: an existing file with contents is not
//! touched, and a file created here is removed if formatting fails.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use fjord_block::{Device, OpenError};
use fjord_mkfs::MkfsOptions;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::fs::{FsInner, mount, room};
use crate::image_name::ImageName;
use crate::options::MountOptions;

/// Carries out [`crate::Fs::create`].
pub(crate) fn at_path(
    path: &Path,
    image: &MkfsOptions,
    options: &MountOptions,
) -> Result<Arc<FsInner>> {
    let name = ImageName::parse(path);
    let Some(size_bytes) = image.size_bytes else {
        let path = path.display();
        let message =
            format!("no size is given for the new image {path}; set MkfsOptions::size_bytes");
        return Err(Error::Usage(message));
    };
    if let Some((remote, url)) = name.remote()? {
        let failed = |error| Error::Open(Arc::new(error));
        remote.create(url, size_bytes).map_err(failed)?;
        let made = mount::open_image(path, options, false)
            .and_then(|device| on_device(device, image, options));
        if made.is_err() {
            // The original error is returned.
            let _ = remote.remove(url);
        }
        return made;
    }
    if name.is_part() {
        let path = path.display();
        let message =
            format!("{path} is a part of a file, which cannot be new; format it with `fjord mkfs`");
        return Err(Error::Usage(message));
    }
    let is_new = match File::create_new(path) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_empty_file(path) => false,
        Err(error) => return Err(refused(path, error)),
    };
    let made = fill(path, image, options);
    if made.is_err() && is_new {
        // The original error is returned.
        let _ = fs::remove_file(path);
    }
    made
}

fn fill(path: &Path, image: &MkfsOptions, options: &MountOptions) -> Result<Arc<FsInner>> {
    let device = mount::open_image(path, options, false)?;
    if device.size_bytes() != 0 {
        // Another process has filled it meanwhile; it is locked now.
        return Err(refused(path, Errno::EXIST.into()));
    }
    let fs = on_device(device, image, options).map_err(|error| room::name_full(error, path))?;
    // The durability of an fsync requires that the image's name is durable.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|error| refused(parent, error))?;
    Ok(fs)
}

fn is_empty_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
}

fn refused(path: &Path, source: io::Error) -> Error {
    Error::Open(Arc::new(OpenError::Os { path: path.to_owned(), source }))
}

/// Carries out [`crate::Fs::create_on`].
pub(crate) fn on_device(
    device: Arc<dyn Device>,
    image: &MkfsOptions,
    options: &MountOptions,
) -> Result<Arc<FsInner>> {
    fjord_mkfs::format(&*device, image)?;
    mount::open_device(device, options)
}
