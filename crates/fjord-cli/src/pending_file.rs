//! An output file that appears under its name only when it is complete and durable.
//!
//! Owns the file until then. It is unnamed where the file system supports O_TMPFILE, so nothing is
//! left of it however the process ends. Elsewhere it has a hidden name in the same directory, which
//! is removed on drop and on signals, but not on SIGKILL. Invariant: a file that exists under the
//! name stays complete until the new one replaces it.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use fjord_block::lock::{Mutex, Rank};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::{
    failure::{Context, Failure, Result},
    signals,
};

/// A file that does not have its final name yet.
pub(crate) struct PendingFile {
    file: File,
    /// The directory, for the name and to make it durable.
    dir: File,
    name: OsString,
    /// For messages.
    place: PathBuf,
    replaces: bool,
    /// Its hidden name, where it has one.
    hidden: Hidden,
}

/// A name to remove; shared with the thread that waits for signals.
#[derive(Clone)]
struct Hidden(Arc<Mutex<Option<PathBuf>>>);

impl Default for Hidden {
    fn default() -> Hidden {
        Hidden(Arc::new(Mutex::new(Rank::HiddenName, None)))
    }
}

impl Hidden {
    fn set(&self, path: Option<PathBuf>) -> Option<PathBuf> {
        std::mem::replace(&mut self.0.lock(), path)
    }

    fn remove(&self) {
        if let Some(path) = self.set(None) {
            // At worst a hidden file is left; nothing depends on it.
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        self.hidden.remove();
    }
}

impl PendingFile {
    /// Creates a file, mode 0600, that will be named `place`. With `replaces` it may replace a file
    /// of that name. Call it before any thread is started.
    ///
    /// # Errors
    /// The name exists and must not be replaced, or is not a regular file; no file can be created
    /// in its directory.
    pub(crate) fn create(place: &Path, replaces: bool) -> Result<PendingFile> {
        let place = resolve(place, replaces)?;
        let shown = place.display();
        let absolute = std::path::absolute(&place)?;
        let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Err(Failure::usage(format!("{shown}: give the name of a file")));
        };
        let dir = File::open(parent).context(parent.display())?;
        let name = name.to_owned();
        let hidden = Hidden::default();
        let file = match nameless(&dir) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => hide(parent, &hidden)?,
            other => File::from(other.map_err(io::Error::from).context(parent.display())?),
        };
        Ok(PendingFile { file, dir, name, place, replaces, hidden })
    }

    /// The file, open for reading and writing.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// A path by which this process can open the file again.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Sets the permission bits and gives the file its name, durably.
    ///
    /// # Errors
    /// It cannot be made durable; a file that must not be replaced has got the name meanwhile.
    pub(crate) fn take_place(self, mode: u32) -> Result<()> {
        let doing = self.place.display();
        self.file.set_permissions(Permissions::from_mode(mode)).context(&doing)?;
        self.file.sync_all().context(&doing)?;
        self.give_name().map_err(|e| match e {
            Errno::EXIST => exists(&self.place),
            e => Failure::from(io::Error::from(e)).context(&doing),
        })?;
        self.dir.sync_all().context(&doing)
    }

    fn give_name(&self) -> rustix::io::Result<()> {
        if self.hidden.0.lock().is_none() {
            let path = self.path();
            let link =
                |name| rustix::fs::linkat(CWD, &path, &self.dir, name, AtFlags::SYMLINK_FOLLOW);
            if !self.replaces {
                return link(self.name.as_os_str());
            }
            let hidden = random_name().map_err(|_| Errno::IO)?;
            link(hidden.as_os_str())?;
            return rustix::fs::renameat(&self.dir, &hidden, &self.dir, &self.name).inspect_err(
                |_| {
                    let _ = rustix::fs::unlinkat(&self.dir, &hidden, AtFlags::empty());
                },
            );
        }
        let Some(hidden) = self.hidden.set(None) else { return Err(Errno::NOENT) };
        let flags = if self.replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        let moved = match rustix::fs::renameat_with(CWD, &hidden, &self.dir, &self.name, flags) {
            // A file system without the flag; link(2) does not replace a file either.
            Err(Errno::INVAL) if !self.replaces => {
                rustix::fs::linkat(CWD, &hidden, &self.dir, &self.name, AtFlags::empty())
                    .and_then(|()| rustix::fs::unlink(&hidden))
            }
            other => other,
        };
        if moved.is_err() {
            self.hidden.set(Some(hidden));
        }
        moved
    }
}

/// The path to replace; a symbolic link to a file is followed.
fn resolve(place: &Path, replaces: bool) -> Result<PathBuf> {
    let found = match fs::symlink_metadata(place) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(place.to_owned()),
        other => other.context(place.display())?,
    };
    if !replaces && !found.is_dir() {
        return Err(exists(place));
    }
    let target = match found.is_symlink() {
        // A dangling link is itself replaced.
        true => fs::canonicalize(place).unwrap_or_else(|_| place.to_owned()),
        false => place.to_owned(),
    };
    match fs::metadata(&target) {
        Ok(found) if found.is_dir() => Err(Failure::usage(format!(
            "{} is a directory; give the name of a file in it",
            place.display()
        ))),
        Ok(found) if !found.is_file() => Err(Failure::usage(format!(
            "{} is not a regular file; give the name of a file",
            place.display()
        ))),
        _ => Ok(target),
    }
}

fn exists(place: &Path) -> Failure {
    Failure::new(format!(
        "{} already exists; give another name, or --force to replace it",
        place.display()
    ))
}

fn nameless(dir: &File) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::openat(dir, ".", flags, Mode::RUSR | Mode::WUSR)
}

/// A file with a hidden name in `parent`.
fn hide(parent: &Path, hidden: &Hidden) -> Result<File> {
    let path = parent.join(random_name()?);
    let for_signals = hidden.clone();
    signals::before_end(move || for_signals.remove())?;
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .context(parent.display())?;
    hidden.set(Some(path));
    file.set_permissions(Permissions::from_mode(0o600)).context(parent.display())?;
    Ok(file)
}

fn random_name() -> io::Result<OsString> {
    let mut random = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(format!(".fjord-{:016x}", u64::from_ne_bytes(random)).into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn names(dir: &Path) -> Vec<OsString> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_takes_its_place_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("place");
        let new = PendingFile::create(&place, false).unwrap();
        new.file().write_all(b"new").unwrap();
        assert_eq!(names(dir.path()).len(), 0, "a name before it is whole");
        fs::write(&place, "other").unwrap();
        assert!(new.take_place(0o640).unwrap_err().message.contains("--force"));
        assert!(PendingFile::create(&place, false).is_err_and(|e| e.message.contains("--force")));
        drop(PendingFile::create(&place, true).unwrap());
        assert_eq!(fs::read(&place).unwrap(), b"other");
        // By a link, which stays one.
        let link = dir.path().join("link");
        symlink("place", &link).unwrap();
        let new = PendingFile::create(&link, true).unwrap();
        new.file().write_all(b"new").unwrap();
        assert_eq!(fs::read(new.path()).unwrap(), b"new");
        new.take_place(0o640).unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"new");
        assert_eq!(fs::metadata(&place).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(dir.path()), ["link", "place"]);
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for place in [dir.path(), Path::new("/dev/null"), Path::new("/")] {
            let failed = PendingFile::create(place, true).map(drop).unwrap_err();
            assert_eq!(failed.code, crate::failure::EXIT_USAGE, "{failed}");
        }
        assert!(PendingFile::create(&dir.path().join("none/such"), false).is_err());
    }
}
