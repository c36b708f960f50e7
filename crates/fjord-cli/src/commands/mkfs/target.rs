//! Where a new image is built: beside the file that it is to replace, or in place.
//!
//! Invariants: a regular file that holds something stays as it is, byte for byte, until the new
//! image is complete and durable; one that fails leaves nothing behind, and so does one that is
//! killed, where the file system has unnamed files. Meanwhile the old image is locked.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
};

use fjord_block::{Device, FileDevice, FileOptions};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::{
    failure::{self, Context, Failure, Result},
    image, output,
};

/// As many symbolic links as Linux follows.
const LINKS_MAX: u32 = 40;

/// What is to become of the image's path.
pub(super) struct Target {
    /// The path, links followed.
    path: PathBuf,
    place: Place,
}

enum Place {
    /// A block device, or a blank file.
    Here(FileDevice),
    /// A file that holds something, in a directory where no other can be made.
    Over(FileDevice, fs::Metadata),
    /// A new file, which takes the path at the end.
    Beside { new: NewFile, old: Option<Old> },
}

/// The image that is to be replaced, locked.
struct Old {
    _lock: FileDevice,
    metadata: fs::Metadata,
}

/// A file that has no name yet, or one of its own.
struct NewFile {
    file: OwnedFd,
    dir: PathBuf,
    /// Its name, where unnamed files are not supported. Removed unless it is renamed.
    name: Option<PathBuf>,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // There is nobody to tell, and nothing else to do.
            let _ = fs::remove_file(name);
        }
    }
}

fn open_device(path: &Path) -> Result<FileDevice> {
    let open = || {
        FileDevice::open(path, &FileOptions::default())
            .map_err(|e| fjord::Error::Open(std::sync::Arc::new(e)))
    };
    image::patiently(path, open).map_err(|e| failure::open_failed(path, e))
}

/// The path that symbolic links at the end of `image` lead to, if there is anything or not.
fn followed(image: &Path) -> PathBuf {
    let mut path = image.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(target) = fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

impl Target {
    /// Finds out how the image is to be built. `is_blank` says that the path, if there is anything,
    /// holds nothing that would be lost.
    ///
    /// # Errors
    /// The image is in use, or cannot be made there.
    pub(super) fn new(image: &Path, is_blank: bool) -> Result<Target> {
        let path = followed(image);
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Failure::from(error).context(image.display())),
        };
        let Some(metadata) = metadata else {
            let new = NewFile::create(&path, 0o666);
            let new = new.context(format_args!("making {}", image.display()))?;
            return Ok(Target { path, place: Place::Beside { new, old: None } });
        };
        let device = open_device(&path)?;
        if metadata.file_type().is_block_device() || is_blank {
            return Ok(Target { path, place: Place::Here(device) });
        }
        match NewFile::create(&path, 0o600) {
            Ok(new) => {
                let old = Some(Old { _lock: device, metadata });
                Ok(Target { path, place: Place::Beside { new, old } })
            }
            Err(error) => {
                output::complain(format_args!(
                    "no file can be made beside {} ({error}): the image is built in its place, and \
                     what it holds is lost even if that fails",
                    image.display()
                ));
                Ok(Target { path, place: Place::Over(device, metadata) })
            }
        }
    }

    /// Bytes of a block device, which is as large as it is.
    pub(super) fn device_bytes(&self) -> Option<u64> {
        match &self.place {
            Place::Here(device) if device.is_block_device() => Some(device.size_bytes()),
            _ => None,
        }
    }

    /// The size in bytes that an image has when nobody says: that of a device, or of a blank file
    /// that was made as large as this; without contents also that of the image before.
    pub(super) fn usual_bytes(&self, has_contents: bool) -> Option<u64> {
        let bytes = match &self.place {
            Place::Here(device) => device.size_bytes(),
            Place::Over(_, metadata) if !has_contents => metadata.len(),
            Place::Beside { old: Some(old), .. } if !has_contents => old.metadata.len(),
            Place::Over(..) | Place::Beside { .. } => 0,
        };
        Some(bytes).filter(|bytes| *bytes > 0)
    }

    /// Builds the image by `build` and puts it at the path. `size_bytes` is what it will have.
    ///
    /// # Errors
    /// What `build` gives; the path then holds what it held before, but for a block device. Failures
    /// of the directory.
    pub(super) fn build<T>(
        self,
        size_bytes: Option<u64>,
        build: impl FnOnce(FileDevice) -> Result<T>,
    ) -> Result<T> {
        match self.place {
            Place::Over(device, _) => build(device),
            Place::Here(device) if device.is_block_device() => build(device),
            Place::Here(device) => {
                let size_before = device.size_bytes();
                build(device).inspect_err(|_| blank(&self.path, size_before))
            }
            Place::Beside { mut new, old } => {
                if let Some(size_bytes) = size_bytes {
                    // The device has a map of its size.
                    rustix::fs::ftruncate(&new.file, size_bytes).map_err(io::Error::from)?;
                }
                let built = build(open_device(&new.path())?)?;
                new.take(&self.path, old).context(self.path.display())?;
                Ok(built)
            }
        }
    }
}

/// Makes a file that was blank before a failure blank again.
fn blank(path: &Path, size_bytes: u64) {
    let emptied = File::options().write(true).open(path).and_then(|file| {
        file.set_len(0)?;
        file.set_len(size_bytes)
    });
    if let Err(error) = emptied {
        output::complain(format_args!("{} holds a part of an image: {error}", path.display()));
    }
}

impl NewFile {
    /// A file in the directory of `path`.
    fn create(path: &Path, mode: u32) -> io::Result<NewFile> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or(Path::new(".")).to_owned();
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode);
        match rustix::fs::open(&dir, flags | OFlags::TMPFILE, mode) {
            Ok(file) => return Ok(NewFile { file, dir, name: None }),
            // Not supported here; ISDIR is what a kernel says that does not know the flag.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let name = beside(path, &dir);
        let file = rustix::fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
        Ok(NewFile { file, dir, name: Some(name) })
    }

    /// A path that leads to it.
    fn path(&self) -> PathBuf {
        match &self.name {
            Some(name) => name.clone(),
            None => PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd())),
        }
    }

    /// Makes it durable and gives it the name `path`, in place of `old`.
    fn take(&mut self, path: &Path, old: Option<Old>) -> io::Result<()> {
        if let Some(old) = &old {
            let (uid, gid) = (old.metadata.uid(), old.metadata.gid());
            // Another's file cannot be given to its owner without privilege.
            let _ = std::os::unix::fs::fchown(&self.file, Some(uid), Some(gid));
            let mode = Mode::from_raw_mode(old.metadata.permissions().mode() & 0o7777);
            rustix::fs::fchmod(&self.file, mode)?;
        }
        rustix::fs::fsync(&self.file)?;
        match (&self.name, &old) {
            (None, None) => self.link(path)?,
            (None, Some(_)) => {
                let name = beside(path, &self.dir);
                self.link(&name)?;
                self.name = Some(name.clone());
                fs::rename(&name, path)?;
            }
            (Some(name), Some(_)) => fs::rename(name, path)?,
            (Some(name), None) => {
                match rustix::fs::renameat_with(CWD, name, CWD, path, RenameFlags::NOREPLACE) {
                    Err(Errno::INVAL | Errno::NOSYS) => fs::rename(name, path)?,
                    renamed => renamed?,
                }
            }
        }
        self.name = None;
        File::open(&self.dir)?.sync_all()
    }

    fn link(&self, path: &Path) -> io::Result<()> {
        let from = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::linkat(CWD, from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }
}

/// A name in the directory that no other process takes.
fn beside(path: &Path, dir: &Path) -> PathBuf {
    let mut name = b".".to_vec();
    let own = path.file_name().unwrap_or_default().as_bytes();
    // Names have 255 bytes at most.
    name.extend_from_slice(&own[..own.len().min(200)]);
    name.extend_from_slice(format!(".fjord-{}", std::process::id()).as_bytes());
    dir.join(std::ffi::OsStr::from_bytes(&name))
}
