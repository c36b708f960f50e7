//! Where a new image is built: in a temporary file in the same directory, in place, or on a cluster.
//!
//! Invariants: a regular file that contains data is unchanged until the new image is complete and
//! durable. A failed build leaves no file; nor does a killed one, if the file system supports
//! O_TMPFILE. The old image is locked meanwhile.

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
    sync::Arc,
};

use fjord::{Error, ImageName};
use fjord_block::{Device, FileDevice, FileOptions};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::{
    failure::{self, Context, Failure, Result},
    image, output,
};

/// Linux's limit of symbolic links in a path.
const LINKS_MAX: u32 = 40;

/// How the path of the image is replaced.
pub(super) struct Target {
    /// The path, with symbolic links resolved.
    path: PathBuf,
    place: Place,
}

enum Place {
    /// Build in place: a block device, a part of a file, or an empty file.
    Here(FileDevice),
    /// Build in place: a file with data, in a directory where no file can be created.
    Over(FileDevice, fs::Metadata),
    /// Build a new file, which gets the path at the end.
    NewFile { new: NewFile, old: Option<Old> },
    /// Build on a cluster: in the image that there is, or in a new one.
    Remote { name: ImageName, device: Option<Arc<dyn Device>> },
}

/// The old image, locked.
struct Old {
    _lock: FileDevice,
    metadata: fs::Metadata,
}

/// A file that is unnamed or has a temporary name.
struct NewFile {
    file: OwnedFd,
    dir: PathBuf,
    /// Its temporary name, if unnamed files are not supported. Removed unless the file is renamed.
    name: Option<PathBuf>,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Drop cannot report errors.
            let _ = fs::remove_file(name);
        }
    }
}

/// An image on a cluster, to be read, if there is one.
pub(super) fn look_at_remote(name: &ImageName) -> Result<Option<Arc<dyn Device>>> {
    open_remote(name, &FileOptions { read_only: true, ..FileOptions::default() })
}

/// An image on a cluster, if there is one.
fn open_remote(name: &ImageName, options: &FileOptions) -> Result<Option<Arc<dyn Device>>> {
    match name.open(options, false) {
        Ok(device) => Ok(Some(device)),
        Err(Error::Open(error)) if error.errno() == libc::ENOENT => Ok(None),
        Err(error) => Err(failure::open_failed(name.path(), error)),
    }
}

fn open_device(path: &Path) -> Result<FileDevice> {
    let open = || ImageName::parse(path).open_file(&FileOptions::default());
    image::patiently(path, open).map_err(|e| failure::open_failed(path, e))
}

/// `image` with symbolic links in the last component resolved; the target may be missing.
fn followed(image: &Path) -> PathBuf {
    let mut path = image.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(target) = fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

impl Target {
    /// Decides how the image is built. `is_blank`: nothing would be lost by overwriting the path.
    ///
    /// # Errors
    /// The image is in use, or cannot be created there.
    pub(super) fn new(image: &Path, is_blank: bool) -> Result<Target> {
        let name = ImageName::parse(image);
        if name.is_remote() {
            let device = open_remote(&name, &FileOptions::default())?;
            return Ok(Target { path: image.to_owned(), place: Place::Remote { name, device } });
        }
        if name.is_part() {
            let device = open_device(image)?;
            return Ok(Target { path: image.to_owned(), place: Place::Here(device) });
        }
        let path = followed(image);
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Failure::from(error).context(image.display())),
        };
        let Some(metadata) = metadata else {
            let new = NewFile::create(&path, 0o666);
            let new = new.context(format_args!("making {}", image.display()))?;
            return Ok(Target { path, place: Place::NewFile { new, old: None } });
        };
        let device = open_device(&path)?;
        if metadata.file_type().is_block_device() || is_blank {
            return Ok(Target { path, place: Place::Here(device) });
        }
        match NewFile::create(&path, 0o600) {
            Ok(new) => {
                let old = Some(Old { _lock: device, metadata });
                Ok(Target { path, place: Place::NewFile { new, old } })
            }
            Err(error) => {
                output::complain(format_args!(
                    "no file can be created in the directory of {} ({error}): the image is built \
                     in place, and the old contents are lost even if that fails",
                    image.display()
                ));
                Ok(Target { path, place: Place::Over(device, metadata) })
            }
        }
    }

    /// Size in bytes of a block device or a part of a file; it is fixed.
    pub(super) fn device_bytes(&self) -> Option<u64> {
        match &self.place {
            Place::Here(device) if device.has_fixed_size() => Some(device.size_bytes()),
            _ => None,
        }
    }

    /// Default size of the image in bytes: that of a device or of an empty file with a length;
    /// without contents also that of the old image.
    pub(super) fn usual_bytes(&self, has_contents: bool) -> Option<u64> {
        let bytes = match &self.place {
            Place::Here(device) => device.size_bytes(),
            Place::Over(_, metadata) if !has_contents => metadata.len(),
            Place::NewFile { old: Some(old), .. } if !has_contents => old.metadata.len(),
            Place::Remote { device: Some(device), .. } => device.size_bytes(),
            Place::Over(..) | Place::NewFile { .. } | Place::Remote { .. } => 0,
        };
        Some(bytes).filter(|bytes| *bytes > 0)
    }

    /// Builds the image with `build` and gives it the path. `size_bytes` is its size.
    ///
    /// # Errors
    /// Those of `build`, and of the directory. The path is then unchanged, except for a block
    /// device or a part of a file.
    pub(super) fn build<T>(
        self,
        size_bytes: Option<u64>,
        build: impl FnOnce(Arc<dyn Device>) -> Result<T>,
    ) -> Result<T> {
        match self.place {
            Place::Over(device, _) => build(Arc::new(device)),
            Place::Here(device) if device.has_fixed_size() => build(Arc::new(device)),
            Place::Here(device) => {
                let size_before = device.size_bytes();
                build(Arc::new(device)).inspect_err(|_| blank(&self.path, size_before))
            }
            Place::Remote { device: Some(device), .. } => {
                let other = size_bytes.filter(|bytes| *bytes != device.size_bytes());
                if let Some(bytes) = other {
                    device.set_size(bytes).map_err(io::Error::from).context(self.path.display())?;
                }
                build(device)
            }
            Place::Remote { name, device: None } => build_remote(&name, size_bytes, build),
            Place::NewFile { mut new, old } => {
                if let Some(size_bytes) = size_bytes {
                    // The device caches its size.
                    rustix::fs::ftruncate(&new.file, size_bytes).map_err(io::Error::from)?;
                }
                let built = build(Arc::new(open_device(&new.path())?))?;
                new.take(&self.path, old).context(self.path.display())?;
                Ok(built)
            }
        }
    }
}

/// Makes an image on a cluster and builds in it.
fn build_remote<T>(
    name: &ImageName,
    size_bytes: Option<u64>,
    build: impl FnOnce(Arc<dyn Device>) -> Result<T>,
) -> Result<T> {
    let failed = |error| failure::open_failed(name.path(), error);
    let Some((remote, url)) = name.remote().map_err(failed)? else {
        return Err(Failure::usage(format!("{}: not on a cluster", name.path().display())));
    };
    let failed_there = |error| failed(Error::Open(Arc::new(error)));
    remote.create(url, size_bytes.unwrap_or(0)).map_err(failed_there)?;
    let opened = name.open(&FileOptions::default(), false).map_err(failed);
    opened.and_then(build).inspect_err(|_| {
        if let Err(error) = remote.remove(url) {
            output::complain(format_args!("{url} contains an incomplete image: {error}"));
        }
    })
}

/// Empties a file again that was empty before a failed build.
fn blank(path: &Path, size_bytes: u64) {
    let emptied = File::options().write(true).open(path).and_then(|file| {
        file.set_len(0)?;
        file.set_len(size_bytes)
    });
    if let Err(error) = emptied {
        output::complain(format_args!("{} contains an incomplete image: {error}", path.display()));
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
            // Not supported here; kernels that do not know the flag say EISDIR.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let name = beside(path, &dir);
        let file = rustix::fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
        Ok(NewFile { file, dir, name: Some(name) })
    }

    /// A path by which this process can open it.
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
            // chown needs privilege.
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

/// A name in the directory that no other process uses.
fn beside(path: &Path, dir: &Path) -> PathBuf {
    let mut name = b".".to_vec();
    let own = path.file_name().unwrap_or_default().as_bytes();
    // NAME_MAX is 255 bytes.
    name.extend_from_slice(&own[..own.len().min(200)]);
    name.extend_from_slice(format!(".fjord-{}", std::process::id()).as_bytes());
    dir.join(std::ffi::OsStr::from_bytes(&name))
}
